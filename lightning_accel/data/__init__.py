"""LightningDataModules; they know no model."""

from lightning_accel.data.bars import BarsAndStripesDataModule
from lightning_accel.data.digits import DigitsDataModule
from lightning_accel.data.graph_families import (
    cfi_pair,
    circular_skip_link,
    random_regular_graph,
    rook_graph,
    shrikhande_graph,
)
from lightning_accel.data.graph_sampler import GraphBudgetBatchSampler
from lightning_accel.data.graphs import GraphDataModule
from lightning_accel.data.idx import IdxDataModule
from lightning_accel.data.idx_files import read_idx
from lightning_accel.data.length_loader import length_batch_loader
from lightning_accel.data.length_sampler import LengthBatchSampler
from lightning_accel.data.relational_transform import AddRelationalTriples
from lightning_accel.data.sequence_batch import SequenceBatch
from lightning_accel.data.sequences import SequenceDataModule
from lightning_accel.data.substructures import count_substructures
from lightning_accel.data.tabular import TabularDataModule
from lightning_accel.data.text import TextDataModule

__all__ = [
    "AddRelationalTriples",
    "BarsAndStripesDataModule",
    "DigitsDataModule",
    "GraphBudgetBatchSampler",
    "GraphDataModule",
    "IdxDataModule",
    "LengthBatchSampler",
    "SequenceBatch",
    "SequenceDataModule",
    "TabularDataModule",
    "TextDataModule",
    "cfi_pair",
    "circular_skip_link",
    "count_substructures",
    "length_batch_loader",
    "random_regular_graph",
    "read_idx",
    "rook_graph",
    "shrikhande_graph",
]
