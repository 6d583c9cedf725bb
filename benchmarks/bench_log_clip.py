"""What does a bounded logarithm cost, and what does it keep for backward?

python benchmarks/bench_log_clip.py [--quick] [--device cpu|cuda] [--json FILE]

``log(max(x, 1e-6))`` and its gradient; a third of x is below the clip. Baseline is ``x.clamp(min=1e-6).log()``, eager
or compiled as the subject is. Subjects are interleaved in one process, on a CPU one thread and the process's CPU time;
the median round is quoted. Saved bytes are those of all tensors that autograd keeps, x among them, counted once each.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lightning_accel.ops import log_clip

CASES = [(1_000, torch.float32), (100_000, torch.float32), (4_000_000, torch.float32), (4_000_000, torch.bfloat16)]
UNITS = {"forward": "us", "forward + backward": "us", "saved": "bytes an element"}
Subject = Callable[[Tensor], Tensor]


def composed(x: Tensor) -> Tensor:
    return x.clamp(min=1e-6).log()


def straight_through(x: Tensor) -> Tensor:
    return log_clip(x, straight_through=True)


EAGER: dict[str, Subject] = {"clamp and log": composed, "log_clip": log_clip, "straight-through": straight_through}
SUBJECTS = EAGER | {f"{name}, compiled": torch.compile(subject, fullgraph=True) for name, subject in EAGER.items()}


def inputs(size: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """x, and the gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    x, probe = torch.rand(size, generator=generator) - 1 / 3, torch.randn(size, generator=generator)
    return x.to(device, dtype).requires_grad_(), probe.to(device, dtype)


def forward(subject: Subject, x: Tensor, probe: Tensor) -> Tensor:
    return subject(x)


def forward_backward(subject: Subject, x: Tensor, probe: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(subject(x), x, probe)


def check(name: str, x: Tensor, probe: Tensor) -> None:
    subject = SUBJECTS[name]
    exact = x.detach().double()
    slope = 1 / exact.clamp(min=1e-6)
    if "straight-through" not in name:
        slope[exact < 1e-6] = 0
    tolerance = {"rtol": 4 * torch.finfo(x.dtype).eps, "atol": 1e-6}
    torch.testing.assert_close(subject(x).double(), composed(exact), **tolerance)
    torch.testing.assert_close(forward_backward(subject, x, probe)[0].double(), slope * probe, **tolerance)


def saved_bytes(subject: Subject, x: Tensor) -> float:
    """Bytes an element that autograd keeps."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = subject(x)  # whose graph keeps the tensors, so that no two have the same memory
    return sum(kept.values()) / result.numel()


def seconds(work: Callable[[Subject, Tensor, Tensor], object], *arguments: object, repeats: int) -> float:
    x = arguments[1]
    clock = time.process_time if x.device.type == "cpu" else time.perf_counter
    synchronize(x)
    start = clock()
    for _ in range(repeats):
        work(*arguments)
    synchronize(x)
    return (clock() - start) / repeats


def synchronize(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def measure(size: int, dtype: torch.dtype, device: str, rounds: int) -> list[dict[str, object]]:
    x, probe = inputs(size, dtype, device)
    torch.compiler.reset()
    times: dict[tuple[str, str], list[float]] = {}
    for name in SUBJECTS:
        check(name, x, probe)
    for _ in range(rounds):
        for name, subject in SUBJECTS.items():
            for metric, work in (("forward", forward), ("forward + backward", forward_backward)):
                taken = seconds(work, subject, x, probe, repeats=max(1, 400_000 // size))
                times.setdefault((name, metric), []).append(taken)
    values = {place: statistics.median(taken) * 1e6 for place, taken in times.items()}
    values |= {(name, "saved"): saved_bytes(subject, x) for name, subject in SUBJECTS.items()}
    case = f"{size} {str(dtype).removeprefix('torch.')}"
    return [row(case, name, metric, value, values) for (name, metric), value in values.items()]


def row(case: str, name: str, metric: str, value: float, values: dict[tuple[str, str], float]) -> dict[str, object]:
    baseline = "clamp and log, compiled" if "compiled" in name else "clamp and log"
    fields = "case", "subject", "metric", "value", "unit", "baseline", "ratio"
    ratio = value / values[baseline, metric]
    return dict(zip(fields, (case, name, metric, value, UNITS[metric], baseline, ratio), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="five rounds in place of 25")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {arguments.device}, {torch.get_num_threads()} threads\n")
    print(f"| elements | subject | {' | ratio | '.join(f'{name}, {unit}' for name, unit in UNITS.items())} | ratio |")
    print("| --- | --- |" + " ---: |" * 2 * len(UNITS), flush=True)
    rows = []
    for size, dtype in CASES:
        measured = measure(size, dtype, arguments.device, rounds=5 if arguments.quick else 25)
        rows += measured
        for name in SUBJECTS:
            of_name = {r["metric"]: f"{r['value']:.1f} | {r['ratio']:.2f}" for r in measured if r["subject"] == name}
            print(f"| {measured[0]['case']} | {name} | {' | '.join(of_name[metric] for metric in UNITS)} |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
