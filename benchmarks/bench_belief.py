"""What do a second machine and rows without a class bring to a deep belief network?

python benchmarks/bench_belief.py [--parts depth labels] [--seeds N] [--quick] [--json FILE]

depth: binarised digits (scikit-learn's, above 0.5; 1400 rows train, the other 397 are held out), an RBM of 64 hidden
units, and a second one of 64 above the same: trained on means, on samples, and on samples with the weights of the first
one as a start. Held-out nats a row: the negative of the variational bound, and of a tighter one by importance weighting
(200 draws; Burda, Grosse and Salakhutdinov 2016). Of one RBM both are the negative log-likelihood. Partition functions
are annealed, in 2,000 steps with 500 chains; the width of their interval is told.

labels: accuracy of digits where few of 1400 rows have a class: DBNClassifier, which learns from all of them, and
scikit-learn's logistic regression and perceptron, which learn from those with a class, and LabelSpreading. Settings of
ours were chosen on other splits, in which 350 of the 1400 rows were held out for it.
"""

import argparse
import json
import logging
import math
import statistics
import warnings
from pathlib import Path
from time import process_time
from typing import Any

import lightning as L
import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from sklearn.semi_supervised import LabelSpreading
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_accel import DeepBeliefNetwork
from lightning_accel.data.in_memory import BatchTensorDataset, identity_collate
from lightning_accel.models import DBNClassifier, Stage
from lightning_accel.nn import RBMStack

SECOND = {
    "on means": Stage(epochs=60, lr=0.2, inputs="means"),
    "on samples": Stage(epochs=60, lr=0.2),
    "on samples, from below": Stage(epochs=60, lr=0.04, start_from_below=True),
}
SETTINGS: dict[str, Any] = {"preset": "density", "n_iter": 40, "dropout": 0.5, "finetune_learning_rate": 3.0}
NUM_LABELS = (20, 50, 100, 300, 1000)


def train(rows: Tensor, second: Stage, seed: int) -> RBMStack:
    torch.manual_seed(seed)
    network = DeepBeliefNetwork(64, [64, 64], [Stage(epochs=60, lr=0.5), second], minibatch_size=10)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(max_epochs=120, accelerator="cpu", enable_model_summary=False, **quiet)
    trainer.fit(network, DataLoader(BatchTensorDataset(rows), 350, shuffle=True, collate_fn=identity_collate))
    return network.built_stack


def judge(stack: RBMStack, rows: Tensor, num_draws: int = 200) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    log_z = stack.top.log_z("ais", num_chains=500, num_temperatures=2000, generator=generator)
    count = num_draws if len(stack.layers) > 1 else 1
    draws = torch.stack(
        [stack.log_prob_bound(rows, log_z, num_samples=1, generator=generator).estimate for _ in range(count)]
    )
    weighted = draws.logsumexp(dim=0) - math.log(count)
    return {
        "bound": -float(draws.mean()),
        "weighted": -float(weighted.mean()),
        "log_z": float(log_z.upper - log_z.lower),
    }


def depth(num_seeds: int) -> list[dict[str, Any]]:
    pixels = torch.tensor(load_digits().data / 16 > 0.5).float()
    pixels = pixels[np.random.RandomState(0).permutation(len(pixels))]
    rows = []
    for seed in range(num_seeds):
        for name, second in SECOND.items():
            stack = train(pixels[:1400], second, seed)
            if name == "on means":  # the first RBM is the same in all
                rows.append({"seed": seed, "second": "none", **judge(RBMStack(stack.layers[:1]), pixels[1400:])})
            rows.append({"seed": seed, "second": name, **judge(stack, pixels[1400:])})
    print("| second machine | bound, nats | importance-weighted, nats |\n| --- | ---: | ---: |")
    for name in ("none", *SECOND):
        mine = [row for row in rows if row["second"] == name]
        print(f"| {name} | {spread([row['bound'] for row in mine])} | {spread([row['weighted'] for row in mine])} |")
    print("widest interval of log Z:", round(max(row["log_z"] for row in rows), 2), flush=True)
    return rows


def spread(values: list[float], digits: int = 3) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return f"{statistics.mean(values):.{digits}f} +- {deviation / len(values) ** 0.5:.{digits}f}"


def labels(num_seeds: int) -> list[dict[str, Any]]:
    pixels, digits = load_digits(return_X_y=True)
    pixels, rows = (pixels / 16).astype(np.float32), []
    subjects = {
        "logistic regression": LogisticRegression(max_iter=1000),
        "MLPClassifier": MLPClassifier((256,), max_iter=500, random_state=0),
        "LabelSpreading": LabelSpreading(kernel="knn", n_neighbors=7),
        "DBNClassifier": DBNClassifier(unlabeled=-1, random_state=0, **SETTINGS),
    }
    for seed in range(num_seeds):
        order = np.random.RandomState(seed).permutation(len(pixels))
        train, test = order[:1400], order[1400:]
        first = [next(row for row in train if digits[row] == digit) for digit in range(10)]  # one of each at least
        others = [row for row in train if row not in set(first)]
        for count in NUM_LABELS:
            known = first + others[: count - 10]
            masked = np.where(np.isin(train, known), digits[train], -1)
            for name, subject in subjects.items():
                began = process_time()
                sees_all = name in ("LabelSpreading", "DBNClassifier")
                subject.fit(*((pixels[train], masked) if sees_all else (pixels[known], digits[known])))
                row = {"seed": seed, "labels": count, "subject": name, "seconds": process_time() - began}
                rows.append(row | {"accuracy": subject.score(pixels[test], digits[test])})
    print(f"| accuracy | {' | '.join(map(str, NUM_LABELS))} | seconds a fit |\n| --- |{' ---: |' * 6}")
    for name in subjects:
        mine = [row for row in rows if row["subject"] == name]
        cells = [spread([row["accuracy"] for row in mine if row["labels"] == count]) for count in NUM_LABELS]
        print(f"| {name} | {' | '.join(cells)} | {statistics.median(row['seconds'] for row in mine):.1f} |", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["depth", "labels"], choices=["depth", "labels"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one seed")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    parts = {"depth": depth, "labels": labels}
    found = {name: parts[name](1 if options.quick else options.seeds) for name in options.parts}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
