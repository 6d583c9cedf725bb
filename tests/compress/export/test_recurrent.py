"""Recurrent layers in files: one operation each, for any number of rows and of steps."""

import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_accel import SequenceModel
from lightning_accel.compress import export, load_compressed
from lightning_accel.compress.quantization.form import Compiled
from lightning_accel.compress.quantization.layers import find_layers
from lightning_accel.compress.quantization.onnx import onnx_dynamic
from lightning_accel.models import RecurrentLayers
from lightning_accel.nn import DynamicRNN
from lightning_accel.ops.recurrent import recurrent_layer

SIZES = ((1, 1), (5, 13), (2, 3))  # rows and steps that are not traced


class Steps(nn.Module):
    """Scores of each step, what is pooled, and the state."""

    def __init__(self, cell, **options):
        super().__init__()
        self.rnn = DynamicRNN(3, 5, 2, cell=cell, **{"bidirectional": True} | options)
        self.head = nn.Linear(self.rnn.output_size, 4)

    def forward(self, x, lengths=None, state=None):
        output = self.rnn(x, lengths, state)
        return self.head(output.output), output.pooled, output.state

    def call(self, rows, steps, arguments=3):
        lengths = torch.randint(1, steps + 1, (rows,))
        lengths[1::3] = 0
        states = [torch.randn(len(self.rnn.layers), rows, 5) for _ in range(2)]
        state = tuple(states) if self.rnn.cell == "lstm" else states[0]
        return (torch.randn(rows, steps, 3), lengths, state)[:arguments], {}


def assert_same(found, wanted, **tolerance):
    for one, other in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
        torch.testing.assert_close(one, other, **tolerance)


def operators(path):
    onnx = pytest.importorskip("onnx")
    return Counter(node.op_type for node in onnx.load(path).graph.node)


@pytest.mark.parametrize("cell", [*(pytest.param(cell, marks=pytest.mark.slow) for cell in ("rnn", "lstm")), "gru"])
class TestFiles:
    def check(self, module, calls, path, format):
        export(module, calls, path, format)
        loaded = load_compressed(path)
        for rows, steps in SIZES:
            args, _ = module.call(rows, steps, len(calls[0][0]))
            assert_same(loaded(*args), module(*args), rtol=1e-4, atol=1e-5)

    @pytest.mark.slow
    def test_programs_take_other_rows_and_steps(self, cell, tmp_path):
        module = Steps(cell).eval()
        self.check(module, [module.call(6, 6), module.call(7, 5)], tmp_path / "m.pt2", "pt2")

    @pytest.mark.sampled(slow=2)
    @pytest.mark.slow
    @pytest.mark.parametrize("arguments", [1, 3])
    def test_onnx_has_one_operator_for_each_layer(self, cell, arguments, tmp_path):
        pytest.importorskip("onnxruntime")
        module = Steps(cell).eval()
        calls = [module.call(6, 6, arguments), module.call(7, 5, arguments)]
        self.check(module, calls, tmp_path / "m.onnx", "onnx")
        found = operators(tmp_path / "m.onnx")
        assert found[cell.upper()] == 4
        assert found["Tanh"] == found["Sigmoid"] == found["Gemm"] == 0

    @pytest.mark.slow
    def test_all_rows_full(self, cell, tmp_path):
        module = Steps(cell, bidirectional=False).eval()
        self.check(module, [module.call(4, 6, 1), module.call(4, 5, 1)], tmp_path / "m.pt2", "pt2")


