"""How far does a graph network come on molecules in equal time, with sums over triples and with attention?

python benchmarks/bench_molecules.py [--quick] [--seconds 30] [--seeds 8] [--json FILE]        (needs rdkit)

Molecules are made of two to five fragments (rings, chains, functional groups), joined by single bonds at random atoms
with a hydrogen; no data are downloaded. The target is the penalised logP of ZINC's benchmarks: Crippen's logP less the
synthetic accessibility and less the atoms by which the largest ring exceeds six, standardised over the training
molecules (Jin et al. 2018, https://arxiv.org/abs/1802.04364). Nodes have their element, charge and hydrogens, edges
their kind of bond, and with attention nodes have random-walk encodings of 16 steps, as GPS has on ZINC.

Each model trains for as many seconds of CPU time on one thread, on batches of 64 molecules, by AdamW on the absolute
error, with a learning rate that rises for a tenth of the time and falls to zero by a cosine. Preparation
(encodings, triangles) is not counted; it is done once for a data set. The learning rate of each model is the better of
two on validation molecules, with a seed that is not reported. Figures are of test molecules, the mean over seeds and
its standard error.

The baseline is GPS as PyTorch Geometric's example has it: GPSConv with a GINEConv and four heads, sums of nodes.
"""

import argparse
import json
import math
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import torch_geometric
from rdkit import Chem, RDLogger
from rdkit.Chem import Crippen, RDConfig
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GINEConv, GPSConv, global_add_pool
from torch_geometric.transforms import AddRandomWalkPE

from lightning_accel.data import AddRelationalTriples
from lightning_accel.models import ConvolutionLayers, RelationalGNN

sys.path.append(str(Path(RDConfig.RDContribDir) / "SA_Score"))
import sascorer

FRAGMENTS = [
    "c1ccccc1", "c1ccncc1", "c1ccoc1", "c1ccsc1", "c1cc[nH]c1", "C1CCCCC1", "C1CCNCC1", "C1CCOC1", "C1CC1", "C1CCC1",
    "c1ccc2ccccc2c1", "c1ccc2[nH]ccc2c1", "C1CCCCCC1", "CC", "CCC", "CO", "CN", "C(=O)N", "C(=O)O", "CS", "C#N", "CF",
    "CCl", "S(=O)(=O)C", "C=C", "CC(C)C", "N", "O",
]  # fmt: skip
BONDS = [Chem.BondType.SINGLE, Chem.BondType.DOUBLE, Chem.BondType.TRIPLE, Chem.BondType.AROMATIC]
WIDTH, HEADS, STEPS, LAYERS, BATCH = 64, 4, 16, 4, 64
RATES = (1e-3, 3e-3)
BASELINE = "GPS of PyG"


class Molecules(NamedTuple):
    train: list[Data]
    val: list[Data]
    test: list[Data]
    num_atoms: int  # kinds of nodes
    std: float  # of the targets


def make_molecule(draw: random.Random) -> Chem.Mol:
    molecule = Chem.MolFromSmiles(draw.choice(FRAGMENTS))
    for _ in range(draw.randint(1, 4)):
        other = Chem.MolFromSmiles(draw.choice(FRAGMENTS))
        free = [[a.GetIdx() for a in one.GetAtoms() if a.GetTotalNumHs()] for one in (molecule, other)]
        if not free[0]:
            break
        ends = [draw.choice(atoms) for atoms in free]
        both = Chem.RWMol(Chem.CombineMols(molecule, other))
        both.AddBond(ends[0], molecule.GetNumAtoms() + ends[1], Chem.BondType.SINGLE)
        for end in (ends[0], molecule.GetNumAtoms() + ends[1]):
            atom = both.GetAtomWithIdx(end)
            if atom.GetNumExplicitHs():
                atom.SetNumExplicitHs(atom.GetNumExplicitHs() - 1)
        molecule = both.GetMol()
        Chem.SanitizeMol(molecule)
    return molecule


def target_of(molecule: Chem.Mol) -> float:
    largest = max((len(ring) for ring in molecule.GetRingInfo().AtomRings()), default=0)
    return float(Crippen.MolLogP(molecule) - sascorer.calculateScore(molecule) - max(0, largest - 6))


