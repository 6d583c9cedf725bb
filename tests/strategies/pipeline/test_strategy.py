import os
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchmetrics.aggregation import SumMetric

from lightning_accel.models import Experts, MoEClassifier, MoELanguageModel
from lightning_accel.strategies import AccelDDPStrategy, FullyShardedStrategy, PipelineStrategy
from lightning_accel.strategies.pipeline import chain as pipeline_chain
from lightning_accel.strategies.pipeline import engine as pipeline_engine
from tests.planted import sleep, use_clock
from tests.ranks import run_ranks
from tests.tolerance import ADAM_EPS

ADAMW = partial(torch.optim.AdamW, lr=0.01, eps=ADAM_EPS)


class Plain(L.LightningModule):
    """Knows nothing of pipelines."""

    def __init__(self):
        super().__init__()
        widths = [6, 10, 7, 9, 3]
        layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths)]
        self.net = nn.Sequential(*layers)
        self.count = SumMetric()
        self.seen = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, target = batch
        loss = F.cross_entropy(self(x), target)
        self.log("train/loss", loss)
        self.log("train/rows", float(len(x)), reduce_fx="sum")
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append((float(outputs["loss"]), float(self.trainer.callback_metrics["train/loss"])))

    def validation_step(self, batch, batch_idx):
        x, target = batch
        scores = self(x)
        self.count.update((scores.argmax(dim=1) == target).sum())
        self.log("val/correct", self.count)
        self.log("val/loss", F.cross_entropy(scores, target))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return ADAMW(self.parameters())


def loader(num_rows=56, batch_size=8):
    draw = torch.Generator().manual_seed(7)
    data = TensorDataset(torch.randn(num_rows, 6, generator=draw), torch.randint(3, (num_rows,), generator=draw))
    return DataLoader(data, batch_size)


def make_trainer(folder, strategy="auto", **options):
    several = strategy != "auto"
    return L.Trainer(
        **{
            "accelerator": "cpu",
            "strategy": strategy,
            "devices": "auto" if not several else options.get("devices") or torch.distributed.get_world_size(),
            "max_epochs": 1,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "default_root_dir": folder,
            "num_sanity_val_steps": 1,
            "use_distributed_sampler": False,
            "log_every_n_steps": 1,
        }
        | options
    )


def trained(folder, strategy="auto", module=None, data=None, checkpoint=None, **options):
    """Weights after a fit, what was logged, and the checkpoint's path."""
    torch.manual_seed(3)
    module = module or Plain()
    trainer = make_trainer(folder, strategy, **options)
    data = data or loader()
    trainer.fit(module, data, data, ckpt_path=checkpoint)
    kind = "one" if strategy == "auto" else "pipeline"
    trainer.save_checkpoint(f"{folder}/{kind}.ckpt")
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"logged": logged, "seen": getattr(module, "seen", None)}


def load(folder, kind):
    return torch.load(f"{folder}/{kind}.ckpt", weights_only=True)


def check_plain(rank, folder, strategy, options):
    return trained(folder, PipelineStrategy(**strategy), **options)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "clip"), [(1, None), (4, 0.05)], ids=["gpipe", "1f1b"])
def test_plain_module_equals_one_process(tmp_path, number, clip):
    one = trained(tmp_path, gradient_clip_val=clip)
    for result in run_ranks(check_plain, tmp_path, {"num_micro_batches": number}, {"gradient_clip_val": clip}):
        assert result["logged"] == pytest.approx(one["logged"], abs=1e-5)
        torch.testing.assert_close(result["seen"], one["seen"], rtol=0, atol=1e-5)
    whole, pipeline = load(tmp_path, "one"), load(tmp_path, "pipeline")
    torch.testing.assert_close(pipeline["state_dict"], whole["state_dict"], rtol=0, atol=1e-5)
    assert list(pipeline["state_dict"]) == list(whole["state_dict"])
    torch.testing.assert_close(pipeline["optimizer_states"], whole["optimizer_states"], rtol=0, atol=1e-5)


EXPERTS = Experts(4, hidden_dim=8, balance_weight=0.5)
SIZES = {"dim": 8, "experts": EXPERTS}
SMALL = {**SIZES, "num_layers": 2, "attention": {"num_heads": 2}, "optimizer": ADAMW}


def language_model(**options):
    return MoELanguageModel(vocab_size=11, **SMALL | options)


def tokens(num_rows=40, batch_size=8):
    draw = torch.Generator().manual_seed(7)
    return DataLoader(torch.randint(11, (num_rows, 6), generator=draw), batch_size)


def check_language_model(rank, folder, strategy, options):
    torch.manual_seed(3)
    return trained(folder, PipelineStrategy(**strategy), language_model(), tokens(), **options)


