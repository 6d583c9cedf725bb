"""Recurrent networks for sequences of unequal lengths.

Shapes: B samples, T steps, I inputs, H hidden, L layers, D directions.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence, pad_sequence

from lightning_accel._private.torch import has_amx
from lightning_accel.nn.features import require_floating, require_width
from lightning_accel.nn.recurrent.layer import CELLS, CellName, RecurrentLayer, States
from lightning_accel.nn.recurrent.layout import LanesLayout, PaddedLayout, SingleOpLayout, SortedLayout
from lightning_accel.ops.float32 import at_least_float32
from lightning_accel.ops.recurrent_steps import has_fused_steps, runs_in_bfloat16

Execution: TypeAlias = Literal["auto", "padded", "staircase", "packed", "lanes"]
Pooling: TypeAlias = Literal["last", "mean", "max", "attention", "none"]
State: TypeAlias = Tensor | tuple[Tensor, Tensor]
Sequences: TypeAlias = Tensor | Sequence[Tensor] | PackedSequence


class RecurrentOutput(NamedTuple):
    """Hold the output of :class:`DynamicRNN`."""

    output: Sequences  # last layer's output in the form of the input: (B, T, D * H), zero after the end of a sequence
    pooled: Tensor | None  # (B, D * H); None for pooling="none"
    state: State  # (L * D, B, H) after each sequence's last valid step; for an LSTM a pair, h and c


class DynamicRNN(nn.Module):
    """Run a recurrent network over a batch of sequences of unequal lengths, with the results of each sequence alone.

    Padding after the end of a sequence affects neither outputs nor gradients, and may be NaN. For a sequence of length
    0 the states stay unchanged, and the pooled output is its state for ``last``, else 0.

    ``execution`` selects how the steps are run; the results are equal. ``padded`` runs all sequences to the longest
    length, without waiting for a GPU; ``staircase`` sorts sequences by length and runs each step only for those that
    have not ended; ``packed`` runs over a PackedSequence, by torch's kernel or, for the GRU and LSTM in float32 on a
    CPU, by fused steps of our own; ``lanes`` concatenates sequences along time, for scan cells. ``auto`` takes the
    fastest for the device, the cell, the precision and the lengths, as measured by ``benchmarks/bench_rnn.py``.

    Under autocast in bfloat16, on CPUs that multiply it, kernels of the GRU and LSTM run in it; in fused steps the
    products over all steps do, and the pass over time stays in float32.

    Args:
        input_size: I, the number of features of a step.
        hidden_size: H, the width of the state of each direction.
        num_layers: L, the number of layers, each on the output of the one before.
        cell: ``rnn`` (tanh), ``gru`` or ``lstm`` as in torch; or the scan cells ``mingru`` and ``minlstm``, whose gates
            depend only on the input, so that all steps are computed in parallel.
        bidirectional: whether each layer also reads from the last valid step to the first.
        pooling: how the steps of a sequence become one vector: its ``last`` valid step (in each direction), ``mean``,
            ``max``, ``attention`` with a learned query, or ``none``.
        dropout: dropout probability between layers.
        execution: ``auto``, ``padded``, ``staircase``, ``packed`` or ``lanes``.

    Raises:
        ValueError: if a size is below 1, a probability not in [0, 1), a name unknown, or the execution or an option
            does not work with the cell.

    Source: Feng et al. 2024, Were RNNs All We Needed? (minGRU, minLSTM).

    >>> rnn = DynamicRNN(3, 5)
    >>> rnn(torch.randn(2, 4, 3), torch.tensor([4, 1])).pooled.shape
    torch.Size([2, 5])
    """

    indivisible = True  # a pipeline must not split it: shapes between its layers depend on the lengths of a batch

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        cell: CellName = "gru",
        bidirectional: bool = False,
        pooling: Pooling = "last",
        dropout: float = 0.0,
        execution: Execution = "auto",
    ) -> None:
        super().__init__()
        if bidirectional not in (False, True):
            raise TypeError(f"bidirectional must be True or False; got {bidirectional!r}")
        sizes = {"input_size": input_size, "hidden_size": hidden_size, "num_layers": num_layers}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1; got {size}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout is a share in [0, 1); got {dropout}")
        choices = (
            ("cell", cell, CELLS),
            ("pooling", pooling, get_args(Pooling)),
            ("execution", execution, get_args(Execution)),
        )
        for name, given, known in choices:
            if given not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}; got {given!r}")
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.cell: CellName = cell
        self.bidirectional = bidirectional
        self.pooling: Pooling = pooling
        self.dropout = dropout
        self.execution: Execution = execution
        directions = 2 if bidirectional else 1
        self.layers = nn.ModuleList(  # in the order of the states: the directions of the first layer, of the second ...
            RecurrentLayer(hidden_size * directions if number else input_size, hidden_size, cell)
            for number in range(num_layers)
            for _ in range(directions)
        )
        self.attention = AttentionPooling(hidden_size * directions) if pooling == "attention" else None
        self._check_execution()

    @property
    def output_size(self) -> int:
        """Return the width D * H of the outputs and of the pooled vector."""
        return self.hidden_size * (1 + self.bidirectional)

    @classmethod
    def from_torch(
        cls, module: nn.RNNBase, *, pooling: Pooling = "last", execution: Execution = "auto"
    ) -> "DynamicRNN":
        """Create a network with copies of the weights of ``module``, an ``nn.RNN`` (tanh), ``nn.GRU`` or ``nn.LSTM``.

        Raises:
            ValueError: if ``module`` has a projection, no biases, or another non-linearity.
        """
        cell = _CELL_OF_TORCH.get(module.mode)
        if cell is None or module.proj_size or not module.bias:
            raise ValueError(
                "DynamicRNN copies nn.RNN with tanh, nn.GRU and nn.LSTM, with biases and without proj_size; "
                f"got mode={module.mode!r}, bias={module.bias}, proj_size={module.proj_size}"
            )
        made = cls(
            module.input_size, module.hidden_size, module.num_layers, cell=cell, dropout=module.dropout,
            bidirectional=module.bidirectional, pooling=pooling, execution=execution,
        ).to(next(module.parameters()))  # fmt: skip
        suffixes = [f"_l{number}{end}" for number in range(module.num_layers) for end in made._suffixes]
        with torch.no_grad():
            for layer, suffix in zip(made.layers, suffixes, strict=True):
                for name, parameter in layer.named_parameters():
                    theirs = getattr(module, name + suffix)
                    parameter.copy_(theirs).requires_grad_(theirs.requires_grad)
        return made.train(module.training)

    if TYPE_CHECKING:  # Any, as torch declares it

        def __call__(
            self, x: Sequences, lengths: Tensor | Sequence[int] | None = None, state: State | None = None
        ) -> RecurrentOutput: ...

    def forward(
        self, x: Sequences, lengths: Tensor | Sequence[int] | None = None, state: State | None = None
    ) -> RecurrentOutput:
        """Run over the sequences ``x``.

        Args:
            x: (B, T, I) floating, or a list of B tensors (T_i, I), or a PackedSequence.
            lengths: (B,) integers in [0, T], on any device; by default all T. Not for lists and PackedSequences.
            state: initial state, as in the output; zeros by default.

        Raises:
            TypeError: if ``x`` has another type, or ``lengths`` are not integers.
            ValueError: if shapes disagree, a length is not in [0, T], or lengths are given twice.
        """
        rows, lengths, form = _pad(x, lengths, self.input_size)
        layout = self._layout(rows, lengths)
        states = self._split_state(state, rows)
        data = layout.enter(rows)
        ends: list[States] = []
        for number in range(self.num_layers):
            if number:
                data = F.dropout(data, self.dropout, self.training)
            parts = []
            for direction in range(1 + self.bidirectional):
                layer = self.layers[len(ends)]
                assert isinstance(layer, RecurrentLayer)
                out, end = layout.direct(layer, data, states[len(ends)], backwards=direction == 1)
                parts.append(out)
                ends.append(end)
            data = torch.cat(parts, dim=-1) if self.bidirectional else parts[0]
        output = layout.leave(data)
        pooled = self._pool(output, lengths, ends)
        return RecurrentOutput(_unpad(output, lengths, form), pooled, _join(ends))

    def step(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Run one step ``x`` (B, I), for streams; return the output (B, H) and the new state.

        Raises:
            ValueError: if the network is bidirectional, or shapes disagree.
        """
        if self.bidirectional:
            raise ValueError("a bidirectional DynamicRNN reads the last step first and cannot run step by step")
        require_width(self, x, "input_size", self.input_size, "a step x (B, {})", ndim=2)
        require_floating(self, x, "x")
        ends: list[States] = []
        for layer, states in zip(self.layers, self._split_state(state, x), strict=True):
            assert isinstance(layer, RecurrentLayer)
            if ends and self.training:
                x = F.dropout(x, self.dropout)
            ends.append(layer.step(x, layer.zero_states(x, x.shape[0]) if states is None else states))
            x = ends[-1][0]
        return x, _join(ends)

    def choose_execution(self, x: Tensor, lengths: Tensor | None) -> Execution:
        """Return how to run samples ``x`` (B, T, I) of ``lengths`` (None if all steps are valid): see ``execution``."""
        if self.execution != "auto":
            return self.execution
        if torch.compiler.is_compiling():
            return "padded"
        if x.device.type != "cpu":
            return "padded" if lengths is None or self._is_scan else "packed"
        longest = 0 if lengths is None or not len(lengths) else int(lengths.max())
        padding = 1 - int(lengths.sum()) / (longest * len(lengths)) if lengths is not None and longest else 0.0
        if has_fused_steps(self.cell, *self.layers[0].parameters()):
            return "packed" if self._fused_steps_pay(len(x), padding) else "padded"
        if lengths is None or not padding:
            return "padded"
        if self._is_scan:
            return "lanes"
        if self.cell == "lstm":
            return "staircase" if self._skipping_pays(lengths) else "padded"
        # forward alone, torch's packed kernels are fast on CPUs
        return "staircase" if torch.is_grad_enabled() else "packed"

    def _fused_steps_pay(self, rows: int, padding: float) -> bool:
        """Return whether fused steps are faster than torch's kernels with a share of ``padding`` in their steps.

        Measured on Zen 5; with AMX, where an LSTM of equal lengths takes a quarter of the time in bfloat16, the column
        that tells oneDNN the lengths costs what it saves.
        """
        in_bfloat16 = runs_in_bfloat16()
        if self.cell == "gru":
            multiplications = rows * 3 * self.hidden_size * (self.input_size + self.hidden_size)  # of a step
            return not (in_bfloat16 and multiplications > _LARGE_STEP and padding < 0.1)
        if in_bfloat16:
            return padding > (0 if has_amx() else 0.2)
        return padding > (0.1 if torch.is_grad_enabled() else 0.25)

    def _skipping_pays(self, lengths: Tensor) -> bool:
        """Return whether skipping ended sequences saves more time than one call of oneDNN's LSTM per length costs."""
        saved = int(lengths.max()) * len(lengths) - int(lengths.sum())  # padding steps
        multiplications = 4 * self.hidden_size * (self.input_size + self.hidden_size)
        return saved * multiplications > _LSTM_CALL_OVERHEAD * len(lengths.unique())

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, cell={self.cell!r}, execution={self.execution!r}"

    @property
    def _suffixes(self) -> tuple[str, ...]:
        return ("", "_reverse")[: 1 + self.bidirectional]

    @property
    def _is_scan(self) -> bool:
        return CELLS[self.cell].advance is None

    def _check_execution(self) -> None:
        if self.execution == "lanes" and not self._is_scan:
            raise ValueError(
                f"execution='lanes' needs a cell whose gates know the input alone, 'mingru' or 'minlstm'; got "
                f"{self.cell!r}. Take 'auto'"
            )
        if self.execution == "packed" and self._is_scan:
            raise ValueError(
                f"execution='packed' runs torch's kernels, which know 'rnn', 'gru' and 'lstm'; got cell={self.cell!r}. "
                "Take 'auto'"
            )

    @property
    def _runs_as_one_op(self) -> bool:
        """Return whether each layer runs as one operation: in exported programs, except for torch.onnx's tracing."""
        exporting = torch.compiler.is_exporting() and not torch.onnx.is_in_onnx_export()
        return exporting and not self._is_scan and not self.training

    def _layout(self, x: Tensor, lengths: Tensor | None) -> "PaddedLayout | SortedLayout | LanesLayout":
        if self._runs_as_one_op:
            return SingleOpLayout(None if lengths is None else lengths.to(x.device))
        execution = self.choose_execution(x, lengths)
        if lengths is not None and execution == "padded" and _are_full(lengths, x.shape[1]):
            lengths = None  # kernels without lengths are faster
        if execution == "padded" and x.shape[1] and x.shape[0]:
            return PaddedLayout(None if lengths is None else lengths.to(x.device))
        steps = x.shape[1]
        known = torch.full((len(x),), steps, device="cpu") if lengths is None else lengths.cpu()
        if execution == "lanes":
            return LanesLayout(known, steps, x.device)
        return SortedLayout(known, steps, x.device, packed=execution == "packed")

    def _pool(self, output: Tensor, lengths: Tensor | None, ends: list[States]) -> Tensor | None:
        if self.pooling == "last":
            return torch.cat([end[0] for end in ends[-1 - self.bidirectional :]], dim=-1)
        if self.attention is not None:
            return self.attention(output, lengths)
        return pool(output, lengths, self.pooling)

    def _split_state(self, state: State | None, x: Tensor) -> "list[States | None]":
        number = self.num_layers * (1 + self.bidirectional)
        if state is None:
            return [None] * number
        parts = state if isinstance(state, tuple) else (state,)
        shape = number, x.shape[0], self.hidden_size
        needed = CELLS[self.cell].states
        if len(parts) != needed or any(part.shape != shape for part in parts):
            raise ValueError(
                f"the state of this {self.cell!r} is {'a pair (h, c), each' if needed == 2 else ''} (layers * "
                f"directions, rows, hidden_size) = {shape}; got {[tuple(part.shape) for part in parts]}"
            )
        return [*zip(*(part.unbind() for part in parts), strict=True)]


