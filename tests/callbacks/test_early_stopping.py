"""Scripted figures, so that what should happen is known; a weight that counts steps tells what is put back."""

import copy
import math
import warnings
from functools import partial
from types import MethodType

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping as LightningsOwn
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.cli import LightningArgumentParser
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_accel
from lightning_accel.callbacks import ExactResume, RestoringEarlyStopping
from lightning_accel.callbacks.compression_phase import defer_best_checkpoints
from lightning_accel.strategies import FullyShardedStrategy
from tests.ranks import run_ranks
from tests.strategies.trained import Rows, make

NAN = float("nan")
ROWS = DataLoader(TensorDataset(torch.ones(6, 2)), 2)  # 3 steps an epoch


class Scripted(L.LightningModule):
    """Logs ``figures`` in turn, one a validation."""

    def __init__(self, *figures, name="val/loss", **more):
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(self.layer.weight)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("beside", torch.zeros(()), persistent=False)
        self.figures = {name: figures, **more}

    def training_step(self, batch, batch_idx):
        self.steps += 1
        self.beside += 1
        return -self.layer(batch[0]).mean()  # the weight goes up by 1 a step

    def validation_step(self, batch, batch_idx):
        number = int(self.steps) // 3 - 1
        self.log_dict({name: figures[max(number, 0)] for name, figures in self.figures.items()})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def at(self):
        """The step whose state the module is in, if all of it is in one."""
        assert self.layer.weight.eq(self.steps).all()
        assert self.beside == self.steps
        return int(self.steps)


QUIET = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}  # fmt: skip


def fit(module, stopper, *callbacks, validation=ROWS, ckpt_path=None, **options):
    options = {"max_epochs": 8, "enable_checkpointing": False, **options}
    trainer = L.Trainer(callbacks=[stopper, *callbacks], **QUIET | options)
    trainer.fit(module, ROWS, validation, ckpt_path=ckpt_path)
    return trainer


def ours(**options):
    return RestoringEarlyStopping(**{"monitor": "val/loss", "patience": 2, **options})


FIGURES = (5.0, 3.0, 4.0, 3.5, 3.2, 1.0, 0.5, 0.4)


@pytest.mark.parametrize(
    ("options", "stopped", "best"),
    [
        ({}, 12, 6),
        ({"patience": 4}, 24, 24),
        ({"min_delta": 2.5, "patience": 2}, 9, 6),  # 3 is no improvement of 5, but the best
        ({"mode": "max"}, 9, 3),
        ({"stopping_threshold": 4.5}, 6, 6),
        ({"divergence_threshold": 3.9}, 3, 3),
        ({"restore_best": False}, 12, 12),
    ],
)
def test_stops_when_it_should_and_has_the_best_weights(options, stopped, best):
    module, stopper = Scripted(*FIGURES), ours(**options)
    trainer = fit(module, stopper)
    assert (trainer.global_step, module.at()) == (stopped, best)
    assert bool(stopper.stopping_reason_message) == (stopped < 24)


@pytest.mark.slow
def test_agrees_with_lightnings():
    for patience in (1, 2, 3, 4):
        for delta in (0.0, 0.3, 1.0):
            told = []
            for stopper in (LightningsOwn("val/loss", delta, patience), ours(min_delta=delta, patience=patience)):
                trainer = fit(Scripted(*FIGURES), stopper)
                assert trainer.early_stopping_callback is stopper
                figures = stopper.best_score.item(), stopper.wait_count, stopper.stopped_epoch
                told.append((trainer.global_step, stopper.stopping_reason, *figures))
            assert told[0] == told[1], (patience, delta)


