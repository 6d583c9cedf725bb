"""Checkpoints that a kill cannot leave half written and that run no code when they are read.

``atomic`` writes files under another name and renames them; ``io`` is Lightning's plug-in on top of it, with the
model-parallel strategy that uses it, and finds the newest checkpoint. ``background`` writes while training goes on,
``stores`` holds copies of what lies in object stores, and ``agreement`` lets processes that write together fail
together. ``reading`` finds damage and unsafe contents before a file is loaded, ``named_code`` the functions that
hyperparameters name. ``rank_states`` gathers what differs between processes.
"""