@pytest.mark.weekly
@pytest.mark.slow
def test_programs_load_without_layers(tmp_path):
    module = Steps("lstm").eval()
    args, _ = module.call(6, 6)
    path = tmp_path / "m.pt2"
    export(module, [(args, {}), module.call(7, 5)], path)
    torch.save((args, module(*args)[1].detach()), tmp_path / "wanted.pt")
    script = (
        f"import torch; from lightning_accel import load_compressed; loaded = load_compressed({str(path)!r}); "
        f"args, wanted = torch.load({str(tmp_path / 'wanted.pt')!r}); "
        "torch.testing.assert_close(loaded(*args)[1], wanted)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_int8_in_onnx_runtime(cell):
    pytest.importorskip("onnxruntime")
    layers = RecurrentLayers(cell=cell, hidden_dim=64, bidirectional=True)
    model = SequenceModel(3, 4, target_kind="classification", layers=layers).eval()

    def call(rows, steps):
        return (torch.randn(rows, steps, 3), torch.randint(0, steps + 1, (rows,))), {}

    form = onnx_dynamic(model, [call(6, 7), call(6, 5)], find_layers(model))
    names = ["blocks.0.rnn.layers.0", "blocks.0.rnn.layers.1"]
    assert list(form.left_float) == ([] if cell == "lstm" else names)
    floats = 4 * sum(one.numel() for one in model.parameters())
    assert (form.file_bytes < 0.5 * floats) == (cell == "lstm")
    for rows, steps in SIZES:
        args, _ = call(rows, steps)
        assert_same(form.run(*args), model(*args), rtol=0, atol=0.05)
    if cell == "lstm":
        skipped = onnx_dynamic(model, [call(6, 7), call(6, 5)], find_layers(model, [names[1]]))
        assert list(skipped.left_float) == names[1:]
        assert form.file_bytes < skipped.file_bytes


@pytest.mark.slow
def test_compiled_forms_hold_one_call_for_each_layer(monkeypatch):
    graphs = []
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, *args, **kwargs: graphs.append(graph) or graph)
    module = Steps("lstm").eval()
    args, _ = module.call(4, 50)
    assert_same(Compiled(module)(*args), module(*args))
    calls = [node for node in graphs[0].graph.nodes if "recurrent_layer" in str(node.target)]
    assert len(calls) == 4
    assert len(graphs[0].graph.nodes) < 100


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
def test_operation_is_the_layer_with_each_row_alone(cell, backwards):
    gates = {"rnn": 1, "gru": 3, "lstm": 4}[cell] * 5
    shapes = ((gates, 3), (gates, 5), (gates,), (gates,))
    weights = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    x = torch.randn(6, 4, 3, dtype=torch.float64, requires_grad=True)
    states = [torch.randn(4, 5, dtype=torch.float64, requires_grad=True) for _ in range(2 if cell == "lstm" else 1)]
    lengths = torch.tensor([6, 2, 0, 3])
    out, last = recurrent_layer(cell, x, states, weights, lengths, backwards)
    module = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}[cell](3, 5).double()
    inputs = [x, *states, *weights]
    found = torch.autograd.grad(sum(one.square().sum() for one in (out, *last)), inputs)
    total = 0
    for row, length in enumerate(lengths.tolist()):
        own = [state[row] for state in states]
        alone = x[:length, row].flip(0) if backwards else x[:length, row]
        outputs = x[:0, row, :1].expand(-1, 5)
        if length:
            given = tuple(one[None] for one in own)
            outputs, own = torch.func.functional_call(
                module,
                dict(zip(("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"), weights, strict=True)),
                (alone, given if cell == "lstm" else given[0]),
            )
            own = [one[0] for one in (own if cell == "lstm" else (own,))]
        outputs = outputs.flip(0) if backwards else outputs
        torch.testing.assert_close(out[:length, row], outputs)
        assert not out[length:, row].any()
        assert_same([one[row] for one in last], own)
        total = total + sum(one.square().sum() for one in (outputs, *own))
    assert_same(found, torch.autograd.grad(total, inputs))
    torch.library.opcheck(
        torch.ops.lightning_accel.recurrent_layer,
        (x.detach(), lengths, *(states if cell == "lstm" else (*states, None)), *weights, cell, backwards),
        test_utils=("test_schema", "test_faketensor"),
    )
