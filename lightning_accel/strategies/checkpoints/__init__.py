"""Checkpoints that a kill cannot leave half written and that run no code when they are read.

``atomic`` writes files under another name and renames them; ``io`` is Lightning's plug-in on top of it. ``reading``
finds damage and unsafe contents before a file is loaded, ``named_code`` restricts the functions that hyperparameters
may name. ``rank_states`` gathers what differs between processes.
"""
