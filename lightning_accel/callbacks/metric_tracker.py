"""Tracking of one metric: smoothing, best value and time since the last improvement."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import Any, Literal, TypeAlias, get_args

Smoothing: TypeAlias = Literal["none", "average", "median"]
RunProgress: TypeAlias = dict[str, float]  # progress of the run: checks, steps, epochs, seconds


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
