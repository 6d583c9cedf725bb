"""Rows of unequal lengths, in batches of any mates, against each row alone; and kernels against formulas."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence, pad_sequence

from lightning_accel import DynamicRNN
from lightning_accel.nn.recurrent import dynamic
from lightning_accel.nn.recurrent.dynamic import pool
from lightning_accel.nn.recurrent.layer import CELLS, RecurrentLayer
from lightning_accel.ops import recurrent_steps
from lightning_accel.ops.native import KERNELS
from tests.tolerance import rounding

SCANS = ("mingru", "minlstm")
EXECUTIONS = {cell: ("padded", "staircase", "lanes" if cell in SCANS else "packed") for cell in CELLS}
PAIRS = [(cell, execution) for cell in CELLS for execution in EXECUTIONS[cell]]
INPUT, HIDDEN = 3, 4
# two layers take at most 8 steps, each of INPUT + HIDDEN products, and gradients come back the same way
CLOSE = rounding(torch.float32, 2 * 2 * 8 * (INPUT + HIDDEN))


def make(cell, execution="auto", **options):
    return DynamicRNN(INPUT, HIDDEN, 2, cell=cell, execution=execution, **options)


def results(rnn, x, lengths, state=None):
    """Output, pooled and states of each row, and the gradient of all weights and of the inputs' valid steps."""
    x = x.clone().requires_grad_()
    out = rnn(x, lengths, state)
    states = out.state if isinstance(out.state, tuple) else (out.state,)
    rows = [out.output, *([] if out.pooled is None else [out.pooled]), *(each.transpose(0, 1) for each in states)]
    gradients = torch.autograd.grad(sum(row.sin().sum() for row in rows), [*rnn.parameters(), x], allow_unused=True)
    return rows, gradients


def ragged(lengths, padding=float("nan")):
    x = torch.randn(len(lengths), max(lengths) + 1, INPUT)
    return x.masked_fill((torch.arange(x.shape[1]) >= torch.tensor(lengths)[:, None])[..., None], padding)


def random_state(cell, rows, directions):
    parts = tuple(torch.randn(2 * directions, rows, HIDDEN) for _ in range(CELLS[cell].states))
    return parts if len(parts) == 2 else parts[0]


def take(state, row):
    if state is None:
        return None
    return tuple(one[:, row : row + 1] for one in state) if isinstance(state, tuple) else state[:, row : row + 1]


def doubled(state):
    return (
        tuple(one.double() for one in state) if isinstance(state, tuple) else state if state is None else state.double()
    )


def rows_alone():
    """Each cell and execution with two poolings by default; slow with each other pooling, directions and states."""
    every = [
        (cell, execution, pooling, bidirectional, given)
        for cell, execution in PAIRS
        for bidirectional, given in ((False, False), (True, True))
        for pooling in ("last", "attention", "none", "mean", "max")
    ]
    every += [
        (cell, execution, "last", bidirectional, not bidirectional)
        for cell, execution in PAIRS
        for bidirectional in (False, True)
    ]
    quick = ("last", False, False), ("attention", True, True)
    return [pytest.param(*case, marks=[] if case[2:] in quick else [pytest.mark.slow]) for case in every]


