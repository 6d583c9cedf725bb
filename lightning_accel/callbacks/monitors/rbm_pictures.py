"""Figures of a restricted Boltzmann machine. Shapes: B samples, C chains, V visible, H hidden units, P pixels."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_accel.nn import RBM
from lightning_accel.ops.figures import DIVERGING, new_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_TILES = 64  # per panel


class RBMView(NamedTuple):
    """Hold what a figure shows: a machine, those below it in its stack, the lowest first, and their data."""

    rbm: RBM
    below: list[RBM]
    rows: Tensor | None  # (B, V) inputs of the machine
    pixels: Tensor | None  # (B, P) inputs of the lowest machine for the same samples; labels may follow
    chains: Tensor | None  # (C, H) hidden states


def plain_copy(rbm: RBM) -> RBM:
    """Copy a machine to the CPU, in at least float32, without gradients, and gathered if it is sharded.

    If parameters are sharded, every process must call it.
    """
    with torch.device("meta"):  # draws no random numbers
        plain = RBM(rbm.num_visible - rbm.num_labels, rbm.num_hidden, num_labels=rbm.num_labels)
    # tensors in the memo are used in place of copies
    memo: dict[int, Any] = {id(parameter): _full_parameter(parameter) for parameter in rbm.visible_units.parameters()}
    plain.visible_units = copy.deepcopy(rbm.visible_units, memo)
    plain.weight, plain.visible_bias, plain.hidden_bias = map(
        _full_parameter, (rbm.weight, rbm.visible_bias, rbm.hidden_bias)
    )
    return plain


def _full_parameter(parameter: Tensor) -> nn.Parameter:
    values = parameter.detach()
    values = values.full_tensor() if isinstance(values, DTensor) else values
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    return nn.Parameter(values.to("cpu", dtype, copy=True), requires_grad=False)


def to_pixels(visible: Tensor, rbm: RBM, below: Sequence[RBM]) -> Tensor:
    """Map visible states (B, V) of ``rbm`` to means of the lowest visible units, (B, P), without labels."""
    for lower in reversed(below):
        visible = lower.visible_units.mean(lower.visible_activation(_without_labels(visible, rbm)))
        rbm = lower
    return _without_labels(visible, rbm)


def filters(rbm: RBM, below: Sequence[RBM]) -> Tensor:
    """Compute the contribution of each hidden unit to the input of the lowest visible units, (H, P).

    Above the first machine, it is the linear combination of the filters below: Lee, Ekanadham and Ng 2008, Sparse Deep
    Belief Net Model for Visual Area V2.
    """
    weight = _without_labels(rbm.weight, rbm)
    for lower in reversed(below):
        weight = weight @ _without_labels(lower.weight, lower)
    return weight


def _without_labels(states: Tensor, rbm: RBM) -> Tensor:
    return states[..., : rbm.num_visible - rbm.num_labels]


def picture_shape(num_pixels: int, shape: Sequence[int] | None = None) -> tuple[int, int]:
    """Return height and width for ``num_pixels``: ``shape`` with stacked channels if it fits, or a square."""
    if shape is not None and len(shape) > 1 and math.prod(shape) == num_pixels:
        return num_pixels // shape[-1], shape[-1]
    side = math.isqrt(num_pixels)
    return (side, side) if side * side == num_pixels else (1, num_pixels)


def tile(pictures: np.ndarray, num_columns: int) -> np.ndarray:
    """Arrange images (N, height, width) in a grid with ``num_columns`` columns, separated by a pixel of NaN."""
    num, height, width = pictures.shape
    num_columns = max(1, min(num_columns, num))
    num_rows = -(-num // num_columns)
    sheet = np.full((num_rows * (height + 1) - 1, num_columns * (width + 1) - 1), np.nan)
    for at, picture in enumerate(pictures):
        row, column = divmod(at, num_columns)
        top, left = row * (height + 1), column * (width + 1)
        sheet[top : top + height, left : left + width] = picture
    return sheet


def draw_rbm(view: RBMView, title: str, shape: tuple[int, int]) -> Figure:
    """Draw filters, and samples and reconstructions where there are chains and data."""
    panels = [_draw_filters]
    panels += [_draw_samples] if view.chains is not None else []
    panels += [_draw_reconstructions] if view.rows is not None and view.pixels is not None else []
    figure, axes = new_axes((3.7 * len(panels), 4.1), columns=len(panels))
    units = f"{view.rbm.num_visible} visible, {view.rbm.num_hidden} hidden units"
    figure.suptitle(f"{title}: {units}" if len(panels) > 1 else f"{title}\n{units}", fontsize="medium")
    for draw, axis in zip(panels, axes, strict=True):
        axis.spines[:].set_visible(False)
        draw(axis, view, shape)
    return figure


def _draw_filters(axis: Any, view: RBMView, shape: tuple[int, int]) -> None:
    shown = filters(view.rbm, view.below)[:_MOST_TILES]
    axis.set_title(
        f"filters of {_count_label(len(shown), view.rbm.num_hidden)} hidden units,\n"
        "each relative to its largest weight: + red, - blue",
        fontsize="small",
    )
    greatest = shown.nan_to_num(0, 0, 0).abs().amax(1, keepdim=True)  # one scale for all would leave most near white
    _draw_tiles(axis, shown / greatest.where(greatest > 0, 1), shape, cmap=DIVERGING, limits=(-1, 1))


def _draw_samples(axis: Any, view: RBMView, shape: tuple[int, int]) -> None:
    assert view.chains is not None
    hidden = view.chains[:_MOST_TILES]
    visible = view.rbm.visible_units.mean(view.rbm.visible_activation(hidden))
    axis.set_title(f"samples: means given {_count_label(len(hidden), len(view.chains))} chains", fontsize="small")
    _draw_tiles(axis, to_pixels(visible, view.rbm, view.below), shape)


def _draw_reconstructions(axis: Any, view: RBMView, shape: tuple[int, int]) -> None:
    assert view.rows is not None
    assert view.pixels is not None
    rows, pixels = view.rows[: _MOST_TILES // 2], view.pixels[: _MOST_TILES // 2, : math.prod(shape)]
    again = to_pixels(view.rbm.reconstruct(rows), view.rbm, view.below)
    axis.set_title("data, and its reconstruction below", fontsize="small")
    columns = math.isqrt(2 * len(rows) - 1) + 1
    pairs = [torch.cat(pair) for pair in zip(pixels.split(columns), again.split(columns), strict=True)]
    if len(pairs[-1]) < 2 * columns and len(pairs) > 1:  # an incomplete last pair would mix up the two
        pairs.pop()
    _draw_tiles(axis, torch.cat(pairs), shape, columns=min(columns, len(rows)))
    centers = [(shape[0] + 1) * number + (shape[0] - 1) / 2 for number in range(2 * len(pairs))]
    axis.set_yticks(centers, ["data", "model"] * len(pairs), fontsize="x-small")
    axis.tick_params(length=0)


def _draw_tiles(
    axis: Any,
    states: Tensor,
    shape: tuple[int, int],
    cmap: str = "gray",
    limits: tuple[float, float] | None = None,
    columns: int | None = None,
) -> None:
    if columns is None:
        # choose columns so that the sheet is about square, for images of any shape
        columns = max(1, round(math.sqrt(len(states) * shape[0] / shape[1])))
    least, greatest = limits or _limits(states)
    sheet = tile(states.reshape(-1, *shape).numpy(), columns)
    aspect = "equal" if max(sheet.shape) < 8 * min(sheet.shape) else "auto"  # long lines would be too thin
    axis.imshow(sheet, cmap=cmap, vmin=least, vmax=greatest, interpolation="nearest", aspect=aspect)
    axis.set_facecolor("lightsteelblue")  # colour of the gaps
    axis.set_xticks([])
    axis.set_yticks([])


def _limits(states: Tensor) -> tuple[float, float]:
    """Return the colour range: 0 to 1, or wider if the states exceed it."""
    known = states[states.isfinite()]
    return (min(0.0, float(known.min())), max(1.0, float(known.max()))) if known.numel() else (0.0, 1.0)


def _count_label(some: int, of: int) -> str:
    return str(of) if some == of else f"{some} of {of}"
