"""Figures and warnings about a running fit: load of experts, RBMs and their samples, and stalled processes."""
