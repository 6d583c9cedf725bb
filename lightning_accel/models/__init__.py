"""LightningModules: layers joined with a loss, metrics, an optimizer and logging."""

from lightning_accel.models.language_model import MoELanguageModel
from lightning_accel.models.moe import MoEClassifier
from lightning_accel.models.rnn import SequenceModel

__all__ = ["MoEClassifier", "MoELanguageModel", "SequenceModel"]
