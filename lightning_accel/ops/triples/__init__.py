"""Triples of nodes: triangles of a graph, and sums over them.

``find`` lists edges and triangles, by the C++ kernel or by the formula, and sums over triangles. ``products`` sums
products over triangles a block of edges at a time, with the sparse sums of ``csr``; ``cache`` keeps the triples of
graphs that return. Open paths of two edges are summed without a list, in ``nn/relational/sums.py``.
"""
