"""Mixtures of experts in the place of perceptrons of any network."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_accel.nn.moe.gating import GateFactory, TopKGate
from lightning_accel.nn.moe.layer import MixtureOfExperts
from lightning_accel.nn.moe.perceptrons import Place, find_perceptrons


class MixtureMLP(nn.Module):
    """Apply a mixture of experts and return its features alone, as the perceptron did in whose place it is.

    :class:`lightning_accel.callbacks.ExpertLosses` adds the losses of its gate to those of training.

    Args:
        mixture: the mixture of experts to apply.
        dropout: probability at which features are dropped in training.
    """

    def __init__(self, mixture: MixtureOfExperts, dropout: float = 0.0) -> None:
        super().__init__()
        self.mixture = mixture
        self.dropout = nn.Dropout(dropout)

    if TYPE_CHECKING:  # Any, as torch declares it

        def __call__(self, x: Tensor) -> Tensor: ...

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (..., D) to the same shape."""
        features: Tensor = self.dropout(self.mixture(x).features)
        return features


def replace_mlps_(
    module: nn.Module,
    num_experts: int,
    k: int = 2,
    *,
    layers: Sequence[int] | None = None,
    granularity: int = 1,
    capacity_factor: float | None = None,
    gate: GateFactory = TopKGate,
) -> list[str]:
    """Replace the perceptrons of a network by mixtures whose experts are copies of them, so that outputs stay equal.

    Perceptrons are found by what they compute, in networks of transformers and your own. A dropout behind the
    second layer stays; one between both, as in T5, is left out, and so are dropouts of Whisper's kind. Call it where
    the network is made, before optimizers and strategies see it; names of parameters change.

    Args:
        module: network whose perceptrons are replaced, in place.
        num_experts: number of experts of each mixture.
        k: experts of each token.
        layers: numbers of the perceptrons to replace, in their order; all by default. Every second one is usual.
        granularity: number of narrow experts that a copy is split into; with ``k=granularity`` a token costs what it
            cost before. See :meth:`MixtureOfExperts.from_dense`.
        capacity_factor: see :class:`MixtureOfExperts`; outputs of tokens that are dropped differ.
        gate: see :class:`MixtureOfExperts`; weights of a token have to sum to 1.

    Returns:
        The names of the modules that were replaced.

    Raises:
        ValueError: if there is no perceptron, with why those that look like some are not replaced, ``layers`` names
            others than there are, or a number is no multiple of ``granularity``.

    Source: Komatsuzaki et al. 2022, Sparse Upcycling, https://arxiv.org/abs/2212.05055.
    """
    places, reasons = find_perceptrons(module)
    if not places:
        if any(isinstance(one, MixtureMLP) for one in module.modules()):
            raise ValueError(f"the perceptrons of {type(module).__name__} are mixtures of experts already")
        why = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:3])
        raise ValueError(
            f"{type(module).__name__} has no perceptron to replace, two linear layers with an activation between that "
            f"keep the width of their input{': ' * bool(why)}{why}. Put MixtureOfExperts into the network's own code"
        )
    mixtures: dict[int, MixtureMLP] = {}
    chosen = _chosen(places, layers)
    for place in chosen:
        if id(place.module) not in mixtures:
            mixture = MixtureOfExperts.from_dense(
                place.perceptron, num_experts, k, granularity=granularity, capacity_factor=capacity_factor, gate=gate
            )
            mixtures[id(place.module)] = MixtureMLP(mixture, _last_dropout(place)).train(place.module.training)
    for place in chosen:
        _set(module, place.target, mixtures[id(place.module)])
        for name in place.emptied:
            _set(module, name, nn.Identity())
    return [place.name for place in chosen]


def _chosen(places: Sequence[Place], layers: Sequence[int] | None) -> list[Place]:
    if layers is None:
        return list(places)
    known = range(len(places))
    if not layers or len({*layers}) < len(layers) or any(number not in known for number in layers):
        raise ValueError(f"layers must be different numbers below {len(places)}, that of perceptrons; got {layers!r}")
    return [places[number] for number in layers]


def _last_dropout(place: Place) -> float:
    """Return the probability of a dropout whose zeros are among the features that a perceptron returns in training."""
    dropouts = [one for one in place.module.children() if isinstance(one, nn.Dropout) and one.p > 0]
    if place.emptied or not dropouts or place.perceptron.up.is_meta:
        return 0.0
    was_training = [one.training for one in dropouts]
    with torch.no_grad(), torch.random.fork_rng([]):
        for one in dropouts:
            one.train()
        is_zero = place.run(torch.randn(1, 64, place.perceptron.up.shape[1]).to(place.perceptron.up)) == 0
    has_zeros = bool((is_zero.any(-1) & ~is_zero.all(-1)).any())
    for one, mode in zip(dropouts, was_training, strict=True):
        one.train(mode)
    return dropouts[-1].p if has_zeros else 0.0


def _set(module: nn.Module, name: str, value: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(module.get_submodule(parent), last, value)
