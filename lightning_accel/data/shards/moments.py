"""Means and variances of numbers that are read part by part. Shapes: F columns."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Moments:
    """Hold count, mean and sum of squared deviations of the rows of (N, F) numbers.

    >>> whole = Moments.of(np.array([[1.0], [3.0]]))
    >>> whole.add(Moments.of(np.array([[5.0]])))
    >>> whole.count, whole.mean.tolist(), whole.deviation.tolist()
    (3, [3.0], [8.0])
    """

    count: int = 0
    mean: np.ndarray = field(default_factory=lambda: np.zeros(1))
    deviation: np.ndarray = field(default_factory=lambda: np.zeros(1))

    @classmethod
    def of(cls, rows: np.ndarray) -> Moments:
        if not len(rows):
            return cls()
        mean = rows.mean(axis=0)
        return cls(len(rows), mean, np.square(rows - mean).sum(axis=0))

    def add(self, other: Moments) -> None:
        """Add the rows of another part.

        Source: Chan, Golub & LeVeque 1983, https://doi.org/10.1080/00031305.1983.10483115, eq. 2.1.
        """
        if not other.count:
            return
        count = self.count + other.count
        difference = other.mean - self.mean
        self.mean = self.mean + difference * (other.count / count)
        self.deviation = self.deviation + other.deviation + difference**2 * (self.count * other.count / count)
        self.count = count

    @property
    def std(self) -> np.ndarray:
        """Return the standard deviations, 1 where all numbers of a column are equal up to rounding."""
        variance = self.deviation / max(1, self.count)
        rounding = np.finfo(np.float64).eps * self.count
        constant = variance <= rounding * variance + np.square(rounding * self.mean)
        return np.where(constant, 1.0, np.sqrt(variance))
