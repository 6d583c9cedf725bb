"""A real object store's protocol: moto's server of S3, where it is installed (pip install "moto[server]" s3fs)."""

import socket
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lightning_accel.data import ShardOptions, TabularDataModule, shard_loader


@pytest.fixture
def bucket(monkeypatch):
    pytest.importorskip("moto")
    s3fs = pytest.importorskip("s3fs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
        ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}"),
    ):
        monkeypatch.setenv(name, value)
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stderr=subprocess.DEVNULL)
    try:
        for _ in range(120):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.5)
        store = s3fs.S3FileSystem(skip_instance_cache=True)
        store.mkdir("bucket")
        yield store
    finally:
        server.kill()
        server.wait()


@pytest.mark.weekly
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_bucket_is_read_by_ranges(bucket, tmp_path):
    for part in range(3):
        table = pa.table({"row": np.arange(100 * part, 100 * part + 100), "y": np.arange(100) % 2})
        with bucket.open(f"bucket/rows/{part}.parquet", "wb") as file:
            pq.write_table(table, file, row_group_size=10)
        with bucket.open(f"bucket/lines/{part}.jsonl", "w") as file:
            file.write("\n".join(f'{{"row": {100 * part + row}}}' for row in range(100)))
    for location in ("s3://bucket/rows", "s3://bucket/rows/*.parquet", "s3://bucket/lines"):
        loader = shard_loader(location, 20, lambda table: torch.tensor(table["row"].to_numpy()), cache_dir=tmp_path)
        assert torch.cat([*loader]).sort().values.equal(torch.arange(300))
    data = TabularDataModule("s3://bucket/rows", "y", shards=ShardOptions(cache_dir=tmp_path))
    data.setup()
    assert data.feature_names == ["row"]
    assert len(torch.cat([features for features, _ in data.test_dataloader()])) == 40
    with pytest.raises(FileNotFoundError, match="no folder, and no file, s3://bucket/rwos"):
        shard_loader("s3://bucket/rwos", 5, list)
