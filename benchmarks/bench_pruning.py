"""How good is a model with few weights left, by schedule and scope, and what does pruning cost a step?

python benchmarks/bench_pruning.py [--quick] [--seeds N] [--epochs N] [--json FILE]

The digits of scikit-learn, a perceptron of three hidden layers of 1024 and three convolutions of 64, 128 and 256
channels, 8 epochs of 20 steps with AdamW, test accuracy of the last weights, mean (and lowest) over seeds; what is
sparse is counted in the weights. ``ModelPruning`` is Lightning's, with its defaults (by which the amount compounds and
weights go back to their first values in each epoch), and set so that it ends at the same sparsity: no lottery, and an
amount of what is left in each of the first five epochs. One thread, one process; a step's time is the process's CPU
time, of runs that alternate.
"""

import argparse
import itertools
import json
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelPruning
from torch import nn

from lightning_accel import Classifier, DigitsDataModule
from lightning_accel.callbacks import Pruning

CASES = {"mlp": [0.95], "cnn": [0.95, 0.98]}
Made = tuple[list[L.Callback], float]  # callbacks and learning rate


def lightnings(target: float, lr: float) -> Made:
    """Prunes a share of what is left in each of five epochs, and keeps what lives as it is."""
    amount = 1 - (1 - target) ** (1 / 5)
    options = {"apply_pruning": lambda epoch: epoch < 5, "use_lottery_ticket_hypothesis": False}
    return [ModelPruning("l1_unstructured", parameter_names=["weight"], amount=amount, **options)], lr


def ours(target: float, lr: float, **options: Any) -> Made:
    return [Pruning(target, **options)], lr


SUBJECTS: dict[str, Callable[[float], Made]] = {
    "dense": lambda target: ([], 1e-3),
    "ModelPruning, defaults": lambda target: ([ModelPruning("l1_unstructured")], 1e-3),
    "ModelPruning, to the target": partial(lightnings, lr=1e-3),
    "one shot, layer": partial(ours, lr=1e-3, schedule="one_shot", begin=0.6, scope="layer"),
    "one shot, erk": partial(ours, lr=1e-3, schedule="one_shot", begin=0.6),
    "cubic, layer": partial(ours, lr=1e-3, scope="layer"),
    "cubic, global": partial(ours, lr=1e-3, scope="global"),
    "cubic, erk (default)": partial(ours, lr=1e-3),
    "cubic, erk, lr 3e-3": partial(ours, lr=3e-3),
    "RigL, erk, sparse from the start": partial(ours, lr=1e-3, schedule="one_shot", regrowth="rigl", end=0.75),
}
QUICK = "dense", "ModelPruning, to the target", "cubic, erk (default)"


def make(kind: str, lr: float) -> Classifier:
    optimizer = partial(torch.optim.AdamW, lr=lr)
    if kind == "mlp":
        return Classifier(64, 10, hidden_dims=[1024, 1024, 1024], optimizer=optimizer)
    return Classifier(1, 10, channels=[64, 128, 256], hidden_dims=[256], optimizer=optimizer)


def trained(kind: str, callbacks: list[L.Callback], lr: float, seed: int, epochs: int, **options: Any) -> Any:
    L.seed_everything(seed, verbose=False)
    module = make(kind, lr)
    trainer = L.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, limit_val_batches=0, callbacks=callbacks, **options,
    )  # fmt: skip
    trainer.fit(module, DigitsDataModule())
    return trainer, module


def sparsity(module: nn.Module) -> float:
    """By counting the zeros."""
    weights = [one.weight for one in module.modules() if isinstance(one, nn.Linear | nn.Conv2d)]
    return sum(int((one == 0).sum()) for one in weights) / sum(one.numel() for one in weights)


def accuracy_rows(kind: str, target: float, subjects: list[str], seeds: int, epochs: int) -> list[dict[str, Any]]:
    rows = []
    base = 0.0
    for subject in subjects:
        found, shares = [], []
        for seed in range(seeds):
            callbacks, lr = SUBJECTS[subject](target)
            trainer, module = trained(kind, callbacks, lr, seed, epochs)
            shares.append(sparsity(module))
            figures = trainer.test(module, DigitsDataModule(), verbose=False)
            found.append(figures[0]["test/accuracy"])
            if isinstance(callbacks[-1:] and callbacks[0], Pruning):
                assert abs(shares[-1] - target) < 1e-3, "the target was not met"
        mean = statistics.mean(found)
        base = base or mean
        case = f"{kind} {target}"
        for metric, value, ratio in (
            ("accuracy", mean, mean / base), ("lowest accuracy", min(found), min(found) / base),
            ("sparsity", statistics.mean(shares), 1.0),
        ):  # fmt: skip
            rows.append(row(case, subject, metric, value, "share", ratio))
        print(f"| {case} | {subject} | {mean:.3f} | {min(found):.3f} | {statistics.mean(shares):.4f} |", flush=True)
    return rows


class StepTimes(L.Callback):
    """CPU time from the start of one batch to that of the next, callbacks included."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, *_: object) -> None:
        self.starts.append(time.process_time())


def time_rows(kind: str, rounds: int) -> list[dict[str, Any]]:
    subjects = {
        "dense": list,
        "masks kept": lambda: [Pruning(0.95, schedule="one_shot", begin=0)],
        "masks changed in each step": lambda: [Pruning(0.95, begin=0, end=40, every_n_steps=1)],
    }
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, made in subjects.items():
            clock = StepTimes()
            trained(kind, [*made(), clock], 1e-3, 0, 2)
            starts = clock.starts[2:20] + clock.starts[22:]
            times[name] += [after - before for before, after in itertools.pairwise(starts)]
    base = statistics.median(times["dense"])
    rows = []
    for name, values in times.items():
        value = statistics.median(values)
        rows.append(row(kind, name, "step", value * 1e3, "ms", value / base))
        print(f"| {kind} | {name} | {value * 1e3:.1f} | {value / base:.2f} |", flush=True)
    return rows


def row(case: str, subject: str, metric: str, value: float, unit: str, ratio: float) -> dict[str, Any]:
    names = "case", "subject", "metric", "value", "unit", "baseline", "ratio"
    return dict(zip(names, (case, subject, metric, value, unit, "dense", ratio), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed of three subjects, and of the CNN at 0.98 alone")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print(f"torch {torch.__version__}, lightning {L.__version__}, cpu, 1 thread\n")
    print("| case | subject | accuracy | lowest | sparsity |\n| --- | --- | --: | --: | --: |", flush=True)
    rows = []
    for kind, targets in CASES.items():
        for target in targets[-1:] if arguments.quick else targets:
            chosen = list(QUICK if arguments.quick else SUBJECTS)
            rows += accuracy_rows(kind, target, chosen, 1 if arguments.quick else arguments.seeds, arguments.epochs)
    print("\n| case | subject | ms a step | ratio |\n| --- | --- | --: | --: |", flush=True)
    for kind in CASES:
        rows += time_rows(kind, 1 if arguments.quick else 3)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
