"""Translations of this library's operators to ONNX. Shapes: S steps, B sequences, I inputs, H hidden, G gates."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

import lightning_accel.ops  # noqa: F401  # its operators

_OPSET = 18  # torch's default
# The indices in torch of the gates in the order of ONNX: input, output, forget, cell; update, reset, hidden.
_GATES = {"rnn": (0,), "gru": (1, 0, 2), "lstm": (0, 3, 1, 2)}


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the ``custom_translation_table`` for ``torch.onnx.export``, which needs onnxscript."""
    return {torch.ops.lightning_accel.recurrent_layer.default: _recurrent_layer}


def _recurrent_layer(
    x: Any,
    lengths: Any,
    h: Any,
    c: Any,
    weight_ih: Any,
    weight_hh: Any,
    bias_ih: Any,
    bias_hh: Any,
    cell: str,
    backwards: bool,
) -> Sequence[Any]:
    """Translate a recurrent layer in one direction to ``RNN``, ``GRU`` or ``LSTM``."""
    import onnxscript

    op: Any = onnxscript.opset18  # its annotations do not allow lists
    hidden_size = weight_hh.shape[1]
    order = _GATES[cell]

    def gates(value: Any) -> Any:
        parts = [op.Slice(value, [gate * hidden_size], [(gate + 1) * hidden_size], [0]) for gate in order]
        return op.Concat(*parts, axis=0)

    weights = [op.Unsqueeze(gates(one), [0]) for one in (weight_ih, weight_hh)]
    biases = op.Unsqueeze(op.Concat(gates(bias_ih), gates(bias_hh), axis=0), [0])
    steps = None if lengths is None else op.Cast(lengths, to=6)  # int32
    initial = [None if one is None else op.Unsqueeze(one, [0]) for one in ((h, c) if cell == "lstm" else (h,))]
    options: dict[str, Any] = {"linear_before_reset": 1} if cell == "gru" else {}
    operator = getattr(op, cell.upper())
    out, *new = operator(
        x,
        *weights,
        biases,
        steps,
        *initial,
        hidden_size=hidden_size,
        direction="reverse" if backwards else "forward",
        **options,
    )
    last = [op.Squeeze(one, [0]) for one in new]
    if lengths is not None:  # for a sequence of length 0, ONNX Runtime returns 0 instead of the initial state
        empty = op.Unsqueeze(op.Equal(lengths, op.Constant(value_ints=[0])), [1])
        last = [one if given is None else op.Where(empty, given, one) for one, given in zip(last, (h, c), strict=False)]
    return op.Squeeze(out, [1]), *last, *(op.Constant(value_floats=[]) for _ in range(2 - len(last)))
