"""Calibration: what a network's layers see, and weights that are changed by it.

``layerwise`` visits layers in the order of their calls, each on what the changed ones before make of the data;
``products`` records what weights are multiplied with; ``change`` changes weights by that, for pruning and rounding.
"""
