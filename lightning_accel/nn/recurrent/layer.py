"""One recurrent layer in one direction.

Shapes: S steps, B samples, I inputs, H hidden, G gates, N valid steps of all samples.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_accel._private.torch import in_transform, own_parameters
from lightning_accel.ops import gated_scan, linear_scan, recurrent_layer
from lightning_accel.ops.recurrent import run_kernel, run_padded
from lightning_accel.ops.recurrent_steps import recurrent_step
from lightning_accel.ops.scan.linear import scan_terms

CellName: TypeAlias = Literal["rnn", "gru", "lstm", "mingru", "minlstm"]
States: TypeAlias = tuple[Tensor, ...]  # (B, H) each: h, and for an LSTM c

# Largest number of steps for which initial gates keep a state. From the smaller number, LSTMs learn the adding problem
# of 100 steps as well, and other tasks in half of the updates.
_LONGEST_MEMORY = {"lstm": 10, "mingru": 100, "minlstm": 100}


class Cell(NamedTuple):
    """Define a cell: number of gates and states, and its step.

    ``advance`` maps the gates' inputs from the input and from the state, (B, G * H) each, and the states to the next
    states. It is None for a scan cell, whose gates do not depend on the state and for which torch has no kernel.
    """

    gates: int
    states: int
    advance: Callable[[Tensor, Tensor, States], States] | None = None


def _advance_rnn(x: Tensor, h: Tensor, states: States) -> States:
    return ((x + h).tanh(),)


def _advance_gru(x: Tensor, h: Tensor, states: States) -> States:
    (x_reset, x_update, x_new), (h_reset, h_update, h_new) = x.chunk(3, -1), h.chunk(3, -1)
    new = (x_new + (x_reset + h_reset).sigmoid() * h_new).tanh()
    return (torch.lerp(new, states[0], (x_update + h_update).sigmoid()),)


def _advance_lstm(x: Tensor, h: Tensor, states: States) -> States:
    entry, keep, new, show = (x + h).chunk(4, -1)
    cell = keep.sigmoid() * states[1] + entry.sigmoid() * new.tanh()
    return show.sigmoid() * cell.tanh(), cell


CELLS = {
    "rnn": Cell(1, 1, _advance_rnn),
    "gru": Cell(3, 1, _advance_gru),
    "lstm": Cell(4, 2, _advance_lstm),
    "mingru": Cell(2, 1),
    "minlstm": Cell(3, 1),
}
_WEIGHTS = "weight_ih", "weight_hh", "bias_ih", "bias_hh"
_OF_TORCH = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}
# Signs of the biases with which a cell's first gates keep the state.
_MEMORY_BIAS_SIGNS: dict[str, tuple[int, ...]] = {
    "rnn": (),
    "gru": (),
    "lstm": (-1, 1),
    "mingru": (-1,),
    "minlstm": (1, -1),
}


class Layout(Protocol):
    """Define the memory layout of the steps of a batch, and how a layer runs over them."""

    def run(self, layer: "RecurrentLayer", data: Tensor, states: States | None) -> tuple[Tensor, States]: ...


class RecurrentLayer(nn.Module):
    """Run one recurrent layer in one direction, with the options of :class:`lightning_accel.DynamicRNN`.

    ``weight_ih`` (G * H, I), ``weight_hh`` (G * H, H), ``bias_ih`` and ``bias_hh`` (G * H,) have the layout of
    ``torch.nn.RNN``, ``GRU`` and ``LSTM``. Scan cells have no ``hh`` parameters; the gates of ``mingru`` are update
    gate and candidate, those of ``minlstm`` forget gate, input gate and candidate.
    """

    weight_hh: Tensor | None
    bias_hh: Tensor | None

    def __init__(self, input_size: int, hidden_size: int, cell: CellName) -> None:
        super().__init__()
        self.cell = cell
        self.hidden_size = hidden_size
        self.is_scan = CELLS[cell].advance is None
        size = CELLS[cell].gates * hidden_size
        self.weight_ih = nn.Parameter(torch.empty(size, input_size))
        self.bias_ih = nn.Parameter(torch.empty(size))
        self.weight_hh = None if self.is_scan else nn.Parameter(torch.empty(size, hidden_size))
        self.bias_hh = None if self.is_scan else nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise weights uniformly within 1 / sqrt(H) as torch does, but biases so that gates keep states longer.

        Except for a GRU, gates initially keep states for 1 to 100 steps, those of an LSTM for 1 to 10: Tallec and
        Ollivier 2018, Can Recurrent Neural Networks Warp Time?, https://arxiv.org/abs/1804.11188, eq. 16. With torch's
        initialisation, which forgets half of the state at each step, an LSTM fails the adding problem, and scan cells
        learn selective copying later. Recurrent weights of an LSTM are orthogonal, its input weights those of Glorot
        and Bengio 2010, gate by gate.
        """
        bound = 1 / math.sqrt(self.hidden_size)
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -bound, bound)
        if self.cell == "lstm":
            assert self.weight_hh is not None
            assert self.bias_hh is not None
            for part in self.weight_hh.detach().chunk(4):
                nn.init.orthogonal_(part)
            for part in self.weight_ih.detach().chunk(4):
                nn.init.xavier_uniform_(part)
            nn.init.zeros_(self.bias_hh)
            nn.init.zeros_(self.bias_ih)
        longest = _LONGEST_MEMORY.get(self.cell, 2)
        memory = self.bias_ih.new_empty(self.hidden_size).uniform_(1, longest - 1).log_()
        for gate, sign in zip(
            self.bias_ih.detach().chunk(CELLS[self.cell].gates), _MEMORY_BIAS_SIGNS[self.cell], strict=False
        ):
            gate.copy_(sign * memory)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "RecurrentLayer":
        super()._apply(fn, recurse)
        self._compact_weights()
        return self

    def _compact_weights(self) -> None:
        """Lay out weights on a GPU in one piece of memory, to which cuDNN would otherwise copy them in each call."""
        weights = [getattr(self, name) for name in _WEIGHTS]  # of other types where they are computed, or shared out
        if all(type(one) is nn.Parameter and one.is_cuda for one in weights):
            of_torch: nn.RNNBase = _OF_TORCH[self.cell](self.weight_ih.shape[1], self.hidden_size, device="meta")
            for name, weight in zip(_WEIGHTS, weights, strict=True):
                setattr(of_torch, f"{name}_l0", weight)
            of_torch.flatten_parameters()

    def forward(self, data: Tensor, states: States | None, layout: Layout) -> tuple[Tensor, States]:
        """Run over ``data`` in ``layout``, starting from ``states`` or zeros; return the outputs and last states."""
        return layout.run(self, data, states)

    def zero_states(self, like: Tensor, rows: int) -> States:
        one = like.new_zeros(rows, self.hidden_size, dtype=self.weight_ih.dtype)
        return (one,) * CELLS[self.cell].states

    def steps(self, x: Tensor, states: States | None, lengths: Tensor | None = None) -> tuple[Tensor, States]:
        """Run ``x`` (S, B, I); states stay unchanged after the ``lengths`` (B,), if given.

        Outputs after the length of a sample are undefined.
        """
        states = self.zero_states(x, x.shape[1]) if states is None else states
        if self.is_scan:
            return self._scan(x, states, lengths)
        # on CPU, the LSTM kernel of oneDNN has no gradient in compiled graphs
        if self.cell == "lstm" and x.device.type == "cpu" and torch.compiler.is_compiling():
            return self._loop(x, states, lengths)
        x = x.to(self.weight_ih.dtype)
        return self._cast_outputs(run_padded(self.cell, x, states, self._weights(), lengths, self.training))

    def packed(self, x: Tensor, batch_sizes: Tensor, states: States) -> tuple[Tensor, States]:
        """Run steps (N, I) in the layout of a PackedSequence with ``batch_sizes``, int64 on the CPU."""
        x = x.to(self.weight_ih.dtype)
        return self._cast_outputs(run_kernel(self.cell, x, states, self._weights(), batch_sizes, self.training))

    def as_one_op(
        self, x: Tensor, states: States | None, lengths: Tensor | None, backwards: bool
    ) -> tuple[Tensor, States]:
        """Run ``x`` (S, B, I) as one operation, by :func:`lightning_accel.ops.recurrent_layer`."""
        return recurrent_layer(self.cell, x.to(self.weight_ih.dtype), states, self._weights(), lengths, backwards)

    def lanes(
        self, x: Tensor, states: States | None, begins: Tensor, ends: Tensor, starts: Tensor
    ) -> tuple[Tensor, States]:
        """Run the steps (N, I) of concatenated samples, each from its own state.

        ``begins`` and ``ends`` (B,) int64 are the positions of each sample's first and last step; ``starts`` (N,) bool
        is True at first steps.
        """
        if states is None:
            out = gated_scan(self.cell, self._scan_gates(x)[None], starts=starts[None])
        else:
            gate, value = scan_terms(self.cell, self._scan_gates(x))
            value = value.index_add(0, begins, gate[begins] * states[0].to(value.dtype))
            out = linear_scan(gate[None], value[None], starts=starts[None])
        out = out[0].to(self.weight_ih.dtype)
        return out, (out[ends],)

    def step(self, x: Tensor, states: States) -> States:
        """Run one step ``x`` (B, I)."""
        if self.is_scan:
            gate, value = scan_terms(self.cell, self._scan_gates(x))
            return ((gate * states[0] + value).to(self.weight_ih.dtype),)
        # torch's cells keep states in autocast's dtype, and have no rule for vmap
        if torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type) or in_transform():
            return self._advance(self._project(x), states)
        weights = self._weights()
        dtype = weights[0].dtype
        own = [one if one.dtype == dtype else one.to(dtype) for one in (x, *states)]
        return recurrent_step(self.cell, own[0], own[1:], weights)

    def _scan(self, x: Tensor, states: States, lengths: Tensor | None) -> tuple[Tensor, States]:
        out = gated_scan(self.cell, self._scan_gates(x).transpose(0, 1), states[0], lengths=lengths)
        out = out.transpose(0, 1).to(self.weight_ih.dtype)
        return out, (out[-1],)

    def _scan_gates(self, x: Tensor) -> Tensor:
        gates = self._project(x)
        return gates.to(torch.promote_types(gates.dtype, torch.float32))  # a gate may be close to 1

    def _project(self, x: Tensor) -> Tensor:
        dtype = self.weight_ih.dtype
        return F.linear(x.to(dtype), self.weight_ih, self.bias_ih).to(dtype)

    def _loop(self, x: Tensor, states: States, lengths: Tensor | None) -> tuple[Tensor, States]:
        out = []
        for number, gates in enumerate(self._project(x)):
            new = self._advance(gates, states)
            if lengths is not None:
                goes_on = (number < lengths)[:, None]
                new = tuple(torch.where(goes_on, *pair) for pair in zip(new, states, strict=True))
            states = new
            out.append(states[0])
        return torch.stack(out), states

    def _advance(self, gates: Tensor, states: States) -> States:
        (_, weight_hh, _, bias_hh), advance = self._weights(), CELLS[self.cell].advance
        assert advance is not None
        return advance(gates, F.linear(states[0].to(weight_hh.dtype), weight_hh, bias_hh).to(weight_hh.dtype), states)

    def _weights(self) -> list[Tensor]:
        own = own_parameters(self)
        try:
            return [own["weight_ih"], own["weight_hh"], own["bias_ih"], own["bias_hh"]]
        except KeyError:  # pruned, or computed from other parameters
            return [getattr(self, name) for name in _WEIGHTS]

    def _cast_outputs(self, found: tuple[Tensor, States]) -> tuple[Tensor, States]:
        dtype = self.weight_ih.dtype  # under autocast, kernels return another
        return found[0].to(dtype), tuple(state.to(dtype) for state in found[1])
