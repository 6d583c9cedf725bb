"""Training towards the outputs of a larger model.

``callback`` adds a term of ``loss`` to the training step's loss. A ``teacher`` is loaded and run beside the student;
``cache`` keeps its answers on disk.
"""

from lightning_accel.callbacks.distillation.callback import Distillation

__all__ = ["Distillation"]
