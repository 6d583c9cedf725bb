"""The result of a computation by sampling."""

from typing import NamedTuple

from torch import Tensor


class Estimate(NamedTuple):
    """Hold a value that was estimated by sampling, and its standard error."""

    mean: Tensor
    standard_error: Tensor  # standard error of the mean, in its shape; zero where nothing was sampled
