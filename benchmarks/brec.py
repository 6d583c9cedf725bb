"""How many of BREC's 400 pairs of graphs does a trained RelationalPooling tell apart?

python benchmarks/brec.py --data FOLDER [--quick] [--subjects "marks 1" ...] [--files basic ...] [--seeds 0 1 ...]
    [--pairs 0:80:2] [--json FILE]
python benchmarks/brec.py --data FOLDER --ceilings

FOLDER holds the arrays of graph6 strings of GraphPKU/BREC (customize/Data/raw), in which pairs follow each other.

Protocol of Wang and Zhang 2023, https://arxiv.org/abs/2304.07702: for each pair a fresh model is trained to make the
embeddings of 32 relabelled copies of both graphs dissimilar (cosine, margin 0, Adam at 1e-4, batches of 8 pairs); the
pair counts as told apart if Hotelling's T^2 of the 32 differences of 16 numbers exceeds 72.34, and that of 32
differences of copies of one of the graphs, the reliability check, does not. As in their code, T^2 is not multiplied
by 32, which makes it harder to exceed. Where this differs: numbers are float64; T^2 is computed from differences
divided by their standard deviation, the same number without rounding; a pair that fails the reliability check does not
count; training lasts 5 epochs, and sees one tuple of each graph at a time, where there are marks. Evaluation is exact.
``--ceilings`` trains nothing, and counts the pairs that any network of a kind with 20 layers could tell apart, or with
10 layers where any two nodes are marked (more tell no more here).

Pairs that refinement of colours proves alike to every network of the subject's kind (``refinement_hash``, its column
``alike``) are not trained, and count as not told apart.

The baseline of a row is the best of PPGN, KP-GNN and I2-GNN there, the one with most pairs: I2-GNN, 281 of 400.
"""

import argparse
import json
import statistics
import warnings
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
import torch
from torch import Tensor, nn

from lightning_accel.nn.relational.marked_tuples import TupleKind
from lightning_accel.nn.relational.pooling import RelationalPooling
from lightning_accel.nn.relational.refinement import refinement_hash

RELABELLED, WIDTH, OUT, THRESHOLD = 32, 8, 16, 72.34
EPOCHS, BATCH, LEARNING_RATE, WEIGHT_DECAY = 5, 16, 1e-4, 1e-4
CATEGORIES = {
    "Basic": ["basic"], "Regular": ["regular", "str", "4vtx", "dr"], "Extension": ["extension"], "CFI": ["cfi"],
}  # fmt: skip
FILES = [file for files in CATEGORIES.values() for file in files]
BASELINE = {"Basic": 60, "Regular": 100, "Extension": 100, "CFI": 21, "total": 281}


class SineGIN(nn.Module):
    """The same layer ``rounds`` times: h = norm(sin(W1 h + W2 sum over neighbours / sqrt(degree) + b)).

    The sine keeps differences alive over many layers, where others saturate or forget; normalisation is per node.
    """

    def __init__(self, inputs: int, rounds: int, gain: float = 1.0) -> None:
        super().__init__()
        self.first, self.own = nn.Linear(inputs, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH, bias=False)
        self.rounds = rounds
        nn.init.normal_(self.first.weight)
        nn.init.orthogonal_(self.own.weight)
        nn.init.normal_(self.own.bias, std=0.3)
        nn.init.orthogonal_(self.other.weight, gain)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        h = self.first(x)
        if not torch.is_grad_enabled() and (adjacency := shared_adjacency(edge_index, batch, x.dtype)) is not None:
            return self._copies_of_one_graph(h, adjacency)
        degree = torch.bincount(edge_index[1], minlength=len(x)).clamp(min=1).to(x.dtype)
        scale = degree.rsqrt()[edge_index[1], None]
        for _ in range(self.rounds):
            neighbours = torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]] * scale)
            h = nn.functional.layer_norm(torch.sin(self.own(h) + self.other(neighbours)), (WIDTH,))
        return h

    def _copies_of_one_graph(self, h: Tensor, adjacency: Tensor) -> Tensor:
        """The same by products of matrices, in (nodes, features, copies), where lookups would take most of the time."""
        nodes = len(adjacency)
        h = h.view(-1, nodes, WIDTH).permute(1, 2, 0).contiguous()
        for _ in range(self.rounds):
            neighbours = (adjacency @ h.view(nodes, -1)).view(h.shape)
            h = torch.matmul(self.own.weight, h).add_(self.own.bias[:, None])
            h = torch.baddbmm(h, self.other.weight.expand(nodes, -1, -1), neighbours).sin_()
            h.sub_(h.mean(1, keepdim=True))
            h.mul_(h.square().mean(1, keepdim=True).add_(1e-5).rsqrt_())
        return h.permute(2, 0, 1).reshape(-1, WIDTH)


