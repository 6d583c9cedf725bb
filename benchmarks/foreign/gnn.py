"""A graph isomorphism network of PyTorch Geometric that names the model which a random graph was drawn from."""

import lightning as L
import networkx as nx
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINConv, global_add_pool
from torch_geometric.transforms import OneHotDegree
from torch_geometric.utils import to_undirected
from torchmetrics import Accuracy


def draw_graph(rng):
    """Return a graph of 30 to 90 nodes with about 4 edges a node, and the number of the model it was drawn from."""
    kind, num_nodes, seed = int(rng.integers(4)), int(rng.integers(30, 90)), int(rng.integers(2**31))
    if kind == 0:
        graph = nx.gnm_random_graph(num_nodes, 4 * num_nodes, seed=seed)
    elif kind == 1:
        graph = nx.barabasi_albert_graph(num_nodes, 4, seed=seed)
    elif kind == 2:
        graph = nx.watts_strogatz_graph(num_nodes, 8, 0.3, seed=seed)
    else:
        graph = nx.powerlaw_cluster_graph(num_nodes, 4, 0.8, seed=seed)
    edge_index = to_undirected(torch.tensor(list(graph.edges)).t().contiguous(), num_nodes=num_nodes)
    data = Data(edge_index=edge_index, y=torch.tensor([kind]), num_nodes=num_nodes)
    return OneHotDegree(max_degree=90)(data)


class RandomGraphs(L.LightningDataModule):
    def __init__(self, num_graphs=1600, batch_size=64):
        super().__init__()
        self.num_graphs, self.batch_size = num_graphs, batch_size

    def setup(self, stage=None):
        rng = np.random.default_rng(0)
        graphs = [draw_graph(rng) for _ in range(self.num_graphs)]
        split = int(0.85 * len(graphs))
        self.train_graphs, self.val_graphs = graphs[:split], graphs[split:]

    def train_dataloader(self):
        return DataLoader(self.train_graphs, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_graphs, batch_size=self.batch_size)


class GIN(nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels, num_layers, dropout=0.5):
        super().__init__()
        self.dropout = dropout
        self.convs = nn.ModuleList()
        for i in range(num_layers):
            mlp = nn.Sequential(
                nn.Linear(in_channels if i == 0 else hidden_channels, hidden_channels),
                nn.BatchNorm1d(hidden_channels),
                nn.ReLU(),
                nn.Linear(hidden_channels, hidden_channels),
                nn.ReLU(),
            )
            self.convs.append(GINConv(mlp, train_eps=True))
        self.lin1 = nn.Linear(hidden_channels, hidden_channels)
        self.lin2 = nn.Linear(hidden_channels, out_channels)

    def forward(self, x, edge_index, batch, batch_size):
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        x = global_add_pool(x, batch, size=batch_size)
        x = F.dropout(self.lin1(x).relu(), p=self.dropout, training=self.training)
        return self.lin2(x)


class LitGIN(L.LightningModule):
    def __init__(self, in_channels=91, out_channels=4, hidden_channels=64, num_layers=5, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.gnn = GIN(in_channels, hidden_channels, out_channels, num_layers)
        self.train_acc = Accuracy(task="multiclass", num_classes=out_channels)
        self.val_acc = Accuracy(task="multiclass", num_classes=out_channels)

    def forward(self, data):
        return self.gnn(data.x, data.edge_index, data.batch, data.num_graphs)

    def training_step(self, data, batch_idx):
        y_hat = self(data)
        loss = F.cross_entropy(y_hat, data.y)
        self.train_acc(y_hat.softmax(dim=-1), data.y)
        self.log("train_loss", loss, batch_size=data.num_graphs)
        self.log("train_acc", self.train_acc, prog_bar=True, on_step=False, on_epoch=True, batch_size=data.num_graphs)
        return loss

    def validation_step(self, data, batch_idx):
        y_hat = self(data)
        self.val_acc(y_hat.softmax(dim=-1), data.y)
        self.log("val_acc", self.val_acc, prog_bar=True, on_step=False, on_epoch=True, batch_size=data.num_graphs)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def make(**trainer_options):
    trainer = L.Trainer(**{"max_epochs": 20} | trainer_options)
    return trainer, LitGIN(), RandomGraphs()


if __name__ == "__main__":
    L.seed_everything(12345)
    trainer, module, data = make()
    trainer.fit(module, data)
