"""Choice of the weights to prune, and schedules of their share.

Shapes: N of M consecutive weights along the input dimension are kept.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from numbers import Real
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from lightning_accel.compress.pruning.prunable import find_prunable, is_stacked
from lightning_accel.compress.pruning.selection import Part, Reduce, choose_lowest
from lightning_accel.ops.names import Exclusion, require_one_of

Scope: TypeAlias = Literal["layer", "global", "erk"]
ScheduleName: TypeAlias = Literal["cubic", "one_shot"]
Criterion: TypeAlias = Literal["magnitude"] | Callable[[str, Tensor], Tensor]


def prune_(
    module: nn.Module,
    sparsity: float | None = None,
    *,
    structure: str = "unstructured",
    criterion: Criterion = "magnitude",
    scope: Scope = "erk",
    exclude: Sequence[Exclusion] = (),
) -> dict[str, Tensor]:
    """Set the least important weights of ``module`` to zero, once.

    Args:
        module: any module; :func:`~lightning_accel.compress.find_prunable` says which of its parameters are weights.
        sparsity: share of the weights to set to zero; at least one weight of each layer, or in all with ``"global"``,
            is kept. It may be omitted only with a ``structure`` such as ``"2:4"``, which implies it.
        structure: ``"unstructured"``, or N:M such as ``"2:4"``, which keeps two of four consecutive weights along the
            input.
        criterion: ``"magnitude"``, or a function of a parameter's name and value that returns scores of
            its shape, of which the lowest are pruned.
        scope: ``"layer"`` for the same sparsity in each layer, ``"global"`` for the lowest scores over all layers, or
            ``"erk"`` for a lower sparsity in smaller layers.
        exclude: see :func:`~lightning_accel.compress.find_prunable`.

    Returns:
        Boolean masks of the weights that are kept, by the name of the parameter.

    Raises:
        TypeError: if neither ``sparsity`` nor ``structure`` says how much to prune.
        ValueError: if ``sparsity`` is not in [0, 1) or does not fit the structure, or there is no weight to prune.

    >>> layer = nn.Linear(4, 5)
    >>> kept = prune_(layer, 0.8)
    >>> int(layer.weight.count_nonzero())
    4
    """
    pattern = parse_structure(structure)
    if sparsity is None and pattern is None:
        raise TypeError(
            f"prune_ needs sparsity, the share of weights to set to zero; got none with structure={structure!r}. Pass "
            "it, such as sparsity=0.5, or a structure that says it, such as '2:4'"
        )
    target = require_sparsity(sparsity, pattern)
    require_one_of("scope", scope, get_args(Scope))
    found, left_out = find_prunable(module, exclude)
    if pattern is not None:
        found = [one for one in found if one.weight.shape[one.input_dim] % pattern[1] == 0]
    if not found:
        raise ValueError(f"{type(module).__name__} has no weight to prune; left out: {left_out}")
    scores = {one.name: Part(score(criterion, one.name, one.weight.detach()), one.weight.numel()) for one in found}
    if pattern is not None:
        dims = {one.name: one.input_dim for one in found}
        pruned = choose_groups(scores, dims, pattern, 1.0)
    else:
        shapes = {one.name: one.weight.shape for one in found}
        stacked = [one.name for one in found if is_stacked(one.module, one.weight)]
        pruned = choose_weights(scores, shapes, target, scope, is_stacked=stacked)
    kept = {}
    with torch.no_grad():
        for one in found:
            mask = pruned[one.name]
            assert mask is not None
            one.weight.masked_fill_(mask, 0)
            kept[one.name] = ~mask
    return kept


def score(criterion: Criterion, name: str, value: Tensor) -> Tensor:
    """Return the importance of each element of ``value``, float32, by a criterion that depends on the weights alone."""
    if callable(criterion):
        scores = criterion(name, value)
        if not isinstance(scores, Tensor) or scores.shape != value.shape:
            shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(f"the criterion must return scores of shape {tuple(value.shape)} for {name}; got {shape}")
        if not scores.isfinite().all():
            raise ValueError(f"the criterion must return finite scores; those of {name} have NaN or infinity")
        return scores.detach().float()
    if criterion != "magnitude":
        raise ValueError(f"criterion must be 'magnitude', or a function; got {criterion!r}")
    return value.abs().float()


def parse_structure(structure: str) -> tuple[int, int] | None:
    """Parse ``"2:4"`` as ``(2, 4)``, and ``"unstructured"`` as None.

    Raises:
        ValueError: if it is neither.
    """
    if structure == "unstructured":
        return None
    match = re.fullmatch(r"(\d+):(\d+)", structure)
    if match is None or not 0 < int(match[1]) < int(match[2]):
        near = get_close_matches(structure.lower(), ["unstructured", "channel", "width", "block", "expert"], n=1)
        raise ValueError(
            "structure must be 'unstructured', 'channel', 'width', or 'N:M' with 0 < N < M, such as '2:4', which "
            f"keeps 2 of 4 neighbours; OneShotPruning takes 'block' and 'expert', too. Got {structure!r}"
            + (f"; did you mean {near[0]!r}?" if near else "")
        )
    return int(match[1]), int(match[2])


def require_sparsity(sparsity: float | None, pattern: tuple[int, int] | None) -> float:
    """Return the sparsity, by default 0.9, or that of ``pattern``; raise a ValueError if it is out of range."""
    if pattern is not None:
        share = 1 - pattern[0] / pattern[1]
        if sparsity is not None and not math.isclose(sparsity, share, abs_tol=1e-6):
            raise ValueError(
                f"structure='{pattern[0]}:{pattern[1]}' leaves {pattern[0]} of {pattern[1]} weights, so that {share:g} "
                f"are pruned; got a sparsity of {sparsity:g}. Leave it out, or take another structure"
            )
        return share
    sparsity = 0.9 if sparsity is None else sparsity
    if not isinstance(sparsity, Real) or not 0 <= sparsity < 1:
        raise ValueError(f"sparsity must be a share in [0, 1): 0.9 prunes nine of ten weights; got {sparsity!r}")
    return sparsity


def counts_by_erk(shapes: Mapping[str, Sequence[int]], sparsity: float, is_stacked: Sequence[str] = ()) -> list[int]:
    """Return how many weights of each layer to prune, such that smaller layers keep a larger share.

    The share that a layer keeps is proportional to the sum of its dimensions over their product, and at most 1: the
    Erdos-Renyi-Kernel of Evci et al. 2020, https://arxiv.org/abs/1911.11134, section 3.

    >>> counts_by_erk({"small": (4, 4), "large": (40, 40)}, 0.9)
    [1, 1453]
    """
    sizes = [math.prod(shape) for shape in shapes.values()]
    raw = []
    for name, shape in shapes.items():
        dims = shape[1:] if name in is_stacked else shape
        raw.append(sum(dims) / math.prod(dims))
    keep = (1 - sparsity) * sum(sizes)
    dense: set[int] = set()
    while True:
        rest = [number for number in range(len(sizes)) if number not in dense]
        left = keep - sum(sizes[number] for number in dense)
        level = left / sum(raw[number] * sizes[number] for number in rest) if rest else 0.0
        over = {number for number in rest if level * raw[number] > 1}
        if not over:
            break
        dense |= over
    return [0 if number in dense else round(size * (1 - level * raw[number])) for number, size in enumerate(sizes)]


def counts_of_layers(
    shapes: Mapping[str, Sequence[int]], sparsity: float, scope: Scope, is_stacked: Sequence[str] = ()
) -> list[int]:
    """Return how many weights of each layer to prune, by ``erk`` or equal shares; at least one is kept."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    if scope == "erk":
        counts = counts_by_erk(shapes, sparsity, is_stacked)
    else:
        counts = [round(sparsity * size) for size in sizes]
    return [min(count, size - 1) for count, size in zip(counts, sizes, strict=True)]


