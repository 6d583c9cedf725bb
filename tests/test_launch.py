"""Runs that torchrun starts, of one rank each per process: restarts, signals, two hosts."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_accel.strategies.checkpoints.io import newest_checkpoint

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]

MODULE = '''
"""Takes its time, and tells which step it is at and who it is."""
import os, pathlib, time
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Slow(L.LightningModule):
    def __init__(self, pause: float = 0.0):
        super().__init__()
        self.pause = pause
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))

    def training_step(self, batch, batch_idx):
        time.sleep(self.pause)
        path = pathlib.Path(f"rank-{self.global_rank}.txt")
        path.write_text(f"{os.getpid()} {self.global_step}")
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self):
        rows = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(rows), batch_size=4, shuffle=True)
'''

FIT = """
seed_everything: 3
model: {class_path: slow_module.Slow}
trainer:
  accelerator: cpu
  devices: 2
  strategy: ddp
  max_epochs: 5
  log_every_n_steps: 1
  enable_progress_bar: false
  enable_model_summary: false
  logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: logs, flush_logs_every_n_steps: 1}}
  callbacks:
    - {class_path: lightning_accel.callbacks.ExactResume}
    - {class_path: lightning_accel.callbacks.SaveOnSignal, init_args: {every_n_steps: 2}}
    - {class_path: lightning.pytorch.callbacks.ModelCheckpoint, init_args: {every_n_train_steps: 3}}
"""
SHARDED = """  strategy: {{class_path: lightning_accel.FullyShardedStrategy, init_args: {{checkpoints: sharded}}}}
  plugins:
    - class_path: lightning_accel.strategies.BackgroundCheckpointIO
      init_args: {{local_folder: '{where}/copies'}}
"""
KEEPER = "init_args: {every_n_train_steps: 3}"
KEEPER_IN_STORE = "init_args: {{every_n_train_steps: 3, dirpath: 'store://{where}/bucket'}}"
STEPS = 40  # 64 rows of two processes, 4 at a time, 5 epochs


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "slow_module.py").write_text(MODULE)
    (tmp_path / "fit.yaml").write_text(FIT)
    return tmp_path


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # for scripts that call python
    variables = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return os.environ | variables | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else restarts hang at random


def torchrun(folder: Path, *arguments: object, launcher: tuple = ("--standalone",)) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", *launcher]
    command += ["-m", "lightning_accel", "fit", "--config=fit.yaml", *map(str, arguments)]
    with open(folder / "log.txt", "a") as log:
        return subprocess.Popen(command, cwd=folder, env=environment(), stdout=log, stderr=log)


def finish(process: subprocess.Popen, folder: Path, timeout_s: float = 600) -> int:
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError((folder / "log.txt").read_text()[-3000:]) from None


def wait_for_step(folder: Path, step: int, rank: int = 1) -> int:
    """The process id of ``rank`` once it has come to ``step``."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        path = folder / f"rank-{rank}.txt"
        words = path.read_text().split() if path.exists() else []
        if len(words) == 2 and int(words[1]) >= step:
            return int(words[0])
        time.sleep(0.01)
    raise AssertionError((folder / "log.txt").read_text()[-3000:])


def end_of(folder: Path) -> dict:
    path = newest_checkpoint([folder / "logs/lightning_logs/version_0/checkpoints"])
    return torch.load(path, weights_only=True)