def shared_adjacency(edge_index: Tensor, batch: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Adjacency, divided by the square root of the degree, of the graph that all graphs of a batch copy, if any."""
    copies = int(batch[-1]) + 1
    nodes, arcs = len(batch) // copies, edge_index.shape[1] // copies
    if nodes * copies != len(batch) or arcs * copies != edge_index.shape[1]:
        return None
    first = edge_index[:, :arcs]
    shift = nodes * torch.arange(copies)[:, None]
    if not torch.equal(edge_index.view(2, copies, arcs), first[:, None] + shift):
        return None
    adjacency = torch.zeros(nodes, nodes, dtype=dtype)
    adjacency[first[1], first[0]] = 1
    adjacency /= adjacency.sum(1, keepdim=True).clamp(min=1).sqrt()
    return adjacency.to_sparse_csr() if arcs < nodes * nodes / 8 else adjacency


class Plain(nn.Module):
    """GIN without marks, summed."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.gin, self.head = SineGIN(1, rounds), make_head(WIDTH, OUT)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, size: int) -> Tensor:
        return self.head(x.new_zeros(size, WIDTH).index_add(0, batch, self.gin(x, edge_index, batch)))


class Marked(nn.Module):
    """RelationalPooling for each number of marks, each with as many rounds, side by side."""

    def __init__(self, rounds: dict[int, int], tuples: TupleKind | None = None) -> None:
        super().__init__()
        self.poolings = nn.ModuleList(
            RelationalPooling(
                SineGIN(1 + marks, rounds[marks]), marks, tuples, chunk_size=2**17,
                head=make_head((1 + marks) * WIDTH, OUT // len(rounds)),
            )
            for marks in rounds
        )  # fmt: skip

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, size: int) -> Tensor:
        return torch.cat([pooling(x, edge_index, batch=batch, size=size) for pooling in self.poolings], dim=1)


def make_head(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, outputs))


SUBJECTS: dict[str, Any] = {
    "GIN": lambda: Plain(20),
    "marks 1": lambda: Marked({1: 20}),
    "marks 2": lambda: Marked({2: 20}),
    "marks 1 and 2": lambda: Marked({1: 20, 2: 4}),
    "marks 3": lambda: Marked({3: 4}),
    "2 marks, any": lambda: Marked({2: 10}, "all"),
}


KINDS: dict[str, dict[str, Any]] = {
    "message passing": {"num_layers": 20},
    "RO3Conv": {"num_layers": 20, "triples": True},
    "1 mark": {"num_layers": 20, "marks": 1},
    "RO3Conv, 1 mark": {"num_layers": 20, "marks": 1, "triples": True},
    "2 marks": {"num_layers": 20, "marks": 2},
    "2 marks, any": {"num_layers": 10, "marks": 2, "tuples": "all"},
}


class Verdict(NamedTuple):
    told_apart: bool
    reliable: bool
    statistic: float
    check: float


Graph = tuple[int, Tensor]  # nodes, arcs (2, M) in both directions


def read_pairs(folder: Path, file: str) -> list[tuple[Graph, Graph]]:
    texts = np.load(folder / f"{file}.npy", allow_pickle=False).reshape(-1)
    graphs = [as_graph(text if isinstance(text, bytes) else text.encode()) for text in texts]
    return list(zip(graphs[::2], graphs[1::2], strict=True))


def as_graph(graph6: bytes) -> Graph:
    graph = nx.from_graph6_bytes(graph6)
    edges = torch.tensor(list(graph.edges)).T
    return len(graph), torch.cat([edges, edges.flip(0)], dim=1)


def relabel(graph: Graph, times: int) -> list[Graph]:
    """The graph as it is, then with nodes renumbered and arcs shuffled."""
    nodes, arcs = graph
    return [graph] + [
        (nodes, torch.randperm(nodes)[arcs][:, torch.randperm(arcs.shape[1])]) for _ in range(times - 1)
    ]  # fmt: skip