def make_molecules(number: int, seed: int = 0) -> Molecules:
    draw, found, kinds = random.Random(seed), {}, {}
    while len(found) < number:
        molecule = make_molecule(draw)
        if 8 <= molecule.GetNumAtoms() <= 40:
            found.setdefault(Chem.MolToSmiles(molecule), molecule)
    graphs = []
    for molecule in found.values():
        atoms = [(a.GetAtomicNum(), a.GetFormalCharge(), a.GetTotalNumHs()) for a in molecule.GetAtoms()]
        x = torch.tensor([kinds.setdefault(atom, len(kinds)) for atom in atoms])
        bonds = [(b.GetBeginAtomIdx(), b.GetEndAtomIdx(), BONDS.index(b.GetBondType())) for b in molecule.GetBonds()]
        ends = torch.tensor([(i, j) for i, j, _ in bonds] + [(j, i) for i, j, _ in bonds]).T.contiguous()
        kind = torch.tensor([kind for *_, kind in bonds] * 2)
        graph = Data(x, ends, kind, y=torch.tensor([target_of(molecule)]))
        graphs.append(AddRelationalTriples()(AddRandomWalkPE(STEPS)(graph)))
    stops = 8 * number // 10, 9 * number // 10
    y = torch.cat([graph.y for graph in graphs[: stops[0]]])
    for graph in graphs:
        graph.x = F.one_hot(graph.x, len(kinds)).float()
        graph.y = (graph.y - y.mean()) / y.std()
    return Molecules(graphs[: stops[0]], graphs[stops[0] : stops[1]], graphs[stops[1] :], len(kinds), float(y.std()))