@pytest.mark.slow
def test_language_model_equals_one_process(tmp_path):
    torch.manual_seed(3)
    one = trained(tmp_path, module=language_model(), data=tokens(), gradient_clip_val=0.5)
    for result in run_ranks(check_language_model, tmp_path, {}, {"gradient_clip_val": 0.5}):
        assert result["logged"] == pytest.approx(one["logged"], abs=1e-4)
    whole, pipeline = load(tmp_path, "one"), load(tmp_path, "pipeline")
    torch.testing.assert_close(pipeline["state_dict"], whole["state_dict"], rtol=0, atol=1e-5)


def check_schedule_was_used(rank, folder):
    runs = []
    run = pipeline_engine._Plan.run
    pipeline_engine._Plan.run = lambda self, job: (runs.append(self.num), run(self, job))
    try:
        trained(folder, PipelineStrategy(), data=loader(60, 8), limit_val_batches=0, max_epochs=3)
    finally:
        pipeline_engine._Plan.run = run
    return runs


@pytest.mark.slow
def test_batches_of_known_shape_go_by_the_schedule(tmp_path):
    """Of one shape the first tells what travels; the very first tells what is needed later."""
    assert run_ranks(check_schedule_was_used, tmp_path) == [[4] * (5 + 8 + 8)] * 2


def check_classifier(rank, folder, strategy, options):
    return trained(folder, PipelineStrategy(**strategy), classifier(), **options)


def classifier():
    torch.manual_seed(3)
    return MoEClassifier(6, 3, **SIZES, optimizer=ADAMW)


@pytest.mark.slow
@pytest.mark.parametrize(
    "split", [(1, 4), *(pytest.param(one, marks=pytest.mark.slow) for one in ((2, 3), (3, 2)))], ids=str
)
def test_residual_outside_the_layers(tmp_path, split):
    """The encoder's output is used again after the mixture, by code between the layers."""
    one = trained(tmp_path, module=classifier())
    for result in run_ranks(check_classifier, tmp_path, {"split": split}, {}):
        assert result["logged"] == pytest.approx(one["logged"], abs=1e-4)
    whole, pipeline = load(tmp_path, "one"), load(tmp_path, "pipeline")
    torch.testing.assert_close(pipeline["state_dict"], whole["state_dict"], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 3},
        pytest.param({"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}, marks=pytest.mark.slow),
    ],
    ids=["accumulation", "clipping_by_value"],
)
def test_options_of_the_trainer(tmp_path, options):
    one = trained(tmp_path, **options)
    for result in run_ranks(check_plain, tmp_path, {"num_micro_batches": 2}, options):
        assert result["logged"] == pytest.approx(one["logged"], abs=1e-5)
    whole, pipeline = load(tmp_path, "one"), load(tmp_path, "pipeline")
    torch.testing.assert_close(pipeline["state_dict"], whole["state_dict"], rtol=0, atol=1e-5)


def check_ragged(rank, folder, num_rows):
    return trained(folder, PipelineStrategy(), data=loader(num_rows, 8), max_epochs=4)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [30, *(pytest.param(number, marks=pytest.mark.slow) for number in (27, 25))])
def test_ragged_last_batch(tmp_path, num_rows):
    one = trained(tmp_path, data=loader(num_rows, 8), max_epochs=4)
    for result in run_ranks(check_ragged, tmp_path, num_rows):
        torch.testing.assert_close(result["seen"], one["seen"], rtol=0, atol=1e-5)
    whole, pipeline = load(tmp_path, "one"), load(tmp_path, "pipeline")
    torch.testing.assert_close(pipeline["state_dict"], whole["state_dict"], rtol=0, atol=1e-5)


def check_resumed(rank, folder):
    module = Plain()
    result = trained(folder, PipelineStrategy(), module, checkpoint=f"{folder}/first.ckpt", max_epochs=2)
    (optimizer,) = module.trainer.optimizers
    assert len(optimizer.state) == sum(not parameter.is_meta for parameter in module.parameters())
    return result


@pytest.mark.slow
@pytest.mark.parametrize("first", ["one", "pipeline"])
def test_checkpoints_pass_between_pipeline_and_one_process(tmp_path, first):
    if first == "one":
        trained(tmp_path)
    else:
        run_ranks(check_plain, tmp_path, {}, {})
    (tmp_path / f"{first}.ckpt").rename(tmp_path / "first.ckpt")
    one = trained(tmp_path, checkpoint=tmp_path / "first.ckpt", max_epochs=2)
    for result in run_ranks(check_resumed, tmp_path):
        torch.testing.assert_close(result["seen"], one["seen"], rtol=0, atol=1e-5)
    whole, pipeline = load(tmp_path, "one"), load(tmp_path, "pipeline")
    torch.testing.assert_close(pipeline["state_dict"], whole["state_dict"], rtol=0, atol=1e-5)
    torch.testing.assert_close(pipeline["optimizer_states"], whole["optimizer_states"], rtol=0, atol=1e-5)
    assert {key: type(value) for key, value in pipeline.items()} == {key: type(value) for key, value in whole.items()}


