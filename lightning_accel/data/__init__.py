"""LightningDataModules; they know no model."""

from lightning_accel.data.digits import DigitsDataModule
from lightning_accel.data.tabular import TabularDataModule
from lightning_accel.data.text import TextDataModule

__all__ = ["DigitsDataModule", "TabularDataModule", "TextDataModule"]