def assert_equal_ends(ours: dict, theirs: dict) -> None:
    assert ours["global_step"] == theirs["global_step"] == STEPS - 1  # the last multiple of three
    for name, value in theirs["state_dict"].items():
        assert value.equal(ours["state_dict"][name]), name
    for index, state in theirs["optimizer_states"][0]["state"].items():
        assert all(value.equal(ours["optimizer_states"][0]["state"][index][name]) for name, value in state.items())


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict:
    """The end of a run that nobody stopped."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "slow_module.py").write_text(MODULE)
    (folder / "fit.yaml").write_text(FIT)
    assert finish(torchrun(folder), folder) == 0, (folder / "log.txt").read_text()[-3000:]
    return end_of(folder)


@pytest.mark.slow
@pytest.mark.weekly
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.weekly)])
def test_a_killed_rank_is_started_again_and_goes_on(folder, whole, rank):
    launcher = torchrun(folder, "--ckpt_path=auto", "--model.pause=0.1", launcher=("--standalone", "--max-restarts=2"))
    os.kill(wait_for_step(folder, 10, rank), signal.SIGKILL)
    assert finish(launcher, folder) == 0, (folder / "log.txt").read_text()[-3000:]
    log = (folder / "log.txt").read_text()
    assert "--ckpt_path auto: no checkpoint yet, a new run begins" in log
    assert re.search(r"--ckpt_path auto: going on from logs/lightning_logs/version_0/checkpoints/epoch=\d-step=", log)
    assert os.listdir(folder / "logs/lightning_logs") == ["version_0"]
    assert_equal_ends(end_of(folder), whole)
    tables = sorted((folder / "logs/lightning_logs/version_0").glob("metrics*.csv"))
    assert [path.name for path in tables] == ["metrics.csv", "metrics_1.csv"]
    steps = {step for path in tables for step in pd.read_csv(path)["step"]}
    assert steps == set(range(STEPS))


WATCHDOG = ("--trainer.callbacks+=lightning_accel.callbacks.Watchdog", "--trainer.callbacks.timeout=3",
            "--trainer.callbacks.on_hang=end")  # fmt: skip


@pytest.mark.weekly
def test_a_stopped_rank_ends_those_that_wait_for_it_and_all_are_started_again(folder, whole):
    launcher = torchrun(
        folder, "--ckpt_path=auto", "--model.pause=0.1", *WATCHDOG, launcher=("--standalone", "--max-restarts=1")
    )
    os.kill(wait_for_step(folder, 10), signal.SIGSTOP)
    assert finish(launcher, folder) == 0, (folder / "log.txt").read_text()[-3000:]
    log = (folder / "log.txt").read_text()
    assert "rank 0 waits, and does not hear from rank 1: stopped, gone, or busy" in log
    assert "rank 0 ends with status 1, as on_hang='end' asks for" in log
    assert_equal_ends(end_of(folder), whole)


DEADLY = '''

import signal
import tests.store
from lightning_accel.strategies.checkpoints import io


def die_once(path):
    """End the second process in the middle of the checkpoint of step 12, the first time."""
    if "step=12" in str(path) and os.environ["RANK"] == "1" and not pathlib.Path("dead").exists():
        pathlib.Path("dead").touch()
        os.kill(os.getpid(), signal.SIGKILL)


if pathlib.Path("uploads").exists():
    upload = tests.store.Store.put_file
    tests.store.Store.put_file = lambda self, file, path, **_: die_once(path) or upload(self, file, path)
else:
    save = io.save
    io.save = lambda *arguments, **options: die_once(options["checkpoint_id"]) or save(*arguments, **options)
'''


def whole_state(folder: Path) -> dict:
    dcp_to_torch_save(newest_checkpoint([folder]), folder / "whole.pt")
    return torch.load(folder / "whole.pt", weights_only=True)


@pytest.mark.weekly
@pytest.mark.parametrize("dies_while", ["it uploads", "it writes"])
def test_a_rank_lost_while_a_checkpoint_is_written_in_the_background(folder, tmp_path_factory, dies_while):
    """Shards go to a store in threads; one process is killed, and the run goes on from the newest whole checkpoint."""
    ends = []
    for number, where in enumerate((tmp_path_factory.mktemp("undisturbed"), folder)):
        (where / "slow_module.py").write_text(MODULE + DEADLY)
        sharded = FIT.replace("  strategy: ddp\n", SHARDED.format(where=where))
        (where / "fit.yaml").write_text(sharded.replace(KEEPER, KEEPER_IN_STORE.format(where=where)))
        (where / ("uploads" if dies_while == "it uploads" else "writes")).touch()
        if number == 0:
            (where / "dead").touch()
        launcher = torchrun(where, "--ckpt_path=auto", launcher=("--standalone", "--max-restarts=1"))
        assert finish(launcher, where) == 0, (where / "log.txt").read_text()[-3000:]
        log = (where / "log.txt").read_text()
        begun = re.findall(r"--ckpt_path auto: going on from (\S*)/epoch=\d-step=(\d+).ckpt", log)
        if number == 0:
            assert begun == []
        elif dies_while == "it uploads":  # the disk of the machine has all of it
            assert {(str(where / "copies") in place, step) for place, step in begun} == {(True, "12")}
        else:
            assert set(begun) == {(f"store://{where}/bucket", "9")}
        assert [path.name for path in (where / "bucket").iterdir()] == [f"epoch=4-step={STEPS - 1}.ckpt"]
        ends.append(whole_state(where / "bucket"))
    for name, value in ends[0]["state_dict"].items():
        assert value.equal(ends[1]["state_dict"][name]), name
    for name, state in ends[0]["optimizer_0"]["state"].items():
        assert all(value.equal(ends[1]["optimizer_0"]["state"][name][part]) for part, value in state.items())


@pytest.mark.weekly
@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_of_one_rank_saves_and_ends_all(folder, whole, rank):
    launcher = torchrun(folder, "--ckpt_path=auto", "--model.pause=0.1")
    os.kill(wait_for_step(folder, 7, rank), signal.SIGTERM)
    assert finish(launcher, folder) == 1
    log = (folder / "log.txt").read_text()
    assert "SIGTERM: saved" in log
    assert "exitcode  : 143" in log
    assert finish(torchrun(folder, "--ckpt_path=auto"), folder) == 0, (folder / "log.txt").read_text()[-3000:]
    assert (
        "auto: going on from logs/lightning_logs/version_0/checkpoints/signal-step=" in (folder / "log.txt").read_text()
    )
    assert_equal_ends(end_of(folder), whole)


@pytest.mark.weekly
def test_sigterm_of_the_launcher_saves(folder):
    launcher = torchrun(folder, "--ckpt_path=auto", "--model.pause=0.1")
    wait_for_step(folder, 7)
    launcher.send_signal(signal.SIGTERM)
    assert finish(launcher, folder) != 0
    assert list(folder.glob("logs/lightning_logs/version_0/checkpoints/signal-step=*.ckpt"))


NETWORK = """
ip link set lo up
unshare --net sleep 300 & other=$!
trap "kill $other" EXIT
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.1; done
ip link add one type veth peer name two
ip link set two netns $other
ip addr add 10.77.0.1/24 dev one && ip link set one up
nsenter --target $other --net sh -c "ip link set lo up; ip addr add 10.77.0.2/24 dev two; ip link set two up"
run="{python} -m torch.distributed.run --nnodes 2 --nproc_per_node 1 --master-addr 10.77.0.1 --master-port 29471"
fit="-m lightning_accel fit --config fit.yaml --trainer.devices 1 --trainer.num_nodes 2"
GLOO_SOCKET_IFNAME=one $run --node-rank 0 $fit > first.txt 2>&1 & first=$!
GLOO_SOCKET_IFNAME=two nsenter --target $other --net $run --node-rank 1 $fit > second.txt 2>&1 &&
wait $first
"""


@pytest.mark.weekly
def test_two_hosts(folder, whole):
    made = ["unshare", "--net", "--user", "--map-root-user"]
    probe = "ip link add probe0 type veth peer name probe1 && unshare --net true"
    missing = subprocess.run([*made, "sh", "-c", probe], capture_output=True, text=True, check=False)
    if missing.returncode:
        pytest.skip(f"no network namespaces here: {missing.stderr.strip()}")
    script = NETWORK.format(python=sys.executable)
    done = subprocess.run(
        [*made, "bash", "-c", script], cwd=folder, env=environment(), timeout=600, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    logs = [path.read_text()[-2000:] for path in (folder / "first.txt", folder / "second.txt") if path.exists()]
    assert done.returncode == 0, "\n".join([done.stderr, *logs])
    assert_equal_ends(end_of(folder), whole)
