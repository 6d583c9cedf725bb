"""What callbacks make at the end of a fit, which is worth less than what was trained."""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch.utilities import rank_zero_warn

from lightning_accel.compress.calls import first_line
from lightning_accel.compress.export import ExportError
from lightning_accel.compress.quantized import NothingPickedError


@contextmanager
def spare_fit(failed: str) -> Iterator[None]:
    """Warn of what fails inside, after the words ``failed``, so that the fit returns with what it trained.

    All processes enter it together; collective calls inside come before what one process does alone, else the others
    would wait for one that has given up.
    """
    try:
        yield
    except Exception as error:
        has_reasons = isinstance(error, ExportError | NothingPickedError)
        rank_zero_warn(f"{failed}: {error if has_reasons else first_line(error)}")
