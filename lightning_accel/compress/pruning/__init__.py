"""Weights that are set to zero.

``prunable`` selects parameters. ``selection`` finds the lowest scores among all of them; ``masks`` sets these to zero
once or makes the masks of a schedule. Schedules during training are those of the Pruning callback.
"""
