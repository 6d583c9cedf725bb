"""What do the messages of PyTorch Geometric's convolutions cost on the CPU, and what in one pass?

python benchmarks/bench_messages.py [--quick] [--threads N]

Forward and backward of one convolution on a random graph with a new ``edge_index`` for each step, as a loader yields
one, so that the order of the edges is computed in each. Subjects take turns in one process: the convolution as it is,
with ``fuse_messages_``, and with PyTorch Geometric's own ways to the same sums, the transposed adjacency matrix as a
torch.sparse CSR tensor and an EdgeIndex sorted by receivers, whose conversion counts as well. Quoted are medians of the
rounds and the ratio to the convolution as it is, its median over rounds and the quartiles.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn import GCNConv, GINConv, MessagePassing, SAGEConv

from lightning_accel.measure.machine import describe_machine
from lightning_accel.nn.message_passing import fuse_messages_

SIZES = [(400, 3_000, 64), (3_840, 30_000, 64), (20_000, 200_000, 64), (100_000, 1_000_000, 32)]
LAYERS = {
    "GINConv": lambda width: GINConv(torch.nn.Linear(width, width)),
    "SAGEConv": lambda width: SAGEConv(width, width),
    "GCNConv": lambda width: GCNConv(width, width),
}
Subject = Callable[[], None]


def step(layer: MessagePassing, x: Tensor, edges: Callable[[], Tensor]) -> None:
    layer(x, edges()).sum().backward()


def subjects(name: str, size: tuple[int, int, int], dtype: torch.dtype) -> Iterator[tuple[str, Subject]]:
    num_nodes, num_edges, width = size
    layer = LAYERS[name](width).to(dtype)
    fused = copy.deepcopy(layer)
    fuse_messages_(fused)
    x = torch.randn(num_nodes, width, dtype=dtype, requires_grad=True)
    edge_index = torch.randint(num_nodes, (2, num_edges))

    def adjacency() -> Tensor:
        values, shape = torch.ones(num_edges, dtype=dtype), (num_nodes, num_nodes)
        return torch.sparse_coo_tensor(edge_index.flip(0), values, shape).to_sparse_csr()

    def sorted_edges() -> Tensor:
        return EdgeIndex(edge_index, sparse_size=(num_nodes, num_nodes)).sort_by("col").values

    yield "as it is", lambda: step(layer, x, edge_index.clone)
    yield "fused", lambda: step(fused, x, edge_index.clone)
    yield "sparse CSR", lambda: step(layer, x, adjacency)
    yield "EdgeIndex", lambda: step(layer, x, sorted_edges)


def measure(runs: dict[str, Subject], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {}
    for name, run in runs.items():
        try:
            run()
        except (RuntimeError, NotImplementedError):  # such as of dtypes for which there is no kernel
            continue
        times[name] = []
    for _ in range(rounds):
        for name, values in times.items():
            begin = time.perf_counter()
            runs[name]()
            values.append(time.perf_counter() - begin)
    return times


def cell(times: dict[str, list[float]], name: str) -> str:
    if name not in times:
        return "fails"
    pairs = zip(times["as it is"], times[name], strict=True)
    low, middle, high = statistics.quantiles([theirs / ours for theirs, ours in pairs], n=4)
    return f"{statistics.median(times[name]) * 1e3:.2f} ms: {middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="five rounds of two sizes in place of fifteen of four")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {describe_machine().cpu}, {arguments.threads} threads\n")
    print("| layer, nodes, edges, width, dtype | as it is | fused | sparse CSR | EdgeIndex |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name in LAYERS:
        for size in SIZES[:2] if arguments.quick else SIZES:
            for dtype in (torch.float32, torch.bfloat16):
                times = measure(dict(subjects(name, size, dtype)), 5 if arguments.quick else 15)
                case = f"{name} {' '.join(f'{number:,}' for number in size)} {str(dtype).removeprefix('torch.')}"
                own = f"{statistics.median(times['as it is']) * 1e3:.2f} ms"
                others = " | ".join(cell(times, subject) for subject in ("fused", "sparse CSR", "EdgeIndex"))
                print(f"| {case} | {own} | {others} |", flush=True)


if __name__ == "__main__":
    main()
