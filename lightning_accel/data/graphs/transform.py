"""Transform that stores the triangles of a graph before training. Shapes: T triangles."""

from typing import Any

from torch_geometric.data import Data
from torch_geometric.transforms import BaseTransform

from lightning_accel.ops.triples.find import find_triples


class AddRelationalTriples(BaseTransform):  # type: ignore[misc]  # PyG's is untyped
    """Store the triangles of a graph as an attribute, so that they are not searched again in every epoch.

    The attribute ``triangle_index`` (3, T) int64 lists each triangle once, its nodes ascending. Directions, duplicates
    and self-loops of ``edge_index`` are ignored. ``Batch`` increments it like ``edge_index``, and
    ``find_triples(edge_index, num_nodes, triangle_index)`` accepts it. Put the transform last: a later one that changes
    edges or drops nodes does not update the triangles.

    Raises:
        ValueError: if ``edge_index`` is missing.
        TypeError: for anything but ``Data``, since triples of several node types do not fit in one tensor.

    Example:
        >>> import torch
        >>> from torch_geometric.data import Data
        >>> triangle = Data(edge_index=torch.tensor([[0, 1, 2], [1, 2, 0]]), num_nodes=3)
        >>> AddRelationalTriples()(triangle).triangle_index
        tensor([[0],
                [1],
                [2]])
    """

    def forward(self, data: Any) -> Any:
        if not isinstance(data, Data):
            raise TypeError(
                f"AddRelationalTriples needs a torch_geometric.data.Data; got a {type(data).__name__}. "
                "Make the graph homogeneous first, data.to_homogeneous()"
            )
        if data.edge_index is None:
            raise ValueError("AddRelationalTriples needs data.edge_index; got none")
        data.triangle_index = find_triples(data.edge_index, int(data.num_nodes or 0)).triangle
        return data
