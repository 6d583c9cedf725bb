"""LightningDataModules for images, tables, text and sequences; they depend on no model."""

from lightning_accel.data.bars import BarsAndStripesDataModule
from lightning_accel.data.digits import DigitsDataModule
from lightning_accel.data.idx import IdxDataModule, read_idx
from lightning_accel.data.length_sampler import LengthBatchSampler, length_batch_loader
from lightning_accel.data.sequence_batch import SequenceBatch
from lightning_accel.data.sequences import SequenceDataModule
from lightning_accel.data.tabular import TabularDataModule
from lightning_accel.data.text import TextDataModule

__all__ = [
    "BarsAndStripesDataModule",
    "DigitsDataModule",
    "IdxDataModule",
    "LengthBatchSampler",
    "SequenceBatch",
    "SequenceDataModule",
    "TabularDataModule",
    "TextDataModule",
    "length_batch_loader",
    "read_idx",
]
