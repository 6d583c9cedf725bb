"""What does a training step cost under the Trainer, against a bare loop over the same model, data and optimizer?

python benchmarks/bench_fit_loop.py [--quick] [--device cpu|cuda] [--json FILE]

Subjects are interleaved in one process; a step is the median epoch's time over its steps, forward, backward, optimizer
and data loading included, validation left out.
"""

import argparse
import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import DigitsDataModule, MoEClassifier

BATCH_SIZE = 64


class EpochTimer(L.Callback):
    """Seconds that each epoch takes; the first one, which warms up, is left out."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.start = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        _synchronize(pl_module.device)
        if trainer.current_epoch > 0:
            self.seconds.append(time.perf_counter() - self.start)


class LogEveryStep(MoEClassifier):
    """The plain way to write the same training step: torchmetrics and ``self.log`` for every figure at every step."""

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, target = batch
        logits, report = self(x)
        loss = F.cross_entropy(logits, target)
        self.train_accuracy(logits, target)
        self.log("train/accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/balance_loss", report.balance_loss)
        load = report.expert_counts / report.expert_counts.sum()
        self.log_dict({f"train/expert_load_{e}": share for e, share in enumerate(load)}, on_step=False, on_epoch=True)
        return loss + self.auxiliary_loss(report)

    def on_train_epoch_end(self) -> None:
        pass


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _digits() -> DigitsDataModule:
    data = DigitsDataModule(BATCH_SIZE)
    data.setup()
    return data


def bare_loop(
    loader: DataLoader, epochs: int, device: torch.device, fused: bool = False
) -> tuple[list[float], MoEClassifier]:
    """Seconds of each epoch but the first, and the trained model."""
    torch.manual_seed(0)
    model = MoEClassifier(64, 10).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused or None)
    model.expert_load.start()
    seconds = []
    for _ in range(epochs):
        start = time.perf_counter()
        for x, target in loader:
            logits, report = model(x.to(device, non_blocking=True))
            loss = F.cross_entropy(logits, target.to(device, non_blocking=True)) + model.auxiliary_loss(report)
            optimizer.zero_grad()
            loss.backward()
            model.expert_load.step()
            optimizer.step()
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds[1:], model


def fitted(
    module: type[MoEClassifier], epochs: int, device: torch.device, callbacks: list[L.Callback] | None = None, **kwargs
) -> tuple[list[float], MoEClassifier]:
    """The same from a Trainer with arguments ``kwargs``."""
    torch.manual_seed(0)
    model, timer = module(64, 10), EpochTimer()
    quiet = {"log_every_n_steps": 10, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    if kwargs.get("barebones"):
        quiet, kwargs = {}, {"barebones": True}
    trainer = L.Trainer(
        accelerator=device.type,
        devices=1,
        max_epochs=epochs,
        limit_val_batches=0,
        callbacks=[timer, *(callbacks or [])],
        **{**quiet, "enable_model_summary": False, **kwargs},
    )
    trainer.fit(model, train_dataloaders=_digits().train_dataloader())
    return timer.seconds, model


def whole_run(epochs: int, device: torch.device) -> tuple[list[float], MoEClassifier]:
    """With loggers, checkpoints of the best epoch and a progress bar."""
    with tempfile.TemporaryDirectory() as folder:
        return fitted(
            MoEClassifier,
            epochs,
            device,
            callbacks=[ModelCheckpoint(monitor="train/accuracy", mode="max"), RichProgressBar()],
            logger=[CSVLogger(folder), TensorBoardLogger(folder)],
            enable_checkpointing=True,
            enable_progress_bar=True,
        )


def loader_alone(loader: DataLoader, epochs: int) -> tuple[list[float], None]:
    """Seconds of each epoch that does nothing with its batches."""
    seconds = []
    for _ in range(epochs):
        start = time.perf_counter()
        for _ in loader:
            pass
        seconds.append(time.perf_counter() - start)
    return seconds, None


def rows_one_by_one() -> DataLoader:
    """The usual TensorDataset, whose rows the DataLoader collates one by one."""
    return DataLoader(TensorDataset(*_digits().train_rows.tensors), batch_size=BATCH_SIZE, shuffle=True)


Subject = Callable[[int], tuple[list[float], MoEClassifier | None]]


def subjects(device: torch.device) -> dict[str, dict[str, Subject]]:
    """For each case its subjects, the baseline first."""
    loader, plain = _digits().train_dataloader(), rows_one_by_one()
    return {
        "step": {
            "bare loop": lambda epochs: bare_loop(loader, epochs, device),
            "bare loop, rows collated one by one": lambda epochs: bare_loop(plain, epochs, device),
            "bare loop, fused AdamW": lambda epochs: bare_loop(loader, epochs, device, fused=True),
            "Trainer, barebones": lambda epochs: fitted(MoEClassifier, epochs, device, barebones=True),
            "Trainer, our logging": lambda epochs: fitted(MoEClassifier, epochs, device),
            "Trainer, every figure logged at every step": lambda epochs: fitted(LogEveryStep, epochs, device),
            "Trainer, our logging, loggers, progress bar, checkpoints": lambda epochs: whole_run(epochs, device),
        },
        "batch": {
            "BatchTensorDataset": lambda epochs: loader_alone(loader, epochs),
            "TensorDataset, rows collated one by one": lambda epochs: loader_alone(plain, epochs),
        },
    }


def check_equal_weights(device: torch.device) -> None:
    """A loop that trains another model has no speed."""
    _, ours = fitted(MoEClassifier, 2, device)
    _, bare = bare_loop(_digits().train_dataloader(), 2, device)
    for (name, actual), (_, expected) in zip(
        ours.to(device).state_dict().items(), bare.state_dict().items(), strict=True
    ):
        torch.testing.assert_close(actual, expected, msg=lambda message, name=name: f"{name}: {message}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rounds in place of nine")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    check_equal_weights(device)

    steps = -(-len(_digits().train_rows) // BATCH_SIZE)
    cases = subjects(device)
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in range(2 if arguments.quick else 9):
        for case, named in cases.items():
            for name, subject in named.items():
                epochs, _ = subject(4)
                seconds.setdefault((case, name), []).extend(epochs)
    microseconds = {key: statistics.median(epochs) / steps * 1e6 for key, epochs in seconds.items()}
    rows = [
        {
            "case": case,
            "subject": name,
            "metric": "time",
            "value": value,
            "unit": "us",
            "baseline": (baseline := next(iter(cases[case]))),
            "ratio": value / microseconds[case, baseline],
        }
        for (case, name), value in microseconds.items()
    ]
    print(
        f"\nMoEClassifier on digits, batch {BATCH_SIZE}; torch {torch.__version__}, lightning {L.__version__}, ", end=""
    )
    print(f"{device.type}, {torch.get_num_threads()} threads\n")
    print("| time of a | subject | us | ratio to the first |\n| --- | --- | ---: | ---: |")
    for row in rows:
        print(f"| {row['case']} | {row['subject']} | {row['value']:.0f} | {row['ratio']:.2f} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