@pytest.mark.sampled(default=22, slow=43)
@pytest.mark.parametrize(("cell", "execution", "pooling", "bidirectional", "given"), rows_alone())
def test_a_row_in_a_batch_equals_the_row_alone(request, cell, execution, pooling, bidirectional, given):
    """In float64; and float32, which has kernels of its own, is as close to it as its rounding allows."""
    torch.manual_seed(sum(request.node.name.encode()))
    drawn = torch.randint(0, 9, (int(torch.randint(1, 6, ())),)).tolist()
    fast = make(cell, execution, pooling=pooling, bidirectional=bidirectional)
    rnn = copy.deepcopy(fast).double()
    for lengths in ([3, 7, 0, 7, 1], drawn):
        x = ragged(lengths)
        state = random_state(cell, len(lengths), 1 + bidirectional) if given else None
        rows, gradients = results(rnn, x.double(), torch.tensor(lengths), doubled(state))
        alone = [results(rnn, x[i : i + 1, :n].double(), [n], doubled(take(state, i))) for i, n in enumerate(lengths)]
        for number, row in enumerate(rows):
            for i, (expected, _) in enumerate(alone):
                mine = row[i, : lengths[i]] if number == 0 else row[i]
                torch.testing.assert_close(mine, expected[number][0])
        for number in range(len(gradients) - 1):
            parts = [each[number] for _, each in alone if each[number] is not None]
            total = sum(parts) if parts else None
            if total is not None:
                torch.testing.assert_close(gradients[number], total)
        assert gradients[-1] is not None or not any(lengths)  # nothing depends on rows that are all empty
        of_inputs = torch.zeros_like(x).double() if gradients[-1] is None else gradients[-1]
        assert of_inputs.isfinite().all()
        for i, n in enumerate(lengths):
            if n:
                torch.testing.assert_close(of_inputs[i, :n], alone[i][1][-1][0])
            assert not of_inputs[i, n:].any()
        assert not any(rows[0][i, n:].any() for i, n in enumerate(lengths))
        found = results(fast, x, torch.tensor(lengths), state)
        for one, exact in zip([*found[0], *found[1]], [*rows, *gradients], strict=True):
            if exact is not None:
                largest = max(1, float(exact.detach().abs().max()))
                torch.testing.assert_close(one.double(), exact, rtol=0, atol=CLOSE * largest)


@pytest.mark.parametrize("bidirectional", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
@pytest.mark.parametrize("execution", ["padded", "staircase", "packed"])
def test_copies_torch_with_its_numbers(cell, bidirectional, execution):
    theirs = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}[cell](
        INPUT, HIDDEN, 3, bidirectional=bidirectional, batch_first=True
    )
    ours = DynamicRNN.from_torch(theirs, execution=execution)
    x, lengths = ragged([4, 6, 2], padding=0), torch.tensor([4, 6, 2])
    state = tuple(torch.randn(3 * (1 + bidirectional), 3, HIDDEN) for _ in range(CELLS[cell].states))
    state = state if cell == "lstm" else state[0]
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    expected, end = theirs(packed, state)
    expected = pad_packed_sequence(expected, batch_first=True, total_length=x.shape[1])[0]
    actual = ours(x, lengths, state)
    torch.testing.assert_close(actual.output, expected)
    torch.testing.assert_close(actual.state, end)
    last = (end[0] if cell == "lstm" else end)[-1 - bidirectional :]
    torch.testing.assert_close(actual.pooled, torch.cat([*last], dim=1))


@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
def test_the_kernel_equals_the_formula(cell, monkeypatch):
    rnn = make(cell).double()
    x, lengths = ragged([3, 5, 0], padding=0).double(), torch.tensor([3, 5, 0])
    state = tuple(part.double() for part in random_state(cell, 3, 1)) if cell == "lstm" else None
    fast = results(rnn, x, lengths, state)

    def by_formula(layer, x, states, lengths=None):
        states = layer.zero_states(x, x.shape[1]) if states is None else states
        return layer._loop(x, states, lengths)

    monkeypatch.setattr(RecurrentLayer, "steps", by_formula)
    for execution in ("padded", "staircase"):
        rnn.execution = execution
        torch.testing.assert_close(results(rnn, x, lengths, state), fast, rtol=1e-10, atol=1e-12)


def of_feng(cell, layer, x, h):
    """Vanilla minGRU and minLSTM, step by step (Feng et al. 2024, algorithms 1 and 3)."""
    weights, biases = layer.weight_ih.split(HIDDEN), layer.bias_ih.split(HIDDEN)
    gates = [x @ weight.T + bias for weight, bias in zip(weights, biases, strict=True)]
    if cell == "mingru":
        z = gates[0].sigmoid()
        return (1 - z) * h + z * gates[1]
    f, i = gates[0].sigmoid(), gates[1].sigmoid()
    return f / (f + i) * h + i / (f + i) * gates[2]


