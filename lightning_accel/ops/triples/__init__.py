"""Triples of nodes: open paths of two edges and triangles of a graph.

``find`` lists them, by the C++ kernel that ``native`` registers or by the formula, and sums over them; ``csr`` and
``products`` sum without listing them, by products of sparse matrices; ``cache`` keeps the triples of graphs that
return.
"""
