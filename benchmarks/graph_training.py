"""Train networks of graphs for equal times on a CPU, and compare their absolute errors."""

import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import torch_geometric
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

BATCH = 64
RATES = (1e-3, 3e-3)


class Split(NamedTuple):
    """Hold graphs with a target of unit variance each."""

    train: list[Data]
    val: list[Data]
    test: list[Data]


class Trained(NamedTuple):
    val: float  # mean absolute errors in standard deviations
    test: float
    epochs: float


def compare(
    case: str,
    subjects: Mapping[str, Callable[[], nn.Module]],
    baseline: str,
    data: Split,
    seeds: int,
    seconds: float,
    json_path: Path | None,
) -> None:
    """Train each subject with the better of two learning rates by validation graphs; print and write test errors."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch_geometric")
    print(f"torch {torch.__version__}, torch_geometric {torch_geometric.__version__}, cpu, 1 thread", flush=True)
    rates = {
        name: min(RATES, key=lambda rate: train(subjects[name], data, rate, 100, seconds).val) for name in subjects
    }
    found: dict[str, list[Trained]] = {name: [] for name in subjects}
    for seed in range(seeds):
        for name, values in found.items():
            values.append(train(subjects[name], data, rates[name], seed, seconds))
        print(f"  seed {seed}: {', '.join(f'{n} {v[-1].test:.4f}' for n, v in found.items())}", flush=True)
    rows = []
    print(f"\n| model | learning rate | epochs | test MAE | less that of {baseline} |")
    print("| --- | ---: | ---: | ---: | ---: |")
    base = [value.test for value in found.get(baseline, [])]
    for name, values in found.items():
        errors = [value.test for value in values]
        less = [error - other for error, other in zip(errors, base, strict=True)] if base else []
        shown = "" if name == baseline or not less else f"{statistics.mean(less):+.4f} +- {standard_error(less):.4f}"
        mean, epochs = statistics.mean(errors), statistics.mean(value.epochs for value in values)
        print(f"| {name} | {rates[name]:g} | {epochs:.1f} | {mean:.4f} +- {standard_error(errors):.4f} | {shown} |")
        rows.append({
            "case": case, "subject": name, "metric": "test MAE", "value": mean, "unit": "standard deviations",
            "baseline": baseline, "ratio": mean / statistics.mean(base) if base else None,
        })  # fmt: skip
    if json_path:
        json_path.write_text(json.dumps(rows, indent=1))


def train(make: Callable[[], nn.Module], data: Split, rate: float, seed: int, seconds: float) -> Trained:
    torch.manual_seed(seed)
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=1e-5)
    begin, used, batches = time.process_time(), 0.0, list[Batch]()
    steps = 0
    while used < seconds:
        if not batches:
            start = time.process_time()  # collation is in nobody's time
            order = torch.randperm(len(data.train)).tolist()
            rows = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
            batches = [Batch.from_data_list([data.train[i] for i in part]) for part in rows]
            begin += time.process_time() - start
        batch = batches.pop()
        share = used / seconds
        factor = share / 0.1 if share < 0.1 else 0.5 + 0.5 * math.cos(math.pi * (share - 0.1) / 0.9)
        optimizer.param_groups[0]["lr"] = rate * max(factor, 1e-2)
        loss = F.l1_loss(model(batch), batch.y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
        used = time.process_time() - begin
    errors = [evaluate(model.eval(), part) for part in (data.val, data.test)]
    return Trained(*errors, steps * BATCH / len(data.train))


@torch.no_grad()
def evaluate(model: nn.Module, graphs: list[Data]) -> float:
    batches = [Batch.from_data_list(graphs[i : i + 256]) for i in range(0, len(graphs), 256)]
    errors: list[Tensor] = [(model(batch) - batch.y).abs() for batch in batches]
    return float(torch.cat(errors).mean())


def standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5
