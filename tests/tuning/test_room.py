"""Memory for variants: what cannot fit is not tried, and what fits alone takes turns in it."""

import time
from collections import Counter

import pytest
import torch

from lightning_accel.planning import Cluster, Device, simulate_step
from lightning_accel.tuning import measurer
from lightning_accel.tuning import variants as variants_module
from lightning_accel.tuning.comparison import Ratio, compare
from lightning_accel.tuning.factors import Factor
from lightning_accel.tuning.planned_step import planned_bytes
from lightning_accel.tuning.project import Changes, Project, project_of
from lightning_accel.tuning.room import Room, room_of
from lightning_accel.tuning.search import Search
from lightning_accel.tuning.variant import NotReadyError, Step, TrialError, Variant, fork_server
from lightning_accel.tuning.variants import Variants
from tests.tuning import foreign_run
from tests.tuning.test_search import World, journal_of, run

GB = 10**9
LARGER = {size: Changes(batching={"batch_size_factor": size}) for size in (2, 4, 8)}
WHOLE = Changes(trainer={"strategy": "ddp"})


@pytest.fixture(scope="module")
def server():
    one = fork_server()
    yield one
    if one is not None:
        one.stop()


def plan_of(table):
    """Return a plan by a table, and the number of times that it was asked for each entry."""
    asked = Counter()

    def plan(changes):
        asked[str(changes)] += 1
        return table.get(str(changes))

    return plan, asked


def test_what_needs_more_than_is_free_is_told_apart_by_plans():
    plan, asked = plan_of({str(Changes()): 2 * GB, str(LARGER[4]): 7 * GB, str(LARGER[8]): 15 * GB, str(WHOLE): 9 * GB})
    room = Room(free=12 * GB, held=4 * GB, world_size=2, plan=plan)
    assert not room.why_not(LARGER[2])
    assert not room.why_not(WHOLE)
    assert room.is_enough_for([Changes(), WHOLE])
    assert room.needed(Changes(trainer={"strategy": "accel_fsdp2"})) == room.needed(Changes()) == 4 * GB
    assert not asked  # since these fit anyway
    assert room.needed(LARGER[2]) == 4 * GB  # of which there is no plan
    assert room.needed(LARGER[4]) == 9 * GB
    assert room.needed(LARGER[4] | Changes(speedups={"compile": "children"}, batching={"padding": "trimmed"})) == 9 * GB
    assert not room.why_not(LARGER[4])
    assert room.why_not(LARGER[8]) == "by the plan of its step it needs 15.8 GiB of memory, and 11.2 GiB are free"
    assert room.is_enough_for([Changes(), Changes(), Changes()])
    assert not room.is_enough_for([Changes(), LARGER[4]])
    tight = Room(free=7 * GB, held=4 * GB, world_size=2, plan=plan)
    assert tight.why_not(WHOLE)
    assert not tight.why_not(LARGER[2])  # whose step cannot be planned, so that a trial has to tell
    full = Room(free=3 * GB, held=4 * GB, world_size=1, plan=plan_of({})[0])
    assert not full.why_not(Changes(speedups={"compile": "children"}))  # since the run itself has fitted


def test_memory_is_that_of_all_processes():
    facts = {"device": "cpu", "world_size": 3, "resident_bytes": 100}
    assert room_of(facts, 50, 1000) == {"free": 1000, "held": 350}
    assert room_of(facts, 50, None) is None
    facts = {"device": "cuda", "world_size": 2, "resident_bytes": 0, "free_device_bytes": 10 * 2**30}
    assert room_of(facts, 10 * 2**30, 1) == {"free": 20 * 2**30, "held": 13 * 2**30}  # by the rules of plans
    assert room_of({"device": "cuda", "world_size": 2}, 0, 1) is None  # where latency is measured


