"""Figures of the triples on which a prediction rests."""

from typing import Any

import networkx as nx
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import CenteredNorm
from matplotlib.figure import Figure
from matplotlib.patches import Polygon
from torch import Tensor
from torch_geometric.data import Data

from lightning_accel.nn.relational_attribution import TripleScores


def draw_triples(data: Data, scores: TripleScores, num_triples: int = 20) -> Figure:
    """Draw a graph and its most important triples: red ones increase the output, blue ones decrease it.

    Triangles are filled; wedges are thick lines from one end over the centre to the other.

    Args:
        data: one graph.
        scores: scores from :func:`lightning_accel.attribute_triples` for it.
        num_triples: how many of the largest magnitude are drawn.

    Raises:
        ValueError: if the scores name nodes that the graph does not have.
    """
    graph = _simple_graph(data.edge_index, data.num_nodes or 0)
    if scores.triples.numel() and int(scores.triples.max()) >= len(graph):
        raise ValueError(
            f"the graph has {len(graph)} nodes, the scores are of a triple with node {int(scores.triples.max())}: they "
            "belong to another graph"
        )
    places = nx.spring_layout(graph, seed=0)
    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.add_subplot()
    nx.draw_networkx(graph, places, ax=axes, node_color="white", edgecolors="black", edge_color="lightgrey")
    largest = scores.score.abs().topk(min(num_triples, len(scores.score))).indices
    colours = ScalarMappable(CenteredNorm(0, _largest(scores.score)), colormaps["RdBu_r"])
    for triple, kind, score in zip(*(part[largest].tolist() for part in scores), strict=True):
        corners = [places[node] for node in triple]
        is_triangle = kind == 3
        style: dict[str, Any] = {"fill": is_triangle, "linewidth": 1 if is_triangle else 4, "alpha": 0.4, "zorder": 0}
        axes.add_patch(Polygon(corners, closed=is_triangle, color=colours.to_rgba(score), **style))
    axes.set_axis_off()
    figure.colorbar(colours, ax=axes, label="what a triple adds")
    return figure


def _simple_graph(edge_index: Tensor | None, num_nodes: int) -> nx.Graph:
    graph = nx.Graph()
    graph.add_nodes_from(range(num_nodes))
    if edge_index is not None:
        graph.add_edges_from((i, j) for i, j in edge_index.T.tolist() if i != j)
    return graph


def _largest(score: Tensor) -> float:
    return float(score.abs().max()) or 1.0 if len(score) else 1.0
