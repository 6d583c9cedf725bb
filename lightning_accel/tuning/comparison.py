"""How much faster one variant is than another, from turns, with an interval."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from lightning_accel.ops.extras import import_on_use
from lightning_accel.tuning.variant import NotReadyError, Step, Variant

stats = import_on_use("scipy.stats")


@dataclass(frozen=True)
class Ratio:
    """Hold the factor by which a variant is faster, with its 95 % interval (Student's t over the turns' logarithms).

    Attributes:
        value: geometric mean over the turns.
        low: lower end.
        high: upper end.
        turns: number of turns.
    """

    value: float
    low: float
    high: float
    turns: int

    @property
    def is_faster(self) -> bool:
        return self.low > 1

    def __truediv__(self, other: "Ratio") -> "Ratio":
        """Return how much faster a variant is than another, each of which was compared with the same baseline."""
        turns = min(self.turns, other.turns)
        return Ratio(self.value / other.value, self.low / other.high, self.high / other.low, turns)

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio_of(ratios: Sequence[float]) -> Ratio:
    """Return the geometric mean of at least two ratios with its interval."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = fmean(logs)
    half = float(stats.t.ppf(0.975, len(logs) - 1)) * stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


def steps_per_second(steps: Sequence[Step]) -> float:
    """Return the rate of steps that follow each other."""
    return len(steps) / sum(step.end - step.begin for step in steps)


@dataclass(frozen=True)
class Shares:
    """Hold which shares of a step's time the run waits for data, optimizes, and keeps the system busy."""

    data: float
    optimizer: float
    system: float

    @classmethod
    def of(cls, steps: Sequence[Step]) -> "Shares":
        """Return the shares of steps that follow each other."""
        seconds = sum(step.end - step.begin for step in steps)
        parts = ((step.waited, step.optimized, step.in_system) for step in steps)
        return cls(*(sum(part) / seconds for part in zip(*parts, strict=True)))


def compare(
    baseline: Variant,
    variant: Variant,
    *,
    width: float,
    least: int,
    most: int,
    seconds: float,
    deadline: float,
    needed: float = 1.0,
    samples: float = 1.0,
    rate: Callable[[Variant, Sequence[Step]], float] = lambda _, steps: steps_per_second(steps),
) -> Ratio:
    """Run two variants in turns until the interval of their ratio is narrow, or below what is needed.

    Args:
        baseline: a variant that has warmed up.
        variant: another.
        width: stop when the interval reaches from the mean by at most this share of it.
        least: turns of each at least, 3 or more.
        most: turns of each at most.
        seconds: length of a turn.
        deadline: when to stop, a time of ``time.monotonic``.
        needed: a ratio, below which it does not matter how much the variant is faster.
        samples: of a step of the variant, as a multiple of those of the baseline's; what is compared is their rate.
        rate: returns the rate of a turn's steps.

    Raises:
        TrialError: if one of them fails, or there is not the time for the least turns.
    """
    ratios: list[float] = []
    while True:
        pair = (baseline, variant) if len(ratios) % 2 == 0 else (variant, baseline)
        try:
            rates = {id(one): rate(one, one.run_for(seconds, deadline)) for one in pair}
        except NotReadyError:  # of a variant that starts again for its turn
            if len(ratios) < least:
                raise
            return ratio_of(ratios)
        ratios.append(samples * rates[id(variant)] / rates[id(baseline)])
        if len(ratios) < least:
            continue
        ratio = ratio_of(ratios)
        is_narrow = math.log(ratio.high / ratio.low) <= 2 * width
        if is_narrow or ratio.high < needed or len(ratios) >= most or time.monotonic() + 2 * seconds > deadline:
            return ratio
