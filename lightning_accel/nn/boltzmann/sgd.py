"""Gradients and in-place SGD updates of a Bernoulli RBM in few calls of torch, whose overhead dominates if it is small.

Shapes: B batch size, C chains, V visible units, H hidden units.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_accel._private.torch import has_gradient_hooks, has_step_hooks, is_counted_by_schedule
from lightning_accel.nn.boltzmann.rbm import RBM
from lightning_accel.nn.boltzmann.units import BernoulliVisible

_NOISE = 2**16  # random numbers drawn at a time: 256 KiB, which stay in cache


def supported_sgd(rbm: RBM, optimizer: Optimizer) -> SGD | None:
    """Return ``optimizer`` if :class:`BernoulliSGD` can replace it, else None."""
    if type(optimizer) is not SGD or rbm.weight.dtype not in (torch.float32, torch.float64):
        return None
    if type(rbm.visible_units) is not BernoulliVisible:
        return None
    if has_step_hooks(optimizer) or _has_own_step(optimizer):
        return None
    parameters = _parameters_of(rbm)
    groups = [_param_group(optimizer, one) for one in parameters]
    plain = all(type(one) is nn.Parameter and one.requires_grad for one in parameters) and not needs_autograd(rbm)
    unusual = any(group[name] for group in groups for name in ("nesterov", "dampening", "maximize") if group)
    return optimizer if plain and all(groups) and not unusual else None


def needs_autograd(rbm: RBM) -> bool:
    """Return whether gradients must pass through autograd, because of a parametrization or of a parameter's hooks."""
    return any(
        not isinstance(one, nn.Parameter) or has_gradient_hooks(one)
        for one in (*_parameters_of(rbm), *rbm.parameters())
    )


def _has_own_step(optimizer: Optimizer) -> bool:
    """Return whether the ``step`` of this object has been replaced, other than by a scheduler's counter."""
    step = vars(optimizer).get("step")
    return step is not None and not (
        is_counted_by_schedule(step) and inspect.unwrap(step) is inspect.unwrap(type(optimizer).step)
    )


def is_plain(rbm: RBM) -> bool:
    """Return whether :class:`BernoulliContrast` can compute the gradient of an RBM."""
    return (
        type(rbm.visible_units) is BernoulliVisible
        and rbm.weight.dtype in (torch.float32, torch.float64)
        and all(type(one) is nn.Parameter for one in _parameters_of(rbm))
        and not torch.compiler.is_compiling()
    )


class BernoulliContrast:
    """Draw samples of a Bernoulli RBM and compute its gradient, with weights and gradient each in one flat tensor.

    Args:
        rbm: an RBM for which :func:`is_plain` is true, whose weights are copied.
        batch_size: B of every mini-batch.
        chains: (C, H), hidden states of persistent chains; None to start from the data, as ``cd`` does.
        steps: Gibbs steps for each gradient.
    """

    def __init__(self, rbm: RBM, batch_size: int, chains: Tensor | None, steps: int) -> None:
        self._values, values = _flatten([one.detach() for one in _parameters_of(rbm)])
        self._weight, self._visible_bias, self._hidden_bias = values
        self.new_gradient()
        self._weight_t = self._weight.T  # creating a view takes as long as a small product
        self._persistent, self._steps = chains is not None, steps
        self.chains = rbm.weight.new_empty(0) if chains is None else chains.clone()
        self.allocate(batch_size)

    def allocate(self, batch_size: int) -> None:
        """Allocate buffers for mini-batches of ``batch_size`` samples."""
        new, num_hidden, num_visible = self._values.new_empty, *self._weight.shape
        if not self._persistent:
            self.chains = new(batch_size, num_hidden)
        rows = batch_size + len(self.chains)
        self._visible, self._hidden = new(rows, num_visible), new(rows, num_hidden)  # data, then samples
        self._data, self._samples = self._visible[:batch_size], self._visible[batch_size:]
        self._of_data, self._of_samples = self._hidden[:batch_size], self._hidden[batch_size:]
        self._visible_t, self._hidden_t = self._visible.T, self._hidden.T
        self._share = new(rows, 1).fill_(1 / len(self.chains))
        self._share[:batch_size] = -1 / batch_size
        self._shares = self._share.flatten()

    def new_gradient(self) -> None:
        """Allocate another gradient, so that the last one is not overwritten."""
        self._gradient = torch.empty_like(self._values)
        parts = _parts_like([self._weight, self._visible_bias, self._hidden_bias], self._gradient)
        self._by_weight, self._by_visible, self._by_hidden = parts

    def begin(self, rbm: RBM, rows: Tensor, chains: Tensor | None, steps: int) -> bool:
        """Copy weights and chains for another gradient; return False if the buffers do not fit them or the data."""
        mine = self.chains if self._persistent else None
        now, before = (rbm.weight, rows, chains), (self._weight, self._data, mine)
        if steps != self._steps or not all(_alike(*pair) for pair in zip(now, before, strict=True)):
            return False
        if self._values.is_inference() and not torch.is_inference_mode_enabled():  # cannot be changed in place
            return False
        torch.cat([one.detach().flatten() for one in _parameters_of(rbm)], out=self._values)
        if chains is not None and chains is not self.chains:
            self.chains.copy_(chains)
        self.new_gradient()
        return True

    @property
    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradient of weight (H, V), visible bias and hidden bias."""
        return self._by_weight, self._by_visible, self._by_hidden

    def noise(self, count: int, generator: Generator) -> Iterator[list[Tensor]]:
        """Yield the uniform random numbers of ``count`` mini-batches, drawn for many mini-batches at a time."""
        like = [self._samples, self.chains] if self._persistent else [self.chains, self._samples]
        like *= self._steps
        sizes = [one.numel() for one in like]
        numbers = self._values.new_empty(min(count, max(1, _NOISE // sum(sizes))), sum(sizes))
        views = [[part.view_as(one) for part, one in zip(row.split(sizes), like, strict=True)] for row in numbers]
        for start in range(0, count, len(numbers)):
            numbers[: count - start].uniform_(generator=generator)
            yield from views[: count - start]

    def phases(self, rows: Tensor, noise: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Draw samples; return the means of the visible and the hidden units on the data ``rows`` (B, V)."""
        self._data.copy_(rows)
        weight = self._weight_t
        draws = iter(noise)
        if not self._persistent:
            torch.addmm(self._hidden_bias, self._data, weight, out=self._of_data).sigmoid_()
            torch.lt(next(draws), self._of_data, out=self.chains)
        for step in range(self._steps):
            torch.addmm(self._visible_bias, self.chains, self._weight, out=self._samples).sigmoid_()
            torch.lt(next(draws), self._samples, out=self._samples)
            if self._persistent and step == self._steps - 1:  # in one product with the data
                torch.addmm(self._hidden_bias, self._visible, weight, out=self._hidden).sigmoid_()
            else:
                torch.addmm(self._hidden_bias, self._samples, weight, out=self._of_samples).sigmoid_()
            if self._persistent or step < self._steps - 1:
                torch.lt(next(draws), self._of_samples, out=self.chains)
        return self._data, self._of_data

    def differentiate(self) -> Tensor:
        """Compute the gradient; return the gap: its product with the parameters, in which energies are linear."""
        self._hidden *= self._share
        torch.mm(self._hidden_t, self._visible, out=self._by_weight)
        torch.mv(self._visible_t, self._shares, out=self._by_visible)
        torch.sum(self._hidden, 0, out=self._by_hidden)
        return torch.dot(self._values, self._gradient)

    def center(self, visible_offset: Tensor, hidden_offset: Tensor) -> None:
        """Transform the gradient into that of the centred units."""
        self._by_weight.addr_(hidden_offset, self._by_visible, alpha=-1).addr_(
            self._by_hidden, visible_offset, alpha=-1
        )
        self._by_visible.addmv_(self._by_weight.T, hidden_offset, alpha=-1)
        self._by_hidden.addmv_(self._by_weight, visible_offset, alpha=-1)


