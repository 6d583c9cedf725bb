"""Readouts from nodes to graphs. Shapes: B graphs, N nodes, M edges, D width."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch_geometric.utils import scatter

from lightning_accel.nn.relational import RelationalOrder3Pooling
from lightning_accel.ops.float32 import at_least_float32, without_autocast
from lightning_accel.ops.triples import Triples

ReadoutName = Literal["sum", "mean", "max"]


class GraphReadout(nn.Module):
    """Compute the sum, mean or maximum over the nodes of each graph, and optionally sums over triangles and 2-paths."""

    def __init__(self, dim: int, reduce: ReadoutName, triples: bool) -> None:
        super().__init__()
        self.reduce = reduce
        self.triples = RelationalOrder3Pooling(dim, dim) if triples else None
        self.out_channels = 2 * dim if triples else dim

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        batch: Tensor | None = None,
        size: int | None = None,
        triples: Triples | None = None,
    ) -> Tensor:
        """Map nodes ``x`` (N, D) to graphs (B, out_channels); a graph without nodes to 0."""
        index = x.new_zeros(len(x), dtype=torch.int64) if batch is None else batch
        size = 1 if batch is None else size
        with without_autocast(x):
            pooled = scatter(at_least_float32(x), index, dim=0, dim_size=size, reduce=self.reduce).to(x.dtype)
        if self.triples is None:
            return pooled
        return torch.cat([pooled, self.triples(x, edge_index, batch=batch, size=size, triples=triples)], dim=1)


class GraphHead(nn.Module):
    """Add a perceptron and a linear map; for counts of triples, which are sums, the linear map is sufficient."""

    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_channels, out_channels)
        self.hidden = nn.Linear(in_channels, hidden_channels)
        self.out = nn.Linear(hidden_channels, out_channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_channels) to (..., out_channels)."""
        scores: Tensor = self.linear(x) + self.out(self.hidden(x).relu())
        return scores
