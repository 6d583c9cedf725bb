"""Linear recurrences. Shapes: B rows, T steps, H channels."""

import torch
from torch import Tensor


def linear_scan(gate: Tensor, value: Tensor, state: Tensor | None = None, starts: Tensor | None = None) -> Tensor:
    """Run h[:, t] = gate[:, t] * h[:, t - 1] + value[:, t], from ``state`` (B, H) or 0, anew at ``starts``."""
    if starts is not None:
        gate = gate.masked_fill(starts[..., None], 0)
    h = value.new_zeros(len(value), value.shape[2]) if state is None else state
    out = []
    for step in range(value.shape[1]):
        h = torch.addcmul(value[:, step], gate[:, step], h)
        out.append(h)
    return torch.stack(out, dim=1) if out else gate * value
