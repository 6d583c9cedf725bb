"""Layers: plain ``nn.Module``s that run without Lightning."""

from lightning_accel.nn.adaptive import AdaptiveComputation, AdaptiveOutput
from lightning_accel.nn.contrastive import ContrastiveDivergence
from lightning_accel.nn.dbn import RBMStack
from lightning_accel.nn.estimate import Estimate
from lightning_accel.nn.expert_load import ExpertLoad, LoadStatistics, summarise_load
from lightning_accel.nn.feed_forward import FeedForward
from lightning_accel.nn.gating import ExpertChoiceGate, GateReport, Routing, TopKGate
from lightning_accel.nn.moe import Experts, MixtureOfExperts, MixtureOutput, read_transformers, write_transformers
from lightning_accel.nn.rbm import RBM
from lightning_accel.nn.recurrent import DynamicRNN, RecurrentOutput
from lightning_accel.nn.stack_likelihood import LogProbBound
from lightning_accel.nn.transformer import BlockOutput, CausalSelfAttention, KeyValueCache, TransformerBlock
from lightning_accel.nn.tree import Forest, TreeLevels, TreeRNN, forest_from_nested, join_parents, plan_levels
from lightning_accel.nn.wake_sleep import UpDown

__all__ = [
    "RBM",
    "AdaptiveComputation",
    "AdaptiveOutput",
    "BlockOutput",
    "CausalSelfAttention",
    "ContrastiveDivergence",
    "DynamicRNN",
    "Estimate",
    "ExpertChoiceGate",
    "ExpertLoad",
    "Experts",
    "FeedForward",
    "Forest",
    "GateReport",
    "KeyValueCache",
    "LoadStatistics",
    "LogProbBound",
    "MixtureOfExperts",
    "MixtureOutput",
    "RBMStack",
    "RecurrentOutput",
    "Routing",
    "TopKGate",
    "TransformerBlock",
    "TreeLevels",
    "TreeRNN",
    "UpDown",
    "forest_from_nested",
    "join_parents",
    "plan_levels",
    "read_transformers",
    "summarise_load",
    "write_transformers",
]
