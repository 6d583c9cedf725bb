"""Callbacks for any LightningModule."""

from lightning_accel.callbacks.compression_report import CompressionReport
from lightning_accel.callbacks.distillation import Distillation
from lightning_accel.callbacks.early_stopping import EarlyStopping, RestoringEarlyStopping
from lightning_accel.callbacks.exact_resume import ExactResume
from lightning_accel.callbacks.expert_load_monitor import ExpertLoadMonitor
from lightning_accel.callbacks.export import Export
from lightning_accel.callbacks.prediction_writer import PredictionWriter
from lightning_accel.callbacks.pruning import Pruning
from lightning_accel.callbacks.quantization import Quantization
from lightning_accel.callbacks.rbm_monitor import RBMMonitor
from lightning_accel.callbacks.sampler_check import SamplerCheck
from lightning_accel.callbacks.save_on_signal import SaveOnSignal
from lightning_accel.callbacks.stall_monitor import StallMonitor
from lightning_accel.callbacks.weighted_accumulation import WeightedAccumulation

__all__ = [
    "CompressionReport",
    "Distillation",
    "EarlyStopping",
    "ExactResume",
    "ExpertLoadMonitor",
    "Export",
    "PredictionWriter",
    "Pruning",
    "Quantization",
    "RBMMonitor",
    "RestoringEarlyStopping",
    "SamplerCheck",
    "SaveOnSignal",
    "StallMonitor",
    "WeightedAccumulation",
]
