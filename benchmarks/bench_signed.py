"""How well do graph networks see the conflict in signed social networks, in equal time?

python benchmarks/bench_signed.py [--quick] [--seconds 30] [--seeds 8] [--graphs 3000] [--json FILE]

Nodes have friends and foes. The target is the algebraic conflict, the smallest eigenvalue of the signed Laplacian over
the mean degree (Kunegis et al. 2010, https://doi.org/10.1137/1.9781611972801.49): 0 where the network falls into two
camps without a foe inside or a friend across, as structural balance has it (Cartwright and Harary 1956), and larger the
more triangles and longer cycles contradict that. Networks are dense small worlds (Watts and Strogatz), random
geometric, clustered scale-free and relaxed caveman graphs of 40 to 80 nodes and mean degree about 8, of which a share
of edges is swapped; signs are those of two random camps, of which a share up to a half is flipped. Neither the degrees
nor the number of foes tell of the target.

Nodes have their degree, and all networks but the last two have random-walk encodings of 16 steps, too. Each network
trains as those of bench_molecules.py do. The baseline is GPS as PyTorch Geometric's example has it, with the mean of
nodes, which was better than the sum on validation graphs.
"""

import argparse
import random
from collections.abc import Callable
from pathlib import Path

import networkx as nx
import torch
from graph_training import Split, compare
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GINEConv, GPSConv, global_mean_pool
from torch_geometric.transforms import AddRandomWalkPE

from lightning_accel.data import AddRelationalTriples
from lightning_accel.models import ConvolutionLayers, RelationalGNN

WIDTH, HEADS, STEPS, LAYERS, FEATURES = 64, 4, 16, 4, 3
BASELINE = "GPS of PyG"


def make_network(draw: random.Random) -> nx.Graph:
    nodes, degree, seed = draw.randint(40, 80), draw.choice([6, 8, 10]), draw.randrange(1 << 30)
    kind = draw.choice(["small world", "geometric", "scale-free", "caveman"])
    if kind == "small world":
        graph = nx.watts_strogatz_graph(nodes, degree, 0.3 * draw.random(), seed=seed)
    elif kind == "geometric":
        graph = nx.random_geometric_graph(nodes, 1.1 * (degree / nodes / 3.14) ** 0.5, seed=seed)
    elif kind == "scale-free":
        graph = nx.powerlaw_cluster_graph(nodes, degree // 2, draw.random(), seed=seed)
    else:
        graph = nx.relaxed_caveman_graph(nodes // (degree + 1), degree + 1, 0.4 * draw.random(), seed=seed)
    graph = nx.convert_node_labels_to_integers(nx.Graph(graph))
    if swaps := int(graph.number_of_edges() * draw.choice([0, 0, 0.1, 0.3, 1.0])):
        nx.double_edge_swap(graph, swaps, max_tries=100 * swaps, seed=seed)
    return graph


def sign(graph: nx.Graph, draw: random.Random) -> Data:
    """Return a signed network with its conflict."""
    adjacency = torch.tensor(nx.to_numpy_array(graph))
    random_of = torch.Generator().manual_seed(draw.randrange(1 << 30))
    camp = torch.randint(2, (len(adjacency),), generator=random_of) * 2.0 - 1
    flip = 1 - 2.0 * (torch.rand(adjacency.shape, generator=random_of) < draw.random() / 2)
    signs = adjacency * camp[:, None] * camp * (flip.triu(1) + flip.triu(1).T)
    degree = adjacency.sum(dim=1)
    conflict = torch.linalg.eigvalsh(degree.diag() - signs)[0] / degree.mean()
    edge_index = adjacency.nonzero().T.contiguous()
    x = torch.stack([torch.ones_like(degree), degree / 8, degree.clamp(min=1).log()], dim=1).float()
    is_foe = (signs[edge_index[0], edge_index[1]] < 0).long()
    return AddRelationalTriples()(AddRandomWalkPE(STEPS)(Data(x, edge_index, is_foe, y=conflict.float()[None])))


def make_networks(number: int, seed: int = 0) -> Split:
    draw = random.Random(seed)
    graphs = [sign(make_network(draw), draw) for _ in range(number)]
    stops = 8 * number // 10, 9 * number // 10
    y = torch.cat([graph.y for graph in graphs[: stops[0]]])
    for graph in graphs:
        graph.y = (graph.y - y.mean()) / y.std()
    return Split(graphs[: stops[0]], graphs[stops[0] : stops[1]], graphs[stops[1] :])


class GPS(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nodes, self.place_norm = nn.Linear(FEATURES + STEPS, WIDTH), nn.BatchNorm1d(STEPS)
        self.edges = nn.Embedding(2, WIDTH)
        self.layers = nn.ModuleList(
            GPSConv(WIDTH, GINEConv(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))), HEADS)
            for _ in range(LAYERS)
        )
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, batch: Data) -> Tensor:
        x = self.nodes(torch.cat([batch.x, self.place_norm(batch.random_walk_pe)], dim=1))
        edges = self.edges(batch.edge_attr)
        for layer in self.layers:
            x = layer(x, batch.edge_index, batch.batch, edge_attr=edges)
        return self.head(global_mean_pool(x, batch.batch))[:, 0]


class Ours(nn.Module):
    def __init__(self, layers: ConvolutionLayers, has_places: bool) -> None:
        super().__init__()
        self.place_norm = nn.BatchNorm1d(STEPS) if has_places else None
        self.model = RelationalGNN(
            FEATURES + (STEPS if has_places else 0), num_targets=1, num_relations=2, level="graph",
            target_kind="regression", error="absolute", layers=layers,
        )  # fmt: skip

    def forward(self, batch: Data) -> Tensor:
        x = batch.x
        if self.place_norm is not None:
            x = torch.cat([x, self.place_norm(batch.random_walk_pe)], dim=1)
        size, triangles = batch.num_graphs, batch.triangle_index
        return self.model(x, batch.edge_index, batch.edge_attr, batch.batch, size, triangles)[:, 0]


def layers(conv: str, heads: int = 0, **options: bool) -> ConvolutionLayers:
    return ConvolutionLayers(conv, options, dim=WIDTH, num_layers=LAYERS, attention_heads=heads)


SUBJECTS: dict[str, Callable[[], nn.Module]] = {
    BASELINE: GPS,
    "GINEConv and attention": lambda: Ours(layers("GINEConv", HEADS), has_places=True),
    "GINEConv": lambda: Ours(layers("GINEConv"), has_places=True),
    "RO3Conv": lambda: Ours(layers("RO3Conv", compress_sums=False), has_places=False),
    "RO3Conv, compressed sums": lambda: Ours(layers("RO3Conv", compress_sums=True), has_places=False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="300 networks, three seconds, two seeds")
    parser.add_argument("--seconds", type=float, default=30, help="CPU time of each training")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--graphs", type=int, default=3000)
    parser.add_argument("--subjects", nargs="+", default=[*SUBJECTS], choices=[*SUBJECTS])
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seconds, arguments.seeds, arguments.graphs = 3, 2, 300
    data = make_networks(arguments.graphs)
    subjects = {name: SUBJECTS[name] for name in arguments.subjects}
    compare("signed networks", subjects, BASELINE, data, arguments.seeds, arguments.seconds, arguments.json)


if __name__ == "__main__":
    main()
