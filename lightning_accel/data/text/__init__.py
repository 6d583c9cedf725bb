"""Text for language models.

``lines`` are read from files, ``tokens`` made of them, and ``datamodule`` cuts the tokens into windows of equal
length.
"""

from lightning_accel.data.text.datamodule import TextDataModule

__all__ = ["TextDataModule"]
