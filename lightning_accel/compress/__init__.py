"""Pruning, quantization, export and latency measurement of any ``nn.Module``, without Lightning."""

from lightning_accel.compress.adapters import add_adapters_, load_adapted, merge_adapters_
from lightning_accel.compress.channels.blocks import measure_influence, plan_without_blocks
from lightning_accel.compress.channels.choice import choose_channels, score_channels, score_channels_on_data
from lightning_accel.compress.channels.configuration import update_config_
from lightning_accel.compress.channels.experts import plan_without_experts, score_experts
from lightning_accel.compress.channels.groups import ChannelGroups, ChannelLayer, find_channel_groups
from lightning_accel.compress.channels.plan import ChannelPlan, apply_plan_, load_pruned
from lightning_accel.compress.export.decoding import CachedDecoder
from lightning_accel.compress.export.loading import Compressed, load_compressed
from lightning_accel.compress.export.traced import ExportError
from lightning_accel.compress.export.writing import Exported, Probabilities, export, require_exportable
from lightning_accel.compress.pruning.masks import prune_, sparsity_at
from lightning_accel.compress.pruning.one_shot import prune_on_data_
from lightning_accel.compress.pruning.prunable import find_prunable
from lightning_accel.compress.quantization.picking import NothingPickedError, Quantized
from lightning_accel.compress.quantization.quantized import quantize
from lightning_accel.compress.report.forms import measure_forms, plain_forms
from lightning_accel.compress.report.latency import Latency, Speedup, measure_latency, speedup
from lightning_accel.compress.report.macs import Macs, count_macs
from lightning_accel.compress.report.progress import Progress
from lightning_accel.compress.report.report import Layer, Report, Row, count_parameters, describe_layers

__all__ = [
    "CachedDecoder",
    "ChannelGroups",
    "ChannelLayer",
    "ChannelPlan",
    "Compressed",
    "ExportError",
    "Exported",
    "Latency",
    "Layer",
    "Macs",
    "NothingPickedError",
    "Probabilities",
    "Progress",
    "Quantized",
    "Report",
    "Row",
    "Speedup",
    "add_adapters_",
    "apply_plan_",
    "choose_channels",
    "count_macs",
    "count_parameters",
    "describe_layers",
    "export",
    "find_channel_groups",
    "find_prunable",
    "load_adapted",
    "load_compressed",
    "load_pruned",
    "measure_forms",
    "measure_influence",
    "measure_latency",
    "merge_adapters_",
    "plain_forms",
    "plan_without_blocks",
    "plan_without_experts",
    "prune_",
    "prune_on_data_",
    "quantize",
    "require_exportable",
    "score_channels",
    "score_channels_on_data",
    "score_experts",
    "sparsity_at",
    "speedup",
    "update_config_",
]
