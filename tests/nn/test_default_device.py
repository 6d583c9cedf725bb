"""Layers and operations on CPU tensors while another device is the default, as ``meta``, where nothing has a value."""

import pytest
import torch
from torch_geometric.nn import GIN

from lightning_accel.nn import RBM, ContrastiveDivergence, DynamicRNN, ExpertChoiceGate, MixtureOfExperts, TopKGate
from lightning_accel.nn.relational.layers import RO3Conv, RO3Pooling
from lightning_accel.nn.relational.pooling import RelationalPooling
from lightning_accel.ops import gated_scan, linear_scan


def networks():
    rows, lengths = torch.randn(3, 6, 2), torch.tensor([6, 2, 4])
    for execution, cells in {
        "padded": ("rnn", "gru"),
        "staircase": ("lstm",),
        "packed": ("gru",),
        "lanes": ("mingru",),
    }.items():
        for cell, pooling in zip(cells * 2, ("mean", "attention", "last", "max"), strict=False):
            rnn = DynamicRNN(2, 5, cell=cell, execution=execution, bidirectional=True, pooling=pooling)
            for given in ((rows, lengths), (rows,), ([rows[0], rows[1, :2]],), (rows, [6, 2, 4])):
                yield rnn, given


def scans():
    starts = torch.rand(2, 300) < 0.1
    yield linear_scan, (torch.rand(2, 300, 2), torch.randn(2, 300, 2), None, starts)
    for dtype in (torch.float32, torch.float64):
        yield gated_scan, ("mingru", torch.randn(2, 9, 4, dtype=dtype), None, None, torch.tensor([3, 9]))


def mixtures():
    tokens, mask = torch.randn(7, 4), torch.arange(7) < 5
    for gate in (TopKGate, ExpertChoiceGate):
        yield MixtureOfExperts(4, 5, 3, gate=gate), (tokens,)
    yield MixtureOfExperts(4, 5, 3, capacity_factor=1.0, shared_dim=3), (tokens, mask)


def machines():
    rbm, rows = RBM(6, 4), (torch.rand(20, 6) < 0.5).float()
    for sampler in ("cd", "pcd"):
        yield ContrastiveDivergence(sampler, num_chains=5), (rbm, rows)
    optimizer = torch.optim.SGD(rbm.parameters(), lr=0.1)
    yield ContrastiveDivergence(num_chains=5).train_, (rbm, rows, 4, optimizer)
    yield rbm.log_z, ()


def graphs():
    x, edge_index = torch.randn(6, 4), torch.tensor([[0, 1, 2, 3, 4], [1, 2, 0, 4, 5]])
    attr, batch = torch.randn(5, 2), torch.tensor([0, 0, 0, 1, 1, 1])
    yield RO3Conv(4, 3, edge_dim=2), (x, edge_index, attr)
    yield RO3Pooling(4, 3, types=("triangle", "wedge", "edge", "empty")), (x, edge_index, None, batch, 2)
    for samples in (None, 3):
        for kind, marks in (("nodes", 1), ("edges", 2), ("two_paths", 3), ("all", 2)):
            base = GIN(4 + marks, 5, 2)
            yield RelationalPooling(base, marks, kind, samples=samples).eval(), (x, edge_index, None, batch)


def tensors_of(output):
    if isinstance(output, torch.Tensor):
        return [output]
    return [one for part in output for one in tensors_of(part)] if isinstance(output, tuple | list) else []


@pytest.mark.parametrize("default", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("cases", [networks, scans, mixtures, machines, graphs])
def test_results_are_on_the_device_of_the_inputs(cases, default):
    for call, given in cases():
        with torch.device(default):
            output = call(*given)
        for one in tensors_of(output):
            assert one.is_cpu, call
            assert not one.is_floating_point() or not one.isnan().any(), call