def choose_weights(
    parts: Mapping[str, Part],
    shapes: Mapping[str, Sequence[int]],
    sparsity: float,
    scope: Scope,
    reduce: Reduce | None = None,
    device: torch.device | str | None = None,
    is_stacked: Sequence[str] = (),
) -> dict[str, Tensor | None]:
    """Mark the lowest scores, a share ``sparsity`` of each layer or of all; at least one weight is kept."""
    if scope == "global":
        total = sum(part.numel for part in parts.values())
        chosen = choose_lowest([[*parts.values()]], [min(round(sparsity * total), total - 1)], reduce, device)[0]
        return dict(zip(parts, chosen, strict=True))
    counts = counts_of_layers({name: shapes[name] for name in parts}, sparsity, scope, is_stacked)
    lists = choose_lowest([[part] for part in parts.values()], counts, reduce, device)
    return {name: one[0] for name, one in zip(parts, lists, strict=True)}


def choose_groups(
    parts: Mapping[str, Part],
    input_dims: Mapping[str, int],
    pattern: tuple[int, int],
    share: float,
    reduce: Reduce | None = None,
    device: torch.device | str | None = None,
) -> dict[str, Tensor | None]:
    """Mark the M - N lowest scores in a ``share`` of the groups of each layer, those with the lowest sum of them."""
    kept, size = pattern
    groups: list[list[Part]] = []
    lowest: dict[str, Tensor | None] = {}
    for name, part in parts.items():
        if part.scores is None:
            lowest[name] = None
            groups.append([Part(None, part.numel, None, part.counts)])
            continue
        rows = _grouped(part.scores, input_dims[name], size)
        lowest[name] = torch.zeros_like(rows, dtype=torch.bool).scatter_(
            1, rows.argsort(dim=1, stable=True)[:, : size - kept], True
        )
        cost = rows.masked_fill(~lowest[name], 0).sum(1)  # type: ignore[operator]  # set above
        places = torch.arange(part.scores.numel(), device=rows.device).view(part.scores.shape)
        first = _grouped(places, input_dims[name], size)[:, 0]
        groups.append([Part(cost, part.numel, partial(_first_places, first, part.to_whole), part.counts)])
    counts = [round(share * part.numel / size) for part in parts.values()]
    chosen = choose_lowest(groups, counts, reduce, device)
    masks: dict[str, Tensor | None] = {}
    for (name, part), (taken,) in zip(parts.items(), chosen, strict=True):
        low = lowest[name]
        masks[name] = None
        if low is not None and taken is not None and part.scores is not None:
            masks[name] = _ungrouped(low & taken[:, None], part.scores.shape, input_dims[name])
    return masks


