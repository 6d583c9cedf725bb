"""Early stopping with restoration of the best weights."""

import math
import re
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping as LightningEarlyStopping
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_accel._private.lightning import averaged_model, logger_connector, should_stop_early
from lightning_accel.callbacks.best_weights import BestWeights
from lightning_accel.callbacks.compression_phase import current_phase, in_final_phase
from lightning_accel.callbacks.fit_end import failures_as_warnings
from lightning_accel.callbacks.trainer_callbacks import callbacks_of, not_logged
from lightning_accel.ops.bounds import if_set, require_at_least, require_flags, require_integers

_HIGHER_IS_BETTER = re.compile(r"(^|[/_ ])(acc|accuracy|auc|auroc|f1|precision|recall|r2|log_prob)($|[/_ ])")
_AT_EPOCH_END = (
    " Log it with self.log(..., on_epoch=True), which is not the default of training_step; if training_step alone logs "
    "it, give check_on_train_epoch_end=True"
)


class RestoringEarlyStopping(LightningEarlyStopping):
    """Stop training when a metric no longer improves, and restore the best weights.

    Compared with Lightning's ``EarlyStopping``, it adds: the best weights at the end of a fit, unless an error or
    Ctrl-C ended it; smoothing; one decision for all processes, by the mean of their values; and training phases. If a
    callback that prunes or quantizes changes the model in phases, patience and best values are reset with each phase,
    only a metric that is not finite stops the run before the last phase, and the best weights are from the last phase.
    Before the Trainer's ``min_epochs`` and ``min_steps``, too, only such a metric stops the run. The metric is checked
    after each validation, or, in a run without validation, at the end of each training epoch.

    The best weights (parameters and buffers) are kept in host memory, each process holding its own shards. They are
    saved in checkpoints, which grow by the size of a model, and restored in ``on_train_end``. Under ``WeightAveraging``
    they are averages, which are what is validated; once ``StochasticWeightAveraging`` has finished, its average, which
    was never validated, stays.

    Args:
        monitor: name of the logged metric, such as ``val/loss``.
        mode: ``min`` if lower values are better, ``max`` if higher values are.
        min_delta: minimum change that counts as an improvement; the best weights ignore it.
        patience: number of checks without improvement after which the run stops.
        smooth_over: number of checks that the value is averaged over, exponentially; 1 takes it as it is. Only
            ``check_finite`` uses the raw value.
        stopping_threshold: stop once the value is better than this.
        divergence_threshold: stop once the value is worse than this.
        check_finite: stop at once when a value is NaN or infinite; otherwise that is a check without improvement.
        restore_best: restore the best weights at the end.
        strict: raise an error if a validation does not log the metric; otherwise such a validation is ignored, for a
            metric that only some validations log.
        check_on_train_epoch_end: check the metric at the end of training epochs if True, after validations if False.

    Attributes:
        best_step: the ``global_step`` of the best weights; None before there are any.
        best_value: the best smoothed value in the current phase.

    Raises:
        TypeError: if an option has another type.
        ValueError: if an argument is out of range; before training, if two of these callbacks would restore weights, or
            the metric would never be checked; at the first check, or already in the sanity check, if it is not logged
            or not a single number.

    Example:
        >>> import lightning as L
        >>> from lightning_accel import RestoringEarlyStopping
        >>> trainer = L.Trainer(max_epochs=100, callbacks=[RestoringEarlyStopping("val/loss", patience=5)])
    """

    def __init__(
        self,
        monitor: str,
        *,
        mode: Literal["min", "max"] = "min",
        min_delta: float = 0.0,
        patience: int = 3,
        smooth_over: int = 1,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_finite: bool = True,
        restore_best: bool = True,
        strict: bool = True,
        check_on_train_epoch_end: bool | None = None,
    ) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"mode must be 'min' or 'max'; got {mode!r}")
        if not isinstance(monitor, str) or not monitor:
            raise ValueError(f"monitor must be the name of a metric, such as 'val/loss'; got {monitor!r}")
        require_at_least(0, min_delta=min_delta)
        if math.isinf(min_delta):
            raise ValueError(f"min_delta must be finite, else nothing is an improvement; got {min_delta}")
        require_at_least(
            -math.inf, **if_set(stopping_threshold=stopping_threshold, divergence_threshold=divergence_threshold)
        )
        require_flags(check_finite=check_finite, restore_best=restore_best, strict=strict)
        require_integers(1, patience=patience, smooth_over=smooth_over)
        if mode == "min" and _HIGHER_IS_BETTER.search(monitor):
            rank_zero_warn(
                f"RestoringEarlyStopping takes lower values of {monitor!r} for better, and restores the weights of the "
                "lowest; pass mode='max' if higher ones are"
            )
        super().__init__(
            monitor,
            min_delta,
            patience,
            mode=mode,
            strict=strict,
            check_finite=check_finite,
            stopping_threshold=stopping_threshold,
            divergence_threshold=divergence_threshold,
        )
        self.smooth_over = smooth_over
        self.restore_best = restore_best
        self.check_on_train_epoch_end = check_on_train_epoch_end
        self._reset()

    def _reset(self) -> None:
        self.stopped_epoch, self.stopping_reason_message = 0, None
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self._best = BestWeights()
        self._loaded: Mapping[str, Any] = {}  # unsharded best weights of a checkpoint
        self._phase: str | None = None
        self._warned, self._has_checked = False, False
        self._start_phase()

    def _start_phase(self) -> None:
        self.best_value = math.inf if self.mode == "min" else -math.inf
        self.best_score, self.wait_count = torch.tensor(self.best_value), 0
        self.best_step: int | None = None
        self._best.clear()  # from another phase, and perhaps of other shapes
        self._average, self._count = 0.0, 0  # biased moving average, and the number of values in it
        self._smoothed = math.nan

    @property
    def state_key(self) -> str:
        return f"RestoringEarlyStopping{ {'monitor': self.monitor, 'mode': self.mode}!r}"

    # ---- when to check

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._reset()
        restoring = [one for one in callbacks_of(trainer, RestoringEarlyStopping) if one.restore_best]
        if self.restore_best and len(restoring) > 1:
            raise ValueError(
                f"{len(restoring)} RestoringEarlyStopping callbacks would put back best weights, each its own; give "
                "all but one restore_best=False"
            )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        asked = self.check_on_train_epoch_end
        if asked is False and not trainer.enable_validation:
            raise ValueError(
                "RestoringEarlyStopping(check_on_train_epoch_end=False) looks at the metric after validations, but "
                "this run has none: give it validation data, or leave the argument out"
            )
        self._check_on_train_epoch_end = not trainer.enable_validation if asked is None else asked

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Reject a name that nothing logs, before training, if validation logs others with the same first part."""
        logged = trainer.callback_metrics
        is_due = self.strict and not self._check_on_train_epoch_end and _stage(self.monitor) in map(_stage, logged)
        if is_due and self.monitor not in logged:
            raise not_logged("RestoringEarlyStopping", self.monitor, logged, _AT_EPOCH_END)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._loaded:
            self._best.scatter(trainer, self._validated_module(trainer, pl_module), self._loaded)
            self._loaded = {}
        was_stopped = self.stopping_reason != EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason, self.stopping_reason_message = EarlyStoppingReason.NOT_STOPPED, None
        if was_stopped and math.isfinite(self._smoothed):  # judge it again, since patience may be higher now
            waited, self.wait_count = self.wait_count, self.wait_count - 1
            should_stop, reason = should_stop_early(self, torch.tensor(self._smoothed, dtype=torch.float64))
            self.wait_count = waited
            if should_stop:
                rank_zero_info("the checkpoint is of a run that was stopped; more patience lets it go on")
                self._stop(trainer, reason)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._update_phase(trainer)

    # ---- checks

    def _run_early_stopping_check(self, trainer: L.Trainer) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by a connector
            return
        self._update_phase(trainer)
        value = self._mean_over_processes(trainer)
        if value is None:
            return
        self._has_checked = True
        is_final = in_final_phase(trainer)
        if math.isfinite(value):
            value = self._smoothed = self._smooth(value)
            if value < self.best_value if self.mode == "min" else value > self.best_value:
                self.best_value = value
                if is_final:
                    self.best_step = trainer.global_step
                    if self.restore_best:
                        self._best.store(trainer, self._validated_module(trainer, trainer.lightning_module))
        should_stop, reason = should_stop_early(self, torch.tensor(value, dtype=torch.float64))
        is_broken = self.stopping_reason == EarlyStoppingReason.NON_FINITE_METRIC
        if should_stop and (is_broken or (is_final and _is_long_enough(trainer))):
            self._stop(trainer, reason)
        elif should_stop:
            self.stopping_reason = EarlyStoppingReason.NOT_STOPPED

    def _smooth(self, value: float) -> float:
        """Return the exponential moving average, bias-corrected as Adam's moments are (Kingma and Ba 2015)."""
        decay = 1 - 2 / (self.smooth_over + 1)
        self._count += 1
        self._average = decay * self._average + (1 - decay) * value
        return self._average / (1 - decay**self._count)

    def _stop(self, trainer: L.Trainer, reason: str | None) -> None:
        self.stopping_reason_message, self.stopped_epoch = reason, trainer.current_epoch
        rank_zero_info(f"RestoringEarlyStopping stops the run at step {trainer.global_step}: {reason}")
        trainer.should_stop = True

    def _update_phase(self, trainer: L.Trainer) -> None:
        phase = current_phase(trainer)
        if self._phase is not None and phase != self._phase:
            self._start_phase()
        self._phase = phase

    def _mean_over_processes(self, trainer: L.Trainer) -> float | None:
        """Return the metric, averaged over processes; None if this validation does not log it."""
        logged = trainer.callback_metrics
        if not self.strict:
            logged = logger_connector(trainer).metrics["callback"]  # of this validation alone
        mine = _to_float(self.monitor, logged[self.monitor]) if self.monitor in logged else 0.0
        device = trainer.strategy.root_device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        row = torch.tensor([mine, self.monitor not in logged], device=device, dtype=dtype)
        values, missing = zip(*trainer.strategy.all_gather(row).reshape(-1, 2).tolist(), strict=True)
        if any(missing):
            if self.strict:
                raise not_logged("RestoringEarlyStopping", self.monitor, trainer.callback_metrics, _AT_EPOCH_END)
            return None
        if len(set(map(repr, values))) == 1:  # with NaN, too
            return float(values[0])
        if not self._warned:
            self._warned = True
            rank_zero_warn(
                f"RestoringEarlyStopping: {self.monitor} differs between processes "
                f"({', '.join(f'{one:.6g}' for one in values)}); their mean decides. Log it with sync_dist=True, so "
                "that all see the same"
            )
        return float(sum(values) / len(values))

    # ---- the best weights

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore the best weights, whether weight-averaging callbacks come before or after this one."""
        if not self.strict and not self._has_checked and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_warn(
                f"RestoringEarlyStopping never looked at {self.monitor}, which no validation logged. Logged: "
                f"{', '.join(sorted(trainer.callback_metrics)) or 'nothing'}"
            )
        # a stage of a pipeline may have no weights of its own
        if not self.restore_best or not trainer.strategy.reduce_boolean_decision(bool(self._best), all=False):
            return
        if any(trainer.current_epoch - 1 >= one.swa_end for one in callbacks_of(trainer, StochasticWeightAveraging)):
            rank_zero_info("RestoringEarlyStopping leaves the weights that StochasticWeightAveraging has averaged")
            return
        what = f"the weights of step {self.best_step}, the best by {self.monitor} ({self.best_value:.6g})"
        # WeightAveraging copies it to the module in its on_train_end
        measured = self._validated_module(trainer, pl_module)
        targets = [pl_module] if measured is pl_module else [pl_module, measured]
        fits = all(self._best.matches(trainer, target) for target in targets)
        if not trainer.strategy.reduce_boolean_decision(fits):  # else processes would mix weights of different steps
            rank_zero_warn(f"RestoringEarlyStopping cannot restore {what}: names or shapes have changed since")
            return
        with failures_as_warnings(f"RestoringEarlyStopping could not restore {what}"):
            for target in targets:
                self._best.copy_to(trainer, target)
            rank_zero_info(f"RestoringEarlyStopping restored {what}")
        self._best.clear()

    def _validated_module(self, trainer: L.Trainer, pl_module: L.LightningModule) -> nn.Module:
        """Return the module that validations run with: the average of WeightAveraging, if there is one."""
        for one in callbacks_of(trainer, WeightAveraging):
            if (average := averaged_model(one)) is not None:
                return average.get_submodule("module")
        return pl_module

    # ---- resuming

    def state_dict(self) -> dict[str, Any]:
        mine = {"best_value": self.best_value, "best_step": self.best_step, "phase": self._phase}
        return {**super().state_dict(), **mine, "smoothed": [self._smoothed, self._average, self._count]}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Continue from the state of Lightning's callback, or of an earlier version of this one, if there is one."""
        states = checkpoint.get("callbacks", {})
        present = {one.state_key for one in callbacks_of(trainer, L.Callback)}
        for monitored in ({"monitor": {self.monitor: self.mode}}, {"monitor": self.monitor, "mode": self.mode}):
            key = f"EarlyStopping{monitored!r}"
            if self.state_key not in states and key in states and key not in present:
                states[self.state_key] = states[key]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = _convert_earlier(state_dict, float(self.best_score)) if "watches" in state_dict else state_dict
        super().load_state_dict({**state, "patience": self.patience})
        self.best_value = state.get("best_value", float(self.best_score))
        self.best_step, self._phase = state.get("best_step"), state.get("phase")
        self._smoothed, self._average, self._count = state.get("smoothed", [math.nan, 0.0, 0])
        self._loaded = state.get("best_weights", {}) if self.restore_best else {}

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        weights = self._best.gather(trainer, self._validated_module(trainer, pl_module))
        checkpoint["callbacks"][self.state_key]["best_weights"] = weights


