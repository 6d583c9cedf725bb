"""Smaller and faster forms of any ``nn.Module``, and what they cost; without Lightning."""

from lightning_accel.compress.latency import Latency, measure_latency
from lightning_accel.compress.masks import prune_
from lightning_accel.compress.prunable import find_prunable
from lightning_accel.compress.schedule import sparsity_at

__all__ = ["Latency", "find_prunable", "measure_latency", "prune_", "sparsity_at"]
