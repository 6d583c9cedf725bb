"""How much better does a small classifier become when a larger one teaches it, for the same number of steps?

python benchmarks/bench_distillation.py [--quick] [--device cpu|cuda] [--seeds 3] [--steps 600] [--hidden 16]
    [--rows 0 50] [--weight 1] [--temperature 4] [--json FILE]

A convolutional teacher is trained on all handwritten digits for training, shifted by up to a pixel. Students,
perceptrons with one small hidden layer, are trained on all of these (0) or on the first ``rows``, not shifted, in the
same order from the same weights: by the labels alone; with ``Distillation``; and with a teacher that has learned
nothing, which shows what of a gain is the softening of labels alone. With few rows the teacher, which has seen all,
knows what they do not show; with all rows it has little to add, and a small student follows it more slowly than labels.

Accuracy is on the rows of validation and test, after the last step; means over the seeds, with the least and the
greatest difference to the first subject in a seed. Time is the process's CPU time of a fit.
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
from lightning_accel.callbacks.distillation.loss import divergence
from lightning_accel.data.in_memory import BatchTensorDataset

BASELINE = "labels alone"
ADAM = partial(torch.optim.AdamW, lr=3e-3)


class FirstRows(DigitsDataModule):
    """The first of the rows for training, or, with 0, all."""

    def __init__(self, rows: int) -> None:
        super().__init__(batch_size=64)
        self.rows = rows

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        if self.rows:
            self.train_rows = BatchTensorDataset(*self.train_rows[list(range(self.rows))])


def fit(
    module: L.LightningModule, data: DigitsDataModule, steps: int, device: str, seed: int, *callbacks: L.Callback
) -> tuple[float, float]:
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
    trainer.fit(module, data)
    seconds = time.process_time() - start
    judged = DigitsDataModule(batch_size=512)
    judged.setup()
    module = module.cpu().eval()
    with torch.no_grad():
        hits = [
            module(x).argmax(1).eq(target).float()
            for loader in (judged.val_dataloader(), judged.test_dataloader())
            for x, target in loader
        ]
    return torch.cat(hits).mean().item(), seconds


def teacher_of(seed: int) -> Classifier:
    L.seed_everything(seed, verbose=False)
    return Classifier(1, 10, channels=[32, 64, 64], hidden_dims=[64], optimizer=ADAM)


def check() -> None:
    """A wrong loss has no accuracy: that of a loop over rows and classes."""
    own, aim = torch.randn(3, 5, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    p, q = (aim / 2).softmax(1), (own / 2).softmax(1)
    total = sum(p[i, c] * (p[i, c] / q[i, c]).log() for i in range(3) for c in range(5))
    torch.testing.assert_close(divergence(own, aim, 2.0), total / 3 * 4)


def measure(
    seeds: int, steps: int, hidden: int, rows: list[int], options: dict[str, float], device: str
) -> list[dict[str, object]]:
    teacher, blank = teacher_of(100), teacher_of(101)
    accuracy, seconds = fit(teacher, DigitsDataModule(batch_size=64, max_shift=1), 800, device, 100)
    case = f"digits, {device}"
    table = [row(case, "teacher", "accuracy", accuracy, "", 0.0, 0.0), row(case, "teacher", "time", seconds, "s", 0, 0)]
    for number in rows:
        case = f"{number or 'all'} rows, {steps} steps, hidden_dims [{hidden}], {seeds} seeds, {device}"
        runs: dict[str, list[tuple[float, float]]] = {BASELINE: [], "Distillation": [], "untrained teacher": []}
        for seed in range(seeds):
            L.seed_everything(seed, verbose=False)
            student = Classifier(64, 10, hidden_dims=[hidden], optimizer=ADAM)
            taught: dict[str, list[L.Callback]] = {
                BASELINE: [],
                "Distillation": [Distillation(teacher, **options)],
                "untrained teacher": [Distillation(blank, **options)],
            }
            for name, callbacks in taught.items():
                result = fit(copy.deepcopy(student), FirstRows(number), steps, device, seed, *callbacks)
                runs[name].append(result)
        for name, results in runs.items():
            gains = [result[0] - base[0] for result, base in zip(results, runs[BASELINE], strict=True)]
            accuracy = statistics.mean(one for one, _ in results)
            table.append(row(case, name, "accuracy", accuracy, "", min(gains), max(gains)))
            table.append(row(case, name, "time", statistics.median(one for _, one in results), "s", 0.0, 0.0))
    return table


def row(
    case: str, subject: str, metric: str, value: float, unit: str, least: float, greatest: float
) -> dict[str, object]:
    names = "case", "subject", "metric", "value", "unit", "baseline", "least gain", "greatest gain"
    return dict(zip(names, (case, subject, metric, value, unit, BASELINE, least, greatest), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rows alone")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--rows", type=int, nargs="+", default=[0, 50])
    parser.add_argument("--weight", type=float, default=1.0)
    parser.add_argument("--temperature", type=float, default=4.0)
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    check()
    rows = [50] if arguments.quick else arguments.rows
    options = {"weight": arguments.weight, "temperature": arguments.temperature}
    table = measure(arguments.seeds, arguments.steps, arguments.hidden, rows, options, arguments.device)
    print(f"torch {torch.__version__}, {arguments.device}, {torch.get_num_threads()} threads, {options}\n")
    print("| case | subject | metric | value | least gain | greatest gain |\n| --- | --- | --- | ---: | ---: | ---: |")
    for one in table:
        gains = f"{one['least gain']:+.4f} | {one['greatest gain']:+.4f}" if one["metric"] == "accuracy" else "- | -"
        print(f"| {one['case']} | {one['subject']} | {one['metric']} | {one['value']:.4f} {one['unit']} | {gains} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
