"""Loaders of shards. Shapes: B rows of a batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import numpy as np
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.utilities import rank_zero_warn

from lightning_accel.data.digest import digest_of
from lightning_accel.data.in_memory import identity_collate
from lightning_accel.data.samplers import ResumableLoader, progress_of, replicas_and_rank
from lightning_accel.data.shards.blocks import Blocks, find_blocks
from lightning_accel.data.shards.options import CACHE, SHUFFLE_BYTES, ShardOptions
from lightning_accel.data.shards.reader import ReadOptions, ShardBatches
from lightning_accel.data.shards.sampler import ShardSampler
from lightning_accel.data.shards.splits import Split
from lightning_accel.data.shards.streams import choose_streams
from lightning_accel.ops.bounds import local_path, require_integers
from lightning_accel.ops.names import list_of_names

if TYPE_CHECKING:
    import pyarrow as pa


class ShardLoader(ResumableLoader):
    """Load batches of :class:`ShardBatches`, whose threads end with an iteration, wherever it ends."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        try:
            yield from super().__iter__()
        finally:
            if isinstance(self.dataset, ShardBatches):
                self.dataset.close()


def shard_loader(
    location: str | Path,
    batch_size: int,
    collate_fn: Callable[[pa.Table], Any],
    *,
    columns: Sequence[str] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    shuffle_bytes: int = SHUFFLE_BYTES,
    cache_dir: str | Path = CACHE,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> ShardLoader:
    """Make a loader of files that are larger than memory, for the Trainer on any number of processes, or your own loop.

    Files are Parquet (``.parquet``), JSON lines (``.jsonl``, ``.ndjson``) or, on a local disk, Arrow (``.arrow``,
    ``.feather``). Threads read them block by block (row group, record batch, 4 MiB of lines) ahead of training, and
    mix up to 192 blocks at a time; each epoch takes the blocks, and the rows of each, in another order, which depends
    on ``seed`` and the epoch alone. Every row is taken by one process, once, but for those that do not fill a batch on
    every process, and a run resumed in mid-epoch continues with the next row. If it has another number of processes, or
    another ``batch_size``, it needs the :class:`~lightning_accel.ExactResume` callback, which counts the
    Trainer's batches anew. A loop of your own calls ``loader.sampler.set_epoch(epoch)`` before each epoch, as the
    Trainer does, and may keep ``loader.state_dict()``.

        def collate(table):
            columns = [table[name].to_numpy() for name in ("length", "width")]
            return torch.from_numpy(np.stack(columns, axis=1)).float(), torch.tensor(table["label"].to_numpy())

        trainer.fit(model, shard_loader("s3://bucket/flowers/train", 64, collate))

    Args:
        location: folder, pattern such as ``data/part-*.parquet``, or URL of one that fsspec opens, such as ``s3://``,
            ``gs://`` or ``hf://``.
        batch_size: B, rows per process and step.
        collate_fn: makes a batch of a table of B rows; threads call it, for about ten batches ahead, so that random
            numbers must be its own.
        columns: columns to read; by default all but those that pandas wrote as an index.
        shuffle: whether the rows are shuffled and the last ones dropped, as in training; else each is taken, in the
            order of the files.
        seed: seed of the order of the rows.
        shuffle_bytes: bytes of blocks in memory at a time, over all processes: those that are mixed, and the next
            ones.
        cache_dir: folder where the list of the blocks is kept, so that it is made once.
        num_workers: processes that read in place of this one's threads, for a ``collate_fn`` that holds the interpreter
            lock; each reads, and holds in memory, the blocks of all.
        pin_memory: whether to pin memory, for copies to a GPU.

    Raises:
        FileNotFoundError: if there is no such file.
        ImportError: if the package of the URL's protocol is not installed.
        ValueError: if a number is out of range, or files cannot be read, are of several kinds, lack a column or have
            fewer rows than a batch.
    """
    require_integers(1, batch_size=batch_size, shuffle_bytes=shuffle_bytes)
    require_integers(0, seed=seed, num_workers=num_workers)
    blocks = find_blocks(location, local_path(cache_dir, "cache_dir"))
    names = blocks.schema.names if columns is None else list_of_names(columns)
    blocks.require_columns(names)
    options = ReadOptions(names, collate_fn)
    sampler_options = {"seed": seed} if shuffle else {"shuffle": False}
    return loader_of_blocks(blocks, options, batch_size, shuffle_bytes, sampler_options, num_workers, pin_memory)


_FEW = 8  # blocks at a time that hardly mix sorted rows


def loader_of_blocks(
    blocks: Blocks,
    options: ReadOptions,
    batch_size: int,
    shuffle_bytes: int,
    sampler_options: dict[str, Any],
    num_workers: int = 0,
    pin_memory: bool = False,
) -> ShardLoader:
    """Return a loader of the batches of a sampler with ``sampler_options``, see :class:`ShardSampler`.

    Raises:
        ValueError: if the rows do not fill a batch.
    """
    shuffle = sampler_options.get("shuffle", True)
    sampler = ShardSampler(blocks.num_rows, batch_size, "", **sampler_options)
    nbytes = np.maximum(blocks.nbytes, blocks.rows * options.row_bytes)
    streams = choose_streams(blocks.rows, nbytes, shuffle_bytes) if shuffle else None
    # the last condition: memory limits them, not the number of blocks
    if streams is not None and streams < min(_FEW, len(blocks)) and streams * 2 * nbytes.max() > shuffle_bytes // 2:
        warnings.warn(
            f"rows of {blocks.files.root} are mixed among {streams} blocks at a time, since these have up to "
            f"{nbytes.max() / 1e6:.0f} MB, and shuffle_bytes is {shuffle_bytes}. If its files are sorted, so are "
            "batches: write smaller blocks (row_group_size of pyarrow), or raise shuffle_bytes",
            stacklevel=3,
        )
    sorted_in = [options.sorted_rows, sampler.position.size] if options.sorted_rows else []
    sampler.digest = digest_of([blocks.digest()], [str(one) for one in (streams, *sorted_in)])
    sampler.require_steps()
    rows = ShardBatches(blocks, options, streams, sampler.seed if shuffle else None, sampler.exact)
    return ShardLoader(
        rows,
        batch_size=None,
        sampler=sampler,
        collate_fn=identity_collate,
        num_workers=num_workers,
        pin_memory=pin_memory,
        persistent_workers=num_workers > 0,
        # clients of object stores do not survive a fork
        multiprocessing_context="spawn" if num_workers and not blocks.files.is_local else None,
    )


def datamodule_loader(
    datamodule: L.LightningDataModule,
    blocks: Blocks,
    reading: ReadOptions,
    batch_size: int,
    num_workers: int,
    shards: ShardOptions,
    seed: int,
    split: Split | Literal["predict"],
) -> ShardLoader:
    """Return the loader of a datamodule for a split of its blocks, for the processes of its Trainer.

    Only rows that train are shuffled; rows to predict are taken once, and others as often as Lightning takes them.

    Raises:
        ValueError: if the rows do not fill a batch.
    """
    options: dict[str, Any] = dict(zip(("num_replicas", "rank"), replicas_and_rank(datamodule), strict=True))
    options |= {"seed": seed} if split == "train" else {"shuffle": False, "exact": split == "predict"}
    on_cuda = datamodule.trainer is not None and isinstance(datamodule.trainer.accelerator, CUDAAccelerator)
    loader = loader_of_blocks(blocks, reading, batch_size, shards.shuffle_bytes, options, num_workers, on_cuda)
    warnings.filterwarnings("ignore", message=".*does not have many workers", category=UserWarning)  # threads read
    # a writer of predictions needs none, since rows come in the order of the files
    warnings.filterwarnings("ignore", message="Couldn't infer the batch indices.*ShardLoader", category=UserWarning)
    num_processes, repeated = options["num_replicas"], -blocks.num_rows % options["num_replicas"]
    if split == "test" and repeated:
        rank_zero_warn(
            f"{repeated} of {blocks.num_rows} rows are taken twice, so that each of {num_processes} processes has as "
            "many, and the metrics of the test deviate by that; test with --trainer.devices 1 for exact ones"
        )
    if split == "train" and datamodule.trainer is not None:
        loader.progress = progress_of(datamodule.trainer)
    return loader
