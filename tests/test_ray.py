"""Runs on a local cluster of Ray, whose workers are killed."""

import os
import re
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

PAGE = (LAUNCH / "README.md").read_text()
IN_TEST = {
    "max_epochs=5,": "max_epochs=5, accelerator='cpu', logger=False, enable_checkpointing=False,",
    "plugins=[": "plugins=[BackgroundCheckpointIO(), ",
    "callbacks=[": "enable_model_summary=False, enable_progress_bar=False, callbacks=[Dies(), ",
    "YourModule": "Slow",
    "def train(settings):": "def train(settings):\n    prepare(settings)",
}
AS_RAY_WANTS = {"FullyShardedStrategy()": "RayShardedStrategy()", "trainer.fit": "prepare_trainer(trainer).fit"}
BEFORE = '''
import os, pathlib, signal
import lightning as L
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayDDPStrategy, prepare_trainer
from ray.train.torch import TorchTrainer
from slow_module import Slow
from lightning_accel import FullyShardedStrategy
from lightning_accel.strategies import BackgroundCheckpointIO


class RayShardedStrategy(FullyShardedStrategy, RayDDPStrategy):
    """What prepare_trainer asks for."""


class Dies(L.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        dead = pathlib.Path("dead")
        if trainer.current_epoch == 2 and batch_idx == 3 and trainer.global_rank == 1 and not dead.exists():
            dead.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def prepare(settings):
    os.chdir(settings["folder"])
    L.seed_everything(3)
'''
AFTER = """
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
"""


def start(script: object, where: Path, *arguments: object) -> subprocess.Popen:
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    with open(where / "log.txt", "a") as log:
        command = [sys.executable, str(script), *map(str, arguments)]
        return subprocess.Popen(command, cwd=where, env=environment() | quiet, stdout=log, stderr=log)


@pytest.mark.weekly
def test_a_config_goes_on_when_a_worker_is_killed(folder, whole):  # noqa: F811
    driver = start(LAUNCH / "ray_train.py", folder, "--", "--config=fit.yaml", "--model.pause=0.1")
    os.kill(wait_for_step(folder, 10), signal.SIGKILL)
    assert finish(driver, folder) == 0, (folder / "log.txt").read_text()[-3000:]
    log = (folder / "log.txt").read_text()
    assert "--ckpt_path auto: no checkpoint yet, a new run begins" in log
    assert "--ckpt_path auto: going on from logs/lightning_logs/version_0/checkpoints/epoch=" in log
    assert "Ray" not in (folder / "logs/lightning_logs/version_0/config_fit.yaml").read_text()
    assert_equal_ends(end_of(folder), whole)


@pytest.mark.weekly
def test_the_trainer_of_the_page_goes_on_from_what_ray_keeps_when_a_worker_is_killed(folder):  # noqa: F811
    [program] = re.findall("```python\n(.*?)```", PAGE, re.DOTALL)
    ends = []
    for dies, changes in ((False, IN_TEST | AS_RAY_WANTS), (True, IN_TEST)):
        changed = program
        for old, new in changes.items():
            assert old in changed
            changed = changed.replace(old, new)
        (folder / "train.py").write_text(BEFORE + changed + AFTER)
        (folder / "dead").unlink(missing_ok=True) if dies else (folder / "dead").touch()
        assert finish(start("train.py", folder), folder) == 0, (folder / "log.txt").read_text()[-3000:]
        ends.append(torch.load(folder / "end.ckpt", weights_only=True))
    assert (folder / "dead").exists()
    assert "The actor died unexpectedly" in (folder / "log.txt").read_text()
    for name, value in ends[0]["state_dict"].items():
        assert value.equal(ends[1]["state_dict"][name]), name
