"""Precision plug-ins for Lightning's Trainer, for any LightningModule."""

from lightning_accel._lazy import public_dir
from lightning_accel.precision.amp import AmpPrecision
from lightning_accel.precision.bfloat16 import Bfloat16Precision
from lightning_accel.precision.float8 import Float8Precision

__all__ = [
    "AmpPrecision",
    "Bfloat16Precision",
    "Float8Precision",
]
__dir__ = public_dir(__all__, globals())
