"""Layers over triples of nodes, for PyG's data. Importing this package imports torch_geometric.

``layers`` has the convolution RO3Conv and the pooling RO3Pooling, whose sums over triples are in ``sums`` and whose
kernels (functions of three nodes) are in ``kernels``; ``rooted`` has all sums of the convolution in one operation.
``pooling`` has relational pooling over the ``marked_tuples`` of nodes, in ``copies`` of the graphs. ``refinement``
finds what networks cannot tell apart, and ``invariance`` tests layers under permutation.
"""

from lightning_accel.nn.relational.layers import RelationalOrder3Pooling, RO3Conv, RO3Pooling

__all__ = ["RO3Conv", "RO3Pooling", "RelationalOrder3Pooling"]
