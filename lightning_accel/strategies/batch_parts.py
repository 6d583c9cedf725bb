"""A batch taken apart for several devices, and their results put together. Shapes: B rows."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

_PLAIN = (str, bytes, int, float, complex, bool, type(None))


class Part(NamedTuple):
    """Some rows of a batch."""

    batch: Any
    rows: int


def split_batch(batch: Any, num_parts: int) -> list[Part]:
    """Take ``batch`` apart into ``num_parts`` of about as many rows, in order; fewer where it has fewer rows.

    Rows are counted along the first dimension of its tensors, which must agree, or as the graphs of a batch of
    PyTorch Geometric. It may be nested in lists, tuples, named tuples, mappings and dataclasses. Lists of B things that
    are no tensors, such as texts, are split; tensors without dimensions, numbers and texts go to every part.

    Raises:
        TypeError: if it holds what cannot be split.
        ValueError: if numbers of rows disagree, or nothing in it has rows.

    >>> [part.batch for part in split_batch({"x": torch.arange(3), "names": ["a", "b", "c"]}, 2)]
    [{'x': tensor([0, 1]), 'names': ['a', 'b']}, {'x': tensor([2]), 'names': ['c']}]
    """
    counts = _row_counts(batch)
    if not counts and isinstance(batch, list):
        counts = [len(batch)]
    if not counts:
        raise ValueError(f"found no tensor whose rows could be split over devices in a batch of {_name(batch)}")
    if len(set(counts)) > 1:
        raise ValueError(
            f"cannot split a batch over devices whose tensors have unequal first dimensions, {sorted(set(counts))}; "
            "make them agree, or train with ddp"
        )
    rows = counts[0]
    num_parts = max(1, min(num_parts, rows))
    bounds = [rows // num_parts * i + min(i, rows % num_parts) for i in range(num_parts + 1)]
    return [Part(_take(batch, first, last, rows), last - first) for first, last in pairwise(bounds)]


def _row_counts(batch: Any) -> list[int]:
    if isinstance(batch, Tensor):
        return [len(batch)] if batch.ndim else []
    if is_graphs(batch):
        return [batch.num_graphs]
    return [count for item in _items(batch) for count in _row_counts(item)]


def _items(batch: Any) -> list[Any]:
    if isinstance(batch, PackedSequence):
        raise TypeError(
            "cannot split a PackedSequence over devices; give padded sequences and their lengths, and pack them in the "
            "module, or train with ddp"
        )
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, (list, tuple)):
        return list(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    if isinstance(batch, _PLAIN):
        return []
    raise TypeError(
        f"cannot split a {_name(batch)} over devices; give tensors, or lists, tuples, mappings or dataclasses of them, "
        "or batches of PyTorch Geometric, or train with ddp"
    )


def _take(batch: Any, first: int, last: int, rows: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[first:last] if batch.ndim else batch
    if is_graphs(batch):
        return take_graphs(batch, first, last)
    if isinstance(batch, _PLAIN):
        return batch
    if isinstance(batch, (list, tuple)) and len(batch) == rows and not _row_counts(batch):
        return batch[first:last]
    return _rebuild(batch, [_take(item, first, last, rows) for item in _items(batch)])


def _rebuild(like: Any, items: Sequence[Any]) -> Any:
    kind: Any = type(like)
    if isinstance(like, Mapping):
        return kind(zip(like, items, strict=True))
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return kind(*items)
    if isinstance(like, (list, tuple)):
        return kind(items)
    names = [field.name for field in dataclasses.fields(like)]
    rebuilt = object.__new__(kind)  # its constructor may ask for other arguments than its fields
    for name, item in {**vars(like), **dict(zip(names, items, strict=True))}.items():
        object.__setattr__(rebuilt, name, item)
    return rebuilt


def is_graphs(batch: Any) -> bool:
    """Whether ``batch`` is one of PyTorch Geometric's, of several graphs."""
    geometric: Any = sys.modules.get("torch_geometric.data")  # where nobody imported it, nothing is of it
    return geometric is not None and isinstance(batch, geometric.Batch)


def holds_graphs(batch: Any) -> bool:
    """Whether anything in ``batch`` is a graph, or several, of PyTorch Geometric."""
    geometric: Any = sys.modules.get("torch_geometric.data")
    return geometric is not None and any(isinstance(leaf, geometric.Data) for leaf in tree_leaves(batch))


def take_graphs(batch: Any, first: int, last: int) -> Any:
    """The graphs from ``first`` up to ``last``, as a batch of their own."""
    follow = [key.removesuffix("_batch") for key in batch.keys() if key.endswith("_batch")]  # noqa: SIM118
    geometric: Any = sys.modules["torch_geometric.data"]
    return geometric.Batch.from_data_list(batch.index_select(list(range(first, last))), follow_batch=follow)


def merge_outputs(outputs: Sequence[Any], rows: Sequence[int], device: torch.device) -> Any:
    """What one device would have returned for the whole batch, on ``device``.

    Numbers and tensors without dimensions become their mean, weighted by ``rows``; other tensors, and lists, are
    joined; mappings, tuples and dataclasses are merged by item. A mapping with "weight" is weighted by that, which is
    summed. Of anything else the first is taken.
    """
    first = outputs[0]
    if isinstance(first, Tensor) and first.ndim:
        return torch.cat([output.to(device) for output in outputs])
    if isinstance(first, (Tensor, int, float)) and not isinstance(first, bool):
        return _mean(outputs, rows, device)
    if isinstance(first, Mapping) and first.get("weight") is not None:
        weights = [torch.as_tensor(output["weight"]).to(device) for output in outputs]
        merged = {name: merge_outputs([output[name] for output in outputs], weights, device) for name in first}  # type: ignore[arg-type]
        return _rebuild(first, [*{**merged, "weight": torch.stack(weights).sum()}.values()])
    if isinstance(first, list):
        return [item for output in outputs for item in output]
    if isinstance(first, (Mapping, tuple)) or (dataclasses.is_dataclass(first) and not isinstance(first, type)):
        items = zip(*(_items(output) for output in outputs), strict=True)
        return _rebuild(first, [merge_outputs(item, rows, device) for item in items])
    return first


def _mean(values: Sequence[Any], weights: Sequence[Any], device: torch.device) -> Tensor:
    """Weighted, (), of a floating dtype; 0 where all weights are."""
    tensors = [torch.as_tensor(value).to(device) for value in values]
    tensors = [one if one.is_floating_point() else one.to(torch.get_default_dtype()) for one in tensors]
    wide = torch.float32 if device.type == "mps" else torch.float64
    parts = torch.stack([torch.as_tensor(weight).to(device, wide) for weight in weights])
    shares = parts / parts.sum().clamp(min=torch.finfo(torch.float32).tiny)
    return torch.stack([one * share.to(one.dtype) for one, share in zip(tensors, shares, strict=True)]).sum()


def _name(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}".removeprefix("builtins.")
