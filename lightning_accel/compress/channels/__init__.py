"""Removal of whole channels, blocks and experts, which makes any module smaller and faster without special kernels.

``trace`` runs a module and records how channels flow (``rules`` and ``views`` say what each operation does to them);
``groups`` are the channels that must go together; ``choice`` scores and chooses them. ``blocks`` finds the blocks that
change the least, ``experts`` the experts that add the least. ``plan`` is the list of what goes, applied to a module or
loaded from a checkpoint; ``configuration`` writes the sizes that are left where transformers reads them.
"""
