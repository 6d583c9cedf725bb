"""Memory layouts of sequences of unequal lengths for recurrent layers.

Shapes: B samples, T steps of the padded batch, N valid steps of all samples, I inputs, H hidden.
"""

import torch
from torch import Tensor

from lightning_accel.nn.recurrent.layer import RecurrentLayer, States
from lightning_accel.ops.recurrent import reverse_valid_steps


class _Layout:
    """Run layers backwards by reversing their input and output; a base class."""

    def reverse(self, data: Tensor) -> Tensor:
        """Reverse the valid steps of each sample."""
        raise NotImplementedError

    def direct(
        self, layer: RecurrentLayer, data: Tensor, states: States | None, backwards: bool
    ) -> tuple[Tensor, States]:
        """Run ``layer`` forwards or backwards."""
        out, end = layer(self.reverse(data) if backwards else data, states, self)
        return self.reverse(out) if backwards else out, end


class PaddedLayout(_Layout):
    """Lay out steps first, (T, B, I), padded to the longest sample; ``lengths`` is (B,), or None if all are valid."""

    def __init__(self, lengths: Tensor | None) -> None:
        self.lengths = lengths

    def enter(self, x: Tensor) -> Tensor:
        if self.lengths is not None:
            x = x.where(_valid(x, self.lengths), 0)  # NaN in the padding would make gradients of weights NaN
        return x.transpose(0, 1)

    def leave(self, data: Tensor) -> Tensor:
        out = data.transpose(0, 1)
        return out if self.lengths is None else out.where(_valid(out, self.lengths), 0)

    def reverse(self, data: Tensor) -> Tensor:
        return reverse_valid_steps(data, self.lengths)

    def run(self, layer: RecurrentLayer, data: Tensor, states: States | None) -> tuple[Tensor, States]:
        return layer.steps(data, states, self.lengths)


class SingleOpLayout(PaddedLayout):
    """Run each layer as one operation on padded steps, so that exported programs do not fix the number of steps."""

    def __init__(self, lengths: Tensor | None, backwards: bool = False) -> None:
        super().__init__(lengths)
        self.backwards = backwards

    def leave(self, data: Tensor) -> Tensor:
        return data.transpose(0, 1)  # already zero after the end of a sample

    def direct(
        self, layer: RecurrentLayer, data: Tensor, states: States | None, backwards: bool
    ) -> tuple[Tensor, States]:
        out: tuple[Tensor, States] = layer(data, states, SingleOpLayout(self.lengths, backwards))
        return out

    def run(self, layer: RecurrentLayer, data: Tensor, states: States | None) -> tuple[Tensor, States]:
        return layer.as_one_op(data, states, self.lengths, self.backwards)


class _ValidSteps(_Layout):
    """Lay out only valid steps, at ``index`` (N,) of (B * T,) steps; ``turned`` (N,) reverses each sample."""

    def __init__(self, rows: int, steps: int, index: Tensor, reversed_index: Tensor) -> None:
        self.rows, self.steps, self.index, self.reversed_index = rows, steps, index, reversed_index

    def enter(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1).index_select(0, self.index)

    def leave(self, data: Tensor) -> Tensor:
        out = data.new_zeros(self.rows * self.steps, data.shape[-1]).index_copy(0, self.index, data)
        return out.view(self.rows, self.steps, data.shape[-1])

    def reverse(self, data: Tensor) -> Tensor:
        return data.index_select(0, self.reversed_index)


