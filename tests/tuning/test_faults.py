"""Full disks, signals, and processes that end at the wrong time."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from lightning_accel.strategies.checkpoints.atomic import NotWrittenError
from lightning_accel.tuning import factors, fork_server, measurer, parity, program, tune, variants, writing
from lightning_accel.tuning.fork_server import ForkServer
from lightning_accel.tuning.journal import Journal
from lightning_accel.tuning.project import Changes, Project, project_of
from lightning_accel.tuning.search import Search
from lightning_accel.tuning.variant import NO_ROOM, DiskFullError, TrialError, Variant
from lightning_accel.tuning.writing import write_outcome
from tests.tuning import foreign_run
from tests.tuning.test_search import World, names, run

IDENTITY = {"of": "a test"}


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


@contextmanager
def largest_file(num_bytes):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def journal_of(folder, budget=60.0):
    return Journal(folder / "journal.jsonl", IDENTITY, budget)


def test_a_journal_that_was_cut_anywhere_goes_on(tmp_path):
    path = tmp_path / "journal.jsonl"
    for name in "ab":
        journal_of(tmp_path).result(name, lambda: ({"value": 1}, None))
    whole = path.read_bytes()
    ends = [place + 1 for place, one in enumerate(whole) if one == ord("\n")]
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        num_kept = max(0, sum(end <= length for end in ends) - 1)
        assert len(journal_of(tmp_path)) == num_kept
        for name in "ab":
            journal_of(tmp_path).result(name, lambda: ({"value": 1}, None))
        assert path.read_bytes() == whole


@pytest.mark.parametrize("text", ['{"name": "a half', "[]", "\0\0", "\udcff", '{"name": "a"}', '{"identity": {}}'])
def test_a_damaged_journal_is_named(tmp_path, text):
    journal_of(tmp_path)
    with open(tmp_path / "journal.jsonl", "ab") as file:
        file.write(text.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(ValueError, match=r"journal\.jsonl is damaged in line 2.*--output"):
        journal_of(tmp_path)


@pytest.mark.sampled(default=2)
@pytest.mark.parametrize("num_lines", [0, 1, 5, 8])
def test_a_search_that_a_full_disk_ends_goes_on_when_there_is_room(world, tmp_path, num_lines):
    whole = run(tmp_path / "whole")
    lines = (tmp_path / "whole/journal.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) > 9
    room = sum(map(len, lines[:num_lines])) + 40
    with largest_file(room), pytest.raises(NotWrittenError, match=r"journal\.jsonl could not be written: the disk of"):
        run(tmp_path / "parts")
    before = len(world.started)
    assert run(tmp_path / "parts").changes == whole.changes
    assert num_lines < 8 or len(world.started) - before < before - 3


def test_what_was_found_is_printed_if_it_cannot_be_written(world, tmp_path, capsys, monkeypatch):
    def fill(*_):
        raise NotWrittenError("the disk is full")

    monkeypatch.setattr(program, "write_outcome", fill)
    with pytest.raises(NotWrittenError):
        tune(foreign_run.works, 600, tmp_path)
    out = capsys.readouterr().out
    assert "      precision: bf16-mixed" in out or "  precision: bf16-mixed  #" in out
    assert "best so far: 2.1" in out


def test_a_search_that_ends_by_a_full_disk_hands_back_the_best_so_far(world, tmp_path):
    one = Search(Project("nobody:runs", {}), tmp_path, 600.0, IDENTITY)
    write = one.measurer.journal._write

    def fill(entry):
        if entry["name"].startswith("together"):
            raise NotWrittenError("the disk is full")
        write(entry)

    one.measurer.journal._write = fill
    with pytest.raises(NotWrittenError):
        one.run()
    assert one.outcome.is_faster
    assert len(names(one.outcome)) == 1


def test_a_change_that_a_full_disk_failed_is_measured_again(world, tmp_path, monkeypatch):
    whole = run(tmp_path / "whole")
    warm_up = variants.Variant.warm_up

    def fill(self, deadline):
        if "compile" in world.names(self.changes):
            raise DiskFullError("no room")
        return warm_up(self, deadline)

    with monkeypatch.context() as patched:
        patched.setattr(variants.Variant, "warm_up", fill)
        full = run(tmp_path / "parts")
    assert full.alone["compile=children"].reason == "no room"
    assert "compile" not in names(full)
    assert run(tmp_path / "parts").changes == whole.changes


def ended_once(monkeypatch, patched, name, end):
    """Call ``end`` with the arguments of a function at its second call, which then fails."""
    function, calls = getattr(patched, name), []

    def call(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            end(*args)
            raise TrialError("killed by SIGKILL")
        return function(*args, **kwargs)

    monkeypatch.setattr(patched, name, call)
    return calls


@pytest.mark.parametrize("what", ["the run as it is", "the server"])
def test_a_change_is_not_blamed_for_what_else_has_ended(world, tmp_path, monkeypatch, what):
    server = SimpleNamespace(has_ended=False, has_forked=True, stop=lambda: None)
    servers = [server, copy(server)]
    monkeypatch.setattr(variants, "fork_server", lambda allocator: None if allocator else servers.pop(0))

    def end(reference, variant):
        if what == "the server":
            server.has_ended = True
        else:
            reference.is_alive = False

    calls = ended_once(monkeypatch, measurer, "compare", end)
    outcome = run(tmp_path)
    assert names(outcome) == ["compile", "precision"]
    assert calls[1][1].changes == calls[2][1].changes
    assert not any("SIGKILL" in found.reason for found in outcome.alone.values())
    assert len(servers) == (what != "the server")


def test_losses_are_recorded_again_if_the_server_has_ended(world, tmp_path, monkeypatch):
    server = SimpleNamespace(has_ended=False, has_forked=True, stop=lambda: None)
    servers = [server, copy(server)]
    monkeypatch.setattr(variants, "fork_server", lambda allocator: None if allocator else servers.pop(0))
    ended_once(monkeypatch, measurer, "record_losses", lambda *_: setattr(server, "has_ended", True))
    assert not any("SIGKILL" in verdict.reason for verdict in run(tmp_path).verdicts)


def test_each_allocator_has_a_server_of_its_own(world, tmp_path, monkeypatch):
    """Variants with it, and their losses, come from there."""
    monkeypatch.setattr(factors, "why_no_allocator", lambda name: "not here" if name == "huge_pages" else "")
    stopped = []

    def server_with(allocator):
        return SimpleNamespace(has_ended=False, allocator=allocator, stop=lambda: stopped.append(allocator))

    monkeypatch.setattr(variants, "fork_server", server_with)
    world.speed = {"allocator": 1.5, "compile": 1.2}
    outcome = run(tmp_path)
    assert names(outcome) == ["compile", "memory"]
    begun = [(one.changes, one.server) for one in world.variants]
    for pairs in (begun, world.recorded_from):
        assert {server.allocator for _, server in pairs} >= {None, "tcmalloc"}
        assert all(server.allocator == changes.speedups.get("allocator") for changes, server in pairs)
    monkeypatch.setattr(writing, "variables_for", lambda name: {"LD_PRELOAD": f"lib{name}.so", "MORE": "1"})
    write_outcome(outcome, tmp_path, "a run", "today")
    assert "start a program of your own with these variables: `LD_PRELOAD=libtcmalloc.so MORE=1`" in (
        tmp_path / "report.md"
    ).read_text(encoding="utf-8")
    assert "allocator: tcmalloc  # alone 1.5" in (tmp_path / "tuned.yaml").read_text(encoding="utf-8")
    assert sorted(stopped, key=str) == [None, "tcmalloc"]


def test_temporary_folders_of_killed_trials_are_removed(tmp_path):
    for number, name in enumerate(("pymp-x", "other")):
        (tmp_path / "trials" / str(number)).mkdir(parents=True)
        (tmp_path / name).mkdir()
        (tmp_path / "trials" / str(number) / "temporary_0.txt").write_text(str(tmp_path / name))
    variants.Variants(project_of(foreign_run.works), tmp_path / "trials")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


CONFIG = "model: tests.tuning.foreign_run.Net\ndata: tests.tuning.foreign_run.Data\ntrainer: {accelerator: cpu}\n"


def processes_in(folder):
    """Return the processes whose working directory is a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found += [path.name] if os.readlink(path / "cwd") == str(folder) else []
    return found


