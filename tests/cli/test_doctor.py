import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_accel.diagnosis import examination
from lightning_accel.measure import Collective, rates, step_parts
from tests.planted import use_clock


@pytest.fixture
def quick(small_rates, monkeypatch):
    """Rates measured in no time, without other processes."""
    monkeypatch.setattr(rates, "measure_collective", lambda *_: Collective("gloo", 2, 1.5e9, 80e-6))
    monkeypatch.setattr(rates.measure_rates, "__kwdefaults__", {"seconds": 0.001, "repeats": 1, "device": None})


def test_the_machine_is_printed_and_written(command, quick, run_folder):
    done = command("doctor", "--json", "machine.json")
    assert done.status == 0
    for told in ("cores", "instruction sets", "native kernels", "matrix products in fp32", "1.5 GB/s, 80 µs"):
        assert told in done.out
    found = json.loads((run_folder / "machine.json").read_text())
    assert found["rates"]["collective"]["bytes_per_s"] == 1.5e9
    assert found["machine"]["digest"] in done.out
    assert [path.name for path in run_folder.iterdir()] == ["machine.json"]


def test_a_full_disk_is_one_message_after_the_tables(command, quick, run_folder, monkeypatch):
    def fill(path, *_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", fill)
    done = command("doctor", "--json", "machine.json")
    assert done.status == 1
    assert "matrix products in fp32" in done.out
    assert done.err.startswith("lightning-accel doctor: error: machine.json could not be written: the disk of ")
    assert not list(run_folder.iterdir())


def test_without_rich_the_tables_are_plain_text(command, quick, monkeypatch):
    monkeypatch.setattr("lightning_accel.measure.table.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.table", None)
    found = re.sub("  +", "  ", command("doctor").out)
    assert "\n  all-reduce, 2 processes  1.5 GB/s, 80 µs at least (gloo)\n" in found


MODULE = """
import lightning as L, torch
from tests.planted import sleep
class Slow(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(64, 10)
    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0].flatten(1)), batch[1])
    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx))
    def on_train_batch_end(self, *_):
        sleep("callbacks", 0.03)
"""


@pytest.mark.slow
def test_a_run_is_examined_and_leaves_its_folder_untouched(command, quick, run_folder, monkeypatch):
    (run_folder / "foreign_slow.py").write_text(MODULE)
    config = """
model: foreign_slow.Slow
data: {class_path: DigitsDataModule, init_args: {batch_size: 32}}
optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
trainer:
  max_epochs: 1
  enable_progress_bar: false
  logger: {class_path: CSVLogger, init_args: {save_dir: runs}}
  callbacks: [{class_path: ModelCheckpoint, init_args: {monitor: val/loss, dirpath: kept}}]
"""
    (run_folder / "x.yaml").write_text(config)
    monkeypatch.syspath_prepend(run_folder)
    use_clock(monkeypatch, examination, step_parts)
    done = command("doctor", "--config", "x.yaml", "--seconds", 0.5, "--json", "x.json")
    assert done.status == 0, done.err
    told = json.loads((run_folder / "x.json").read_text())
    slow = next(one for one in told["findings"] if one["name"] == "slow hook")
    assert slow["cost_ms"] == pytest.approx(30, rel=0.01)
    assert told["run"]["batch_size"] == 32
    assert told["run"]["flops"] == 2 * 2 * 32 * 64 * 10
    assert "slow hook" in done.out
    written = {str(path.relative_to(run_folder)) for path in run_folder.rglob("*") if path.is_file()}
    assert {one for one in written if "__pycache__" not in one} == {
        "foreign_slow.py", "x.yaml", "x.json", "figures/doctor_step.png"
    }  # fmt: skip
    sys.modules.pop("foreign_slow")


@pytest.mark.slow
def test_mistakes_of_a_run_are_told_as_those_of_fit(command, quick):
    done = command("doctor", "--model", "MoEClassifier", "--model.num_expert", 4)
    assert done.status == 2
    assert "did you mean 'experts.num_experts'?" in done.err
    done = command("doctor", "--model", "MoEClassifier", "--data", "DigitsDataModule", "--ckpt_path", "auto")
    assert "leave --ckpt_path out" in done.err
    limits = ("--trainer.limit_train_batches", 2, "--trainer.max_epochs", 1)
    done = command("doctor", "--model", "Classifier", "--data", "DigitsDataModule", *limits)
    assert "ended after 2 batches" in done.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--seconds", 0], "--seconds must be positive; it is 0"),
        (["--folder", "nowhere"], "--folder nowhere is no folder"),
        (["--json", "nowhere/x.json"], "--json nowhere/x.json cannot be written"),
    ],
)
def test_a_mistake_is_told_before_measuring(command, monkeypatch, arguments, told):
    monkeypatch.setattr("lightning_accel.diagnosis.doctor", lambda **_: pytest.fail("measured"))
    done = command("doctor", *arguments)
    assert done.status == 2
    assert told in done.err


def test_help_imports_no_torch():
    for arguments in (["--help"], ["doctor", "--help"], ["tune", "--help"]):
        script = (
            "import sys; from lightning_accel.__main__ import main\n"
            f"assert main({arguments}) == 0\n"
            "assert 'torch' not in sys.modules"
        )
        said = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
        assert f"lightning-accel {' '.join(arguments[:-1])}" in said


@pytest.mark.parametrize("line", ["doctor --second 3", "plan --config x.yaml --gpu 8xH100-80GB", "tune --goals memory"])
def test_a_misspelt_option_is_named_with_the_nearest(command, line):
    done = command(*line.split())
    assert done.status == 2
    assert re.search(r"error: no option (--\w+); did you mean \1s\?|no option --goals; did you mean --goal\?", done.err)
