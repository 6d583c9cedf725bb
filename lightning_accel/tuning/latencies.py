"""Changes that may lower the latency of one sample, and what measurements of it say."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median, quantiles
from typing import Any

from lightning_accel.tuning.factors import (
    Factor,
    Refusal,
    attention,
    channels_last,
    compilations,
    deferred_weights,
    device_settings,
    precisions,
    speedup,
)
from lightning_accel.tuning.variant import Step, Variant


@dataclass(frozen=True)
class Latency:
    """Hold how long one sample takes, in milliseconds: the median of all samples, and the ends of their middle half."""

    median_ms: float
    low_ms: float
    high_ms: float

    @classmethod
    def of(cls, steps: Sequence[Step]) -> "Latency":
        """Return the latency of two samples or more."""
        low, middle, high = quantiles([1000 * (step.end - step.begin) for step in steps], method="inclusive")
        return cls(middle, low, high)

    def __str__(self) -> str:
        return f"{self.median_ms:.3g} ms ({self.low_ms:.3g} to {self.high_ms:.3g})"


class LatencyRate:
    """Return the rate of a turn by its median sample, which no pause of the machine shifts, and keep all samples."""

    def __init__(self) -> None:
        self._steps: dict[int, list[Step]] = {}

    def __call__(self, variant: Variant, steps: Sequence[Step]) -> float:
        self._steps.setdefault(id(variant), []).extend(steps)
        return 1 / median(step.end - step.begin for step in steps)

    def latency_of(self, variant: Variant) -> Latency:
        """Return the latency of all samples of a variant."""
        return Latency.of(self._steps[id(variant)])


def latency_factors_for(facts: Mapping[str, Any]) -> Iterator[Factor | Refusal]:
    """Yield what can be tried to lower the latency of a model, and what cannot; last what takes longest to start.

    Args:
        facts: see :class:`lightning_accel.tuning.latency_recorder.LatencyRecorder`.
    """
    is_cuda = facts["device"] == "cuda"
    found = chain(
        device_settings(facts, is_cuda),
        [channels_last(facts), deferred_weights(facts)],
        precisions(facts, is_cuda),
        _attention(facts, is_cuda),
        compilations(facts),
    )
    for one in found:  # outputs are those of the same weights, and no other random numbers explain that they deviate
        yield replace(one, kind="equal") if isinstance(one, Factor) and one.kind == "exact" else one


def _attention(facts: Mapping[str, Any], is_cuda: bool) -> Iterator[Factor | Refusal]:
    """Yield backends of attention; on the CPU in float32, too, where a single sample may be faster by ``math``."""
    is_plain = facts["has_attention"] and not is_cuda and facts["precision"] == "32-true"
    if is_plain:
        yield speedup("attention=math", "attention", "exact", attention="math")
    yield from (one for one in attention(facts, is_cuda) if isinstance(one, Factor) or not is_plain)
