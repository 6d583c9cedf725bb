"""LightningModules: layers with a loss, metrics, an optimizer and logging."""

from lightning_accel.models.classifier import Classifier
from lightning_accel.models.dbn import DeepBeliefNetwork
from lightning_accel.models.dbn_stages import Stage
from lightning_accel.models.language_model import MoELanguageModel
from lightning_accel.models.moe import MoEClassifier
from lightning_accel.models.rnn import SequenceModel

__all__ = [
    "Classifier",
    "DeepBeliefNetwork",
    "MoEClassifier",
    "MoELanguageModel",
    "SequenceModel",
    "Stage",
]
