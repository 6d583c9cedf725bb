"""Triples of nodes: open paths of two edges and triangles of a graph.

``find`` lists them, by the kernels of ``csrc/triples.cpp`` or by the formula, and sums over them; ``csr`` and
``products`` sum without listing them, by products of sparse matrices; ``cache`` keeps the triples of graphs that
return.
"""
