"""What do the masks of dropout cost on a CPU, by torch's kernel and by ours?

python benchmarks/bench_dropout.py [--quick] [--json FILE]

``bernoulli_`` alone; ``F.dropout`` and its gradient; and a step of torch's own ``TransformerEncoderLayer``, whose
attention drops weights. Each runs with torch's kernel and with that of ``Speedups(native_dropout=True)``, in turns in
one process, on one thread; the median CPU time of the rounds is quoted. First, the shares of ones of both are checked.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_accel.callbacks.speedups import machine_name
from lightning_accel.ops.bernoulli import replace_bernoulli, restore_bernoulli

P = 0.1
DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool
Work = Callable[[], object]


def draws(size: int, dtype: torch.dtype) -> Work:
    x = torch.empty(size, dtype=dtype)
    return lambda: x.bernoulli_(P)


def dropout(size: int, dtype: torch.dtype) -> Work:
    x = torch.randn(size, dtype=dtype, requires_grad=True)
    gradient = torch.ones_like(x)
    return lambda: torch.autograd.grad(F.dropout(x, P), x, gradient)


def encoder(bf16: bool) -> Work:
    layer = nn.TransformerEncoderLayer(128, 4, 512, P, batch_first=True)
    x = torch.randn(32, 64, 128)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            y: Tensor = layer(x)
        y.float().square().mean().backward()

    return step


def cases(quick: bool) -> dict[str, Work]:
    sizes = [1_024, 262_144] if quick else [512, 1_024, 16_384, 262_144, 4_194_304]
    found = {f"bernoulli_, {size} float32": draws(size, torch.float32) for size in sizes}
    found |= {f"bernoulli_, 262144 {str(dtype).removeprefix('torch.')}": draws(262_144, dtype) for dtype in DTYPES[1:]}
    found |= {f"dropout and gradient, {size} float32": dropout(size, torch.float32) for size in sizes[-2:]}
    return found | {f"encoder layer, {'bf16' if bf16 else 'float32'}": encoder(bf16) for bf16 in (False, True)}


def check() -> None:
    size = 1_000_000
    share = float(torch.empty(size).bernoulli_(P).mean())
    assert abs(share - P) < 5 * math.sqrt(P * (1 - P) / size), share


def seconds(work: Work, is_ours: bool, repeats: int) -> float:
    if is_ours:
        replace_bernoulli()
    try:
        start = time.process_time()
        for _ in range(repeats):
            work()
        return (time.process_time() - start) / repeats
    finally:
        if is_ours:
            restore_bernoulli()


def measure(name: str, work: Work, rounds: int) -> list[dict[str, object]]:
    repeats = max(1, round(0.01 / max(1e-6, seconds(work, False, 1))))
    times: dict[str, list[float]] = {"torch": [], "native": []}
    for _ in range(rounds):
        for subject, taken in times.items():
            taken.append(seconds(work, subject == "native", repeats))
    values = {subject: statistics.median(taken) * 1e6 for subject, taken in times.items()}
    return [
        {"case": name, "subject": subject, "metric": "CPU time", "value": value, "unit": "us", "baseline": "torch",
         "ratio": value / values["torch"]}
        for subject, value in values.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="five rounds of fewer cases in place of 25")
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    check()
    replace_bernoulli()
    check()
    restore_bernoulli()
    print(f"torch {torch.__version__}, {machine_name()}, one thread\n")
    print("| case | torch, us | native, us | ratio |\n| --- | ---: | ---: | ---: |", flush=True)
    rows = []
    for name, work in cases(arguments.quick).items():
        torchs, ours = measured = measure(name, work, rounds=5 if arguments.quick else 25)
        rows += measured
        print(f"| {name} | {torchs['value']:.1f} | {ours['value']:.1f} | {ours['ratio']:.2f} |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
