"""Figures, reports and warnings about a fit.

``expert_load`` draws the load of experts, ``rbm`` the figures of ``rbm_pictures``; ``run_report`` ends a fit with the
``run_summary`` of its time.
"""
