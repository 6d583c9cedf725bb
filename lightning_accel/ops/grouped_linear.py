"""A separate linear layer for each group of rows. Shapes: M rows, I features in, O features out, E groups."""

from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_accel.ops.extras import HAS_TRITON

GroupedBackend: TypeAlias = Literal["auto", "grouped_mm", "loop", "triton"]

_TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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
            float32, with sums in float32; both leave ``counts`` on its device. ``loop``, one matrix product per group,
            copies ``counts`` to the host. ``auto`` calls :func:`choose_grouped_backend`.

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
    with torch.autocast(x.device.type, enabled=False):
        if backend == "loop":
            return _loop(x, weight, counts, bias)
        ends = counts.cumsum(0)
        if backend == "triton":
            if not (x.is_cuda and HAS_TRITON and x.dtype in _TRITON_DTYPES):
                raise ValueError(
                    "the backend 'triton' takes bfloat16, float16 or float32 on CUDA, and needs Triton; got "
                    f"{x.dtype} on {x.device}, and Triton is {'' if HAS_TRITON else 'not '}installed. Use 'auto'"
                )
            product = _multiply_rows(x, weight, ends)
            return product if bias is None else product + _bias_of_rows(bias, ends, len(x))
        # the kernel does not initialise rows past the last end, neither in its output nor in the gradient of x
        grouped = (torch.arange(len(x), device=x.device) < ends[-1]).unsqueeze(1)
        x = torch.where(grouped, x, 0)
        product = F.grouped_mm(x, weight.transpose(1, 2), offs=ends.to(torch.int32))
        if bias is not None:
            product = product + _bias_of_rows(bias, ends, len(x))
        return torch.where(grouped, product, 0)


def choose_grouped_backend(*weights: Tensor) -> Literal["grouped_mm", "loop", "triton"]:
    """Return the backend of :func:`grouped_linear` for ``weights`` (E, O, I).

    Torch's kernel for CUDA takes bfloat16, rows of a multiple of 16 bytes, and GPUs of compute capability 9 and 10.
    Else it is a loop that copies the sizes of groups to the host, and ``torch.compile`` refuses it in float32.
    """
    dtypes = {weight.dtype for weight in weights}
    if not all(weight.is_cuda for weight in weights) or not dtypes <= set(_TRITON_DTYPES):
        return "loop"
    is_aligned = all(size % 8 == 0 for weight in weights for size in weight.shape[1:])
    is_new = torch.version.hip is None and torch.cuda.get_device_capability(weights[0].device)[0] in (9, 10)
    if dtypes == {torch.bfloat16} and is_aligned and is_new:
        return "grouped_mm"
    return "triton" if HAS_TRITON else "loop"


def _bias_of_rows(bias: Tensor, ends: Tensor, num_rows: int) -> Tensor:
    """Return the bias (M, O) of each row, 0 for one of no group."""
    group = torch.searchsorted(ends, torch.arange(num_rows, device=ends.device), right=True)
    return F.pad(bias, (0, 0, 0, 1)).index_select(0, group)


# The gradients of each of the two products are products of both kinds, so that all derivatives exist.


@torch.library.custom_op("lightning_accel::multiply_rows", mutates_args=())
def _multiply_rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    from lightning_accel.ops.grouped_triton import multiply_rows

    return multiply_rows(x, weight, ends)


@torch.library.custom_op("lightning_accel::multiply_groups", mutates_args=())
def _multiply_groups(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    from lightning_accel.ops.grouped_triton import multiply_groups

    return multiply_groups(left, right, ends)


@_multiply_rows.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@_multiply_groups.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _rows_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, ends = ctx.saved_tensors
    d_x = _multiply_rows(grad, weight.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
    return d_x, _multiply_groups(grad, x, ends) if ctx.needs_input_grad[1] else None, None


def _groups_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    left, right, ends = ctx.saved_tensors
    d_left = _multiply_rows(right, grad, ends) if ctx.needs_input_grad[0] else None
    return d_left, _multiply_rows(left, grad.transpose(1, 2), ends) if ctx.needs_input_grad[1] else None, None


_multiply_rows.register_autograd(_rows_backward, setup_context=_save)
_multiply_groups.register_autograd(_groups_backward, setup_context=_save)


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