class SortedLayout(_ValidSteps):
    """Lay out valid steps as a PackedSequence: first steps of all samples, then second steps, longest sample first.

    A layer runs on spans of steps in which no sample ends, with the remaining samples (a staircase), or by torch's
    kernel for packed sequences.

    Args:
        lengths: (B,) int64 on the CPU.
        steps: T.
        device: device of the steps.
        packed: whether to run torch's kernel for packed sequences.
    """

    def __init__(self, lengths: Tensor, steps: int, device: torch.device, packed: bool) -> None:
        ordered, order = lengths.sort(descending=True, stable=True)
        valid = torch.arange(steps, device=ordered.device)[:, None] < ordered  # (T, B)
        self.batch_sizes = valid.sum(1)
        self.batch_sizes = self.batch_sizes[self.batch_sizes > 0]
        counted = self.batch_sizes.unique_consecutive(return_counts=True)
        self.spans = list(zip(*(each.tolist() for each in counted), strict=True))
        step, row = valid.nonzero(as_tuple=True)  # (N,) each
        first = self.batch_sizes.cumsum(0) - self.batch_sizes
        index = (order[row] * steps + step).to(device, non_blocking=True)
        super().__init__(
            len(lengths), steps, index, (first[ordered[row] - 1 - step] + row).to(device, non_blocking=True)
        )
        self.packed = packed
        self.order = order.to(device, non_blocking=True)
        self.back = order.argsort().to(device, non_blocking=True)

    def run(self, layer: RecurrentLayer, data: Tensor, states: States | None) -> tuple[Tensor, States]:
        if states is None:
            states = layer.zero_states(data, self.rows)
        else:
            states = tuple(state.index_select(0, self.order) for state in states)
        if not self.spans:
            # parameters without a gradient in one of several processes would make DDP wait
            nothing = torch.stack([parameter.sum() * 0 for parameter in layer.parameters()]).sum()
            return nothing.new_zeros(0, layer.hidden_size) + nothing, tuple(state + nothing for state in states)
        run = self._run_packed if self.packed else self._run_spans
        out, new = run(layer, data, states)
        return out, tuple(state.index_select(0, self.back) for state in new)

    def _run_packed(self, layer: RecurrentLayer, data: Tensor, states: States) -> tuple[Tensor, States]:
        full = self.spans[0][0]  # samples with at least one step
        out, new = layer.packed(data, self.batch_sizes, tuple(state[:full] for state in states))
        return out, tuple(torch.cat([after, before[full:]]) for after, before in zip(new, states, strict=True))

    def _run_spans(self, layer: RecurrentLayer, data: Tensor, states: States) -> tuple[Tensor, States]:
        parts, ended, at = [], [], 0
        for rows, steps in self.spans:
            if rows < len(states[0]):
                ended.append(tuple(state[rows:] for state in states))
                states = tuple(state[:rows] for state in states)
            span = data[at : at + rows * steps].view(steps, rows, -1)
            out, states = layer.steps(span, states)
            parts.append(out.flatten(0, 1))
            at += rows * steps
        ended.append(states)
        new = tuple(torch.cat(one[::-1]) for one in zip(*ended, strict=True))  # the shortest samples ended first
        return (torch.cat(parts) if len(parts) > 1 else parts[0]), new


class LanesLayout(_ValidSteps):
    """Lay out valid steps of concatenated samples, (N, I), for scan cells, which reset the state at each start.

    Args:
        lengths: (B,) int64 on the CPU.
        steps: T.
        device: device of the steps.
    """

    def __init__(self, lengths: Tensor, steps: int, device: torch.device) -> None:
        row, step = (torch.arange(steps, device=lengths.device) < lengths[:, None]).nonzero(as_tuple=True)  # (N,) each
        begins = lengths.cumsum(0) - lengths
        filled = lengths.nonzero()[:, 0]
        index = (row * steps + step).to(device, non_blocking=True)
        reversed_index = (begins[row] + lengths[row] - 1 - step).to(device, non_blocking=True)
        super().__init__(len(lengths), steps, index, reversed_index)
        self.starts = (step == 0).to(device, non_blocking=True)
        self.filled = filled.to(device, non_blocking=True)
        self.begins = begins[filled].to(device, non_blocking=True)
        self.ends = (begins + lengths - 1)[filled].to(device, non_blocking=True)

    def run(self, layer: RecurrentLayer, data: Tensor, states: States | None) -> tuple[Tensor, States]:
        given = None if states is None else tuple(state.index_select(0, self.filled) for state in states)
        out, new = layer.lanes(data, given, self.begins, self.ends, self.starts)
        before = layer.zero_states(data, self.rows) if states is None else states
        return out, tuple(
            old.index_copy(0, self.filled, last.to(old.dtype)) for old, last in zip(before, new, strict=True)
        )


def _valid(x: Tensor, lengths: Tensor) -> Tensor:
    return (torch.arange(x.shape[1], device=x.device) < lengths[:, None])[..., None]  # (B, T, 1)