@pytest.mark.parametrize("cell", SCANS)
def test_scan_cells_equal_their_paper(cell):
    rnn, x, h = DynamicRNN(INPUT, HIDDEN, cell=cell).double(), torch.randn(2, 9, INPUT).double(), torch.randn(2, HIDDEN)
    expected, state = [], h.double()
    for step in range(9):
        state = of_feng(cell, rnn.layers[0], x[:, step], state)
        expected.append(state)
    torch.testing.assert_close(rnn(x, state=h.double()[None]).output, torch.stack(expected, 1), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("cell", CELLS)
def test_steps_equal_the_whole(cell):
    rnn = make(cell).double().eval()
    x = torch.randn(3, 5, INPUT).double()
    whole = rnn(x)
    for with_gradients in (True, False):
        state, outputs = None, []
        with torch.set_grad_enabled(with_gradients):
            for step in range(5):
                output, state = rnn.step(x[:, step], state)
                outputs.append(output)
            mapped = torch.vmap(lambda one: rnn.step(one)[0])(x.transpose(0, 1))
        torch.testing.assert_close(torch.stack(outputs, 1), whole.output)
        torch.testing.assert_close(state, whole.state)
        torch.testing.assert_close(mapped[0], outputs[0])


def test_lists_and_packed_sequences_come_back_in_their_form():
    rnn = make("gru", pooling="mean")
    rows = [torch.randn(n, INPUT) for n in (3, 1, 5)]
    padded = rnn(pad_sequence(rows, batch_first=True), torch.tensor([3, 1, 5]))
    listed, packed = rnn(rows), rnn(pack_sequence(rows, enforce_sorted=False))
    for row, length, expected in zip(listed.output, (3, 1, 5), padded.output, strict=True):
        torch.testing.assert_close(row, expected[:length])
    torch.testing.assert_close(pad_packed_sequence(packed.output, batch_first=True)[0], padded.output)
    for out in (listed, packed):
        torch.testing.assert_close(out.pooled, padded.pooled)
        torch.testing.assert_close(out.state, padded.state)


@pytest.mark.parametrize("cell", CELLS)
def test_a_batch_of_empty_rows_has_gradients(cell):
    rnn = make(cell, pooling="attention")
    rows, gradients = results(rnn, torch.randn(2, 3, INPUT), torch.tensor([0, 0]))
    assert not any(row.any() for row in rows)
    assert all(gradient is not None for gradient in gradients[:-1])


def test_state_goes_on_where_it_ended():
    for cell, execution in PAIRS:
        rnn, x = make(cell, execution), torch.randn(3, 6, INPUT)
        whole = rnn(x, torch.tensor([6, 3, 4]))
        first = rnn(x[:, :3], torch.tensor([3, 3, 3]))
        second = rnn(x[:, 3:], torch.tensor([3, 0, 1]), first.state)
        torch.testing.assert_close(second.state, whole.state)
        torch.testing.assert_close(second.pooled, whole.pooled)


def test_auto_takes_what_suits_the_lengths():
    gru, lstm, scan = make("gru"), make("lstm"), make("mingru")
    with KERNELS.switched_off():
        assert chosen(gru, None) == chosen(gru, [3, 3]) == "padded"
        assert chosen(gru, [3, 2]) == "staircase"
        assert chosen(scan, [3, 2]) == "lanes"
        with torch.no_grad():
            assert chosen(gru, [3, 2]) == "packed"
        large = DynamicRNN(64, 128, cell="lstm")  # a call costs as much as 8 million multiplications
        assert chosen(lstm, [300, 2]) == chosen(large, [60, 59, 58]) == "padded"
        assert chosen(large, [300, 2]) == "staircase"
    assert chosen(gru, [3, 2], "meta") == "packed"
    assert chosen(scan, [3, 2], "meta") == chosen(gru, None, "meta") == "padded"


@pytest.mark.parametrize("cell", ["gru", "lstm", "mingru"])
def test_second_derivatives_of_runs_that_depend_on_each_other(cell, native):
    """Of a run that goes on from the state of another, with the same weights twice, and hooks of weights."""
    rnn = DynamicRNN(INPUT, INPUT, 2, cell=cell, execution="lanes" if cell in SCANS else "packed")
    rnn.layers[1] = rnn.layers[0]
    x, lengths = torch.randn(3, 5, INPUT), torch.tensor([5, 2, 3])
    rnn.layers[0].weight_ih.register_hook(lambda grad: 2 * grad)

    def gradients(create_graph):
        first = rnn(x, lengths)
        loss = rnn(x, lengths, first.state).output.sin().sum()
        return torch.autograd.grad(loss, [*rnn.parameters()], create_graph=create_graph)

    torch.testing.assert_close(gradients(True), gradients(False))


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_many_gradients_at_once(cell, native):
    rnn, x = make(cell, "packed"), torch.randn(3, 5, INPUT, requires_grad=True)
    out = rnn(x, torch.tensor([5, 2, 3])).output
    probes = torch.randn(4, *out.shape)
    (found,) = torch.autograd.grad(out, x, probes, is_grads_batched=True, retain_graph=True)
    expected = torch.stack([torch.autograd.grad(out, x, probe, retain_graph=True)[0] for probe in probes])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("cell", CELLS)
def test_states_have_memory_of_their_own(cell):
    rnn, x = DynamicRNN(INPUT, HIDDEN, cell=cell), torch.randn(2, 50, INPUT)
    with torch.no_grad():
        whole = rnn(x)
        output, state = rnn.step(x[:, 0])
    for out, found in ((whole.output, whole.state), (output, state)):
        for one in found if isinstance(found, tuple) else (found,):
            assert one.untyped_storage().nbytes() == one.nbytes
            assert one.untyped_storage().data_ptr() != out.untyped_storage().data_ptr()


def test_samples_without_steps_have_outputs_in_the_dtype_of_the_weights():
    for lengths in ([0, 0], [1, 0]):
        assert make("gru")(torch.randn(2, 3, INPUT).double(), torch.tensor(lengths)).output.dtype == torch.float32


def test_auto_takes_fused_steps_where_they_are_the_fastest(native, monkeypatch):
    gru, lstm, wide = make("gru"), make("lstm"), DynamicRNN(1024, 1024)  # a step of 3 samples: 19 million products
    assert chosen(gru, None) == chosen(gru, [3, 3]) == chosen(gru, [3, 1]) == chosen(lstm, [5, 3]) == "packed"
    assert chosen(lstm, None) == chosen(lstm, [3, 3]) == chosen(lstm, [20, 19]) == "padded"
    with torch.no_grad():
        assert chosen(lstm, [5, 3]) == "padded"
        assert chosen(lstm, [5, 1]) == chosen(gru, None) == "packed"
    assert chosen(gru.double(), [3, 1]) == "staircase"
    gru.float()
    for bf16 in (False, True):
        monkeypatch.setattr(recurrent_steps, "multiplies_bfloat16", lambda bf16=bf16: bf16)
        with torch.autocast("cpu", torch.bfloat16):
            assert chosen(gru, None) == chosen(wide, [9, 5, 1]) == "packed"
            assert chosen(wide, [9, 9, 9]) == ("padded" if bf16 else "packed")
            for amx in (False, True):
                monkeypatch.setattr(dynamic, "has_amx", lambda amx=amx: amx)
                assert chosen(lstm, [9, 9]) == "padded"
                assert chosen(lstm, [9, 7]) == ("padded" if bf16 and not amx else "packed")


def chosen(rnn, lengths, device="cpu"):
    x = torch.empty(3 if lengths is None else len(lengths), 300, INPUT, device=device)
    return rnn.choose_execution(x, None if lengths is None else torch.tensor(lengths))


@pytest.mark.parametrize("cell", CELLS)
def test_autocast_keeps_states_in_float32(cell):
    rnn = make(cell)
    x = torch.randn(2, 5, INPUT)
    with torch.autocast("cpu", torch.bfloat16):
        out = rnn(x.bfloat16(), torch.tensor([5, 2]))
        stepped, _ = rnn.step(x[:, 0].bfloat16())
        with torch.no_grad():
            streamed, _ = rnn.step(x[:, 0].bfloat16())
    assert out.output.dtype == stepped.dtype == streamed.dtype == torch.float32
    torch.testing.assert_close(out.output, rnn(x, torch.tensor([5, 2])).output, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("cell", CELLS)
def test_weights_of_bfloat16(cell):
    rnn = make(cell, pooling="attention").bfloat16()
    rows, gradients = results(rnn, torch.randn(2, 5, INPUT).bfloat16(), torch.tensor([5, 2]))
    assert {value.dtype for value in (*rows, *gradients)} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be at least 1; got 0"),
        ({"dropout": 1.0}, r"dropout is a share in \[0, 1\); got 1.0"),
        ({"cell": "GRU"}, "cell must be one of rnn, gru, lstm, mingru, minlstm; got 'GRU'"),
        ({"pooling": "sum"}, "pooling must be one of last, mean"),
        ({"execution": "lanes"}, "'mingru' or 'minlstm'; got 'gru'. Take 'auto'"),
        ({"execution": "packed", "cell": "mingru"}, "know 'rnn', 'gru' and 'lstm'; got cell='mingru'"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        DynamicRNN(**{"input_size": 2, "hidden_size": 3} | options)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(2, 3),), ValueError, r"x of shape \(B, T, 3\); got \(2, 3\)"),
        ((torch.ones(2, 3, 4),), ValueError, r"x of shape \(B, T, 3\); got \(2, 3, 4\)"),
        ((torch.ones(2, 3, 3, dtype=torch.int64),), TypeError, "Embed tokens first"),
        ((torch.ones(2, 3, 3), [4, 1]), ValueError, r"lengths must be in \[0, 3\], the steps of x; got 1 to 4"),
        ((torch.ones(2, 3, 3), [1]), ValueError, r"lengths must be \(2,\), one for each row of x; got \(1,\)"),
        ((torch.ones(2, 3, 3), torch.ones(2)), TypeError, "lengths are integers.*got torch.float32"),
        (([torch.ones(2, 3)], [2]), ValueError, "a list knows its own"),
        (([torch.ones(3)],), TypeError, r"a list of \[\(3,\)\]"),
        ((torch.ones(2, 3, 3), None, torch.ones(1, 2, 4)), ValueError, r"\(2, 2, 4\); got \[\(1, 2, 4\)\]"),
    ],
)
def test_inputs_that_cannot_be(arguments, error, message):
    with pytest.raises(error, match=message):
        make("gru")(*arguments)


