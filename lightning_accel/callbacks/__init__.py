"""Callbacks for any LightningModule."""

from lightning_accel._lazy import public_dir
from lightning_accel.callbacks.adapters import LowRankAdapters
from lightning_accel.callbacks.batching import Batching
from lightning_accel.callbacks.ddp_settings import DDPSettings
from lightning_accel.callbacks.deployment.export import Export
from lightning_accel.callbacks.deployment.quantization import Quantization
from lightning_accel.callbacks.deployment.report import CompressionReport
from lightning_accel.callbacks.distillation.callback import Distillation
from lightning_accel.callbacks.early_stopping import EarlyStopping as EarlyStopping  # the earlier name
from lightning_accel.callbacks.early_stopping import RestoringEarlyStopping
from lightning_accel.callbacks.expert_losses import ExpertLosses
from lightning_accel.callbacks.memory_savings import MemorySavings
from lightning_accel.callbacks.monitors.expert_load import ExpertLoadMonitor
from lightning_accel.callbacks.monitors.rbm import RBMMonitor
from lightning_accel.callbacks.monitors.run_report import RunReport
from lightning_accel.callbacks.prediction_writer import PredictionWriter
from lightning_accel.callbacks.pruning.callback import Pruning
from lightning_accel.callbacks.pruning.one_shot import OneShotPruning
from lightning_accel.callbacks.pruning.semi_structured import SemiStructuredSparsity
from lightning_accel.callbacks.resume.exact_resume import ExactResume
from lightning_accel.callbacks.resume.sampler_check import SamplerCheck
from lightning_accel.callbacks.resume.save_on_signal import SaveOnSignal
from lightning_accel.callbacks.speedups import Speedups
from lightning_accel.callbacks.watchdog.callback import StallMonitor as StallMonitor  # the earlier name
from lightning_accel.callbacks.watchdog.callback import Watchdog
from lightning_accel.callbacks.weighted_accumulation import WeightedAccumulation

__all__ = [
    "Batching",
    "CompressionReport",
    "DDPSettings",
    "Distillation",
    "ExactResume",
    "ExpertLoadMonitor",
    "ExpertLosses",
    "Export",
    "LowRankAdapters",
    "MemorySavings",
    "OneShotPruning",
    "PredictionWriter",
    "Pruning",
    "Quantization",
    "RBMMonitor",
    "RestoringEarlyStopping",
    "RunReport",
    "SamplerCheck",
    "SaveOnSignal",
    "SemiStructuredSparsity",
    "Speedups",
    "Watchdog",
    "WeightedAccumulation",
]
__dir__ = public_dir(__all__, globals())
