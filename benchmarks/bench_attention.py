"""What does attention cost in training on the CPU, by torch's kernels and by this package's?

python benchmarks/bench_attention.py [--quick] [--threads N]

Forward and backward of ``scaled_dot_product_attention`` with 1024 tokens and more a batch, with and without dropout.
Subjects take turns in one process: what torch chooses (flash; ``math`` where weights are dropped, with masks by this
package's kernel, as with ``native_dropout``), torch's ``math``, and ``attention="native"``. Quoted are medians of the
rounds, and how many times as fast the kernel is as the faster of torch's two: median over rounds and quartiles.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_accel.callbacks.speedups import keep_freed_memory
from lightning_accel.measure.machine import describe_machine
from lightning_accel.ops.attention import replace_attention, restore_attention
from lightning_accel.ops.bernoulli import replace_bernoulli

# samples, heads, tokens of a sample, features of a head
SIZES = [(16, 4, 128, 32), (64, 8, 65, 16), (8, 12, 128, 64), (8, 12, 512, 64), (2, 8, 2048, 64)]
Subject = Callable[[], None]


def subjects(size: tuple[int, ...], dtype: torch.dtype, dropout: float, causal: bool) -> dict[str, Subject]:
    samples, heads, length, width = size
    inputs = [torch.randn(samples, length, heads, width, dtype=dtype).transpose(1, 2) for _ in range(3)]
    grad = torch.randn_like(inputs[0])
    leaves = [x.requires_grad_() for x in inputs]

    def step() -> None:
        out = F.scaled_dot_product_attention(*leaves, dropout_p=dropout, is_causal=causal)
        torch.autograd.grad(out, leaves, grad)

    def by_math() -> None:
        with sdpa_kernel(SDPBackend.MATH):
            step()

    def by_kernel() -> None:
        replace_attention()
        step()
        restore_attention()

    return {"torch": step, "math": by_math, "native": by_kernel}


def measure(runs: dict[str, Subject], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 2):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            if turn >= 2:
                times[name].append(time.perf_counter() - begin)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="five rounds of two sizes in place of twenty of five")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    keep_freed_memory()
    replace_bernoulli()
    machine = describe_machine()
    print(
        f"torch {torch.__version__}, {machine.cpu} ({', '.join(machine.instruction_sets)}), {arguments.threads} threads"
    )
    print("\n| B, H, L, D | dtype | | torch, ms | math, ms | native, ms | times as fast |")
    print("| --- | --- | --- | ---: | ---: | ---: | --- |")
    for size in SIZES[:2] if arguments.quick else SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            for dropout, causal in ((0.0, False), (0.0, True), (0.1, False)):
                times = measure(subjects(size, dtype, dropout, causal), 5 if arguments.quick else 20)
                pairs = zip(*times.values(), strict=True)
                low, middle, high = statistics.quantiles([min(one, other) / ours for one, other, ours in pairs], n=4)
                cells = " | ".join(f"{1e3 * statistics.median(times[name]):.2f}" for name in times)
                options = ", ".join(["causal"] * causal + [f"dropout {dropout}"] * bool(dropout))
                name = str(dtype).removeprefix("torch.")
                ratio = f"{middle:.2f} ({low:.2f} to {high:.2f})"
                print(f"| {', '.join(map(str, size))} | {name} | {options} | {cells} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
