"""A separate linear layer for each group of rows. Shapes: M rows, I features in, O features out, E groups."""

from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

GroupedBackend: TypeAlias = Literal["auto", "grouped_mm", "loop"]


def grouped_linear(
    x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None, backend: GroupedBackend = "auto"
) -> Tensor:
    """Multiply the first ``counts[0]`` rows of ``x`` by ``weight[0].T``, the next ``counts[1]`` by ``weight[1].T``, ...

    Args:
        x: (M, I), rows sorted by group; rows past ``counts.sum()`` belong to no group.
        weight: (E, O, I), in the dtype of ``x``; under autocast all tensors are cast to its dtype.
        counts: (E,) int64, rows of each group; any may be 0.
        bias: (E, O), added to each row of the group.
        backend: ``grouped_mm``, torch's kernel, which leaves ``counts`` on its device; ``loop``, one matrix product per
            group, which copies ``counts`` to the host; ``auto``, the kernel on CUDA if it supports the shapes.

    Returns:
        (M, O); rows that belong to no group are 0.

    >>> x, weight = torch.ones(3, 2), torch.tensor([[[1.0, 1.0]], [[2.0, 2.0]]])
    >>> grouped_linear(x, weight, torch.tensor([2, 1])).flatten()
    tensor([2., 2., 4.])
    """
    x, weight = cast_for_autocast(x, weight)
    bias = None if bias is None else bias.to(x.dtype)
    if backend == "auto":
        backend = "grouped_mm" if takes_grouped_mm(weight) else "loop"
    with torch.autocast(x.device.type, enabled=False):
        if backend == "loop":
            return _loop(x, weight, counts, bias)
        ends = counts.cumsum(0)
        # the kernel does not initialise rows past the last end, neither in its output nor in the gradient of x
        grouped = (torch.arange(len(x), device=x.device) < ends[-1]).unsqueeze(1)
        x = torch.where(grouped, x, 0)
        product = F.grouped_mm(x, weight.transpose(1, 2), offs=ends.to(torch.int32))
        if bias is not None:
            group = torch.searchsorted(ends, torch.arange(len(x), device=x.device), right=True)
            product = product + F.pad(bias, (0, 0, 0, 1)).index_select(0, group)
        return torch.where(grouped, product, 0)


def takes_grouped_mm(*weights: Tensor) -> bool:
    """Return whether torch's grouped kernel is fast for ``weights`` (E, O, I): CUDA, and sizes of 16-byte multiples."""
    return all(
        weight.is_cuda
        and weight.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and all(size * weight.element_size() % 16 == 0 for size in weight.shape[1:])
        for weight in weights
    )


def cast_for_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors to the dtype of the active autocast region, if any, as ``grouped_mm`` and custom ops do not.

    float64 tensors stay unchanged, as everywhere under autocast.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)


def _loop(x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None) -> Tensor:
    sizes = counts.tolist()
    *groups, rest = x.split([*sizes, len(x) - sum(sizes)])
    # unbind, not weight[e]: the backward of each of E selects would build a full-size zero gradient, E**2 in all
    biases = [None] * len(weight) if bias is None else bias.unbind()
    products = [F.linear(rows, w, b) for rows, w, b in zip(groups, weight.unbind(), biases, strict=True)]
    return torch.cat([*products, x.new_zeros(len(rest), weight.shape[1])])
