"""Precision plug-ins for Lightning's Trainer, which serve any LightningModule."""

from lightning_accel.precision.amp import AmpPrecision

__all__ = ["AmpPrecision"]
