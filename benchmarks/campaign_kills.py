"""Runs that are killed at random moments and go on, held against runs that were not."""

import csv
import random
import shutil
import signal
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from campaign_process import end, output, start_ranks, wait

from lightning_accel.strategies.checkpoints.io import newest_checkpoint

CONFIGS = Path(__file__).parents[1] / "configs"
KILLS_OF_A_RUN = 5
TIME_LIMIT_S = 240
_COMMAND = ["fit", "--config", "config.yaml", "--ckpt_path", "auto"]
_PLATEAU = {"class_path": "lightning.pytorch.cli.ReduceLROnPlateau"}
_STOPPING = "lightning_accel.RestoringEarlyStopping"


class Subject(NamedTuple):
    """A run: a config of this repository, made shorter."""

    config: str
    trainer: Mapping[str, Any] = {}
    model: Mapping[str, Any] = {}
    data: Mapping[str, Any] = {}
    plateau: str = ""  # what a ReduceLROnPlateau in place of the config's schedule monitors
    stop_by: str = ""  # what an EarlyStopping monitors
    strategy: str = "auto"
    world_size: int = 1
    every_n_steps: int = 3  # between checkpoints
    without: tuple[str, ...] = ()  # callbacks that are left out


_DIGITS = {"max_epochs": 3, "limit_train_batches": 12, "limit_val_batches": 3, "log_every_n_steps": 3}
_STEPS = {"max_steps": 30, "limit_train_batches": 10, "limit_val_batches": 3, "log_every_n_steps": 3}
SUBJECTS: dict[str, Subject] = {
    "experts": Subject("moe_digits", _DIGITS),
    "experts, plateau of val/loss": Subject("moe_digits", _DIGITS, plateau="val/loss"),
    "experts, plateau of train/accuracy": Subject("moe_digits", _DIGITS, plateau="train/accuracy"),
    "experts, accumulated, stopped early": Subject(
        "moe_digits", {**_DIGITS, "accumulate_grad_batches": 2, "max_epochs": 5}, stop_by="val/loss", every_n_steps=2
    ),
    "experts, validated within epochs": Subject("moe_digits", {**_DIGITS, "val_check_interval": 5}, every_n_steps=4),
    "recurrent": Subject("rnn_digits", _STEPS, {"layers": {"bidirectional": True, "hidden_dim": 16}}),
    "recurrent, adding": Subject(
        "rnn_adding", _STEPS, {"layers": {"cell": "lstm", "hidden_dim": 8}},
        {"generated": {"num_sequences": 800, "length": 20}}),
    "recurrent, lines": Subject("rnn_jsonl", {**_DIGITS, "max_epochs": 2}, {"layers": {"hidden_dim": 16}}),
    "graphs": Subject(
        "relational_csl", {**_STEPS, "check_val_every_n_epoch": 2},
        {"layers": {"conv": "GINConv", "num_layers": 2, "dim": 8}}, every_n_steps=4,
    ),
    "graphs, counting": Subject(
        "relational_counting", {**_STEPS, "check_val_every_n_epoch": 1}, {"layers": {"num_layers": 0, "dim": 8}},
        {"layout": {"target": ["triangle"]}},
    ),
    "belief network": Subject(
        "dbn_digits", {**_DIGITS, "max_epochs": 6, "check_val_every_n_epoch": 1, "limit_train_batches": 6},
        {"hidden_dims": [24, 16], "stages": [{"epochs": 2}, {"epochs": 2, "sampler": "pcd"}],
         "fine_tuning": {"method": "classifier", "epochs": 2}},
        without=("RBMMonitor",),
    ),
    "language model": Subject(
        "moe_lm", {**_STEPS, "max_steps": 16, "val_check_interval": 5},
        {"num_layers": 1, "dim": 32, "experts": {"hidden_dim": 16, "balance_weight": 0.0}},
        {"batch_size": 4, "prompts": []}, without=("PredictionWriter",),
    ),
    "masks": Subject("compress_mlp", {**_DIGITS, "max_epochs": 4}, {"hidden_dims": [24, 16]}),
    "channels": Subject(
        "compress_cnn", {**_DIGITS, "max_epochs": 4}, {"channels": [8, 16], "hidden_dims": [16]},
        without=("Quantization", "Export"),
    ),
    "experts, ddp": Subject("moe_digits", _DIGITS, strategy="accel_ddp", world_size=2),
    "experts, ddp, plateau": Subject(
        "moe_digits", _DIGITS, plateau="train/accuracy", strategy="accel_ddp", world_size=2
    ),
    "recurrent, fsdp2": Subject(
        "rnn_digits", _STEPS, {"layers": {"bidirectional": True, "hidden_dim": 16}}, strategy="accel_fsdp2",
        world_size=2,
    ),
    "perceptron, pipeline": Subject(
        "compress_mlp", {**_DIGITS, "max_epochs": 2}, {"hidden_dims": [24, 16]}, strategy="accel_pipeline",
        world_size=2, without=("Pruning", "Distillation", "RestoringEarlyStopping"),
    ),
}  # fmt: skip


