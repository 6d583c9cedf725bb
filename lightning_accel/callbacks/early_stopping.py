"""Early stopping with restoration of the best weights."""

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import Any, Literal, TypeAlias, get_args

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping as LightningsEarlyStopping
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_accel.callbacks.best_weights import BestWeights
from lightning_accel.callbacks.compression_phase import current_phase, in_final_phase
from lightning_accel.callbacks.fit_end import failures_as_warnings
from lightning_accel.callbacks.metric_names import require_logged
from lightning_accel.callbacks.trainer_callbacks import callbacks_of
from lightning_accel.ops.names import list_of_names

Unit: TypeAlias = Literal["checks", "steps", "epochs", "seconds", "minutes", "hours"]
Smoothing: TypeAlias = Literal["none", "average", "median"]
RunProgress: TypeAlias = dict[str, float]  # progress of the run: checks, steps, epochs, seconds
_SECONDS = {"seconds": 1, "minutes": 60, "hours": 3600}


class _Unlisted(LightningsEarlyStopping):
    """Hide subclasses from configs that name a class without its package, where ``EarlyStopping`` is Lightning's.

    It inherits from Lightning's callback only for its place in the order: the Trainer calls such callbacks after the
    module's own hooks, which may log metrics. jsonargparse would find two classes of that name and reject it. It
    ignores classes that are defined in functions, and their subclasses; a full name, ``lightning_accel.EarlyStopping``,
    is imported from its package.
    """

    __qualname__ = "unlisted.<locals>._Unlisted"


_AT_EPOCH_END = " What is logged at the end of training epochs alone needs check_on_train_epoch_end=True"


