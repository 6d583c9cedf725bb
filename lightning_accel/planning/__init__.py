"""Planning: memory, communication and time of a run on machines that are not there, from its own code.

``program.py`` is what users call: it simulates a step with each of the ``candidates.py`` on a cluster of
``hardware.py``. ``simulation.py`` runs the Trainer, with operations that ``simulated_tensors.py`` does not compute and
collectives that ``simulated_group.py`` answers; ``live_memory.py`` counts storages, ``cuda_rules.py`` has what PyTorch
does otherwise on a GPU, ``step_trace.py`` what a step does and how long that takes. ``writing.py`` makes tables of it.
Names are imported on first use, since the help of the command line needs no torch.
"""

from pathlib import Path

from lightning_accel._lazy import lazy_getattr, names_in

_MODULE_OF = names_in(Path(__file__).with_suffix(".pyi"))

__all__ = sorted(_MODULE_OF)
__getattr__ = lazy_getattr(__name__, _MODULE_OF)
