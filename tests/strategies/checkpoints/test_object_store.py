"""Checkpoints in S3: moto's server, where it is installed (pip install "moto[server]" s3fs)."""

import shutil

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_accel import FullyShardedStrategy
from lightning_accel.strategies import BackgroundCheckpointIO
from lightning_accel.strategies.checkpoints.io import newest_checkpoint
from lightning_accel.strategies.checkpoints.stores import LocalCopies
from tests.data.shards.test_object_store import bucket  # noqa: F401
from tests.ranks import run_ranks
from tests.recovery_job import Job
from tests.strategies.checkpoints.test_stores import Alone, number_in, write_folder


def check_resumed(rank, folder):
    for steps in (3, 6):
        module = Job(folder)
        trainer = L.Trainer(
            accelerator="cpu", devices=2, strategy=FullyShardedStrategy(checkpoints="sharded"), max_steps=steps,
            logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
            callbacks=[ModelCheckpoint("s3://bucket/sharded", "{step}", every_n_train_steps=1, save_last=True)],
            plugins=[BackgroundCheckpointIO(folder / "copies")],
        )  # fmt: skip
        newest = newest_checkpoint(["s3://bucket/sharded"])
        trainer.fit(module, module.loader(2), ckpt_path=newest)
    return newest


@pytest.mark.slow
@pytest.mark.weekly
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore:torch.distributed is")
def test_a_bucket_holds_checkpoints(bucket, tmp_path):  # noqa: F811
    url = "s3://bucket/run"
    for number in (1, 2):
        copies = LocalCopies(tmp_path / "here", 2)
        shutil.rmtree(copies.path_of(f"{url}/last.ckpt"), ignore_errors=True)
        write_folder(copies.path_of(f"{url}/last.ckpt"), number)
        copies.upload_folder(f"{url}/last.ckpt", 0, 0, Alone())
        assert number_in(LocalCopies(tmp_path / f"there-{number}", 2).fetch(f"{url}/last.ckpt")) == number
        bucket.invalidate_cache()
        assert len(bucket.find("bucket/run")) == 3
    io = BackgroundCheckpointIO(tmp_path / "here")
    big = {"weight": torch.randn(60_000_000 // 4), "global_step": 3}  # uploaded in parts
    io.save_checkpoint(big, f"{url}/step=3.ckpt")
    io.wait()
    assert newest_checkpoint([url]) == f"{url}/step=3.ckpt"
    elsewhere = BackgroundCheckpointIO(tmp_path / "elsewhere")
    assert elsewhere.load_checkpoint(f"{url}/step=3.ckpt")["weight"].equal(big["weight"])
    io.remove_checkpoint(f"{url}/step=3.ckpt")
    io.remove_checkpoint(f"{url}/last.ckpt")
    io.teardown()
    bucket.invalidate_cache()
    assert bucket.find("bucket/run") == []
    for newest in run_ranks(check_resumed, tmp_path):
        assert newest in ("s3://bucket/sharded/step=3.ckpt", "s3://bucket/sharded/last.ckpt")
    bucket.invalidate_cache()
    assert {path.split("/")[2] for path in bucket.find("bucket/sharded")} == {"step=6.ckpt", "last.ckpt"}
