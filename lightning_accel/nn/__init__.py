"""Layers: plain ``nn.Module``s that run without Lightning."""

from lightning_accel.nn.expert_load import ExpertLoad, LoadStatistics, summarise_load
from lightning_accel.nn.feed_forward import FeedForward
from lightning_accel.nn.gating import ExpertChoiceGate, GateReport, Routing, TopKGate
from lightning_accel.nn.moe import Experts, MixtureOfExperts, MixtureOutput
from lightning_accel.nn.moe_weights import read_transformers, write_transformers
from lightning_accel.nn.recurrent import DynamicRNN, RecurrentOutput
from lightning_accel.nn.transformer import BlockOutput, CausalSelfAttention, KeyValueCache, TransformerBlock

__all__ = [
    "BlockOutput",
    "CausalSelfAttention",
    "DynamicRNN",
    "ExpertChoiceGate",
    "ExpertLoad",
    "Experts",
    "FeedForward",
    "GateReport",
    "KeyValueCache",
    "LoadStatistics",
    "MixtureOfExperts",
    "MixtureOutput",
    "RecurrentOutput",
    "Routing",
    "TopKGate",
    "TransformerBlock",
    "read_transformers",
    "summarise_load",
    "write_transformers",
]
