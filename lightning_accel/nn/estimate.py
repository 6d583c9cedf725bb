"""What a sampled computation returns."""

from typing import NamedTuple

from torch import Tensor


class Estimate(NamedTuple):
    """A value that was estimated by sampling, and how far off it may be."""

    mean: Tensor
    standard_error: Tensor  # shaped as mean; of the mean, zero where nothing was sampled
