"""Graphs that stand a line each, in JSON or graph6. Shapes: n nodes of a graph."""

from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data

_LARGEST = 1e30  # as in tables: the normalisation squares it


def number_list(found: Any, name: str, where: str, whole: bool = False) -> np.ndarray:
    """A list of numbers, or of equally long lists of them."""
    kinds = "iu" if whole else "biuf"
    what = "whole numbers" if whole else "numbers"
    try:
        values = np.array(found) if isinstance(found, list) else np.array(None)
    except (ValueError, OverflowError):
        values = np.array(None)
    if values.size == 0:
        return np.zeros((len(values), *values.shape[1:]), np.int64)
    if values.dtype.kind not in kinds or values.ndim > 2 or not (np.abs(values.astype(np.float64)) <= _LARGEST).all():
        raise ValueError(
            f"{name!r} in {where} must be a list of {what}, or of equally long lists of them; {_odd(found)}"
        )
    return values


def _odd(found: Any) -> str:
    """The first entry that is not like the first one."""
    if not isinstance(found, list):
        return f"got {found!r:.60}"
    widths = [len(entry) if isinstance(entry, list) else None for entry in found]
    for number, entry in enumerate(found):
        if widths[number] != widths[0]:
            return f"entry {number}, counted from 0, is {entry!r:.60} and the first one {found[0]!r:.60}"
        inner = entry if isinstance(entry, list) else [entry]
        if wrong := [part for part in inner if not isinstance(part, int | float) or not abs(part) <= _LARGEST]:
            return f"got {wrong[0]!r:.60} in entry {number}, counted from 0"
    return f"got {found!r:.60}"


def read_graph6(text: str, where: str = "the text") -> Data:
    """A graph in the graph6 format, as nauty and networkx write it.

    Source: McKay, https://users.cecs.anu.edu.au/~bdm/data/formats.txt

    Raises:
        ValueError: if the text is no graph6, or too short or too long for its number of nodes.

    >>> read_graph6("Bw").edge_index.tolist()
    [[0, 0, 1, 1, 2, 2], [1, 2, 0, 2, 0, 1]]
    """
    codes = np.frombuffer(text.encode(), np.uint8).astype(np.int64) - 63
    if not len(codes) or codes.min() < 0 or codes.max() > 63:
        raise ValueError(f"{where} is no graph6, whose characters go from ? to ~; got {text[:60]!r}")
    lead = 1 if codes[0] < 63 else 4 if codes[1:2] != [63] else 8
    digits = codes[:lead] if lead == 1 else codes[lead // 4 : lead]
    n = int(digits @ 64 ** np.arange(len(digits))[::-1]) if len(codes) >= lead else 0
    needed = -(-(n * (n - 1) // 2) // 6) if len(codes) >= lead else 0
    if len(codes) < lead or len(codes) - lead != needed:
        raise ValueError(
            f"{where} must have {needed} characters after the number of nodes, {n}; got {max(0, len(codes) - lead)}"
        )
    bits = (codes[lead:, None] >> np.arange(5, -1, -1) & 1).ravel()[: n * (n - 1) // 2].astype(bool)
    column, row = np.tril_indices(n, -1)  # pairs in the order of the format: 0 1, 0 2, 1 2, 0 3, ...
    edges = np.stack([row[bits], column[bits]])
    both = np.concatenate([edges, edges[::-1]], axis=1)
    return Data(edge_index=torch.from_numpy(both[:, np.lexsort((both[1], both[0]))]), num_nodes=n)