class EarlyStopping(_Unlisted):
    """Stop training when metrics no longer improve, and restore the best weights.

    Compared with Lightning's callback of this name, which works as before, it adds: the best weights at the end of a
    fit, unless an error or Ctrl-C ended it; patience in steps or time; a minimum duration; smoothing; several metrics;
    one decision for all processes; and training phases. If a callback that prunes or quantizes changes the model in
    phases, patience and best values are reset with each phase, only a metric that is not finite stops the run before
    the last phase, and the best weights are from the last phase. Metrics are checked after each validation, or, in a
    run without validation, at the end of each training epoch.

    The best weights (parameters and buffers) are kept in host memory, each process holding its own shards. They are
    saved in checkpoints, which grow by the size of a model, and restored in ``on_train_end``. Under ``WeightAveraging``
    they are averages, which are what is validated; once ``StochasticWeightAveraging`` has finished, its average, which
    was never validated, stays.

    Args:
        monitor: name of the metric, several names, or a mapping from names to options that override the arguments
            ``mode`` to ``divergence_threshold``: ``{"val/loss": {}, "val/accuracy": {"mode": "max"}}``. The first
            metric determines the best weights.
        mode: ``min`` if lower values are better, ``max`` if higher values are.
        min_delta: minimum change that counts as an improvement; the best weights ignore it.
        stopping_threshold: stop once the value is better than this.
        divergence_threshold: stop once the value is worse than this.
        patience: duration without improvement after which the run stops.
        unit: unit of ``patience``.
        stop_when: stop when ``all`` metrics have stalled, or ``any`` of them.
        min_steps: number of optimizer steps before which only a value that is not finite stops the run.
        min_seconds: training time before which only a value that is not finite stops the run.
        smoothing: ``average`` (exponential, bias-corrected) or ``median`` of the values of the last checks; only
            ``check_finite`` uses the raw value.
        smooth_over: number of checks to smooth over.
        check_finite: stop at once when a value is NaN or infinite; otherwise that is a check without improvement.
        restore_best: restore the best weights at the end.
        strict: raise an error if a validation does not log the metrics; otherwise such a validation is ignored, for
            metrics that only some validations log.
        check_on_train_epoch_end: check metrics at the end of training epochs if True, after validations if False.

    Attributes:
        reason: why the run was stopped; empty if this callback did not stop it.
        best_step: the ``global_step`` of the best weights; None before there are any.
        stopping_reason: the category of ``reason`` in Lightning's terms; with several metrics, that of the first that
            fulfils it.
        best_score: the last smoothed value of the first metric that was an improvement by ``min_delta``.
        wait_count: number of checks since then.

    Raises:
        ValueError: if an argument is out of range; before training, if two of these callbacks would restore weights, or
            no metric would ever be checked; at the first check, or already in the sanity check, if a metric is not
            logged or not a single number.
    """

    def __init__(
        self,
        monitor: str | Sequence[str] | Mapping[str, Mapping[str, Any]],
        *,
        mode: Literal["min", "max"] = "min",
        min_delta: float = 0.0,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        patience: float = 3,
        unit: Unit = "checks",
        stop_when: Literal["all", "any"] = "all",
        min_steps: int = 0,
        min_seconds: float = 0.0,
        smoothing: Smoothing = "none",
        smooth_over: int = 5,
        check_finite: bool = True,
        restore_best: bool = True,
        strict: bool = True,
        check_on_train_epoch_end: bool | None = None,
    ) -> None:
        names = list_of_names(monitor)
        if not names:
            raise ValueError("EarlyStopping needs the name of a metric to monitor, such as 'val/loss'; got none")
        if len(set(names)) < len(names):
            raise ValueError(f"monitor names a metric twice: {', '.join(names)}")
        goal = Goal(mode, min_delta, stopping_threshold, divergence_threshold)
        options = monitor if isinstance(monitor, Mapping) else {}
        self.goals = {name: goal.with_options(name, options.get(name) or {}) for name in names}
        super().__init__(names[0], mode=self.goals[names[0]].mode)
        _require_patience(patience, unit)
        if stop_when not in ("all", "any"):
            raise ValueError(f"stop_when must be 'all' or 'any'; got {stop_when!r}")
        if min_steps < 0 or min_seconds < 0:
            raise ValueError(f"min_steps and min_seconds must be at least 0; got {min_steps} and {min_seconds}")
        Smoother(smoothing, smooth_over)  # validates the arguments
        self.patience: float = patience  # type: ignore[assignment]  # Lightning's counts checks alone
        self.unit, self.stop_when = unit, stop_when
        self.min_steps, self.min_seconds = min_steps, min_seconds
        self.smoothing, self.smooth_over = smoothing, smooth_over
        self.check_finite, self.restore_best, self.strict = check_finite, restore_best, strict
        self.check_on_train_epoch_end = check_on_train_epoch_end
        self._reset()

    def _reset(self) -> None:
        self.reason = ""
        self.stopping_reason_message, self.stopped_epoch = None, 0  # attributes of Lightning's callback
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.best_step: int | None = None
        self._best = BestWeights()
        self._loaded: Mapping[str, Any] = {}  # unsharded best weights of a checkpoint
        self._checks = 0
        self._seconds = 0.0  # training time before _started_at
        self._started_at: float | None = None
        self._phase: str | None = None
        self._warned_of: set[str] = set()
        self._at_epoch_end = False
        self._was_stopped = False
        self._now: RunProgress = {"checks": 0, "steps": 0, "epochs": 0, "seconds": 0.0}  # at the last check
        self._start_tracking(self._now)

    def _start_tracking(self, start: RunProgress) -> None:
        self.watches = {
            name: MetricTracker(name, goal, self.smoothing, self.smooth_over, start)
            for name, goal in self.goals.items()
        }
        self._set_lightning_attributes()

    def _set_lightning_attributes(self) -> None:
        """Set the attributes of Lightning's callback of this name, for code that reads them."""
        watch = next(iter(self.watches.values()))
        worst = math.inf if watch.goal.mode == "min" else -math.inf
        self.best_score = torch.tensor(worst if watch.reference is None else watch.reference)
        self.wait_count = int(watch.stalled_for(self._now, "checks"))

    @property
    def state_key(self) -> str:
        return self._generate_state_key(monitor={name: goal.mode for name, goal in self.goals.items()})

    @property
    def best(self) -> dict[str, float | None]:
        """Return the best smoothed value of each metric in the current phase."""
        return {name: watch.best for name, watch in self.watches.items()}

    @property
    def smoothed(self) -> dict[str, float | None]:
        """Return the smoothed value of each metric at the last check."""
        return {name: watch.smoothed for name, watch in self.watches.items()}

    # ---- when to check

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._reset()
        restoring = [one for one in callbacks_of(trainer, EarlyStopping) if one.restore_best]
        if self.restore_best and len(restoring) > 1:
            raise ValueError(
                f"{len(restoring)} EarlyStopping callbacks would put back best weights, each its own; give all but one "
                "restore_best=False, or one callback all metrics: monitor=[...]"
            )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.check_on_train_epoch_end is False and not trainer.enable_validation:
            raise ValueError(
                "EarlyStopping(check_on_train_epoch_end=False) looks at metrics after validations, but this run has "
                "none: give it validation data, or leave the argument out"
            )
        asked = self.check_on_train_epoch_end
        self._at_epoch_end = not trainer.enable_validation if asked is None else asked

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Reject a name that nothing logs, before training, if validation logs others with the same first part."""
        if self.strict and not self._at_epoch_end and trainer.callback_metrics:
            stems = {_stage(name) for name in trainer.callback_metrics}
            missing = [name for name in self.goals if _stage(name) in stems and name not in trainer.callback_metrics]
            require_logged("EarlyStopping", missing, trainer.callback_metrics, _AT_EPOCH_END)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._loaded:
            self._best.scatter(trainer, self._validated_module(trainer, pl_module), self._loaded)
            self._loaded = {}
        self._started_at = time.monotonic()
        self.stopping_reason, self.stopping_reason_message = EarlyStoppingReason.NOT_STOPPED, None
        self.stopped_epoch = 0
        if self._was_stopped and (verdict := self._reason_to_stop(self._now)):
            rank_zero_info("EarlyStopping: the checkpoint is of a run that was stopped; more patience lets it go on")
            self._stop(trainer, *verdict)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._update_phase(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking and not self._at_epoch_end:
            self._check(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._at_epoch_end:
            self._check(trainer, pl_module)

    # ---- checks and decisions

    def _check(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by a connector
            return
        self._update_phase(trainer)
        values, seconds = self._gather_metrics(trainer)
        if not values:
            return
        self._checks += 1
        epochs = trainer.current_epoch + int(trainer.is_last_batch)
        now: RunProgress = {"checks": self._checks, "steps": trainer.global_step, "epochs": epochs, "seconds": seconds}
        self._now = now
        are_best = [watch.add(values[name], now) for name, watch in self.watches.items()]
        self._set_lightning_attributes()
        final = in_final_phase(trainer)
        if are_best[0] and final:
            self.best_step = trainer.global_step
            if self.restore_best:
                self._best.store(trainer, self._validated_module(trainer, pl_module))
        broken = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
        if self.check_finite and broken:
            why = ", ".join(broken) + ", which is not finite"
            self._stop(trainer, why, EarlyStoppingReason.NON_FINITE_METRIC)
        elif final and self._is_long_enough(trainer, now) and (verdict := self._reason_to_stop(now)):
            self._stop(trainer, *verdict)

    def _reason_to_stop(self, now: RunProgress) -> tuple[str, EarlyStoppingReason] | None:
        """Return why to stop, judged by smoothed values; None if there is no reason."""
        for watch in self.watches.values():
            if crossed := watch.crossed_threshold():
                name, text = crossed
                return text, EarlyStoppingReason[name.upper()]
        clock, size = ("seconds", _SECONDS[self.unit]) if self.unit in _SECONDS else (self.unit, 1)
        waits = {name: watch.stalled_for(now, clock) / size for name, watch in self.watches.items()}
        stalled = [name for name, wait in waits.items() if wait >= self.patience]
        if len(stalled) < (len(waits) if self.stop_when == "all" else 1):
            return None
        described = [f"{name} for {waits[name]:.6g} {self.unit} (best {self._format_best(name)})" for name in stalled]
        text = f"no improvement of {', of '.join(described)}, patience is {self.patience:g}"
        return text, EarlyStoppingReason.PATIENCE_EXHAUSTED

    def _format_best(self, name: str) -> str:
        best = self.watches[name].best
        return "none" if best is None else f"{best:.6g}"

    def _stop(self, trainer: L.Trainer, reason: str, kind: EarlyStoppingReason) -> None:
        if not self.reason:
            self.stopping_reason = kind
            self.reason = self.stopping_reason_message = reason
            self.stopped_epoch = trainer.current_epoch
            rank_zero_info(f"EarlyStopping stops the run at step {trainer.global_step}: {reason}")
        trainer.should_stop = True

    def _is_long_enough(self, trainer: L.Trainer, now: RunProgress) -> bool:
        """Return whether all minimum durations are over.

        The Trainer's own are included: once asked to stop, it would stop at their end, whether improved or not.
        """
        steps, epochs = max(self.min_steps, trainer.min_steps or 0), trainer.min_epochs or 0
        return now["steps"] >= steps and now["epochs"] >= epochs and now["seconds"] >= self.min_seconds

    def _update_phase(self, trainer: L.Trainer) -> None:
        phase = current_phase(trainer)
        if self._phase is not None and phase != self._phase:
            epochs = trainer.current_epoch + int(trainer.is_last_batch)
            steps, seconds = trainer.global_step, self._training_time()
            self._start_tracking({"checks": self._checks, "steps": steps, "epochs": epochs, "seconds": seconds})
            self._best.clear()  # from another phase, and perhaps of other shapes
            self.best_step = None
        self._phase = phase

    def _training_time(self) -> float:
        running = 0.0 if self._started_at is None else time.monotonic() - self._started_at
        return self._seconds + running

    def _gather_metrics(self, trainer: L.Trainer) -> tuple[dict[str, float], float]:
        """Return each metric and the training time, averaged over processes; no metrics if this is not a check."""
        logged = trainer.callback_metrics
        if not self.strict:
            connector: Any = trainer._logger_connector  # there is no public access to this validation's own metrics
            logged = connector.metrics["callback"]
        mine = [_to_float(name, logged[name]) if name in logged else math.nan for name in self.goals]
        row = [*mine, *(float(name not in logged) for name in self.goals), self._training_time()]
        device = trainer.strategy.root_device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        rows = trainer.strategy.all_gather(torch.tensor(row, device=device, dtype=dtype)).reshape(-1, len(row)).tolist()
        columns = list(zip(*rows, strict=True))
        names = list(self.goals)
        missing = [name for name, gone in zip(names, columns[len(names) :], strict=False) if any(gone)]
        if missing and not self.strict:
            return {}, 0.0
        require_logged("EarlyStopping", missing, trainer.callback_metrics, _AT_EPOCH_END)
        for name, column in zip(names, columns, strict=False):
            if len(set(map(repr, column))) > 1 and name not in self._warned_of:
                self._warned_of.add(name)
                rank_zero_warn(
                    f"EarlyStopping: {name} differs between processes ({', '.join(f'{one:.6g}' for one in column)}); "
                    "their mean decides. Log it with sync_dist=True, so that all see the same"
                )
        means = [column[0] if len(set(map(repr, column))) == 1 else sum(column) / len(column) for column in columns]
        return dict(zip(names, means, strict=False)), means[-1]

    # ---- the best weights

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore the best weights, whether weight-averaging callbacks come before or after this one."""
        self._seconds, self._started_at = self._training_time(), None
        if not self.strict and not self._checks and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_warn(
                f"EarlyStopping never looked at {', '.join(self.goals)}: no validation logged all of them. Logged: "
                f"{', '.join(sorted(trainer.callback_metrics)) or 'nothing'}"
            )
        # a stage of a pipeline may have no weights of its own
        if not self.restore_best or not trainer.strategy.reduce_boolean_decision(bool(self._best), all=False):
            return
        if any(trainer.current_epoch - 1 >= one.swa_end for one in callbacks_of(trainer, StochasticWeightAveraging)):
            rank_zero_info("EarlyStopping leaves the weights that StochasticWeightAveraging has averaged")
            return
        name = next(iter(self.watches))
        what = f"the weights of step {self.best_step}, the best by {name} ({self._format_best(name)})"
        # WeightAveraging copies it to the module in its on_train_end
        measured = self._validated_module(trainer, pl_module)
        targets = [pl_module] if measured is pl_module else [pl_module, measured]
        fits = all(self._best.matches(trainer, target) for target in targets)
        if not trainer.strategy.reduce_boolean_decision(fits):  # else processes would mix weights of different steps
            rank_zero_warn(f"EarlyStopping cannot restore {what}: names or shapes have changed since")
            return
        with failures_as_warnings(f"EarlyStopping could not restore {what}"):
            for target in targets:
                self._best.copy_to(trainer, target)
            rank_zero_info(f"EarlyStopping restored {what}")
        self._best.clear()

    def _validated_module(self, trainer: L.Trainer, pl_module: L.LightningModule) -> nn.Module:
        """Return the module that validations run with: the average of WeightAveraging, if there is one."""
        for one in callbacks_of(trainer, WeightAveraging):
            if one._average_model is not None:  # there is no public access
                return one._average_model.module
        return pl_module

    def state_dict(self) -> dict[str, Any]:
        return {
            "checks": self._checks,
            "seconds": self._training_time(),
            "phase": self._phase,
            "now": dict(self._now),
            "is_stopped": bool(self.reason),
            "stopping_reason": self.stopping_reason.value,
            "stopping_reason_message": self.stopping_reason_message,
            "stopped_epoch": self.stopped_epoch,
            "best_step": self.best_step,
            "watches": {name: watch.state_dict() for name, watch in self.watches.items()},
        }

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Continue from the state of Lightning's callback of this name, if the checkpoint was written with that one."""
        callbacks = checkpoint.get("callbacks", {})
        key = LightningsEarlyStopping.state_key.fget(self)  # type: ignore[attr-defined]  # a property
        present = {one.state_key for one in callbacks_of(trainer, L.Callback)}
        if self.state_key in callbacks or key not in callbacks or key in present:
            return
        epochs = checkpoint["epoch"] + 1  # the running epoch counts as completed
        self._load_lightning_state(callbacks[key], checkpoint["global_step"], epochs)

    def _load_lightning_state(self, state: Mapping[str, Any], steps: int = 0, epochs: int = 0) -> None:
        if len(self.goals) > 1:
            raise ValueError(
                f"the state of Lightning's EarlyStopping is of one metric, and this one monitors {len(self.goals)}: "
                f"{', '.join(self.goals)}; start without that state, or monitor one"
            )
        self._checks = state["wait_count"]
        self._now = {"checks": self._checks, "steps": steps, "epochs": epochs, "seconds": 0.0}
        self._start_tracking({**self._now, "checks": 0})
        if math.isfinite(best := float(state["best_score"])):
            watch = next(iter(self.watches.values()))
            watch.best = watch.reference = best
        self._set_lightning_attributes()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "watches" not in state_dict:
            self._load_lightning_state(state_dict)
            return
        self._checks, self._seconds = state_dict["checks"], state_dict["seconds"]
        self._phase, self.best_step = state_dict["phase"], state_dict["best_step"]
        self._now, self._was_stopped = dict(state_dict["now"]), state_dict["is_stopped"]
        for name, state in state_dict["watches"].items():
            self.watches[name].load_state_dict(state)
        self.stopping_reason = EarlyStoppingReason(state_dict.get("stopping_reason", 0))
        self.stopping_reason_message = state_dict.get("stopping_reason_message")
        self.stopped_epoch = state_dict.get("stopped_epoch", 0)
        self._set_lightning_attributes()
        self._loaded = state_dict.get("best_weights", {}) if self.restore_best else {}

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        weights = self._best.gather(trainer, self._validated_module(trainer, pl_module))
        checkpoint["callbacks"][self.state_key]["best_weights"] = weights


