"""Instruments: the machine and its measured rates, and where the steps of a fit spend time, operations and memory.

Its names are imported on first use, since the machine is described without Lightning.
"""

from pathlib import Path

from lightning_accel._lazy import lazy_getattr, names_in

_MODULE_OF = names_in(Path(__file__).with_suffix(".pyi"))

__all__ = sorted(_MODULE_OF)
__getattr__ = lazy_getattr(__name__, _MODULE_OF)
