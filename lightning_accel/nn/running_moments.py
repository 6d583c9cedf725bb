"""Running means of values that do not fit into memory together. Shapes: O groups, T values, D features."""

import torch
from torch import Tensor

from lightning_accel.nn.estimate import Estimate


class RunningMoments:
    """Accumulate mean and variance of values per group, chunk by chunk (Chan et al. 1983), in float64."""

    def __init__(self, owners: int, device: torch.device) -> None:
        self.count = torch.zeros(owners, 1, dtype=torch.float64, device=device)
        self.sum: Tensor | None = None
        self.squares: Tensor | None = None
        self.dtype = torch.float32

    def add(self, owner: Tensor, value: Tensor, errors: bool) -> None:
        self.dtype = value.dtype
        value = value.double()
        none = value.new_zeros(len(self.count), value.shape[1])
        count = torch.bincount(owner, minlength=len(self.count)).double()[:, None]
        total = none.index_add(0, owner, value)
        before = none if self.sum is None else self.sum
        if errors:
            with torch.no_grad():
                mean = total / count.clamp(min=1)
                squares = none.index_add(0, owner, (value - mean[owner]).square())
                shift = mean - before / self.count.clamp(min=1)
                squares += shift.square() * count * self.count / (count + self.count).clamp(min=1)
                self.squares = squares if self.squares is None else self.squares + squares
        self.sum = before + total
        self.count = self.count + count

    def estimate(self, tuples: Tensor) -> Estimate:
        """Return mean and standard error per group, given the size ``tuples`` of the population of each group."""
        assert self.sum is not None
        mean = self.sum / self.count.clamp(min=1)
        if self.squares is None:
            return Estimate(mean.to(self.dtype), torch.zeros_like(mean, dtype=self.dtype))
        left = (1 - self.count / tuples[:, None]).clamp(min=0)
        variance = self.squares / (self.count - 1).clamp(min=1) / self.count.clamp(min=1)
        return Estimate(mean.to(self.dtype), (variance * left).sqrt().to(self.dtype))
