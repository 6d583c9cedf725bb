"""Computation in float32 or wider."""

import torch
from torch import Tensor


def at_least_float32(tensor: Tensor) -> Tensor:
    """Cast ``tensor`` to float32, unless it is float64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def without_autocast(tensor: Tensor) -> torch.autocast:
    """Return a context manager that disables autocast on the device of ``tensor``."""
    return torch.autocast(tensor.device.type, enabled=False)


def dtype_of_sums(device: torch.device) -> torch.dtype:
    """Return the dtype for sums over millions of values, which lose precision in float32: float64 if possible."""
    return torch.float32 if device.type == "mps" else torch.float64
