"""LightningDataModules; they know no model."""

from lightning_accel.data.digits import DigitsDataModule
from lightning_accel.data.tabular import TabularDataModule

__all__ = ["DigitsDataModule", "TabularDataModule"]
