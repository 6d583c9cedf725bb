"""LightningDataModules for images, tables, text, sequences and graphs; they depend on no model."""

from typing import TYPE_CHECKING

from lightning_accel._lazy import lazy_getattr, public_dir
from lightning_accel.data.pictures.bars import BarsAndStripesDataModule
from lightning_accel.data.pictures.digits import DigitsDataModule
from lightning_accel.data.pictures.idx import IdxDataModule, read_idx
from lightning_accel.data.sequences.batch import SequenceBatch
from lightning_accel.data.sequences.datamodule import SequenceDataModule
from lightning_accel.data.sequences.files import SequenceLayout
from lightning_accel.data.sequences.length_sampler import LengthBatchSampler, length_batch_loader
from lightning_accel.data.sequences.splits import GeneratedSequences
from lightning_accel.data.shards.loader import shard_loader
from lightning_accel.data.shards.options import ShardOptions
from lightning_accel.data.shards.random_access import ShardDataset
from lightning_accel.data.tables.datamodule import CSVFormat, TabularDataModule
from lightning_accel.data.text.datamodule import TextDataModule

if TYPE_CHECKING:
    from lightning_accel.data.graphs.datamodule import GraphDataModule as GraphDataModule
    from lightning_accel.data.graphs.options import GeneratedGraphs as GeneratedGraphs
    from lightning_accel.data.graphs.options import GraphBatches as GraphBatches
    from lightning_accel.data.graphs.options import GraphLayout as GraphLayout
    from lightning_accel.data.graphs.options import GraphSplitOptions as GraphSplitOptions
    from lightning_accel.data.graphs.transform import AddRelationalTriples as AddRelationalTriples

__all__ = [
    "AddRelationalTriples",
    "BarsAndStripesDataModule",
    "CSVFormat",
    "DigitsDataModule",
    "GeneratedGraphs",
    "GeneratedSequences",
    "GraphBatches",
    "GraphDataModule",
    "GraphLayout",
    "GraphSplitOptions",
    "IdxDataModule",
    "LengthBatchSampler",
    "SequenceBatch",
    "SequenceDataModule",
    "SequenceLayout",
    "ShardDataset",
    "ShardOptions",
    "TabularDataModule",
    "TextDataModule",
    "length_batch_loader",
    "read_idx",
    "shard_loader",
]

# Importing torch_geometric takes seconds
__getattr__ = lazy_getattr(
    __name__,
    {
        "AddRelationalTriples": "lightning_accel.data.graphs.transform",
        **dict.fromkeys(
            ("GeneratedGraphs", "GraphBatches", "GraphLayout", "GraphSplitOptions"),
            "lightning_accel.data.graphs.options",
        ),
        "GraphDataModule": "lightning_accel.data.graphs.datamodule",
    },
)
__dir__ = public_dir(__all__, globals())
