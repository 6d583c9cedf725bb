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
    from lightning_accel.callbacks import RestoringEarlyStopping as RestoringEarlyStopping
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
    from lightning_accel.data.graphs.datamodule import GraphDataModule as GraphDataModule
    from lightning_accel.data.graphs.transform import AddRelationalTriples as AddRelationalTriples
    from lightning_accel.models import Classifier as Classifier
    from lightning_accel.models import DeepBeliefNetwork as DeepBeliefNetwork
    from lightning_accel.models import MoEClassifier as MoEClassifier
    from lightning_accel.models import MoELanguageModel as MoELanguageModel
    from lightning_accel.models import SequenceModel as SequenceModel
    from lightning_accel.models import Stage as Stage
    from lightning_accel.models.relational import RelationalGNN as RelationalGNN
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
    from lightning_accel.nn.relational.invariance import assert_permutation_invariant as assert_permutation_invariant
    from lightning_accel.nn.relational.layers import RelationalOrder3Pooling as RelationalOrder3Pooling
    from lightning_accel.nn.relational.layers import RO3Conv as RO3Conv
    from lightning_accel.nn.relational.layers import RO3Pooling as RO3Pooling
    from lightning_accel.nn.relational.pooling import RelationalPooling as RelationalPooling
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

# By module; a package where importing all of it does not import scikit-learn or torch_geometric, which takes seconds.
_NAMES = {
    "callbacks": (
        "CompressionReport Distillation EarlyStopping ExactResume ExpertLoadMonitor Export PredictionWriter "
        "Pruning Quantization RBMMonitor RestoringEarlyStopping SamplerCheck SaveOnSignal StallMonitor "
        "WeightedAccumulation"
    ),
    "compress": "load_compressed load_pruned",
    "data": (
        "BarsAndStripesDataModule DigitsDataModule IdxDataModule LengthBatchSampler SequenceBatch "
        "SequenceDataModule TabularDataModule TextDataModule length_batch_loader read_idx"
    ),
    "data.graphs": "GraphDataModule",
    "data.graphs.transform": "AddRelationalTriples",
    "models": "Classifier DeepBeliefNetwork MoEClassifier MoELanguageModel SequenceModel Stage",
    "models.relational": "RelationalGNN",
    "nn": (
        "ContrastiveDivergence DynamicRNN ExpertChoiceGate ExpertLoad FeedForward MixtureOfExperts RBM RBMStack "
        "TopKGate TreeRNN UpDown"
    ),
    "nn.relational.invariance": "assert_permutation_invariant",
    "nn.relational": "RO3Conv RO3Pooling RelationalOrder3Pooling",
    "nn.relational.pooling": "RelationalPooling",
    "precision": "AmpPrecision Bfloat16Precision Float8Precision",
    "strategies": (
        "AccelDDPStrategy AtomicCheckpointIO AtomicModelParallelStrategy DataParallelStrategy FSDP1Strategy "
        "FullyShardedStrategy PipelineStrategy SyncBatchNormPlugin"
    ),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:  # type checkers read the imports above
    __all__ = sorted([*_MODULE_OF, "__version__"])


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        from difflib import get_close_matches

        nearest = "".join(f". Did you mean {one}?" for one in get_close_matches(name, _MODULE_OF, n=1))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{nearest}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
