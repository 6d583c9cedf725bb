"""Parsers of graphs written one per line, in JSON or graph6. Shapes: n nodes of a graph."""

from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data

from lightning_accel.data.quoting import shown
from lightning_accel.data.text_lines import holds_booleans

_LARGEST = 1e30  # as in tables: the standardization squares it


def number_list(found: Any, name: str, where: str, whole: bool = False) -> np.ndarray:
    """Convert a list of numbers, or of equally long lists of numbers, to an array.

    Raises:
        ValueError: if it is something else, or holds booleans, fractions where ``whole``, or numbers beyond 1e30.
    """
    if isinstance(found, list) and holds_booleans(found):
        raise ValueError(f"{name!r} in {where} must be a list of numbers; got booleans among them")
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
            f"{name!r} in {where} must be a list of {what}, or of equally long lists of them; "
            f"{_describe_mismatch(found)}"
        )
    return values


def _describe_mismatch(found: Any) -> str:
    """Describe, for a message, the first entry that is no number or is not as long as the first one."""
    if not isinstance(found, list):
        return f"got {shown(found)}"
    widths = [len(entry) if isinstance(entry, list) else None for entry in found]
    for number, entry in enumerate(found):
        if widths[number] != widths[0]:
            return f"entry {number}, counted from 0, is {shown(entry)} and the first one {shown(found[0])}"
        inner = entry if isinstance(entry, list) else [entry]
        if wrong := [part for part in inner if not isinstance(part, int | float) or not abs(part) <= _LARGEST]:
            return f"got {shown(wrong[0])} in entry {number}, counted from 0"
    return f"got {shown(found)}"


def read_graph6(text: str, where: str = "the text") -> Data:
    """Parse a graph in the graph6 format, as nauty and networkx write it.

    Source: McKay, https://users.cecs.anu.edu.au/~bdm/data/formats.txt

    Raises:
        ValueError: if the text is not graph6, or too short or too long for its number of nodes.

    >>> read_graph6("Bw").edge_index.tolist()
    [[0, 0, 1, 1, 2, 2], [1, 2, 0, 2, 0, 1]]
    """
    codes = np.frombuffer(text.encode(), np.uint8) - np.uint8(63)  # codes below 63 wrap around to above 63
    if not len(codes) or codes.max() > 63:
        raise ValueError(f"{where} is no graph6, whose characters go from ? to ~; got {shown(text)}")
    lead = 1 if codes[0] < 63 else 4 if codes[1:2].tolist() != [63] else 8
    digits = codes[:lead].astype(np.int64) if lead == 1 else codes[lead // 4 : lead].astype(np.int64)
    n = int(digits @ 64 ** np.arange(len(digits))[::-1]) if len(codes) >= lead else 0
    needed = -(-(n * (n - 1) // 2) // 6) if len(codes) >= lead else 0
    if len(codes) < lead or len(codes) - lead != needed:
        raise ValueError(
            f"{where} must have {needed} characters after the number of nodes, {n}; got {max(0, len(codes) - lead)}"
        )
    bits = np.unpackbits(codes[lead:, None], axis=1)[:, 2:].ravel()[: n * (n - 1) // 2]
    place = np.flatnonzero(bits)  # index of a pair in the order of the format: 0 1, 0 2, 1 2, 0 3, ...
    column = ((1 + np.sqrt(1 + 8 * place)) / 2).astype(np.int64)  # exact: n is below 2**18 if all pairs are in memory
    edges = np.stack([place - column * (column - 1) // 2, column])
    both = np.concatenate([edges, edges[::-1]], axis=1)
    return Data(edge_index=torch.from_numpy(both[:, np.lexsort((both[1], both[0]))]), num_nodes=n)
