"""How near do rows of unequal lengths come to the speed of equal ones, and which execution is fastest?

python benchmarks/bench_rnn.py [--quick] [--device cpu|cuda] [--json FILE]

Forward and backward of one recurrent layer, 64 features, 128 hidden, over 5000 sequences with log-normal lengths (sigma
0.8, median 43, 500 at most), valid steps a second. The limit is torch's nn.GRU on batches of 64 sequences of 60 steps,
in the same rounds: ratios are to it. Orders of the sequences: random, batches of 64; bucketed, batches of 64 of like
length by LengthBatchSampler with its default window; budgeted, its batches of at most 8192 tokens. Of each, batches
evenly spaced in their lengths are timed. Subjects are interleaved in one process, one thread, the process's CPU time;
the median round is quoted. The second table sets ``auto`` beside the executions it may choose, over other shapes, and
forward alone.
"""

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from lightning_accel import DynamicRNN
from lightning_accel.data import LengthBatchSampler
from lightning_accel.nn.recurrent.layer import CELLS

FEATURES, HIDDEN, BATCH, STEPS = 64, 128, 64, 60
SCANS = ("mingru", "minlstm")


def log_normal_lengths(number: int = 5000) -> Tensor:
    draws = torch.randn(number, generator=torch.Generator().manual_seed(0))
    return (draws * 0.8 + torch.tensor(43.0).log()).exp().round().clamp(1, 500).long()


