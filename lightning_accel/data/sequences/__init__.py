"""Sequences of unequal lengths.

``datamodule`` divides ``files`` or generated sequences by ``splits`` into ``dataset``s, and draws batches of similar
length by ``length_sampler``; ``leakage`` warns of copies and of values that give the target away. A ``batch`` holds
padded values, lengths and targets. ``sharded`` reads folders that are larger than memory, whose ``columns`` hold a
sequence in each row.
"""

from lightning_accel.data.sequences.datamodule import SequenceDataModule

__all__ = ["SequenceDataModule"]
