"""What travels from one stage to the next: outputs of layers, packed into a few flat tensors.

``PipelineStage`` sends a fixed list of floating tensors and gets a gradient for each. So those that gradients flow
through are joined by dtype, and all others, of whatever dtype, go as bytes in a float32 tensor that nobody computes
with.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Part(NamedTuple):
    """What is known of one tensor before it arrives."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool
    on_host: bool = False  # where the others are not, as lengths are that pack_padded_sequence takes


class Parcel(NamedTuple):
    """Shape and dtype of one flat tensor of a message."""

    length: int
    dtype: torch.dtype


def pack(tensors: Sequence[Tensor], device: torch.device) -> tuple[list[Part], list[Tensor]]:
    """Join ``tensors`` into at least one flat floating tensor on ``device``."""
    parts = [
        Part(tuple(one.shape), one.dtype, one.requires_grad, on_host=device.type != "cpu" and one.device.type == "cpu")
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


def parcels(parts: Sequence[Part]) -> list[Parcel]:
    """What :func:`pack` makes of tensors like these."""
    groups = _groups(parts)
    made = [Parcel(sum(_numel(part) for part in parts if part in group), group[0].dtype) for group in groups]
    rest = [_num_bytes(part) for part in parts if not part.differentiable]
    return made + ([Parcel(max(1, -(-sum(rest) // 4)), torch.float32)] if rest or not made else [])


def unpack(parts: Sequence[Part], flat: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The tensors of a message, and a zero () through which every one of ``flat`` gets a gradient, see :func:`tie`."""
    anchor, *tensors = _Unpack.apply(list(parts), *flat)
    return anchor, tensors


def tie(anchor: Tensor | None, x: Tensor) -> Tensor:
    """``x``, whose backward pass also reaches ``anchor``, with a zero."""
    return x if anchor is None else _Tie.apply(anchor, x)


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(parts: list[Part], *flat: Tensor) -> tuple[Tensor, ...]:
        offsets = dict.fromkeys([group[0].dtype for group in _groups(parts)], 0)
        source = dict(zip(offsets, flat, strict=False))
        as_bytes = flat[-1].detach().view(torch.uint8)
        at, made = 0, []
        for part in parts:
            if part.differentiable:
                start, offsets[part.dtype] = offsets[part.dtype], offsets[part.dtype] + _numel(part)
                # copied: a layer may change its input in place, and autograd refuses that for views of one tensor
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


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(anchor: Tensor, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.dtype, ctx.device = inputs[0].dtype, inputs[0].device

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros((), dtype=ctx.dtype, device=ctx.device), grad


def _groups(parts: Sequence[Part]) -> list[list[Part]]:
    """The differentiable parts, by dtype."""
    dtypes = dict.fromkeys(part.dtype for part in parts if part.differentiable)
    return [[part for part in parts if part.differentiable and part.dtype == dtype] for dtype in dtypes]


def _to_bytes(tensors: Sequence[Tensor]) -> Tensor:
    joined = torch.cat([one.contiguous().reshape(-1).view(torch.uint8) for one in tensors])
    return F.pad(joined, (0, max(4 - len(joined), -len(joined) % 4))).view(torch.float32)


def _numel(part: Part) -> int:
    return int(torch.Size(part.shape).numel())


def _num_bytes(part: Part) -> int:
    return _numel(part) * part.dtype.itemsize
