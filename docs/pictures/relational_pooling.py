"""Draw graphs that message passing cannot distinguish, the triples that are counted, and measured errors."""

import re
from itertools import combinations
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from style import BLUE, GREY, ORANGE, save

from lightning_accel.nn.relational.sums import Graphs, count_subsets
from lightning_accel.ops.triples.find import find_triples

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
Edges = list[tuple[int, int]]

TRIANGLES: Edges = [(0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 3)]
HEXAGON: Edges = [(i, (i + 1) % 6) for i in range(6)]
CELLS = [(row, column) for row in range(4) for column in range(4)]
STEPS = {(0, 1), (0, 3), (1, 0), (3, 0), (1, 1), (3, 3)}  # of Shrikhande's graph, modulo 4
ROOK: Edges = [
    (a, b) for a, b in combinations(range(16), 2) if any(p == q for p, q in zip(CELLS[a], CELLS[b], strict=True))
]
SHRIKHANDE: Edges = [
    (a, b)
    for a, b in combinations(range(16), 2)
    if ((CELLS[b][0] - CELLS[a][0]) % 4, (CELLS[b][1] - CELLS[a][1]) % 4) in STEPS
]


def counts(edges: Edges, num_nodes: int) -> str:
    index = torch.tensor(edges).T
    found = count_subsets(find_triples(torch.cat([index, index.flip(0)], dim=1), num_nodes), Graphs(None, None))
    return f"{int(found.triangle)} triangles, {int(found.wedge)} open wedges"


def ring(num_nodes: int, turn: float = 0.5, radius: float = 1.0, centre: float = 0.0) -> np.ndarray:
    angle = 2 * np.pi * (np.arange(num_nodes) / num_nodes) + turn * np.pi
    return np.stack([centre + radius * np.cos(angle), radius * np.sin(angle)], axis=1)


def draw_graph(axes: Axes, edges: Edges, places: np.ndarray, marked: Edges | None = None, shade: bool = False) -> None:
    neighbours = set(edges) | {(b, a) for a, b in edges}
    if shade:
        for triple in combinations(range(len(places)), 3):
            if all(pair in neighbours for pair in combinations(triple, 2)):
                axes.fill(*places[list(triple)].T, color=ORANGE, alpha=0.35, lw=0)
    for a, b in edges:
        is_marked = marked is not None and ((a, b) in marked or (b, a) in marked)
        axes.plot(*places[[a, b]].T, color=ORANGE if is_marked else GREY, lw=2.5 if is_marked else 1.1, zorder=1)
    axes.scatter(*places.T, s=90, color=BLUE, zorder=2, edgecolors="white")
    axes.set_aspect("equal")
    axes.axis("off")


def draw_pairs() -> None:
    figure, grid = plt.subplots(2, 2, figsize=(9.5, 8.2))
    pair = np.concatenate([ring(3, radius=0.75, centre=-0.85), ring(3, radius=0.75, centre=0.85)])
    draw_graph(grid[0, 0], TRIANGLES, pair, shade=True)
    grid[0, 0].set_title(f"Two triangles\n{counts(TRIANGLES, 6)}")
    draw_graph(grid[0, 1], HEXAGON, ring(6), marked=[(0, 1), (1, 2)])
    grid[0, 1].set_title(f"Hexagon\n{counts(HEXAGON, 6)} (one marked)")
    # a node and its neighbours: two triangles in rook's graph, a ring of six in Shrikhande's
    for axes, name, edges in ((grid[1, 0], "Rook's graph", ROOK), (grid[1, 1], "Shrikhande's graph", SHRIKHANDE)):
        around = sorted({b for a, b in edges if a == 0} | {a for a, b in edges if b == 0})
        inner = [(a, b) for a, b in edges if a in around and b in around]
        if name.startswith("Rook"):
            order = around
        else:
            order = [around[0]]
            while len(order) < 6:
                near = {b for a, b in inner if a == order[-1]} | {a for a, b in inner if b == order[-1]}
                order.append(min(near - set(order)))
        rest = [node for node in range(16) if node not in {0, *around}]
        places = np.zeros((16, 2))
        places[order], places[rest] = ring(6, radius=1.0), ring(9, radius=1.9)
        draw_graph(axes, edges, places, marked=inner)
        axes.scatter([0], [0], s=120, color="black", zorder=3)
        axes.set_title(f"{name}, 16 nodes of degree 6\n{counts(edges, 16)}")
    figure.tight_layout(h_pad=2)
    save(figure, "relational_pooling_pairs")


def draw_triples() -> None:
    """Draw the five inputs of a node i."""
    figure, grid = plt.subplots(1, 4, figsize=(10, 2.5))
    triangle = np.array([[0.0, 0.0], [-0.6, 1.0], [0.6, 1.0]])
    path = np.array([[-0.9, 0.2], [0.0, 0.9], [0.9, 0.2]])
    kinds = [
        ("message: $x_j$", np.array([[0.0, 0.0], [0.0, 1.0]]), [(0, 1)], ["$i$", "$j$"]),
        ("triangle: $b_j b_k$", triangle, [(0, 1), (0, 2), (1, 2)], ["$i$", "$j$", "$k$"]),
        ("wedge centre: $b_j b_k$", triangle, [(0, 1), (0, 2)], ["$i$", "$j$", "$k$"]),
        ("wedge leaf: $c_j b_k$", path, [(0, 1), (1, 2)], ["$i$", "$j$", "$k$"]),
    ]
    for axes, (title, places, edges, names) in zip(grid, kinds, strict=True):
        draw_graph(axes, edges, places)
        axes.scatter(*places[:1].T, s=200, color=ORANGE, zorder=3, edgecolors="white")
        for name, (x, y) in zip(names, places, strict=True):
            axes.text(x, y + (0.28 if y > 0.5 else -0.38), name, ha="center", va="center")
        axes.set(xlim=(-1.3, 1.3), ylim=(-0.6, 1.45), title=title)
        axes.set_aspect("equal")
    save(figure, "relational_pooling_triples")


def read_errors(name: str) -> dict[str, tuple[float, float]]:
    """Mean and standard error of each model of a results file."""
    pattern = r"^\| ([^|]+) \| [\d.]+ \| [\d.]+ \| \**([\d.]+) \+- ([\d.]+)\**"
    found = re.findall(pattern, (RESULTS / name).read_text(), re.MULTILINE)
    return {model: (float(mean), float(error)) for model, mean, error in found}


def draw_errors() -> None:
    figure, grid = plt.subplots(1, 2, figsize=(10, 3.0))
    files = {
        "Molecules": "2026-11-29_molecules_cpu.md",
        "Signed social networks": "2026-11-29_signed_cpu.md",
    }
    for axes, (title, name) in zip(grid, files.items(), strict=True):
        found = dict(sorted(read_errors(name).items(), key=lambda one: -one[1][0]))
        means, errors = zip(*found.values(), strict=True)
        names = [model.replace(" and ", " and\n").replace(", ", ",\n") for model in found]
        colours = [ORANGE if model.startswith("RO3") else GREY for model in found]
        axes.barh(names, means, xerr=errors, color=colours, capsize=3)
        axes.set(title=title, xlabel="test MAE, standard deviations")
        axes.grid(axis="y", visible=False)
    figure.tight_layout(w_pad=3)
    save(figure, "relational_pooling_errors")


if __name__ == "__main__":
    draw_pairs()
    draw_triples()
    draw_errors()
