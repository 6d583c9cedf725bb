"""What a search has measured and found."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import reduce
from operator import or_
from typing import Any

from lightning_accel.tuning.choices import Goal
from lightning_accel.tuning.comparison import Ratio
from lightning_accel.tuning.factors import Factor, Refusal
from lightning_accel.tuning.latencies import Latency
from lightning_accel.tuning.parity import Verdict
from lightning_accel.tuning.project import Changes

LEAST_SPEED = 0.7  # where memory is the goal: to recompute all activations takes a quarter of a step's time, and more
USELESS = 0.995  # what is at least so fast without a change as with it does not need it
LEAST_SAVING = 1.05  # what counts alone, since peaks of one process vary by some percent


@dataclass
class Measurement:
    """Hold what was measured of some changes against others.

    Attributes:
        ratio: how many times as many samples are trained on a second, or where latency is the goal, how many times
            shorter the median sample takes; None if the variant failed.
        start_seconds: from its start, which includes compilation, until its steps took equally long.
        over_run: how much faster the whole planned run is, its start included.
        saving: where memory is the goal, how many times less of it training needs, in one process of each.
        memory: the same with its interval, from several processes of each, in the proof.
        before: where latency is the goal, that of the reference.
        after: the same of the changes.
        reason: why it failed, or why it is not taken.
        seconds: how long the measurement took.
    """

    ratio: Ratio | None = None
    start_seconds: float = 0.0
    over_run: float = 0.0
    saving: float | None = None
    memory: Ratio | None = None
    before: Latency | None = None
    after: Latency | None = None
    reason: str = ""
    seconds: float = 0.0

    @classmethod
    def of(cls, result: dict[str, Any]) -> "Measurement":
        ratios = {name: result[name] and Ratio(**result[name]) for name in ("ratio", "memory")}
        latencies = {name: result[name] and Latency(**result[name]) for name in ("before", "after") if name in result}
        return cls(**result | ratios | latencies)

    @property
    def wins(self) -> bool:
        if self.ratio is None or self.saving is None:
            return self.ratio is not None and self.ratio.is_faster and self.over_run > 1
        saves = self.saving > LEAST_SAVING if self.memory is None else self.memory.is_faster
        return saves and self.over_run >= LEAST_SPEED

    @property
    def gain(self) -> float:
        """Return what the goal compares: how much less memory, or how much faster the planned run is."""
        return self.over_run if self.saving is None else self.saving

    @property
    def gain_interval(self) -> tuple[float, float]:
        """Return the ends of what the gain may be: for speed by the interval of the ratio, for memory within noise."""
        if self.saving is not None:
            return self.saving / LEAST_SAVING**0.5, self.saving * LEAST_SAVING**0.5
        assert self.ratio is not None
        start = 1 / self.over_run - 1 / self.ratio.value
        return 1 / (1 / self.ratio.low + start), 1 / (1 / self.ratio.high + start)


@dataclass
class Outcome:
    """Hold what a search has found.

    Attributes:
        facts: about the run as it was given.
        steps_per_second: of the run as it was given.
        alone: the measurement of each change alone.
        refused: what was not tried.
        chosen: the changes of the fastest variant whose losses agree; empty if none is faster.
        without: how much slower the chosen changes are without each of them.
        added: how much faster they are with each of those that were not faster alone, and with all of these together
            that intervals leave undecided.
        verdicts: on losses.
        proof: the last measurement, of all chosen changes.
        seconds: how long everything took.
        goal: ``speed``, ``memory`` or ``latency``.
        latency: of one sample as the model was given, where that is the goal.
        peak_bytes: memory that training needs as it was given, in all its processes.
        is_compared: whether what the chosen changes compute was compared; False if the search was interrupted before.
    """

    facts: dict[str, Any] = field(default_factory=dict, repr=False)
    steps_per_second: float = 0.0
    alone: dict[str, Measurement] = field(default_factory=dict, repr=False)
    refused: list[Refusal] = field(default_factory=list, repr=False)
    chosen: list[Factor] = field(default_factory=list)
    without: dict[str, Measurement] = field(default_factory=dict, repr=False)
    added: dict[str, Measurement] = field(default_factory=dict, repr=False)
    verdicts: list[Verdict] = field(default_factory=list, repr=False)
    proof: Measurement | None = None
    seconds: float = 0.0
    goal: Goal = "speed"
    latency: Latency | None = None
    peak_bytes: int = 0
    is_compared: bool = True

    @property
    def is_faster(self) -> bool:
        """Return whether changes were found that are better by the goal: faster, or with less memory."""
        return bool(self.chosen) and self.proof is not None and self.proof.wins

    @property
    def changes(self) -> Changes:
        """Return the changes to take: those that were chosen if they are better, otherwise none."""
        return together(self.chosen if self.is_faster else ())

    @property
    def num_cut(self) -> int:
        """Return how many changes, and comparisons of losses, the budget did not suffice for."""
        measured = [*self.alone.values(), *([self.proof] if self.proof else [])]
        reasons = [one.reason for one in measured] + [one.reason for one in self.refused]
        reasons += [verdict.reason for verdict in self.verdicts if not verdict.passed]
        return sum("budget" in reason for reason in reasons)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, without those of training where latency is the goal."""
        of_training = ("steps_per_second", "peak_bytes") if self.latency else ()
        return {name: value for name, value in asdict(self).items() if name not in of_training}


def together(factors: Iterable[Factor]) -> Changes:
    """Return the changes of all factors."""
    return reduce(or_, (factor.changes for factor in factors), Changes())


def names_of(factors: Iterable[Factor]) -> str:
    """Return the names of factors, separated by commas."""
    return ", ".join(factor.name for factor in factors)


def needed_of_two(both: Measurement, one: Measurement) -> Measurement | None:
    """Return what one of two changes alone is against both, if intervals leave no doubt that the other one is needed.

    Args:
        both: measured against the run as it is.
        one: measured against the same.
    """
    if both.saving is not None or both.ratio is None or one.ratio is None:
        return None
    ratio = one.ratio / both.ratio
    return Measurement(ratio) if ratio.high <= USELESS else None