def test_step_is_refused_where_it_cannot_be():
    with pytest.raises(ValueError, match="reads the last step first"):
        make("gru", bidirectional=True).step(torch.ones(2, INPUT))
    with pytest.raises(ValueError, match=r"DynamicRNN\(input_size=3\) takes a step x \(B, 3\); got \(2, 1, 3\)"):
        make("gru").step(torch.ones(2, 1, INPUT))
    with pytest.raises(ValueError, match=r"proj_size=2"):
        DynamicRNN.from_torch(nn.LSTM(INPUT, HIDDEN, proj_size=2))


@pytest.mark.gpu
@pytest.mark.parametrize(("cell", "execution"), PAIRS)
def test_a_gpu_gives_the_numbers_of_the_cpu(cell, execution):
    rnn, lengths = make(cell, execution, bidirectional=True).double(), [3, 7, 0, 7, 1]
    x = ragged(lengths).double()
    expected = results(rnn, x, torch.tensor(lengths))
    for where in ("cpu", "cuda"):
        actual = results(rnn.cuda(), x.cuda(), torch.tensor(lengths, device=where))
        torch.testing.assert_close(actual, expected, check_device=False)


@pytest.mark.parametrize(("cell", "execution"), [pair for pair in PAIRS if pair[0] not in SCANS])
def test_autocast_runs_kernels_in_bfloat16_where_the_cpu_multiplies_it(cell, execution, monkeypatch):
    rnn, x = make(cell, execution), torch.randn(2, 5, INPUT)

    def run(is_mixed):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
            out = rnn(x, torch.tensor([5, 2])).output
        return out.detach(), *torch.autograd.grad(out.sin().sum(), [*rnn.parameters()])

    expected = run(False)
    bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    for is_fast in (False, True) if bf16 else (False,):
        monkeypatch.setattr(recurrent_steps, "multiplies_bfloat16", lambda is_fast=is_fast: is_fast)
        found = run(True)
        is_exact = not is_fast or cell == "rnn"
        tolerances = {} if is_exact else {"rtol": 0, "atol": 0.03}
        torch.testing.assert_close(found, expected, **tolerances)
        assert is_exact or not torch.equal(found[0], expected[0])


