"""What does a training step of torch's LSTM and GRU cost on the CPU, and what by fused steps?

python benchmarks/bench_fused_rnn.py [--quick] [--threads N] [--json FILE]

Forward and backward of one layer with as many inputs as hidden units, on a padded tensor and on a PackedSequence whose
lengths fall evenly from T to T / 4. Subjects are interleaved in one process; times are the process's CPU time with one
thread, wall time with more. Quoted are the median round of each, and the ratio torch / fused: its median over rounds
and the quartiles. ``Speedups(fused_rnn=True)`` leaves an LSTM on padded tensors to torch, which runs it by oneDNN; the
fused steps are measured there nevertheless, by the operation itself. "No kernel" is the formula that replaces the
kernel where there is no compiler.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from lightning_accel.measure.machine import describe_machine
from lightning_accel.nn.recurrent.fused import fuse_
from lightning_accel.ops.native import KERNELS

SHAPES = [(8, 32, 64), (32, 32, 64), (32, 32, 128), (64, 128, 128), (32, 64, 256), (8, 256, 256), (32, 32, 512)]
Subject = Callable[[], None]


def step(layer: nn.RNNBase, x: Tensor, lengths: Tensor | None) -> None:
    output = layer(x if lengths is None else pack_padded_sequence(x, lengths))[0]
    (output.data if isinstance(output, PackedSequence) else output).sum().backward()


def with_fused_padding(layer: nn.RNNBase, x: Tensor) -> Subject:
    def run() -> None:
        with torch.backends.mkldnn.flags(enabled=False):  # nothing else that runs here takes oneDNN in float32
            step(layer, x, None)

    return run


def without_kernel(subject: Subject) -> Subject:
    def run() -> None:
        with KERNELS.switched_off():
            subject()

    return run


def subjects(cell: type[nn.RNNBase], shape: tuple[int, int, int], packed: bool) -> dict[str, Subject]:
    samples, steps, size = shape
    layer = cell(size, size)
    fused = copy.deepcopy(layer)
    fuse_(fused)
    x = torch.randn(steps, samples, size, requires_grad=True)
    lengths = torch.linspace(steps, steps // 4, samples).long() if packed else None
    run: Subject = lambda: step(fused, x, lengths)  # noqa: E731
    if not packed and cell is nn.LSTM:
        run = with_fused_padding(fused, x)
    return {"torch": lambda: step(layer, x, lengths), "fused": run, "no kernel": without_kernel(run)}


def measure(runs: dict[str, Subject], clock: Callable[[], float], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            begin = clock()
            run()
            times[name].append(clock() - begin)
    return times


def row(case: str, times: dict[str, list[float]]) -> dict[str, object]:
    def ratio(name: str) -> list[float]:
        pairs = zip(times["torch"], times[name], strict=True)
        return statistics.quantiles([theirs / ours for theirs, ours in pairs], n=4)

    milliseconds = {f"{name}_ms": statistics.median(values) * 1e3 for name, values in times.items()}
    return {"case": case, **milliseconds, "ratio": ratio("fused"), "ratio_no_kernel": ratio("no kernel")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="five rounds of two shapes in place of fifteen of seven")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    print(f"torch {torch.__version__}, {describe_machine().cpu}, {arguments.threads} threads\n")
    print(
        "| cell, B x T x H | torch ms | fused ms | ratio | quartiles | no kernel |\n| --- | ---: | ---: | ---: | ---: |"
    )
    rows = []
    for cell in (nn.LSTM, nn.GRU):
        for shape in (SHAPES[1], SHAPES[2]) if arguments.quick else SHAPES:
            for packed in (False, True):
                case = f"{cell.__name__} {'packed' if packed else 'padded'} {'x'.join(map(str, shape))}"
                rounds = 5 if arguments.quick else 15
                rows.append(row(case, measure(subjects(cell, shape, packed), clock, rounds)))
                low, middle, high = rows[-1]["ratio"]
                times = f"{rows[-1]['torch_ms']:.2f} | {rows[-1]['fused_ms']:.2f}"
                slow = rows[-1]["ratio_no_kernel"][1]
                print(f"| {case} | {times} | {middle:.2f} | {low:.2f} to {high:.2f} | {slow:.2f} |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
