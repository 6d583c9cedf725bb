"""Tuning: find changes that make the user's own run faster on this machine, and prove that it learns the same.

``program.py`` is what users call. ``search.py`` tries the ``factors.py`` that the run admits (``savings.py``, where
memory is the goal, ``latencies.py``, where latency is; ``learning.py``, what has to be allowed): each alone, the
winners together, each left out again, and beside them what did not win; ``measurer.py`` measures it; ``planned_run.py``
weighs speed against the time to start, ``room.py`` tells what fits into memory, by a plan of ``planned_step.py``, and
``outcome.py`` is what it finds. ``variant.py`` trains with some changes in processes of its own, which are frozen but
for their turns (``trial.py`` is their program, ``fork_server.py`` forks them, ``recorder.py`` is what they write);
``comparison.py`` computes a ratio of turns with its interval, ``parity.py`` compares losses. Where latency is the goal,
variants do not train: ``serving.py`` sends single samples through ``predict`` or ``validate``, ``latency_recorder.py``
is what they write, ``outputs.py`` compares what they compute. ``project.py`` names what is tuned so that processes find
it, ``journal.py`` keeps what was measured when a search is killed, for the run that ``identity.py`` tells from others,
``writing.py`` writes the overlay of the config and the report; ``choices.py`` has the words of options. Names are
imported on first use, since the help of the command line needs no torch.
"""

from pathlib import Path

from lightning_accel._lazy import lazy_getattr, names_in

_MODULE_OF = names_in(Path(__file__).with_suffix(".pyi"))

__all__ = sorted(_MODULE_OF)
__getattr__ = lazy_getattr(__name__, _MODULE_OF)
