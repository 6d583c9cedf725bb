"""``lightning_accel.tune``: a faster variant of the user's own run."""

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning_accel.ops.extras import import_on_use, require_module
from lightning_accel.ops.native import KERNELS
from lightning_accel.strategies.checkpoints.atomic import NotWrittenError, explain_disk_errors
from lightning_accel.tuning.choices import GOALS, Goal
from lightning_accel.tuning.identity import files_in, identity_of
from lightning_accel.tuning.learning import require_known
from lightning_accel.tuning.outcome import Outcome
from lightning_accel.tuning.project import Project, project_of, require_run
from lightning_accel.tuning.search import Search
from lightning_accel.tuning.variant import IN_TRIAL
from lightning_accel.tuning.writing import claim, overlay, why_nothing, write_outcome

progress = import_on_use("rich.progress")


def tune(
    config: str | Path | Sequence[str] | Callable[..., Any],
    budget: str | float = "10m",
    output: str | Path = "tuned",
    goal: Goal = "speed",
    allow: Sequence[str] = (),
) -> Outcome:
    """Find a faster variant of a run on this machine, or one with less memory or latency, as an overlay of its config.

    Changes are measured in turns with the run as it is: each alone, the best together, each left out again, and beside
    them those that did not help alone. Among changes that exclude each other, the simplest is taken that none is shown
    to beat. What is returned is faster with a 95 % interval above 1, and its losses are equal up to rounding, or where
    numbers are rounded or drawn otherwise, equivalent in the first 12 to 30 steps of 5 to 40 seeds: how training ends
    is not compared. A search that was interrupted goes on from what it has measured, also with another budget or other
    changes allowed, as long as configs, imported code, packages and the machine are the same; data are not looked at.

    Where the goal is ``memory``, the variant is looked for that needs the least of those that are at least 0.7 times as
    fast: micro-batches within a step, recomputed activations, fewer digits, compiled layers, fewer workers, and on
    several processes FSDP2 in place of DDP. Memory is what training adds to what its processes hold when it begins
    (gradients, states of optimizers, activations, batches, what workers hold alone), or on CUDA the peak of what
    tensors take; weights and libraries are left out on the CPU. It is proven by several processes of each, with a 95 %
    interval.

    Where the goal is ``latency``, it is the time that one sample takes through the model after training: through
    ``predict`` where the data (or the module) has a ``predict_dataloader``, otherwise through ``validate``. Batches are
    cut to one sample, 16 samples go through again and again, and medians of turns are compared; loading and copies to
    the device are left out. Weights are those of the module as it is made, or of ``--ckpt_path FILE``. Threads, fewer
    digits, backends of attention, channels_last, memory kept and compiled layers are tried; their start is reported,
    and need not be made up for. Outputs of the samples (what the step returns, and what validation logs) have to be
    equal up to rounding; where numbers are rounded, each may deviate by a root mean square of 2 % of its standard
    deviation over samples, and 99 % of integers have to be equal. Before training, outputs hardly depend on the sample,
    and fewer digits may not be shown to be enough.

    ``output`` receives ``tuned.yaml`` (for ``fit --config X.yaml --config tuned/tuned.yaml``, or ``predict`` and
    ``validate`` where latency is the goal), ``report.md``, ``report.json`` and ``report.png``. Nothing else is written:
    checkpoints and loggers of the run are left out. Callbacks of your own run in each trial; what they write to paths
    of their own, each trial writes.

    Args:
        config: a config file, arguments of ``lightning-accel fit``, or a function at the top level of a file that
            returns (trainer, module, data), with options for the Trainer as keyword arguments: ``def
            make(**trainer_options)``. Data is a LightningDataModule, a DataLoader of training data, or None. Options
            may have ``plugins``, to which a function with plug-ins of its own adds them.
        budget: seconds for the search, or minutes as in ``10m``. Native kernels are built before it begins, once on a
            machine.
        output: folder.
        goal: ``speed``, ``memory`` or ``latency``.
        allow: changes of what is learned to try as well: ``batch_size`` for batches of 2, 4 and 8 times the samples, at
            a learning rate that goes with them, and ``length_bucketed`` for batches of samples of similar length (both
            by :class:`lightning_accel.callbacks.Batching`). Speed is that of samples, and losses have to be equivalent
            over seeds after as many samples. ``packed`` puts several sequences in a row of a batch, by the same
            callback, which compares losses and gradients with those of the padded batch. ``float8`` trains linear
            layers in float8, by :class:`lightning_accel.precision.Float8Precision`, compiled; ``2:4`` with 2:4 sparse
            weights, by :class:`lightning_accel.callbacks.SemiStructuredSparsity`.

    Raises:
        NotWrittenError: if the disk of the folder is full, or may not be written; once there is room, the search goes
            on from what it has measured.
        RuntimeError: if it is called by the file of the run, when a trial imports that.
        TrialError: if the run does not work as it is, or has no data for its goal.
        TypeError: if ``config`` is none of these, as where the function was called, or if the function does not return
            a run or pass options on.
        ValueError: if the function cannot be imported by another process, the budget is not a time, a name in ``allow``
            is unknown, or the folder holds measurements of another run, or of this one before it was changed.
    """
    if os.environ.get(IN_TRIAL):
        raise RuntimeError(
            "tune is called where a trial of it imports the file of the run: put the call below "
            '`if __name__ == "__main__":`, which an import does not run'
        )
    seconds = parse_budget(budget)
    if goal not in GOALS:
        raise ValueError(f"goal must be {' or '.join(GOALS)}; got {goal!r}")
    require_known(allow)
    if allow and goal != "speed":
        raise ValueError(f"allow={tuple(allow)} changes what is learned for speed; leave it out with goal={goal!r}")
    for module in ("matplotlib", "rich", "scipy"):  # before anything is measured
        require_module(module)
    project, files, command = _project_of(config)
    if goal == "latency":
        project = replace(project, arguments=project.arguments | {"serves": True})
    KERNELS.build_ahead()  # in no trial, whose start it would slow by more than a small budget
    identity = identity_of(project, goal, files)
    folder = Path(output)
    make_folder(folder)
    outcome = _search(partial(Search, project, folder, seconds, identity, goal, allow), command)
    if callable(config):
        print(f"{claim(outcome) if outcome.is_faster else why_nothing(outcome)}; see {folder / 'report.md'}")
    return outcome


