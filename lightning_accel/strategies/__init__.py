"""Strategies for Lightning's Trainer that work with any LightningModule; importing them registers their short names."""

from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_accel._lazy import public_dir
from lightning_accel.ops.blocks import find_blocks
from lightning_accel.strategies.checkpoints.atomic import write_atomically
from lightning_accel.strategies.checkpoints.background import BackgroundCheckpointIO
from lightning_accel.strategies.checkpoints.io import AtomicCheckpointIO, AtomicModelParallelStrategy, newest_checkpoint
from lightning_accel.strategies.data_parallel import DataParallelStrategy
from lightning_accel.strategies.ddp import AccelDDPStrategy
from lightning_accel.strategies.pipeline.strategy import PipelineStrategy
from lightning_accel.strategies.sharding.expert_parallel import find_experts
from lightning_accel.strategies.sharding.strategy import FullyShardedStrategy
from lightning_accel.strategies.sync_batchnorm import (
    SyncBatchNormPlugin,
    convert_sync_batchnorm_,
    revert_sync_batchnorm_,
)

__all__ = [
    "AccelDDPStrategy",
    "AtomicCheckpointIO",
    "AtomicModelParallelStrategy",
    "BackgroundCheckpointIO",
    "DataParallelStrategy",
    "FullyShardedStrategy",
    "PipelineStrategy",
    "SyncBatchNormPlugin",
    "convert_sync_batchnorm_",
    "find_blocks",
    "find_experts",
    "newest_checkpoint",
    "revert_sync_batchnorm_",
    "write_atomically",
]

_SHORT_NAMES: list[tuple[str, type[Strategy], str, dict[str, Any]]] = [
    ("accel_ddp", AccelDDPStrategy, "DDP for parameters that go unused or are frozen", {}),
    ("accel_dp", DataParallelStrategy, "several devices in one process", {}),
    ("accel_expert_parallel", FullyShardedStrategy, "FSDP2, experts on all processes", {"expert_parallel_size": "all"}),
    ("accel_fsdp2", FullyShardedStrategy, "FSDP2 for any module", {}),
    ("accel_fsdp2_offload", FullyShardedStrategy, "FSDP2, parameters on the host", {"cpu_offload": True}),
    ("accel_model_parallel", AtomicModelParallelStrategy, "ModelParallelStrategy with atomic checkpoints", {}),
    ("accel_pipeline", PipelineStrategy, "layers split over processes in a pipeline", {}),
]
for name, strategy, description, options in _SHORT_NAMES:
    if name not in StrategyRegistry:
        StrategyRegistry.register(name, strategy, description, **options)
__dir__ = public_dir(__all__, globals())
