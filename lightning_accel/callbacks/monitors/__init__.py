"""Figures and warnings about a running fit.

``expert_load`` draws the load of experts, ``rbm`` the figures of ``rbm_pictures``; ``stall`` says what a run that
stands still is waiting for.
"""
