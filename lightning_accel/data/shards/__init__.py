"""Folders of Parquet, Arrow or JSON lines files that are larger than memory, on disk or behind a URL.

``files`` finds the files and what they are for, ``formats`` lists and reads their blocks, parts that are read whole,
``blocks`` joins those of all files, and ``splits`` chooses those that validate and test. ``streams`` plans the order of
an epoch, ``sampler`` distributes it to processes and resumes it, ``reader`` reads it ahead of training, and ``loader``
makes the loaders, by ``options``. ``random_access`` reads any row by its number; ``moments`` collects means and
variances block by block.
"""
