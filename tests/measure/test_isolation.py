"""Fits that leave nothing in the user's folders, and validate on a few batches."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, Logger

from lightning_accel.callbacks import RunReport
from lightning_accel.measure.isolation import isolate


class Server(Logger):
    """Stand for a logger whose files are elsewhere."""

    name, version, sent = "server", "1", 0

    def log_metrics(self, metrics, step=None):
        self.sent += 1

    def log_hyperparams(self, params, *args, **kwargs):
        self.sent += 1


class Counting(BoringModel):
    validated = 0

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)["loss"]
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.validated += 1


def fit(folder, **options):
    server = Server()
    loggers = [CSVLogger(folder / "users"), server]
    options = {"limit_train_batches": 4, "log_every_n_steps": 1, "num_sanity_val_steps": 2} | options
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", default_root_dir=folder / "users", logger=loggers,
        callbacks=[ModelCheckpoint(), RunReport()],
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    isolate(trainer, folder / "own", max_val_batches=2)
    module = Counting()
    trainer.fit(module)
    return module, server


def test_files_go_to_the_folder_alone(tmp_path):
    _, server = fit(tmp_path)
    assert not (tmp_path / "users").exists()
    assert server.sent == 0
    assert list((tmp_path / "own").rglob("metrics.csv"))
    assert not [*tmp_path.rglob("*.ckpt"), *tmp_path.rglob("run_report*")]


@pytest.mark.parametrize(
    ("options", "validated"),
    [
        ({}, 2 + 2),  # all of the data, which is 1.0: a share, not a number of batches
        ({"limit_val_batches": 0.5, "num_sanity_val_steps": -1}, 2 + 2),
        ({"limit_val_batches": 5, "num_sanity_val_steps": 1}, 1 + 2),
        ({"limit_val_batches": 1, "num_sanity_val_steps": 0}, 1),
        ({"limit_val_batches": 0}, 0),
    ],
)
def test_validation_is_of_a_few_batches(tmp_path, options, validated):
    torch.manual_seed(0)
    assert fit(tmp_path, **options)[0].validated == validated
