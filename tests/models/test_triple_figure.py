import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.patches import Polygon
from torch_geometric.data import Data

from lightning_accel import draw_triples
from lightning_accel.nn.relational_attribution import TripleScores

GRAPH = Data(num_nodes=4, edge_index=torch.tensor([[0, 1, 2, 2, 3], [1, 2, 0, 3, 3]]))
SCORES = TripleScores(
    torch.tensor([[0, 1, 2], [0, 2, 3], [1, 2, 3]]), torch.tensor([3, 2, 2]), torch.tensor([0.5, -2.0, 0.25])
)


def triples_drawn(figure):
    return [one for one in figure.axes[0].patches if isinstance(one, Polygon)]


def test_triangles_are_filled_and_wedges_are_lines():
    wedge, triangle, other = triples_drawn(draw_triples(GRAPH, SCORES))
    assert [one.get_fill() for one in (wedge, triangle, other)] == [False, True, False]
    assert len(triangle.get_xy()) == 4  # the first corner again, at the end
    assert len(wedge.get_xy()) == 3
    red, _, _, _ = triangle.get_facecolor()
    _, _, blue, _ = wedge.get_edgecolor()
    assert red > triangle.get_facecolor()[2]
    assert blue > wedge.get_edgecolor()[0]


def test_the_largest_are_drawn():
    (one,) = triples_drawn(draw_triples(GRAPH, SCORES, num_triples=1))
    assert not one.get_fill()


def test_a_graph_without_triples_is_drawn():
    none = TripleScores(torch.empty(0, 3, dtype=torch.int64), torch.empty(0, dtype=torch.int64), torch.empty(0))
    assert triples_drawn(draw_triples(Data(num_nodes=2, edge_index=torch.empty(2, 0, dtype=torch.int64)), none)) == []


def test_scores_of_another_graph_are_refused():
    with pytest.raises(
        ValueError, match=r"the graph has 3 nodes, the scores are of a triple with node 3.*another graph"
    ):
        draw_triples(Data(num_nodes=3, edge_index=torch.empty(2, 0, dtype=torch.int64)), SCORES)


@pytest.fixture(autouse=True)
def close():
    yield
    plt.close("all")
