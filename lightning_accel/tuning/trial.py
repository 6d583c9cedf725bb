"""Run a variant in a process of its own: ``python -m lightning_accel.tuning.trial SPECIFICATION``.

Without a specification, it is the server that forks such processes.

It is a module of its own so that strategies that start one process per rank start this again, not the caller's program.
"""

import contextlib
import json
import logging
import os
import sys
import traceback
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

from lightning_accel._private.torch import draw_as_eager
from lightning_accel.strategies.checkpoints.atomic import NotWrittenError, is_disk_full, write_atomically
from lightning_accel.tuning.fork_server import serve
from lightning_accel.tuning.latency_recorder import LatencyRecorder
from lightning_accel.tuning.planned_step import write_planned_bytes
from lightning_accel.tuning.project import Changes, Project
from lightning_accel.tuning.recorder import StepRecorder, TrialEnd
from lightning_accel.tuning.variant import NO_ROOM


def run_trial(specification: dict[str, Any], folder: Path) -> None:
    """Fit with the changes of a specification, or use the model, again and again if there is no number of steps.

    Args:
        specification: ``project`` and ``changes`` as dicts; ``seeds``; ``num_steps``, for each of them, or None to go
            on until the process is killed; ``perturb``; ``planned_on``, the kind and number of devices if a step is
            planned in place of all that.
        folder: where everything is written.
    """
    project = Project(**specification["project"])
    changes = Changes(**specification["changes"])
    num_steps = specification["num_steps"]
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if specification["planned_on"]:
        is_gpu, world_size = specification["planned_on"]
        write_planned_bytes(project, changes, is_gpu, world_size, folder)
        return
    if num_steps is not None and changes.speedups.get("compile"):
        draw_as_eager()
    while True:
        for seed in specification["seeds"]:
            place = folder if num_steps is None else folder / f"seed_{seed}"
            place.mkdir(exist_ok=True)
            recorder: LatencyRecorder | StepRecorder
            if project.serves:
                recorder = LatencyRecorder(place, num_steps is not None, specification["perturb"])
            else:
                recorder = StepRecorder(place, num_steps, num_steps is not None, specification["perturb"])
            try:
                project.fit(changes, [recorder], place, seed)
            except TrialEnd:
                continue
            if not recorder.num_recorded:
                raise RuntimeError("the run ended without a training step: is there a batch of training data?")
            if num_steps is None and recorder.num_recorded == 1:
                raise RuntimeError("the run has one training step, and steps are timed from the second one on")
        if num_steps is not None:
            return


def main() -> int:
    """Run the trial of the specification that the command line names; leave the reason if it fails."""
    if len(sys.argv) == 1:
        if (specification := serve()) is None:
            return 0
        sys.argv.append(str(specification))
    path = Path(sys.argv[1])
    with contextlib.suppress(OSError):  # multiprocessing would remove it in the end, before which the process is killed
        (path.parent / f"temporary_{os.environ.get('LOCAL_RANK', 0)}.txt").write_text(get_temp_dir())
    try:
        run_trial(json.loads(path.read_text()), path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the disk is full
            traceback.print_exc()
        if os.environ.get("LOCAL_RANK", "0") == "0":
            content = {"kind": type(error).__name__, "message": str(error), "is_disk_full": is_disk_full(error)}
            try:
                with write_atomically(path.parent / "error.json") as part:
                    part.write_text(json.dumps(content))
            except NotWrittenError:
                return NO_ROOM
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
