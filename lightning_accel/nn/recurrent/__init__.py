"""Recurrent layers over sequences of unequal lengths, and over trees.

``dynamic`` has the public layer DynamicRNN: a stack of ``layer``, each of which computes one direction by torch's
kernels, by ``ops.scan`` or step by step. ``layout`` arranges a batch by length so that padding costs nothing.
``adaptive`` repeats a cell until it halts; ``tree`` applies a cell from the leaves of trees to their roots.
"""

from lightning_accel.nn.recurrent.dynamic import DynamicRNN, RecurrentOutput

__all__ = ["DynamicRNN", "RecurrentOutput"]