class GPS(nn.Module):
    def __init__(self, num_atoms: int) -> None:
        super().__init__()
        self.atoms, self.places = nn.Linear(num_atoms, WIDTH - 8), nn.Linear(STEPS, 8)
        self.place_norm, self.bonds = nn.BatchNorm1d(STEPS), nn.Embedding(len(BONDS), WIDTH)
        self.layers = nn.ModuleList(
            GPSConv(WIDTH, GINEConv(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))), HEADS)
            for _ in range(LAYERS)
        )
        self.head = nn.Sequential(
            nn.Linear(WIDTH, WIDTH // 2), nn.ReLU(), nn.Linear(WIDTH // 2, WIDTH // 4), nn.ReLU(),
            nn.Linear(WIDTH // 4, 1),
        )  # fmt: skip

    def forward(self, batch: Data) -> Tensor:
        x = torch.cat([self.atoms(batch.x), self.places(self.place_norm(batch.random_walk_pe))], dim=1)
        edges = self.bonds(batch.edge_attr)
        for layer in self.layers:
            x = layer(x, batch.edge_index, batch.batch, edge_attr=edges)
        return self.head(global_add_pool(x, batch.batch))[:, 0]


class Ours(nn.Module):
    def __init__(self, num_atoms: int, conv: str, heads: int) -> None:
        super().__init__()
        self.places = STEPS if heads else 0
        layers = ConvolutionLayers(conv, dim=WIDTH, num_layers=LAYERS, attention_heads=heads)
        self.model = RelationalGNN(
            num_atoms + self.places, num_targets=1, num_relations=len(BONDS), level="graph", target_kind="regression",
            error="absolute", layers=layers,
        )  # fmt: skip

    def forward(self, batch: Data) -> Tensor:
        x = torch.cat([batch.x, batch.random_walk_pe], dim=1) if self.places else batch.x
        size, triangles = batch.num_graphs, batch.triangle_index
        return self.model(x, batch.edge_index, batch.edge_attr, batch.batch, size, triangles)[:, 0]


SUBJECTS: dict[str, Callable[[int], nn.Module]] = {
    BASELINE: GPS,
    "RO3Conv and attention": lambda atoms: Ours(atoms, "RO3Conv", HEADS),
    "GINEConv and attention": lambda atoms: Ours(atoms, "GINEConv", HEADS),
    "RO3Conv": lambda atoms: Ours(atoms, "RO3Conv", 0),
    "GINEConv": lambda atoms: Ours(atoms, "GINEConv", 0),
}


class Trained(NamedTuple):
    val: float  # mean absolute errors in standard deviations
    test: float
    epochs: float


def train(make: Callable[[int], nn.Module], data: Molecules, rate: float, seed: int, seconds: float) -> Trained:
    torch.manual_seed(seed)
    model = make(data.num_atoms).train()
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=1e-5)
    begin, used, batches = time.process_time(), 0.0, list[Batch]()
    steps = 0
    while used < seconds:
        if not batches:
            start = time.process_time()  # collation is in nobody's time
            order = torch.randperm(len(data.train)).tolist()
            rows = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
            batches = [Batch.from_data_list([data.train[i] for i in part]) for part in rows]
            begin += time.process_time() - start
        batch = batches.pop()
        share = used / seconds
        factor = share / 0.1 if share < 0.1 else 0.5 + 0.5 * math.cos(math.pi * (share - 0.1) / 0.9)
        optimizer.param_groups[0]["lr"] = rate * max(factor, 1e-2)
        loss = F.l1_loss(model(batch), batch.y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
        used = time.process_time() - begin
    errors = [evaluate(model.eval(), part) for part in (data.val, data.test)]
    return Trained(*errors, steps * BATCH / len(data.train))


@torch.no_grad()
def evaluate(model: nn.Module, graphs: list[Data]) -> float:
    batches = [Batch.from_data_list(graphs[i : i + 256]) for i in range(0, len(graphs), 256)]
    return float(torch.cat([(model(batch) - batch.y).abs() for batch in batches]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="500 molecules, three seconds, two seeds")
    parser.add_argument("--seconds", type=float, default=30, help="CPU time of each training")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--molecules", type=int, default=6000)
    parser.add_argument("--subjects", nargs="+", default=[*SUBJECTS], choices=[*SUBJECTS])
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seconds, arguments.seeds, arguments.molecules = 3, 2, 500
    torch.set_num_threads(1)
    RDLogger.DisableLog("rdApp.*")
    warnings.filterwarnings("ignore", module="torch_geometric")
    data = make_molecules(arguments.molecules)
    sizes = [graph.num_nodes or 0 for graph in data.train]
    print(f"torch {torch.__version__}, torch_geometric {torch_geometric.__version__}, cpu, 1 thread")
    print(f"{arguments.molecules} molecules of {statistics.mean(sizes):.1f} atoms, standard deviation {data.std:.2f}")
    rates = {
        name: min(RATES, key=lambda rate: train(SUBJECTS[name], data, rate, 100, arguments.seconds).val)
        for name in arguments.subjects
    }
    found: dict[str, list[Trained]] = {name: [] for name in arguments.subjects}
    for seed in range(arguments.seeds):
        for name, values in found.items():
            values.append(train(SUBJECTS[name], data, rates[name], seed, arguments.seconds))
        print(f"  seed {seed}: {', '.join(f'{n} {v[-1].test:.4f}' for n, v in found.items())}", flush=True)
    rows = []
    print("\n| model | learning rate | epochs | test MAE | less that of GPS |\n| --- | ---: | ---: | ---: | ---: |")
    base = [value.test for value in found.get(BASELINE, [])]
    for name, values in found.items():
        errors = [value.test for value in values]
        less = [error - other for error, other in zip(errors, base, strict=True)] if base else []
        shown = "" if name == BASELINE or not less else f"{statistics.mean(less):+.4f} +- {standard_error(less):.4f}"
        mean, epochs = statistics.mean(errors), statistics.mean(value.epochs for value in values)
        print(f"| {name} | {rates[name]:g} | {epochs:.1f} | {mean:.4f} +- {standard_error(errors):.4f} | {shown} |")
        rows.append({
            "case": "molecules", "subject": name, "metric": "test MAE", "value": mean, "unit": "standard deviations",
            "baseline": BASELINE, "ratio": mean / statistics.mean(base) if base else None,
        })  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


def standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5


if __name__ == "__main__":
    main()
