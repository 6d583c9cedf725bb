"""Tensor functions with their own gradient or kernel; they need torch alone."""

from lightning_accel.ops.expert_mlp import expert_mlp
from lightning_accel.ops.grouped_linear import grouped_linear
from lightning_accel.ops.scan import linear_scan

__all__ = ["expert_mlp", "grouped_linear", "linear_scan"]
