"""What do sums over triples cost beside message passing, and beside dense order 3?

python benchmarks/bench_relational.py [--quick] [--only TEXT] [--device cpu|cuda] [--json FILE]

Forward and backward, gradient of the features included, of one layer of 64 channels in float32: GINConv of
PyTorch Geometric (Linear, ReLU, Linear), ``RO3Conv`` (R = 16, its default, and 32) and ``RO3Pooling`` (R = 32),
given the triples as GINConv is given its edges; ``find_triples`` alone is what it costs to find them, once for a graph.
bf16 is autocast. PPGN is one block of Maron et al. 2019 (https://arxiv.org/abs/1905.11136) with 16 channels, whose
states are dense, (N, N, 16): timed up to a thousand nodes, and its memory scaled by N**2 beyond.

Graphs of about 4 N edges, degree 8, nodes numbered at random: ``random`` ends, which make almost no triangles, and
``small world``, a ring whose nodes have the four next ones for neighbours, a tenth of these replaced: 4.4 triangles a
node. Features are standard normal.

Before the clock starts, sums over triples have to equal those over all subsets of three nodes, in float64. Subjects are
interleaved in one process, on a CPU one thread and the process's CPU time; the median round of seven (three for 1e5
nodes, one for 1e6, each after a run that is not counted) is quoted, and its ratio to GINConv on the same graph. Peak
memory is what a run adds to the process, as the system counts it, on Linux and CUDA. ``exponent`` is the slope of log
time over log N from 1e4 nodes on; that of ``operations`` is the slope of nodes + edges + triangles.
"""

import argparse
import ctypes
import itertools
import json
import math
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch_geometric
from torch import Tensor, nn
from torch_geometric.nn import GINConv

from lightning_accel.nn.relational.layers import RO3Conv, RO3Pooling
from lightning_accel.ops import Triples, find_triples

WIDTH, PPGN_CHANNELS, PPGN_NODES = 64, 16, 1000
BASE = "GINConv"


class Graph(NamedTuple):
    name: str
    x: Tensor  # (N, 64)
    edge_index: Tensor  # (2, 2 E), both directions
    triples: Triples


class PPGNBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(self.linear(), nn.ReLU(), self.linear()) for _ in range(2))
        self.joined = nn.Conv2d(2 * PPGN_CHANNELS, PPGN_CHANNELS, 1)

    @staticmethod
    def linear() -> nn.Module:
        return nn.Conv2d(PPGN_CHANNELS, PPGN_CHANNELS, 1)

    def forward(self, pairs: Tensor) -> Tensor:
        return self.joined(torch.cat([pairs, self.left(pairs) @ self.right(pairs)], dim=1))


def make_edges(kind: str, num_nodes: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if kind == "random":
        edges = torch.randint(num_nodes, (2, 4 * num_nodes), generator=generator)
    else:
        start = torch.arange(num_nodes).repeat(4)
        end = (start + torch.arange(1, 5).repeat_interleave(num_nodes)) % num_nodes
        replaced = torch.rand(len(end), generator=generator) < 0.1
        end[replaced] = torch.randint(num_nodes, (int(replaced.sum()),), generator=generator)
        edges = torch.randperm(num_nodes, generator=generator)[torch.stack([start, end])]
    return torch.cat([edges, edges.flip(0)], dim=1)


def make_graph(kind: str, num_nodes: int, device: torch.device) -> Graph:
    torch.manual_seed(0)
    triples = find_triples(make_edges(kind, num_nodes).to(device), num_nodes)
    row = torch.repeat_interleave(triples.rowptr.diff(), output_size=len(triples.col))
    x = torch.randn(num_nodes, WIDTH, device=device, requires_grad=True)
    return Graph(case_name(kind, num_nodes), x, torch.stack([row, triples.col]), triples)


def case_name(kind: str, num_nodes: int) -> str:
    return f"{kind}, N {num_nodes:.0e}".replace("e+0", "e")


def subjects_of(graph: Graph) -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    device, num_nodes = graph.x.device, len(graph.x)
    gin = GINConv(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))).to(device)
    conv, wide = (RO3Conv(WIDTH, WIDTH, rank=rank).to(device) for rank in (16, 32))
    pooling = RO3Pooling(WIDTH, WIDTH, rank=32).to(device)

    def step(forward: Callable[[], Tensor], bf16: bool = False) -> Callable[[], object]:
        def run() -> None:
            graph.x.grad = None
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                out = forward()
            out.sum().backward()

        return run

    def with_gin() -> Tensor:
        return gin(graph.x, graph.edge_index)

    def with_conv() -> Tensor:
        return conv(graph.x, graph.edge_index, triples=graph.triples)

    def with_wide_conv() -> Tensor:
        return wide(graph.x, graph.edge_index, triples=graph.triples)

    def with_pooling() -> Tensor:
        return pooling(graph.x, graph.edge_index, triples=graph.triples)

    subjects = {
        BASE: step(with_gin),
        "RO3Conv": step(with_conv),
        "RO3Conv, R = 32": step(with_wide_conv),
        "RO3Pooling": step(with_pooling),
        "find_triples": lambda: find_triples(graph.edge_index, num_nodes),
    }
    if num_nodes <= 100_000:
        subjects["GINConv, bf16"] = step(with_gin, bf16=True)
        subjects["RO3Conv, bf16"] = step(with_conv, bf16=True)
        subjects["RO3Pooling, bf16"] = step(with_pooling, bf16=True)
    if num_nodes <= PPGN_NODES and graph.name.startswith("random"):  # edges make no difference to it
        block = PPGNBlock().to(device)
        pairs = torch.randn(1, PPGN_CHANNELS, num_nodes, num_nodes, device=device, requires_grad=True)
        subjects["PPGN block"] = step(lambda: block(pairs))
    return subjects


