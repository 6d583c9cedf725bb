"""Weights that are set to zero.

``prunable`` selects parameters. ``selection`` finds the lowest scores among all of them; ``masks`` sets these to zero
once, chooses the masks of a schedule, and has the sparsity of each step of one. Schedules during training are
followed by the Pruning callback. ``one_shot`` prunes a trained network by what its weights are multiplied with.
"""
