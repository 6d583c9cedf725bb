"""Two runs in one folder; the other run is a process that does nothing but hold its lock."""

import copy
import multiprocessing as mp
import subprocess
import sys
import warnings

import lightning as L
import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_accel.cli.run_folder import RunLocks, warn_of_other_folders
from tests.cli.test_runs import OWN, QUIET

HOLD = """
import sys, fcntl
file = open(sys.argv[1], "a+")
fcntl.flock(file, fcntl.LOCK_EX)
file.write("process 123 on another, started then")
file.flush()
print("held", flush=True)
sys.stdin.read()
"""
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="its locks are of another kind")


@pytest.fixture
def hold():
    """Starts a process that locks a file."""
    started = []

    def start(path):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_lock_ends_with_its_process(tmp_path, hold):
    path, locks = tmp_path / "x.lock", RunLocks()
    other = hold(path)
    assert not locks.take(path)
    other.kill()
    other.communicate()
    assert path.exists()
    assert locks.take(path)
    assert locks.take(path)
    copy.deepcopy(locks).release()  # holds nothing
    forked = mp.get_context("fork").Process(target=locks.release)  # a worker, whose end is not the run's
    forked.start()
    forked.join()
    assert forked.exitcode == 0
    assert path.exists()
    text = path.read_text()
    asking = mp.get_context("fork").Process(target=lambda: sys.exit(7 if RunLocks().take(path) else 5))
    asking.start()
    asking.join()
    assert asking.exitcode == 5
    assert text.startswith("process ")
    assert " started 20" in text
    locks.release()
    assert not path.exists()


FIT = ["fit", *QUIET, *OWN]


@pytest.mark.slow
@pytest.mark.usefixtures("own")
def test_a_run_in_the_folder_of_another_is_refused(command, run_folder, hold):
    logger = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=.", "--trainer.logger.name=x"]
    assert command(*FIT, *logger, "--trainer.max_epochs=1").status == 0
    assert not list(run_folder.rglob("*.lock"))
    before = {path: path.stat().st_mtime_ns for path in (run_folder / "x").rglob("*")}
    other = hold(run_folder / "x/.version_0.lock")
    for more in (["--ckpt_path=auto"], ["--trainer.logger.version=0"]):
        result = command(*FIT, *logger, "--trainer.max_epochs=2", *more)
        assert result.status == 2
        assert "another run is using " in result.err
        assert "x/version_0: process 123 on another, started then. Wait for its end, or give this run" in result.err
        assert {path: path.stat().st_mtime_ns for path in (run_folder / "x").rglob("*") if path.suffix} == {
            path: time for path, time in before.items() if path.suffix
        } | {run_folder / "x/.version_0.lock": (run_folder / "x/.version_0.lock").stat().st_mtime_ns}
    result = command(*FIT, *logger, "--trainer.max_epochs=1")  # in a folder of its own
    assert (result.status, (run_folder / "x/version_1/metrics.csv").is_file()) == (0, True)
    other.kill()
    other.communicate()
    (run_folder / "x/version_1").rename(run_folder / "other")
    result = command(*FIT, *logger, "--trainer.max_epochs=2", "--ckpt_path=auto")
    assert result.status == 0, result.err
    assert (run_folder / "x/version_0/metrics_1.csv").is_file()


@pytest.mark.usefixtures("own")
def test_a_folder_of_checkpoints_is_one_runs_alone_where_it_goes_on(command, run_folder, hold):
    (run_folder / "kept").mkdir()
    hold(run_folder / "kept/.lock")
    keep = "--trainer.callbacks+={class_path: ModelCheckpoint, init_args: {dirpath: kept}}"
    result = command(*FIT, keep, "--trainer.logger=false", "--ckpt_path=auto")
    assert result.status == 2
    assert "another run is using kept: process 123 on another" in result.err.replace(f"{run_folder}/", "")


@pytest.mark.usefixtures("own")
def test_runs_that_begin_together_take_folders_of_their_own(command, run_folder, monkeypatch, hold):
    """All see that 0 is free; another run makes it first, one more has made 1 and just now locked it."""
    monkeypatch.setattr(CSVLogger, "_get_next_version", lambda self: 0)
    (run_folder / "x/version_0").mkdir(parents=True)
    hold(run_folder / "x/.version_1.lock")
    logger = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=.", "--trainer.logger.name=x"]
    assert command(*FIT, *logger, "--trainer.max_epochs=1").status == 0
    assert not list((run_folder / "x/version_0").iterdir())
    assert (run_folder / "x/version_2/metrics.csv").is_file()


def test_what_fails_before_it_begins_leaves_no_run(command, run_folder):
    result = command(
        "fit",
        *QUIET,
        "--model=MoEClassifier",
        "--model.num_features=63",
        "--data=DigitsDataModule",
        "--trainer.max_epochs=1",
    )
    assert "num_features=63" in result.err
    assert not (run_folder / "lightning_logs").exists()


def test_folders_that_an_option_leaves_as_they_are_are_told(tmp_path):
    def told(*loggers, root=None):
        trainer = L.Trainer(logger=list(loggers) or True, default_root_dir=root, accelerator="cpu")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn_of_other_folders(trainer, root)
        return [str(one.message).partition(",")[0].partition(":")[0] for one in caught]

    mine, runs = str(tmp_path / "mine"), str(tmp_path / "runs")
    both = CSVLogger(runs, "x"), TensorBoardLogger(runs, "x")
    assert told(*both) == told(*both, root=f"{runs}/") == told(root=mine) == []
    assert told(*both, root=mine) == [f"--trainer.default_root_dir {mine} changes no folder of this run"]
    assert told(both[0], TensorBoardLogger(mine, "x")) == ["the loggers of this run write below different folders"]
    assert told(both[0], TensorBoardLogger(mine, "events")) == []
