import logging
import os
import re
import signal
import subprocess
import sys
import threading
from multiprocessing import Event
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_accel.callbacks import StallMonitor, Watchdog
from tests.ranks import run_ranks

QUIET = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "enable_checkpointing": False, "max_epochs": 1,
}  # fmt: skip


class Line(L.LightningModule):
    def __init__(self, stop_at=None):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.stop_at = stop_at

    def training_step(self, batch, batch_idx):
        if batch_idx == self.stop_at:
            os.kill(os.getpid(), signal.SIGSTOP)
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SleepyRows(Dataset):
    """Row 3 comes once ``released``, or after minutes."""

    def __init__(self):
        self.released = Event()

    def __len__(self):
        return 6

    def __getitem__(self, i):
        if i == 3:
            self.released.wait(300)
        return torch.randn(2)


class Released(logging.Handler):
    """Releases row 3 with the second warning of its absence."""

    def __init__(self, rows):
        super().__init__()
        self.rows, self.told = rows, []

    def emit(self, record):
        if "after training batch 2" in record.getMessage():
            self.told.append(record.getMessage())
        if len(self.told) == 2:
            self.rows.released.set()


@pytest.fixture
def monitor_log():
    log = logging.getLogger("lightning_accel.callbacks.watchdog.stalls")
    before = list(log.handlers)
    yield log
    log.handlers[:] = before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_names_the_loader_and_the_worker(workers, monitor_log):
    rows = SleepyRows()
    handler = Released(rows)
    monitor_log.addHandler(handler)
    watchdog = Watchdog(timeout=0.8)
    trainer = L.Trainer(callbacks=[watchdog], **QUIET)
    trainer.fit(Line(), DataLoader(rows, batch_size=1, num_workers=workers))
    assert trainer.global_step == 6
    assert rows.released.is_set()
    told = handler.told
    assert [one for one in watchdog.findings if one.kind == "hang"] == [("hang", 3, told[0])]
    seconds = int(re.search(r"still for (\d+) s", told[1]).group(1))
    assert seconds >= 2  # the second warning comes after 1.6 s, or later on a busy machine
    fetched = r"from worker 0, process \d+, which is alive" if workers else "which this process loads itself"
    for one in told:
        assert re.search(rf"has stood still for \d+ s after training batch \d of epoch 0.*SleepyRows.*{fetched}", one)
    for thread in [one for one in threading.enumerate() if one.name == "stalls"]:
        thread.join(timeout=60)
        assert not thread.is_alive()


def check_stopped_rank(rank, folder, stopped):
    told = []

    class Wakes(logging.Handler):
        def emit(self, record):
            told.append(record.getMessage())
            if "does not" in told[-1]:
                os.kill(int(Path(folder, "pid").read_text()), signal.SIGCONT)

    if rank == stopped:
        Path(folder, "pid").write_text(str(os.getpid()))
    logger, handler = logging.getLogger("lightning_accel.callbacks.watchdog.stalls"), Wakes()
    logger.addHandler(handler)
    try:
        options = QUIET | {"devices": 2, "strategy": "ddp", "callbacks": [Watchdog(timeout=1.0)]}
        trainer = L.Trainer(**options)
        trainer.fit(Line(stop_at=1 if rank == stopped else None), DataLoader(torch.randn(12, 2), batch_size=2))
    finally:
        logger.removeHandler(handler)
    assert trainer.global_step == 3
    return told


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_names_the_process_that_is_stopped(tmp_path, stopped):
    told = run_ranks(check_stopped_rank, tmp_path, stopped)[1 - stopped]
    stalls = rf"rank {1 - stopped} of 2 has stood still for \d+ s (.*batch 1 of epoch 0|in the backward)"
    assert any(re.search(stalls, one) for one in told)  # a busy machine may have stood still before
    assert any(f"does not hear from rank {stopped}: stopped" in one for one in told)


ENDS = """
import time, torch
import lightning as L
from lightning_accel.callbacks import Watchdog
from tests.callbacks.watchdog.test_stalls import QUIET, Line

class Silent(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        while i == 2:
            time.sleep(0.1)
        return torch.ones(2)

L.Trainer(callbacks=[Watchdog(timeout=0.5, on_hang="end")], **QUIET).fit(Line(), torch.utils.data.DataLoader(Silent()))
"""


@pytest.mark.weekly
@pytest.mark.slow
def test_ends_a_process_that_hangs_with_the_stacks_of_its_threads():
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "after training batch 1 of epoch 0" in done.stderr
    assert "on_hang='end'" in done.stderr
    assert "in __getitem__" in done.stderr


def test_the_earlier_name_warns():
    with pytest.warns(FutureWarning, match="StallMonitor is now Watchdog"):
        assert StallMonitor(timeout=3.0).timeout == 3.0
