"""Restricted Boltzmann machines and stacks of them (deep belief networks).

``rbm`` has energies, conditionals and sampling for the kinds of units in ``units``. ``contrastive`` estimates the
gradient of its likelihood by CD and PCD, and ``sgd`` applies it in place. ``stack`` joins machines and bounds their
likelihood; ``wake_sleep`` trains all of their layers together. ``partition`` estimates the normalizing constant,
exactly or by annealing.
"""
