"""Trials in processes of their own: turns, failures, losses, and what stays behind."""

import json
import os
import resource
import signal
import subprocess
import sys
import time

import pytest
import torch

from lightning_accel.measure.allocators import ALLOCATORS, why_no_allocator
from lightning_accel.tuning import tune
from lightning_accel.tuning.parity import are_equal, record_losses
from lightning_accel.tuning.project import Changes, project_of
from lightning_accel.tuning.variant import TrialError, Variant, fork_server
from tests.tuning import foreign_run

pytestmark = pytest.mark.slow


def soon():
    return time.monotonic() + 600


@pytest.fixture(scope="module")
def server():
    one = fork_server()
    if one is None:
        pytest.skip("processes cannot be forked here")
    yield one
    one.stop()


@pytest.fixture(params=[pytest.param("new", marks=pytest.mark.weekly), "forked"])
def any_server(request):
    """Where the processes of variants come from: None for new ones."""
    return None if request.param == "new" else request.getfixturevalue("server")


@pytest.mark.slow
@pytest.mark.weekly
def test_turns_freeze_all_processes(tmp_path, any_server):
    variant = Variant(project_of(foreign_run.works), Changes(), tmp_path / "trial", any_server)
    variant.start()
    try:
        variant.warm_up(soon())
        begin = time.monotonic()
        steps = variant.run_for(0.8, soon())
        end = time.monotonic()
        assert len(steps) > 5
        assert all(begin <= step.begin < step.end <= end for step in steps)
        assert all(step.end - step.begin > 0.01 for step in steps)
        assert [a.end for a in steps[:-1]] == [b.begin for b in steps[1:]]
        assert group_is(variant, {"T"})  # stopped: it and its worker
        assert len(group(variant)) == 2
        variant.new_steps()  # that ended between the last look and the freeze
        time.sleep(0.3)
        assert not variant.new_steps()
        assert variant.run_for(0.1, soon())
        assert variant.facts()["loaders"][0]["num_workers"] == 1
        assert foreign_run.__file__ in variant.facts()["code"]["files"]
        assert os.getsid(variant._process.pid) == variant._process.pid  # interrupts of a terminal do not reach it
    finally:
        variant.stop()
    assert group_is(variant, {"Z"}), group(variant)  # nothing is left behind; the worker's parent is gone
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.slow
@pytest.mark.weekly
def test_processes_are_forked_where_a_thousand_files_are_open(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 2048:
        pytest.skip("not as many files may be open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    opened = [os.dup(1) for _ in range(1100)]
    server = fork_server()
    try:
        variant = Variant(project_of(foreign_run.works), Changes(), tmp_path / "trial", server)
        variant.start()
        variant.stop()
    finally:
        server.stop()
        for place in opened:
            os.close(place)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.weekly
def test_a_trial_begins_with_the_allocator_of_its_changes(tmp_path, any_server):
    """And says whether batches have other shapes than the first."""
    name = next((one for one in ALLOCATORS if not why_no_allocator(one)), None)
    if name is None:
        pytest.skip("no allocator is installed, and huge pages are not for those that ask")
    changes = Changes(speedups={"allocator": name})
    server = fork_server(name) if any_server else None
    for number, (one, make) in enumerate(((changes, foreign_run.has_a_smaller_batch), (Changes(), foreign_run.works))):
        variant = Variant(project_of(make), one, tmp_path / str(number), server if number == 0 else any_server)
        variant.start()
        try:
            variant.warm_up(soon())
            facts = variant.facts()
        finally:
            variant.stop()
        assert facts["allocator"] == (name if number == 0 else "")
        assert facts["shapes_vary"] == (number == 0)
    if server is not None:
        server.stop()


def group(variant):
    """Return the state of each process of a variant."""
    found = subprocess.run(["ps", "-e", "-o", "stat=,pgid="], capture_output=True, text=True, check=True).stdout
    pairs = [line.split() for line in found.splitlines()]
    return [state[0] for state, pgid in pairs if int(pgid) == variant._process.pid]


def group_is(variant, states, seconds=120):
    """Return whether a variant's processes come to be in some states, as signals reach them one after the other."""
    end = time.monotonic() + seconds
    while not (is_so := set(group(variant)) <= states) and time.monotonic() < end:
        time.sleep(0.05)
    return is_so


@pytest.mark.sampled(slow=5)
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (foreign_run.raises, "^RuntimeError: the batch has no label"),
        (foreign_run.crashes, "^killed by SIGSEGV"),
        (foreign_run.is_killed, "^killed by SIGKILL, as the system does when memory runs out"),
        (foreign_run.takes_all_memory, "^out of memory: "),
        (foreign_run.fills_the_disk, "No space left on device"),
        (foreign_run.exits, "^SystemExit"),
        (foreign_run.leaves_without_a_word, "^ended with status 0"),
        (foreign_run.is_interrupted, "^(SystemExit|KeyboardInterrupt)"),
        (foreign_run.leaves_a_child, "^ended with status 7; its last output: a line of a trial that prints a lot"),
        (foreign_run.takes_more_than_its_limit, "^out of memory: "),
        (foreign_run.hangs, "^hangs: no step for 20 s"),
        (foreign_run.has_one_step, "^RuntimeError: the run has one training step, and steps are timed from the second"),
        (foreign_run.has_no_batch, "^RuntimeError: the run ended without a training step: is there a batch"),
        (foreign_run.returns_nothing, r"returns_nothing must return \(trainer, module, data\), .* got NoneType"),
    ],
)
def test_a_trial_that_fails_says_why(tmp_path, server, make, reason):
    """And the server outlives it."""
    variant = Variant(project_of(make), Changes(), tmp_path / "trial", server, stall_timeout=20)
    variant.start()
    try:
        with pytest.raises(TrialError, match=reason):  # noqa: PT012  # it may fail in either
            variant.warm_up(soon())
            variant.run_for(5, soon())
    finally:
        variant.stop()
    assert group_is(variant, {"Z"})


