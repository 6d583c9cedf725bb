"""What does a linear recurrence over time cost, and how exact is it in float32?

python benchmarks/bench_scan.py [--quick] [--device cpu|cuda] [--json FILE]

Forward and backward of ``h[t] = gate[t] * h[t - 1] + value[t]``, gates sigmoid(N(0, 1) + 1), values positive, so that
the log-space scan (Heinsen 2023, https://arxiv.org/abs/2311.06281, as minGRU has it) takes them. Subjects are
interleaved in one process, on a CPU one thread and the process's CPU time; the median round is quoted, as a ratio to
the loop through autograd. Errors are the largest ones of states and of gradients against float64, relative to the
largest state and gradient. The op is the same as torch.compile and torch.export take it; "starts" begin a sequence
every 50 steps.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_accel.ops import linear_scan
from lightning_accel.ops.scan.linear import linear_scan_reference

SHAPES = [(64, 60, 128), (64, 500, 128), (1, 4096, 128), (8, 16384, 64)]
Subject = Callable[[Tensor, Tensor, Tensor], Tensor]


def log_space(gate: Tensor, value: Tensor, _: Tensor) -> Tensor:
    log_gates = gate.log().cumsum(1)
    return (log_gates + (value.log() - log_gates).logcumsumexp(1)).exp()


SUBJECTS: dict[str, Subject] = {
    "loop through autograd": lambda gate, value, _: linear_scan_reference(gate, value),
    "log-space scan": log_space,
    "linear_scan": lambda gate, value, _: linear_scan(gate, value),
    "linear_scan, as an op": lambda gate, value, _: torch.ops.lightning_accel.linear_scan(gate, value, None, None),
    "linear_scan, starts": lambda gate, value, starts: linear_scan(gate, value, starts=starts),
}


def inputs(shape: tuple[int, int, int], device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gate, value, starts and the gradient of the result; in float64."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    starts = torch.rand(shape[:2], generator=generator) < 1 / 50
    gate, value = torch.sigmoid(draw() + 1), F.softplus(draw())
    return gate.to(device), value.to(device), starts.to(device), draw().to(device)


def step(subject: Subject, gate: Tensor, value: Tensor, starts: Tensor, probe: Tensor) -> list[Tensor]:
    gate, value = gate.detach().requires_grad_(), value.detach().requires_grad_()
    out = subject(gate, value, starts)
    return [out.detach(), *torch.autograd.grad(out, (gate, value), probe)]


def error(actual: list[Tensor], expected: list[Tensor]) -> float:
    return max(
        float((found - exact).abs().max() / exact.abs().max()) for found, exact in zip(actual, expected, strict=True)
    )


def seconds(subject: Subject, *arguments: Tensor) -> float:
    clock = time.process_time if arguments[0].device.type == "cpu" else time.perf_counter
    synchronize(arguments[0])
    start = clock()
    step(subject, *arguments)
    synchronize(arguments[0])
    return clock() - start


def synchronize(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def measure(shape: tuple[int, int, int], device: torch.device, rounds: int) -> list[dict[str, object]]:
    exact = inputs(shape, device)
    narrow = [x.float() if x.is_floating_point() else x for x in exact]
    reference = step(SUBJECTS["linear_scan"], *exact)
    with_starts = step(SUBJECTS["linear_scan, starts"], *exact)
    errors = {}
    for name, subject in SUBJECTS.items():
        errors[name] = error(step(subject, *narrow), with_starts if "starts" in name else reference)
        assert errors[name] < (1.0 if name == "log-space scan" else 1e-5), f"{name} is off by {errors[name]}"
    times: dict[str, list[float]] = {name: [] for name in SUBJECTS}
    for _ in range(rounds):
        for name, subject in SUBJECTS.items():
            times[name].append(seconds(subject, *narrow))
    base, *_ = SUBJECTS
    rows = []
    for name, values in times.items():
        value = statistics.median(values)
        ratio = value / statistics.median(times[base])
        rows.append(row(shape, name, "time", value * 1e3, "ms", base, ratio))
        rows.append(row(shape, name, "error", errors[name], "relative", base, errors[name] / errors[base]))
    return rows


def row(
    shape: tuple[int, int, int], subject: str, metric: str, value: float, unit: str, baseline: str, ratio: float
) -> dict[str, object]:
    names = "case", "subject", "metric", "value", "unit", "baseline", "ratio"
    return dict(zip(names, ("x".join(map(str, shape)), subject, metric, value, unit, baseline, ratio), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three rounds of two shapes in place of nine of four")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {device.type}, {torch.get_num_threads()} threads\n")
    print("| B x T x H | subject | ms | ratio | error |\n| --- | --- | ---: | ---: | ---: |", flush=True)
    rows = []
    for shape in (SHAPES[0], SHAPES[2]) if arguments.quick else SHAPES:
        measured = measure(shape, device, rounds=3 if arguments.quick else 9)
        rows += measured
        for timed, off in zip(measured[::2], measured[1::2], strict=True):
            numbers = f"{timed['value']:.2f} | {timed['ratio']:.3f} | {off['value']:.1e}"
            print(f"| {timed['case']} | {timed['subject']} | {numbers} |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
