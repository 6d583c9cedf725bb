"""A cache of the triples of each graph. Shapes: N nodes, M entries, T triangles."""

import threading
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from lightning_accel._private.torch import change_count
from lightning_accel.ops.triples.find import Triples, find_triples


class _Entry(NamedTuple):
    num_nodes: int
    state: Tensor | int
    given: tuple[TensorWeakRef, Tensor | int] | None
    triples: Triples

    def is_valid_for(self, edge_index: Tensor, num_nodes: int, triangle_index: Tensor | None) -> bool:
        if self.num_nodes != num_nodes or (self.given is None) != (triangle_index is None):
            return False
        if triangle_index is not None and self.given is not None:
            reference, state = self.given
            if reference() is not triangle_index or not _unchanged(triangle_index, state):
                return False
        return _unchanged(edge_index, self.state)


_cache: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_lock = threading.Lock()


@torch.compiler.disable  # type: ignore[untyped-decorator]  # sizes of the results depend on the data
def triples_of(edge_index: Tensor, num_nodes: int, triangle_index: Tensor | None = None) -> Triples:
    """Return :func:`find_triples` of a graph, cached per ``edge_index``, so that layers and epochs share the result.

    The key is the tensor object, not its values, and the entry is deleted with the tensor. After a change in place the
    triples are computed again, unless torch does not count the change: changes through ``edge_index.data``, or of a
    NumPy array that shares its memory, go unnoticed, and the old result is returned. The function is thread-safe;
    concurrent calls with the same graph may both compute the result. torch.compile breaks the graph here; with
    ``fullgraph=True`` call it outside of the compiled function.

    Args:
        edge_index: (2, M) int64 in [0, N).
        num_nodes: N.
        triangle_index: (3, T) int64, all triangles if they are known, nodes ascending in each column.
    """
    with _lock:
        found = _cache.get(edge_index)
    if found is not None and found.is_valid_for(edge_index, num_nodes, triangle_index):
        return found.triples
    given = None if triangle_index is None else (TensorWeakRef(triangle_index), _change_marker(triangle_index))
    with torch.inference_mode(False):  # the first call may come from validation; training saves the result for backward
        triples = find_triples(edge_index, num_nodes, triangle_index)
    found = _Entry(num_nodes, _change_marker(edge_index), given, triples)
    with _lock:
        _cache[edge_index] = found
    return triples


def _change_marker(tensor: Tensor) -> Tensor | int:
    """Return a value that changes with in-place changes: torch's counter, or a copy for inference-mode tensors."""
    return tensor.clone() if tensor.is_inference() else change_count(tensor)


def _unchanged(tensor: Tensor, state: Tensor | int) -> bool:
    return torch.equal(tensor, state) if isinstance(state, Tensor) else change_count(tensor) == state
