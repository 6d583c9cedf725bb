"""Smaller and faster forms of any ``nn.Module``, and what they cost; without Lightning."""

from lightning_accel.compress.latency import Latency, measure_latency

__all__ = ["Latency", "measure_latency"]