def config_of(subject: Subject) -> dict[str, Any]:
    """Return the config that ``subject`` runs with."""
    config: dict[str, Any] = yaml.safe_load((CONFIGS / f"{subject.config}.yaml").read_text())
    trainer = config["trainer"]
    trainer.update(
        subject.trainer, accelerator="cpu", devices=subject.world_size, strategy=subject.strategy,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=1,
    )  # fmt: skip
    trainer["logger"] = [each for each in trainer["logger"] if "CSVLogger" in each["class_path"]]
    config["model"]["init_args"].update(subject.model)
    config["data"]["init_args"].update(subject.data)
    if subject.plateau:
        mode = "max" if "accuracy" in subject.plateau else "min"
        options = {"monitor": subject.plateau, "patience": 0, "factor": 0.3, "threshold": 0.3, "mode": mode}
        config["lr_scheduler"] = {**_PLATEAU, "init_args": options}
        config["lr_interval"] = "epoch"
    elif "lr_scheduler" in config:
        options = config["lr_scheduler"]["init_args"]
        if "epochs" in options:
            options["epochs"] = trainer["max_epochs"]
        else:
            options["total_steps"] = trainer["max_steps"]
    callbacks = [one for one in trainer["callbacks"] if one["class_path"].rpartition(".")[2] not in subject.without]
    if subject.stop_by:
        callbacks.append({"class_path": _STOPPING, "init_args": {"monitor": subject.stop_by, "patience": 1}})
    every = {"every_n_train_steps": subject.every_n_steps, "save_last": True, "dirpath": "kept", "filename": "{step}"}
    callbacks.append({"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": every})
    names = [one["class_path"].rpartition(".")[2] for one in callbacks]
    callbacks += [
        {"class_path": f"lightning_accel.{name}"} for name in ("ExactResume", "SaveOnSignal") if name not in names
    ]
    trainer["callbacks"] = [*callbacks, {"class_path": "campaign_process.Started"}]
    return config


class Outcome(NamedTuple):
    kills: int
    failures: list[str]
    others: list[str]  # differences that are neither of weights nor of logged figures


def kill_and_compare(
    context: Any, folder: Path, subject: Subject, whole: Path, kills: int, draw: random.Random
) -> Outcome:
    """Kill a run up to ``kills`` times, let it end, and hold it against the one in ``whole``."""
    prepare(folder, subject)
    duration = float((whole / "seconds").read_text())
    failures: list[str] = []
    done, newest = 0, -1
    while True:
        (folder / "started").unlink(missing_ok=True)
        processes = start_ranks(context, folder, _COMMAND, subject.world_size)
        is_killed = done < kills and _reach(processes, folder, draw.uniform(0, 0.9 * duration))
        if is_killed:
            number = signal.SIGTERM if draw.random() < 0.2 else signal.SIGKILL
            end([draw.choice(processes)] if draw.random() < 0.3 else processes, number)
            if not wait(processes, TIME_LIMIT_S):
                failures.append(f"a process outlived signal {number} of another by {TIME_LIMIT_S} s")
                end(processes)
                wait(processes, 10)
            done += 1
            failures += damaged(folder)
            if (step := step_of(folder)) < newest:
                failures.append(f"checkpoint of step {newest} was lost; the newest is of {step}")
            newest = max(newest, step)
        elif not wait(processes, TIME_LIMIT_S):
            end(processes)
            return Outcome(done, [*failures, f"no end within {TIME_LIMIT_S} s: {output(folder)[-1000:]}"], [])
        if all(process.exitcode == 0 for process in processes):
            break
        if not is_killed:
            return Outcome(done, [*failures, f"ended with an error: {output(folder)[-1500:]}"], [])
    differences, others = differences_of(folder, whole)
    return Outcome(done, failures + differences, others)


def prepare(folder: Path, subject: Subject) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config_of(subject)))


