"""Processes that fall behind, and loaders that a run waits for."""

import json
import time

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_accel.callbacks import Watchdog
from lightning_accel.callbacks.watchdog import step_times
from lightning_accel.callbacks.watchdog.step_times import StepTimes, Times
from lightning_accel.measure.run_parts import RUN_PARTS
from tests.ranks import run_ranks

QUIET = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "enable_checkpointing": False, "max_epochs": -1,
}  # fmt: skip


class Sleepy(Dataset):
    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 100

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.ones(2)


class Line(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Until(L.Callback):
    """End the fit when ``watchdog`` of the first process has found something, or after a minute."""

    def __init__(self, watchdog):
        self.watchdog, self.begin = watchdog, time.monotonic()

    def on_train_batch_end(self, trainer, *_):
        is_late = time.monotonic() - self.begin > 60
        found = trainer.strategy.broadcast(bool(self.watchdog.findings) or is_late)
        trainer.should_stop = bool(found)


def found_with(seconds, **options):
    watchdog = Watchdog(timeout=1.0)
    trainer = L.Trainer(**QUIET | options, callbacks=[watchdog, Until(watchdog)])
    trainer.fit(Line(), DataLoader(Sleepy(seconds)))
    return watchdog.findings


def check_slow_rank(rank, slow):
    return [(one.kind, one.text) for one in found_with(0.004 if rank == slow else 0.0, devices=2, strategy="ddp")]


@pytest.mark.slow
def test_the_process_that_falls_behind_is_named_with_its_part():
    (first, *_), other = run_ranks(check_slow_rank, 1)
    assert first[0] == "slow rank"
    assert "rank 1 of 2" in first[1]
    assert "most of it in waiting for data, and the others wait" in first[1]
    assert not other


def test_a_loader_that_starves_the_run_is_named():
    (found,) = found_with(0.004)
    assert found.kind == "data"
    assert "num_workers=0 and loads while nothing trains" in found.text


class Store(dict):
    def check(self, keys):
        return all(key in self for key in keys)

    def delete_key(self, key):
        self.pop(key, None)

    def set(self, key, value):
        self[key] = value


def times(step, **parts):
    return Times(step, dict.fromkeys(RUN_PARTS, 0.0) | parts, "host")


def looks(monkeypatch, of_ranks, has_collectives=False):
    """Return what the first process finds in looks after each of which every rank has its ``of_ranks`` more."""
    store = Store()
    monkeypatch.setattr(step_times, "default_store", lambda: store)
    watch = StepTimes(0, len(of_ranks), has_collectives, 2)
    watch.note(0, times(0).parts)
    watch.exchange()
    found = []
    for look in range(1, 6):
        for rank, parts in enumerate(of_ranks):
            now = times(30 * look, **{part: 30 * look * spent for part, spent in parts.items()})
            store.set(f"watchdog/times/{rank}", json.dumps(now))
        watch.note(30 * look, {part: 30 * look * spent for part, spent in times(1, **of_ranks[0]).parts.items()})
        found.append(watch.exchange())
    return found


def test_figures_are_those_of_a_step(monkeypatch):
    usual = {"data": 0.001, "forward": 0.004, "backward": 0.009}
    slow = {"data": 0.001, "forward": 0.010, "backward": 0.003}
    found = looks(monkeypatch, [usual, usual, slow, usual])
    assert [sorted(one) for one in found] == [[], [], ["rank 2"], [], []]  # after two looks in a row, once
    assert found[2]["rank 2"] == (
        "rank 2 of 4 (host) falls behind: it takes 11 ms for its own part of a step, 6 more than most, most of it in "
        "forward, and the others wait 43% of each step of 14 ms"
    )
    assert not any(looks(monkeypatch, [usual, usual, slow, usual], has_collectives=True))
    nearly = {"data": 0.001, "forward": 0.0053, "backward": 0.0077}
    assert not any(looks(monkeypatch, [usual, nearly]))


def test_what_others_have_left_in_the_store_is_not_compared(monkeypatch):
    store = Store({"watchdog/times/1": json.dumps(times(10**6, forward=3.0))})
    monkeypatch.setattr(step_times, "default_store", lambda: store)
    watch = StepTimes(0, 2, False, None)
    watch.note(1, times(1).parts)
    assert watch.exchange() == {}
    assert "watchdog/times/1" not in store


def test_looks_are_20_steps_apart(monkeypatch):
    watch = StepTimes(0, 1, False, None)
    found = []
    for step in range(0, 100, 10):
        watch.note(step, times(step, data=float(step)).parts)
        found.append(watch.exchange())
    assert [number for number, one in enumerate(found) if one] == [4]  # after the looks at steps 0, 20 and 40


def test_workers_are_counted(monkeypatch):
    found = looks(monkeypatch, [{"data": 0.003, "forward": 0.003}])
    assert found[1]["data"].startswith("the run waits for data 50% of its time, 3 ms a step; its 2 workers are too")
