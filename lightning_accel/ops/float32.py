"""What low precision must not touch."""

import torch
from torch import Tensor


def at_least_float32(tensor: Tensor) -> Tensor:
    """``tensor`` in float32, or as it is in float64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def without_autocast(tensor: Tensor) -> torch.autocast:
    """A context in which operations on the device of ``tensor`` keep their dtypes."""
    return torch.autocast(tensor.device.type, enabled=False)
