"""Union-find over the indices of tensors that must be removed together."""

import numpy as np
import numpy.typing as npt

Labels = npt.NDArray[np.int64]


class Nodes:
    """Track a node for each index of each dimension of a tensor; indices that must be removed together are united."""

    def __init__(self) -> None:
        self._parent: Labels = np.zeros(0, dtype=np.int64)
        self._pins: list[tuple[Labels, str]] = []

    def make(self, count: int) -> Labels:
        first = len(self._parent)
        made = np.arange(first, first + count)
        self._parent = np.concatenate([self._parent, made])
        return made

    def roots(self, nodes: Labels) -> Labels:
        """Return the representative of the set of each of ``nodes``."""
        nodes = self._parent[nodes]
        while True:
            above = self._parent[nodes]
            if np.array_equal(above, nodes):
                return nodes
            nodes = above

    def unite(self, first: Labels, second: Labels) -> None:
        """Unite ``first[i]`` with ``second[i]``, for each i; the two broadcast."""
        first, second = (side.ravel() for side in np.broadcast_arrays(first, second))
        while True:
            one, other = self.roots(first), self.roots(second)
            differ = one != other
            if not differ.any():
                return
            one, other = one[differ], other[differ]
            self._parent[np.maximum(one, other)] = np.minimum(one, other)  # of several writes the last wins: repeat

    def pin(self, nodes: Labels, reason: str) -> None:
        """Exclude ``nodes`` from removal."""
        self._pins.append((nodes.ravel(), reason))

    def pinned(self) -> dict[int, str]:
        """Return the first reason of each pinned set, by its representative."""
        reasons: dict[int, str] = {}
        for nodes, reason in self._pins:
            for root in np.unique(self.roots(nodes)).tolist():
                reasons.setdefault(root, reason)
        return reasons
