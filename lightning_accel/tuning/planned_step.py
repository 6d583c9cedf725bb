"""The memory of a training step with some changes, planned in a process of its own without training."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_accel.planning import Cluster, Device, simulate_step
from lightning_accel.planning.program import RESERVED
from lightning_accel.tuning.fork_server import ForkServer
from lightning_accel.tuning.project import Changes, Project
from lightning_accel.tuning.variant import TrialError, Variant

_FILE = "plan.json"


def planned_bytes(
    project: Project,
    changes: Changes,
    facts: Mapping[str, Any],
    folder: Path,
    deadline: float,
    server: ForkServer | None = None,
) -> int:
    """Return the bytes that a step needs in all processes, on devices like those of the run.

    Raises:
        TrialError: if the step cannot be planned, or is not at ``deadline``.
    """
    variant = Variant(project, changes, folder, server)
    try:
        variant.start(planned_on=(facts["device"] == "cuda", facts["world_size"]))
        variant.wait(deadline)
    finally:
        variant.stop()
    if not (folder / _FILE).exists():
        raise TrialError("the run has ended the process before its step was planned")
    return int(json.loads((folder / _FILE).read_text()))


def write_planned_bytes(project: Project, changes: Changes, is_gpu: bool, world_size: int, folder: Path) -> None:
    """Plan a step of a project with changes, and write its bytes into a folder."""

    def run(options: dict[str, Any], fit: Any) -> None:
        project.fit(changes | Changes(trainer=options), [], folder, 0, fit)

    device = Device("", 0, {"fp32": 1.0}, bandwidth=1.0, link=1.0, network=1.0, is_gpu=is_gpu)  # whose rates are unused
    peak = simulate_step(run, Cluster(device, world_size), {}, folder).peak
    (folder / _FILE).write_text(json.dumps(round(peak * (RESERVED if is_gpu else 1.0)) * world_size))