def embed(model: nn.Module, graphs: list[Graph]) -> Tensor:
    sizes = torch.tensor([nodes for nodes, _ in graphs])
    shift = sizes.cumsum(0) - sizes
    edge_index = torch.cat([arcs + first for (_, arcs), first in zip(graphs, shift, strict=True)], dim=1)
    batch = torch.repeat_interleave(sizes)
    return model(torch.ones(len(batch), 1), edge_index, batch=batch, size=len(graphs))


def t_squared(differences: Tensor) -> float:
    """Hotelling's statistic of (32, 16), without the factor 32; 0 where there is no spread."""
    spread = differences.std(0)
    scaled = differences / torch.where(spread > 0, spread, torch.inf)
    mean = scaled.mean(0)
    return float(mean @ torch.linalg.pinv(torch.cov(scaled.T)) @ mean)


def alike(model: nn.Module, pair: tuple[Graph, Graph]) -> bool:
    """Whether no weights of the model tell the pair apart."""
    if not isinstance(model, Marked):
        return False
    for pooling in model.poolings:
        kind = {"num_layers": pooling.base_gnn.rounds, "marks": pooling.marks, "tuples": pooling.tuples}
        first, second = (refinement_hash(torch.ones(nodes, 1), arcs, **kind) for nodes, arcs in pair)
        if not torch.equal(first, second):
            return False
    return True


def judge(model: nn.Module, pair: tuple[Graph, Graph]) -> Verdict:
    """Train on one pair, and test."""
    both = [relabel(graph, RELABELLED) for graph in pair]
    graphs = [graph for copies in zip(*both, strict=True) for graph in copies]  # of both in turn
    train(model.train(), graphs)
    one = relabel(pair[int(torch.randint(2, ()))], 2 * RELABELLED)
    at_once = 2 * RELABELLED if pair[0][0] < 16 else 1
    with torch.no_grad():
        model.eval()
        values = torch.cat([
            embed(model, part[i : i + at_once]) for part in (graphs, one) for i in range(0, len(part), at_once)
        ])  # fmt: skip
    differences = values[::2] - values[1::2]
    statistic, check = t_squared(differences[:RELABELLED]), t_squared(differences[RELABELLED:])
    reliable = check < THRESHOLD
    return Verdict(statistic > THRESHOLD and reliable, reliable, statistic, check)


