"""Modules to train under a strategy, and the same training in one process without a Trainer's help.

Rows are dealt to processes as ``DistributedSampler(shuffle=False)`` does, so a step of W processes on B rows each sees
what a step of one process on W * B rows sees.
"""

from functools import partial

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, default_collate
from torch_geometric.data import Batch, Data

from lightning_accel import (
    DeepBeliefNetwork,
    MoEClassifier,
    MoELanguageModel,
    MoERegressor,
    RelationalGNN,
    SequenceModel,
)
from lightning_accel.data.sequences.batch import IGNORED
from lightning_accel.models import ConvolutionLayers, Experts, FineTuning, RecurrentLayers, Stage
from tests.tolerance import ADAM_EPS

ADAMW = partial(torch.optim.AdamW, lr=0.02, eps=ADAM_EPS)
SGD = partial(torch.optim.SGD, lr=0.2, momentum=0.5)


class Plain(L.LightningModule):
    """A module that knows nothing of us: repeated blocks, a batch norm if asked for, a bare parameter, a frozen one."""

    def __init__(self, batch_norm: bool = False, optimizer=ADAMW):
        super().__init__()
        self.start = nn.Linear(5, 12)
        norm = nn.BatchNorm1d(12) if batch_norm else nn.LayerNorm(12)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(12, 13), nn.Tanh(), nn.Linear(13, 12)) for _ in range(4)))
        self.norm = norm
        self.end = nn.Linear(12, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)
        self.make_optimizer = optimizer

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.norm(self.start(x) + self.blocks(self.start(x)))) * self.scale + self.frozen

    def training_step(self, batch, batch_idx):
        x, target = batch
        loss = F.cross_entropy(self(x), target)
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, target = batch
        self.log("val/loss", F.cross_entropy(self(x), target), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).argmax(dim=1)

    def configure_optimizers(self):
        return self.make_optimizer([one for one in self.parameters() if one.requires_grad])


def make(name: str, optimizer=ADAMW, num_rows: int = 32) -> tuple[L.LightningModule, Dataset]:
    """A module by name, and rows for it; equal in every process that calls it."""
    generator = torch.Generator().manual_seed(5)
    torch.manual_seed(1)
    if name == "language_model":
        attention = {"num_heads": 8, "num_key_value_heads": 4, "separate_documents": True}
        options = {"attention": attention, "experts": Experts(4, hidden_dim=6), "tie_embeddings": True}
        model = MoELanguageModel(11, dim=16, num_layers=2, **options, optimizer=optimizer)
        return model, TokenRows(torch.randint(11, (num_rows, 7), generator=generator))
    if name == "sequence":
        lengths = torch.randint(1, 7, (num_rows,), generator=generator)
        tokens = torch.randint(11, (num_rows, 6), generator=generator)
        tokens[torch.arange(6) >= lengths[:, None]] = 0
        labels = torch.randint(3, (num_rows, 6), generator=generator)
        labels[torch.arange(6) >= lengths[:, None]] = IGNORED
        sizes = {
            "vocab_size": 11,
            "num_classes": 3,
            "dim": 6,
            "layers": RecurrentLayers(hidden_dim=8, num_layers=3, residual=True, conv_kernel=4, feed_forward_dim=8),
        }
        model = SequenceModel(**sizes, target_kind="labelling", optimizer=optimizer)
        return model, TensorDataset(tokens, lengths, labels)
    if name == "graphs":
        sizes = {"num_features": 3, "num_classes": 4, "level": "graph", "target_kind": "classification"}
        layers = ConvolutionLayers(dim=8, num_layers=2, norm="layer")
        return RelationalGNN(**sizes, layers=layers, optimizer=optimizer), Graphs(num_rows, generator)
    x = torch.randn(num_rows, 5, generator=generator)
    target = torch.randint(3, (num_rows,), generator=generator)
    if name == "belief_network":
        # processes draw samples of their own, which a rate of almost 0 leaves without effect; what follows has none
        stages = [Stage(epochs=1, lr=1e-12, num_chains=8)]
        sizes = {"num_visible": 5, "num_classes": 3, "hidden_dims": [9], "stages": stages}
        model = DeepBeliefNetwork(**sizes, fine_tuning=FineTuning("classifier", lr=0.02), optimizer=optimizer)
        return model, TensorDataset(x.sigmoid(), target)
    if name == "regressor":
        return MoERegressor(5, dim=8, experts=Experts(4, hidden_dim=6), optimizer=optimizer), TensorDataset(
            x, x.sum(dim=1)
        )
    if name == "classifier":
        return MoEClassifier(5, 3, dim=8, experts=Experts(4, hidden_dim=6), optimizer=optimizer), TensorDataset(
            x, target
        )
    return Plain(batch_norm=name == "plain_batch_norm", optimizer=optimizer), TensorDataset(x, target)


class TokenRows(Dataset):
    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> Tensor:
        return self.tokens[i]


class Graphs(Dataset):
    """Random graphs of 4 to 7 nodes."""

    def __init__(self, number: int, generator: torch.Generator) -> None:
        self.graphs = []
        for _ in range(number):
            nodes = int(torch.randint(4, 8, (1,), generator=generator))
            edge_index = torch.randint(nodes, (2, 3 * nodes), generator=generator)
            target = torch.randint(4, (1,), generator=generator)
            self.graphs.append(Data(torch.randn(nodes, 3, generator=generator), edge_index, y=target))

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, i: int) -> Data:
        return self.graphs[i]


def collate(rows: list) -> object:
    return Batch.from_data_list(rows) if isinstance(rows[0], Data) else default_collate(rows)


class Rows(L.LightningDataModule):
    """Rows in order: Lightning shuffles those of a training loader once there are several processes."""

    def __init__(self, data: Dataset, batch_size: int) -> None:
        super().__init__()
        self.data = data
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        deal = self.trainer.distributed_sampler_kwargs
        sampler = DistributedSampler(self.data, shuffle=False, **deal) if deal else None
        return DataLoader(self.data, batch_size=self.batch_size, sampler=sampler, collate_fn=collate)

    val_dataloader = train_dataloader


def trainer(**options) -> L.Trainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(**quiet | {"accelerator": "cpu", "max_steps": 3, "max_epochs": -1} | options)


def fit(
    name: str, rows: int = 8, *, ckpt_path: object = None, optimizer=ADAMW, num_rows: int = 32, **options
) -> L.Trainer:
    """Train a module of :func:`make` on ``rows`` a step and process."""
    module, data = make(name, optimizer, num_rows)
    run = trainer(**options)
    run.fit(module, Rows(data, rows), ckpt_path=ckpt_path)
    return run


def whole_weights(run: L.Trainer) -> dict[str, Tensor]:
    """Weights and buffers after a fit, gathered; on the first process alone."""
    module = run.lightning_module
    state = {}
    for key, value in module.state_dict().items():
        state[key] = value.full_tensor() if isinstance(value, DTensor) else value
    return {key: value.clone() for key, value in state.items() if isinstance(value, Tensor)}
