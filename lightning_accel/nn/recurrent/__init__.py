"""Recurrent layers over sequences of unequal lengths, and over trees.

``dynamic`` has the public layer DynamicRNN: a stack of ``layer``, where the cells are, each of which computes one
direction by torch's kernels (``ops/recurrent.py``), by ``ops/scan`` or step by step. ``layout`` arranges a batch by
length; ``block`` has the connections around a layer of a deep network. ``adaptive`` repeats a cell until it halts;
``tree`` applies a cell from the leaves of trees to their roots. ``fused`` trains torch's own LSTM and GRU layers by
``ops/recurrent_steps.py``.
"""

from lightning_accel.nn.recurrent.dynamic import DynamicRNN, RecurrentOutput

__all__ = ["DynamicRNN", "RecurrentOutput"]
