"""Options of the mixtures of experts in a model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Experts:
    """Hold the options of a model's mixtures of experts.

    Args:
        num_experts: number of experts in a mixture.
        k: number of experts for each sample or token.
        hidden_dim: hidden width of each expert.
        balance_weight: weight of the gates' balance loss.
        z_weight: weight of the gates' z-loss; by default 0 in a classifier, .001 in a language model.

    Example:
        >>> from lightning_accel import MoEClassifier
        >>> model = MoEClassifier(experts=Experts(num_experts=16, k=1))
    """

    num_experts: int = 8
    k: int = 2
    hidden_dim: int = 256
    balance_weight: float = 0.01
    z_weight: float | None = None
