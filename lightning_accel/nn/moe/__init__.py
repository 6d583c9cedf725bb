"""Mixture of experts: a gate, experts, and statistics of their load.

``gating`` chooses experts for each token, counts them, and computes the losses and biases that balance them.
``layer`` permutes tokens to their experts, computes these by ``ops.expert_mlp``, and combines the outputs. ``load``
sums the counts over micro-batches and processes and updates the biases of gates. Strategies find experts by the
attributes of ``layer.Experts``, not by its class. ``perceptrons`` finds what mixtures can take the place of in networks
of others, and ``upcycling`` puts them there.
"""

from lightning_accel.nn.moe.layer import Experts, MixtureOfExperts, MixtureOutput, read_transformers, write_transformers

__all__ = ["Experts", "MixtureOfExperts", "MixtureOutput", "read_transformers", "write_transformers"]
