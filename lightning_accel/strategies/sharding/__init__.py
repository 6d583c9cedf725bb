"""Models whose parameters are sharded over processes.

``strategy`` is FSDP2 for Lightning. ``blocks`` finds the modules to shard one by one and applies FSDP2 to them;
``expert_parallel`` distributes experts. ``state`` gathers whole weights and optimizer states, and ``metadata`` reads
what sharded checkpoints hold, before torch does.
"""
