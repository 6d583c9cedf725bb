"""Rules that follow channels through operations that move data: views, splits, concatenations and indexing."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from lightning_accel.compress.channels.trace import ChannelTrace, Dims, Given, Labels, Rule


def _view(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    before, dims = given["self"].shape, trace.of(given["self"])
    if out.numel() == 0:
        trace.pin_dims(dims, "empty")
        return [None]
    made: Dims = []
    for start, stop, first, last in _matching_blocks(before, out.shape):
        made += _view_block(trace, before[start:stop], dims[start:stop], tuple(out.shape[first:last]))
    return [made]


def _view_block(trace: ChannelTrace, before: Any, dims: Dims, after: tuple[int, ...]) -> Dims:
    known = {number: nodes for number, nodes in enumerate(dims) if nodes is not None and before[number] > 1}
    if not known:
        trace.pin_dims(dims, "a single channel")
        return [None] * len(after)
    if len(known) > 1:  # those that stay anyway fold as dimensions without channels
        known = {number: nodes for number, nodes in known.items() if not trace.nodes.is_pinned(nodes)}
    if len(known) > 1:  # keys and values that are repeated for several heads of queries
        repeated = [number for number, nodes in known.items() if trace.repeated.issuperset(nodes.tolist())]
        trace.pin_dims([known.pop(number) for number in repeated], f"{trace.where()} repeats it")
    if len(known) != 1:
        trace.pin_dims(dims, f"{trace.where()} folds it into another dimension")
        return [None] * len(after)
    ((number, nodes),) = known.items()
    shape = [1] * len(before)
    shape[number] = before[number]
    flat = np.broadcast_to(nodes.reshape(shape), before).reshape(-1)
    return trace.split(flat, after) if len(after) > 1 else [flat]


def _matching_blocks(before: Any, after: Any) -> Iterator[tuple[int, int, int, int]]:
    """Yield the smallest parts of two shapes, as ranges of dimensions, that have equally many elements."""
    i = j = 0
    while i < len(before) or j < len(after):
        start, first = i, j
        one = before[i] if i < len(before) else 1
        other = after[j] if j < len(after) else 1
        i, j = min(i + 1, len(before)), min(j + 1, len(after))
        while one != other:
            if one < other:
                one, i = one * before[i], i + 1
            else:
                other, j = other * after[j], j + 1
        yield start, i, first, j


def _permute(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    dims = trace.of(given["self"])
    return [[dims[one] for one in given["dims"]]]


def _transpose(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    dims = list(trace.of(given["self"]))
    if len(dims) > 1:
        one, other = given.get("dim0", 0), given.get("dim1", 1)
        dims[one], dims[other] = dims[other], dims[one]
    return [dims]


def _unsqueeze(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    dims = list(trace.of(given["self"]))
    dims.insert(given["dim"] % out.ndim, None)
    return [dims]


def _squeeze(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    tensor = given["self"]
    dims, asked = trace.of(tensor), given.get("dim")
    asked = range(tensor.ndim) if asked is None else [asked] if isinstance(asked, int) else asked
    gone = {one % tensor.ndim for one in asked if tensor.ndim and tensor.shape[one] == 1}
    trace.pin_dims([dims[one] for one in gone], "squeezed")
    return [[nodes for number, nodes in enumerate(dims) if number not in gone]]


def _expand(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    tensor, dims = given["self"], trace.of(given["self"])
    made: Dims = []
    for back in range(out.ndim, 0, -1):
        if back <= tensor.ndim and tensor.shape[-back] == out.shape[-back]:
            made.append(dims[-back])
        else:  # repeated, as often as the code asks for
            if back <= tensor.ndim:
                trace.pin_dims([dims[-back]], f"{trace.where()} broadcasts it")
            repeated = trace.nodes.make(out.shape[-back])
            trace.repeated.update(repeated.tolist())
            made.append(repeated)
    return [made]


def _cat(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    tensors = [one for one in given["tensors"] if one.numel()]
    if not tensors:
        return [None]
    dim = given["dim"] % out.ndim
    made = _unite_all(trace, [trace.of(one) for one in tensors], skip=dim)
    parts = [trace.of(one)[dim] for one in tensors]
    if any(part is not None for part in parts):
        filled = []
        for part, tensor in zip(parts, tensors, strict=True):
            if part is None:
                part = trace.nodes.make(tensor.shape[dim])
                trace.nodes.pin(part, "an input of the module")
            filled.append(part)
        made[dim] = np.concatenate(filled)
    return [made]


def _stack(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    made = _unite_all(trace, [trace.of(one) for one in given["tensors"]])
    made.insert(given["dim"] % out.ndim, None)
    return [made]


def _unite_all(trace: ChannelTrace, all_dims: list[Dims], skip: int | None = None) -> Dims:
    made = list(all_dims[0])
    for dim in range(len(made)):
        for dims in all_dims[1:]:
            if dim != skip:
                made[dim] = trace.unite(made[dim], dims[dim], "joined with a tensor of fixed size")
    if skip is not None:
        made[skip] = None
    return made


def _split(trace: ChannelTrace, given: Given, out: Any) -> list[Dims | None]:
    dims, dim = trace.of(given["self"]), given["dim"] % given["self"].ndim
    nodes = dims[dim]
    sizes = [one.shape[dim] for one in out]
    parts: list[Labels | None] = [None] * len(out)
    if nodes is not None:
        ends = np.cumsum([0, *sizes])
        cut = [nodes[start:stop] for start, stop in pairwise(ends)]
        if len(out) == 1:
            parts = [nodes]
        elif len(set(sizes)) == 1:
            for part in cut[1:]:
                trace.nodes.unite(cut[0], part)
            trace.count_part(cut[0])
            parts = [*cut]
        else:
            trace.nodes.pin(nodes, f"{trace.where()} cuts it at fixed places")
    return [[*dims[:dim], part, *dims[dim + 1 :]] for part in parts]


def _slice(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    dims, dim = list(trace.of(given["self"])), given["dim"] % out.ndim
    nodes, size, length = dims[dim], given["self"].shape[dim], out.shape[dim]
    start = int(given["start"] or 0)
    start = min(max(start + size if start < 0 else start, 0), size)
    if nodes is None or size == length:
        return [dims]
    if length and given["step"] == 1 and start % length == size % length == 0:  # an equal part, such as a gate
        rows = nodes.reshape(-1, length)
        trace.nodes.unite(rows[:1], rows)
        dims[dim] = nodes[start : start + length]
    else:
        trace.pin_dims([nodes], f"{trace.where()} cuts it at fixed places")
        dims[dim] = None
    return [dims]


def _select(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    dims, dim = list(trace.of(given["self"])), given["dim"] % given["self"].ndim
    trace.pin_dims([dims.pop(dim)], f"{trace.where()} takes one of it by its number")
    return [dims]


def _unbind(trace: ChannelTrace, given: Given, out: Any) -> list[Dims | None]:
    dims, dim = list(trace.of(given["self"])), given["dim"] % given["self"].ndim
    trace.pin_dims([dims.pop(dim)], f"{trace.where()} takes it apart")
    return [dims] * len(out)


def _pad(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    dims = list(trace.of(given["self"]))
    for dim, (before, after) in enumerate(zip(given["self"].shape, out.shape, strict=True)):
        if before != after:
            trace.pin_dims([dims[dim]], f"{trace.where()} pads it")
            dims[dim] = None
    return [dims]


def _pixel_shuffle(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    dims = list(trace.of(given["self"]))
    nodes = dims[-3]
    if nodes is None:
        return [None]
    rows = nodes.reshape(out.shape[-3], -1)
    trace.nodes.unite(rows[:, :1], rows)
    return [[*dims[:-3], rows[:, 0], None, None]]


def _glu(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    dims, dim = list(trace.of(given["self"])), given["dim"] % out.ndim
    nodes = dims[dim]
    if nodes is not None:
        first, second = np.split(nodes, 2)
        trace.nodes.unite(first, second)
        dims[dim] = first
    return [dims]


def _index(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    """Follow indexing of the first dimensions by tensors; the dimensions after them keep their channels."""
    dims, indices = trace.of(given["self"]), given["indices"]
    reason = f"{trace.where()} takes parts of it by their numbers"
    trace.pin([one for one in indices if one is not None], reason)
    if None in indices:
        trace.pin_dims(dims, reason)
        return [None]
    trace.pin_dims(dims[: len(indices)], reason)
    rest = dims[len(indices) :]
    return [[*[None] * (out.ndim - len(rest)), *rest]]


def _index_select(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    dims, dim = list(trace.of(given["self"])), given["dim"] % out.ndim
    trace.pin_dims([dims[dim]], f"{trace.where()} takes parts of it by their numbers")
    dims[dim] = None
    return [dims]


def _write_slices(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    """Follow a copy, or an addition, of slices of ``source`` to indices of ``self``."""
    dim = given["dim"] % out.ndim
    dims, source = list(trace.of(given["self"])), trace.of(given["source"])
    trace.pin_dims([dims[dim], source[dim]], f"{trace.where()} puts parts of it where numbers say")
    return [_unite_all(trace, [dims, source], skip=dim)]


def _scatter(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    """Follow additions, or other reductions, of rows of ``src`` to the rows of ``self`` that ``index`` has."""
    dim = given["dim"] % out.ndim
    dims, source = list(trace.of(given["self"])), list(trace.of(given["src"]))
    if any(given["src"].shape[number] != size for number, size in enumerate(out.shape) if number != dim):
        trace.pin_dims([*dims, *source], f"{trace.where()} puts parts of it where numbers say")
        return [None]
    trace.pin_dims([dims[dim], source[dim]], f"{trace.where()} puts parts of it where numbers say")
    return [_unite_all(trace, [dims, source], skip=dim)]


def _gather(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    dims, dim = trace.of(given["self"]), given["dim"] % out.ndim
    whole = [number != dim and given["self"].shape[number] == size for number, size in enumerate(out.shape)]
    lost = [nodes for nodes, stays in zip(dims, whole, strict=True) if not stays]
    trace.pin_dims(lost, f"{trace.where()} takes parts of it by their numbers")
    index = trace.of(given["index"])
    reason = f"{trace.where()} takes parts of it by numbers of a fixed size"
    return [
        [
            trace.unite(one, other, reason) if stays else None
            for one, other, stays in zip(dims, index, whole, strict=True)
        ]
    ]


VIEWS: dict[str, Rule] = {
    **dict.fromkeys(("view", "_unsafe_view", "_reshape_alias", "_reshape_copy"), _view),
    "permute": _permute,
    "t": _transpose,
    "transpose": _transpose,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "cat": _cat,
    "stack": _stack,
    **dict.fromkeys(("split", "unsafe_split", "split_with_sizes", "unsafe_split_with_sizes"), _split),
    "slice": _slice,
    "select": _select,
    "unbind": _unbind,
    **dict.fromkeys(
        ("constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d",
         "replication_pad2d", "replication_pad3d"),
        _pad,
    ),
    "pixel_shuffle": _pixel_shuffle,
    "glu": _glu,
    "index": _index,
    "index_select": _index_select,
    "index_copy": _write_slices,
    "index_add": _write_slices,
    "gather": _gather,
    **dict.fromkeys(("scatter_add", "scatter_reduce"), _scatter),
}  # fmt: skip
