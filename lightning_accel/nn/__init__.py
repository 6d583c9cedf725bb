"""Layers: plain ``nn.Module``s that run without Lightning."""

from lightning_accel.nn.gating import Routing, TopKGate
from lightning_accel.nn.moe import MixtureOfExperts, MixtureOutput

__all__ = ["MixtureOfExperts", "MixtureOutput", "Routing", "TopKGate"]