def orders(batch_size: int) -> dict[str, list[Tensor]]:
    """Lengths of the batches of an epoch."""
    lengths = log_normal_lengths()
    bucketed = LengthBatchSampler(lengths, batch_size)
    budgeted = LengthBatchSampler(lengths, max_tokens=batch_size * 128)
    return {
        "random": list(lengths[: len(lengths) // batch_size * batch_size].split(batch_size)),
        "bucketed": [lengths[rows] for rows in bucketed],
        "budgeted": [lengths[rows] for rows in budgeted],
    }


def sample(batches: list[Tensor], number: int) -> list[Tensor]:
    """Batches evenly spaced in their longest length."""
    ordered = sorted(batches, key=lambda lengths: int(lengths.max()))
    places = torch.linspace(0.5 / number, 1 - 0.5 / number, number) * len(ordered)
    return [ordered[int(place)] for place in places]


def of_torch(module: nn.RNNBase, packed: bool) -> Callable[[Tensor, Tensor], Tensor]:
    def run(x: Tensor, lengths: Tensor) -> Tensor:
        if packed:
            _, state = module(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        else:
            out, state = module(x)
            state = out[torch.arange(len(x)), lengths - 1]
        return state[0] if isinstance(state, tuple) else state

    return run


def of_ours(module: DynamicRNN) -> Callable[[Tensor, Tensor], Tensor]:
    def run(x: Tensor, lengths: Tensor) -> Tensor:
        pooled = module(x, lengths).pooled
        assert pooled is not None
        return pooled

    return run


class Subject:
    """A module over some batches; times their forward and, unless told otherwise, backward passes."""

    def __init__(
        self,
        module: nn.Module,
        run: Callable[[Tensor, Tensor], Tensor],
        batches: Iterable[Tensor],
        device: str,
        backward: bool = True,
    ) -> None:
        self.module, self.run, self.device, self.backward = module.to(device), run, device, backward
        generator = torch.Generator().manual_seed(1)
        self.batches = [
            (torch.randn(len(lengths), int(lengths.max()), FEATURES, generator=generator).to(device), lengths)
            for lengths in batches
        ]
        self.tokens = sum(int(lengths.sum()) for _, lengths in self.batches)

    def seconds(self) -> float:
        clock = time.process_time if self.device == "cpu" else time.perf_counter
        self.synchronize()
        start = clock()
        for x, lengths in self.batches:
            self.module.zero_grad()
            with torch.set_grad_enabled(self.backward):
                out = self.run(x, lengths)
            if self.backward:
                out.sum().backward()
        self.synchronize()
        return clock() - start

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def measure(subjects: dict[str, Subject], rounds: int) -> dict[str, list[float]]:
    """Valid steps a second, by subject and round."""
    rates: dict[str, list[float]] = {name: [] for name in subjects}
    for number in range(rounds + 1):
        for name, subject in subjects.items():
            gc.collect()
            rate = subject.tokens / subject.seconds()
            if number:
                rates[name].append(rate)
    return rates


def check(cells: Iterable[str], lengths: Tensor) -> None:
    """A wrong answer has no speed: every execution against rows one by one."""
    x = torch.randn(len(lengths), int(lengths.max()), FEATURES)
    for cell in cells:
        module = DynamicRNN(FEATURES, HIDDEN, cell=cell)  # type: ignore[arg-type]
        expected = torch.cat([module(x[i : i + 1, :length]).pooled for i, length in enumerate(lengths.tolist())])
        for execution in executions(cell):
            module.execution = execution
            torch.testing.assert_close(module(x, lengths).pooled, expected, rtol=0, atol=1e-5)


def executions(cell: str) -> tuple[str, ...]:
    return ("padded", "staircase", "lanes") if cell in SCANS else ("padded", "staircase", "packed")


def limit(device: str) -> Subject:
    module = nn.GRU(FEATURES, HIDDEN, batch_first=True)
    return Subject(module, of_torch(module, False), [torch.full((BATCH,), STEPS)] * 4, device)


def throughput(cells: Iterable[str], batches: int, rounds: int, device: str) -> list[dict[str, object]]:
    lengths_of = {name: sample(each, batches) for name, each in orders(BATCH).items()}
    rows = []
    for order, lengths in lengths_of.items():
        for cell in cells:
            subjects = {"limit": limit(device)}
            for execution in executions(cell):
                module = DynamicRNN(FEATURES, HIDDEN, cell=cell, execution=execution)  # type: ignore[arg-type]
                subjects[f"ours, {execution}"] = Subject(module, of_ours(module), lengths, device)
            if cell in ("gru", "lstm"):
                for packed in (False, True):
                    theirs = {"gru": nn.GRU, "lstm": nn.LSTM}[cell](FEATURES, HIDDEN, batch_first=True)
                    name = f"torch, {'packed' if packed else 'padded'}"
                    subjects[name] = Subject(theirs, of_torch(theirs, packed), lengths, device)
            rows += as_rows(f"{order}, {cell}", measure(subjects, rounds), "limit")
    for cell in cells:
        module = DynamicRNN(FEATURES, HIDDEN, cell=cell)  # type: ignore[arg-type]
        equal = Subject(module, of_ours(module), [torch.full((BATCH,), STEPS)] * 4, device)
        rows += as_rows(f"equal, {cell}", measure({"limit": limit(device), "ours, auto": equal}, rounds), "limit")
    return rows


def choices(cells: Iterable[str], batches: int, rounds: int, device: str) -> list[dict[str, object]]:
    """``auto`` beside every execution, the best of which is the baseline."""
    rows = []
    shapes: list[tuple[str, int, int, bool, bool]] = [
        ("random", 64, 128, False, True),
        ("random", 8, 32, True, True),
        ("bucketed", 16, 256, False, True),
        ("random", 64, 128, False, False),
        ("bucketed", 64, 128, False, False),
    ]
    for order, batch_size, hidden, both, backward in shapes:
        lengths = sample(orders(batch_size)[order], batches)
        for cell in cells:
            subjects = {}
            for execution in ("auto", *executions(cell)):
                module = DynamicRNN(
                    FEATURES, hidden, cell=cell, execution=execution, bidirectional=both  # type: ignore[arg-type]
                )  # fmt: skip
                subjects[execution] = Subject(module, of_ours(module), lengths, device, backward)
            rates = measure(subjects, rounds)
            best = max((name for name in rates if name != "auto"), key=lambda name: statistics.median(rates[name]))
            how = f"{', both directions' * both}{', forward alone' * (not backward)}"
            case = f"{order}, {batch_size} rows, hidden {hidden}{how}, {cell}"
            rows += as_rows(case, rates, best)
    return rows


def as_rows(case: str, rates: dict[str, list[float]], baseline: str) -> list[dict[str, object]]:
    return [
        {
            "case": case, "subject": name, "metric": "valid steps", "unit": "1/s",
            "value": round(statistics.median(each)), "baseline": baseline,
            "ratio": round(statistics.median(a / b for a, b in zip(each, rates[baseline], strict=True)), 3),
        }
        for name, each in rates.items()
    ]  # fmt: skip


def print_table(title: str, rows: list[dict[str, object]]) -> None:
    print(f"\n{title}\n\n| case | subject | valid steps a second | ratio | to |\n|---|---|---|---|---|")
    for row in rows:
        print(f"| {row['case']} | {row['subject']} | {row['value']} | {row['ratio']:.2f} | {row['baseline']} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two cells, few batches: under a minute")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    check(CELLS, torch.tensor([5, 1, 17, 60]))
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor() or "cpu"
    print(f"torch {torch.__version__}, {device}, 1 thread")
    cells, batches, rounds = (("gru", "mingru"), 4, 2) if arguments.quick else (tuple(CELLS), 12, 5)
    rows = throughput(cells, batches, rounds, arguments.device)
    print_table("Unequal lengths against equal ones, forward and backward", rows)
    chosen = choices(
        ("gru", "lstm", "mingru") if not arguments.quick else cells, batches // 2, rounds, arguments.device
    )
    print_table("auto against each execution", chosen)
    if arguments.json:
        arguments.json.write_text(json.dumps([*rows, *chosen], indent=1))