@pytest.mark.parametrize("cell", SCANS)
def test_gates_close_to_one_are_not_rounded_to_it(cell):
    rnn = DynamicRNN(INPUT, 1, cell=cell).bfloat16()
    layer = rnn.layers[0]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.bias_ih[0] = -7 if cell == "mingru" else 7  # a gate of 0.9991, which bf16 makes 1
        layer.bias_ih[1] = 0 if cell == "mingru" else -7
    kept = rnn(torch.zeros(1, 1000, INPUT).bfloat16(), state=torch.ones(1, 1, 1).bfloat16()).state.item()
    assert kept == pytest.approx(0.999089**1000, abs=0.01)


def test_no_lengths_are_full_lengths():
    rnn, x = make("gru", bidirectional=True, pooling="mean"), torch.randn(3, 5, INPUT)
    for actual, expected in zip(rnn(x), rnn(x, [5, 5, 5]), strict=True):
        torch.testing.assert_close(actual, expected)


def test_means_of_bfloat16_count_every_step():
    steps = torch.ones(1, 1000, 1).bfloat16()  # a sum of them in bf16 stops at 256
    assert pool(steps, torch.tensor([1000]), "mean").item() == pytest.approx(1, abs=0.01)


def test_the_largest_is_that_of_valid_steps():
    steps = torch.tensor([-2.0, -1.0, 0.0]).view(1, 3, 1).expand(2, 3, 1)
    assert pool(steps, torch.tensor([2, 0]), "max").tolist() == [[-1], [0]]