def train(model: nn.Module, graphs: list[Graph]) -> None:
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    for _ in range(EPOCHS):
        for i in range(0, len(graphs), BATCH):
            values = embed(model, graphs[i : i + BATCH])
            loss = nn.functional.cosine_embedding_loss(values[::2], values[1::2], values.new_tensor([-1.0]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def measure(folder: Path, subject: str, file: str, seed: int, which: slice) -> dict[str, Any]:
    begin = process_time()
    verdicts = []
    num_alike = 0
    for index, pair in list(enumerate(read_pairs(folder, file)))[which]:
        torch.manual_seed(100_000 * seed + 1000 * FILES.index(file) + index)
        model = SUBJECTS[subject]()
        if alike(model, pair):
            num_alike += 1
            continue
        verdicts.append(judge(model, pair))
        if len(verdicts) % 20 == 0:
            so_far = sum(verdict.told_apart for verdict in verdicts)
            print(f"  {subject}, {file}: {so_far} of {len(verdicts)}, {process_time() - begin:.0f} s", flush=True)
    apart = [v for v in verdicts if v.told_apart]
    return {
        "pairs": len(verdicts) + num_alike, "alike": num_alike, "told apart": len(apart),
        "reliability failures": sum(not v.reliable for v in verdicts),
        "seconds": process_time() - begin, "smallest T^2 of those": min((v.statistic for v in apart), default=None),
        "largest T^2 of the others": max((v.statistic for v in verdicts if not v.told_apart), default=None),
        "largest T^2 of checks": max((v.check for v in verdicts), default=None),
    }  # fmt: skip


def as_rows(figures: dict[tuple[str, str, int], dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each file, and of each category of which all files were measured."""
    rows = []
    for (subject, file, seed), found in figures.items():
        rows += [
            row(f"{file}, seed {seed}", subject, metric, value, None)
            for metric, value in found.items() if value is not None
        ]  # fmt: skip
    for subject, seed in dict.fromkeys((subject, seed) for subject, _, seed in figures):
        sums = {}
        for category, files in {**CATEGORIES, "total": FILES}.items():
            if all((subject, file, seed) in figures for file in files):
                sums[category] = sum(figures[subject, file, seed]["told apart"] for file in files)
                rows.append(row(f"{category}, seed {seed}", subject, "told apart", sums[category], BASELINE[category]))
    return rows


def row(case: str, subject: str, metric: str, value: float, baseline: float | None) -> dict[str, Any]:
    unit = "s" if metric == "seconds" else "1" if "T^2" in metric else "pairs"
    return {
        "case": case, "subject": subject, "metric": metric, "value": value, "unit": unit, "baseline": baseline,
        "ratio": None if baseline is None else value / baseline,
    }  # fmt: skip


def print_table(rows: list[dict[str, Any]]) -> None:
    """Pairs told apart, of each seed and on average."""
    print("\n| category | subject | told apart, mean | of others | of each seed |")
    print("| --- | --- | ---: | ---: | --- |")
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for found in rows:
        if found["metric"] == "told apart":
            groups.setdefault((found["case"].split(",")[0], found["subject"]), []).append(found)
    for (category, subject), group in groups.items():
        values = [found["value"] for found in group]
        baseline = "" if group[0]["baseline"] is None else group[0]["baseline"]
        print(
            f"| {category} | {subject} | {statistics.mean(values):.4g} | {baseline} | {', '.join(map(str, values))} |"
        )


def count_ceilings(folder: Path) -> None:
    """Print how many pairs refinement tells apart, by category and kind of network."""
    parts = {category: files for category, files in CATEGORIES.items() if len(files) == 1}
    parts |= {file: [file] for file in CATEGORIES["Regular"]} | {"total": FILES}
    told = {
        (kind, file): sum(
            len({int(refinement_hash(torch.ones(nodes, 1), arcs, **options)) for nodes, arcs in pair}) == 2
            for pair in read_pairs(folder, file)
        )
        for kind, options in KINDS.items() for file in FILES
    }  # fmt: skip
    print(f"| kind | {' | '.join(parts)} |\n| --- |{' ---: |' * len(parts)}")
    for kind in KINDS:
        print(f"| {kind} | {' | '.join(str(sum(told[kind, file] for file in files)) for files in parts.values())} |")


def as_slice(text: str) -> slice:
    return slice(*(int(part) if part else None for part in text.split(":")))


def check() -> None:
    """Both ways to compute the base agree, and T^2 is that of the textbook."""
    base = SineGIN(3, 4)
    graph = as_graph(nx.to_graph6_bytes(nx.petersen_graph(), header=False).strip())
    pooling = RelationalPooling(base, 2).eval()
    with torch.no_grad():
        fast = pooling(torch.ones(10, 1), graph[1])
    slow = pooling(torch.ones(10, 1), graph[1])
    assert torch.allclose(fast, slow.detach(), rtol=0, atol=1e-11)
    differences = torch.randn(RELABELLED, 3) * torch.tensor([1.0, 1e-3, 1e3]) + 1
    mean = differences.mean(0)
    assert np.isclose(t_squared(differences), float(mean @ torch.linalg.solve(torch.cov(differences.T), mean)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of basic.npy, regular.npy, ..")
    parser.add_argument("--quick", action="store_true", help="each 20th pair of basic, regular and extension")
    parser.add_argument("--ceilings", action="store_true", help="count what networks could tell apart at most")
    parser.add_argument("--subjects", nargs="+", default=["GIN", "marks 1", "marks 2"], choices=[*SUBJECTS])
    parser.add_argument("--files", nargs="+", default=FILES, choices=FILES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="the protocol has ten")
    parser.add_argument("--pairs", type=as_slice, default=slice(None), help="some pairs of each file, such as 0:80:2")
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    files = ["basic", "regular", "extension"] if arguments.quick else arguments.files
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.filterwarnings("ignore", message="Sparse CSR")
    check()
    if arguments.ceilings:
        count_ceilings(arguments.data)
        return
    figures = {}
    for seed in arguments.seeds:
        for subject in arguments.subjects:
            for file in files:
                found = measure(
                    arguments.data, subject, file, seed, slice(None, None, 20) if arguments.quick else arguments.pairs
                )
                figures[subject, file, seed] = found
                print(f"{subject}, {file}, seed {seed}: {found}", flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps(as_rows(figures), indent=1))
    print(f"\ntorch {torch.__version__}, cpu, 1 thread, seeds {arguments.seeds}")
    print_table(as_rows(figures))


if __name__ == "__main__":
    main()
