"""Real processes: a folder under DDP, killed and resumed on another number of processes."""

import json
import subprocess
import sys
from pathlib import Path

import lightning as L
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_accel.data import ShardOptions, TabularDataModule
from tests.ranks import run_ranks


class Rows(L.LightningModule):
    """Write down which rows each process takes, by a feature that is their number."""

    def __init__(self, data, path):
        super().__init__()
        self.data, self.path, self.stop_after = data, path, None
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def numbers(self, batch):
        encoder = self.data.preprocessing()
        return [round(row) for row in (batch[0][:, 0].double() * encoder.scale[0] + encoder.mean[0]).tolist()]

    def write(self, stage, batch):
        with open(self.path / f"{stage}-{self.global_rank}", "a") as file:
            file.write(json.dumps([self.trainer.global_step, self.numbers(batch)]) + "\n")

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == self.stop_after:
            raise KeyError("killed")
        self.write("train", batch)
        return self.weight * batch[0].mean()

    def validation_step(self, batch, batch_idx):
        self.write("val", batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(folder, path, replicas, batch_size, ckpt_path=None, stop_after=None):
    path.mkdir(exist_ok=True)
    data = TabularDataModule(folder, "y", batch_size=batch_size, shards=ShardOptions(cache_dir=folder.parent / "cache"))
    module = Rows(data, path)
    module.stop_after = stop_after
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        strategy="ddp" if replicas > 1 else "auto",
        devices=replicas,
        logger=False,
        num_sanity_val_steps=0,
        callbacks=[ModelCheckpoint(dirpath=path, every_n_train_steps=4, save_top_k=-1, filename="{step}")],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data, ckpt_path=ckpt_path)


def fit_on_rank(rank, folder, path, stop_after):
    with pytest.raises(KeyError, match="killed"):
        fit(Path(folder), Path(path), 2, 8, stop_after=stop_after)


def taken(path, stage, before=10**9):
    lines = [json.loads(line) for file in path.glob(f"{stage}-*") for line in file.read_text().splitlines()]
    return [row for step, rows in lines for row in rows if step < before]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_run_of_two_processes_goes_on_with_one(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    table = pa.table({"number": np.arange(600), "y": np.arange(600) % 2})
    for part in range(3):
        pq.write_table(table.slice(200 * part, 200), folder / f"{part}.parquet", row_group_size=10)
    run_ranks(fit_on_rank, str(folder), str(tmp_path / "two"), 10)
    before = taken(tmp_path / "two", "train", before=8)
    assert len(before) == len({*before}) == 8 * 16
    assert not {*taken(tmp_path / "two", "train", before=10**9)} - {*range(600)}
    fit(folder, tmp_path / "one", 1, 12, tmp_path / "two" / "step=8.ckpt")
    after = taken(tmp_path / "one", "train")
    train = 600 - 2 * len({*taken(tmp_path / "one", "val")})  # as many test
    assert train == 420
    assert len(after) == (train - 128) // 12 * 12
    assert len({*before, *after}) == len(before) + len(after)
    assert not {*before, *after} & {*taken(tmp_path / "one", "val")}


@pytest.mark.slow
@pytest.mark.weekly
@pytest.mark.parametrize("end", [pytest.param("", id="end"), pytest.param("raise KeyError('x')", id="error")])
def test_a_process_ends_in_the_middle_of_reading(tmp_path, end):
    """Where a thread was cut off within a call of Arrow, one of six processes aborted."""
    pq.write_table(pa.table({"row": np.arange(200_000)}), tmp_path / "a.parquet", row_group_size=5000)
    script = (
        "from lightning_accel.data import shard_loader\n"
        f"batches = iter(shard_loader({str(tmp_path)!r}, 64, list, cache_dir={str(tmp_path / 'cache')!r}))\n"
        f"for _ in range(30): next(batches)\n{end}"
    )
    for _ in range(4):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
        assert done.returncode == (1 if end else 0), done.stderr
        assert "terminate" not in done.stderr
