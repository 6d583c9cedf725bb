"""Runs that are stopped at any moment and resumed to the bit.

``exact_resume`` restores the position in the data, ``random_state`` the generators, and ``logged_state`` the metrics
of an epoch; ``resumed_fit`` lets Lightning continue with what remained to do, and ``schedule_length`` finds schedules
that end before. ``save_on_signal`` writes a checkpoint when the process is told to stop. ``sampler_check`` rejects
batch samplers that Lightning would distribute or shuffle wrongly.
"""
