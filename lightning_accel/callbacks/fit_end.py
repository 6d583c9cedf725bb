"""Protection of a trained model from failures in callbacks at the end of a fit."""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch.utilities import rank_zero_warn

from lightning_accel.compress.calls import first_line
from lightning_accel.compress.export.traced import ExportError
from lightning_accel.compress.quantization.picking import NothingPickedError


@contextmanager
def failures_as_warnings(failed: str) -> Iterator[None]:
    """Turn an exception inside into a warning that begins with ``failed``, so that the fit still succeeds.

    All processes enter it together. Collective calls inside must precede work of a single process, or the others would
    wait for one that has failed.
    """
    try:
        yield
    except Exception as error:
        has_reasons = isinstance(error, ExportError | NothingPickedError)
        rank_zero_warn(f"{failed}: {error if has_reasons else first_line(error)}")
