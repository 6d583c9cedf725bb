"""Pruning while a model trains.

``callback`` is the public class; it follows a schedule and leaves the weights to ``masks`` (single weights and N:M) or
``channels``. It calls these to attach to the module once the strategy has sharded it, before each optimizer step and
after it, and to prune to a share, which never decreases; all processes make the same calls, so that each may use
collectives. ``weight_part`` gives access to the shard of a weight on this process. ``one_shot`` is a subclass that
prunes once, by calibration data; ``removal`` is what it leaves channels, blocks and experts to.

``semi_structured`` is another callback: weights that are 2:4 sparse while they train, in kernels that gain by it.
"""

from lightning_accel.callbacks.pruning.callback import Pruning

__all__ = ["Pruning"]
