"""What a machine and a run are slow at, and what to do about it."""

from lightning_accel.diagnosis.doctor import Diagnosis, doctor

__all__ = ["Diagnosis", "doctor"]