def check_answers(device: torch.device) -> None:
    """All triples of a small graph one by one, against the layers' sums."""
    num_nodes = 12
    edges = make_edges("small world", num_nodes)
    near = torch.zeros(num_nodes, num_nodes, dtype=torch.bool)
    near[edges[0], edges[1]] = True
    near.fill_diagonal_(False)
    pooling = RO3Pooling(3, 5, rank=4).double().to(device)
    x = torch.randn(num_nodes, 3, dtype=torch.float64, device=device)
    maps = pooling.terms.node_maps(x)
    (a,), (b, c) = maps["triangle"], maps["wedge"]
    sums = torch.zeros(2, 4, dtype=torch.float64, device=device)
    for nodes in itertools.combinations(range(num_nodes), 3):
        inside = [sum(bool(near[i, j]) for j in nodes) for i in nodes]
        if sum(inside) == 6:
            sums[0] += a[list(nodes)].prod(dim=0)
        elif sum(inside) == 4:
            factors = [c[i] if count == 2 else b[i] for i, count in zip(nodes, inside, strict=True)]
            sums[1] += torch.stack(factors).prod(dim=0)
    torch.testing.assert_close(pooling.sums(x, edges.to(device)), sums.view(1, -1), rtol=0, atol=1e-10)


def clock(device: torch.device) -> Callable[[], float]:
    if device.type == "cpu":
        return time.process_time
    torch.cuda.synchronize()
    return time.perf_counter