def obey_interrupts():
    """Undo what a shell does to the processes that it runs in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "line"),
    [
        pytest.param(signal.SIGKILL, "identity", marks=pytest.mark.weekly),
        (signal.SIGTERM, "identity"),
        pytest.param(signal.SIGINT, "baseline", marks=pytest.mark.weekly),
    ],
)
def test_no_process_and_no_folder_stays_behind(tmp_path, number, line):
    """A terminal sends SIGINT to all processes of the group."""
    folder, temporary = tmp_path / "run", Path(tempfile.mkdtemp())  # tmp_path may be too long for names of sockets
    folder.mkdir()
    (folder / "run.yaml").write_text(CONFIG)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(temporary)}
    command = [sys.executable, "-m", "lightning_accel", "tune", "--config", "run.yaml"]
    journal = folder / "tuned" / "journal.jsonl"
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, preexec_fn=obey_interrupts,
    ) as process:  # fmt: skip
        while not (journal.exists() and line in journal.read_text() and len(processes_in(folder)) > 1):
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.05)
        os.killpg(process.pid, number)
        out, _ = process.communicate()
    assert process.returncode == (128 + number if number != signal.SIGKILL else -number), out
    assert "Traceback" not in out
    assert number == signal.SIGKILL or "the same command goes on from there" in out
    end = time.monotonic() + 60
    while left := processes_in(folder):
        assert time.monotonic() < end, left
        time.sleep(0.05)
    assert number == signal.SIGKILL or not list(temporary.glob("pymp-*"))
    shutil.rmtree(temporary)


class Quiet(Variant):
    """Train nothing."""

    def start(self, *_):
        self._process = SimpleNamespace(poll=lambda: 0, returncode=0, wait=lambda: 0, pid=2**30)

    def stop(self):
        pass


def test_a_run_that_ends_its_process_has_too_few_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(parity, "Variant", Quiet)
    with pytest.raises(TrialError, match="the run has 0 steps, fewer than the 10 that are compared"):
        parity.record_losses(project_of(foreign_run.works), Changes(), tmp_path, [0], 10, time.monotonic() + 9)


@pytest.mark.parametrize(
    ("status", "kind", "reason"),
    [
        (3, TrialError, "^ended with status 3; its last output: the last line$"),
        (NO_ROOM, DiskFullError, "^no room for the files of a trial in "),
    ],
)
def test_a_trial_that_leaves_no_error_says_what_it_can(tmp_path, status, kind, reason):
    variant = Quiet(project_of(foreign_run.works), Changes(), tmp_path)
    variant.start()
    variant._process.returncode = status
    (tmp_path / "output.txt").write_text("a line\nthe last line\n\n")
    with pytest.raises(kind, match=reason):
        variant.wait(0.0)


def test_a_variant_that_is_late_is_frozen_and_one_that_hangs_is_ended(tmp_path, monkeypatch):
    variant, sent = Quiet(project_of(foreign_run.works), Changes(), tmp_path), []
    variant.start()
    variant._process.poll = lambda: None
    monkeypatch.setattr(variant, "_send", sent.append)
    (tmp_path / "output.txt").write_text("OSError: AF_UNIX path too long\n")  # of a worker, for whose batch a run waits
    with pytest.raises(TrialError, match=r"not ready .*; its last output: OSError: AF_UNIX path too long$"):
        variant.run_for(1.0, deadline=0.0)
    assert sent == [signal.SIGCONT, signal.SIGSTOP]
    variant.stall_timeout = 0.0
    with pytest.raises(TrialError, match=r"^hangs: .*; its last output: OSError"):
        variant.run_for(1.0, deadline=time.monotonic() + 99)
    assert signal.SIGKILL in sent


def test_a_folder_that_may_not_be_written_is_one_message(command, run_folder, monkeypatch):
    (run_folder / "run.yaml").write_text("model: Classifier\n")

    def reject(path, *_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "mkdir", reject)
    done = command("tune", "--config", "run.yaml")
    assert done.status == 1
    assert "tuned could not be written: " in done.err
    assert "is read-only for this user. Choose another folder" in done.err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_does_not_end_the_cleaning_up(command, run_folder, monkeypatch, number, status):
    (run_folder / "run.yaml").write_text("model: Classifier\n")
    cleaned, ours = [], signal.default_int_handler
    theirs = signal.signal(number, ours)  # which ignores it where tests run in the background

    def interrupted(*_):
        try:
            os.kill(os.getpid(), number)
            time.sleep(9)
        finally:
            os.kill(os.getpid(), number)
            time.sleep(0.01)
            cleaned.append(True)

    monkeypatch.setattr("lightning_accel.tuning.tune", interrupted)
    done = command("tune", "--config", "run.yaml")
    assert signal.signal(number, theirs) is ours
    assert (done.status, cleaned) == (status, [True])
    assert "the same command goes on from there" in done.out


def server_of(script):
    return ForkServer([sys.executable, "-c", script], os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})


@pytest.mark.parametrize(
    ("replies", "requests"),
    [("[77, 3]", 1), (r"[77]\n[77, 3]", 2)],  # the system uses numbers again
    ids=["unreported", "reused"],
)
def test_a_process_may_end_before_it_reports_and_its_number_be_used_again(tmp_path, replies, requests):
    one = server_of(f"for _ in range({requests}):\n    input()\n    print('{replies}', flush=True)")
    try:
        for _ in range(requests):
            assert one.fork(tmp_path / "trial.json", tmp_path / "output.txt").wait() == 3
    finally:
        one.stop()


def test_a_server_that_still_imports_is_not_waited_for(tmp_path, monkeypatch):
    one = server_of("import time; time.sleep(20)")

    with monkeypatch.context() as patched:
        patched.setattr(fork_server.connection, "wait", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            one.fork(tmp_path / "trial.json", tmp_path / "output.txt")
    one.stop()
    assert one._process.returncode == -signal.SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize("has_started_cuda", [False, True])
def test_a_forked_process_begins_anew_where_cuda_does_not_start_in_it(tmp_path, has_started_cuda):
    init = "lambda: (_ for _ in ()).throw(RuntimeError('CUDA driver initialization failed'))"
    one = server_of(
        "import os, sys, torch\nfrom pathlib import Path\nfrom lightning_accel.tuning.fork_server import serve\n"
        f"torch.cuda.device_count, torch.cuda.init = lambda: 1, {init if has_started_cuda else 'lambda: None'}\n"
        "asked, path, is_new = os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK'), sys.argv[1:], len(sys.argv) > 1\n"
        "path = Path(path[0]) if path else serve()\n"
        "if path is not None:\n"
        "    path.write_text(f\"{asked} {is_new} {os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK')}\")\n"
    )
    try:
        assert one.fork(tmp_path / "trial.json", tmp_path / "output.txt").wait() == 0
    finally:
        one.stop()
    assert (tmp_path / "trial.json").read_text() == ("None True None" if has_started_cuda else "1 False None")


@pytest.mark.slow
def test_no_process_outlives_a_caller_that_did_not_hear_of_it(tmp_path):
    one = server_of(
        "import os, time\nfrom pathlib import Path\nfrom lightning_accel.tuning.fork_server import serve\n"
        "if (path := serve()) is not None:\n"
        "    path.with_suffix('.part').write_text(str(os.getpid()))\n"
        "    path.with_suffix('.part').rename(path)\n"
        "    time.sleep(600)\n"
    )
    path = tmp_path / "trial.json"
    one.fork(path, tmp_path / "output.txt")
    while not path.exists():
        time.sleep(0.02)
    one.stop()  # it gets no more than the end of its input, as when the caller is killed
    end = time.monotonic() + 60
    while is_running(path.read_text()):
        assert time.monotonic() < end
        time.sleep(0.02)


def is_running(pid):
    """Return whether a process has not ended; one that nobody waits for remains as a zombie in a container."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
