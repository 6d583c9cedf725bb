"""How much faster than recursion is a recurrent network over trees that goes a level at a time?

python benchmarks/bench_tree.py [--quick] [--device cpu|cuda] [--json FILE]

Forward and backward of one TreeRNN, 64 features, 64 hidden; batches of random recursive trees (each node's parent is
drawn among those before it), and of random binary trees with the input at the leaves. The recursion calls the same
weights node by node, its children's states stacked. Subjects are interleaved in one process, on a CPU one thread and
the process's CPU time; medians of the rounds. In a round each subject is called again and again for 20 ms: where other
programs share the machine, they empty its caches meanwhile, and what is called once pays for that whatever it computes.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_accel.nn import TreeRNN, forest_from_nested, join_parents, plan_levels

SIZE = 64
ROUND = 0.02  # seconds of a subject in a round


def recursion(tree: TreeRNN, x: Tensor, parent: Tensor) -> Tensor:
    """States of the roots, (R, H)."""
    children: list[list[int]] = [[] for _ in parent]
    roots = []
    for node, above in enumerate(parent.tolist()):
        (children[above] if above >= 0 else roots).append(node)

    def visit(node: int) -> tuple[Tensor, ...]:
        below = [torch.stack(parts) for parts in zip(*map(visit, children[node]), strict=True)]
        return (lstm if tree.cell == "lstm" else gru)(tree, tree.of_input(x[node]), below)

    return torch.stack([visit(root)[0] for root in roots])


def lstm(tree: TreeRNN, gates: Tensor, below: list[Tensor]) -> tuple[Tensor, ...]:
    if not below:
        i, o, u, _ = gates.chunk(4)
        c = i.sigmoid() * u.tanh()
        return o.sigmoid() * c.tanh(), c
    h, c = below
    of_child = tree.of_child(h)
    i, o, u = (gates[: 3 * SIZE] + of_child[:, : 3 * SIZE].sum(0)).chunk(3)
    c = i.sigmoid() * u.tanh() + ((gates[3 * SIZE :] + of_child[:, 3 * SIZE :]).sigmoid() * c).sum(0)
    return o.sigmoid() * c.tanh(), c


def gru(tree: TreeRNN, gates: Tensor, below: list[Tensor]) -> tuple[Tensor, ...]:
    z, n, r = gates.chunk(3)
    if not below:
        return ((1 - z.sigmoid()) * n.tanh(),)
    h_z, h_n, h_r = tree.of_child(below[0]).chunk(3, 1)
    z = (z + h_z.sum(0)).sigmoid()
    n = (n + ((r + h_r).sigmoid() * h_n).sum(0)).tanh()
    return ((1 - z) * n + z * below[0].sum(0),)


def random_parents(num_trees: int, num_nodes: int) -> Tensor:
    one = lambda: torch.tensor([-1, *(random.randrange(node) for node in range(1, num_nodes))])  # noqa: E731
    return join_parents(one() for _ in range(num_trees))


def random_binary(num_trees: int, num_leaves: int) -> Tensor:
    def grow(leaves: int) -> Any:
        left = random.randint(1, max(1, leaves - 1))
        return 0 if leaves == 1 else [grow(left), grow(leaves - left)]

    return forest_from_nested([grow(num_leaves) for _ in range(num_trees)]).parent


def step(tree: TreeRNN, x: Tensor, parent: Tensor, by_level: bool) -> list[Tensor]:
    x = x.detach().requires_grad_()
    roots = tree(x, parent)[1] if by_level else recursion(tree, x, parent)
    return [roots.detach(), *torch.autograd.grad(roots.sum(), (x, *tree.parameters()))]


def measure(case: str, cell: Any, parent: Tensor, device: torch.device, rounds: int) -> list[dict[str, object]]:
    tree, x = TreeRNN(SIZE, SIZE, cell).to(device), torch.randn(len(parent), SIZE, device=device)
    parent = parent.to(device)
    for actual, expected in zip(step(tree, x, parent, True), step(tree, x, parent, False), strict=True):
        off = float((actual - expected).abs().max() / expected.abs().max())
        assert off < 5e-6, f"states or gradients are off by {off}"
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for by_level, values in times.items():
            start, calls = clock(), 0
            while (spent := clock() - start) < ROUND:
                step(tree, x, parent, by_level)[0].sum().item()
                calls += 1
            values.append(spent / calls)
    base, rows = statistics.median(times[False]), []
    depth = len(plan_levels(parent).sizes)
    label = f"{case}, {len(parent)} nodes, {depth} levels, {cell}"
    for by_level, name in ((False, "recursion"), (True, "TreeRNN")):
        value = statistics.median(times[by_level])
        names = "case", "subject", "metric", "value", "unit", "baseline", "ratio"
        rows.append(dict(zip(names, (label, name, "time", value * 1e3, "ms", "recursion", value / base), strict=True)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three rounds in place of nine")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    random.seed(0)
    if device.type == "cpu":
        torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {device.type}, {torch.get_num_threads()} threads\n")
    print("| case | subject | ms | times as fast |\n| --- | --- | ---: | ---: |", flush=True)
    forests = {
        "16 random trees": random_parents(16, 30),
        "32 random trees": random_parents(32, 30),
        "32 binary trees": random_binary(32, 16),
        "one random tree": random_parents(1, 30),
    }
    rows = []
    for case, parent in forests.items():
        for cell in ("lstm", "gru"):
            measured = measure(case, cell, parent, device, rounds=3 if arguments.quick else 9)
            rows += measured
            for one in measured:
                print(f"| {one['case']} | {one['subject']} | {one['value']:.1f} | {1 / one['ratio']:.1f} |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
