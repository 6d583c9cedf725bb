"""LightningModules: layers joined with a loss, metrics, an optimizer and logging."""

from lightning_accel.models.language_model import MoELanguageModel
from lightning_accel.models.moe import MoEClassifier

__all__ = ["MoEClassifier", "MoELanguageModel"]