def run_whole(context: Any, folder: Path, subject: Subject) -> None:
    """Run ``subject`` undisturbed, and write down how long its training took."""
    prepare(folder, subject)
    processes = start_ranks(context, folder, _COMMAND, subject.world_size)
    while not (folder / "started").exists() and any(process.is_alive() for process in processes):
        time.sleep(0.01)
    began = time.monotonic()
    if not wait(processes, TIME_LIMIT_S) or any(process.exitcode for process in processes):
        end(processes)
        raise RuntimeError(f"{subject} does not run:\n{output(folder)[-2000:]}")
    (folder / "seconds").write_text(str(time.monotonic() - began))


def _reach(processes: list[Any], folder: Path, seconds: float) -> bool:
    """Wait until ``seconds`` of training have passed; False if a process has ended by itself."""
    deadline = time.monotonic() + TIME_LIMIT_S
    while not (folder / "started").exists() and time.monotonic() < deadline:
        if not all(process.is_alive() for process in processes):
            return False
        time.sleep(0.01)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not all(process.is_alive() for process in processes):
            return False
        time.sleep(0.005)
    return True


def _checkpoints(folder: Path) -> Iterator[Path]:
    yield from (path for path in folder.rglob("*.ckpt") if not path.name.startswith("."))


def damaged(folder: Path) -> list[str]:
    found = []
    for path in _checkpoints(folder):
        try:
            with zipfile.ZipFile(path) as archive:
                if (name := archive.testzip()) is not None:
                    found.append(f"{path.name}: {name} is damaged")
        except (zipfile.BadZipFile, OSError) as error:
            found.append(f"{path.name}: {error}")
    return found


def step_of(folder: Path) -> int:
    newest = newest_checkpoint([folder / "kept", *folder.glob("signal-step=*.ckpt")])
    return -1 if newest is None else int(torch.load(newest, weights_only=True)["global_step"])


def logged_figures(folder: Path) -> tuple[dict[tuple[str, str], str], list[str]]:
    """Return the value of each step and figure in all metrics files, and those that were logged with two values."""
    found: dict[tuple[str, str], str] = {}
    twice: list[str] = []
    for path in sorted(folder.rglob("metrics*.csv"), key=lambda path: path.stat().st_mtime):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                for key, value in row.items():
                    if not value or key in ("step", None):
                        continue
                    if found.get((row["step"], key), value) != value:
                        twice.append(f"{key} of step {row['step']}: {found[row['step'], key]} and {value}")
                    found[row["step"], key] = value
    return found, twice


def differences_of(folder: Path, whole: Path) -> tuple[list[str], list[str]]:
    ours, theirs = (torch.load(each / "kept/last.ckpt", weights_only=True) for each in (folder, whole))
    wrong, other = [], []
    for key in theirs:
        found = list(differing(ours.get(key), theirs[key], key))
        if key in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"):
            wrong += found
        else:
            other += found
    figures, twice = logged_figures(folder)
    expected, _ = logged_figures(whole)
    wrong += [f"two values of {each}" for each in twice]
    for place in sorted(set(figures) | set(expected)):
        if figures.get(place) != expected.get(place):
            wrong.append(f"{place[1]} of step {place[0]} is {figures.get(place)}, not {expected.get(place)}")
    return wrong, other


def differing(ours: Any, theirs: Any, name: str) -> Iterator[str]:
    """Yield the places at which two nested values differ."""
    if isinstance(theirs, torch.Tensor):
        same = isinstance(ours, torch.Tensor) and ours.shape == theirs.shape and ours.dtype == theirs.dtype
        if not same or not torch.allclose(ours, theirs, rtol=0, atol=0, equal_nan=True):
            yield name
    elif isinstance(theirs, dict) and isinstance(ours, dict):
        for key in {**theirs, **ours}:
            yield from differing(ours.get(key), theirs.get(key), f"{name}.{key}")
    elif isinstance(theirs, list | tuple) and isinstance(ours, list | tuple) and len(ours) == len(theirs):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differing(one, other, f"{name}.{number}")
    elif isinstance(theirs, str) and "/" in theirs and isinstance(ours, str):
        if Path(ours).name != Path(theirs).name:  # the folder is another
            yield f"{name}: {Path(ours).name} for {Path(theirs).name}"
    elif ours != theirs and not (ours != ours and theirs != theirs):  # NaN
        yield f"{name}: {ours!r:.80} for {theirs!r:.80}"
