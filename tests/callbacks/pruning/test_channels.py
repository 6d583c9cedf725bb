import copy
import logging
import re

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import nn
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import Classifier, ExactResume, MoEClassifier, SequenceModel
from lightning_accel.callbacks.pruning.callback import Pruning
from lightning_accel.callbacks.pruning.one_shot import OneShotPruning
from lightning_accel.compress import load_pruned
from lightning_accel.models import DeepBeliefNetwork, Experts, FineTuning, RecurrentLayers, Stage
from tests.callbacks.resume.test_exact_resume import SaveAt
from tests.ranks import run_ranks
from tests.zoo import ZOO

GENERATOR = torch.Generator().manual_seed(3)
IMAGES = TensorDataset(torch.randn(24, 2, 6, 6, generator=GENERATOR), torch.arange(24) % 3)
SEQUENCES = torch.randn(24, 5, 2, generator=GENERATOR)


class Own(L.LightningModule):
    """Knows nothing of us: calls its network alone, with a residual, a batch norm, a scheduler and two optimizers."""

    def __init__(self, lr=0.05):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 3), nn.BatchNorm2d(12), nn.ReLU(),
            nn.Dropout(0.1), nn.Flatten(), nn.Linear(48, 10), nn.Sigmoid(), nn.Linear(10, 3),
        )  # fmt: skip
        self.bare = nn.Parameter(torch.ones(3))
        self.rates, self.held = [], []

    def training_step(self, batch, batch_idx):
        return cross_entropy(self.net(batch[0]) * self.bare, batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", cross_entropy(self.net(batch[0]) * self.bare, batch[1]), sync_dist=True)

    def on_train_batch_end(self, *_):
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        held = {id(one) for group in self.optimizers().param_groups for one in group["params"]}
        self.held.append(held == {id(one) for one in self.parameters()})

    def configure_optimizers(self):
        groups = [{"params": [self.bare], "lr": 0.01}, {"params": self.net.parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=self.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def pruning(**options):
    usual = {"sparsity": 0.5, "structure": "channel", "scope": "layer", "end": 6, "every_n_steps": 2}
    return Pruning(**usual | options)


def fit(module, folder=None, callbacks=(), rows=IMAGES, resume=None, max_steps=10, prune=None, **options):
    callback = prune or pruning()
    trainer = L.Trainer(
        **{"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False} | options,
        max_steps=max_steps, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=[callback, *callbacks],
    )  # fmt: skip
    loaders = [DataLoader(rows, 4, shuffle=shuffle) for shuffle in (True, False)]
    trainer.fit(module, *loaders, ckpt_path=resume)
    return callback, trainer


def sizes(module):
    return [one.shape[0] for one in module.parameters() if one.ndim > 1]


def test_channels_are_removed_and_all_that_is_left_trains_on(caplog):
    module = Own()
    with caplog.at_level(logging.INFO):
        callback, trainer = fit(module)
    assert sizes(module) == [4, 6, 5, 3]
    assert module.net[3].in_channels == module.net[1].num_features == 4
    assert module.net[8].in_features == 24
    assert all(module.held)
    assert module.rates == pytest.approx([0.01 * 0.9**step for step in range(1, 11)])
    (optimizer,) = trainer.optimizers
    assert all(state["exp_avg"].shape == one.shape for one, state in optimizer.state.items())
    assert [state["step"].item() for state in optimizer.state.values()] == [10] * len(optimizer.state)
    assert callback.is_final_phase
    assert callback.sparsity() == 0.5
    assert callback.left_out == {"net.10.weight": "the module's output"}
    notes = [f"{n} of {2 * n} channels left" for n in (4, 4, 6, 6, 5)] + ["5 of 10 input channels left"]
    assert {row["name"]: row["note"] for row in callback.report_rows()} == {
        f"net.{index}": note for index, note in zip((0, 1, 3, 4, 8, 10), notes, strict=True)
    }
    assert all(note in caplog.text for note in notes)


class Residual(Own):
    """Adds what two convolutions output, so that their channels go together."""

    def __init__(self):
        super().__init__()
        block = nn.Sequential(nn.Conv2d(8, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 3, padding=1))
        self.net = nn.Sequential(nn.Conv2d(2, 8, 3), Sum(block), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(128, 3))


class Sum(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return x + self.block(x)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("make", [pruning, lambda: OneShotPruning(0.5, structure="channel", begin=2, calibrate=4)])
def test_the_table_has_all_weights_that_go(caplog, make, compiled):
    module = Residual()
    counts = {name: one.numel() for name, one in module.named_parameters()}
    if compiled:
        module.net = torch.compile(module.net, backend="eager")
    with caplog.at_level(logging.INFO):
        callback, _ = fit(module, prune=make())
    left = {name.replace("._orig_mod", ""): one.numel() for name, one in module.named_parameters()}
    rows = {row["name"]: (row["parameters"], row["nonzero"]) for row in callback.report_rows()}
    expected = {}
    for name in counts:
        if name != "bare":
            before, after = expected.get(name.rpartition(".")[0], (0, 0))
            expected[name.rpartition(".")[0]] = before + counts[name], after + left[name]
    assert rows == expected
    assert list(rows) == ["net.0", "net.1.block.0", "net.1.block.2", "net.2", "net.4"]
    total = f"{sum(counts.values()) - 3:,} +{sum(left.values()) - 3:,} "
    assert re.search(rf"\n1 others +16 +8 .*\ntotal +{total}", caplog.text)


class Around(L.Callback):
    """Calls the network right before and right after the removal."""

    def __init__(self, pruned):
        self.pruned = pruned

    def on_train_start(self, trainer, pl_module):
        finish = self.pruned._masks.remove_channels

        def watched(trainer, pl_module):
            self.removed = {name: list(gone) for name, gone in self.pruned._masks.removed.items()}
            self.before, self.whole = self.put_out(pl_module), copy.deepcopy(pl_module.net.state_dict())
            finish(trainer, pl_module)
            self.after = self.put_out(pl_module)

        self.pruned._masks.remove_channels = watched

    def put_out(self, pl_module):
        return copy.deepcopy(pl_module.net).eval()(IMAGES.tensors[0])


@pytest.mark.slow
def test_compiled_submodules_lose_channels_too(tmp_path):
    """With the weights that they have without, and through a checkpoint that brings them to a module of either kind."""
    torch.manual_seed(2)
    at_removal = SaveAt(tmp_path, ["epoch 1"])

    def fitted(*callbacks, compiled=True, **options):
        torch.manual_seed(2)
        module = Own()
        if compiled:
            module.net = torch.compile(module.net, backend="eager")
        fit(module, tmp_path, callbacks, **options)
        return module

    plain, module = fitted(compiled=False), fitted(at_removal)
    assert sizes(module) == sizes(plain) == [4, 6, 5, 3]
    torch.testing.assert_close(module.net._orig_mod.state_dict(), plain.net.state_dict())
    assert sizes(fitted(resume=tmp_path / "epoch 1.ckpt")) == [4, 6, 5, 3]
    whole = Own()
    assert sizes(load_pruned(whole, tmp_path / "epoch 1.ckpt")) == [4, 6, 5, 3]
    whole = Own()
    whole.net = torch.compile(whole.net, backend="eager")
    assert sizes(load_pruned(whole, tmp_path / "epoch 1.ckpt")) == [4, 6, 5, 3]


def test_the_removal_changes_nothing_that_the_module_computes():
    callback = pruning()
    around = Around(callback)
    fit(Own(), callbacks=[around], prune=callback)
    torch.testing.assert_close(around.after, around.before, rtol=1e-5, atol=1e-6)
    gone = around.removed["net.0"]
    assert len(gone) == 4
    assert not around.whole["0.weight"][gone].any()
    assert not around.whole["3.weight"][:, gone].any()
    assert around.whole["0.weight"].count_nonzero() == 4 * 18


class Zeros(L.Callback):
    """How many inputs of the last layer have a weight, a moment or a gradient, after each step.

    What it takes is 0.5 where channels are at zero, so that gradients would bring its weights back.
    """

    def __init__(self):
        self.counts = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        weight = pl_module.net[10].weight
        moment = trainer.optimizers[0].state[weight]["exp_avg"]
        self.counts.append([int(one.any(0).sum()) for one in (weight, moment, weight.grad)])


def test_channels_stay_at_zero_from_one_pruning_to_the_next():
    zeros = Zeros()
    fit(Own(), callbacks=[zeros])
    weights, moments, gradients = zip(*zeros.counts, strict=True)
    assert weights == moments
    assert list(weights) == sorted(weights, reverse=True)
    assert weights[1] == weights[2] < 10  # pruned after steps 2, 4 and 6
    assert gradients[2] == weights[2]
    assert weights[-1] == 5


@pytest.mark.slow
def test_batch_norms_learn_after_the_removal():
    """Modules that are left in evaluation mode would keep the statistics of before."""
    module, short = Own(), Own()
    short.load_state_dict(module.state_dict())
    for one, steps in ((module, 10), (short, 6)):
        torch.manual_seed(1)
        fit(one, max_steps=steps)
    assert module.net[1].num_batches_tracked == 10
    assert module.net[1].running_mean.shape == short.net[1].running_mean.shape == (4,)
    assert not module.net[1].running_mean.equal(short.net[1].running_mean)
    for one, before in zip(module.parameters(), short.parameters(), strict=True):
        assert one.shape == before.shape
        assert not one.equal(before)


MOMENTS = ["step 1", "step 3", "step 5", "step 6", "validation 6", "step 7", "step 9"]


@pytest.mark.slow
def test_killed_and_resumed_runs_end_with_equal_bits(tmp_path):
    def run(resume=None):
        torch.manual_seed(0 if resume is None else 9)
        module = Own()
        callbacks = [ExactResume(), SaveAt(tmp_path, MOMENTS if resume is None else [])]
        _, trainer = fit(module, tmp_path, callbacks, resume=resume, val_check_interval=3)
        return module, trainer.optimizers[0].state_dict()

    whole, state = run()
    assert sizes(whole) == [4, 6, 5, 3]
    for moment in MOMENTS:
        resumed, resumed_state = run(tmp_path / f"{moment}.ckpt")
        torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)
        torch.testing.assert_close(resumed_state["state"], state["state"], rtol=0, atol=0)
        assert resumed.rates == whole.rates[-len(resumed.rates) :], moment


def test_a_checkpoint_makes_the_smaller_module(tmp_path):
    module = Own()
    fit(module, tmp_path, [SaveAt(tmp_path, ["step 4", "step 9", "step 10"])])
    loaded = load_pruned(Own(), tmp_path / "step 10.ckpt")
    assert sizes(loaded) == [4, 6, 5, 3]
    torch.testing.assert_close(loaded.state_dict(), module.state_dict(), rtol=0, atol=0)
    assert sizes(load_pruned(Own(), tmp_path / "step 4.ckpt")) == [8, 12, 10, 3]


def test_the_best_is_one_of_the_smaller_ones(tmp_path):
    module = Own(lr=0.5)  # which is better before
    keeper = ModelCheckpoint(tmp_path, monitor="val/loss")
    fit(module, tmp_path, [keeper], enable_checkpointing=True, val_check_interval=2)
    assert sizes(load_pruned(Own(), keeper.best_model_path)) == [4, 6, 5, 3]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*weights_only:FutureWarning")
def test_averages_become_smaller_too_and_a_resumed_run_goes_on_with_them(tmp_path):
    moments = ["step 4", "step 9"]  # channels are removed between them

    def run(resume=None):
        torch.manual_seed(0 if resume is None else 9)
        module, average = Own(), EMAWeightAveraging(decay=0.5)
        callbacks = [average, ExactResume(), SaveAt(tmp_path, moments if resume is None else [])]
        fit(module, tmp_path, callbacks, resume=resume)
        return module.state_dict()

    whole = run()
    assert sizes(load_pruned(Own(), tmp_path / "step 9.ckpt")) == [4, 6, 5, 3]
    for moment in moments:
        torch.testing.assert_close(run(tmp_path / f"{moment}.ckpt"), whole, rtol=0, atol=0)
    assert whole["net.0.weight"].shape == (4, 2, 3, 3)


OURS = {
    "cnn": (
        lambda: Classifier(2, 3, channels=[8, 12], hidden_dims=[10]),
        IMAGES,
        {"network.0", "network.3", "network.8"},
    ),
    "moe": (
        lambda: MoEClassifier(72, 3, experts=Experts(num_experts=4)),
        TensorDataset(IMAGES.tensors[0].flatten(1), IMAGES.tensors[1]),
        None,
    ),
    **{
        cell: (
            lambda cell=cell: SequenceModel(
                2, 3, target_kind="classification", layers=RecurrentLayers(hidden_dim=16, cell=cell, bidirectional=True)
            ),
            TensorDataset(SEQUENCES, torch.arange(24) % 5 + 1, IMAGES.tensors[1]),
            {"blocks.0.rnn.layers.0", "blocks.0.rnn.layers.1"},
        )
        for cell in ("gru", "lstm", "minlstm")
    },
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("name", OURS)
def test_our_modules(name):
    make, rows, expected = OURS[name]
    module = make()
    before = sum(one.numel() for one in module.parameters())
    callback, _ = fit(module, rows=rows)
    rows_ = [row for row in callback.report_rows() if len(row["shape"]) > 1 and "input" not in row["note"]]
    sparsities = {row["name"]: row["sparsity"] for row in rows_}
    assert expected is None or set(sparsities) == expected
    assert set(sparsities.values()) == {0.5}
    assert sum(one.numel() for one in module.parameters()) < 0.6 * before


def check_ranks(rank, folder, strategy, options):
    module = Own()
    torch.manual_seed(5)
    rows = TensorDataset(IMAGES.tensors[0], IMAGES.tensors[1])
    callbacks = [ExactResume(), SaveAt(folder, ["step 3", "step 7"])]
    torch.manual_seed(5)
    fit(module, folder, callbacks, rows, strategy=strategy, devices=2, **options)
    states = []
    for moment in ("step 3", "step 7"):
        torch.manual_seed(6)
        again = Own()
        fit(again, folder, [ExactResume()], rows, folder / f"{moment}.ckpt", strategy=strategy, devices=2, **options)
        states.append(again.state_dict())
    for state in states:
        for name, value in module.state_dict().items():
            if "running" not in name or rank == 0 or options:  # buffers of the first process are those of a checkpoint
                torch.testing.assert_close(state[name], value, rtol=0, atol=0)
    return dict(module.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "accel_ddp"])
def test_processes_remove_the_same_channels_and_go_on_together(tmp_path, strategy):
    first, second = run_ranks(check_ranks, tmp_path, strategy, {})
    assert first["net.0.weight"].shape == (4, 2, 3, 3)
    for name in first:
        if "running" not in name:
            torch.testing.assert_close(first[name], second[name], rtol=0, atol=0)


def check_refusal(rank):
    with pytest.raises(TypeError, match=r"channels cannot be removed in training under .*Use strategy='ddp'"):
        fit(Own(), strategy="accel_fsdp2", devices=2)


def test_sharded_parameters_are_refused():
    run_ranks(check_refusal)


@pytest.mark.weekly
@pytest.mark.slow
def test_processes_that_hand_nothing_back_are_refused():
    reason = "channels cannot be removed in processes that are spawned or forked"
    with pytest.raises(ProcessRaisedException, match=reason):
        fit(Own(), strategy="ddp_spawn")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*no `validation_step`:UserWarning")
def test_what_cannot_work_is_refused():
    with pytest.raises(ValueError, match=r"has no channels that can be removed: net.0.weight: excluded"):
        fit(Own(), prune=pruning(exclude=["net"]))

    with pytest.raises(ValueError, match=r"must return finite scores; those of net\.0 have NaN or infinity"):
        fit(Own(), prune=pruning(criterion=lambda name, value: value * torch.nan))
    with pytest.raises(ValueError, match=r"round_to=1000 lets no channel go at a target of 0\.5; the layers have 8"):
        fit(Own(), prune=Pruning(0.5, structure="channel", scope="layer", end=6, round_to=1000))

    done, trainer = fit(Own())
    with pytest.raises(ValueError, match="has removed channels of another Own; give this one a Pruning of its own"):
        trainer.fit(Own(), DataLoader(IMAGES, 4), DataLoader(IMAGES, 4))
    assert done.sparsity() > 0

    class Silent(Own):
        validation_step = L.LightningModule.validation_step

    with pytest.raises(TypeError, match="needs a validation_step"):
        fit(Silent())


@pytest.mark.parametrize(("scope", "how"), [("layer", ""), ("global", " on average")])
def test_layers_that_keep_almost_nothing_are_named_before_training(scope, how):
    module = Own()
    module.net[0], module.net[1], module.net[3] = nn.Conv2d(2, 32, 3), nn.BatchNorm2d(32), nn.Conv2d(32, 12, 3)
    module.on_train_start = lambda: pytest.fail("it trains")
    named = rf"leaves{how} 1 of 32 channels of net\.0, 1 of 12 channels of net\.3, 1 of 10 channels of net\.8, which"
    with pytest.raises(UserWarning, match=named):  # warnings are errors
        fit(module, prune=pruning(sparsity=0.99, scope=scope))


def test_chains_of_a_belief_network_start_anew_where_its_units_are_removed():
    fine_tuning = FineTuning("classifier", epochs=1)
    model = DeepBeliefNetwork(72, [8], [Stage(epochs=1, sampler="pcd")], fine_tuning=fine_tuning, num_classes=3)
    rows = TensorDataset(IMAGES.tensors[0].sigmoid().flatten(1), IMAGES.tensors[1])
    fit(model, rows=rows, max_steps=-1, max_epochs=2, prune=pruning(end=2, every_n_steps=1))
    rbm = model.stack.layers[0]
    assert rbm.num_hidden == len(rbm.weight) == 4
    assert model.head.in_features == 4


@pytest.mark.slow
def test_width_of_a_residual_stream(tmp_path):
    """Halving a Llama's channels leaves a third of it, its residual stream a half as wide; the checkpoint has all."""
    pytest.importorskip("transformers")
    module, options = ZOO["llama"].make(), {"schedule": "one_shot", "begin": 1}
    trainer = L.Trainer(
        accelerator="cpu", max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[Pruning(0.5, structure="width", **options)],
    )  # fmt: skip
    trainer.fit(module, ZOO["llama"].loader(), ZOO["llama"].loader(4))
    assert module.model.model.embed_tokens.weight.shape[1] == 8
    trainer.save_checkpoint(tmp_path / "m.ckpt")
    loaded, call = load_pruned(ZOO["llama"].make(), tmp_path / "m.ckpt"), next(iter(ZOO["llama"].loader()))
    loaded.eval(), module.eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(**call).logits, module(**call).logits, rtol=0, atol=0)