def _require_patience(patience: float, unit: str) -> None:
    if unit not in get_args(Unit):
        raise ValueError(f"unit of patience must be one of {', '.join(get_args(Unit))}; got {unit!r}")
    if isinstance(patience, bool) or not isinstance(patience, int | float) or not 0 < patience < math.inf:
        raise ValueError(f"patience must be a number above 0, of the unit {unit!r}; got {patience!r}")
    if unit not in _SECONDS and patience != int(patience):
        raise ValueError(f"patience={patience} cannot be counted in {unit}; give a whole number, or a unit of time")


def _to_float(name: str, value: Any) -> float:
    value = torch.as_tensor(value).detach()
    if value.numel() != 1:
        raise ValueError(f"EarlyStopping needs a single number of {name}; got shape {tuple(value.shape)}")
    return float(value)


def _stage(name: str) -> str:
    return re.split(r"[/_.]", name)[0]


@dataclass(frozen=True)
class Goal:
    """Hold the options of a monitored metric."""

    mode: Literal["min", "max"] = "min"
    min_delta: float = 0.0
    stopping_threshold: float | None = None
    divergence_threshold: float | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode must be 'min' or 'max'; got {self.mode!r}")
        if not 0 <= self.min_delta < math.inf:
            raise ValueError(f"min_delta must be at least 0, in either mode; got {self.min_delta}")

    def is_better(self, value: float, other: float) -> bool:
        return value < other if self.mode == "min" else value > other

    def with_options(self, name: str, options: Mapping[str, Any]) -> "Goal":
        """Return a copy in which ``options`` of the metric ``name`` override the fields.

        Raises:
            ValueError: if there is no such option.
        """
        known = [field.name for field in fields(self)]
        if unknown := sorted(set(options) - set(known)):
            raise ValueError(f"{name} has no option {', '.join(unknown)}; there are {', '.join(known)}")
        return Goal(**{**asdict(self), **options})


