"""Graphs for PyG's loaders. Importing this package imports torch_geometric.

``datamodule`` takes ``options``, reads a data set (``files``, PyG's own, or one generated in ``tasks``), adds
``features`` and what ``transform`` computes (triples, ``substructures``), divides it by ``splits``, warns of
``leakage``, and loads it: ``dataset`` holds graphs or one large graph, ``sampler`` fills batches up to a number of
nodes and edges. ``sharded`` reads folders that are larger than memory, with a graph in each row.
"""

from lightning_accel.data.graphs.datamodule import GraphDataModule

__all__ = ["GraphDataModule"]
