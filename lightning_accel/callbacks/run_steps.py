"""Steps of a run, given as optimizer steps or as shares of the run."""

import lightning as L


def require_step_or_share(name: str, value: int | float) -> None:
    if isinstance(value, float) and not 0 <= value <= 1:
        raise ValueError(f"{name} must be a share of the run in [0, 1], or a step, an int; got {value}")
    if value < 0:
        raise ValueError(f"{name} must not be negative; got {value}")


def num_steps(trainer: L.Trainer) -> int | None:
    """Return the number of optimizer steps of the run, None if unknown."""
    steps = trainer.estimated_stepping_batches
    if not trainer.lightning_module.automatic_optimization and trainer.max_steps > 0:  # it counts every optimizer's
        steps = min(steps, trainer.max_steps // max(1, len(trainer.optimizers)))
    return None if steps == float("inf") or steps < 0 else int(steps)


def to_step(name: str, step: int | float, total: int | None) -> int:
    if isinstance(step, int):
        return step
    if step == 0:
        return 0
    if total is None:
        raise ValueError(
            f"{name}={step} is a share of the run, whose length is not known; give a step, an int, or set max_steps"
        )
    return round(step * total)
