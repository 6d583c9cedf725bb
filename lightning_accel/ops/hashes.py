"""Hashes of 64 bits of rows, pairs and multisets of numbers, equal on every machine."""

import torch
from torch import Tensor

# constants of splitmix64 (Steele et al. 2014, https://doi.org/10.1145/2714064.2660195), as signed numbers
_STEP = 0x9E3779B97F4A7C15 - 2**64
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def hash_rows(rows: Tensor) -> Tensor:
    """Return a hash (n,) int64 of each row of (n, ...) numbers, as float64, bit by bit; 0 and -0 are equal.

    >>> same, other = hash_rows(torch.tensor([[1.0, 2.0], [2.0, 1.0]]))
    >>> bool(same == other)
    False
    """
    rows = rows[:, None] if rows.ndim == 1 else rows.flatten(1)
    bits = (rows.double() + 0.0).view(torch.int64)
    return mix_bits(mix_bits(bits + mix_bits(torch.arange(bits.shape[1], device=bits.device))).sum(dim=1))


def join_hashes(first: Tensor, *others: Tensor) -> Tensor:
    """Return a hash of a sequence of hashes, all int64 and of one shape."""
    for other in others:
        first = mix_bits(first) * 3 + other
    return mix_bits(first)


def hash_neighbours(colour: Tensor, edge_index: Tensor, arc_colour: Tensor | None = None) -> Tensor:
    """Return a hash (N,) int64 of what reaches each node: the hashes (N,) of its neighbours and (M,) of the arcs.

    Args:
        colour: (N,) int64.
        edge_index: (2, M) int64, from source to target.
        arc_colour: (M,) int64, if arcs differ.
    """
    source, target = edge_index
    message = colour[source] if arc_colour is None else join_hashes(colour[source], arc_colour)
    return torch.zeros_like(colour).index_add_(0, target, mix_bits(message))


def mix_bits(value: Tensor) -> Tensor:
    """Permute the int64 numbers at random: the last step of splitmix64."""
    value = value + _STEP
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        value = (value ^ _shift_right(value, shift)) * factor
    return value ^ _shift_right(value, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Shift in zeros, where torch repeats the sign."""
    return (value >> bits) & (2 ** (64 - bits) - 1)
