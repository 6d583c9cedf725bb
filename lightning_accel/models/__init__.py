"""LightningModules: layers with a loss, metrics, an optimizer and logging; estimators for scikit-learn."""

from typing import TYPE_CHECKING

from lightning_accel._lazy import lazy_getattr, public_dir
from lightning_accel.models.classifier import Classifier
from lightning_accel.models.dbn import DeepBeliefNetwork
from lightning_accel.models.dbn_fine_tuning import FineTuning
from lightning_accel.models.dbn_stages import Stage
from lightning_accel.models.experts import Experts
from lightning_accel.models.language_model import Attention, Generation, MoELanguageModel
from lightning_accel.models.moe import MoEClassifier, MoERegressor
from lightning_accel.models.rnn import RecurrentLayers, SequenceModel

if TYPE_CHECKING:
    from lightning_accel.models.estimators import DBNClassifier as DBNClassifier
    from lightning_accel.models.estimators import RBMTransformer as RBMTransformer
    from lightning_accel.models.graph_layers import ConvolutionLayers as ConvolutionLayers
    from lightning_accel.models.graph_marking import Marking as Marking
    from lightning_accel.models.graph_marking import choose_marking as choose_marking
    from lightning_accel.models.graph_marking import compare_markings as compare_markings
    from lightning_accel.models.relational import RelationalGNN as RelationalGNN

__all__ = [
    "Attention",
    "Classifier",
    "ConvolutionLayers",
    "DBNClassifier",
    "DeepBeliefNetwork",
    "Experts",
    "FineTuning",
    "Generation",
    "Marking",
    "MoEClassifier",
    "MoELanguageModel",
    "MoERegressor",
    "RBMTransformer",
    "RecurrentLayers",
    "RelationalGNN",
    "SequenceModel",
    "Stage",
    "choose_marking",
    "compare_markings",
]

# Importing torch_geometric takes seconds, and scikit-learn is an extra
__getattr__ = lazy_getattr(
    __name__,
    {
        "ConvolutionLayers": "lightning_accel.models.graph_layers",
        "DBNClassifier": "lightning_accel.models.estimators",
        "Marking": "lightning_accel.models.graph_marking",
        "RBMTransformer": "lightning_accel.models.estimators",
        "RelationalGNN": "lightning_accel.models.relational",
        "choose_marking": "lightning_accel.models.graph_marking",
        "compare_markings": "lightning_accel.models.graph_marking",
    },
)
__dir__ = public_dir(__all__, globals())