@pytest.mark.parametrize(
    ("options", "figures"),
    [
        ({"stopping_threshold": 4.5}, FIGURES),
        ({"divergence_threshold": 3.9}, FIGURES),
        ({}, (5.0, NAN)),
        ({"patience": 9}, FIGURES),
    ],
    ids=["stopping", "divergence", "not finite", "not stopped"],
)
def test_the_kind_of_reason_is_lightnings_and_outlasts_a_checkpoint(options, figures, tmp_path):
    theirs, stopper = LightningsOwn(**{"monitor": "val/loss", "patience": 2, **options}), ours(**options)
    fit(Scripted(*figures), theirs, max_epochs=2)
    fit(Scripted(*figures), stopper, ModelCheckpoint(tmp_path, "end"), max_epochs=2, enable_checkpointing=True)
    assert stopper.stopping_reason == theirs.stopping_reason
    state = torch.load(tmp_path / "end.ckpt", weights_only=True)["callbacks"][stopper.state_key]
    again = ours(**options)
    again.load_state_dict(state)
    for name in ("stopping_reason", "stopping_reason_message", "stopped_epoch", "best_score", "wait_count"):
        assert getattr(again, name) == getattr(stopper, name), name


class Sometimes(Scripted):
    """Logs its figure after every second epoch alone."""

    def validation_step(self, batch, batch_idx):
        self.log("val/other", 1.0)
        if int(self.steps) % 6 == 0:
            super().validation_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch, through Lightning
def test_a_metric_that_some_validations_log():
    figures = (NAN, 3.0, NAN, 4.0, NAN, 5.0, NAN, 1.0)
    module, stopper = Sometimes(*figures), ours(strict=False)
    assert fit(module, stopper, num_sanity_val_steps=1).global_step == 18
    assert (stopper.wait_count, module.at()) == (2, 6)
    with pytest.raises(ValueError, match="monitors 'val/loss', which is not logged"):
        fit(Sometimes(*figures), ours())
    with pytest.warns(UserWarning, match=r"never looked at val/los, .* Logged: val/loss, val/other"):
        fit(Sometimes(*figures), ours(monitor="val/los", strict=False))


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # of callbacks that are here no more
def test_a_run_goes_on_from_what_lightnings_callback_had_counted(tmp_path):
    def until(stopper, **options):
        module = Scripted(*FIGURES)
        return fit(module, stopper, **options), module

    keeper = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    fit(Scripted(*FIGURES), LightningsOwn("val/loss", patience=4), keeper, enable_checkpointing=True, max_epochs=3)
    stopper = ours()
    trainer, _ = until(stopper, ckpt_path=tmp_path / "epoch=2.ckpt")
    assert (trainer.global_step, stopper.best_value, stopper.wait_count) == (12, 3.0, 2)


def test_both_work_side_by_side():
    """Ours puts the best back whoever stopped the run."""
    module, stopper = Scripted(*FIGURES), ours(patience=5)
    trainer = fit(module, LightningsOwn("val/loss", patience=1), stopper)
    assert (trainer.global_step, module.at(), stopper.stopping_reason_message) == (9, 6, None)


def test_reason_and_what_is_restored_are_told(caplog):
    with caplog.at_level("INFO"):
        stopper = ours()
        fit(Scripted(*FIGURES), stopper)
    reason = "Monitored metric val/loss did not improve in the last 2 records. Best score: 3.000."
    assert f"EarlyStopping stops the run at step 12: {reason}" in caplog.text
    assert "EarlyStopping restored the weights of step 6, the best by val/loss (3)" in caplog.text
    assert (stopper.best_value, stopper.best_step) == (3.0, 6)


@pytest.mark.parametrize(("check_finite", "stopped"), [(True, 6), (False, 24)])
def test_a_figure_that_is_not_finite(check_finite, stopped):
    module, stopper = Scripted(5.0, NAN, 4.0, *FIGURES[1:]), ours(check_finite=check_finite, patience=4)
    assert fit(module, stopper).global_step == stopped
    assert module.at() == (3 if check_finite else 24)
    assert ("nan is not finite" in str(stopper.stopping_reason_message)) is check_finite


