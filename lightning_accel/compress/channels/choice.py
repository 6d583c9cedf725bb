"""Scores of channels and the choice of those to remove. Shapes: G channels of a layer."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

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