class Smoother:
    """Smooth values by an exponential moving average, or by the median of the last ones.

    The average is bias-corrected like Adam's moments (Kingma and Ba 2015, section 3), so that the first result is the
    first value itself. The last ``over`` values have 1 - 1/e^2 of the total weight.
    >>> one = Smoother("average", over=3)
    >>> [round(one.add(value), 3) for value in (4.0, 1.0, 1.0)]
    [4.0, 2.0, 1.429]
    """

    def __init__(self, kind: Smoothing, over: int) -> None:
        if kind not in get_args(Smoothing):
            raise ValueError(f"smoothing must be one of {', '.join(get_args(Smoothing))}; got {kind!r}")
        if isinstance(over, bool) or not isinstance(over, int) or over < 1:
            raise ValueError(f"smooth_over must be a number of checks, at least 1; got {over!r}")
        self.kind, self.over = kind, over
        self.count, self.moment = 0, 0.0
        self.last: list[float] = []

    def add(self, value: float) -> float:
        if self.kind == "none":
            return value
        if self.kind == "median":
            self.last = [*self.last, value][-self.over :]
            return median(self.last)
        decay = 1 - 2 / (self.over + 1)
        self.count += 1
        self.moment = decay * self.moment + (1 - decay) * value
        return self.moment / (1 - decay**self.count)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "moment": self.moment, "last": list(self.last)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, self.moment, self.last = state["count"], state["moment"], list(state["last"])


