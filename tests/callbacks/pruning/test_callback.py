"""Masks in one process: what is zero, when, and that nothing else changes."""

import contextlib
import csv
import itertools
import logging
from functools import partial
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LambdaCallback,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import AmpPrecision, MoEClassifier
from lightning_accel.callbacks import Pruning, RestoringEarlyStopping
from lightning_accel.callbacks.compression_phase import current_phase, in_final_phase
from tests.strategies.trained import Plain, make
from tests.tolerance import ADAM_EPS, CLOSE

ADAMW = partial(torch.optim.AdamW, lr=0.02, eps=ADAM_EPS, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Net(L.LightningModule):
    """Knows nothing of us."""

    def __init__(self, optimizer=ADAMW, norm=False):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16) if norm else nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(),
            nn.Linear(12, 3),
        )  # fmt: skip
        self.make_optimizer = optimizer

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters())


def rows(count=48):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 8, generator=generator)
    return TensorDataset(x, (x[:, :3] + 0.1 * torch.randn(count, 3, generator=generator)).argmax(1))


def fit(module, callbacks, max_epochs=3, data=None, ckpt_path=None, **options):
    torch.manual_seed(7)
    trainer = L.Trainer(
        **{"max_epochs": max_epochs, "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
           "enable_progress_bar": False, "enable_model_summary": False} | options,
        callbacks=callbacks if isinstance(callbacks, list) else [callbacks],
    )  # fmt: skip
    loader = DataLoader(data or rows(), 8)
    trainer.fit(module, loader, loader if is_overridden("validation_step", module) else None, ckpt_path=ckpt_path)
    return trainer


def weights(module):
    return {name: value for name, value in module.named_parameters() if value.ndim > 1}


def share_of_zeros(module):
    """Of the weights, by counting."""
    values = weights(module).values()
    return sum(int((value == 0).sum()) for value in values) / sum(value.numel() for value in values)


class Watch(L.Callback):
    """Asserts after each batch that what is pruned is zero, in weights, gradients and moments."""

    def __init__(self, pruning):
        self.pruning = pruning
        self.shares, self.norms = [], []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.shares.append(share_of_zeros(pl_module))
        for name, kept in self.pruning.masks().items():
            parameter = pl_module.get_parameter(name)
            assert (parameter[~kept] == 0).all()
            for optimizer in trainer.optimizers:
                for value in optimizer.state.get(parameter, {}).values():
                    assert value.shape != parameter.shape or (value[~kept] == 0).all()