def EarlyStopping(
    monitor: str,
    *,
    mode: Literal["min", "max"] = "min",
    patience: float = 3,
    unit: str = "checks",
    stop_when: str = "all",
    min_steps: int = 0,
    min_seconds: float = 0.0,
    smoothing: str = "none",
    smooth_over: int = 5,
    min_delta: float = 0.0,
    stopping_threshold: float | None = None,
    divergence_threshold: float | None = None,
    check_finite: bool = True,
    restore_best: bool = True,
    strict: bool = True,
    check_on_train_epoch_end: bool | None = None,
) -> RestoringEarlyStopping:
    """Return a :class:`RestoringEarlyStopping`, with a warning: the earlier name, which saved configs hold.

    Raises:
        ValueError: if an option is set that there is no longer.
    """
    warnings.warn("lightning_accel.callbacks.EarlyStopping is now RestoringEarlyStopping", FutureWarning, stacklevel=2)
    gone = {
        "unit": unit != "checks",
        "min_steps": min_steps,
        "min_seconds": min_seconds,
        "stop_when": stop_when != "all",
    }
    if set_ones := [name for name, is_set in {**gone, "smoothing='median'": smoothing == "median"}.items() if is_set]:
        raise ValueError(f"EarlyStopping has {', '.join(set_ones)} no longer; take RestoringEarlyStopping without")
    return RestoringEarlyStopping(
        monitor,
        mode=mode,
        min_delta=min_delta,
        patience=int(patience),
        smooth_over=smooth_over if smoothing == "average" else 1,
        stopping_threshold=stopping_threshold,
        divergence_threshold=divergence_threshold,
        check_finite=check_finite,
        restore_best=restore_best,
        strict=strict,
        check_on_train_epoch_end=check_on_train_epoch_end,
    )


