"""Weights and experts that are set to zero or removed.

``prunable`` selects parameters. ``selection`` finds the lowest scores among all of them; ``masks`` sets these to zero
once or makes the masks of a schedule. ``experts`` removes experts of a mixture. ``batchnorm`` recalibrates running
statistics after a model has changed. Schedules during training are those of the Pruning callback.
"""
