"""Messages between stages: outputs of layers, packed into a few flat tensors.

``PipelineStage`` sends a fixed list of floating tensors and receives a gradient for each. So tensors that need
gradients are concatenated by dtype, and all others, of any dtype, are sent as bytes in a float32 tensor that is never
computed with.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class TensorSpec(NamedTuple):
    """Describe one tensor before it arrives."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool
    on_host: bool = False  # while others are on a device, such as lengths for pack_padded_sequence


class FlatSpec(NamedTuple):
    """Hold shape and dtype of one flat tensor of a message."""

    length: int
    dtype: torch.dtype


def pack(tensors: Sequence[Tensor], device: torch.device) -> tuple[list[TensorSpec], list[Tensor]]:
    """Concatenate ``tensors`` into at least one flat floating tensor on ``device``."""
    parts = [
        TensorSpec(
            tuple(one.shape), one.dtype, one.requires_grad, on_host=device.type != "cpu" and one.device.type == "cpu"
        )
        for one in tensors
    ]
    flat = [
        torch.cat([one.reshape(-1).to(device) for one, part in zip(tensors, parts, strict=True) if part in group])
        for group in _groups(parts)
    ]
    rest = [one.detach().to(device) for one, part in zip(tensors, parts, strict=True) if not part.differentiable]
    if rest or not flat:
        flat.append(_to_bytes(rest) if rest else torch.zeros(1, device=device))
    return parts, flat


def flat_specs(parts: Sequence[TensorSpec]) -> list[FlatSpec]:
    """Return the lengths and dtypes of the flat tensors that :func:`pack` returns for such tensors."""
    groups = _groups(parts)
    made = [FlatSpec(sum(_numel(part) for part in parts if part in group), group[0].dtype) for group in groups]
    rest = [_num_bytes(part) for part in parts if not part.differentiable]
    return made + ([FlatSpec(max(1, -(-sum(rest) // 4)), torch.float32)] if rest or not made else [])


def unpack(parts: Sequence[TensorSpec], flat: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the tensors of a message, and a zero () that connects all of ``flat``, see :func:`connect`."""
    anchor, *tensors = _Unpack.apply(list(parts), *flat)
    return anchor, tensors


def connect(anchor: Tensor | None, x: Tensor) -> Tensor:
    """Return ``x``, with a backward pass that also reaches ``anchor``, with a zero gradient."""
    return x if anchor is None else _Connect.apply(anchor, x)


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(parts: list[TensorSpec], *flat: Tensor) -> tuple[Tensor, ...]:
        offsets = dict.fromkeys([group[0].dtype for group in _groups(parts)], 0)
        source = dict(zip(offsets, flat, strict=False))
        as_bytes = flat[-1].detach().view(torch.uint8)
        at, made = 0, []
        for part in parts:
            if part.differentiable:
                start, offsets[part.dtype] = offsets[part.dtype], offsets[part.dtype] + _numel(part)
                # copied: a layer may change its input in place, which autograd rejects for views of one tensor
                values = source[part.dtype][start : offsets[part.dtype]].clone()
            else:
                start, at = at, at + _num_bytes(part)
                values = as_bytes[start:at].clone().view(part.dtype)
            made.append((values.cpu() if part.on_host else values).view(part.shape))
        return flat[0].new_zeros(()), *made

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.parts, *flat = inputs
        ctx.like = [(len(one), one.dtype, one.device) for one in flat]
        ctx.mark_non_differentiable(
            *[one for one, part in zip(output[1:], ctx.parts, strict=True) if not part.differentiable]
        )

    @staticmethod
    def backward(ctx: Any, _: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        home = ctx.like[0][2]
        made = [
            torch.cat([grad.reshape(-1).to(home) for grad, part in zip(grads, ctx.parts, strict=True) if part in group])
            for group in _groups(ctx.parts)
        ]
        made += [torch.zeros(length, dtype=dtype, device=device) for length, dtype, device in ctx.like[len(made) :]]
        return None, *made


class _Connect(torch.autograd.Function):
    @staticmethod
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.dtype, ctx.device = inputs[0].dtype, inputs[0].device

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros((), dtype=ctx.dtype, device=ctx.device), grad


def _groups(parts: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    """Group the differentiable parts by dtype."""
    dtypes = dict.fromkeys(part.dtype for part in parts if part.differentiable)
    return [[part for part in parts if part.differentiable and part.dtype == dtype] for dtype in dtypes]


def _to_bytes(tensors: Sequence[Tensor]) -> Tensor:
    joined = torch.cat([one.contiguous().reshape(-1).view(torch.uint8) for one in tensors])
    return F.pad(joined, (0, max(4 - len(joined), -len(joined) % 4))).view(torch.float32)


def _numel(part: TensorSpec) -> int:
    return int(torch.Size(part.shape).numel())


def _num_bytes(part: TensorSpec) -> int:
    return _numel(part) * part.dtype.itemsize
