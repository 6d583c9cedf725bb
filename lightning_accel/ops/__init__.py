"""Tensor functions with a gradient or kernel of their own; they need torch alone."""

from lightning_accel.ops.expert_mlp import expert_mlp
from lightning_accel.ops.grouped_linear import grouped_linear
from lightning_accel.ops.log_clip import log_clip
from lightning_accel.ops.native import NativeLibrary
from lightning_accel.ops.recurrent import recurrent_layer
from lightning_accel.ops.scan.gated import gated_scan
from lightning_accel.ops.scan.linear import linear_scan
from lightning_accel.ops.segment_attention import segment_attention
from lightning_accel.ops.triples.cache import triples_of
from lightning_accel.ops.triples.csr import csr_sum
from lightning_accel.ops.triples.find import Triples, find_triples, neighbour_sum, triangle_sum

__all__ = [
    "NativeLibrary",
    "Triples",
    "csr_sum",
    "expert_mlp",
    "find_triples",
    "gated_scan",
    "grouped_linear",
    "linear_scan",
    "log_clip",
    "neighbour_sum",
    "recurrent_layer",
    "segment_attention",
    "triangle_sum",
    "triples_of",
]
