"""A variant of a run that trains in processes of its own, and that takes turns with others."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from lightning_accel.measure.allocators import AllocatorName, variables_for
from lightning_accel.strategies.checkpoints.atomic import explain_disk_errors
from lightning_accel.tuning.fork_server import ForkedProcess, ForkServer, can_fork
from lightning_accel.tuning.project import Changes, Project
from lightning_accel.tuning.serving import NUM_SAMPLES

IN_TRIAL = "LIGHTNING_ACCEL_IN_TRIAL"  # a variable of processes of trials, and of those that they start
SHAPES_VARY = "shapes_vary"  # a file of a trial
NO_ROOM = 74  # status of a process that found no room for its error, as sysexits.h has it
_POLL = 0.02  # seconds


class TrialError(Exception):
    """Say why a variant did not run."""


class NotReadyError(TrialError):
    """Say that a variant has not begun its steps in time."""


class UnusableRunError(TrialError):
    """Say that a command line or a config is not one of a run."""


class DiskFullError(TrialError):
    """Say that a variant found no room on a disk."""


@dataclass(frozen=True)
class Step:
    """Hold one step of a run.

    Attributes:
        begin: when it began, by ``time.monotonic``.
        end: when it ended.
        waited: seconds of it that it waited for data.
        loss: its loss, NaN if that was not recorded.
        optimized: seconds of the optimizers.
        in_system: seconds of the processor that the system took for its first process, as for new pages of memory.
    """

    begin: float
    end: float
    waited: float
    loss: float
    optimized: float = 0.0
    in_system: float = 0.0

    @classmethod
    def read(cls, line: str) -> "Step":
        """Return the step of a line of :meth:`to_line`."""
        return cls(*map(float, line.split(",")))

    def to_line(self) -> str:
        return ",".join(map(repr, astuple(self))) + "\n"


class Variant:
    """Train, or use a model, with some changes in a group of processes that is frozen but for its turns.

    A frozen group takes no time from others, and neither its loader's workers nor its ranks go on, so that its queues
    are as full as they were when its turn ended.

    Args:
        project: what is fitted.
        changes: with which changes.
        folder: an empty folder for its files.
        server: forks its first process, which is started anew without one; of the allocator that the changes name.
        stall_timeout: seconds without a step after which it counts as hanging; ten times as long before the first.

    Attributes:
        before_turn: called with the deadline before each turn.
        is_put_away: whether its processes were ended to make room for others, until its next turn.
    """

    def __init__(
        self,
        project: Project,
        changes: Changes,
        folder: Path,
        server: ForkServer | None = None,
        stall_timeout: float = 60.0,
    ) -> None:
        self.project = project
        self.changes = changes
        self.folder = folder
        self.server = server
        self.stall_timeout = stall_timeout
        self.before_turn: Callable[[float], None] = lambda deadline: None
        self.is_put_away = False
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._read = 0
        self._rest = ""

    def start(
        self,
        seeds: Sequence[int] = (0,),
        num_steps: int | None = None,
        perturb: bool = False,
        planned_on: tuple[bool, int] | None = None,
    ) -> None:
        """Start to train, from the first seed again when the run ends unless there is a number of steps.

        Args:
            seeds: one after the other.
            num_steps: of each seed.
            perturb: whether each weight is moved by one rounding first.
            planned_on: whether devices are GPUs, and how many there are, where a step is planned in place of training.

        Raises:
            NotWrittenError: if the disk of the folder is full, or may not be written.
        """
        specification = {
            "project": self.project.to_dict(),
            "changes": asdict(self.changes),
            "seeds": list(seeds),
            "num_steps": num_steps,
            "perturb": perturb,
            "planned_on": planned_on,
        }
        path = self.folder / "trial.json"
        output = self.folder / "output.txt"
        with explain_disk_errors(path):
            self.folder.mkdir(parents=True)
            path.write_text(json.dumps(specification))
            output.touch()
        forked = self.server and self.server.fork(path, output)
        self._process = forked or _new_process(path, output, self.changes.speedups.get("allocator"))
        # when this process ends, however it does, the pipe closes, and nothing frozen stays behind
        guard = f"read line; kill -KILL -{self._process.pid}"
        self._guard = subprocess.Popen(["sh", "-c", guard], stdin=subprocess.PIPE, start_new_session=True)
        if sys.platform == "linux":  # out of memory, the system ends the trial and nothing of the user's
            with contextlib.suppress(OSError):  # it has ended already
                Path(f"/proc/{self._process.pid}/oom_score_adj").write_text("1000")

    @property
    def is_alive(self) -> bool:
        """Return whether its first process runs, frozen or not, or was put away."""
        return self.is_put_away or (self._process is not None and self._process.poll() is None)

    def facts(self) -> dict[str, Any]:
        """Return what the first step wrote, see :func:`lightning_accel.tuning.recorder.facts_of`.

        ``shapes_vary`` tells whether tensors of a batch since then had other shapes.
        """
        facts = json.loads((self.folder / "facts.json").read_text())
        return facts | {"shapes_vary": (self.folder / SHAPES_VARY).exists()}

    def peak_bytes(self) -> dict[int, int]:
        """Return the peak of the memory of all ranks by numbers of steps, powers of 2."""
        peaks: dict[int, int] = {}
        for path in self.folder.glob("memory_*.csv"):
            found: dict[int, int] = {}
            for line in path.read_text().splitlines():
                num_steps, peak = map(int, line.split(","))
                found.setdefault(num_steps, peak)  # of the first fit, if the run ended and began again
            for num_steps, peak in found.items():
                peaks[num_steps] = peaks.get(num_steps, 0) + peak
        return peaks

    def warm_up(self, deadline: float) -> float:
        """Let it run until its steps take as long as those before, then freeze it; return the seconds that it took.

        Raises:
            TrialError: if it fails, hangs, or is not ready at ``deadline``, a time of ``time.monotonic``.
        """
        begin = time.monotonic()
        steps: list[Step] = []
        least = NUM_SAMPLES + 4 if self.project.serves else 4  # each sample may have a shape to compile for
        with self._thawed():
            while len(steps) < least or not _is_steady(steps):
                steps += self._await_steps(begin if not steps else steps[-1].end, 10 if not steps else 1, deadline)
        return time.monotonic() - begin

    def run_for(self, seconds: float, deadline: float) -> list[Step]:
        """Let it run for some seconds and two whole steps at least, and return the steps that lie in them.

        Raises:
            TrialError: if it fails, hangs, or has no two steps before ``deadline``.
        """
        self.before_turn(deadline)
        self.new_steps()
        begin = time.monotonic()
        steps: list[Step] = []
        last = begin
        with self._thawed():
            while time.monotonic() < begin + seconds or len(steps) < 2:
                for step in self._await_steps(last, 1, deadline):
                    last = step.end
                    if step.begin >= begin:
                        steps.append(step)
        return steps

    def wait(self, deadline: float) -> None:
        """Wait until a variant with a number of steps has ended.

        Raises:
            TrialError: if it fails, hangs, or has not ended at ``deadline``.
        """
        assert self._process is not None
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                raise TrialError("not finished within the budget")
            time.sleep(_POLL)
        if self._process.returncode != 0:
            raise self._failure()

    def new_steps(self) -> list[Step]:
        """Return the steps that were written since the last call."""
        path = self.folder / "steps.csv"
        if not path.exists():
            return []
        with open(path) as file:
            file.seek(self._read)
            text = self._rest + file.read()
            self._read = file.tell()
        lines = text.split("\n")
        self._rest = lines.pop()
        return [Step.read(line) for line in lines]

    def stop(self) -> None:
        """End all its processes."""
        if self._process is not None:
            self._kill()
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()

    def put_away(self) -> None:
        """End all its processes until :meth:`restart`, so that others have their memory."""
        self.stop()
        self._process = self._guard = None
        self.is_put_away = True

    def restart(self, folder: Path, deadline: float) -> None:
        """Start what was put away from the beginning, in another empty folder, and let it warm up.

        Raises:
            TrialError: see :meth:`warm_up`.
        """
        self.folder, self.is_put_away = folder, False
        self._read, self._rest = 0, ""
        self.start()
        try:
            self.warm_up(deadline)
        except NotReadyError:
            self.put_away()
            raise

    @contextlib.contextmanager
    def _thawed(self) -> Iterator[None]:
        self._send(signal.SIGCONT)
        try:
            yield
        finally:
            self._send(signal.SIGSTOP)

    def _await_steps(self, since: float, patience: float, deadline: float) -> list[Step]:
        assert self._process is not None
        while not (steps := self.new_steps()):
            now = time.monotonic()
            if self._process.poll() is not None:
                raise self._failure()
            if now > since + self.stall_timeout * patience:
                self._kill()
                raise TrialError(f"hangs: no step for {self.stall_timeout * patience:.0f} s{self._last_output()}")
            if now > deadline:
                raise NotReadyError(f"not ready within its share of the budget{self._last_output('Error')}")
            time.sleep(_POLL)
        return steps

    def _failure(self) -> TrialError:
        assert self._process is not None
        error = self.folder / "error.json"
        if error.exists():
            content = json.loads(error.read_text())
            message = " ".join(content["message"].split())
            if content["kind"] == "UsageError":
                return UnusableRunError(message)
            kind = "out of memory" if is_out_of_memory(content) else content["kind"]
            return (DiskFullError if content["is_disk_full"] else TrialError)(f"{kind}: {message[:300]}")
        status = self._process.returncode
        assert status is not None
        if status < 0:
            name = signal.Signals(-status).name
            when = ", as the system does when memory runs out" if name == "SIGKILL" else ""
            return TrialError(f"killed by {name}{when}")
        if status == NO_ROOM:
            return DiskFullError(f"no room for the files of a trial in {self.folder.parent}; make room and start again")
        return TrialError(f"ended with status {status}{self._last_output()}")

    def _last_output(self, word: str = "") -> str:
        """Return the last line with a word that it has written, as the end of a message."""
        lines = (self.folder / "output.txt").read_text(errors="replace").split("\n")
        found = (line.strip() for line in reversed(lines) if line.strip() and word in line)
        return next((f"; its last output: {line[:300]}" for line in found), "")

    def _kill(self) -> None:
        assert self._process is not None
        self._send(signal.SIGKILL)
        self._process.wait()

    def _send(self, number: int) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(self._process.pid, number)


def fork_server(allocator: AllocatorName | None = None) -> ForkServer | None:
    """Return a server that forks the processes of variants, None where they have to be new ones.

    Args:
        allocator: of memory in these processes.
    """
    return ForkServer(_COMMAND, _environment(allocator)) if can_fork() else None


def _new_process(specification: Path, output: Path, allocator: AllocatorName | None = None) -> subprocess.Popen[bytes]:
    with open(output, "wb") as file:
        return subprocess.Popen(
            [*_COMMAND, str(specification.resolve())],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=_environment(allocator),
            start_new_session=True,
        )


def _environment(allocator: AllocatorName | None) -> dict[str, str]:
    """Return the variables of this process, but for those by which launchers tell the processes of a run apart."""
    environment = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    if allocator is not None:
        environment |= variables_for(allocator)
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), IN_TRIAL: "1"}


_COMMAND = [sys.executable, "-m", "lightning_accel.tuning.trial"]
_RANK_VARIABLES = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_out_of_memory(error: Mapping[str, str]) -> bool:
    """Return whether an exception, as its kind and message, is of memory that could not be allocated."""
    return (
        error["kind"] in ("OutOfMemoryError", "MemoryError")
        or "can't allocate memory" in error["message"]
        or "out of memory" in error["message"]
    )


def _is_steady(steps: Sequence[Step]) -> bool:
    """Return whether the last of four steps or more took about as long as those before, and compilation is over."""
    *_, first, second, third = (step.end - step.begin for step in steps)
    return max(first, second, third) < 1.5 * min(first, second, third) or len(steps) >= 20