class MetricTracker:
    """Track one metric towards its goal.

    Attributes:
        best: best smoothed value, None before there is one.
        smoothed: smoothed value of the last check.
    """

    def __init__(self, name: str, goal: Goal, smoothing: Smoothing, over: int, start: RunProgress) -> None:
        self.name, self.goal = name, goal
        self.smoother = Smoother(smoothing, over)
        self.best: float | None = None
        self.smoothed: float | None = None
        self.reference: float | None = None  # the value to improve on by min_delta
        self.improved_at = dict(start)

    def add(self, value: float, now: RunProgress) -> bool:
        """Add a value and return whether it is the best so far; a value that is not finite is ignored."""
        if not math.isfinite(value):
            return False
        self.smoothed = smoothed = self.smoother.add(value)
        margin = self.goal.min_delta if self.goal.mode == "min" else -self.goal.min_delta
        if self.reference is None or self.goal.is_better(smoothed + margin, self.reference):
            self.reference, self.improved_at = smoothed, dict(now)
        if self.best is None or self.goal.is_better(smoothed, self.best):
            self.best = smoothed
            return True
        return False

    def stalled_for(self, now: RunProgress, unit: str) -> float:
        return now[unit] - self.improved_at[unit]

    def crossed_threshold(self) -> tuple[str, str] | None:
        """Return the threshold that the smoothed value has passed, by name and as a message; None if there is none."""
        goal, value = self.goal, self.smoothed
        if value is None:
            return None
        if goal.stopping_threshold is not None and goal.is_better(value, goal.stopping_threshold):
            text = f"{self.name} = {value:.6g} has reached stopping_threshold={goal.stopping_threshold}"
            return "stopping_threshold", text
        if goal.divergence_threshold is not None and goal.is_better(goal.divergence_threshold, value):
            text = f"{self.name} = {value:.6g} is beyond divergence_threshold={goal.divergence_threshold}"
            return "divergence_threshold", text
        return None

    def state_dict(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in ("best", "smoothed", "reference")}
        return {**values, "improved_at": dict(self.improved_at), "smoother": self.smoother.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.smoothed, self.reference = state["best"], state["smoothed"], state["reference"]
        self.improved_at = dict(state["improved_at"])
        self.smoother.load_state_dict(state["smoother"])
