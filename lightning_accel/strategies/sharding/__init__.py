"""Models whose parameters are sharded over processes.

``strategy`` is FSDP2 for Lightning. ``blocks`` applies FSDP2 to a module block by block;
``expert_parallel`` distributes experts. ``state`` gathers whole weights and optimizer states, and ``metadata`` reads
what sharded checkpoints hold, before torch does.
"""
