"""Selection of the layers to quantize, and rounding of their weights and inputs to integer grids."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_accel._private.torch import has_vnni
from lightning_accel.ops.names import Exclusion, clean_name, find_excluded

QUANTIZABLE = (nn.Linear, nn.Conv1d, nn.Conv2d)
WEIGHT_LIMIT = 127  # a symmetric grid: zeros stay zeros, and folding of a batch norm keeps the integers
# Products of two uint8 and two int8 are summed in int16 without VNNI, and overflow unless inputs have 7 bits
INPUT_LIMIT = 255 if has_vnni() else 127
_SMALLEST_SCALE = torch.finfo(torch.float32).eps


class Layers(NamedTuple):
    """Hold the layers to quantize, and the reasons for those that stay in floating point."""

    quantized: dict[str, nn.Module]  # by name
    left_float: dict[str, str]  # reason by name, of each other module with weights
    excluded: frozenset[str]  # names in left_float that the user excluded


def find_layers(module: nn.Module, exclude: Iterable[Exclusion] = ()) -> Layers:
    """Find the linear layers and convolutions of ``module``; names are without prefixes of ``torch.compile``.

    Args:
        module: module to quantize.
        exclude: layers, or modules around them, see :func:`~lightning_accel.ops.names.find_excluded`.

    Raises:
        ValueError: if an entry of ``exclude`` matches no module.
    """
    excluded = find_excluded(module, exclude)
    quantized: dict[str, nn.Module] = {}
    left: dict[str, str] = {}
    for name, one in ((clean_name(name), one) for name, one in module.named_modules()):
        weights = [value for value in one.parameters(recurse=False) if value.ndim > 1]
        if not weights:
            continue
        if name in excluded:
            left[name] = f"left out by exclude: {excluded[name]}"
        elif not isinstance(one, QUANTIZABLE):
            left[name] = f"{type(one).__name__} is no linear layer or convolution"
        elif isinstance(one, nn.modules.linear.NonDynamicallyQuantizableLinear):
            left[name] = "MultiheadAttention takes its weight, and does not call it"
        elif type(one).forward not in [kind.forward for kind in QUANTIZABLE]:
            left[name] = f"{type(one).__name__} has a forward of its own"
        else:
            quantized[name] = one
    return Layers(quantized, left, frozenset(excluded) & left.keys())


def weight_scale(weight: Tensor) -> Tensor:
    """Return the step of the int8 grid of each output channel, (out,) float32."""
    largest = weight.detach().abs().flatten(1).amax(dim=1).float()
    return (largest / WEIGHT_LIMIT).clamp(min=_SMALLEST_SCALE)


def input_grid(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return step and zero point of the grid from ``low`` to ``high``, extended to include zero."""
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = ((high - low) / INPUT_LIMIT).clamp(min=_SMALLEST_SCALE)
    return scale, (-low / scale).round().clamp(0, INPUT_LIMIT).to(torch.int32)


def round_weight(weight: Tensor) -> Tensor:
    """Round ``weight`` to its int8 grid; the gradient passes straight through.

    >>> round_weight(torch.tensor([[127.0, 1.4, 0.0, -2.6]]))
    tensor([[127.,   1.,   0.,  -3.]])
    """
    channels = len(weight)
    zero = torch.zeros(channels, dtype=torch.int32, device=weight.device)
    rounded = torch.fake_quantize_per_channel_affine(
        weight.float(), weight_scale(weight), zero, 0, -WEIGHT_LIMIT, WEIGHT_LIMIT
    )
    return rounded.to(weight.dtype)


def round_input(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Round ``x`` to the grid of inputs from ``low`` to ``high``; gradients are zero outside."""
    scale, zero = input_grid(low, high)
    return torch.fake_quantize_per_tensor_affine(x.float(), scale, zero, 0, INPUT_LIMIT).to(x.dtype)
