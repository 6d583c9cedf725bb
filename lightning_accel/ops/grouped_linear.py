"""A separate linear layer for each group of rows. Shapes: M rows, I features in, O features out, E groups."""

from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from lightning_accel._private.torch import grouped_product, in_forward_mode, in_transform
from lightning_accel.ops.extras import planned_capability, runs_triton
from lightning_accel.ops.grouped_products import TRITON_DTYPES, Shape, bias_of_rows, multiply_rows

GroupedBackend: TypeAlias = Literal["auto", "grouped_mm", "loop", "triton"]


def grouped_linear(
    x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None, backend: GroupedBackend = "auto"
) -> Tensor:
    """Multiply the first ``counts[0]`` rows of ``x`` by ``weight[0].T``, the next ``counts[1]`` by ``weight[1].T``, ...

    Args:
        x: (M, I), rows sorted by group; rows past ``counts.sum()`` belong to no group.
        weight: (E, O, I), in the dtype of ``x``; under autocast all tensors are cast to its dtype.
        counts: (E,) int64, rows of each group; any may be 0.
        bias: (E, O), added to each row of the group.
        backend: ``grouped_mm``, torch's kernel, on CUDA made for bfloat16; ``triton``, ours for CUDA in 16 bits or
            float32, with sums in float32, whose first call measures the shape of tiles for large products, unless
            algorithms must be deterministic; both leave ``counts`` on its device. ``loop``, one matrix product per
            group, copies ``counts`` to the host; it is also taken within torch.func and in forward mode. ``auto`` calls
            :func:`choose_grouped_backend`.

    Returns:
        (M, O); rows that belong to no group are 0.

    Raises:
        ValueError: if ``backend`` is ``triton`` and tensors are not on CUDA, or float64, or Triton is missing.

    >>> x, weight = torch.ones(3, 2), torch.tensor([[[1.0, 1.0]], [[2.0, 2.0]]])
    >>> grouped_linear(x, weight, torch.tensor([2, 1])).flatten()
    tensor([2., 2., 4.])
    """
    x, weight = cast_for_autocast(x, weight)
    bias = None if bias is None else bias.to(x.dtype)
    if backend == "auto":
        backend = choose_grouped_backend(weight)
    if backend != "loop" and needs_formula():
        backend = "loop"
    with torch.autocast(x.device.type, enabled=False):
        if backend == "loop":
            return _loop(x, weight, counts, bias)
        ends = counts.cumsum(0)
        if backend == "triton":
            return multiply_rows(x, weight, ends, bias)
        # the kernel does not initialise rows past the last end, neither in its output nor in the gradient of x
        grouped = (torch.arange(len(x), device=x.device) < ends[-1]).unsqueeze(1)
        return torch.where(grouped, multiply_by_torch(torch.where(grouped, x, 0), weight, ends, bias), 0)


def multiply_by_torch(x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None) -> Tensor:
    """Compute :func:`grouped_linear` by torch's kernel, given the ends of groups; rows of none may hold anything."""
    product = F.grouped_mm(x, weight.transpose(1, 2), offs=ends.to(torch.int32))
    return product if bias is None else product + bias_of_rows(bias, ends, len(x))


def _count_flops(left: Shape, right: Shape, *_: Any, **__: Any) -> int:
    """Count the operations of torch's kernel, of whose two matrices one or both lie in groups beside each other."""
    num_rows, width = left[-2:]
    return 2 * num_rows * width * right[-1] * (left[0] if len(left) == len(right) == 3 else 1)


if grouped_product() not in flop_registry:
    register_flop_formula(grouped_product())(_count_flops)


def needs_formula() -> bool:
    """Return whether autograd must see the formula: under transforms of torch.func, and in forward mode."""
    return not torch.compiler.is_compiling() and (in_transform() or in_forward_mode())


def choose_grouped_backend(*weights: Tensor) -> Literal["grouped_mm", "loop", "triton"]:
    """Return the backend of :func:`grouped_linear` for ``weights`` (E, O, I).

    Torch's kernel for CUDA takes bfloat16, rows of a multiple of 16 bytes, and GPUs of compute capability 9 and 10.
    Else it is a loop that copies the sizes of groups to the host, and ``torch.compile`` refuses it in float32.
    """
    dtypes = {weight.dtype for weight in weights}
    planned = planned_capability()
    if not (all(weight.is_cuda for weight in weights) or planned is not None) or not dtypes <= set(TRITON_DTYPES):
        return "loop"
    is_aligned = all(size % 8 == 0 for weight in weights for size in weight.shape[1:])
    if planned is None:
        planned = 0 if torch.version.hip else torch.cuda.get_device_capability(weights[0].device)[0]
    if dtypes == {torch.bfloat16} and is_aligned and planned in (9, 10):
        return "grouped_mm"
    return "triton" if all(map(runs_triton, weights)) else "loop"


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
