"""Blocks of GPS without padding: equal to PyTorch Geometric's, and left to it where they cannot be."""

import pytest
import torch
from torch import nn
from torch_geometric.nn import GINEConv, GPSConv

from lightning_accel.compress.tracing import trace
from lightning_accel.nn import graph_attention
from lightning_accel.nn.deferred_weights import defer_weights_
from lightning_accel.nn.graph_attention import padding_gps, run_gps

SIZES = 5, 1, 9, 3


@pytest.fixture
def segments(monkeypatch, native):
    """Return a list of where segments began, in each call of the attention without padding."""
    calls, attend = [], graph_attention.segment_attention
    monkeypatch.setattr(
        graph_attention, "segment_attention", lambda *args: calls.append(args[3].tolist()) or attend(*args)
    )
    return calls


def block(**options):
    torch.manual_seed(3)
    conv = GINEConv(nn.Linear(12, 12))
    return GPSConv(12, conv, heads=3, **({"dropout": 0.2} | options))


def graphs(dtype=torch.float32):
    batch = torch.repeat_interleave(torch.tensor(SIZES))
    begins = torch.tensor([0, *SIZES]).cumsum(0)[batch]
    random = torch.Generator().manual_seed(0)
    local = torch.rand(2, 40, generator=random)
    of_edge = torch.randint(len(batch), (40,), generator=random)
    ends = (begins[of_edge] + local * torch.tensor(SIZES)[batch[of_edge]]).long()
    x, attributes = (torch.randn(n, 12, generator=random).to(dtype) for n in (len(batch), 40))
    return {"x": x.requires_grad_(), "edge_index": ends, "batch": batch, "edge_attr": attributes}


def step(run, layer, seed=7, **given):
    learned = [given["x"], *layer.parameters()]
    torch.manual_seed(seed)
    out = run(layer, given.pop("x"), given.pop("edge_index"), given.pop("batch"), **given)
    return [out, *torch.autograd.grad(out.square().sum(), learned, allow_unused=True)]


@pytest.mark.parametrize("norm", [None, "batch_norm", "graph_norm"])
@pytest.mark.parametrize("conv", ["GINEConv", None])
def test_block_equals_that_of_pytorch_geometric(conv, norm, segments):
    layer, given = block(norm=norm), graphs()
    if conv is None:
        layer.conv = None
        del given["edge_attr"]
    for one in (given, given | {"batch": None}):
        for actual, expected in zip(step(run_gps, layer, **one), step(GPSConv.forward, layer, **one), strict=True):
            assert (actual is None) == (expected is None)
            if actual is not None:
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert segments == [[0, 5, 6, 15, 18], [0, 18]]
    layer.eval()
    torch.testing.assert_close(run_gps(layer, **given), layer(**given))


def test_mixed_precision_attends_in_bfloat16(segments):
    layer, given = block(dropout=0.0), graphs()
    with torch.autocast("cpu", torch.bfloat16):
        actual, expected = run_gps(layer, **given), layer(**given)
    assert len(segments) == 1
    torch.testing.assert_close(actual, expected, rtol=5e-2, atol=5e-2)


def pruned(layer):
    nn.utils.prune.l1_unstructured(layer.attn, "in_proj_weight", 0.5)


def hooked(layer):
    layer.attn.register_forward_hook(lambda module, args, out: (out[0] * 2, out[1]))


def with_another_attention(layer):
    layer.attn = type("Attention", (nn.MultiheadAttention,), {})(12, 3, batch_first=True)


def with_dropout(layer):
    layer.attn.dropout = 0.5


def with_bias_of_keys(layer):
    layer.attn = nn.MultiheadAttention(12, 3, add_bias_kv=True, batch_first=True)


def test_attention_that_defers_its_weights_is_plain(segments):
    layer, given = block(), graphs()
    defer_weights_(layer)
    assert padding_gps(layer) == [layer]
    for actual, expected in zip(step(run_gps, layer, **given), step(GPSConv.forward, layer, **given), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert len(segments) == 1


@pytest.mark.parametrize("change", [hooked, pruned, with_another_attention, with_dropout, with_bias_of_keys])
def test_attention_that_is_not_plain_is_left_to_pytorch_geometric(change, segments):
    layer, given = block(), graphs()
    change(layer)
    for actual, expected in zip(
        step(run_gps, layer, **given), step(lambda layer, *args, **edges: layer(*args, **edges), layer, **given),
        strict=True,
    ):  # fmt: skip
        assert torch.equal(actual, expected)
    assert not segments


def test_other_precisions_and_transformed_code_are_left_to_pytorch_geometric(segments):
    layer, given = block().double(), graphs(torch.float64)
    assert torch.equal(step(run_gps, layer, **given)[0], step(GPSConv.forward, layer, **given)[0])
    layer, given = block(dropout=0.0).eval(), graphs()
    x = given.pop("x").detach()
    of_func = [torch.func.grad(lambda x, f=f: f(layer, x, **given).sum())(x) for f in (run_gps, GPSConv.forward)]
    assert torch.equal(*of_func)
    assert not segments


def test_nodes_that_are_not_sorted_by_graph_are_refused(segments):
    layer, given = block(), graphs()
    given["batch"] = given["batch"].flip(0)
    with pytest.raises(RuntimeError):  # by PyTorch Geometric
        run_gps(layer, **given)
    assert not segments


class Whole(nn.Module):
    """Take tensors in the place of keywords."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, edge_index, edge_attr, batch=None):
        return self.layer(x, edge_index, batch, edge_attr=edge_attr).relu()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch, where it traces bytecode
@pytest.mark.parametrize("with_batch", [True, False])
@pytest.mark.parametrize("norm", ["batch_norm", "graph_norm"])
def test_a_trace_takes_any_number_of_graphs_and_nodes(norm, with_batch):
    """In bytecode alone where GraphNorm takes the number of graphs from their indices."""
    layer, given = block(norm=norm, dropout=0.0).eval(), graphs()
    names = ["x", "edge_index", "edge_attr", *["batch"] * with_batch]
    shapes = tuple({1 if name == "edge_index" else 0: torch.export.Dim.DYNAMIC} for name in names)
    strict = norm == "graph_norm" and with_batch
    traced = trace(Whole(layer), [given[name] for name in names], shapes, [strict]).module()
    assert "forward" not in vars(layer)
    no_edges = {"edge_index": given["edge_index"][:, :0], "edge_attr": given["edge_attr"][:0]}
    for sizes in (SIZES, (2, 4, 1, 2), (9,), 9 * (1,), (1,)):
        one = given if sizes is SIZES else {"x": given["x"][: sum(sizes)], **no_edges}
        one = one | {"batch": torch.repeat_interleave(torch.tensor(sizes))}
        expected = Whole(layer)(*(one[name] for name in names))
        torch.testing.assert_close(traced(*(one[name] for name in names)), expected, rtol=1e-4, atol=1e-4)
