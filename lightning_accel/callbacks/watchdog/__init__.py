"""What goes wrong with a run while it trains, and where.

``callback`` is the ``Watchdog``; ``stalls`` looks for runs that stand still, ``step_times`` for processes that fall
behind and for loaders that are too slow, ``nonfinite`` for the layer in which numbers stop to be finite, and
``memory_growth`` for what fills the memory.
"""