def test_dropout_stands_between_layers_in_training():
    x = torch.randn(2, 3, INPUT)
    for layers, differ in ((1, False), (2, True)):
        rnn = DynamicRNN(INPUT, 20, layers, dropout=0.5)
        assert rnn(x).output.equal(rnn(x).output) != differ
        assert rnn.step(x[:, 0])[0].equal(rnn.step(x[:, 0])[0]) != differ
        rnn.eval()
        assert rnn(x).output.equal(rnn(x).output)
    assert not DynamicRNN.from_torch(nn.GRU(INPUT, HIDDEN).eval()).training


@pytest.mark.sampled(slow=2)
@pytest.mark.slow
@pytest.mark.parametrize("cell", [*(pytest.param(cell, marks=pytest.mark.slow) for cell in ("gru", "lstm")), "mingru"])
def test_compiled_it_trains_as_it_is(cell):
    rnn, x, lengths = make(cell, bidirectional=True), ragged([4, 2, 0]), torch.tensor([4, 2, 0])
    expected = results(rnn, x, lengths)
    torch.testing.assert_close(results(torch.compile(rnn, backend="aot_eager"), x, lengths), expected)


def test_a_frozen_module_stays_frozen():
    frozen = nn.GRU(INPUT, HIDDEN).requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in DynamicRNN.from_torch(frozen).parameters())


@pytest.mark.parametrize("cell", ["lstm", "mingru", "minlstm"])
def test_states_last_before_training(cell):
    rnn = DynamicRNN(INPUT, 200, cell=cell)
    ones = torch.ones(1, 1, 200)
    state = rnn(torch.zeros(1, 10, INPUT), state=(ones * 0, ones) if cell == "lstm" else ones).state
    assert state[1].mean() > 0.1 if cell == "lstm" else state.mean() > 0.5


def test_directions_are_a_claim():
    with pytest.raises(TypeError, match="bidirectional must be True or False; got None"):
        DynamicRNN(3, 4, bidirectional=None)