def check_evaluation(rank, folder):
    module = Plain()
    module.load_state_dict(load(folder, "one")["state_dict"])
    trainer = make_trainer(folder, PipelineStrategy())
    (validated,) = trainer.validate(module, loader(30, 8), verbose=False)
    return validated, trainer.predict(module, loader(30, 8))


@pytest.mark.slow
def test_evaluation_is_that_of_one_process_on_every_rank(tmp_path):
    trained(tmp_path)
    module = Plain()
    module.load_state_dict(load(tmp_path, "one")["state_dict"])
    trainer = make_trainer(tmp_path)
    (validated,) = trainer.validate(module, loader(30, 8), verbose=False)
    predicted = trainer.predict(module, loader(30, 8))
    for theirs, scores in run_ranks(check_evaluation, tmp_path):
        assert theirs == pytest.approx(validated, abs=1e-5)
        torch.testing.assert_close(scores, predicted)


def check_data_parallel(rank, folder, size):
    """Each pipeline takes a share of the rows of each batch."""
    rows = 8 // size
    mine = [row for row in range(56) if row % 8 // rows == rank * size // 4]
    data = DataLoader(Subset(loader().dataset, mine), rows)
    return trained(folder, PipelineStrategy(data_parallel_size=size), data=data, gradient_clip_val=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_four_processes_in_one_pipeline_or_two(tmp_path, size):
    one = trained(tmp_path, gradient_clip_val=0.05)
    for result in run_ranks(check_data_parallel, tmp_path, size, world_size=4):
        assert result["logged"]["val/correct"] == one["logged"]["val/correct"]
    whole, pipeline = load(tmp_path, "one"), load(tmp_path, "pipeline")
    torch.testing.assert_close(pipeline["state_dict"], whole["state_dict"], rtol=0, atol=1e-5)


class Slow(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, x):
        sleep("forward", self.seconds)
        return x * 1.0


class Uneven(L.LightningModule):
    """Most parameters in front, most of the time in one layer, whose stage nothing should follow."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 64), nn.Linear(64, 4), nn.Linear(4, 4), Slow(0.1), nn.Linear(4, 4), Slow(0.02)
        )
        self.example_input_array = torch.randn(2, 4)

    def pipeline_layers(self):
        return list(self.layers)

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        return self(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def check_costs(rank, folder):
    rows = DataLoader(TensorDataset(torch.randn(4, 4)), batch_size=4)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=PipelineStrategy(2), enable_model_summary=False, **options
    )
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(pipeline_chain, "perf_counter", use_clock(patches).perf_counter)
        trainer.fit(Uneven(), rows)
    chain = trainer.strategy.pipeline.chain
    return [len(list(chain.layers_of(stage))) for stage in range(2)]


def test_stages_take_equal_times_where_the_module_has_an_example(tmp_path):
    assert run_ranks(check_costs, tmp_path) == [[4, 2]] * 2  # by parameters it would be [1, 5]


@pytest.mark.slow
@pytest.mark.weekly
def test_processes_started_by_fork_hand_the_weights_back(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "import torch\n"
        "from lightning_accel.strategies import PipelineStrategy\n"
        "from tests.strategies.pipeline.test_strategy import Plain, loader, make_trainer\n"
        "torch.manual_seed(3)\n"
        "module = Plain()\n"
        "trainer = make_trainer('.', PipelineStrategy(start_method='fork'), devices=2)\n"
        "trainer.fit(module, loader(), loader())\n"
        "torch.save((module.state_dict(), float(trainer.callback_metrics['val/loss'])), 'end.pt')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    subprocess.run([sys.executable, script], check=True, cwd=tmp_path, env=environment, timeout=200)
    one = trained(tmp_path)
    weights, loss = torch.load(tmp_path / "end.pt")
    torch.testing.assert_close(weights, load(tmp_path, "one")["state_dict"], rtol=0, atol=1e-5)
    assert loss == pytest.approx(one["logged"]["val/loss"], abs=1e-5)


def test_processes_may_be_started_in_every_way():
    for strategy in (AccelDDPStrategy, FullyShardedStrategy, PipelineStrategy):
        for way in ("popen", "spawn", "fork", "forkserver"):
            assert strategy(start_method=way)._start_method == way
