"""Callbacks for any LightningModule."""

from lightning_accel.callbacks.prediction_writer import PredictionWriter

__all__ = ["PredictionWriter"]
