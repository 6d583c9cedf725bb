"""Adaptive computation time: a learned number of steps per sample. Shapes: B samples, I features in, H hidden."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_accel.nn.features import require_floating, require_width

State: TypeAlias = Tensor | tuple[Tensor, ...]


class AdaptiveOutput(NamedTuple):
    """Hold the output of :class:`AdaptiveComputation`."""

    state: Any  # (B, H) or a tuple of those, as of the cell: weighted sum of the states of a sample's steps
    num_steps: Tensor  # (B,) int64, in [1, max_steps]
    ponder_cost: Tensor  # (B,) float32 or wider, steps plus remainder; add tau times its mean to the loss


class AdaptiveComputation(nn.Module):
    """Call a recurrent cell on each sample until its learned halting probabilities sum to 1.

    Samples that have halted are removed from the batch of the cell, which waits for the device once per step to know
    how many are left.

    Source: Graves 2016, Adaptive Computation Time for Recurrent Neural Networks, https://arxiv.org/abs/1603.08983,
    section 2, eq. 3-14. Halting is computed in float32, under autocast too.

    Args:
        cell: ``cell(x (b, I + 1), state) -> state`` for any batch size b, e.g. ``nn.GRUCell(I + 1, H)`` or
            ``nn.LSTMCell``; the last column of its input is 1 in the first step and 0 later. A state is (b, H), or a
            tuple whose first entry is (b, H).
        hidden_size: H, the width of the state.
        max_steps: largest number of steps per sample.
        epsilon: samples halt when the sum of probabilities reaches 1 - epsilon, so one step can suffice.

    Raises:
        ValueError: if ``hidden_size`` or ``max_steps`` is below 1, or ``epsilon`` not in (0, 1).

    >>> adaptive = AdaptiveComputation(nn.GRUCell(2 + 1, 4), hidden_size=4, max_steps=5)
    >>> adaptive(torch.ones(3, 2)).state.shape
    torch.Size([3, 4])
    """

    def __init__(
        self, cell: Callable[..., State], hidden_size: int, max_steps: int = 100, epsilon: float = 0.01
    ) -> None:
        super().__init__()
        if min(hidden_size, max_steps) < 1:
            raise ValueError(f"hidden_size and max_steps must be at least 1; got {hidden_size} and {max_steps}")
        if not 0 < epsilon < 1:
            raise ValueError(f"epsilon must lie in (0, 1), e.g. 0.01; got {epsilon}")
        self.cell = cell
        self.hidden_size = hidden_size
        self.max_steps = max_steps
        self.epsilon = epsilon
        self.halting = nn.Linear(hidden_size, 1)
        nn.init.ones_(self.halting.bias)  # section 2: with a positive bias samples halt early at first

    if TYPE_CHECKING:  # Any, as torch declares it

        def __call__(self, x: Tensor, state: State | None = None) -> AdaptiveOutput: ...

    def forward(self, x: Tensor, state: State | None = None) -> AdaptiveOutput:
        """Process one element of a sequence, ``x`` (B, I), with as many steps of the cell as each sample takes.

        ``state`` is the state before, (B, H) or a tuple of those; the default None is passed to the cell.
        """
        if x.ndim != 2:
            raise ValueError(f"x must be (B, I), one step of a sequence; got {tuple(x.shape)}. Call it for each step")
        if isinstance(self.cell, nn.RNNCellBase):
            require_width(self, x, "cell.input_size - 1", self.cell.input_size - 1, "x (B, {})")
            require_floating(self, x, "x", self.cell.parameters(recurse=False))
        rows = torch.arange(len(x), device=x.device)
        total: Tensor | None = None  # (b,) sum of the halting probabilities of the samples that have not halted
        sums: tuple[Tensor, ...] | None = None  # their weighted sums of states
        finished: list[tuple[Tensor, ...]] = []
        for step in range(1, self.max_steps + 1):
            flag = x.new_full((len(x), 1), float(step == 1))  # eq. 3 and below
            state = self.cell(torch.cat((x, flag), 1), state)
            parts = _parts(state)
            halt = self._halting_probability(parts[0])
            total = torch.zeros_like(halt) if total is None else total
            if step == self.max_steps:
                halts = torch.ones_like(halt, dtype=torch.bool)
            else:
                halts = total + halt >= 1 - self.epsilon  # eq. 7
            remainder = 1 - total  # eq. 8
            weight = torch.where(halts, remainder, halt)
            out = tuple(weight.to(part.dtype).unsqueeze(1) * part for part in parts)
            sums = out if sums is None else tuple(a + b for a, b in zip(sums, out, strict=True))
            done, stay = halts.nonzero().squeeze(1), (~halts).nonzero().squeeze(1)
            steps = torch.full_like(done, step)
            cost = (step + remainder).index_select(0, done)  # eq. 10
            finished.append((rows.index_select(0, done), steps, cost, *(part.index_select(0, done) for part in sums)))
            if not len(stay):
                break
            x, rows, total = (one.index_select(0, stay) for one in (x, rows, total + halt))
            sums = tuple(part.index_select(0, stay) for part in sums)
            parts = tuple(part.index_select(0, stay) for part in parts)
            state = parts[0] if isinstance(state, Tensor) else parts
        return _restore_order(finished, as_tuple=not isinstance(state, Tensor))

    def _halting_probability(self, h: Tensor) -> Tensor:
        wide = torch.promote_types(h.dtype, torch.float32)
        with torch.autocast(h.device.type, enabled=False):
            weight, bias = self.halting.weight.to(wide), self.halting.bias.to(wide)
            return F.linear(h.to(wide), weight, bias).squeeze(1).sigmoid()  # eq. 5

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, max_steps={self.max_steps}, epsilon={self.epsilon}"


def _parts(state: State) -> tuple[Tensor, ...]:
    return (state,) if isinstance(state, Tensor) else state


def _restore_order(finished: list[tuple[Tensor, ...]], as_tuple: bool) -> AdaptiveOutput:
    rows, *results = (torch.cat(parts) for parts in zip(*finished, strict=True))
    steps, cost, *states = (result.index_select(0, rows.argsort()) for result in results)
    return AdaptiveOutput(tuple(states) if as_tuple else states[0], steps, cost)
