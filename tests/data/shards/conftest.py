import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest


def write_parquet(folder, table, sizes, group):
    """Write a table to files of ``sizes`` rows, in row groups of ``group``."""
    folder.mkdir(parents=True, exist_ok=True)
    start = 0
    for number, size in enumerate(sizes):
        pq.write_table(table.slice(start, size), folder / f"part-{number}.parquet", row_group_size=group)
        start += size
    return folder


def write_lines(folder, rows, sizes):
    folder.mkdir(parents=True, exist_ok=True)
    start = 0
    for number, size in enumerate(sizes):
        (folder / f"part-{number}.jsonl").write_text("\n".join(map(json.dumps, rows[start : start + size])))
        start += size
    return folder


@pytest.fixture
def numbered(tmp_path):
    """Three files of 211 rows with their numbers, in row groups of 7."""
    table = pa.table({"row": np.arange(211), "half": np.arange(211) / 2})
    return write_parquet(tmp_path / "rows", table, (100, 31, 80), group=7)
