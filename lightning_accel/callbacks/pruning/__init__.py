"""Pruning while a model trains.

``callback`` is the public class; it follows a schedule, rates weights, and leaves them to a ``structure``: ``masks``
(single weights and N:M) or ``channels``. ``weight_part`` gives access to the shard of a weight on this process.
"""

from lightning_accel.callbacks.pruning.callback import Pruning

__all__ = ["Pruning"]
