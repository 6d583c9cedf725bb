"""Layers, models, data, callbacks and strategies for PyTorch Lightning, for faster, larger and compressed models.

Importing the package imports nothing else, not even torch; each public name is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_accel.callbacks import CompressionReport as CompressionReport
    from lightning_accel.callbacks import Distillation as Distillation
    from lightning_accel.callbacks import EarlyStopping as EarlyStopping
    from lightning_accel.callbacks import ExactResume as ExactResume
    from lightning_accel.callbacks import ExpertLoadMonitor as ExpertLoadMonitor
    from lightning_accel.callbacks import Export as Export
    from lightning_accel.callbacks import PredictionWriter as PredictionWriter
    from lightning_accel.callbacks import Pruning as Pruning
    from lightning_accel.callbacks import Quantization as Quantization
    from lightning_accel.callbacks import RBMMonitor as RBMMonitor
    from lightning_accel.callbacks import SamplerCheck as SamplerCheck
    from lightning_accel.callbacks import SaveOnSignal as SaveOnSignal
    from lightning_accel.callbacks import StallMonitor as StallMonitor
    from lightning_accel.callbacks import WeightedAccumulation as WeightedAccumulation
    from lightning_accel.compress import load_compressed as load_compressed
    from lightning_accel.compress import load_pruned as load_pruned
    from lightning_accel.data import BarsAndStripesDataModule as BarsAndStripesDataModule
    from lightning_accel.data import DigitsDataModule as DigitsDataModule
    from lightning_accel.data import IdxDataModule as IdxDataModule
    from lightning_accel.data import LengthBatchSampler as LengthBatchSampler
    from lightning_accel.data import SequenceBatch as SequenceBatch
    from lightning_accel.data import SequenceDataModule as SequenceDataModule
    from lightning_accel.data import TabularDataModule as TabularDataModule
    from lightning_accel.data import TextDataModule as TextDataModule
    from lightning_accel.data import length_batch_loader as length_batch_loader
    from lightning_accel.data import read_idx as read_idx
    from lightning_accel.data.graphs import GraphDataModule as GraphDataModule
    from lightning_accel.data.relational_transform import AddRelationalTriples as AddRelationalTriples
    from lightning_accel.models import Classifier as Classifier
    from lightning_accel.models import DeepBeliefNetwork as DeepBeliefNetwork
    from lightning_accel.models import MoEClassifier as MoEClassifier
    from lightning_accel.models import MoELanguageModel as MoELanguageModel
    from lightning_accel.models import SequenceModel as SequenceModel
    from lightning_accel.models import Stage as Stage
    from lightning_accel.models.estimators import DBNClassifier as DBNClassifier
    from lightning_accel.models.estimators import RBMTransformer as RBMTransformer
    from lightning_accel.models.relational import RelationalGNN as RelationalGNN
    from lightning_accel.models.triple_figure import draw_triples as draw_triples
    from lightning_accel.nn import RBM as RBM
    from lightning_accel.nn import ContrastiveDivergence as ContrastiveDivergence
    from lightning_accel.nn import DynamicRNN as DynamicRNN
    from lightning_accel.nn import ExpertChoiceGate as ExpertChoiceGate
    from lightning_accel.nn import ExpertLoad as ExpertLoad
    from lightning_accel.nn import FeedForward as FeedForward
    from lightning_accel.nn import MixtureOfExperts as MixtureOfExperts
    from lightning_accel.nn import RBMStack as RBMStack
    from lightning_accel.nn import TopKGate as TopKGate
    from lightning_accel.nn import TreeRNN as TreeRNN
    from lightning_accel.nn import UpDown as UpDown
    from lightning_accel.nn.invariance import assert_permutation_invariant as assert_permutation_invariant
    from lightning_accel.nn.relational import RelationalOrder3Pooling as RelationalOrder3Pooling
    from lightning_accel.nn.relational import RO3Conv as RO3Conv
    from lightning_accel.nn.relational import RO3Pooling as RO3Pooling
    from lightning_accel.nn.relational_attribution import attribute_triples as attribute_triples
    from lightning_accel.nn.relational_pooling import RelationalPooling as RelationalPooling
    from lightning_accel.precision import AmpPrecision as AmpPrecision
    from lightning_accel.precision import Bfloat16Precision as Bfloat16Precision
    from lightning_accel.precision import Float8Precision as Float8Precision
    from lightning_accel.strategies import AccelDDPStrategy as AccelDDPStrategy
    from lightning_accel.strategies import AtomicCheckpointIO as AtomicCheckpointIO
    from lightning_accel.strategies import AtomicModelParallelStrategy as AtomicModelParallelStrategy
    from lightning_accel.strategies import DataParallelStrategy as DataParallelStrategy
    from lightning_accel.strategies import FSDP1Strategy as FSDP1Strategy
    from lightning_accel.strategies import FullyShardedStrategy as FullyShardedStrategy
    from lightning_accel.strategies import PipelineStrategy as PipelineStrategy
    from lightning_accel.strategies import SyncBatchNormPlugin as SyncBatchNormPlugin

__version__ = "0.1.0"

# The value is a module instead of a package where the package would import scikit-learn or torch_geometric, which takes
# seconds.
_PACKAGE_OF = {
    "AccelDDPStrategy": "strategies",
    "AddRelationalTriples": "data.relational_transform",
    "AmpPrecision": "precision",
    "AtomicCheckpointIO": "strategies",
    "AtomicModelParallelStrategy": "strategies",
    "BarsAndStripesDataModule": "data",
    "Bfloat16Precision": "precision",
    "Classifier": "models",
    "CompressionReport": "callbacks",
    "ContrastiveDivergence": "nn",
    "DBNClassifier": "models.estimators",
    "DataParallelStrategy": "strategies",
    "DeepBeliefNetwork": "models",
    "DigitsDataModule": "data",
    "Distillation": "callbacks",
    "DynamicRNN": "nn",
    "EarlyStopping": "callbacks",
    "ExactResume": "callbacks",
    "ExpertChoiceGate": "nn",
    "ExpertLoad": "nn",
    "ExpertLoadMonitor": "callbacks",
    "Export": "callbacks",
    "FSDP1Strategy": "strategies",
    "FeedForward": "nn",
    "Float8Precision": "precision",
    "FullyShardedStrategy": "strategies",
    "GraphDataModule": "data.graphs",
    "IdxDataModule": "data",
    "LengthBatchSampler": "data",
    "MixtureOfExperts": "nn",
    "MoEClassifier": "models",
    "MoELanguageModel": "models",
    "PipelineStrategy": "strategies",
    "PredictionWriter": "callbacks",
    "Pruning": "callbacks",
    "Quantization": "callbacks",
    "RBM": "nn",
    "RBMMonitor": "callbacks",
    "RBMStack": "nn",
    "RBMTransformer": "models.estimators",
    "RO3Conv": "nn.relational",
    "RO3Pooling": "nn.relational",
    "RelationalGNN": "models.relational",
    "RelationalOrder3Pooling": "nn.relational",
    "RelationalPooling": "nn.relational_pooling",
    "SamplerCheck": "callbacks",
    "SaveOnSignal": "callbacks",
    "SequenceBatch": "data",
    "SequenceDataModule": "data",
    "SequenceModel": "models",
    "Stage": "models",
    "StallMonitor": "callbacks",
    "SyncBatchNormPlugin": "strategies",
    "TabularDataModule": "data",
    "TextDataModule": "data",
    "TopKGate": "nn",
    "TreeRNN": "nn",
    "UpDown": "nn",
    "WeightedAccumulation": "callbacks",
    "assert_permutation_invariant": "nn.invariance",
    "attribute_triples": "nn.relational_attribution",
    "draw_triples": "models.triple_figure",
    "length_batch_loader": "data",
    "load_compressed": "compress",
    "load_pruned": "compress",
    "read_idx": "data",
}

__all__ = [
    "RBM",
    "AccelDDPStrategy",
    "AddRelationalTriples",
    "AmpPrecision",
    "AtomicCheckpointIO",
    "AtomicModelParallelStrategy",
    "BarsAndStripesDataModule",
    "Bfloat16Precision",
    "Classifier",
    "CompressionReport",
    "ContrastiveDivergence",
    "DBNClassifier",
    "DataParallelStrategy",
    "DeepBeliefNetwork",
    "DigitsDataModule",
    "Distillation",
    "DynamicRNN",
    "EarlyStopping",
    "ExactResume",
    "ExpertChoiceGate",
    "ExpertLoad",
    "ExpertLoadMonitor",
    "Export",
    "FSDP1Strategy",
    "FeedForward",
    "Float8Precision",
    "FullyShardedStrategy",
    "GraphDataModule",
    "IdxDataModule",
    "LengthBatchSampler",
    "MixtureOfExperts",
    "MoEClassifier",
    "MoELanguageModel",
    "PipelineStrategy",
    "PredictionWriter",
    "Pruning",
    "Quantization",
    "RBMMonitor",
    "RBMStack",
    "RBMTransformer",
    "RO3Conv",
    "RO3Pooling",
    "RelationalGNN",
    "RelationalOrder3Pooling",
    "RelationalPooling",
    "SamplerCheck",
    "SaveOnSignal",
    "SequenceBatch",
    "SequenceDataModule",
    "SequenceModel",
    "Stage",
    "StallMonitor",
    "SyncBatchNormPlugin",
    "TabularDataModule",
    "TextDataModule",
    "TopKGate",
    "TreeRNN",
    "UpDown",
    "WeightedAccumulation",
    "__version__",
    "assert_permutation_invariant",
    "attribute_triples",
    "draw_triples",
    "length_batch_loader",
    "load_compressed",
    "load_pruned",
    "read_idx",
]


def __getattr__(name: str) -> object:
    if name not in _PACKAGE_OF:
        from difflib import get_close_matches

        nearest = "".join(f". Did you mean {one}?" for one in get_close_matches(name, _PACKAGE_OF, n=1))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{nearest}")
    return getattr(import_module(f"{__name__}.{_PACKAGE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PACKAGE_OF})