_LARGE_STEP = 16_000_000  # multiplications of a GRU's step from which torch's kernel in bfloat16 is the fastest
_LSTM_CALL_OVERHEAD = 8_000_000  # multiplications that take as long as the overhead of a call, forward and backward
_CELL_OF_TORCH: dict[str, CellName] = {"RNN_TANH": "rnn", "GRU": "gru", "LSTM": "lstm"}


def _pad(
    x: Sequences, lengths: Tensor | Sequence[int] | None, input_size: int
) -> "tuple[Tensor, Tensor | None, str | PackedSequence]":
    """Return padded sequences (B, T, I), their lengths (None if all steps are valid), and the form of the input."""
    form: str | PackedSequence = "tensor"
    if isinstance(x, Tensor):
        rows = x
    elif lengths is not None:
        raise ValueError(f"lengths go with a padded tensor; a {type(x).__name__} knows its own. Leave them out")
    elif isinstance(x, PackedSequence):
        form = x
        rows, lengths = pad_packed_sequence(x, batch_first=True)
    elif isinstance(x, (list, tuple)) and all(isinstance(row, Tensor) and row.ndim == 2 for row in x) and x:
        form = "list"
        rows, lengths = pad_sequence(list(x), batch_first=True), torch.tensor([len(row) for row in x], device="cpu")
    else:
        raise TypeError(
            "DynamicRNN needs a tensor (B, T, input_size), a list of tensors (T_i, input_size), one or more, or a "
            f"PackedSequence; got {_describe(x)}"
        )
    if rows.ndim != 3 or rows.shape[2] != input_size:
        raise ValueError(f"DynamicRNN needs x of shape (B, T, {input_size}); got {tuple(rows.shape)}")
    if not rows.is_floating_point():
        raise TypeError(f"DynamicRNN needs floating x; got {rows.dtype}. Embed tokens first, with nn.Embedding")
    return rows, None if lengths is None else _check_lengths(lengths, rows), form