def warn_of_early_end(trainer: L.Trainer, aim: str) -> None:
    """Warn that Lightning's ``EarlyStopping``, which knows no phases, may end a run before ``aim``.

    Args:
        trainer: whose callbacks are examined.
        aim: a clause, such as "Pruning reaches its target".
    """
    knows_phases = all(isinstance(one, RestoringEarlyStopping) for one in callbacks_of(trainer, LightningEarlyStopping))
    has_minimum = bool(trainer.min_steps) or (trainer.min_epochs or 0) > 1
    if not (knows_phases or has_minimum):
        rank_zero_warn(
            f"EarlyStopping of Lightning may end the run before {aim}, since it compares the model with those before. "
            "Take lightning_accel.RestoringEarlyStopping, which waits until then, or set min_epochs or min_steps of "
            "the Trainer"
        )


def _convert_earlier(state: Mapping[str, Any], worst: float) -> dict[str, Any]:
    """Convert the state of an earlier version of this callback, which tracked several metrics; keep the first."""
    watch = next(iter(state["watches"].values()))
    last = math.nan if watch["smoothed"] is None else watch["smoothed"]
    return {
        "stopped_epoch": 0,
        **state,
        "wait_count": state["now"]["checks"] - watch["improved_at"]["checks"],
        "best_score": torch.tensor(worst if watch["reference"] is None else watch["reference"]),
        "best_value": worst if watch["best"] is None else watch["best"],
        "smoothed": [last, watch["smoother"]["moment"], watch["smoother"]["count"]],
    }


def _is_long_enough(trainer: L.Trainer) -> bool:
    """Return whether the Trainer's own minima are over; told to stop earlier, it would stop then, improved or not."""
    epochs = trainer.current_epoch + int(trainer.is_last_batch)
    return trainer.global_step >= (trainer.min_steps or 0) and epochs >= (trainer.min_epochs or 0)


def _to_float(name: str, value: Any) -> float:
    value = torch.as_tensor(value).detach()
    if value.numel() != 1:
        raise ValueError(f"RestoringEarlyStopping needs a single number of {name}; got shape {tuple(value.shape)}")
    return float(value)


def _stage(name: str) -> str:
    return re.split(r"[/_.]", name)[0]
