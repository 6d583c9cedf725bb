"""Strategies for Lightning's Trainer that work with any LightningModule; importing them registers their short names."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_accel.strategies.checkpoints.atomic import write_atomically
from lightning_accel.strategies.checkpoints.io import AtomicCheckpointIO, AtomicModelParallelStrategy
from lightning_accel.strategies.data_parallel import DataParallelStrategy
from lightning_accel.strategies.ddp import AccelDDPStrategy
from lightning_accel.strategies.pipeline.strategy import PipelineStrategy
from lightning_accel.strategies.sharding.blocks import find_blocks
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
    "DataParallelStrategy",
    "FullyShardedStrategy",
    "PipelineStrategy",
    "SyncBatchNormPlugin",
    "convert_sync_batchnorm_",
    "find_blocks",
    "find_experts",
    "revert_sync_batchnorm_",
    "write_atomically",
]

for strategy in (
    AccelDDPStrategy,
    AtomicModelParallelStrategy,
    DataParallelStrategy,
    FullyShardedStrategy,
    PipelineStrategy,
):
    strategy.register_strategies(StrategyRegistry)
