"""How much better does a small classifier become when a larger one teaches it, for the same number of steps?

python benchmarks/bench_distillation.py [--quick] [--device cpu|cuda] [--seeds 3] [--steps 600] [--hidden 16]
    [--json FILE]

A convolutional teacher is trained on handwritten digits that are shifted by up to a pixel; students, perceptrons with
one small hidden layer, are trained on the same batches in the same order from the same weights: by the labels alone,
with ``Distillation`` (temperature 4, weight 0.5), and with a teacher that has learned nothing, which shows what of the
gain is the softening of labels. Accuracy is on validation rows, after the last step; means over the seeds, with the
least and the greatest difference to the first subject in a seed. Time is the process's CPU time of a fit.
"""

import argparse
import copy
import json
import logging
import statistics
import time
import warnings
from functools import partial
from pathlib import Path

import lightning as L
import torch

from lightning_accel import Classifier, DigitsDataModule
from lightning_accel.callbacks import Distillation
from lightning_accel.callbacks.distillation_loss import divergence

BASELINE = "labels alone"
ADAM = partial(torch.optim.AdamW, lr=3e-3)


def fit(module: L.LightningModule, steps: int, device: str, seed: int, *callbacks: L.Callback) -> tuple[float, float]:
    """Accuracy in [0, 1] and CPU seconds."""
    L.seed_everything(seed, verbose=False)
    trainer = L.Trainer(
        accelerator=device,
        devices=1,
        callbacks=list(callbacks),
        max_steps=steps,
        limit_val_batches=0.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    start = time.process_time()
    trainer.fit(module, DigitsDataModule(batch_size=64, max_shift=1))
    seconds = time.process_time() - start
    judge = L.Trainer(accelerator=device, devices=1, logger=False, enable_progress_bar=False)
    (figures,) = judge.validate(module, DigitsDataModule(batch_size=512), verbose=False)
    return figures["val/accuracy"], seconds


def teacher_of(seed: int) -> Classifier:
    L.seed_everything(seed, verbose=False)
    return Classifier(1, 10, channels=[32, 64, 64], hidden_dims=[64], optimizer=ADAM)


def check() -> None:
    """A wrong loss has no accuracy: that of a loop over rows and classes."""
    own, aim = torch.randn(3, 5, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    p, q = (aim / 2).softmax(1), (own / 2).softmax(1)
    total = sum(p[i, c] * (p[i, c] / q[i, c]).log() for i in range(3) for c in range(5))
    torch.testing.assert_close(divergence(own, aim, 2.0), total / 3 * 4)


def measure(seeds: int, steps: int, hidden: int, device: str) -> list[dict[str, object]]:
    teacher, blank = teacher_of(100), teacher_of(101)
    figure, seconds = fit(teacher, 2 * steps, device, 100)
    case = f"digits, {steps} steps, hidden_dims [{hidden}], {seeds} seeds, {device}"
    rows = [
        row(case, "teacher", "accuracy", figure, "", 0.0, 0.0),
        row(case, "teacher", "time", seconds, "s", 0.0, 0.0),
    ]
    runs: dict[str, list[tuple[float, float]]] = {BASELINE: [], "Distillation": [], "untrained teacher": []}
    for seed in range(seeds):
        L.seed_everything(seed, verbose=False)
        student = Classifier(64, 10, hidden_dims=[hidden], optimizer=ADAM)
        taught = {BASELINE: [], "Distillation": [Distillation(teacher)], "untrained teacher": [Distillation(blank)]}
        for name, callbacks in taught.items():
            runs[name].append(fit(copy.deepcopy(student), steps, device, seed, *callbacks))
    for name, results in runs.items():
        gains = [result[0] - base[0] for result, base in zip(results, runs[BASELINE], strict=True)]
        rows.append(row(case, name, "accuracy", statistics.mean(one for one, _ in results), "", min(gains), max(gains)))
        rows.append(row(case, name, "time", statistics.median(one for _, one in results), "s", 0.0, 0.0))
    return rows


def row(
    case: str, subject: str, metric: str, value: float, unit: str, least: float, greatest: float
) -> dict[str, object]:
    names = "case", "subject", "metric", "value", "unit", "baseline", "least gain", "greatest gain"
    return dict(zip(names, (case, subject, metric, value, unit, BASELINE, least, greatest), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="200 steps")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    check()
    steps = 200 if arguments.quick else arguments.steps
    rows = measure(arguments.seeds, steps, arguments.hidden, arguments.device)
    print(f"torch {torch.__version__}, {arguments.device}, {torch.get_num_threads()} threads\n{rows[0]['case']}\n")
    print("| subject | metric | value | least gain | greatest gain |\n| --- | --- | ---: | ---: | ---: |")
    for one in rows:
        gains = f"{one['least gain']:+.4f} | {one['greatest gain']:+.4f}" if one["metric"] == "accuracy" else "- | -"
        print(f"| {one['subject']} | {one['metric']} | {one['value']:.4f} {one['unit']} | {gains} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
