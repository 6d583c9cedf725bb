"""The planned length of a run, over which a faster step has to make up for a longer start."""

import math
from dataclasses import dataclass

from lightning_accel.tuning.outcome import LEAST_SPEED, Measurement


@dataclass(frozen=True)
class PlannedRun:
    """Weigh how fast a variant trains against how long it takes to start.

    Attributes:
        steps: of the run as it is given; None if it has no end.
        rate: its steps per second.
        start_seconds: from its start until its steps take equally long.
        least_speed: of a variant that is worth its start, as a multiple of that of the run as it is given.
    """

    steps: int | None
    rate: float
    start_seconds: float
    least_speed: float = 1.0

    @property
    def training_seconds(self) -> float:
        """Return how long the run trains as it is given; infinitely long if it has no end."""
        return math.inf if self.steps is None else self.steps / self.rate

    def longest_start(self, speed: float = 1.0, start_before: float | None = None) -> float:
        """Return the seconds of a start that no speed makes up for, see :meth:`speed_over_run`."""
        before = self.start_seconds if start_before is None else start_before
        return before + self.training_seconds / (speed * self.least_speed)

    def needed_speed(self, start_seconds: float, speed: float = 1.0, start_before: float | None = None) -> float:
        """Return how much faster a step has to be to make up for a start, see :meth:`speed_over_run`."""
        before = self.start_seconds if start_before is None else start_before
        share = max(0.0, start_seconds - before) * speed / self.training_seconds
        return 1 / (1 - share) if share < 1 else math.inf

    def speed_over_run(
        self, ratio: float, start_seconds: float, speed: float = 1.0, start_before: float | None = None
    ) -> float:
        """Return how much faster the whole run is than that of another variant, both starts included.

        Args:
            ratio: how many times as fast its steps are.
            start_seconds: how long it takes to start.
            speed: how much faster the other one is than the run as it is given.
            start_before: how long the other one takes to start; as long as the run as it is given by default.
        """
        before = self.start_seconds if start_before is None else start_before
        return 1 / (1 / ratio + max(0.0, start_seconds - before) * speed / self.training_seconds)

    def why_not(self, found: Measurement) -> str:
        """Return why changes that were measured are not taken, or nothing if they are."""
        assert found.ratio is not None
        if found.saving is not None:
            if found.wins:
                return ""
            too_slow = f"{found.over_run:.2f} times as fast, less than {LEAST_SPEED}"
            return too_slow if found.over_run < LEAST_SPEED else "saves no memory to speak of"
        if not found.ratio.is_faster:
            return "not faster" if found.ratio.high < 1 else "no difference that the interval shows"
        if found.over_run > 1:
            return ""
        gain = (1 - 1 / found.ratio.value) / self.rate
        return (
            f"pays after {math.ceil((found.start_seconds - self.start_seconds) / gain)} steps; the run has {self.steps}"
        )