def test_the_trainers_own_limits_do_not_make_a_stop_of_the_past_stand():
    """Lightning's, told to stop too early, stops as soon as it may, though the figure has improved since."""
    figures = (5.0, 6.0, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
    assert fit(Scripted(*figures), LightningsOwn("val/loss", patience=1), min_epochs=4).global_step == 12
    assert fit(Scripted(*figures), ours(patience=1), min_epochs=4).global_step == 24
    assert fit(Scripted(*FIGURES), ours(), min_epochs=5).global_step == 15
    assert fit(Scripted(*FIGURES), ours(), min_steps=13).global_step == 15


def test_noise_is_smoothed():
    """One lucky figure is not the best, one unlucky is not the end."""
    figures = (5.0, 4.0, 1.5, 3.0, 1.9, 1.8, 1.7, 1.6)
    module, stopper = Scripted(*figures), ours(patience=9)
    assert fit(module, stopper).global_step == 24
    assert module.at() == 9
    module, stopper = Scripted(*figures), ours(smooth_over=4, patience=5)
    fit(module, stopper)
    decay, values = 0.6, torch.tensor(figures, dtype=torch.float64)
    weights = decay ** torch.arange(8, dtype=torch.float64).flip(0)
    means = [(weights[-count:] * values[:count]).sum() / weights[-count:].sum() for count in range(1, 9)]
    assert stopper.best_value == pytest.approx(min(means).item(), rel=1e-6)
    assert module.at() == 3 * (means.index(min(means)) + 1) == 24


class Ramp(L.Callback):
    """Three epochs of one kind of model, then of another."""

    def __init__(self, start=0, end=9):
        self.start, self.end, self.step = start, end, 0

    @property
    def phase(self):
        return "final" if self.is_final_phase else "ramp"

    @property
    def is_final_phase(self):
        return self.step >= self.end

    def setup(self, trainer, pl_module, stage):
        defer_best_checkpoints(trainer)

    def on_train_batch_end(self, trainer, *_):
        self.step = trainer.global_step - 1


@pytest.mark.parametrize("first", [True, False])
def test_phases_start_the_clock_anew(first):
    """The figure is best in the ramp, and stalls in it, and at the end of it is the first of the final phase's."""
    figures = (1.0, 2.0, 3.0, 6.0, 5.0, 5.5, 5.2, 0.0)
    module, stopper, ramp = Scripted(*figures), ours(stopping_threshold=0.5), Ramp()
    trainer = fit(*((module, stopper, ramp) if first else (module, ramp, stopper)))
    assert (trainer.global_step, module.at(), stopper.best_value) == (21, 15, 5.0)


def test_weights_of_another_phase_are_not_put_back():
    module, stopper = Scripted(1.0, 2.0, NAN, *FIGURES), ours()
    trainer = fit(module, stopper, Ramp())
    assert (trainer.global_step, module.at(), stopper.best_step) == (9, 9, None)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_shapes_that_changed_within_a_phase_are_told():
    class Cuts(L.Callback):
        def on_train_end(self, trainer, pl_module):
            pl_module.layer = nn.Linear(2, 3)

    module = Scripted(*FIGURES)
    with pytest.warns(UserWarning, match="cannot restore the weights of step 6.*names or shapes have changed"):
        fit(module, Cuts(), ours())
    assert module.layer.weight.shape == (3, 2)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
def test_averages_are_restored_as_they_were_validated(first):
    """Whatever the order of the callbacks."""
    stopper, seen = ours(), []

    class Look(L.Callback):
        def on_validation_start(self, trainer, pl_module):
            pass

        def on_validation_batch_start(self, trainer, pl_module, *_):
            seen.append(copy.deepcopy(pl_module.layer.weight.detach()))

    averaging = EMAWeightAveraging(decay=0.5)
    callbacks = (stopper, averaging, Look()) if first else (averaging, stopper, Look())
    module = Scripted(*FIGURES)
    module.validation_step = lambda batch, batch_idx: module.log(
        "val/loss", FIGURES[module.trainer.current_epoch]
    )  # the average's buffers lag
    assert fit(module, *callbacks).global_step == 12
    assert module.layer.weight.equal(seen[3])  # first of the second validation, of three batches each
    assert 0 < module.layer.weight[0, 0] < 6


def test_a_stochastic_average_stays():
    for epochs, expected in ((8, None), (4, 6)):
        module = Scripted(*FIGURES)
        averaging = StochasticWeightAveraging(swa_lrs=1.0, swa_epoch_start=2, annealing_epochs=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the scheduler that it puts in place
            fit(module, ours(patience=2 if expected else 9), averaging, max_epochs=8 if expected else epochs)
        assert module.at() == expected if expected else module.layer.weight[0, 0] not in (18.0, 24.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint")
def test_resumed_runs_end_alike(tmp_path):
    """From each checkpoint, bit for bit; what checkpoints hold is loaded without pickle."""
    options = {"smooth_over": 2, "patience": 2}
    figures = (5.0, 3.0, 4.0, 2.9, 3.5, 3.2, 3.1, 0.4)
    whole, stopper = Scripted(*figures), ours(**options)
    keeper = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    steps = fit(whole, stopper, keeper, enable_checkpointing=True).global_step
    assert whole.at() < steps
    assert len(list(tmp_path.iterdir())) >= 4
    for path in tmp_path.iterdir():  # that of the end too, where the run would go on but for what it holds
        resumed, again = Scripted(*figures), ours(**options)
        trainer = fit(resumed, again, ckpt_path=path)
        torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)
        if path.name not in ("epoch=0.ckpt", "epoch=1.ckpt", "epoch=2.ckpt"):  # saved before the best
            assert resumed.beside == whole.beside == whole.at()
        for name in ("best_value", "best_score", "wait_count", "smoothed"):
            assert again.state_dict()[name] == stopper.state_dict()[name], name
        assert (trainer.global_step, again.best_step) == (steps, stopper.best_step)
        torch.load(path, weights_only=True)
    more = fit(
        Scripted(*figures), ours(**options | {"patience": 3}), ckpt_path=tmp_path / f"epoch={steps // 3 - 1}.ckpt"
    )
    assert more.global_step > steps


def test_a_second_fit_begins_anew():
    module, stopper = Scripted(*FIGURES), ours()
    fit(module, stopper)
    again = Scripted(*FIGURES)
    assert fit(again, stopper).global_step == 12
    assert again.at() == 6


def test_training_metrics_at_the_end_of_epochs():
    class NoValidation(Scripted):
        def on_train_epoch_end(self):
            self.log("loss", FIGURES[self.current_epoch])

    for validation, asked in ((None, None), (ROWS, True)):
        module = NoValidation(*FIGURES)
        trainer = fit(module, ours(monitor="loss", check_on_train_epoch_end=asked), validation=validation)
        assert (trainer.global_step, module.at()) == (12, 6)


def test_sanity_check_and_validate_count_for_nothing():
    module, stopper = Scripted(*FIGURES), ours()
    trainer = fit(module, stopper, num_sanity_val_steps=2)
    trainer.validate(module, ROWS, verbose=False)
    assert stopper._count == 4
    fit(Scripted(NAN), ours(), fast_dev_run=True)


def test_what_cannot_work_is_refused():
    for options, message in [
        ({"mode": "maximum"}, "mode must be 'min' or 'max'; got 'maximum'"),
        ({"min_delta": -0.1}, "min_delta must be at least 0; got -0.1"),
        ({"min_delta": math.inf}, "min_delta must be finite"),
        ({"patience": 0}, "patience must be at least 1; got 0"),
        ({"smooth_over": 0}, "smooth_over must be at least 1; got 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            ours(**options)
    with pytest.raises(ValueError, match="2 RestoringEarlyStopping callbacks would put back best weights"):
        fit(Scripted(1.0), ours(), ours(monitor="val/accuracy", mode="max"))
    fit(Scripted(*FIGURES), ours(), ours(mode="max", restore_best=False))
    with pytest.raises(ValueError, match="looks at the metric after validations, but this run"):
        fit(Scripted(1.0), ours(check_on_train_epoch_end=False), validation=None)


def test_a_metric_that_is_not_logged_is_named_with_the_nearest():
    module = Scripted(*FIGURES)
    with pytest.raises(ValueError, match=r"monitors 'val/los', which is not logged; did you mean 'val/loss'\? Logged"):
        fit(module, ours(monitor="val/los"), num_sanity_val_steps=1)
    assert module.steps == 0, "before training"
    with pytest.raises(
        ValueError, match=r"'score', which is not logged. Logged so far: val/loss. Log it .*on_epoch=True.*_end=True"
    ):
        fit(Scripted(*FIGURES), ours(monitor="score"), num_sanity_val_steps=1)


def test_names_in_a_config():
    """The bare name is Lightning's, the earlier name of ours warns, and takes what saved configs hold of it."""
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_lightning_class_args(L.Trainer, "trainer")

    def made(name, **options):
        config = {"class_path": name, "init_args": {"monitor": "val/loss", **options}}
        parsed = parser.parse_object({"trainer": {"callbacks": [config]}})
        return parser.instantiate(parsed).trainer.callbacks[0]

    assert type(made("EarlyStopping", verbose=True)) is LightningsOwn
    assert made("RestoringEarlyStopping", smooth_over=3).smooth_over == 3
    saved = {"unit": "checks", "stop_when": "all", "smoothing": "none", "smooth_over": 5, "min_steps": 0}
    with pytest.warns(FutureWarning, match="EarlyStopping is now RestoringEarlyStopping"):
        again = made("lightning_accel.callbacks.EarlyStopping", patience=4.0, mode="max", **saved)
    assert (type(again), again.patience, again.smooth_over) == (RestoringEarlyStopping, 4, 1)
    assert again.state_key == ours(mode="max").state_key
    with pytest.warns(FutureWarning), pytest.raises(ValueError, match="EarlyStopping has unit, min_steps no longer"):
        lightning_accel.callbacks.EarlyStopping("val/loss", unit="minutes", min_steps=3)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_checkpoint_of_the_earlier_callback_goes_on(tmp_path):
    """Its state under its key: the best was at step 6, and two checks are over since."""
    whole = Scripted(*FIGURES)
    keeper = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    fit(whole, ours(patience=4), keeper, enable_checkpointing=True, max_epochs=4)
    saved = torch.load(tmp_path / "epoch=3.ckpt", weights_only=True)
    weights = saved["callbacks"].pop(ours().state_key)["best_weights"]
    watch = {"best": 3.0, "smoothed": 3.5, "reference": 3.0, "improved_at": {"checks": 2, "steps": 6},
             "smoother": {"count": 0, "moment": 0.0, "last": []}}  # fmt: skip
    saved["callbacks"]["EarlyStopping{'monitor': {'val/loss': 'min'}}"] = {
        "checks": 4, "seconds": 1.0, "phase": "", "now": {"checks": 4, "steps": 12}, "is_stopped": False,
        "stopping_reason": 0, "stopping_reason_message": None, "best_step": 6, "watches": {"val/loss": watch},
        "best_weights": weights,
    }  # fmt: skip
    torch.save(saved, tmp_path / "earlier.ckpt")
    module, stopper = Scripted(*FIGURES), ours(patience=3)
    trainer = fit(module, stopper, ckpt_path=tmp_path / "earlier.ckpt")
    assert (trainer.global_step, module.at(), stopper.best_step, stopper.best_value) == (15, 6, 6, 3.0)


# ---- several processes


class Disagrees(Scripted):
    """Each process has a figure of its own; their mean is the second best at the second check."""

    def validation_step(self, batch, batch_idx):
        figures = [(5.0, 1.0, 6.0, 6.0), (5.0, 7.0, 6.0, 6.0)][self.global_rank]
        self.log("val/loss", figures[self.current_epoch])


def check_processes_decide_as_one(rank):
    module, stopper = Disagrees(), ours()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = DataLoader(TensorDataset(torch.ones(12, 2)), 2)
        trainer = L.Trainer(callbacks=[stopper], max_epochs=4, strategy="ddp", devices=2,
                            enable_checkpointing=False, **QUIET)  # fmt: skip
        trainer.fit(module, rows, rows)
    told = [str(one.message) for one in caught if "differs between processes (1, 7)" in str(one.message)]
    return trainer.global_step, module.at(), stopper.best_value, len(told)


def test_processes_decide_as_one():
    """By the mean of what each has logged for itself, which is told once, by one of them."""
    first, second = run_ranks(check_processes_decide_as_one)
    assert first == (12, 6, 4.0, 1)
    assert second[:3] == first[:3]


class Keep(L.Callback):
    """Whole weights after each validation, and the worst figure but at the second."""

    def __init__(self):
        self.weights = []

    def on_validation_end(self, trainer, pl_module):
        self.weights.append(whole_of(trainer, pl_module))


def whole_of(trainer, module):
    for part in trainer.strategy.model.modules():
        if hasattr(part, "reshard"):
            part.reshard()
    if any(value.is_meta for value in module.parameters()):
        return trainer.strategy.lightning_module_state_dict()
    state = module.state_dict()
    return {
        key: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for key, value in state.items()
    }


STRATEGIES = {
    "ddp": "ddp",
    "fsdp2": "accel_fsdp2",
    "fsdp2 sharded": partial(FullyShardedStrategy, checkpoints="sharded"),
    "pipeline": "accel_pipeline",
}


def _score(self, batch, batch_idx):
    type(self).validation_step(self, batch, batch_idx)
    self.log("score", (5.0, 3.0, 4.0, 4.0, 4.0, 4.0)[self.current_epoch])


def run_split(folder, name, strategy, ckpt_path=None, save=False):
    module, data = make(name)
    stopper, keep = ours(monitor="score", patience=3), Keep()
    made = strategy() if callable(strategy) else strategy
    saver = [ModelCheckpoint(folder, "{epoch}", save_top_k=-1)] if save else []
    trainer = L.Trainer(callbacks=[ExactResume(), stopper, keep, *saver], max_epochs=6, strategy=made, devices=2,
                        enable_checkpointing=save, **QUIET)  # fmt: skip
    module.validation_step = MethodType(_score, module)
    trainer.fit(module, Rows(data, 8), ckpt_path=ckpt_path)
    return trainer, module, stopper, keep


def check_split(rank, folder, name, kind):
    trainer, module, stopper, keep = run_split(folder, name, STRATEGIES[kind], save=True)
    assert (trainer.current_epoch, stopper.best_step) == (5, trainer.global_step // 5 * 2)
    ended = whole_of(trainer, module)
    if rank == 0 or kind != "pipeline":
        torch.testing.assert_close(ended, keep.weights[1], rtol=0, atol=0)
        changed = [key for key in ended if not ended[key].equal(keep.weights[2][key])]
        assert changed, "training goes on"
    for epoch in (0, 2):
        path = next(one for one in folder.iterdir() if one.name.startswith(f"epoch={epoch}"))
        again, resumed, _, _ = run_split(folder, name, STRATEGIES[kind], ckpt_path=path)
        assert again.global_step == trainer.global_step
        for key, value in whole_of(again, resumed).items():
            assert value.equal(ended[key]), (epoch, key)


@pytest.mark.sampled(slow=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "ddp" else [pytest.mark.slow]) for kind in STRATEGIES]
)
def test_parts_of_each_process_are_put_back(tmp_path, kind):
    """And after a resumption that began before and after the best."""
    run_ranks(check_split, tmp_path, "plain", kind)


@pytest.mark.sampled(slow=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[] if (row + column) % 3 == 2 else [pytest.mark.weekly])
        for row, name in enumerate(("classifier", "language_model", "sequence"))
        for column, kind in enumerate(("ddp", "pipeline", "fsdp2"))
    ],
)
def test_our_own_modules_are_served(tmp_path, name, kind):
    run_ranks(check_split, tmp_path, name, kind)


@pytest.mark.parametrize("monitor", ["val/accuracy", "val_acc", "test/auroc"])
def test_lower_accuracies_for_better_are_warned_of(monitor):
    with pytest.warns(UserWarning, match="pass mode='max'"):
        RestoringEarlyStopping(monitor)
    RestoringEarlyStopping(monitor, mode="max")
    RestoringEarlyStopping("val/loss_of_accelerations")
