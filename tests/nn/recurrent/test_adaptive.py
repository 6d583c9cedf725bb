import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

from lightning_accel.nn import AdaptiveComputation


class Counted(nn.Module):
    """A cell that notes the rows of each of its calls."""

    def __init__(self, cell):
        super().__init__()
        self.cell, self.calls = cell, []

    def forward(self, x, state):
        self.calls.append(len(x))
        return self.cell(x, state)


def make(kind="gru", bias=-1.0, **kwargs):
    cell = {"gru": nn.GRUCell, "lstm": nn.LSTMCell}[kind](3 + 1, 4)
    adaptive = AdaptiveComputation(Counted(cell), 4, **kwargs).double()
    nn.init.normal_(adaptive.halting.weight, std=3)
    nn.init.constant_(adaptive.halting.bias, bias)
    return adaptive


def row_by_row(adaptive, x, state):
    """The paper's formulas for one row after the other."""
    results = []
    for row in range(len(x)):
        s = tuple(part[row : row + 1] for part in state)
        s = s if len(s) > 1 else s[0]
        halted, mean, step = 0.0, 0.0, 0
        while True:
            step += 1
            flag = torch.full((1, 1), float(step == 1), dtype=x.dtype)
            s = adaptive.cell.cell(torch.cat((x[row : row + 1], flag), 1), s)
            parts = torch.stack(s if isinstance(s, tuple) else (s,))
            h = torch.sigmoid(adaptive.halting(parts[0]))[0, 0]
            if halted + h >= 1 - adaptive.epsilon or step == adaptive.max_steps:
                remainder = 1 - halted
                results.append((mean + remainder * parts[:, 0], step, step + remainder))
                break
            mean, halted = mean + h * parts[:, 0], halted + h
    states, steps, costs = zip(*results, strict=True)
    costs = torch.stack([torch.as_tensor(cost, dtype=x.dtype) for cost in costs])
    return torch.stack(states, 1), torch.tensor(steps), costs


@pytest.mark.parametrize("kind", ["gru", "lstm"])
@pytest.mark.parametrize("max_steps", [1, 3, 50])
def test_matches_the_loop_over_rows(kind, max_steps):
    adaptive = make(kind, max_steps=max_steps)
    x = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    state = tuple(torch.randn(9, 4, dtype=torch.float64, requires_grad=True) for _ in range(1 + (kind == "lstm")))
    out = adaptive(x, state if kind == "lstm" else state[0])
    states, steps, costs = row_by_row(adaptive, x, state)
    found = torch.stack(out.state if kind == "lstm" else (out.state,))
    torch.testing.assert_close(found, states)
    torch.testing.assert_close(out.ponder_cost, costs)
    assert torch.equal(out.num_steps, steps)
    if max_steps == 50:
        assert len(steps.unique()) > 2
        inputs = (x, *state, *adaptive.parameters())
        probe = torch.randn_like(states)
        torch.testing.assert_close(
            torch.autograd.grad((found * probe).sum() + out.ponder_cost.sum(), inputs),
            torch.autograd.grad((states * probe).sum() + costs.sum(), inputs),
        )


def test_cell_sees_the_rows_that_still_run():
    adaptive = make(max_steps=20)
    steps = adaptive(torch.randn(30, 3, dtype=torch.float64)).num_steps
    assert adaptive.cell.calls == [int((steps >= step).sum()) for step in range(1, int(steps.max()) + 1)]
    assert len(set(adaptive.cell.calls)) > 2


def test_derivatives():
    adaptive = make(max_steps=4)
    x = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: (adaptive(x).state, adaptive(x).ponder_cost), (x,))


def test_first_step_is_flagged():
    flags = []

    def cell(x, state):
        flags.append(x[:, -1].tolist())
        return torch.zeros(len(x), 2)

    out = AdaptiveComputation(cell, 2, max_steps=3, epsilon=0.01)(torch.zeros(2, 5))
    assert flags == [[1.0, 1.0], [0.0, 0.0]]  # sigmoid(1) twice is over 1
    assert out.num_steps.tolist() == [2, 2]
    torch.testing.assert_close(out.ponder_cost, torch.full((2,), 2 + 1 - torch.tensor(1.0).sigmoid().item()))


@pytest.mark.parametrize(("bias", "num_steps"), [(5.0, 1), (4.0, 2)])
def test_one_step_is_enough_within_epsilon(bias, num_steps):
    adaptive = make(bias=bias, epsilon=0.01)  # sigmoid(5) is over 0.99, sigmoid(4) is not
    nn.init.zeros_(adaptive.halting.weight)
    assert adaptive(torch.randn(2, 3, dtype=torch.float64)).num_steps.tolist() == [num_steps] * 2


def test_no_rows_and_16_bits():
    assert make()(torch.zeros(0, 3, dtype=torch.float64)).state.shape == (0, 4)
    adaptive = make(max_steps=6).bfloat16()
    out = adaptive(torch.randn(5, 3, dtype=torch.bfloat16))
    assert (out.state.dtype, out.ponder_cost.dtype) == (torch.bfloat16, torch.float32)
    adaptive = make(max_steps=6).float()
    with torch.autocast("cpu", torch.bfloat16):
        assert adaptive(torch.randn(5, 3)).ponder_cost.dtype == torch.float32


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match=r"epsilon must lie in \(0, 1\), e.g. 0.01; got 0"):
        AdaptiveComputation(nn.GRUCell(2, 1), 1, epsilon=0)
    with pytest.raises(ValueError, match="at least 1; got 4 and 0"):
        AdaptiveComputation(nn.GRUCell(2, 4), 4, max_steps=0)
    with pytest.raises(ValueError, match=r"one step of a sequence; got \(2, 5, 3\)"):
        make()(torch.zeros(2, 5, 3))
