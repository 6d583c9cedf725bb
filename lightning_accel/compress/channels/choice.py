"""Scores of channels and the choice of those to remove. Shapes: G channels of a layer."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # torch has no other name for all norms with running statistics

from lightning_accel.compress.channels.groups import ChannelGroups, ChannelLayer
from lightning_accel.compress.uncompiled import uncompiled

ChannelCriterion = str | Callable[[str, Tensor], Tensor]
CRITERIA = ("magnitude", "batchnorm", "taylor", "random")


@torch.no_grad()
def score_channels(
    module: nn.Module, groups: ChannelGroups, criterion: ChannelCriterion = "magnitude", seed: int = 0
) -> dict[str, Tensor]:
    """Score the importance of each channel of ``module``, (G,) float64 on the CPU by layer name.

    ``magnitude`` is the L2 norm over all slices of a channel; ``batchnorm`` the magnitude of its scale in batch norms,
    or of the channel in layers without one; ``taylor`` the squared first-order change of the loss if the channel is
    removed, from the gradients of the parameters (Molchanov et al. 2019, https://arxiv.org/abs/1906.10771, eq. 8);
    ``random`` draws from ``seed``. A function is called with the name and value of each parameter and returns scores of
    its shape, which are summed over the slices.

    Raises:
        ValueError: if the criterion is unknown, or ``taylor`` finds no gradient.
    """
    with uncompiled(module) as plain:
        return _scores(plain, groups, criterion, seed)


def _scores(module: nn.Module, groups: ChannelGroups, criterion: ChannelCriterion, seed: int) -> dict[str, Tensor]:
    if criterion == "random":
        generator = torch.Generator().manual_seed(seed)
        return {one.name: torch.rand(len(one), generator=generator, dtype=torch.float64) for one in groups.layers}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if callable(criterion):
        own = {}
        for one in groups.layers:
            values = {name: criterion(name, parameters[name]) for name in _sliced_parameters(one, parameters)}
            own[one.name] = _sum_over_slices(one, values)
        if wrong := [name for name, scores in own.items() if not scores.isfinite().all()]:
            raise ValueError(f"the criterion must return finite scores; those of {wrong[0]} have NaN or infinity")
        return own
    if criterion == "taylor":
        return {name: total.square() for name, total in first_order_terms(module, groups).items()}
    if criterion not in CRITERIA:
        raise ValueError(f"criterion must be one of {', '.join(CRITERIA)}, or a function; got {criterion!r}")
    scores = {}
    for layer in groups.layers:
        names = _sliced_parameters(layer, parameters)
        if criterion == "batchnorm":
            scales = [name for name in names if name.endswith("weight") and isinstance(_owner(module, name), _NormBase)]
            names = scales or names
        scores[layer.name] = _sum_over_slices(
            layer, {name: parameters[name].detach().double().square() for name in names}
        ).sqrt()
    return scores


@torch.no_grad()
def first_order_terms(module: nn.Module, groups: ChannelGroups) -> dict[str, Tensor]:
    """Sum weight times gradient over the slices of each channel, (G,) float64 on the CPU by layer name.

    Raises:
        ValueError: if no parameter holds a gradient.
    """
    with uncompiled(module) as plain:
        parameters = dict(plain.named_parameters(remove_duplicate=False))
    terms = {
        name: one.detach().double() * one.grad.double() for name, one in parameters.items() if one.grad is not None
    }
    if not terms:
        raise ValueError("criterion='taylor' needs gradients; call backward before channels are scored")
    return {
        layer.name: _sum_over_slices(layer, {name: terms[name] for name in _sliced_parameters(layer, terms)})
        for layer in groups.layers
    }


def choose_channels(
    scores: Mapping[str, Tensor], sparsity: float, scope: str = "layer", min_left: int = 1, round_to: int = 1
) -> dict[str, list[int]]:
    """Choose the channels to remove, those with the lowest scores; return their indices by layer name.

    Args:
        scores: (G,) by layer name.
        sparsity: share in [0, 1) of the channels to remove, of each layer or of all.
        scope: ``layer`` for the same share of each layer, or ``global`` to compare scores, relative to the mean of
            their layer, over all layers.
        min_left: smallest number of channels that each layer keeps.
        round_to: round the number of channels that a layer keeps up to a multiple of this; 8 or more suits GPUs.

    Raises:
        ValueError: if an argument is out of range.

    >>> choose_channels({"0": torch.tensor([3.0, 1.0, 2.0, 4.0])}, 0.5)
    {'0': [1, 2]}
    """
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity must be in [0, 1); got {sparsity}")
    if min_left < 1 or round_to < 1:
        raise ValueError(f"min_left and round_to must be at least 1; got {min_left} and {round_to}")
    if scope not in ("layer", "global"):
        raise ValueError(f"scope must be layer or global; got {scope!r}")
    if scope == "layer":
        gone = {name: round(len(one) * sparsity) for name, one in scores.items()}
    else:
        gone = _global_counts(scores, sparsity, min_left)
    chosen = {}
    for name, one in scores.items():
        left = max(len(one) - gone[name], min_left)
        left = min(-(-left // round_to) * round_to, len(one))
        chosen[name] = sorted(one.argsort(stable=True)[: len(one) - left].tolist())
    return chosen


def _global_counts(scores: Mapping[str, Tensor], sparsity: float, min_left: int) -> dict[str, int]:
    relative = []
    for one in scores.values():
        values = one / one.mean().clamp(min=torch.finfo(one.dtype).tiny)
        values = values.index_fill(0, one.argsort(stable=True)[max(len(one) - min_left, 0) :], torch.inf)
        relative.append(values)
    all_scores = torch.cat(relative)
    possible = int(all_scores.isfinite().sum())
    lowest = all_scores.argsort(stable=True)[: min(round(len(all_scores) * sparsity), possible)]
    gone = torch.zeros(len(all_scores), dtype=torch.bool).index_fill(0, lowest, True)
    parts = gone.split([len(one) for one in relative])
    return {name: int(part.sum()) for name, part in zip(scores, parts, strict=True)}


def _sliced_parameters(layer: ChannelLayer, parameters: Mapping[str, Tensor]) -> list[str]:
    return list(dict.fromkeys(name for name, _ in layer.slices if name in parameters))


def _owner(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name.rpartition(".")[0])


def _sum_over_slices(layer: ChannelLayer, values: Mapping[str, Tensor]) -> Tensor:
    """Sum ``values``, by parameter name, over the slices of each channel; overlaps count twice."""
    total = torch.zeros(len(layer), dtype=torch.float64)
    for (name, dim), rows in layer.slices.items():
        if name in values:
            value = values[name].double().movedim(dim, 0)
            of_index = value.reshape(len(value), -1).sum(1).cpu()
            total += of_index[torch.from_numpy(rows)].sum(1)
    return total
