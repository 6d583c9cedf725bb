import os
import signal
import threading

import lightning as L
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_accel.callbacks import SaveOnSignal


class Sends(L.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 4:
            os.kill(os.getpid(), signal.SIGTERM)


def trainer(folder, *callbacks, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        default_root_dir=folder,
        callbacks=list(callbacks),
        **{**quiet, "limit_val_batches": 0, **options},
    )


@pytest.mark.parametrize(("accumulated", "step"), [(1, 5), (2, 3), (3, 2)])
def test_saves_after_the_optimizer_step_and_ends(tmp_path, accumulated, step, caplog):
    caplog.set_level("INFO")
    before = signal.getsignal(signal.SIGTERM)
    run = trainer(tmp_path, Sends(), SaveOnSignal(), accumulate_grad_batches=accumulated, enable_checkpointing=False)
    with pytest.raises(SystemExit) as stop:
        run.fit(BoringModel())
    assert stop.value.code == 143
    assert "weights_only" not in caplog.text
    assert [path.name for path in tmp_path.glob("*.ckpt")] == [f"signal-step={step}.ckpt"]
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("batch", [0, 1])
def test_a_signal_in_the_sanity_check_is_obeyed_after_the_first_step(tmp_path, batch):
    class SendsEarlier(L.Callback):
        def on_validation_batch_start(self, trainer, pl_module, _, batch_idx):
            if batch_idx == batch:
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    run = trainer(
        tmp_path,
        SendsEarlier(),
        SaveOnSignal(),
        enable_checkpointing=False,
        limit_val_batches=3,
        num_sanity_val_steps=2,
    )
    with pytest.raises(SystemExit) as stop:
        run.fit(BoringModel())
    assert stop.value.code == 143
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["signal-step=1.ckpt"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_run_in_a_thread_says_that_signals_do_not_reach_it(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    run = trainer(tmp_path, SaveOnSignal(), enable_checkpointing=False, max_steps=1)

    def fit_in_thread():
        thread = threading.Thread(target=run.fit, args=(BoringModel(),))
        thread.start()
        thread.join()

    with pytest.warns(UserWarning, match="SaveOnSignal does nothing in this run: it trains in a thread"):
        fit_in_thread()
    assert run.global_step == 1
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps must be at least 1; got 0"),
        ({"stop_signals": ("USR1",)}, "such as SIGUSR1; got 'USR1'"),
    ],
)
def test_wrong_arguments_are_told(options, message):
    with pytest.raises(ValueError, match=message):
        SaveOnSignal(**options)