@pytest.mark.weekly
def test_nothing_frozen_stays_behind_when_the_caller_is_killed(tmp_path, any_server):
    script = (
        "import os, sys, time\n"
        "from tests.tuning import foreign_run\n"
        "from lightning_accel.tuning.project import Changes, project_of\n"
        "from lightning_accel.tuning.variant import Variant, fork_server\n"
        "from pathlib import Path\n"
        f"server = {'None' if any_server is None else 'fork_server()'}\n"
        f"variant = Variant(project_of(foreign_run.works), Changes(), Path({str(tmp_path / 'trial')!r}), server)\n"
        "variant.start()\n"
        "variant.warm_up(time.monotonic() + 600)\n"
        "print(variant._process.pid, *([server._process.pid] if server else []), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    caller = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert caller.returncode == -signal.SIGKILL, caller.stderr
    leaders = set(map(int, caller.stdout.split()))
    end = soon()
    while leaders:
        assert time.monotonic() < end, "the trial or its server is still there"
        for leader in list(leaders):
            try:
                os.killpg(leader, 0)
            except ProcessLookupError:
                leaders.remove(leader)
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.weekly
def test_losses_of_a_variant_are_those_of_the_run(tmp_path, server):
    project = project_of(foreign_run.works)

    def losses(name, changes=Changes(), perturb=False, steps=4):  # noqa: B008  # frozen
        forks = None if name == "new" else server
        return record_losses(project, changes, tmp_path / name, [0, 1], steps, soon(), perturb, forks)

    base = losses("base")
    assert losses("new") == base  # bit for bit, whether its process is forked or not
    assert [len(run) for run in base] == [4, 4]
    assert base[0] != base[1]
    moved = losses("moved", perturb=True)
    assert moved != base
    assert are_equal(base, moved, losses("fused", Changes(speedups={"fused_optimizer": True}))).passed
    rounded = losses("rounded", Changes(trainer={"precision": "bf16-mixed"}))
    assert not are_equal(base, moved, rounded).passed
    of_master_weights = losses("master", Changes(precision={"Bfloat16Precision": {}}))
    assert of_master_weights not in (base, rounded)
    torch.testing.assert_close(torch.tensor(of_master_weights), torch.tensor(base), rtol=0.02, atol=0)


@pytest.mark.weekly
def test_a_server_that_ends_is_done_without(tmp_path, server):
    one = fork_server()
    first = Variant(project_of(foreign_run.works), Changes(), tmp_path / "first", one)
    second = Variant(project_of(foreign_run.works), Changes(), tmp_path / "second", one)
    first.start()
    try:
        first.warm_up(soon())
        assert first.is_alive
        os.kill(one._process.pid, signal.SIGKILL)
        with pytest.raises(TrialError, match="killed by SIGKILL"):
            first.wait(soon())
        second.start()
        assert isinstance(second._process, subprocess.Popen)
        second.warm_up(soon())
    finally:
        first.stop()
        second.stop()
        one.stop()


def test_processes_are_new_ones_where_forks_are_unsafe(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert fork_server() is None


@pytest.mark.weekly
def test_memory_is_what_training_adds(tmp_path, server):
    """The activations of a batch, 137 MiB, are most of it; libraries, of some 400 MiB, are left out."""
    variants = [
        Variant(project_of(foreign_run.holds_activations), changes, tmp_path / name, server)
        for name, changes in (("plain", Changes()), ("saving", Changes(savings={"micro_batches": 8})))
    ]
    for variant in variants:
        variant.start()
        try:
            variant.warm_up(soon())
        finally:
            variant.stop()
    before, after = (variant.peak_bytes()[4] / 2**20 for variant in variants)
    assert 137 < before < 220
    assert after < 0.6 * before
    assert variants[0].facts()["strategy"] == "single"
    assert not variants[0].facts()["draws"]


def test_a_run_of_two_ranks_is_measured_and_frozen_as_one(tmp_path, server):
    variant = Variant(project_of(foreign_run.two_ranks), Changes(), tmp_path / "trial", server)
    variant.start()
    try:
        variant.warm_up(soon())
        for _ in range(3):
            assert variant.run_for(0.2, soon())
            assert group_is(variant, {"T"})
            assert len(group(variant)) == 2
        facts = variant.facts()
        assert (facts["world_size"], facts["items_per_step"], facts["strategy"]) == (2, 6, "ddp")
        assert sorted(path.name for path in variant.folder.glob("memory_*")) == ["memory_0.csv", "memory_1.csv"]
    finally:
        variant.stop()
    assert group_is(variant, {"Z"})


@pytest.mark.weekly
def test_ranks_may_hold_shards_in_place_of_whole_parameters(tmp_path, server):
    project = project_of(foreign_run.two_ranks)
    base, moved, sharded = (
        record_losses(project, changes, tmp_path / name, [0], 4, soon(), name == "moved", server)
        for name, changes in (
            ("base", Changes()),
            ("moved", Changes()),
            ("sharded", Changes(trainer={"strategy": "accel_fsdp2"})),
        )
    )
    assert are_equal(base, moved, sharded).passed
    assert json.loads((tmp_path / "sharded/seed_0/facts.json").read_text())["strategy"] == "sharded"


@pytest.mark.slow
@pytest.mark.weekly
def test_a_run_that_cannot_start_is_one_message(command, run_folder):
    (run_folder / "run.yaml").write_text("model: no_such_file.Net\ntrainer: {accelerator: cpu}\n")
    done = command("tune", "--config", "run.yaml", "--budget", "2m")
    assert done.status == 2
    assert "no_such_file" in done.err
    assert "Traceback" not in done.err


def test_a_function_that_processes_cannot_import_is_rejected():
    with pytest.raises(ValueError, match=r"top level of a \.py file"):
        tune(lambda **options: None)
