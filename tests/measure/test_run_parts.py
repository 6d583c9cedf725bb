import time
from contextlib import suppress

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_accel.measure import RUN_PARTS, RunParts, run_parts
from tests.planted import SLEEPS, SLEPT, Sleeping, SleepingCallback, SleepingLogger, rows, sleep, use_clock


class SleepingEverywhere(SleepingCallback):
    def on_validation_end(self, trainer, pl_module):
        sleep("validation", 0.01)

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):  # nested in validation
        sleep("checkpoints", 0.02)


class Begin(L.Callback):
    def on_fit_start(self, trainer, pl_module):
        self.earliest = time.perf_counter()
        trainer.profiler = RunParts()
        self.latest = time.perf_counter()


@pytest.mark.slow
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_planted_sleeps_are_found_in_their_parts_and_sum_to_the_whole(manual, tmp_path):
    begin = Begin()
    trainer = L.Trainer(
        max_epochs=1, logger=SleepingLogger(), log_every_n_steps=1, accelerator="cpu", num_sanity_val_steps=0,
        callbacks=[begin, SleepingEverywhere(), ModelCheckpoint(tmp_path, save_on_train_epoch_end=False)],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    SLEPT.clear()
    trainer.fit(Sleeping(manual=manual, validation=0.01, **SLEEPS), rows(6, seconds=0.02), rows(2))
    least = time.perf_counter() - begin.latest
    times = trainer.profiler.seconds()
    most = time.perf_counter() - begin.earliest
    assert tuple(times) == RUN_PARTS
    assert least - 1e-6 <= sum(times.values()) <= most + 1e-6
    assert {part for part in RUN_PARTS if SLEPT[part]} == set(RUN_PARTS) - {"waiting", "rest"}
    for part in RUN_PARTS:  # so that with the sum no part has what is another's
        assert SLEPT[part] <= times[part] + 1e-6, part


def test_actions_of_others_belong_to_what_they_are_nested_in(monkeypatch):
    clock = use_clock(monkeypatch, run_parts)
    parts = RunParts(idle=["[Callback]Idle.on_train_start"])
    step, idle = parts.profile("[Strategy]Single.training_step"), parts.profile("[Callback]Idle.on_train_start")
    with step, idle, parts.profile("my own"):
        clock.sleep(0.02)
    with suppress(ValueError), parts.profile("backward"):  # an error leaves nothing open
        parts.start("[LightningModule]M.on_before_backward")
        raise ValueError
    before = parts.seconds()
    parts.stop("never begun")
    clock.sleep(0.01)
    after = parts.seconds()
    assert before["forward"] >= 0.02 > before["callbacks"]
    assert after["rest"] - before["rest"] >= 0.01
    assert {part for part in RUN_PARTS if after[part] != before[part]} == {"rest"}
