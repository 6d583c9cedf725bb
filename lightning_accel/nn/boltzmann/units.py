"""Types of visible units of restricted Boltzmann machines. Shapes: B batch size, V visible units.

Visible units are independent given the hidden units. Each type defines, for an activation a = bias +
input from the other units: the mean, a draw, and the logarithm of the sum (integral) over all states of
exp(a . s - base(s)), where base is 0, or s**2 / 2 for units with real states.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lightning_accel.ops.gibbs import sample_bernoulli, sample_categorical, sample_normal


class VisibleUnits(nn.Module):
    """Define a type of ``num_visible`` visible units with states (B, V); a base class."""

    def __init__(self, num_visible: int) -> None:
        super().__init__()
        self.num_visible = num_visible

    def input(self, state: Tensor) -> Tensor:
        """Compute the values (B, V) that the weights multiply."""
        return state

    def mean(self, activation: Tensor) -> Tensor:
        """Compute the means of the units given ``activation``, both (B, V)."""
        raise NotImplementedError

    def sample(self, activation: Tensor, generator: Generator | None = None) -> Tensor:
        """Draw states of the units given ``activation``, both (B, V)."""
        raise NotImplementedError

    def energy(self, state: Tensor, bias: Tensor) -> Tensor:
        """Compute the energy (B,) of states (B, V) with ``bias`` (V,), without hidden units."""
        return -(state @ bias.to(state.dtype))

    def log_partition(self, activation: Tensor, bias: Tensor) -> Tensor:
        """Compute the log of the sum over states of exp(input . (activation - bias) - energy), (B,)."""
        raise NotImplementedError

    def bias_for(self, mean: Tensor, num_rows: int) -> Tensor:
        """Compute the bias (V,) of units without weights that have the ``mean`` (V,) of ``num_rows`` data samples."""
        raise NotImplementedError

    def find_fault(self, state: Tensor, all_rows: bool = True) -> str | None:
        """Return a message if ``state`` (B, V) is invalid, else None; ``all_rows`` if it is the whole data set."""
        raise NotImplementedError

    def count_states(self) -> int | None:
        """Return the number of joint states of the units; None for real states."""
        raise NotImplementedError

    def enumerate_states(self, numbers: Tensor) -> Tensor:
        """Return the states (B, V), float64, with ``numbers`` (B,) below :meth:`count_states`."""
        raise NotImplementedError


class BernoulliVisible(VisibleUnits):
    """Define visible units that are 0 or 1; data may be probabilities, such as grey levels."""

    def mean(self, activation: Tensor) -> Tensor:
        return activation.sigmoid()

    def sample(self, activation: Tensor, generator: Generator | None = None) -> Tensor:
        return sample_bernoulli(activation, generator)

    def log_partition(self, activation: Tensor, bias: Tensor) -> Tensor:
        return F.softplus(activation).sum(dim=-1)

    def bias_for(self, mean: Tensor, num_rows: int) -> Tensor:
        least = 0.5 / (num_rows + 1)  # values that never occurred get a small probability above 0
        return mean.clamp(least, 1 - least).logit()

    def count_states(self) -> int | None:
        return 2**self.num_visible

    def enumerate_states(self, numbers: Tensor) -> Tensor:
        return enumerate_bits(numbers, self.num_visible)

    def find_fault(self, state: Tensor, all_rows: bool = True) -> str | None:
        least, most = float(state.min()), float(state.max())
        if least >= 0 and most <= 1:
            return None
        return (
            f"Bernoulli visible units take values in [0, 1], found {least:.6g} to {most:.6g}. Scale the data, or set "
            "visible to gaussian, on the command line --model.visible gaussian, for standardised real values"
        )


class LabelVisible(VisibleUnits):
    """Define visible units of a label, of which one is 1 and the others 0; data may be probabilities."""

    def mean(self, activation: Tensor) -> Tensor:
        return activation.softmax(dim=-1)

    def sample(self, activation: Tensor, generator: Generator | None = None) -> Tensor:
        return sample_categorical(activation, generator)

    def log_partition(self, activation: Tensor, bias: Tensor) -> Tensor:
        return activation.logsumexp(dim=-1)

    def bias_for(self, mean: Tensor, num_rows: int) -> Tensor:
        return mean.clamp(min=0.5 / (num_rows + 1)).log()

    def count_states(self) -> int | None:
        return self.num_visible

    def enumerate_states(self, numbers: Tensor) -> Tensor:
        return F.one_hot(numbers, self.num_visible).double()

    def find_fault(self, state: Tensor, all_rows: bool = True) -> str | None:
        sums = state.sum(dim=-1)
        if float(state.min()) >= 0 and float((sums - 1).abs().max()) < 1e-3:
            return None
        return (
            f"labels are {self.num_visible} values of which one is 1 and the others 0, found labels that sum to "
            f"{float(sums.min()):.6g} to {float(sums.max()):.6g} and values down to {float(state.min()):.6g}. Encode "
            f"them as one_hot(label, {self.num_visible})"
        )


class GaussianVisible(VisibleUnits):
    """Define visible units with real values, normally distributed around the activation.

    Args:
        num_visible: number of units.
        learn_variance: whether variances are learned; else they are 1, and the data should be standardised.

    Source: Cho, Ilin and Raiko 2011, Improved Learning of Gaussian-Bernoulli Restricted Boltzmann Machines, eq. 4
    """

    def __init__(self, num_visible: int, learn_variance: bool = False) -> None:
        super().__init__(num_visible)
        self.log_variance = nn.Parameter(torch.zeros(num_visible), requires_grad=learn_variance)

    def input(self, state: Tensor) -> Tensor:
        return state * (-self.log_variance).exp()

    def mean(self, activation: Tensor) -> Tensor:
        return activation

    def sample(self, activation: Tensor, generator: Generator | None = None) -> Tensor:
        return sample_normal(activation, (0.5 * self.log_variance).exp(), generator)

    def energy(self, state: Tensor, bias: Tensor) -> Tensor:
        return 0.5 * ((state - bias).square() * (-self.log_variance).exp()).sum(dim=-1)

    def log_partition(self, activation: Tensor, bias: Tensor) -> Tensor:
        quadratic = (activation.square() - bias.square()) * (-self.log_variance).exp()
        return 0.5 * (quadratic + self.log_variance + math.log(2 * math.pi)).sum(dim=-1)

    def bias_for(self, mean: Tensor, num_rows: int) -> Tensor:
        return mean

    def count_states(self) -> int | None:
        return None

    def find_fault(self, state: Tensor, all_rows: bool = True) -> str | None:
        if not all_rows or len(state) < 2:  # columns with rare values are constant in many batches
            return None
        constant = (state == state[0]).all(dim=0)
        if not constant.any():
            return None
        columns = constant.nonzero().flatten().tolist()
        return (
            f"Gaussian visible units need values that vary, found {len(columns)} constant of {state.shape[1]} columns: "
            f"{', '.join(map(str, columns[:8]))}{' ...' if len(columns) > 8 else ''}. Leave them out"
        )


class JoinedVisible(VisibleUnits):
    """Concatenate visible units of several types, such as pixels and the label of an image."""

    def __init__(self, parts: Sequence[VisibleUnits]) -> None:
        super().__init__(sum(part.num_visible for part in parts))
        self.parts = nn.ModuleList(parts)
        self._sizes = [part.num_visible for part in parts]

    def members(self) -> list[VisibleUnits]:
        """Return the units of each type, in order."""
        return [part for (part,) in self._split()]

    def _split(self, *states: Tensor) -> list[tuple]:  # type: ignore[type-arg]  # units, then their part of each state
        return list(zip(self.parts, *(state.split(self._sizes, dim=-1) for state in states), strict=True))

    def input(self, state: Tensor) -> Tensor:
        return torch.cat([part.input(one) for part, one in self._split(state)], dim=-1)

    def mean(self, activation: Tensor) -> Tensor:
        return torch.cat([part.mean(one) for part, one in self._split(activation)], dim=-1)

    def sample(self, activation: Tensor, generator: Generator | None = None) -> Tensor:
        return torch.cat([part.sample(one, generator) for part, one in self._split(activation)], dim=-1)

    def energy(self, state: Tensor, bias: Tensor) -> Tensor:
        return torch.stack([part.energy(*rest) for part, *rest in self._split(state, bias)]).sum(dim=0)

    def log_partition(self, activation: Tensor, bias: Tensor) -> Tensor:
        return torch.stack([part.log_partition(*rest) for part, *rest in self._split(activation, bias)]).sum(dim=0)

    def bias_for(self, mean: Tensor, num_rows: int) -> Tensor:
        return torch.cat([part.bias_for(one, num_rows) for part, one in self._split(mean)])

    def count_states(self) -> int | None:
        counts = [part.count_states() for part in self.members()]
        return None if None in counts else math.prod(count for count in counts if count is not None)

    def enumerate_states(self, numbers: Tensor) -> Tensor:
        states = []
        for part in self.members():
            count = part.count_states()
            assert count is not None
            states.append(part.enumerate_states(numbers % count))
            numbers = numbers.div(count, rounding_mode="floor")
        return torch.cat(states, dim=-1)

    def find_fault(self, state: Tensor, all_rows: bool = True) -> str | None:
        return next((fault for part, one in self._split(state) if (fault := part.find_fault(one, all_rows))), None)


def enumerate_bits(numbers: Tensor, num_bits: int) -> Tensor:
    """Return the binary digits of ``numbers`` (B,), lowest first: (B, num_bits) float64."""
    places = torch.arange(num_bits, device=numbers.device)
    return (numbers[:, None].bitwise_right_shift(places) & 1).double()
