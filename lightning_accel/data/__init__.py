"""LightningDataModules for images, tables, text and sequences; they depend on no model."""

from lightning_accel.data.pictures.bars import BarsAndStripesDataModule
from lightning_accel.data.pictures.digits import DigitsDataModule
from lightning_accel.data.pictures.idx import IdxDataModule, read_idx
from lightning_accel.data.sequences.batch import SequenceBatch
from lightning_accel.data.sequences.datamodule import SequenceDataModule
from lightning_accel.data.sequences.length_sampler import LengthBatchSampler, length_batch_loader
from lightning_accel.data.tables.datamodule import TabularDataModule
from lightning_accel.data.text.datamodule import TextDataModule

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
