"""Splits of blocks for training, validation and test."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from lightning_accel.data.shards.blocks import Blocks

Split = Literal["train", "val", "test"]
_SPLITS: tuple[Split, ...] = ("train", "val", "test")


def split_blocks(
    blocks: Blocks, shares: tuple[float, float], seed: int, location: str | Path
) -> dict[Split, np.ndarray]:
    """Return the numbers of the blocks that train, validate and test.

    Files whose path or name has the word ``train``, ``val`` (or ``valid``, ``validation``, ``dev``) or ``test`` are for
    what they say. Otherwise, and where validation or test have none, whole blocks are taken of those that train,
    ``shares`` of them, evenly spread over the order of the files, so that each part of sorted files is among them.

    Raises:
        ValueError: if only some files say what they are for, or blocks are too few.
    """
    said = blocks.files.splits()
    of_block = np.array([said[file] or "train" for file in blocks.file_of])
    found = {split: np.flatnonzero(of_block == split) for split in _SPLITS}
    rest = found["train"]
    held_out: dict[Split, float] = {"test": shares[1], "val": shares[0] / (1 - shares[1])}
    for place, (split, share) in enumerate(held_out.items()):
        if len(found[split]):
            continue
        if len(rest) * share < 1:
            raise ValueError(
                f"{location} has {len(rest)} blocks (row groups, record batches, 4 MiB of lines) that train, of which "
                f"{share:.3g} for {split} is less than one. Put the files in folders train, val and test, or write "
                "smaller blocks (row_group_size of pyarrow)"
            )
        generator = np.random.default_rng([seed, place])
        strata = np.array_split(rest, round(len(rest) * share))
        found[split] = np.array([generator.choice(stratum) for stratum in strata])
        rest = np.setdiff1d(rest, found[split])
    return found | {"train": rest}