def _first_places(first: Tensor, to_whole: Callable[[Tensor], Tensor] | None, positions: Tensor) -> Tensor:
    """Return the indices of the first elements of groups in the whole tensor."""
    return first[positions] if to_whole is None else to_whole(first[positions])


def _grouped(value: Tensor, input_dim: int, size: int) -> Tensor:
    return value.movedim(input_dim, -1).reshape(-1, size)


def _ungrouped(rows: Tensor, shape: Sequence[int], input_dim: int) -> Tensor:
    moved = [length for dim, length in enumerate(shape) if dim != input_dim] + [shape[input_dim]]
    return rows.view(moved).movedim(-1, input_dim).contiguous()


def sparsity_at(step: int, begin: int, end: int, target: float, schedule: ScheduleName = "cubic") -> float:
    """Return the sparsity after ``step``, a share of all weights: 0 before ``begin``, ``target`` from ``end`` on.

    ``cubic`` is eq. 1 of Zhu and Gupta 2017, https://arxiv.org/abs/1710.01878, from 0; ``one_shot`` reaches the target
    at ``begin``.

    >>> [round(sparsity_at(step, 0, 4, 0.8), 3) for step in range(6)]
    [0.0, 0.463, 0.7, 0.788, 0.8, 0.8]
    """
    if step < begin:
        return 0.0
    if schedule == "one_shot" or step >= end:
        return target
    return target * (1 - (1 - (step - begin) / (end - begin)) ** 3)


def drop_fraction_at(step: int, begin: int, end: int, first: float) -> float:
    """Return the share of weights to prune and regrow at ``step``, which decays from ``first`` to 0 as half a cosine.

    Source: Evci et al. 2020, Rigging the Lottery, https://arxiv.org/abs/1911.11134, section 3.

    >>> [round(drop_fraction_at(step, 0, 4, 0.3), 3) for step in range(5)]
    [0.3, 0.256, 0.15, 0.044, 0.0]
    """
    progress = min(max((step - begin) / max(end - begin, 1), 0.0), 1.0)
    return first / 2 * (1 + math.cos(math.pi * progress))
