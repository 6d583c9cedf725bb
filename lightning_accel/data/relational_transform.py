"""Transform that stores the triangles of a graph before training. Shapes: T triangles, P paths."""

from typing import Any

import torch
from torch_geometric.data import Data
from torch_geometric.transforms import BaseTransform

from lightning_accel.ops.triples import find_triples
from lightning_accel.ops.two_paths import num_two_paths, two_paths

_PATHS_AT_A_TIME = 2**20
_MOST_PATHS = 10**7  # per graph, 240 MB


class AddRelationalTriples(BaseTransform):  # type: ignore[misc]  # PyG's is untyped
    """Store the triangles of a graph as an attribute, so that they are not searched again in every epoch.

    - ``triangle_index`` (3, T) int64: each triangle once, its nodes ascending
    - ``two_path_index`` (3, P) int64, if ``store_two_paths``: first leaf, centre and second leaf of each path of two
      edges, including those in triangles

    Directions, duplicates and self-loops of ``edge_index`` are ignored. ``Batch`` increments both like ``edge_index``.
    ``find_triples(edge_index, num_nodes, triangle_index)`` accepts the stored triangles. Put the transform last: a
    later one that changes edges or drops nodes does not update the stored triples.

    Args:
        store_two_paths: whether to store ``two_path_index``, which grows with the squared degrees, 24 bytes per path.

    Raises:
        ValueError: if ``edge_index`` is missing, or a graph has more than ten million paths to store.
        TypeError: for anything but ``Data``, since triples of several node types do not fit in one tensor.
    """

    def __init__(self, store_two_paths: bool = False) -> None:
        self.store_two_paths = store_two_paths

    def forward(self, data: Any) -> Any:
        if not isinstance(data, Data):
            raise TypeError(
                f"AddRelationalTriples needs a torch_geometric.data.Data; got a {type(data).__name__}. "
                "Make the graph homogeneous first, data.to_homogeneous()"
            )
        if data.edge_index is None:
            raise ValueError("AddRelationalTriples needs data.edge_index; got none")
        triples = find_triples(data.edge_index, int(data.num_nodes or 0))
        data.triangle_index = triples.triangle
        if self.store_two_paths:
            if (paths := num_two_paths(triples)) > _MOST_PATHS:
                raise ValueError(
                    f"store_two_paths is for graphs with {_MOST_PATHS} paths of two edges at most; this one of "
                    f"{data.num_nodes} nodes has {paths}, {paths * 24 / 1e9:.1f} GB. Leave it out, and go through them "
                    "with lightning_accel.ops.two_paths, a part at a time, or draw some with sample_two_paths"
                )
            chunks = [torch.stack(chunk[:3]) for chunk in two_paths(triples, _PATHS_AT_A_TIME)]
            data.two_path_index = torch.cat([data.edge_index.new_empty(3, 0), *chunks], dim=1)
        return data

    def __repr__(self) -> str:
        return f"{type(self).__name__}(store_two_paths={self.store_two_paths})"
