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
import random
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from graph_training import Split, compare
from rdkit import Chem, RDLogger
from rdkit.Chem import Crippen, RDConfig
from torch import Tensor, nn
from torch_geometric.data import Data
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
WIDTH, HEADS, STEPS, LAYERS = 64, 4, 16, 4
BASELINE = "GPS of PyG"


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


def make_molecules(number: int, seed: int = 0) -> Split:
    """Return molecules whose targets are standardised."""
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
    return Split(graphs[: stops[0]], graphs[stops[0] : stops[1]], graphs[stops[1] :])


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
    def __init__(self, num_atoms: int, conv: str, heads: int, compress_sums: bool = False) -> None:
        super().__init__()
        self.places = STEPS if heads else 0
        layers = ConvolutionLayers(
            conv, dim=WIDTH, num_layers=LAYERS, attention_heads=heads, compress_sums=compress_sums
        )
        self.model = RelationalGNN(
            num_atoms + self.places, num_targets=1, num_relations=len(BONDS), level="graph", target_kind="regression",
            error="absolute", layers=layers,
        )  # fmt: skip

    def forward(self, batch: Data) -> Tensor:
        x = torch.cat([batch.x, batch.random_walk_pe], dim=1) if self.places else batch.x
        size, triangles = batch.num_graphs, batch.triangle_index
        return self.model(x, batch.edge_index, batch.edge_attr, batch.batch, size, triangles)[:, 0]


SUBJECTS: dict[str, Callable[[int], nn.Module]] = {  # of the number of kinds of atoms
    BASELINE: GPS,
    "RO3Conv and attention": lambda atoms: Ours(atoms, "RO3Conv", HEADS),
    "RO3Conv and attention, compressed sums": lambda atoms: Ours(atoms, "RO3Conv", HEADS, compress_sums=True),
    "GINEConv and attention": lambda atoms: Ours(atoms, "GINEConv", HEADS),
    "RO3Conv": lambda atoms: Ours(atoms, "RO3Conv", 0),
    "RO3Conv, compressed sums": lambda atoms: Ours(atoms, "RO3Conv", 0, compress_sums=True),
    "GINEConv": lambda atoms: Ours(atoms, "GINEConv", 0),
}


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
    RDLogger.DisableLog("rdApp.*")
    data = make_molecules(arguments.molecules)
    atoms = [graph.num_nodes or 0 for graph in data.train]
    print(f"{arguments.molecules} molecules of {statistics.mean(atoms):.1f} atoms")
    kinds = data.train[0].num_node_features
    subjects = {name: partial(SUBJECTS[name], kinds) for name in arguments.subjects}
    compare("molecules", subjects, BASELINE, data, arguments.seeds, arguments.seconds, arguments.json)


if __name__ == "__main__":
    main()
