"""Options of datamodules that read shards."""

from dataclasses import dataclass
from pathlib import Path

from lightning_accel.ops.bounds import local_path, require_integers

SHUFFLE_BYTES = 1 << 30
CACHE = Path("~/.cache/lightning_accel/shards")


@dataclass(frozen=True)
class ShardOptions:
    """Hold how a folder or URL of files is read that is larger than memory.

    Args:
        shuffle_bytes: bytes of blocks (row groups, record batches, 4 MiB of lines) in memory at a time, over all
            processes: up to 192 that are mixed, and the next ones.
        cache_dir: folder where the list of the blocks and the statistics of the rows are kept until a file changes.

    Raises:
        TypeError: if one is of another kind.
        ValueError: if ``shuffle_bytes`` is below 1, or ``cache_dir`` is no path.

    Example:
        >>> from lightning_accel import TabularDataModule
        >>> shards = ShardOptions(shuffle_bytes=2**28)
        >>> data = TabularDataModule("s3://bucket/flowers", "species", shards=shards)  # doctest: +SKIP
    """

    shuffle_bytes: int = SHUFFLE_BYTES
    cache_dir: str | Path = CACHE

    def __post_init__(self) -> None:
        require_integers(1, shuffle_bytes=self.shuffle_bytes)
        local_path(self.cache_dir, "cache_dir")
