"""Comparison of what a file computes with what its module does."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from lightning_accel.compress.calls import first_line
from lightning_accel.compress.export.flat import outputs_of
from lightning_accel.compress.export.loading import load_compressed
from lightning_accel.compress.export.traced import ExportError, Traced, innermost
from lightning_accel.compress.quiet import suppress_output


@contextmanager
def failures_explained(failed: str) -> Iterator[None]:
    """Raise an ExportError in place of any exception, and suppress output."""
    try:
        with suppress_output():
            yield
    except Exception as error:
        raise ExportError(f"{failed}: {first_line(innermost(error))}") from error


def verify(written: Path, traced: Traced, path: Path, is_quantized: bool) -> float:
    """Compare the file with the module; return the largest difference."""
    try:
        loaded = load_compressed(written)
    except ValueError as error:
        raise ExportError(f"{path} was not written: it cannot be read: {first_line(error)}") from error
    largest = 0.0
    for call in traced.calls:
        expected = outputs_of(traced.live, call)
        exact = outputs_of(traced.plain, call) if is_quantized else {}
        sizes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in traced.flat.tensors_of(call).items())
        try:
            found = outputs_of(loaded, call)
        except Exception as error:
            raise ExportError(f"{path} was not written: the file fails on {sizes}: {first_line(error)}") from error
        for name in traced.flat.kept:
            difference = difference_of(found[name], expected[name])
            allowed = tolerance_of(expected[name].dtype)
            if is_quantized and allowed:
                allowed = max(0.02, min(0.5, 2 * difference_of(exact[name], expected[name])))
            if not difference <= allowed:
                raise ExportError(
                    f"{path} was not written: its output {name!r} differs from the module's by {difference:.3g} of the "
                    f"largest value, on {sizes}; the tolerance is {allowed:.3g}. A layer that draws random numbers, or "
                    "a Python branch that torch.export followed on the traced batch alone, would do that"
                )
            largest = max(largest, difference)
    return largest


def tolerance_of(dtype: torch.dtype) -> float:
    """Return by which share of the largest value outputs of two programs for the same computation may differ."""
    return max(1e-3, 4 * torch.finfo(dtype).eps) if dtype.is_floating_point else 0.0


def difference_of(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest finite value; inf if shapes or non-finite values differ."""
    if found.shape != expected.shape:
        return math.inf
    a, b = (value.detach().to("cpu", torch.float64) for value in (found, expected))
    finite = b.isfinite()
    if not torch.equal(finite, a.isfinite()) or not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return math.inf
    if not finite.any():
        return 0.0
    return float((a - b)[finite].abs().max() / b[finite].abs().max().clamp(min=1e-6))
