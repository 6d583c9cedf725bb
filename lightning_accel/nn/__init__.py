"""Layers, and what trains and measures them, without Lightning."""

from typing import TYPE_CHECKING

from lightning_accel._lazy import lazy_getattr
from lightning_accel.nn.boltzmann.contrastive import ContrastiveDivergence
from lightning_accel.nn.boltzmann.rbm import RBM
from lightning_accel.nn.boltzmann.stack import LogProbBound, RBMStack
from lightning_accel.nn.boltzmann.wake_sleep import UpDown
from lightning_accel.nn.feed_forward import FeedForward
from lightning_accel.nn.moe.gating import ExpertChoiceGate, GateReport, Routing, TopKGate
from lightning_accel.nn.moe.layer import Experts, MixtureOfExperts, MixtureOutput, read_transformers, write_transformers
from lightning_accel.nn.moe.load import ExpertLoad, LoadStatistics, summarise_load
from lightning_accel.nn.moe.upcycling import MixtureMLP, replace_mlps_
from lightning_accel.nn.recurrent.adaptive import AdaptiveComputation, AdaptiveOutput
from lightning_accel.nn.recurrent.dynamic import DynamicRNN, RecurrentOutput
from lightning_accel.nn.recurrent.tree import Forest, TreeRNN, forest_from_nested, join_parents
from lightning_accel.nn.transformer import BlockOutput, CausalSelfAttention, KeyValueCache, TransformerBlock
from lightning_accel.ops.tree_levels import TreeLevels, plan_levels

if TYPE_CHECKING:
    from lightning_accel.nn.relational.invariance import assert_permutation_invariant as assert_permutation_invariant
    from lightning_accel.nn.relational.layers import RelationalOrder3Pooling as RelationalOrder3Pooling
    from lightning_accel.nn.relational.layers import RO3Conv as RO3Conv
    from lightning_accel.nn.relational.layers import RO3Pooling as RO3Pooling
    from lightning_accel.nn.relational.pooling import Estimate as Estimate
    from lightning_accel.nn.relational.pooling import RelationalPooling as RelationalPooling
    from lightning_accel.nn.relational.refinement import refinement_hash as refinement_hash

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
    "MixtureMLP",
    "MixtureOfExperts",
    "MixtureOutput",
    "RBMStack",
    "RO3Conv",
    "RO3Pooling",
    "RecurrentOutput",
    "RelationalOrder3Pooling",
    "RelationalPooling",
    "Routing",
    "TopKGate",
    "TransformerBlock",
    "TreeLevels",
    "TreeRNN",
    "UpDown",
    "assert_permutation_invariant",
    "forest_from_nested",
    "join_parents",
    "plan_levels",
    "read_transformers",
    "refinement_hash",
    "replace_mlps_",
    "summarise_load",
    "write_transformers",
]

# Importing torch_geometric takes seconds
__getattr__ = lazy_getattr(
    __name__,
    {
        "Estimate": "lightning_accel.nn.relational.pooling",
        "RO3Conv": "lightning_accel.nn.relational.layers",
        "RO3Pooling": "lightning_accel.nn.relational.layers",
        "RelationalOrder3Pooling": "lightning_accel.nn.relational.layers",
        "RelationalPooling": "lightning_accel.nn.relational.pooling",
        "assert_permutation_invariant": "lightning_accel.nn.relational.invariance",
        "refinement_hash": "lightning_accel.nn.relational.refinement",
    },
)
