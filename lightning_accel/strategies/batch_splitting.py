"""Splitting of a batch over several devices, and merging of their results. Shapes: B samples."""

import copy
import dataclasses
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from enum import Enum
from itertools import pairwise
from pathlib import PurePath
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

_LOG = inspect.signature(L.LightningModule.log)
_REDUCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {"sum": torch.sum, "min": torch.min, "max": torch.max}
_PLAIN = (str, bytes, int, float, complex, bool, type(None), Enum, PurePath, np.generic, torch.device, torch.dtype)


class BatchPart(NamedTuple):
    """Hold a part of a batch and its number of samples."""

    batch: Any
    num_samples: int


def split_batch(batch: Any, num_parts: int, instead: str = "train with ddp") -> list[BatchPart]:
    """Split ``batch`` in order into ``num_parts`` of about equal size, or into B parts if it has fewer samples.

    Samples are counted along the first dimension of its tensors and arrays, which must agree, or as the graphs of a
    PyTorch Geometric batch. The batch may be nested in lists, tuples, named tuples, mappings and dataclasses. Lists of
    B items that are not tensors, such as texts, are split; tensors without dimensions, numbers and texts go to every
    part.

    Args:
        batch: a batch of B samples.
        num_parts: number of parts; at most B are returned.
        instead: what to do instead of splitting, for error messages.

    Raises:
        TypeError: if the batch holds something that cannot be split.
        ValueError: if numbers of samples disagree, or nothing in the batch has samples.

    >>> [part.batch for part in split_batch({"x": torch.arange(3), "names": ["a", "b", "c"]}, 2)]
    [{'x': tensor([0, 1]), 'names': ['a', 'b']}, {'x': tensor([2]), 'names': ['c']}]
    """
    num_samples = count_samples(batch, instead)
    num_parts = max(1, min(num_parts, num_samples))
    bounds = [num_samples // num_parts * i + min(i, num_samples % num_parts) for i in range(num_parts + 1)]
    return [BatchPart(_slice(batch, first, last, num_samples), last - first) for first, last in pairwise(bounds)]


def count_samples(batch: Any, instead: str) -> int:
    """Count the samples that :func:`split_batch` would split."""
    counts = {count for leaf in leaves(batch) if (count := _count(leaf)) is not None}
    if isinstance(batch, list) and not counts:
        counts = {len(batch)}
    for one in _unsplittable(batch, max(counts, default=-1)):
        advice = "give tensors, or lists, tuples, mappings or dataclasses of them, or batches of PyTorch Geometric"
        if isinstance(one, PackedSequence):
            advice = "give padded sequences and their lengths, and pack them in the module"
        raise TypeError(f"cannot split a {_name(one)} of a batch; {advice}, or {instead}")
    if not counts:
        raise ValueError(
            f"found no tensor whose rows could be split in a {_name(batch)} as a batch; add one, or {instead}"
        )
    if len(counts) > 1:
        raise ValueError(
            f"cannot split a batch whose tensors have unequal first dimensions, {sorted(counts)}; make them agree, or "
            f"{instead}"
        )
    return counts.pop()


def leaves(batch: Any) -> Iterator[Any]:
    """Yield what ``batch`` holds, in order, from any nesting of containers that :func:`split_batch` knows."""
    items = _items(batch)
    if items is None:
        yield batch
    else:
        for item in items:
            yield from leaves(item)


def _items(batch: Any) -> list[Any] | None:
    """Return the items of a container; None if ``batch`` is no container."""
    if isinstance(batch, PackedSequence) or is_graph_batch(batch):
        return None
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, (list, tuple)):
        return list(batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    return None


def _count(leaf: Any) -> int | None:
    """Return the number of samples in a leaf; None if it has none."""
    if isinstance(leaf, (Tensor, np.ndarray)):
        return len(leaf) if leaf.ndim else None
    return int(leaf.num_graphs) if is_graph_batch(leaf) else None


def _has_samples(batch: Any) -> bool:
    return any(_count(leaf) is not None for leaf in leaves(batch))


def _unsplittable(batch: Any, num_samples: int) -> Iterator[Any]:
    """Yield what cannot be split, except items of lists that are split themselves."""
    items = _items(batch)
    if items is None:
        if not isinstance(batch, (Tensor, np.ndarray, *_PLAIN)) and not is_graph_batch(batch):
            yield batch
    elif not _is_list_of_samples(batch, num_samples):
        for item in items:
            yield from _unsplittable(item, num_samples)


def _is_list_of_samples(batch: Any, num_samples: int) -> bool:
    return isinstance(batch, (list, tuple)) and len(batch) == num_samples and not _has_samples(batch)


def _slice(batch: Any, first: int, last: int, num_samples: int) -> Any:
    items = _items(batch)
    if items is None:
        if is_graph_batch(batch):
            return slice_graphs(batch, first, last)
        return batch if _count(batch) is None else batch[first:last]
    if _is_list_of_samples(batch, num_samples):
        return batch[first:last]
    return _rebuild(batch, [_slice(item, first, last, num_samples) for item in items])


def _rebuild(like: Any, items: Sequence[Any]) -> Any:
    """Build a container of the type of ``like`` that holds ``items``."""
    kind: Any = type(like)
    if isinstance(like, MutableMapping):
        rebuilt: Any = copy.copy(like)  # its constructor may take other arguments, such as a default factory
        for key, item in zip(like, items, strict=True):
            rebuilt[key] = item
        return rebuilt
    if isinstance(like, Mapping):
        return kind(dict(zip(like, items, strict=True)))
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return kind(*items)
    if isinstance(like, (list, tuple)):
        return kind(items)
    rebuilt = copy.copy(like)
    for field, item in zip(dataclasses.fields(like), items, strict=True):
        object.__setattr__(rebuilt, field.name, item)  # works for frozen dataclasses, too
    return rebuilt


def is_graph_batch(batch: Any) -> bool:
    """Return whether ``batch`` is a PyTorch Geometric batch of several graphs."""
    geometric: Any = sys.modules.get("torch_geometric.data")  # no object can be one before the package is imported
    return geometric is not None and isinstance(batch, geometric.Batch)


def contains_graphs(batch: Any) -> bool:
    """Return whether anything in ``batch`` is a PyTorch Geometric graph or a batch of them."""
    geometric: Any = sys.modules.get("torch_geometric.data.data")
    return geometric is not None and any(isinstance(leaf, geometric.BaseData) for leaf in leaves(batch))


def slice_graphs(batch: Any, first: int, last: int) -> Any:
    """Return the graphs from ``first`` up to ``last`` as a batch of their own."""
    follow = [key.removesuffix("_batch") for key in batch.keys() if key.endswith("_batch")]  # noqa: SIM118
    geometric: Any = sys.modules["torch_geometric.data"]
    return geometric.Batch.from_data_list(batch.index_select(list(range(first, last))), follow_batch=follow)


def merge_outputs(outputs: Sequence[Any], num_samples: Sequence[int], device: torch.device) -> Any:
    """Merge ``outputs`` of several devices into what one device would return for the whole batch, on ``device``.

    Numbers and tensors without dimensions become their mean, weighted by ``num_samples``, the samples of each part;
    other tensors, and lists, are concatenated; mappings, tuples and dataclasses are merged item by item. If a mapping
    has the key "weight", that is used as weight and summed. Anything else is taken from the first output.
    """
    first = outputs[0]
    if isinstance(first, Tensor) and first.ndim:
        return torch.cat([output.to(device) for output in outputs])
    if isinstance(first, (Tensor, int, float)) and not isinstance(first, bool):
        return _mean(outputs, num_samples, device)
    if isinstance(first, Mapping) and first.get("weight") is not None:
        weights = [torch.as_tensor(output["weight"]).to(device) for output in outputs]
        merged = {name: merge_outputs([output[name] for output in outputs], weights, device) for name in first}  # type: ignore[arg-type]
        return _rebuild(first, [*{**merged, "weight": torch.stack(weights).sum()}.values()])
    if isinstance(first, list):
        return [item for output in outputs for item in output]
    if isinstance(first, (Mapping, tuple)) or (dataclasses.is_dataclass(first) and not isinstance(first, type)):
        items = zip(*(_items(output) or [] for output in outputs), strict=True)
        return _rebuild(first, [merge_outputs(item, num_samples, device) for item in items])
    return first


def _mean(values: Sequence[Any], weights: Sequence[Any], device: torch.device) -> Tensor:
    """Return the weighted mean, (), of a floating dtype; 0 if all weights are 0."""
    tensors = [torch.as_tensor(value).to(device) for value in values]
    tensors = [one if one.is_floating_point() else one.to(torch.get_default_dtype()) for one in tensors]
    wide = torch.float32 if device.type == "mps" else torch.float64
    parts = torch.stack([torch.as_tensor(weight).to(device, wide) for weight in weights])
    shares = parts / parts.sum().clamp(min=torch.finfo(torch.float32).tiny)
    return torch.stack([one * share.to(one.dtype) for one, share in zip(tensors, shares, strict=True)]).sum()


class RecordedLog:
    """Record calls of ``self.log`` in the parts of a batch, and merge them into calls for the whole batch."""

    def __init__(self) -> None:
        self.parts: list[dict[tuple[str, int], dict[str, Any]]] = []  # arguments, by name and occurrence

    def recorder(self) -> Callable[..., None]:
        """Return a function with the arguments of ``self.log`` that records the calls of one more part."""
        calls: dict[tuple[str, int], dict[str, Any]] = {}
        self.parts.append(calls)
        times: Counter[str] = Counter()

        def log(*args: Any, **kwargs: Any) -> None:
            call = _LOG.bind(None, *args, **kwargs).arguments
            del call["self"]
            if isinstance(call["value"], Tensor) and not call.get("enable_graph"):
                call["value"] = call["value"].detach().clone()  # it may change afterwards, such as a buffer
            calls[call["name"], times[call["name"]]] = call
            times[call["name"]] += 1

        return log

    def merged(self, device: torch.device, num_samples: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Return the arguments of one call for all parts; means are weighted by the number of samples.

        Args:
            device: device of the values.
            num_samples: samples of each part; by default equal, and ``batch_size`` stays out where calls had none.
        """
        merged = []
        for key in dict.fromkeys(key for calls in self.parts for key in calls):
            sizes = num_samples or [1] * len(self.parts)
            given = [(calls[key], size) for calls, size in zip(self.parts, sizes, strict=True) if key in calls]
            first = given[0][0]
            sizes = [call.get("batch_size") or size for call, size in given]
            value = _merge_logged([call["value"] for call, _ in given], sizes, first.get("reduce_fx", "mean"), device)
            merged.append({**first, "value": value})
            if num_samples or first.get("batch_size"):
                merged[-1]["batch_size"] = sum(sizes)
        return merged


def _merge_logged(values: Sequence[Any], sizes: Sequence[int], reduce_fx: Any, device: torch.device) -> Any:
    if not isinstance(values[0], (Tensor, int, float, np.number)):
        return values[0]  # a metric
    tensors = [torch.as_tensor(value).to(device).reshape(()) for value in values]
    if reduce_fx in ("mean", torch.mean):
        return _mean(tensors, sizes, device)
    return _REDUCTIONS.get(reduce_fx, reduce_fx)(torch.stack(tensors))


def _name(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}".removeprefix("builtins.")