def _project_of(config: str | Path | Sequence[str] | Callable[..., Any]) -> tuple[Project, list[Path], str]:
    """Return what is tuned, the files that it is made from, and the command that tunes it."""
    if callable(config):
        project = project_of(config)
        file = Path(project.arguments["make"].rpartition(":")[0])
        require_run(config)
        return project, [file], f"tune({config.__name__}) of {file.name}"
    arguments = ["--config", str(config)] if isinstance(config, str | Path) else _arguments(config)
    project = Project("lightning_accel.cli.tune:fit_config", {"arguments": arguments})
    return project, files_in(arguments), f"lightning-accel tune {' '.join(arguments)}"


def _search(new_search: Callable[..., Search], command: str) -> Outcome:
    """Return the outcome of a search that shows its progress, and write it, also that of one that is interrupted."""
    with progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TextColumn("best so far {task.fields[best]:.2f}"),
    ) as bar:
        task = bar.add_task("the run as it is", total=1.0, best=1.0)

        def show(what: str, share: float, best: float) -> None:
            is_new = bar.tasks[0].description != what
            if is_new and not bar.console.is_terminal:  # a file shows the bar at its end alone
                line = f"{share:4.0%} of the budget, best so far {best:.2f}; now {what}"
                bar.print(line, markup=False, highlight=False)
            bar.update(task, description=what, completed=share, best=best)

        search = new_search(progress=show)
        journal, folder = search.measurer.journal, search.measurer.folder
        if len(journal):
            num_cut = journal.num_cut
            cut = f"; {num_cut} that a smaller budget or a full disk cut short are repeated" * bool(num_cut)
            bar.print(f"{folder} holds {len(journal)} measurements of this run, which are used again{cut}")
        outcome, written = search.outcome, (command, time.strftime("%Y-%m-%d"))
        try:
            try:
                search.run()
            finally:
                if outcome.facts:
                    write_outcome(outcome, folder, *written)
        except (KeyboardInterrupt, OSError) as error:
            if outcome.is_faster and isinstance(error, OSError):
                bar.print(overlay(outcome, *written), markup=False, highlight=False, soft_wrap=True)
            bar.print(f"best so far: {claim(outcome)}" if outcome.is_faster else "nothing better was found so far")
            raise
    return outcome


def _arguments(given: object) -> list[str]:
    if not isinstance(given, Sequence) or not all(isinstance(one, str) for one in given):
        raise TypeError(
            "tune takes a config file, a list of arguments of fit, or a function that makes a run; got "
            f"{type(given).__name__}. Pass the function itself, tune(make), not what it returns"
        )
    return list(given)


def make_folder(folder: Path) -> None:
    """Make a folder for results unless it is there.

    Raises:
        NotWrittenError: if it cannot be made.
    """
    with explain_disk_errors(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
            is_file = not isinstance(error, FileNotFoundError)
            reason = "it is, or lies in, a file" if is_file else "this place takes no folders"
            raise NotWrittenError(f"{folder} cannot be made a folder: {reason}; choose another output") from error


def parse_budget(budget: str | float) -> float:
    """Return the seconds of a budget such as 600, ``90s``, ``10m`` or ``1h``.

    Raises:
        ValueError: if it is not a time above 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", str(budget).strip())
    seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]] if match else 0.0
    if seconds <= 0:
        raise ValueError(f"the budget must be a time such as 600, 90s, 10m or 1h; got {budget!r}")
    return seconds
