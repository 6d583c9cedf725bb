"""What do padding, sequential steps and stragglers cost in an epoch of sequences of unequal lengths, by sampler?

python benchmarks/bench_sampler.py [--quick] [--json FILE]

Processes are simulated: a step takes as long as the process with most padded tokens in it. Lengths are log-normal, the
batches of all processes together hold 64 sequences a process, or as many tokens. Steps are sequential ones, the longest
sequence of each batch. Work is what the processes hold up, padded tokens of the slowest times their number, over the
tokens there are: 1 is the limit. The answer is checked first: every sampler takes every sequence once.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_accel.data import LengthBatchSampler

PER_RANK = 64
Batches = list[list[np.ndarray]]  # of each rank


def log_normal(rows: int) -> np.ndarray:
    return np.random.default_rng(0).lognormal(np.log(43), 0.8, rows).clip(1, 500).astype(np.int64)


def random_order(lengths: np.ndarray, ranks: int, seed: int = 0) -> Batches:
    """As DistributedSampler deals them."""
    order = np.random.default_rng(seed).permutation(len(lengths))
    return [cut(order[rank::ranks]) for rank in range(ranks)]


def cut(rows: np.ndarray) -> list[np.ndarray]:
    return [rows[start : start + PER_RANK] for start in range(0, len(rows), PER_RANK)]


def windowed(lengths: np.ndarray, ranks: int, window: int) -> Batches:
    """Each rank sorts windows of its own rows, and shuffles its batches, as samplers for one process do."""
    drawn = []
    for rank in range(ranks):
        generator = np.random.default_rng([1, rank])
        rows = np.random.default_rng(0).permutation(len(lengths))[rank::ranks]
        windows = [rows[start : start + window * PER_RANK] for start in range(0, len(rows), window * PER_RANK)]
        batches = [batch for one in windows for batch in cut(one[np.argsort(lengths[one], kind="stable")])]
        drawn.append([batches[number] for number in generator.permutation(len(batches))])
    return drawn


def ours(lengths: np.ndarray, ranks: int, **options: Any) -> Batches:
    samplers = [LengthBatchSampler(lengths, num_replicas=ranks, rank=rank, **options) for rank in range(ranks)]
    return [[np.array(rows) for rows in sampler] for sampler in samplers]


def cost(lengths: np.ndarray, batches: Batches) -> dict[str, float]:
    """Of an epoch; a rank that has fewer batches than another waits."""
    steps = max(map(len, batches))
    rows, longest = np.zeros((2, len(batches), steps), np.int64)
    for rank, mine in enumerate(batches):
        rows[rank, : len(mine)] = [len(batch) for batch in mine]
        longest[rank, : len(mine)] = [lengths[batch].max() for batch in mine]
    seen = np.sort(np.concatenate([batch for mine in batches for batch in mine]))
    if not np.array_equal(seen, np.arange(len(lengths))):
        raise AssertionError("some sequences came twice, or not at all")
    work = rows * longest
    slowest = work.max(0).sum()
    return {
        "batches": steps,
        "steps": int(longest.max(0).sum()),
        "padding": 1 - lengths.sum() / work.sum(),
        "straggling": 1 - work.mean(0).sum() / slowest,
        "work": slowest * len(batches) / lengths.sum(),
    }


def subjects(ranks: int) -> dict[str, Callable[[np.ndarray], Batches]]:
    rows = PER_RANK * ranks
    alone = "" if ranks == 1 else ", each rank by itself"
    return {
        "random order": lambda lengths: random_order(lengths, ranks),
        **{
            f"window of {window}{alone}": lambda lengths, window=window: windowed(lengths, ranks, window)
            for window in (10, 50)
        },
        f"full sort{alone}": lambda lengths: windowed(lengths, ranks, len(lengths)),
        **{
            f"ours, window {window}": lambda lengths, window=window: ours(
                lengths, ranks, batch_size=rows, window=window
            )
            for window in (10, 50, None)
        },
        f"ours, {60 * rows} tokens": lambda lengths: ours(lengths, ranks, max_tokens=60 * rows),
        f"ours, {128 * rows} tokens": lambda lengths: ours(lengths, ranks, max_tokens=128 * rows),
        "ours, two thirds of the steps": lambda lengths: ours(
            lengths, ranks, max_steps=LengthBatchSampler(lengths, rows).report(1).steps * 2 // 3
        ),
    }


def compare(ranks: int, rows: int) -> list[dict[str, Any]]:
    lengths = log_normal(rows)
    costs = {name: cost(lengths, draw(lengths)) for name, draw in subjects(ranks).items()}
    first = costs["random order"]
    return [
        {
            "case": f"{ranks} ranks, {rows} sequences",
            "subject": name,
            "metric": metric,
            "value": value,
            "unit": "1" if isinstance(value, float) else "",
            "baseline": "random order",
            "ratio": value / first[metric] if first[metric] else None,
        }
        for name, found in costs.items()
        for metric, value in found.items()
    ]


def plan_time(rows: int, rounds: int) -> list[dict[str, Any]]:
    lengths = log_normal(rows)
    seconds: dict[str, list[float]] = {"argsort of the lengths": [], "making the sampler": [], "plan of an epoch": []}
    for epoch in range(rounds):
        start = time.perf_counter()
        np.argsort(lengths, kind="stable")
        sorted_at = time.perf_counter()
        sampler = LengthBatchSampler(lengths, PER_RANK)
        made_at = time.perf_counter()
        sampler.set_epoch(epoch)
        next(iter(sampler))
        times = sorted_at - start, made_at - sorted_at, time.perf_counter() - made_at
        for name, taken in zip(seconds, times, strict=True):
            seconds[name].append(taken)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    base = medians["argsort of the lengths"]
    return [
        {
            "case": f"{rows} sequences",
            "subject": name,
            "metric": "time",
            "value": value,
            "unit": "s",
            "baseline": "argsort of the lengths",
            "ratio": value / base,
        }
        for name, value in medians.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sequences")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="samplers run on the CPU in any case")
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    rows = [row for ranks in (1, 8) for row in compare(ranks, (5_000 if arguments.quick else 20_000) * ranks)]
    rows += plan_time(100_000 if arguments.quick else 1_000_000, rounds=3 if arguments.quick else 7)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    print(f"torch {torch.__version__}, numpy {np.__version__}, one CPU\n")
    print("| case | subject | batches | steps | padding | straggling | work |\n| --- | --- |" + " --: |" * 5)
    table: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        table.setdefault((row["case"], row["subject"]), {})[row["metric"]] = row["value"]
    for (case, subject), found in table.items():
        if "time" in found:
            print(f"\n{case}, {subject}: {found['time']:.3f} s", end="")
            continue
        shares = f"{found['padding']:.1%} | {found['straggling']:.2%} | {found['work']:.2f}"
        print(f"| {case} | {subject} | {found['batches']} | {found['steps']} | {shares} |")
    print()


if __name__ == "__main__":
    main()
