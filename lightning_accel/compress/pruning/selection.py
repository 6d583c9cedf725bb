"""Exact selection of the lowest scores over all processes, without gathering them.

Shapes: G groups. Each group is a list of parts; a part is the shard of one tensor on one process.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""A function that sums a tensor over processes; the identity with one process."""

_FLOAT_DIGITS = ((21, 11), (10, 11), (0, 10))  # shift and bits of each, of 32 bits
_INDEX_DIGITS = ((36, 12), (24, 12), (12, 12), (0, 12))
_SIGN = 2**31


class Part(NamedTuple):
    """Hold the scores of a tensor, or of this process's shard of it."""

    scores: Tensor | None  # float32, of any shape; None if the process has no shard of the tensor
    numel: int  # of the whole tensor
    to_whole: Callable[[Tensor], Tensor] | None = None  # maps int64 indices in ``scores`` to those in the whole tensor
    counts: bool = True  # False if another process has the same shard and counts it


def choose_lowest(
    groups: Sequence[Sequence[Part]],
    counts: Sequence[int],
    reduce: Reduce | None = None,
    device: torch.device | str | None = None,
) -> list[list[Tensor | None]]:
    """Mark the ``counts`` lowest scores of each group of tensors; among equal scores, the first ones.

    The result does not depend on how tensors are sharded. It takes seven sums over processes for any number of groups:
    one for each digit of the scores (radix selection), and if equal scores straddle the limit, of their indices.

    Args:
        groups: groups of tensors, in the same order on all processes.
        counts: number of scores to mark in each group, at most its size.
        reduce: sum over processes, if there are several.
        device: device for ``reduce``; by default that of the first scores.

    Returns:
        Boolean tensors of the shape of the scores.

    >>> choose_lowest([[Part(torch.tensor([3.0, 1.0, 1.0, 2.0]), 4)]], [2])
    [[tensor([False,  True,  True, False])]]
    """
    keys = [[None if part.scores is None else _sortable_bits(part.scores) for part in group] for group in groups]
    where = device or next((key.device for group in keys for key in group if key is not None), "cpu")
    wanted = torch.tensor(list(counts), dtype=torch.int64, device=where)
    counted = [
        [key.flatten() for key, part in zip(*pair, strict=True) if key is not None and part.counts]
        for pair in zip(keys, groups, strict=True)
    ]
    limits, wanted, ties = _radix_select(counted, wanted, _FLOAT_DIGITS, _SIGN, reduce)
    limit, straddles = limits.tolist(), (wanted < ties) & (wanted > 0)
    up_to = (limits - (wanted == 0).long()).clamp(min=-_SIGN).tolist()  # int32, as keys
    chosen = [[None if key is None else key <= up_to[number] for key in group] for number, group in enumerate(keys)]
    if not bool(straddles.any()):
        return chosen
    places = [
        [
            None if key is None else _tie_indices(key, limit[number], start, part)
            for key, part, start in zip(*of, strict=True)
        ]
        for number, of in enumerate(zip(keys, groups, map(_starts, groups), strict=True))
    ]
    counted = [
        [place for place, part in zip(*pair, strict=True) if place is not None and part.counts]
        for pair in zip(places, groups, strict=True)
    ]
    last = _radix_select(counted, wanted, _INDEX_DIGITS, 0, reduce)[0].tolist()
    for number in straddles.nonzero().flatten().tolist():
        for key, mask, place in zip(keys[number], chosen[number], places[number], strict=True):
            if key is not None and mask is not None and place is not None:
                mask[key == limit[number]] = place <= last[number]
    return chosen


def _sortable_bits(scores: Tensor) -> Tensor:
    """Map ``scores`` to int32 of the same order; 0.0 and -0.0 are equal."""
    bits = (scores.float() + 0.0).contiguous().view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _starts(group: Sequence[Part]) -> list[int]:
    starts = [0]
    for part in group:
        starts.append(starts[-1] + part.numel)
    return starts[:-1]


def _tie_indices(key: Tensor, limit: int, start: int, part: Part) -> Tensor:
    """Return the index in its group of each score at the limit."""
    at = (key.flatten() == limit).nonzero().squeeze(1)
    return start + (at if part.to_whole is None else part.to_whole(at))


def _radix_select(
    keys: list[list[Tensor]], wanted: Tensor, digits: Sequence[tuple[int, int]], sign: int, reduce: Reduce | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each group the key of rank ``wanted``, how many keys equal to it to take, and how many there are."""
    limit = torch.zeros_like(wanted)
    ties = torch.zeros_like(wanted)
    for number, (shift, bits) in enumerate(digits):
        flip = 1 << (bits - 1) if sign and number == 0 else 0
        parts = [[((key >> shift) & ((1 << bits) - 1)) ^ flip for key in group] for group in keys]
        counts = torch.zeros(len(keys), 1 << bits, dtype=torch.int64, device=wanted.device)
        for row, group in zip(counts, parts, strict=True):
            for part in group:
                row += part.bincount(minlength=1 << bits).to(row.device)
        counts = counts if reduce is None else reduce(counts)
        sums = counts.cumsum(1)
        digit = (sums < wanted[:, None]).sum(1, keepdim=True).clamp(max=(1 << bits) - 1)
        ties = counts.gather(1, digit).squeeze(1)
        wanted = wanted - (sums.gather(1, digit).squeeze(1) - ties)
        limit = (limit << bits) | digit.squeeze(1)
        chosen = digit.squeeze(1).tolist()
        keys = [
            [key[part == one] for key, part in zip(*pair, strict=True)]
            for pair, one in zip(zip(keys, parts, strict=True), chosen, strict=True)
        ]
    return limit - sign, wanted, ties
