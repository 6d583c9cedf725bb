import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_accel.callbacks import WeightedAccumulation
from lightning_accel.strategies import AccelDDPStrategy, PipelineStrategy
from tests.ranks import run_ranks
from tests.strategies.trained import Rows, make, trainer

QUIET = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "enable_checkpointing": False, "use_distributed_sampler": False, "max_epochs": 1,
}  # fmt: skip
LENGTHS = [(7, 2), (1, 30), (0, 4), (11, 3), (2, 2), (5, 1)]  # tokens of each process, in six micro-batches


class Tokens(L.LightningModule):
    """Mean over the tokens of a batch, of which there may be none."""

    def __init__(self, weigh=True, scale=1.0):
        super().__init__()
        torch.manual_seed(3)
        self.network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.weigh, self.scale, self.norms = weigh, scale, []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self.network(x), y, reduction="sum") / max(len(x), 1)
        return {"loss": loss, "weight": len(x) * self.scale} if self.weigh else loss

    def on_before_optimizer_step(self, optimizer):
        norm = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
        self.norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Sharded(Tokens):
    def configure_model(self):
        fully_shard(self.network, mesh=self.device_mesh["data_parallel"])


def micro_batches(rank):
    generator = torch.Generator().manual_seed(4)
    pairs = [[(torch.randn(n, 4, generator=generator), torch.randn(n, 2, generator=generator)) for n in two] for two in LENGTHS]  # fmt: skip # noqa: E501
    return [pair[rank] for pair in pairs]


def large_batches(ranks, per_step):
    parts = [micro_batches(rank) for rank in ranks]
    steps = [range(first, min(first + per_step, len(LENGTHS))) for first in range(0, len(LENGTHS), per_step)]
    return [[torch.cat([part[i][j] for i in step for part in parts]) for j in (0, 1)] for step in steps]


def fit(model, data, *callbacks, **options):
    trainer = L.Trainer(callbacks=list(callbacks), **{**QUIET, **options})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(does not have many workers|GradScaler).*")
        trainer.fit(model, DataLoader(data, batch_size=None))
    return model


def assert_equal(actual, expected, **tolerance):
    state = {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in actual.state_dict().items()}
    torch.testing.assert_close(state, dict(expected.state_dict()), **tolerance)


@pytest.mark.parametrize("scale", [1.0, 1e6, 3e-7])
@pytest.mark.parametrize("per_step", [1, 2, 3, 4])
def test_equals_one_large_batch(per_step, scale):
    options = {"gradient_clip_val": 0.5, "strategy": "auto", "devices": 1}
    expected = fit(Tokens(weigh=False), large_batches([0], per_step), **options)
    callback = WeightedAccumulation()
    actual = fit(Tokens(scale=scale), micro_batches(0), callback, accumulate_grad_batches=per_step, **options)
    # of the last, unfinished step, too: 6 micro-batches by 4
    torch.testing.assert_close(actual.norms, expected.norms, rtol=1e-5, atol=1e-6)
    assert_equal(actual, expected, rtol=1e-5, atol=1e-6)
    assert "training_step" not in vars(actual.trainer.strategy)


def check_processes(rank, strategy, per_step):
    expected = fit(Tokens(weigh=False), large_batches([0, 1], per_step), strategy="auto", devices=1)
    if strategy == "accel_ddp":
        strategy = AccelDDPStrategy()
    module = Sharded if strategy == "fsdp2" else Tokens
    if strategy == "fsdp2":
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    options = {"strategy": strategy, "devices": 2, "accumulate_grad_batches": per_step}
    actual = fit(module(), micro_batches(rank), WeightedAccumulation(), **options)
    torch.testing.assert_close(actual.norms, expected.norms, rtol=1e-5, atol=1e-6)
    assert_equal(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(default=2)
@pytest.mark.parametrize("per_step", [1, 3])
@pytest.mark.parametrize("strategy", ["ddp", "accel_ddp", "fsdp2"])
def test_processes_equal_one_large_batch(strategy, per_step):
    run_ranks(check_processes, strategy, per_step)


def test_with_a_gradient_scaler():
    options = {"strategy": "auto", "devices": 1, "gradient_clip_val": 0.5}
    expected = fit(Tokens(weigh=False), large_batches([0], 3), **options)
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8))
    callback = WeightedAccumulation()
    actual = fit(
        Tokens(scale=1e4), micro_batches(0), callback, accumulate_grad_batches=3, plugins=[precision], **options
    )
    torch.testing.assert_close(actual.norms, expected.norms, rtol=2e-2, atol=0)  # fp16 keeps 11 bits
    assert_equal(actual, expected, rtol=2e-2, atol=2e-3)


def test_step_without_any_weight_has_no_gradient():
    model = fit(Tokens(scale=0), micro_batches(0), WeightedAccumulation(), accumulate_grad_batches=2)
    assert model.norms == [0, 0, 0]


def test_resumed_run_is_bit_equal(tmp_path):
    whole = fit(Tokens(), micro_batches(0), WeightedAccumulation(), max_epochs=2)
    first = fit(Tokens(), micro_batches(0)[:1], callback := WeightedAccumulation(), max_epochs=1)
    first.trainer.save_checkpoint(tmp_path / "one.ckpt")
    assert callback.unit == 8  # of 7
    again = WeightedAccumulation()
    again.load_state_dict(callback.state_dict())
    assert again.unit == 8
    torch.testing.assert_close(
        fit(Tokens(), micro_batches(0), again, max_epochs=2).state_dict(), whole.state_dict(), rtol=0, atol=0
    )
    other = WeightedAccumulation()
    other.unit = 2.0**-5  # changes no digit
    torch.testing.assert_close(
        fit(Tokens(), micro_batches(0), other, max_epochs=2).state_dict(), whole.state_dict(), rtol=0, atol=0
    )


def test_errors():
    with pytest.raises(TypeError, match=r'needs training_step to return \{"loss".*that of Tokens returned Tensor'):
        fit(Tokens(weigh=False), micro_batches(0), WeightedAccumulation())
    with pytest.raises(ValueError, match=r"finite and at least 0; got -7\.0"):
        fit(Tokens(scale=-1.0), micro_batches(0), WeightedAccumulation())
    with pytest.raises(ValueError, match=r"finite and at least 0; got nan"):
        fit(Tokens(scale=float("nan")), micro_batches(0), WeightedAccumulation())
    with pytest.raises(ValueError, match=r"a single number; got shape \(2,\)"):
        fit(Tokens(scale=torch.ones(2)), micro_batches(0), WeightedAccumulation())
    model = Tokens()
    model.automatic_optimization = False
    with pytest.raises(TypeError, match="Tokens optimizes by hand"):
        fit(model, micro_batches(0), WeightedAccumulation())


def check_pipeline_is_refused(rank):
    module, data = make("plain")
    with pytest.raises(TypeError, match="does not work under accel_pipeline"):
        trainer(strategy=PipelineStrategy(), devices=2, callbacks=[WeightedAccumulation()]).fit(module, Rows(data, 8))


def test_pipelines_are_refused():
    run_ranks(check_pipeline_is_refused)
