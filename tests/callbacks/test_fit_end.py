"""What fails when training is over costs no fit, and leaves no process waiting."""

import threading
import warnings

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import RBM, MixtureOfExperts
from lightning_accel.callbacks import (
    CompressionReport,
    ExpertLoadMonitor,
    Export,
    PredictionWriter,
    Pruning,
    Quantization,
    RBMMonitor,
    RestoringEarlyStopping,
    SaveOnSignal,
)
from lightning_accel.callbacks.best_weights import BestWeights
from tests.ranks import run_ranks

ROWS = TensorDataset(torch.randn(12, 6, generator=torch.Generator().manual_seed(0)))


class Mixed(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.rbm = RBM(6, 3)
        self.mixture = MixtureOfExperts(6, 4, 3)
        self.net = nn.Linear(6, 2)

    def training_step(self, batch, batch_idx):
        return self.net(self.mixture(batch[0])[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


class Plain(Mixed):
    def __init__(self):
        L.LightningModule.__init__(self)
        self.net = nn.Linear(6, 2)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def on_train_end(self):
        self.lock = threading.Lock()


def trainer(folder, callbacks, **options):
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "log_every_n_steps": 1} | off | options
    return L.Trainer(callbacks=callbacks, default_root_dir=folder, **options)


def check_copies_that_fail(rank, folder):
    module = Plain()
    callbacks = [CompressionReport(), Export(compare=False), Quantization("dynamic")]
    run = trainer(folder, callbacks, strategy="ddp", devices=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.fit(module, DataLoader(ROWS, 3), DataLoader(ROWS, 3))
    (folder / "figures").unlink(missing_ok=True)
    (folder / "predictions.csv").mkdir(exist_ok=True)
    with pytest.raises((OSError, RuntimeError)) as caught:
        trainer(folder, [PredictionWriter()], strategy="ddp", devices=2).predict(module, DataLoader(ROWS, 3))
    return run.state.finished, [text for one in told if "copied" in (text := str(one.message))], str(caught.value)


@pytest.mark.slow
def test_copies_and_files_that_fail_in_the_first_process(tmp_path):
    (ended, told, wrong), (other_ended, nothing, other_wrong) = run_ranks(check_copies_that_fail, tmp_path)
    reason = "TypeError: Plain cannot be copied (TypeError: cannot pickle '_thread.lock' object), which is how"
    asked = ["CompressionReport failed", "Quantization failed, and the model is kept in float", "Export wrote no file"]
    assert ended
    assert other_ended
    assert not nothing
    assert [text.partition(f": {reason}")[::2][0] for text in told] == asked
    assert "Is a directory" in wrong
    assert other_wrong == f"the first process could not write predictions: IsADirectoryError: {wrong}"


def fails(*_, **__):
    raise OSError("No space left on device")


def test_pictures_tables_and_weights_that_fail(tmp_path, monkeypatch):
    (tmp_path / "figures").write_text("stands where the folder should")
    monkeypatch.setattr(BestWeights, "copy_to", fails)
    monkeypatch.setattr(Pruning, "report_rows", fails)
    monkeypatch.setattr(SaveOnSignal, "on_train_batch_end", lambda *_: None)
    monkeypatch.setattr(SaveOnSignal, "_remove_outdated", fails)
    pruning = Pruning(0.5, schedule="one_shot", begin=0)
    callbacks = [RBMMonitor(), ExpertLoadMonitor(), RestoringEarlyStopping("val/loss"), pruning, SaveOnSignal()]
    run = trainer(tmp_path, callbacks)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.fit(Mixed(), DataLoader(ROWS, 3), DataLoader(ROWS, 3))
    assert run.state.finished
    best = f"{callbacks[2].best_value:.6g}"
    full = "OSError: No space left on device"
    texts = [str(one.message).partition(": ") for one in told]
    assert {title for title, _, _ in texts} >= {"RBMMonitor drew no picture", "ExpertLoadMonitor drew no picture"}
    assert {title for title, _, reason in texts if reason == full} == {
        f"RestoringEarlyStopping could not restore the weights of step 4, the best by val/loss ({best})",
        "SaveOnSignal left a file that a later checkpoint replaces",
        "Pruning could not tell what is left of each layer",
    }
    assert not callbacks[1]._hooks