@pytest.mark.sampled(default=2)
@pytest.mark.parametrize("optimizer", [ADAMW, SGD, partial(torch.optim.RMSprop, momentum=0.5), torch.optim.Adagrad])
@pytest.mark.parametrize("scope", ["layer", "global", "erk"])
def test_zeros_follow_the_schedule_and_stay(optimizer, scope):
    module = Net(optimizer)
    pruning = Pruning(0.8, scope=scope, begin=2, end=12, every_n_steps=2)
    watch = Watch(pruning)
    fit(module, [pruning, watch])
    expected = [0.8 * (1 - (1 - min(max(step - 2, 0) // 2 * 2 / 10, 1)) ** 3) for step in range(1, 19)]
    total = 8 * 16 + 16 * 12 + 12 * 3
    assert watch.shares == pytest.approx(expected, abs=2 / total)
    assert pruning.sparsity() == pytest.approx(share_of_zeros(module))
    assert list(pruning.masks()) == ["net.0.weight", "net.3.weight", "net.5.weight"]


class Drifting(torch.optim.SGD):
    """Moves weights without a gradient, too, as those that make updates orthogonal do."""

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data += 0.01
        return loss


def test_an_optimizer_that_moves_all_weights_leaves_the_zeros():
    pruning = Pruning(0.8, begin=2, end=12)
    fit(Net(partial(Drifting, lr=0.01)), [pruning, Watch(pruning)])


def test_parameters_are_the_same_objects_under_the_same_names():
    module = Net()
    before = dict(module.named_parameters())
    fit(module, Pruning(0.5))
    after = dict(module.named_parameters())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    assert not any(one._forward_pre_hooks or one._forward_hooks for one in module.modules())


def test_training_is_that_of_a_loop_with_masks():
    """Gradients are masked before they are clipped, moments and weights whenever masks change."""
    module, twin = Net(), Net()
    twin.load_state_dict(module.state_dict())
    pruning = Pruning(0.75, scope="layer", schedule="one_shot", begin=4)
    fit(module, pruning, gradient_clip_val=0.1, max_epochs=2)
    optimizer = twin.configure_optimizers()
    masks = {}
    for number, batch in enumerate(list(DataLoader(rows(), 8)) * 2):
        optimizer.zero_grad()
        twin.training_step(batch, 0).backward()
        for name, kept in masks.items():
            twin.get_parameter(name).grad *= kept
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        optimizer.step()
        if number == 3:
            for name, value in weights(twin).items():
                order = value.detach().abs().flatten().argsort()
                masks[name] = torch.ones(value.numel()).index_fill_(0, order[: round(0.75 * value.numel())], 0)
                masks[name] = masks[name].view(value.shape)
                value.data *= masks[name]
                for moment in ("exp_avg", "exp_avg_sq"):
                    optimizer.state[value][moment] *= masks[name]
    torch.testing.assert_close(module.state_dict(), twin.state_dict())


def test_accumulated_batches_are_one_step():
    pruning = Pruning(0.8, begin=1, end=3, every_n_steps=1)
    watch = Watch(pruning)
    fit(Net(), [pruning, watch], accumulate_grad_batches=3, max_epochs=2)
    assert watch.shares == pytest.approx([0] * 5 + [0.7] * 3 + [0.8] * 4, abs=0.01)


def test_shares_of_the_run_are_of_optimizer_steps():
    pruning = Pruning(0.8, begin=0.25, end=0.75, every_n_steps=1)
    watch = Watch(pruning)
    fit(Net(), [pruning, watch], accumulate_grad_batches=3, max_epochs=4)  # 8 steps
    assert watch.shares[2::3] == pytest.approx([0, 0, 0.4625, 0.7, 0.7875, 0.8, 0.8, 0.8], abs=0.01)


class ByHand(Net):
    """Two optimizers, both of which step in each batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self):
        return [SGD(self.net[:3].parameters()), ADAMW(self.net[3:].parameters())]


def test_several_optimizers_by_hand_count_a_batch_as_one_step():
    pruning = Pruning(0.8, begin=0, end=0.5, every_n_steps=3)
    watch = Watch(pruning)
    fit(ByHand(), [pruning, watch], max_epochs=2)
    assert watch.shares == pytest.approx([0] * 2 + [0.7] * 3 + [0.8] * 7, abs=0.01)
    fit(ByHand(), pruning := Pruning(0.8, end=1.0), max_epochs=-1, max_steps=12)  # 6 batches
    assert pruning.sparsity() == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize("other", [{"structure": "channel"}, {"structure": "2:4"}, {"exclude": "net.0"}])
def test_a_second_callback_is_rejected(other):
    for given in ([Pruning(0.5), Pruning(0.5, **other)], [Pruning(0.5, **other), Pruning(0.5)]):
        with pytest.raises(ValueError, match=r"several Pruning callbacks .* leave out with exclude"):
            fit(Net(), given)


def test_a_criterion_must_be_finite():
    with pytest.raises(ValueError, match=r"must return finite scores; those of net.0.weight have NaN or infinity"):
        fit(Net(), Pruning(0.5, criterion=lambda name, value: value * torch.nan, schedule="one_shot", begin=0))


def test_what_is_pruned_stays_so_whatever_the_criterion_gives_for_zeros():
    pruning = Pruning(0.8, criterion=lambda name, value: -value.abs(), begin=2, end=12, every_n_steps=2)
    seen = []
    fit(Net(), [pruning, LambdaCallback(on_train_batch_end=lambda *_: seen.append(pruning.masks()))])
    for earlier, later in itertools.pairwise(seen):
        assert not any((later[name] & ~kept).any() for name, kept in earlier.items())
    assert pruning.sparsity() == pytest.approx(0.8, abs=0.01)


@pytest.mark.sampled(default=1)
@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16", "bf16-true"])
def test_low_precision(precision):
    options = {"plugins": [AmpPrecision("fp16", init_scale=2.0**22)]} if precision == "fp16" else {}
    module = Net()
    pruning = Pruning(0.8, begin=3, end=12, every_n_steps=3, regrowth="rigl")  # which reads gradients
    watch = Watch(pruning)
    trainer = fit(module, [pruning, watch], max_epochs=6, **(options or {"precision": precision}))
    if precision == "fp16":
        assert trainer.precision_plugin.skipped_steps > 0
    assert share_of_zeros(module) == pytest.approx(0.8, abs=0.01)


@pytest.mark.sampled(default=1)
@pytest.mark.parametrize("first", [True, False])
def test_an_exponential_average_has_the_zeros(first, tmp_path):
    module = Net()
    pruning, average = Pruning(0.8, end=0.5), EMAWeightAveraging(decay=0.9)
    keeper = ModelCheckpoint(tmp_path, save_last=True)
    order = [pruning, average, keeper] if first else [average, pruning, keeper]
    fit(module, order, enable_checkpointing=True)
    assert share_of_zeros(module) == pytest.approx(0.8, abs=0.01)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    for name, kept in pruning.masks().items():
        assert (module.get_parameter(name)[~kept] == 0).all()
        assert (saved[name][~kept] == 0).all()
        assert (saved[name][kept] != 0).any()


@pytest.mark.sampled(default=1)
@pytest.mark.parametrize(
    ("first", "norm"),
    [(True, True), (False, False),
     pytest.param(True, False, marks=pytest.mark.slow), pytest.param(False, True, marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_stochastic_average_has_the_zeros(first, norm):
    module = Net(norm=norm)
    pruning, average = Pruning(0.8, end=0.5), StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1)
    fit(module, [pruning, average] if first else [average, pruning], max_epochs=4)
    assert share_of_zeros(module) == pytest.approx(0.8, abs=0.01)
    for name, kept in pruning.masks().items():
        assert (module.get_parameter(name)[~kept] == 0).all()


@pytest.mark.slow
def test_the_best_checkpoint_has_the_target(tmp_path):
    """The module is best at first, when it is dense."""

    class Worse(Net):
        def validation_step(self, batch, batch_idx):
            self.log("val/loss", float(self.current_epoch))

    keeper = ModelCheckpoint(tmp_path, "{epoch}", monitor="val/loss", save_top_k=1)
    pruning = Pruning(0.8, begin=0, end=14)
    fit(Worse(), [pruning, keeper], max_epochs=4, enable_checkpointing=True)
    assert keeper.best_model_path.endswith("epoch=2.ckpt")
    best = Worse()
    best.load_state_dict(torch.load(keeper.best_model_path, weights_only=True)["state_dict"])
    assert share_of_zeros(best) == pytest.approx(0.8, abs=0.01)


def test_phases_and_what_is_logged(tmp_path):
    phases = []

    class Phases(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            phases.append((current_phase(trainer), in_final_phase(trainer)))

    logger = CSVLogger(tmp_path)
    pruning = Pruning(0.8, begin=2, end=4, every_n_steps=1)
    fit(Net(), [pruning, Phases()], max_epochs=1, logger=logger, log_every_n_steps=1)
    ramp = [("dense", False)] * 2 + [("ramp to 0.8", False)] + [("at 0.8", True)] * 3
    assert phases == ramp
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        logged = [one for one in csv.DictReader(file) if one["pruning/sparsity"]]
    assert [float(one["pruning/sparsity"]) for one in logged] == pytest.approx([0, 0, 0.7, 0.8, 0.8, 0.8], abs=0.01)


def test_what_is_left_out_is_told(caplog):
    pruning = Pruning(0.8, exclude=["net.5"])
    with caplog.at_level(logging.INFO):
        fit(Net(), pruning)
    assert pruning.left_out == {
        "net.0.bias": "a bias", "net.1.weight": "a vector", "net.1.bias": "a bias", "net.3.bias": "a bias",
        "net.5.weight": "excluded by 'net.5'", "net.5.bias": "excluded by 'net.5'",
    }  # fmt: skip
    assert "Pruning leaves out net.0.bias, net.1.bias, net.3.bias (a bias); net.1.weight (a vector); " in caplog.text
    assert "total" in caplog.text
    rows_ = pruning.report_rows()
    assert [row["name"] for row in rows_] == ["net.0.weight", "net.3.weight"]
    assert sum(row["nonzero"] for row in rows_) == round(0.2 * 320)


def test_regrowth_keeps_the_sparsity_and_moves_connections():
    module = Net()
    pruning = Pruning(0.75, scope="layer", schedule="one_shot", regrowth="rigl", end=0.9, every_n_steps=2)
    masks = []

    class Keep(Watch):
        def on_train_batch_end(self, trainer, pl_module, *args):
            super().on_train_batch_end(trainer, pl_module, *args)
            masks.append(torch.cat([kept.flatten() for kept in pruning.masks().values()]))

    fit(module, [pruning, Keep(pruning)])
    assert len({int(mask.sum()) for mask in masks}) == 1
    moved = [int((one ^ two).sum()) for one, two in itertools.pairwise(masks)]
    assert not any(moved[1::2])
    assert moved[0] > moved[8] > 0  # fewer, later
    assert sum(share == 0 for share in moved[-2:]) == 2


def test_rigl_grows_where_the_gradient_is_large():
    """A gradient of one column alone: the connections that grow are in it."""

    class Column(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 5, bias=False)

        def training_step(self, batch, batch_idx):
            return (self.layer.weight[:, 2] * torch.arange(1.0, 6)).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-6)

    module = Column()
    with torch.no_grad():
        module.layer.weight[:, 2] = 1e-9
    options = {"schedule": "one_shot", "begin": 0, "end": 6, "every_n_steps": 1}
    pruning = Pruning(0.5, regrowth="rigl", **options)
    fit(module, pruning, max_epochs=1)
    assert pruning.masks()["layer.weight"][:, 2].all()


def test_n_of_m_within_a_trainer():
    module = Net()
    pruning = Pruning(structure="2:4", end=0.5)
    fit(module, pruning)
    for value in weights(module).values():
        assert ((value.reshape(-1, 4) != 0).sum(1) == 2).all()
    assert pruning.phase == "at 0.5"


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch, through Lightning
def test_what_n_of_m_does_not_fit_is_named():
    module, data = make("classifier", num_rows=16)[0], make("classifier", num_rows=16)[1]
    pruning = Pruning(structure="2:4", end=0.5)
    with pytest.warns(UserWarning, match=r"covers (\d+)% of the values in the matrices") as told:
        fit(module, pruning, data=data)
    own = sum(row["parameters"] for row in pruning.report_rows())
    parameters = {name: one.numel() for name, one in module.named_parameters()}
    missed = sum(parameters[name] for name, reason in pruning.left_out.items() if "no multiple" in reason)
    assert f"covers {own / (own + missed):.0%} of" in "".join(str(one.message) for one in told)
    reasons = [reason for reason in pruning.left_out.values() if "no multiple" in reason]
    assert reasons
    assert all(reason.endswith("inputs, no multiple of 4, for 2:4") for reason in reasons)


@pytest.mark.sampled(default=1)
@pytest.mark.parametrize("name", ["classifier", "language_model", "sequence", "belief_network"])
def test_our_modules_end_with_the_zeros(name):
    module, data = make(name, num_rows=16)
    pruning = Pruning(0.75, begin=0, end=2, every_n_steps=1)
    fit(module, pruning, data=data, max_epochs=11 if name == "belief_network" else 2)
    masks = pruning.masks()
    assert masks
    for weight, kept in masks.items():
        assert (module.get_parameter(weight)[~kept] == 0).all(), weight
    assert pruning.sparsity() == pytest.approx(0.75, abs=0.01)
    if name == "classifier":
        assert any(weight.endswith("experts.up_weight") for weight in masks)
        assert any(reason.startswith("a gate") for reason in pruning.left_out.values())
    if name == "sequence":
        assert any(weight.endswith("weight_hh") for weight in masks)


def test_a_fit_that_goes_on_keeps_its_masks():
    module, pruning = Net(), Pruning(0.8, begin=1, end=4)
    trainer = fit(module, pruning, max_epochs=1)
    masks = pruning.masks()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, DataLoader(rows(), 8))
    assert all(kept.equal(masks[name]) for name, kept in pruning.masks().items())
    assert share_of_zeros(module) == pytest.approx(0.8, abs=0.01)
    other = Net()
    fit(other, pruning, max_epochs=1, limit_train_batches=5)  # another run begins anew
    assert share_of_zeros(other) == pytest.approx(0.8, abs=0.01)


@pytest.mark.slow
def test_a_dense_checkpoint_is_pruned_from_where_it_is(tmp_path):
    trainer = fit(Net(), [], max_epochs=1)
    trainer.save_checkpoint(tmp_path / "dense.ckpt")
    module, pruning = Net(), Pruning(0.8, begin=8, end=14)
    fit(module, pruning, ckpt_path=tmp_path / "dense.ckpt")
    assert share_of_zeros(module) == pytest.approx(0.8, abs=0.01)
    module = Net()
    fit(module, Pruning(0.7, begin=1, end=3), ckpt_path=tmp_path / "dense.ckpt")  # steps that are over
    assert share_of_zeros(module) == pytest.approx(0.7, abs=0.01)


def test_shares_of_a_run_of_one_step_are_a_step():
    pruning = Pruning(np.float32(0.5), begin=0.2, end=0.5)
    fit(Net(), [pruning], max_steps=1)
    assert pruning.sparsity() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": 1.5}, r"share in \[0, 1\).*got 1.5"),
        ({"structure": "half"}, "structure must be 'unstructured', 'channel', 'width', or 'N:M'.* Got 'half'$"),
        ({"structure": "Channels"}, "Got 'Channels'; did you mean 'channel'"),
        ({"sparsity": "0.5"}, "sparsity must be a share .* got '0.5'"),
        ({"begin": 0.8, "end": 0.5}, "end must come after begin; got begin=0.8, end=0.5"),
        ({"structure": "2:4", "sparsity": 0.9}, "0.5 are pruned; got a sparsity of 0.9"),
        ({"module": "net"}, "structure='channel'; got 'unstructured'"),
        ({"structure": "channel", "round_to": 0}, "round_to must be at least 1; got 0"),
        (
            {"criterion": "size"},
            "criterion must be one of magnitude; got 'size'",
        ),
        ({"scope": "whole"}, "scope must be one of layer, global, erk"),
        ({"schedule": "slow"}, "schedule must be one of cubic, one_shot"),
        ({"begin": -1}, "begin must be at least 0; got -1"),
        ({"end": 1.5}, r"share of the run in \[0, 1\], or a step, an int; got 1.5"),
        ({"every_n_steps": 0}, "every_n_steps must be at least 1"),
        ({"regrowth": "all"}, "regrowth must be one of rigl"),
        ({"regrowth": "rigl", "structure": "2:4"}, "needs structure='unstructured'"),
        ({"regrowth": "rigl", "structure": "channel"}, "needs structure='unstructured'"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Pruning(**options)


@pytest.mark.parametrize(
    ("options", "trainer", "message"),
    [
        ({"begin": 15, "end": 0.5}, {}, "end must come after begin; got begin=15, end=0.5 of 18 steps"),
        ({"begin": 0.5, "end": 9}, {}, "end must come after begin; got begin=0.5, end=9 of 18 steps"),
        ({"end": 50}, {}, "would end at step 50, but the run has 18 optimizer steps"),
        ({}, {"max_epochs": -1, "max_time": "00:00:00:01"}, "end=0.6 is a share of the run, whose length is not known"),
        ({"exclude": ["head"]}, {}, "exclude has 'head'.*there are net, net.0"),
        ({"exclude": ["net"]}, {}, "Never has no weight to prune: net.0.weight: excluded by 'net'"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_before_training(options, trainer, message):
    class Never(Net):
        def training_step(self, batch, batch_idx):
            raise AssertionError

    with pytest.raises(ValueError, match=message):
        fit(Never(), Pruning(0.8, **options), num_sanity_val_steps=0, **trainer)


class Stop(L.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = True


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_run_that_ends_early_says_what_it_has():
    with pytest.warns(UserWarning, match=r"ended after 6 optimizer steps, at a sparsity of 0\.\d+; the target of 0.8"):
        fit(Net(), [Pruning(0.8, end=0.6), Stop()])


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_layer_without_weights_is_told():
    module = Net()
    with torch.no_grad():
        module.net[3].weight *= 1e-6
    with pytest.warns(UserWarning, match="no weight of net.3.weight is left"):
        fit(module, Pruning(0.9, scope="global", schedule="one_shot", begin=0))


def test_fewer_weights_than_outputs_are_told_before_training():
    module = Net()
    module.on_train_start = lambda: pytest.fail("it trains")
    with pytest.raises(UserWarning, match=r"leaves 6 of 192 weights of net\.3\.weight, for 12 outputs: outputs"):
        fit(module, Pruning(0.97, scope="layer", exclude=["net.0", "net.5"]))


@pytest.mark.slow
def test_mixture_and_plain_module_with_blocks():
    for module, data in ((Plain(), make("plain", num_rows=16)[1]), (MoEClassifier(8, 3), rows(16))):
        pruning = Pruning(0.6, end=2, every_n_steps=1)
        fit(module, pruning, data=data, max_epochs=2)
        assert pruning.sparsity() == pytest.approx(0.6, abs=0.01)


@pytest.mark.slow
def test_a_compiled_module_has_the_masks_of_the_module():
    """Also of averages, of steps over several batches, in bfloat16."""
    options = {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "max_epochs": 6}
    module, plain = Net(), Net()
    plain.load_state_dict(module.state_dict())
    torch._dynamo.reset()  # graphs of an earlier module of this structure, which had no hooks
    module.net = torch.compile(module.net, backend="eager")
    masks = []
    for one in (module, plain):
        pruning = Pruning(0.8, begin=1, end=12, every_n_steps=3)
        fit(one, [pruning, EMAWeightAveraging(decay=0.9)], **options)
        masks.append(pruning.masks())
        assert share_of_zeros(one) == pytest.approx(0.8, abs=0.01)
    assert list(masks[0]) == ["net.0.weight", "net.3.weight", "net.5.weight"]
    assert all(kept.equal(masks[1][name]) for name, kept in masks[0].items())
    torch.testing.assert_close([*module.parameters()], [*plain.parameters()], **CLOSE)


def test_options_are_read_from_a_config():
    parser = ArgumentParser()
    parser.add_argument("pruning", type=Pruning)
    options = {"sparsity": 0.8, "begin": 10, "end": 0.5, "exclude": ["head", "torch.nn.Conv2d"], "scope": "global"}
    config = parser.parse_object({"pruning": {"class_path": "lightning_accel.callbacks.Pruning", "init_args": options}})
    pruning = parser.instantiate(config).pruning
    assert (pruning.begin, pruning.end, pruning.criterion, pruning.target) == (10, 0.5, "magnitude", 0.8)
    assert isinstance(pruning.begin, int)
    assert isinstance(pruning.end, float)
    function = {"criterion": "tests.callbacks.pruning.test_callback.squares", "begin": 1.0, "end": 1.0}
    config = parser.parse_object(
        {"pruning": {"class_path": "lightning_accel.callbacks.Pruning", "init_args": function}}
    )
    made = parser.instantiate(config).pruning
    assert made.criterion(None, torch.tensor(3.0)) == 9
    assert isinstance(made.begin, float)


def squares(name: str, weight: torch.Tensor) -> torch.Tensor:
    return weight.square()


@pytest.mark.sampled(default=3)
@pytest.mark.parametrize(
    ("make_stopping", "end", "options", "warns"),
    [
        (EarlyStopping, 4, {}, True),
        (EarlyStopping, 4, {"min_epochs": 2}, False),
        (RestoringEarlyStopping, 4, {}, False),
        (EarlyStopping, None, {}, False),  # the target is reached before the first step
    ],
)
def test_early_stopping_that_does_not_wait_for_the_target_is_warned_of(make_stopping, end, options, warns):
    pruned = Pruning(0.5, schedule="one_shot") if end is None else Pruning(0.5, begin=1, end=end)
    said = pytest.warns(
        UserWarning, match="EarlyStopping of Lightning may end the run before Pruning reaches its target"
    )
    with said if warns else contextlib.nullcontext():
        fit(Net(), [pruned, make_stopping("val/loss")], max_epochs=2, **options)
