"""Pipeline parallelism for any LightningModule whose model is a chain of layers.

``chain`` finds the layers and divides them into stages of equal cost. ``strategy`` is Lightning's plug-in, which also
splits batches into micro-batches; its ``engine`` runs torch's pipeline schedules over them. A ``stage`` runs the
module's own training step, in which its layers compute and those of other stages are replaced by what a ``message``
brought from them; ``random`` gives all stages the same random numbers, and ``logging`` brings what they logged to
all.
"""

from lightning_accel.strategies.pipeline.strategy import PipelineStrategy

__all__ = ["PipelineStrategy"]
