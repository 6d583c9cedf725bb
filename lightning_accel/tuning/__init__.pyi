from lightning_accel.tuning.outcome import Outcome as Outcome
from lightning_accel.tuning.program import tune as tune
from lightning_accel.tuning.variant import TrialError as TrialError

__all__ = ["Outcome", "TrialError", "tune"]