def _check_lengths(lengths: Tensor | Sequence[int], x: Tensor) -> Tensor:
    lengths = lengths if isinstance(lengths, Tensor) else torch.as_tensor(lengths, device="cpu")
    if lengths.is_floating_point() or lengths.dtype in (torch.bool, torch.complex64, torch.complex128):
        raise TypeError(f"lengths are integers, numbers of valid steps; got {lengths.dtype}")
    if lengths.shape != x.shape[:1]:
        raise ValueError(f"lengths must be ({x.shape[0]},), one for each row of x; got {tuple(lengths.shape)}")
    if lengths.device.type == "cpu" and not torch.compiler.is_compiling() and len(lengths):
        least, most = lengths.aminmax()  # on a GPU this would wait for the device
        if least < 0 or most > x.shape[1]:
            raise ValueError(f"lengths must be in [0, {x.shape[1]}], the steps of x; got {int(least)} to {int(most)}")
    return lengths.long()


def _are_full(lengths: Tensor, steps: int) -> bool:
    is_known = lengths.device.type == "cpu" and not torch.compiler.is_compiling()  # a GPU would have to be waited for
    return is_known and bool((lengths == steps).all())


def _join(ends: list[States]) -> State:
    """Stack the states of all layers."""
    if len(ends) == 1:  # copies: outputs may share the memory of a state
        joined = [state[None].clone() for state in ends[0]]
    else:
        joined = [torch.stack(each) for each in zip(*ends, strict=True)]
    return (joined[0], joined[1]) if len(joined) == 2 else joined[0]