def test_a_search_leaves_out_what_cannot_fit(monkeypatch, tmp_path):
    """The run holds 5 GB of 9; plans are made once, also where the search goes on."""
    world = World(monkeypatch)
    world.free = 9 * GB
    world.planned = {"[]": 4 * GB, "['x2']": 6 * GB, "['x4']": 13 * GB, "['x8']": "LossError: no step"}
    world.speed |= {"x2": 1.1, "x4": 3.0, "x8": 1.2}
    outcome = run(tmp_path, allow=("batch_size",))
    refused = {one.name: one.reason for one in outcome.refused}
    assert refused["batch_size x 4"].startswith("by the plan of its step it needs 13.0 GiB of memory")
    assert "batch_size x 2" in outcome.alone
    assert "batch_size x 8" in outcome.alone
    assert not any("x4" in world.names(changes) for changes in world.started)
    assert Changes() in world.put_away
    plans = [name for name in journal_of(tmp_path) if name.startswith("plan")]
    assert sorted(plans) == ["plan of a step"] + [
        f"plan of a step with {{'batch_size_factor': {size}}}" for size in (2, 4, 8)
    ]
    world.planned = {}  # asked again, it would fail
    assert {one.name: one.reason for one in run(tmp_path, allow=("batch_size",)).refused} == refused


def test_nothing_is_frozen_beside_processes_for_which_there_is_no_room(monkeypatch, tmp_path):
    """Those that record losses, and those that prove a saving; the run holds 5 GB of 9."""
    world = World(monkeypatch)
    world.free, frozen = 9 * GB, []

    def seen(result):
        def record(*arguments):
            frozen.append(sum(one.is_alive and not one.is_put_away for one in world.variants))
            return result(*arguments)

        return record

    monkeypatch.setattr(measurer, "record_losses", seen(world.record))
    monkeypatch.setattr(measurer, "prove_saving", seen(lambda *_: Ratio(2.0, 1.9, 2.1, 4)))
    search = Search(Project("nobody:runs", {}), tmp_path, 600.0, {"of": "a test"}, "memory")
    search.measurer.measure_baseline()
    recompute = Changes(savings={"activation_checkpointing": True})
    search.measurer.judge([Factor("recompute", "recompute", "exact", recompute)], exactly=True)
    assert len(frozen) == 3
    search.measurer.measure("proof recompute", Changes(), recompute, least=8, most=40)
    assert frozen == [0] * 4


def soon():
    return time.monotonic() + 200


@pytest.mark.slow
@pytest.mark.weekly
def test_variants_that_do_not_fit_beside_each_other_take_turns_alone(tmp_path, server, monkeypatch):
    """Each starts again for its turn; where there is room, both stay."""
    if server is not None:
        monkeypatch.setattr(server, "stop", lambda: None)  # other tests use it
        monkeypatch.setattr(variants_module, "fork_server", lambda allocator: server)
    variants = Variants(project_of(foreign_run.works), tmp_path / "trials")
    fused = Changes(speedups={"fused_optimizer": True})
    try:
        one, _ = variants.warm(Changes(), soon())
        assert 100 * 2**20 < one.facts()["resident_bytes"] < 4 * 2**30  # of the interpreter and its libraries
        assert one.facts()["free_device_bytes"] is None
        variants.room = Room(free=5 * GB, held=2 * GB, world_size=1, plan=lambda changes: None)
        other, _ = variants.warm(fused, soon())
        assert not one.is_put_away
        variants.forget(fused)
        variants.room = Room(free=3 * GB, held=2 * GB, world_size=1, plan=lambda changes: None)
        other, _ = variants.warm(fused, soon())
        assert one.is_put_away
        for turn, away in ((one, other), (other, one), (other, one)):
            assert len(turn.run_for(0.05, soon())) > 1
            assert (turn.is_put_away, away.is_put_away) == (False, True)
            assert turn.is_alive
            assert away.is_alive  # as far as a search is concerned
            assert not variants.has_lost(Changes())
        variants.make_room(fused)  # such as for losses
        assert other.is_put_away
        assert 1 in one.peak_bytes()
        variants.forget(fused)
        assert fused not in variants
    finally:
        variants.stop()
    assert not (tmp_path / "trials").exists()


