"""What a machine and a run are slow at, and what to do about it."""

from pathlib import Path

from lightning_accel._lazy import lazy_getattr, names_in

_MODULE_OF = names_in(Path(__file__).with_suffix(".pyi"))

__all__ = sorted(_MODULE_OF)
__getattr__ = lazy_getattr(__name__, _MODULE_OF)