def _unpad(output: Tensor, lengths: Tensor | None, form: "str | PackedSequence") -> Sequences:
    if isinstance(form, str) and form == "tensor":
        return output
    assert lengths is not None
    if isinstance(form, str):
        return [row[:length] for row, length in zip(output, lengths.tolist(), strict=True)]
    packed = pack_padded_sequence(output, lengths, batch_first=True, enforce_sorted=False)
    return PackedSequence(packed.data, form.batch_sizes, form.sorted_indices, form.unsorted_indices)


def _describe(x: object) -> str:
    if isinstance(x, (list, tuple)):
        return f"a {type(x).__name__} of {[tuple(i.shape) if isinstance(i, Tensor) else type(i).__name__ for i in x]}"
    return f"a {type(x).__name__}"


def pool(x: Tensor, lengths: Tensor | None, how: str) -> Tensor | None:
    """Pool ``x`` (B, T, H), zero after ``lengths`` (B,), by ``mean`` or ``max``; 0 for a sample of length 0."""
    if how == "none":
        return None
    if how == "mean":
        count = x.shape[1] if lengths is None else lengths.to(x.device)[:, None]
        return (x.sum(1) / torch.as_tensor(count, device=x.device).clamp(min=1)).to(x.dtype)
    if x.shape[1] == 0:
        return x.sum(1)
    if lengths is None:
        return x.amax(1)
    lengths = lengths.to(x.device)
    top = x.masked_fill(_past_end(x, lengths)[..., None], -torch.inf).amax(1)
    return top.masked_fill((lengths == 0)[:, None], 0)


class AttentionPooling(nn.Module):
    """Pool steps by attention with a learned query (Yang et al. 2016, eq. 5 to 7).

    >>> AttentionPooling(4)(torch.ones(2, 3, 4), torch.tensor([3, 0])).sum(1).detach()
    tensor([4., 0.])
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.key = nn.Linear(dim, dim)
        self.query = nn.Parameter(torch.randn(dim) / dim**0.5)

    def forward(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """Pool ``x`` (B, T, H), finite also after ``lengths`` (B,), to (B, H); 0 for a sample of length 0."""
        scores = at_least_float32(self.key(x).tanh() @ self.query)  # (B, T)
        if lengths is None:
            weights = scores.softmax(1)
        else:
            over = _past_end(x, lengths.to(x.device))
            # finite, then set to 0: with -inf a sample of length 0 would become NaN
            weights = scores.masked_fill(over, -1e30).softmax(1).masked_fill(over, 0)
        return torch.einsum("bt,bth->bh", weights.to(x.dtype), x)


def _past_end(x: Tensor, lengths: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