def peak_mib(run: Callable[[], object], device: torch.device) -> float:
    """What a run adds to memory at most; not a number where the system does not tell."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    if not sys.platform.startswith("linux"):
        return math.nan
    ctypes.CDLL(None).malloc_trim(0)  # what is free in this process would be used again unseen
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory_kib("VmRSS")
    run()
    return (memory_kib("VmHWM") - before) / 2**10


def memory_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measure(graph: Graph, rounds: int) -> list[dict[str, object]]:
    device = graph.x.device
    subjects = subjects_of(graph)
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    memory = {}
    for turn in range(rounds + 1):
        for name, run in subjects.items():
            if not turn:  # warms up, and slow allocations are in no one's time
                run()
                memory[name] = peak_mib(run, device)
                continue
            start = clock(device)()
            run()
            seconds[name].append(clock(device)() - start)
    times = {name: statistics.median(values) for name, values in seconds.items()}
    size = num_operations(graph)
    rows = [row(graph.name, "nodes + edges + triangles", "operations", size, "1", 1.0)]
    for name in subjects:
        rows.append(row(graph.name, name, "time", times[name] * 1e3, "ms", times[name] / times[BASE]))
        rows.append(row(graph.name, name, "peak memory", memory[name], "MiB", memory[name] / memory[BASE]))
    return rows


def num_operations(graph: Graph) -> int:
    return len(graph.x) + graph.triples.edge.shape[1] + graph.triples.triangle.shape[1]


def bf16_errors(graph: Graph) -> list[dict[str, object]]:
    """Greatest error of an output under autocast over its greatest value, against float64."""
    errors = {}
    for name, make in {
        BASE: lambda: GINConv(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))),
        "RO3Conv": lambda: RO3Conv(WIDTH, WIDTH),
        "RO3Pooling": lambda: RO3Pooling(WIDTH, WIDTH, rank=32),
    }.items():
        torch.manual_seed(0)
        layer = make().to(graph.x.device)
        given = {} if name == BASE else {"triples": graph.triples}
        with torch.no_grad():
            with torch.autocast(graph.x.device.type, torch.bfloat16):
                found = layer(graph.x, graph.edge_index, **given).double()
            exact = layer.double()(graph.x.double(), graph.edge_index, **given)
        errors[name] = float((found - exact).abs().max() / exact.abs().max())
    return [row(graph.name, f"{n}, bf16", "relative error", e, "1", e / errors[BASE]) for n, e in errors.items()]


def exponents(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for entry in rows:
        kind, size = str(entry["case"]).split(", N ")
        if entry["metric"] in ("time", "operations") and float(size) >= 1e4:
            place = math.log(float(size)), math.log(float(entry["value"]))
            found.setdefault((kind, str(entry["subject"])), []).append(place)
    slopes = {key: slope(points) for key, points in found.items() if len(points) > 1}
    return [
        row(kind, name, "exponent", value, "1", value / slopes[kind, BASE]) for (kind, name), value in slopes.items()
    ]


def slope(points: list[tuple[float, float]]) -> float:
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def row(case: str, subject: str, metric: str, value: float, unit: str, ratio: float) -> dict[str, object]:
    return {
        "case": case, "subject": subject, "metric": metric, "value": value, "unit": unit, "baseline": BASE,
        "ratio": ratio,
    }  # fmt: skip


def show_case(rows: list[dict[str, object]]) -> None:
    rows = [entry for entry in rows if entry["metric"] != "operations"]
    for timed, held in zip(rows[::2], rows[1::2], strict=True):
        numbers = f"{timed['value']:.1f} | {timed['ratio']:.2f} | {held['value']:.0f} | {held['ratio']:.2f}"
        print(f"| {timed['case']} | {timed['subject']} | {numbers} |", flush=True)


def show_dense(rows: list[dict[str, object]]) -> None:
    for entry in rows:
        if entry["subject"] == "PPGN block" and entry["metric"] == "peak memory":
            sizes = [10**power for power in (4, 5, 6)]
            held = [entry["value"] * (size / PPGN_NODES) ** 2 / 2**20 for size in sizes]
            numbers = ", ".join(f"N {size:.0e}: {tib:.3g} TiB" for size, tib in zip(sizes, held, strict=True))
            print(f"\nPPGN block beyond, by N**2: {numbers}".replace("e+0", "e"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three rounds, up to 2e4 nodes")
    parser.add_argument("--only", default="", help="cases whose names hold this text, as 'random, N 1e5'")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch_geometric")
    threads = f"{device.type}, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, torch_geometric {torch_geometric.__version__}, {threads}")
    check_answers(device)
    print("\n| case | subject | ms | ratio | peak MiB | ratio |\n| --- | --- | ---: | ---: | ---: | ---: |")
    rows = []
    for kind, size in itertools.product(
        ("random", "small world"), (1000, 10_000, 20_000) if arguments.quick else (1000, 10_000, 100_000, 1_000_000)
    ):
        if arguments.only not in case_name(kind, size):
            continue
        graph = make_graph(kind, size, device)
        rounds = 3 if arguments.quick else {1_000_000: 1, 100_000: 3}.get(size, 7)
        measured = measure(graph, rounds)
        show_case(measured)
        rows += measured
        if size == 10_000:
            rows += bf16_errors(graph)
    show_dense(rows)
    print("\n| case | subject | metric | value |\n| --- | --- | --- | ---: |")
    rows += exponents(rows)
    for entry in (entry for entry in rows if entry["metric"] in ("relative error", "exponent")):
        print(f"| {entry['case']} | {entry['subject']} | {entry['metric']} | {entry['value']:.3g} |")
    print(f"\npeak of the whole process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
