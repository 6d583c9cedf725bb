"""Fused training of torch's LSTM and GRU, against torch's own execution of the same layers."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.flop_counter import FlopCounterMode

from lightning_accel.nn.recurrent import fused
from lightning_accel.nn.recurrent.fused import fuse_, is_fusible, unfuse_
from lightning_accel.ops import recurrent_steps as recurrent_steps_module
from lightning_accel.ops.native import KERNELS
from lightning_accel.ops.recurrent_steps import recurrent_step, recurrent_steps

CELLS = [nn.LSTM, nn.GRU]
LENGTHS = torch.tensor([3, 7, 1, 5, 7, 2, 2, 1, 4])


@pytest.fixture
def calls(monkeypatch):
    """Record the dtypes that the fused steps run in."""
    seen = []

    def spy(x, *rest, **options):
        seen.append(x.dtype)
        return recurrent_steps(x, *rest, **options)

    monkeypatch.setattr(fused, "recurrent_steps", spy)
    return seen


def fused_copy(layer):
    copied = copy.deepcopy(layer)
    assert fuse_(copied) == [copied]
    return copied


def inputs(layer, samples=9, steps=7):
    """Draw an input (B, T, I) and states."""
    generator = torch.Generator().manual_seed(5)
    shape = (layer.num_layers * (1 + layer.bidirectional), samples, layer.hidden_size)
    draw = lambda *size: torch.randn(size, generator=generator, dtype=torch.float64).to(layer.weight_ih_l0)  # noqa: E731
    return draw(samples, steps, layer.input_size), tuple(draw(*shape) for _ in range(1 + isinstance(layer, nn.LSTM)))


def results(layer, x, states=None, lengths=None, enforce_sorted=False):
    """Return outputs, last states and all gradients of a random function of them."""
    x = x.clone().requires_grad_()
    states = None if states is None else tuple(state.clone().requires_grad_() for state in states)
    hx = states if states is None or isinstance(layer, nn.LSTM) else states[0]
    torch.manual_seed(1)  # of dropout
    given = x if layer.batch_first else x.transpose(0, 1)
    if lengths is not None:
        given = pack_padded_sequence(given, lengths, layer.batch_first, enforce_sorted)
    output, new = layer(given, hx)
    if lengths is not None:
        assert isinstance(output, PackedSequence)
        output, found = pad_packed_sequence(output, layer.batch_first)
        assert found.tolist() == lengths.tolist()
    outputs = [output, *(new if isinstance(new, tuple) else (new,))]
    wanted = [x, *(states or ()), *(one for one in layer.parameters() if one.requires_grad)]
    loss = sum((one * torch.randn(one.shape, dtype=one.dtype)).sum() for one in outputs)
    return [one.detach() for one in (*outputs, *torch.autograd.grad(loss, wanted))]


def assert_equal(actual, expected):
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.02}
    for found, exact in zip(actual, expected, strict=True):
        assert found.dtype == exact.dtype
        assert found.shape == exact.shape
        assert (found - exact).abs().max() <= tolerance[exact.dtype] * exact.abs().max().clamp(min=1)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["padded", "packed"])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "bias": False}, {"batch_first": True, "dropout": 0.5}])
@pytest.mark.parametrize("cell", CELLS)
def test_outputs_states_and_gradients_are_torchs(cell, options, lengths, calls):
    layer = cell(5, 7, 2, dtype=torch.float64, **options)
    x, states = inputs(layer)
    for given in (None, states):
        assert_equal(results(fused_copy(layer), x, given, lengths), results(layer, x, given, lengths))
    assert calls == [torch.float64] * 4 * (1 + layer.bidirectional)


@pytest.mark.parametrize("hidden_size", [1, 16, 37, 70])
@pytest.mark.parametrize("cell", CELLS)
def test_the_kernel_computes_the_formula(cell, hidden_size, native, calls):
    layer = cell(5, hidden_size, bidirectional=True)
    x, states = inputs(layer)
    expected = results(layer, x, states, LENGTHS)
    assert_equal(results(fused_copy(layer), x, states, LENGTHS), expected)
    with KERNELS.switched_off():
        assert_equal(results(fused_copy(layer), x, states, LENGTHS), expected)
    assert calls == [torch.float32] * 4


@pytest.mark.parametrize("cell", CELLS)
def test_threads_change_no_bit(cell, native):
    layer = fused_copy(cell(64, 96))
    x, states = inputs(layer, samples=11, steps=9)
    lengths = torch.arange(1, 12).clamp(max=9)
    before = torch.get_num_threads()
    runs = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            pack = pack_padded_sequence(x.transpose(0, 1), lengths, enforce_sorted=False)
            runs.append(layer(pack, states if cell is nn.LSTM else states[0])[0].data)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*runs)


@pytest.mark.parametrize("lengths", [[1], [4], [1, 1, 1], [6, 6, 6], [5, 3, 1]])
@pytest.mark.parametrize("cell", CELLS)
def test_batches_of_one_and_steps_of_one(cell, lengths):
    layer = cell(3, 5, bidirectional=True, dtype=torch.float64)
    x, states = inputs(layer, samples=len(lengths), steps=max(lengths))
    lengths = torch.tensor(lengths)
    expected = results(layer, x, states, lengths, enforce_sorted=True)
    assert_equal(results(fused_copy(layer), x, states, lengths, enforce_sorted=True), expected)


@pytest.mark.sampled(slow=2)
@pytest.mark.slow
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("num_gates", [3, 4])
def test_gradients_are_those_of_finite_differences(num_gates, reverse):
    shapes = [(6, 2), (3, 3), (3, 3), (3 * num_gates, 2), (3 * num_gates, 3), (3 * num_gates,), (3 * num_gates,)]
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def run(x, h, c, *weights):
        states = (h, c) if num_gates == 4 else (h,)
        out, new = recurrent_steps(x, states, weights, torch.tensor([3, 2, 1]), reverse)
        return out, *new

    if num_gates == 3:
        tensors[2] = tensors[2].detach()
    assert torch.autograd.gradcheck(run, tensors)
    assert torch.autograd.gradgradcheck(run, tensors)


@pytest.mark.parametrize("samples", [1, 4, 5])
@pytest.mark.parametrize("hidden_size", [1, 16, 37])
@pytest.mark.parametrize("cell", CELLS)
def test_one_step_is_that_of_torchs_cell(cell, hidden_size, samples, native):
    layer = cell(5, hidden_size).requires_grad_(False)
    steps, states = inputs(layer, samples)
    x, states = steps[:, 3], [state[0] for state in states]  # not in one piece of memory
    layer.weight_hh_l0 = nn.Parameter(layer.weight_hh_l0.t().contiguous().t(), requires_grad=False)
    copies = [state.clone() for state in states]
    weights = layer.all_weights[0]
    found = recurrent_step("lstm" if len(states) == 2 else "gru", x, states, weights)
    expected = torch.lstm_cell(x, states, *weights) if len(states) == 2 else (torch.gru_cell(x, states[0], *weights),)
    torch.testing.assert_close(found, expected)
    assert all(map(torch.equal, states, copies))


def test_float64_stays_float64_under_autocast(monkeypatch):
    monkeypatch.setattr(recurrent_steps_module, "multiplies_bfloat16", lambda: True)
    layer = nn.GRU(5, 7, dtype=torch.float64)
    x, _ = inputs(layer)
    expected = fused_copy(layer)(x)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_equal([fused_copy(layer)(x)[0]], [expected])


def test_operations_are_counted(native):
    layer, x = fused_copy(nn.GRU(5, 7)), torch.randn(4, 2, 5)
    with FlopCounterMode(display=False) as counter:
        layer(x)[0].sum().backward()
    of_input, of_state = 2 * 8 * 21 * 5, 2 * 8 * 21 * 7
    # forward, and gradients of weights and of the state; x needs none
    assert counter.get_total_flops() == 2 * of_input + 3 * of_state
    weights = [one.detach() for one in layer.all_weights[0]]
    with FlopCounterMode(display=False) as counter:
        recurrent_step("gru", x[0], (torch.zeros(2, 7),), weights)
    assert counter.get_total_flops() == 2 * 2 * 21 * (5 + 7)


def test_frozen_parameters_and_inputs_get_no_gradient():
    layer = nn.GRU(5, 7, 2, dtype=torch.float64)
    layer.weight_ih_l0.requires_grad_(False)
    layer.bias_hh_l1.requires_grad_(False)
    x, _ = inputs(layer)
    assert_equal(results(fused_copy(layer), x), results(layer, x))
    model = fused_copy(layer)
    model(x)[0].sum().backward()
    assert model.weight_ih_l0.grad is None
    assert model.bias_hh_l1.grad is None


def test_layers_that_share_weights_add_their_gradients():
    first, second = nn.GRU(4, 4, dtype=torch.float64), nn.GRU(4, 4, dtype=torch.float64)
    for name in dict(first.named_parameters()):
        setattr(second, name, getattr(first, name))
    model = nn.ModuleList([first, second])
    x = torch.randn(5, 3, 4, dtype=torch.float64)
    gradients = []
    for change in (lambda: None, lambda: fuse_(model)):
        change()
        loss = second(first(x)[0])[0].sum()
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    assert len(gradients[1]) == 4
    assert_equal(gradients[1], gradients[0])


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cell", CELLS)
def test_under_autocast_sums_are_float32_and_outputs_have_torchs_dtype(cell, dtype, packed, calls, monkeypatch):
    monkeypatch.setattr(recurrent_steps_module, "multiplies_bfloat16", lambda: False)
    layer = cell(8, 16, 2)
    x, states = inputs(layer)
    exact = results(layer, x.to(dtype).float(), states, LENGTHS if packed else None)
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for given in (None, states):
            with torch.backends.mkldnn.flags(enabled=has_bfloat16):  # where it is not supported, it fails
                mixed = results(layer, x.to(dtype), given, LENGTHS if packed else None)
            found = results(fused_copy(layer), x.to(dtype), given, LENGTHS if packed else None)
            assert [one.dtype for one in found] == [one.dtype for one in mixed]
    if packed or cell is nn.GRU or not has_bfloat16:
        assert set(calls) == {torch.float32}
        assert_equal(found[:1], [exact[0].to(found[0].dtype)])
        monkeypatch.setattr(recurrent_steps_module, "multiplies_bfloat16", lambda: True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = results(fused_copy(layer), x.to(dtype), states, LENGTHS if packed else None)
        assert [one.dtype for one in mixed] == [one.dtype for one in found]
        assert not torch.equal(mixed[0], found[0])
        assert_equal([one.bfloat16() for one in mixed], [one.bfloat16() for one in exact])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_steps_run_lstms_that_onednn_has_no_code_for(dtype, monkeypatch, calls):
    """In evaluation too; on a CPU without bfloat16, torch itself fails under autocast."""
    monkeypatch.setattr(fused, "onednn_has_autocast_dtype", lambda: False)
    monkeypatch.setattr(recurrent_steps_module, "multiplies_bfloat16", lambda: False)
    layer = nn.LSTM(3, 4)
    x = torch.randn(5, 2, 3)
    with torch.no_grad():
        expected = layer(x)[0]
        with torch.autocast("cpu", dtype=dtype):
            assert_equal([fused_copy(layer)(x)[0]], [expected])
    assert calls == [torch.float32]


def test_torch_runs_what_the_steps_do_not_serve(calls):
    layer, x = nn.GRU(3, 4), torch.randn(5, 2, 3)
    model = fused_copy(layer)
    with torch.no_grad():
        assert torch.equal(model(x)[0], layer(x)[0])
    assert torch.equal(model(x[:, 0])[0], layer(x[:, 0])[0])  # one sample without a batch
    assert torch.equal(model.requires_grad_(False)(x)[0], layer(x)[0])
    if torch.backends.mkldnn.is_available():
        fused_copy(nn.LSTM(3, 4))(x)
    assert not is_fusible(nn.LSTM(3, 4, proj_size=2))
    assert not is_fusible(nn.RNN(3, 4))
    assert not calls
    model.requires_grad_()
    with pytest.raises(ValueError, match="dtype"):
        model(x.double())
    with pytest.raises(RuntimeError, match="Expected hidden size"):
        model(x, torch.zeros(1, 3, 4))
    with pytest.raises(RuntimeError, match="input_size"):
        model(torch.zeros(5, 2, 9))


def test_hooks_checkpoints_copies_and_pickles_stay(calls):
    layer = nn.GRU(3, 4)
    model = fused_copy(layer)
    assert list(model.state_dict()) == list(layer.state_dict())
    assert type(model) is nn.GRU
    model.flatten_parameters()
    hooked = []
    model.register_forward_hook(lambda module, args, kwargs, out: hooked.append(set(kwargs)), with_kwargs=True)
    x = torch.randn(5, 2, 3)
    model(input=x, hx=None)
    assert hooked == [{"input", "hx"}]
    model._forward_hooks.clear()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        calls.clear()
        with torch.no_grad():
            other.bias_ih_l0.add_(1)
        assert not torch.allclose(other(x)[0], model(x)[0])
        assert len(calls) == 2
    unfuse_([model])
    calls.clear()
    model(x)
    assert not calls
    assert "forward" not in vars(model)


def test_a_compiled_model_runs_the_steps(calls):
    model = nn.Sequential(nn.Linear(3, 3), nn.GRU(3, 4))
    x = torch.randn(5, 2, 3)
    expected = model(x)[0]
    fuse_(model)
    assert torch.allclose(torch.compile(model, backend="eager")(x)[0], expected, atol=1e-6)
    assert calls
    torch._dynamo.reset()