class BernoulliSGD(BernoulliContrast):
    """Update a Bernoulli RBM by SGD in place, with momentum in one flat tensor, too.

    Args:
        rbm: an RBM with Bernoulli units.
        optimizer: optimizer that :func:`supported_sgd` returned; with momentum, after its first step.
        batch_size: B of every mini-batch.
        chains: (C, H), hidden states of persistent chains; None to start from the data, as ``cd`` does.
        steps: Gibbs steps for each gradient.
    """

    def __init__(self, rbm: RBM, optimizer: SGD, batch_size: int, chains: Tensor | None, steps: int) -> None:
        super().__init__(rbm, batch_size, chains, steps)
        self._parameters = parameters = _parameters_of(rbm)
        groups = [_param_group(optimizer, one) for one in parameters]
        values = [self._weight, self._visible_bias, self._hidden_bias]
        buffers = [optimizer.state.get(one, {}).get("momentum_buffer") for one in parameters]
        whole, momentum = _flatten(
            [torch.zeros_like(one) if buffer is None else buffer for one, buffer in zip(values, buffers, strict=True)]
        )
        self._rules = list(zip(values, self.gradients, momentum, groups, strict=True))
        if all(group[name] == groups[0][name] for group in groups for name in ("lr", "momentum", "weight_decay")):
            self._rules = [(self._values, self._gradient, whole, groups[0])]
        self._copies = [*zip(parameters, values, strict=True), *zip(buffers, momentum, strict=True)]

    def update_(self) -> None:
        """Update weights and momentum as ``optimizer.step`` does."""
        for value, gradient, momentum, group in self._rules:
            if group["weight_decay"]:
                gradient.add_(value, alpha=group["weight_decay"])
            if group["momentum"]:
                gradient = momentum.mul_(group["momentum"]).add_(gradient)
            value.add_(gradient, alpha=-group["lr"])

    def write_back_(self) -> None:
        """Copy weights, last gradient and momentum back to the RBM and the optimizer."""
        for target, source in self._copies:
            if target is not None:
                target.copy_(source)
        for parameter, gradient in zip(self._parameters, self.gradients, strict=True):
            parameter.grad = gradient


def _parameters_of(rbm: RBM) -> tuple[nn.Parameter, nn.Parameter, nn.Parameter]:
    return rbm.weight, rbm.visible_bias, rbm.hidden_bias


def _alike(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether both are tensors of one shape and dtype on one device, or neither is a tensor."""
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _param_group(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Return the parameter group of ``parameter``, or {} if it is in none."""
    return next((group for group in optimizer.param_groups if any(one is parameter for one in group["params"])), {})


def _flatten(tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return a flat copy of ``tensors``, (sum of sizes,), and views of it in their shapes."""
    whole = torch.cat([one.flatten() for one in tensors])
    return whole, _parts_like(tensors, whole)


def _parts_like(tensors: list[Tensor], whole: Tensor) -> list[Tensor]:
    """Return views of ``whole`` in the shapes of ``tensors``."""
    parts = whole.split([one.numel() for one in tensors])
    return [part.view_as(one) for part, one in zip(parts, tensors, strict=True)]
