"""Scores of channels and the choice of those to remove. Shapes: G channels of a layer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from lightning_accel.compress.calibration.change import record_products
from lightning_accel.compress.calibration.products import Matrix
from lightning_accel.compress.calls import Inputs
from lightning_accel.compress.channels.groups import ChannelGroups, ChannelLayer
from lightning_accel.compress.uncompiled import uncompiled


@torch.no_grad()
def score_channels(
    module: nn.Module,
    groups: ChannelGroups,
    criterion: str | Callable[[str, Tensor], Tensor] = "magnitude",
) -> dict[str, Tensor]:
    """Score the importance of each channel of ``module``, (G,) float64 on the CPU by layer name.

    ``magnitude`` is the L2 norm over all slices of a channel. A function is called with the name and value of each
    parameter and returns scores of its shape, which are summed over the slices.

    Raises:
        ValueError: if the criterion is unknown, or returns NaN or infinity.
    """
    if not callable(criterion) and criterion != "magnitude":
        raise ValueError(f"criterion must be 'magnitude', or a function; got {criterion!r}")
    with uncompiled(module) as plain:
        parameters = dict(plain.named_parameters(remove_duplicate=False))
    scores = {}
    for layer in groups.layers:
        own = {name: parameters[name].detach() for name, _ in layer.slices if name in parameters}
        if callable(criterion):
            total = _sum_over_slices(layer, {name: criterion(name, value) for name, value in own.items()})
            if not total.isfinite().all():
                raise ValueError(f"the criterion must return finite scores; those of {layer.name} have NaN or infinity")
            scores[layer.name] = total
        else:
            squares = {name: value.double().square() for name, value in own.items()}
            scores[layer.name] = _sum_over_slices(layer, squares).sqrt()
    return scores


def score_channels_on_data(module: nn.Module, groups: ChannelGroups, inputs: Sequence[Inputs]) -> dict[str, Tensor]:
    """Score channels by what they bring to the products that take them, (G,) float64 on the CPU by layer name.

    The score of a channel is the norm of its values on the ``inputs`` times the weights that they are multiplied with,
    over all layers that take it: Wanda's score of a weight (Sun et al. 2023, https://arxiv.org/abs/2306.11695, eq. 1),
    summed in squares. Channels that no product with a weight of the module is seen to take get their magnitude.

    Args:
        module: the module that the groups were found in; not changed.
        groups: its channels.
        inputs: positional and keyword arguments of calls.

    Raises:
        ValueError: if a layer gets NaN or infinity.
    """
    names = {name for layer in groups.layers for name, _ in layer.slices}
    with uncompiled(module) as plain:
        own = {name: value for name, value in plain.named_parameters(remove_duplicate=False) if name in names}
        weights = {name: value for name, value in own.items() if value.ndim > 1 and value.is_contiguous()}
        squares: dict[Matrix, Tensor] = {}
        record_products(plain, inputs, weights, partial(_add_squares, squares))
    scores = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in weights.items()}
    taken: dict[str, set[int]] = {}
    for matrix, value in squares.items():
        weight = weights[matrix.name]
        matrix.of(scores[matrix.name]).add_(matrix.of(weight).double().square() * value)
        taken.setdefault(matrix.name, set()).update(_input_dims(matrix, weight))
    if wrong := [name for name, value in scores.items() if not value.isfinite().all()]:
        raise ValueError(f"{wrong[0]} is multiplied with NaN or infinity on the calibration data; look for an overflow")
    found = score_channels(module, groups)
    for layer in groups.layers:
        slices = {(name, dim): rows for (name, dim), rows in layer.slices.items() if dim in taken.get(name, ())}
        if slices:
            found[layer.name] = _sum_over_slices(replace(layer, slices=slices), scores).sqrt()
    return found


def _add_squares(squares: dict[Matrix, Tensor], matrix: Matrix, x: Tensor) -> None:
    own = x.double().square().sum(0)
    squares[matrix] = squares[matrix] + own if matrix in squares else own


def _input_dims(matrix: Matrix, weight: Tensor) -> list[int]:
    """Return the dimensions of a weight along which a product with one of its matrices sums."""
    inputs = {one * matrix.strides[1] for one in range(matrix.shape[1])}
    return [dim for dim, size in enumerate(weight.shape) if size > 1 and weight.stride(dim) in inputs]


def choose_channels(
    scores: Mapping[str, Tensor], sparsity: float, scope: str = "layer", round_to: int | Mapping[str, int] = 1
) -> dict[str, list[int]]:
    """Choose the channels to remove, those with the lowest scores; return their indices by layer name.

    Args:
        scores: (G,) by layer name.
        sparsity: share in [0, 1) of the channels to remove, of each layer or of all.
        scope: ``layer`` for the same share of each layer, or ``global`` to compare scores, relative to the mean of
            their layer, over all layers.
        round_to: round the number of channels that a layer keeps up to a multiple of this; 8 or more suits GPUs. By
            layer name if they differ.

    Raises:
        ValueError: if an argument is out of range.

    >>> choose_channels({"0": torch.tensor([3.0, 1.0, 2.0, 4.0])}, 0.5)
    {'0': [1, 2]}
    """
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity must be in [0, 1); got {sparsity}")
    multiples = dict.fromkeys(scores, round_to) if isinstance(round_to, int) else round_to
    if min(multiples.values(), default=1) < 1:
        raise ValueError(f"round_to must be at least 1; got {round_to}")
    if scope not in ("layer", "global"):
        raise ValueError(f"scope must be layer or global; got {scope!r}")
    if scope == "layer":
        gone = {name: round(len(one) * sparsity) for name, one in scores.items()}
    else:
        gone = _global_counts(scores, sparsity)
    chosen = {}
    for name, one in scores.items():
        left = max(len(one) - gone[name], 1)
        left = min(-(-left // multiples[name]) * multiples[name], len(one))
        chosen[name] = sorted(one.argsort(stable=True)[: len(one) - left].tolist())
    return chosen


def _global_counts(scores: Mapping[str, Tensor], sparsity: float) -> dict[str, int]:
    relative = []
    for one in scores.values():
        values = one / one.mean().clamp(min=torch.finfo(one.dtype).tiny)
        values = values.index_fill(0, one.argsort(stable=True)[-1:], torch.inf)  # each layer keeps one
        relative.append(values)
    all_scores = torch.cat(relative)
    possible = int(all_scores.isfinite().sum())
    lowest = all_scores.argsort(stable=True)[: min(round(len(all_scores) * sparsity), possible)]
    gone = torch.zeros(len(all_scores), dtype=torch.bool).index_fill(0, lowest, True)
    parts = gone.split([len(one) for one in relative])
    return {name: int(part.sum()) for name, part in zip(scores, parts, strict=True)}


def _sum_over_slices(layer: ChannelLayer, values: Mapping[str, Tensor]) -> Tensor:
    """Sum ``values``, by parameter name, over the slices of each channel; overlaps count twice."""
    total = torch.zeros(len(layer), dtype=torch.float64)
    for (name, dim), rows in layer.slices.items():
        if name in values:
            value = values[name].double().movedim(dim, 0)
            of_index = value.reshape(len(value), -1).sum(1).cpu()
            total += of_index[torch.from_numpy(rows)].sum(1)
    return total
