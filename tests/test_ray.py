"""Runs on a local cluster of Ray, whose workers are killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.test_launch import (
    ROOT,
    assert_equal_ends,
    end_of,
    environment,
    finish,
    folder,  # noqa: F401  # fixtures
    wait_for_step,
    whole,  # noqa: F401
)

pytest.importorskip("ray")
pytestmark = pytest.mark.slow
LAUNCH = ROOT / "configs/launch"

TRAINER = '''
"""A Trainer of one's own on workers of Ray, with its checkpoints: strategy, whether its checkpoints are in a thread."""
import os, pathlib, signal, sys
import lightning as L
import ray.train
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer


class Dies(L.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch == 2 and batch_idx == 3 and trainer.global_rank == 1 and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(settings):
    from slow_module import Slow

    from lightning_accel import ExactResume, FullyShardedStrategy
    from lightning_accel.strategies import BackgroundCheckpointIO

    class RayShardedStrategy(FullyShardedStrategy, RayDDPStrategy):
        """What prepare_trainer asks for."""

    os.chdir(settings["folder"])
    L.seed_everything(3)
    dies = Dies()
    dies.marker = pathlib.Path("dead")
    trainer = L.Trainer(
        accelerator="cpu", strategy=RayShardedStrategy(), max_epochs=5, logger=False, enable_checkpointing=False,
        plugins=[RayLightningEnvironment(), BackgroundCheckpointIO()], enable_progress_bar=False,
        callbacks=[ExactResume(), RayTrainReportCallback(), dies], enable_model_summary=False,
    )
    checkpoint, module = ray.train.get_checkpoint(), Slow()
    if checkpoint is None:
        prepare_trainer(trainer).fit(module)
    else:
        with checkpoint.as_directory() as folder:
            prepare_trainer(trainer).fit(module, ckpt_path=f"{folder}/checkpoint.ckpt")
    trainer.save_checkpoint("end.ckpt")


if __name__ == "__main__":
    result = TorchTrainer(
        train,
        train_loop_config={"folder": os.getcwd()},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=os.getcwd(), failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
        ),
    ).fit()
    assert result.metrics["step"] == 40
'''


def start(script: object, where: Path, *arguments: object) -> subprocess.Popen:
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    with open(where / "log.txt", "a") as log:
        command = [sys.executable, str(script), *map(str, arguments)]
        return subprocess.Popen(command, cwd=where, env=environment() | quiet, stdout=log, stderr=log)


def test_a_config_goes_on_when_a_worker_is_killed(folder, whole):  # noqa: F811
    options = ("--workers", 2, "--storage", folder / "runs", "--", "--config=fit.yaml", "--model.pause=0.1")
    driver = start(LAUNCH / "ray_train.py", folder, *options)
    os.kill(wait_for_step(folder, 10), signal.SIGKILL)
    assert finish(driver, folder) == 0, (folder / "log.txt").read_text()[-3000:]
    log = (folder / "log.txt").read_text()
    assert "--ckpt_path auto: no checkpoint yet, a new run begins" in log
    assert "--ckpt_path auto: going on from logs/lightning_logs/version_0/checkpoints/epoch=" in log
    assert "Ray" not in (folder / "logs/lightning_logs/version_0/config_fit.yaml").read_text()
    assert_equal_ends(end_of(folder), whole)


@pytest.mark.weekly
def test_a_trainer_goes_on_from_what_ray_keeps_when_a_worker_is_killed(folder):  # noqa: F811
    (folder / "train.py").write_text(TRAINER)
    ends = []
    for dies in (False, True):
        (folder / "dead").unlink(missing_ok=True) if dies else (folder / "dead").touch()
        assert finish(start("train.py", folder), folder) == 0, (folder / "log.txt").read_text()[-3000:]
        ends.append(torch.load(folder / "end.ckpt", weights_only=True))
    assert (folder / "dead").exists()
    assert "The actor died unexpectedly" in (folder / "log.txt").read_text()
    for name, value in ends[0]["state_dict"].items():
        assert value.equal(ends[1]["state_dict"][name]), name
