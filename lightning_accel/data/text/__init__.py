"""Text for language models.

``tokens`` reads texts and encodes them, ``datamodule`` splits the tokens into windows of equal length. ``lines``
reads files with one entry per line, for graphs and sequences, too, and ``sharded`` documents that are rows of files.
"""

from lightning_accel.data.text.datamodule import TextDataModule

__all__ = ["TextDataModule"]