@pytest.mark.weekly
@pytest.mark.slow
def test_turns_are_kept_where_the_next_start_does_not_fit_into_the_budget(tmp_path, server, monkeypatch):
    """And what had no time to warm up does not count as warm."""
    variant = Variant(project_of(foreign_run.works), Changes(), tmp_path / "one", server)
    variant.put_away()
    with pytest.raises(NotReadyError):
        variant.restart(tmp_path / "two", time.monotonic())
    assert variant.is_put_away
    assert variant.is_alive
    variant.stop()
    turns = iter([*[[Step(0.0, 0.1, 0.0, 0.0)] * 3] * 6, None])

    class Turns:
        def run_for(self, seconds, deadline):
            if (steps := next(turns)) is None:
                raise NotReadyError("not ready")
            return steps

    options = {"width": 0.0, "most": 9, "seconds": 0.1, "deadline": soon(), "needed": 0.0}
    assert compare(Turns(), Turns(), least=3, **options).turns == 3
    turns = iter([[Step(0.0, 0.1, 0.0, 0.0)] * 3, None])
    with pytest.raises(NotReadyError):
        compare(Turns(), Turns(), least=3, **options)


@pytest.mark.slow
def test_a_planned_step_needs_as_much_as_one_that_trains(tmp_path, server):
    """Twice the samples add half of what four times as many add: activations and the batch, float32.

    A config, a function, one process and two of them.
    """
    facts = {"device": "cpu", "world_size": 1}
    base = project_of(foreign_run.is_wide)
    found = {
        size: planned_bytes(base, changes, facts, tmp_path / f"{size}", soon(), server)
        for size, changes in {1: Changes(), 2: LARGER[2], 4: LARGER[4]}.items()
    }
    weights = 4 * (300 * 300 + 300)
    assert found[1] > 4 * weights  # with gradients and two states of Adam
    assert found[4] - found[2] == 2 * (found[2] - found[1])
    device = Device("", 0, {"fp32": 1.0}, 1.0, 1.0, 1.0, is_gpu=False)
    alone = simulate_step(lambda options, fit: fit(*foreign_run.is_wide(**options)), Cluster(device, 1), {}, tmp_path)
    assert found[1] == alone.peak
    facts["world_size"] = 2
    ranks = planned_bytes(base, Changes(trainer={"strategy": "ddp"}), facts, tmp_path / "ddp", soon(), server)
    assert ranks > 2 * found[1]  # buckets of gradients


@pytest.mark.weekly
@pytest.mark.slow
def test_a_step_of_a_config_is_planned(tmp_path, server):
    arguments = ["--model=MoEClassifier", "--data=DigitsDataModule", "--trainer.accelerator=cpu"]
    config = Project("lightning_accel.cli.tune:fit_config", {"arguments": arguments})
    facts = {"device": "cpu", "world_size": 1}
    small, large = (
        planned_bytes(config, changes, facts, tmp_path / str(number), soon(), server)
        for number, changes in enumerate((Changes(), LARGER[8]))
    )
    assert small < large < 8 * small
    with pytest.raises(TrialError, match="ended the process before its step was planned"):
        planned_bytes(
            project_of(foreign_run.ends_before_it_begins), Changes(), facts, tmp_path / "ends", soon(), server
        )
    broken = project_of(foreign_run.returns_nothing)
    with pytest.raises(TrialError, match=r"must return \(trainer, module, data\)"):
        planned_bytes(broken, Changes(), facts, tmp_path / "broken", soon(), server)


@pytest.mark.gpu
def test_the_room_on_a_gpu_is_what_is_free_before_the_module_is_there(tmp_path):
    variants = Variants(project_of(foreign_run.works_on_a_gpu), tmp_path / "trials")
    try:
        variant, _ = variants.warm(Changes(), soon())
        facts = variant.facts()
    finally:
        variants.stop()
    total = torch.cuda.get_device_properties(0).total_memory
    assert total / 4 < facts["free_device_bytes"] < total
    assert facts["resident_bytes"] == 0
