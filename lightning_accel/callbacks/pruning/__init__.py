"""Pruning while a model trains.

``callback`` is the public class; it follows a schedule and leaves the weights to a ``structure``, which scores them:
``masks`` (single weights and N:M) or ``channels``. ``weight_part`` gives access to the shard of a weight on this
process.
"""

from lightning_accel.callbacks.pruning.callback import Pruning

__all__ = ["Pruning"]
