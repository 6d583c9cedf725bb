"""Decisions of a search whose variants are as fast as a table says."""

import json
import re
import time
from dataclasses import astuple, replace
from unittest.mock import Mock

import pytest
import yaml
from torch import nn

from lightning_accel.callbacks import SemiStructuredSparsity
from lightning_accel.tuning import factors, measurer, variants
from lightning_accel.tuning.choices import ALLOWABLE
from lightning_accel.tuning.comparison import Ratio, Shares
from lightning_accel.tuning.factors import Factor, Refusal, factors_for, float8_for, sparsity_for
from lightning_accel.tuning.learning import learning_changes_for, require_known
from lightning_accel.tuning.outcome import Measurement
from lightning_accel.tuning.parity import Verdict
from lightning_accel.tuning.project import Changes, Project
from lightning_accel.tuning.recorder import has_dropout
from lightning_accel.tuning.savings import savings_for
from lightning_accel.tuning.search import Search
from lightning_accel.tuning.variant import NotReadyError, Step, TrialError
from lightning_accel.tuning.writing import overlay, why_nothing, write_outcome

clock = time.monotonic
FACTS = {
    "device": "cpu",
    "code": {"files": [], "packages": []},
    "precision": "32-true",
    "planned_steps": 10_000,
    "items_per_step": 8,
    "world_size": 1,
    "strategy": "single",
    "ddp": {},
    "automatic_optimization": True,
    "has_batch_norms": False,
    "num_repeated": 4,
    "batch_norms_in_blocks": False,
    "draws": False,
    "threads": 2,
    "allocator": "",
    "shapes_vary": False,
    "cores": 2,
    "bfloat16_units": True,
    "num_conv2d": 3,
    "has_dropout": False,
    "has_attention": False,
    "num_deferrable_attentions": 1,
    "num_fusible_rnns": 1,
    "num_fusible_convolutions": 1,
    "num_children": 1,
    "num_blocks": 4,
    "larger_batches": {str(factor): {"reason": "", "samples": 0.9 * factor} for factor in (2, 4, 8)},
    "not_bucketed": "all samples are equally long",
    "not_padded": {"trimmed": "no mask", "packed": "no mask"},
    "not_float8": "a cpu device",
    "not_sparsifiable": "no kernels",
    "fusible_optimizers": ["Adam"],
    "fused": False,
    "loaders": [
        {
            "num_workers": 0,
            "persistent_workers": False,
            "prefetch_factor": 0,
            "pin_memory": False,
            "is_iterable": False,
            "by_sample": "",
        }
    ],
}


SHARES = Shares(data=0.2, optimizer=0.1, system=0.05)


class World:
    """Speeds and memory of changes, which multiply; what fails; and how long each takes to start."""

    def __init__(self, monkeypatch, facts=FACTS):
        self.speed = {"compile": 1.5, "precision": 1.4, "channels_last": 0.8}
        self.bytes = {"micro_batches": 0.4, "activation_checkpointing": 0.6, "precision": 0.8}
        self.fails, self.start_seconds, self.needed = {}, {}, {}
        self.unequal, self.different, self.pairs = set(), set(), {}
        self.started, self.variants, self.interrupt_at = [], [], None
        self.seeds, self.recorded_from, self.deciding_seeds = [], [], 5
        self.turns = set()
        self.num_steps, self.samples = {}, {}
        self.passed_seconds, self.seed_seconds = 0.0, 0.0
        self.free, self.planned, self.put_away = 2**50, {}, []
        monkeypatch.setattr(measurer, "free_memory_bytes", lambda: self.free)
        monkeypatch.setattr(measurer, "planned_bytes", self.plan)
        monkeypatch.setattr(measurer.time, "monotonic", lambda: clock() + self.passed_seconds)
        world = self

        class Stub:
            def __init__(self, project, changes, folder, server):
                self.changes, self.server = changes, server
                self.is_alive, self.is_put_away = True, False
                world.variants.append(self)

            def start(self):
                world.started.append(self.changes)
                if len(world.started) == world.interrupt_at:
                    raise KeyboardInterrupt

            def warm_up(self, deadline):
                names = world.names(self.changes)
                for name in names:
                    if name in world.fails:
                        self.is_alive = False
                        raise TrialError(world.fails[name])
                seconds = 5.0 + sum(world.start_seconds.get(name, 0) for name in names)
                if seconds > (waited := deadline - time.monotonic()):
                    world.passed_seconds += waited
                    raise NotReadyError("not ready within its share of the budget")
                return seconds

            def run_for(self, seconds, deadline):
                duration = 0.1 / world.speed_of(self.changes)
                return [Step(0.0, duration, 0.2 * duration, 0.0, 0.1 * duration)] * 4

            def peak_bytes(self):
                product = 1e9
                for name in world.names(self.changes):
                    product *= world.bytes.get(name, 1.0)
                return {1: 1, 4: product, 8 if self.changes == Changes() else 2: 5e9}

            def facts(self):
                return dict(facts)

            def put_away(self):
                self.is_put_away = True
                world.put_away.append(self.changes)

            def stop(self):
                self.is_alive = False

        def compare(reference, variant, *, needed, samples, seconds, rate=None, **_):
            self.turns.add(seconds)
            for one in (reference, variant) if rate else ():
                rate(one, one.run_for(1.0, 0.0))
            self.samples[str(self.names(variant.changes))] = samples
            self.needed[str(self.names(variant.changes))] = needed
            value = world.speed_of(variant.changes) / world.speed_of(reference.changes)
            return Ratio(value, value * 0.98, value * 1.02, 5)

        monkeypatch.setattr(variants, "Variant", Stub)
        monkeypatch.setattr(variants, "fork_server", lambda allocator: None)
        monkeypatch.setattr(measurer, "compare", compare)
        monkeypatch.setattr(measurer, "record_losses", self.record)
        monkeypatch.setattr(
            measurer, "are_equal", lambda base, moved, other: self.judge(other, self.unequal | self.different)
        )
        monkeypatch.setattr(measurer, "are_equivalent", self.judge_seeds)

        class Outputs:
            def __init__(self, record):
                pass

            def judge(self, changes, exactly):
                deviating = world.unequal | (world.different if exactly else set())
                pairs = any(pair <= set(world.names(changes)) for pair in world.deviating_pairs)
                return Verdict(not pairs and not deviating & set(world.names(changes)), "by the table")

        self.deviating_pairs = []
        monkeypatch.setattr(measurer, "OutputComparison", Outputs)

    def record(self, project, changes, folder, seeds, num_steps, deadline, perturb, server):
        self.recorded_from.append((changes, server))
        self.seeds.append((str(self.names(changes)), list(seeds)))
        self.num_steps[str(self.names(changes))] = num_steps
        left = deadline - time.monotonic()
        self.passed_seconds += min(left, self.seed_seconds * len(seeds))
        if self.seed_seconds * len(seeds) > left:
            raise TrialError("not finished within the budget")
        return [self.names(changes)] * len(seeds)

    def plan(self, project, changes, facts, folder, deadline, server):
        assert facts["world_size"] == 1
        found = self.planned[str(self.names(changes))]
        if isinstance(found, str):
            raise TrialError(found)
        return found

    def judge_seeds(self, base, other):
        assert len(base) == len(other)
        if len(base) < self.deciding_seeds:
            return Verdict(False, "by the table", is_open=True)
        return self.judge(other, self.unequal)

    @staticmethod
    def names(changes):
        larger = [f"x{size}" for size in changes.batching.values()]
        return [*changes.trainer, *changes.speedups, *changes.savings, *changes.ddp, *changes.precision, *larger]

    def speed_of(self, changes):
        product = 1.0
        for name in self.names(changes):
            product *= self.speed.get(name, 1.0)
        for pair, factor in self.pairs.items():
            product *= factor if pair <= set(self.names(changes)) else 1.0
        return product

    @staticmethod
    def judge(losses, deviating):
        return Verdict(not deviating & set(losses[0]), "by the table")


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


def run(folder, budget=600.0, identity=None, goal="speed", allow=()):
    project = Project("nobody:runs", {"serves": True} if goal == "latency" else {})
    one = Search(project, folder, budget, identity or {"of": "a test"}, goal, allow)
    return one.run()


def names(outcome):
    return sorted(factor.group for factor in outcome.chosen)


@pytest.mark.slow
def test_winners_are_joined_and_losers_are_not(world, tmp_path):
    outcome = run(tmp_path)
    assert names(outcome) == ["compile", "precision"]
    assert outcome.is_faster
    assert outcome.proof.ratio.value == pytest.approx(1.5 * 1.4)
    assert outcome.alone["channels_last"].reason == "not faster"
    assert outcome.alone["fused_optimizer"].reason == "no difference that the interval shows"


@pytest.mark.parametrize(("budget", "chosen"), [(240, ["precision"]), (2400, ["compile", "precision"])])
def test_what_starts_too_slowly_to_be_proven_gives_way_to_what_can_be(world, tmp_path, budget, chosen):
    """Compiled layers are faster alone, and start for 60 s: five of these starts, and nothing would be proven."""
    world.start_seconds = {"compile": 55}
    outcome = run(tmp_path, budget)
    assert names(outcome) == chosen
    assert outcome.is_faster
    refused = {one.name: one.reason for one in outcome.refused if "prove" in one.reason}
    if budget < 1000:
        assert set(refused) == {"compile=children"}
        assert outcome.num_cut >= 1
        assert "it starts for 60 s each time" in refused["compile=children"]
        assert not any({"compile", "precision"} <= set(world.names(one)) for one in world.started)
    else:
        assert not refused


def test_a_search_that_has_ended_gives_the_same_when_its_time_is_over(world, tmp_path):
    world.start_seconds = {"compile": 55}
    first = run(tmp_path, 2400)
    with open(tmp_path / "journal.jsonl", "a") as file:
        file.write(json.dumps({"name": "another", "cut_at": None, "result": {"seconds": 2300.0}}) + "\n")
    again = run(tmp_path, 2400)
    assert names(first) == names(again) == ["compile", "precision"]


def test_without_a_winner_changes_alone_are_tried_for_longer(world, tmp_path):
    world.speed, found = {"compile": 1.5}, {}
    for is_early in (False, True):
        world.speed["precision"] = 1.1 if is_early else 0.9
        world.passed_seconds = 0.0
        begin = measurer.Measurer.may_begin

        def slow(self, name, until, begin=begin):
            world.passed_seconds += 16  # each measurement, of 300 s
            return begin(self, name, until)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(measurer.Measurer, "may_begin", slow)
            found[is_early] = run(tmp_path / str(is_early), 300.0)
    assert len(found[True].alone) == 8
    assert len(found[False].alone) > 10


@pytest.fixture
def workers(world, monkeypatch):
    """Return the speeds of numbers of workers, which have a world of their own."""
    speeds = {1: 1.3, 2: 1.32}
    monkeypatch.setattr(World, "speed_of", lambda self, one: speeds.get(one.speedups.get("num_workers"), 1.0))
    return speeds


def test_of_a_group_the_simplest_is_taken_that_none_is_shown_to_beat(workers, tmp_path):
    """Intervals reach 2 % to both sides."""
    assert run(tmp_path / "overlap").changes == Changes(speedups={"num_workers": 1})
    workers[2] = 1.36
    assert run(tmp_path / "apart").changes == Changes(speedups={"num_workers": 2})
    workers[2] = 1.2
    assert run(tmp_path / "slower").changes == Changes(speedups={"num_workers": 1})


def test_ties_are_of_whole_runs_with_their_starts(monkeypatch, tmp_path):
    """1000 steps take 100 s: blocks, as fast as all children within the interval, compile 10 s faster."""
    world = World(monkeypatch, FACTS | {"planned_steps": 1000})
    world.speed = {"children": 1.52, "blocks": 1.5}
    world.start_seconds = {"children": 20, "blocks": 10}
    monkeypatch.setattr(World, "names", staticmethod(lambda changes: [*changes.speedups.values()]))
    assert run(tmp_path / "starts").changes == Changes(speedups={"compile": "blocks"})
    world.start_seconds = {"children": 10, "blocks": 10}
    assert run(tmp_path / "tie").changes == Changes(speedups={"compile": "children"})


def test_an_interrupted_search_hands_back_the_simplest_of_the_fastest(world, workers, tmp_path):
    run(tmp_path / "whole")
    world.interrupt_at = len(world.started) + world.started.index(Changes(speedups={"num_workers": 2})) + 2
    one = Search(Project("nobody:runs", {}), tmp_path / "parts", 600.0, {"of": "a test"})
    with pytest.raises(KeyboardInterrupt):
        one.run()
    assert one.outcome.changes == Changes(speedups={"num_workers": 1})


def test_what_the_others_make_useless_is_left_out_again(world, tmp_path, monkeypatch):
    monkeypatch.setattr(World, "speed_of", lambda self, changes: 1.5 if self.names(changes) else 1.0)
    world.speed = {}
    outcome = run(tmp_path)
    assert len(outcome.chosen) == 1
    assert len(outcome.without) > 2


@pytest.mark.slow
def test_a_change_that_helps_only_beside_others_is_added(world, tmp_path):
    world.speed = {"precision": 1.4, "channels_last": 0.95, "fused_optimizer": 0.8}
    world.pairs = {frozenset({"precision", "channels_last"}): 1.3, frozenset({"precision", "fused_optimizer"}): 2.0}
    outcome = run(tmp_path)
    assert names(outcome) == ["channels_last", "precision"]  # what is far slower alone is not tried again
    assert outcome.added["channels_last"].ratio.value == pytest.approx(0.95 * 1.3)
    assert "fused_optimizer" not in outcome.added
    overlay, report, *_ = write_outcome(outcome, tmp_path, "a test", "today")
    assert "| channels_last | 1.23 " in report.read_text()
    assert "channels_last: true  # beside the others 1.23 " in overlay.read_text()


def test_small_gains_that_intervals_leave_undecided_are_taken_together(world, tmp_path):
    world.speed = {
        "precision": 1.4,
        "channels_last": 1.014,
        "fused_optimizer": 1.013,
        "keep_freed_memory": 0.999,
        "native_dropout": 1.01,
    }
    outcome = run(tmp_path)  # intervals reach 2 % to either side
    assert names(outcome) == ["channels_last", "optimizer", "precision"]
    assert not outcome.added["fused_optimizer"].wins
    assert outcome.added["channels_last, fused_optimizer"].ratio.value == pytest.approx(1.014 * 1.013)
    world.speed["fused_optimizer"] = 1.002
    outcome = run(tmp_path / "less")
    assert names(outcome) == ["precision"]
    assert outcome.added["channels_last, fused_optimizer"].reason == "no difference that the interval shows"
    world.speed = {"channels_last": 1.015, "fused_optimizer": 1.015}
    outcome = run(tmp_path / "alone")
    assert names(outcome) == ["channels_last", "optimizer"]
    assert outcome.is_faster


def test_an_added_compilation_has_to_pay_within_the_planned_run(monkeypatch, tmp_path):
    world = World(monkeypatch, FACTS | {"planned_steps": 1000})  # 100 s as it is, 71 s in fewer digits
    world.speed = {"precision": 1.4, "compile": 0.95}
    world.pairs, world.start_seconds = {frozenset({"precision", "compile"}): 1.3}, {"compile": 20}
    outcome = run(tmp_path)
    assert names(outcome) == ["precision"]
    assert outcome.added["compile=children"].over_run == pytest.approx(1 / (1 / (0.95 * 1.3) + 20 * 1.4 / 100))


def test_both_of_two_changes_are_kept_without_another_trial_where_they_were_shown_to_be_needed(world, tmp_path):
    outcome = run(tmp_path / "apart")
    assert outcome.without["compile=children"].ratio.value == pytest.approx(1 / 1.5)
    assert not [name for name in journal_of(tmp_path / "apart") if name.startswith("without")]
    world.pairs = {frozenset({"compile", "precision"}): 1.02 / 1.4}  # compilation leaves little to fewer digits
    outcome = run(tmp_path / "close")
    assert journal_of(tmp_path / "close").count(
        "without precision=bf16-mixed of compile=children, precision=bf16-mixed"
    )
    assert names(outcome) == ["compile", "precision"]


def journal_of(folder):
    lines = (folder / "journal.jsonl").read_text().splitlines()
    return [json.loads(line)["name"] for line in lines[1:]]


def test_variants_that_go_on_are_started_once(world, tmp_path):
    """What remains when another change is taken out, and what is added, is what is measured next."""
    world.speed = {"compile": 1.5, "precision": 1.4, "num_workers": 1.2, "channels_last": 0.95}
    world.pairs = {
        frozenset({"num_workers", "precision"}): 1 / 1.2,
        frozenset({"channels_last", "compile"}): 1.3,
    }
    outcome = run(tmp_path)
    assert names(outcome) == ["channels_last", "compile", "precision"]
    assert world.started.count(outcome.changes) == 1
    without_workers = Changes({"precision": "bf16-mixed"}, {"compile": "children"})
    assert world.started.count(without_workers) == 1


def test_a_start_that_does_not_pay_beside_the_others_is_not_waited_for(monkeypatch, tmp_path):
    """The run trains for 100 s, with fewer digits for 25, and starts for 5: 40 more seconds never pay there."""
    world = World(monkeypatch, FACTS | {"planned_steps": 1000})
    world.speed, world.start_seconds = {"precision": 4.0, "compile": 0.95}, {"compile": 40}
    outcome = run(tmp_path)
    assert names(outcome) == ["precision"]
    assert outcome.alone["compile=children"].ratio
    assert outcome.added["compile=children"].reason == "starts for longer than the run trains with the others"
    world.start_seconds = {"compile": 15}  # 10 of 25 s remain to be made up for
    run(tmp_path / "shorter")
    assert world.needed["['precision', 'compile']"] == pytest.approx(1 / (1 - 15 / 25))


@pytest.mark.slow
def test_a_failing_change_is_a_row_and_the_rest_goes_on(world, tmp_path):
    world.fails = {"compile": "killed by SIGSEGV"}
    outcome = run(tmp_path)
    assert names(outcome) == ["precision"]
    assert outcome.alone["compile=children"].reason == "killed by SIGSEGV"
    assert "killed by SIGSEGV" in (write_outcome(outcome, tmp_path, "a test", "today")[1]).read_text()


def test_changes_whose_losses_are_not_equivalent_are_dropped(world, tmp_path):
    world.unequal = {"precision"}
    outcome = run(tmp_path / "rounding")
    assert names(outcome) == ["compile"]
    assert [verdict.passed for verdict in outcome.verdicts] == [True, False]
    world.unequal = {"compile"}
    outcome = run(tmp_path / "exact")
    assert names(outcome) == ["precision"]
    assert outcome.verdicts[-1].passed


def test_exact_changes_that_draw_otherwise_have_to_be_equivalent(world, tmp_path):
    """As dropout does in memory of another order."""
    world.speed = {"compile": 1.5, "channels_last": 1.2}
    world.different = {"channels_last"}
    outcome = run(tmp_path)
    assert names(outcome) == ["channels_last", "compile"]
    assert {factor.group: factor.kind for factor in outcome.chosen} == {"channels_last": "random", "compile": "exact"}


def test_seeds_are_added_until_they_decide(world, tmp_path):
    world.deciding_seeds = 20
    assert names(run(tmp_path)) == ["compile", "precision"]
    compared = [seeds for changed, seeds in world.seeds if "precision" in changed]
    assert compared == [list(range(5)), list(range(5, 10)), list(range(10, 20))]
    assert world.num_steps["['precision', 'compile']"] == 30
    before = len(world.seeds)
    world.deciding_seeds = 40
    journal = tmp_path / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(one for one in lines if '"equivalent ' not in one and "10 to 19" not in one))
    assert names(run(tmp_path)) == ["compile", "precision"]  # as if it had been killed in the last look
    assert [seeds for _, seeds in world.seeds[before:]] == [list(range(10, 20))] * 2 + [list(range(20, 40))] * 2


@pytest.mark.parametrize(("budget", "num_steps"), [(200.0, 20), (100.0, 12)])
def test_steps_of_five_seeds_take_a_twentieth_of_the_budget(world, tmp_path, budget, num_steps):
    """A step takes 0.1 s; 12 are the least."""
    run(tmp_path, budget)
    assert world.num_steps["['precision', 'compile']"] == num_steps


@pytest.mark.parametrize(("budget", "seconds"), [(60, 0.5), (900, 1.5), (9000, 5.0)])
def test_turns_are_longer_where_there_is_time(world, tmp_path, budget, seconds):
    run(tmp_path, budget=budget)
    assert world.turns == {seconds}


def test_seeds_end_with_the_budget(world, tmp_path):
    world.deciding_seeds = 40
    world.seed_seconds = 7.0  # twenty take 280 of 600 s, as twenty more would
    outcome = run(tmp_path)
    assert names(outcome) == ["compile"]
    verdict = outcome.verdicts[1]
    assert not verdict.passed
    assert verdict.reason.endswith("by the table; the budget did not suffice for more seeds")
    assert max(seeds[-1] for _, seeds in world.seeds) == 19


def test_of_changes_that_deviate_together_those_that_deviate_alone_are_dropped(world, tmp_path):
    world.speed = {"compile": 1.5, "precision": 1.4, "num_workers": 1.3}
    world.unequal = {"precision"}
    assert names(run(tmp_path)) == ["compile", "num_workers"]


def test_compilation_has_to_pay_within_the_planned_run(monkeypatch, tmp_path):
    """1000 steps take 100 s; a third of it is saved, but 40 s are compiled."""
    world = World(monkeypatch, FACTS | {"planned_steps": 1000})
    world.start_seconds = {"compile": 40}
    outcome = run(tmp_path)
    assert names(outcome) == ["precision"]
    found = outcome.alone["compile=children"]
    assert found.over_run == pytest.approx(100 / (100 / 1.5 + 40))
    assert found.reason == "pays after 1200 steps; the run has 1000"


@pytest.mark.slow
def test_nothing_is_handed_back_that_is_not_faster(world, tmp_path):
    world.speed = {"precision": 1.01}
    (tmp_path / "tuned.yaml").write_text("of an earlier search")
    outcome = run(tmp_path)
    assert not outcome.is_faster
    assert "Nothing was found" in write_outcome(outcome, tmp_path, "a test", "today")[0].read_text()
    assert not (tmp_path / "tuned.yaml").exists()


def test_a_run_that_does_not_work_as_it_is_ends_the_search(world, tmp_path, monkeypatch):
    monkeypatch.setattr(variants.Variant, "warm_up", Mock(side_effect=TrialError("no data")))
    with pytest.raises(TrialError, match="no data"):
        run(tmp_path)


@pytest.mark.slow
def test_an_interrupted_search_goes_on_and_decides_alike(world, tmp_path):
    whole = run(tmp_path / "whole")
    for interruption in range(3):
        world.interrupt_at = len(world.started) + 3
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "parts")
        assert len((tmp_path / "parts/journal.jsonl").read_text().splitlines()) > 1 + interruption
    with open(tmp_path / "parts/journal.jsonl", "a") as file:
        file.write('{"name": "half a li')
    world.interrupt_at, before = None, len(world.started)
    parts = run(tmp_path / "parts")
    assert parts.changes == whole.changes
    assert len(world.started) - before < before  # what was measured is not measured again
    assert run(tmp_path / "parts").changes == whole.changes


@pytest.mark.slow
def test_an_interrupted_search_hands_back_the_best_so_far(world, tmp_path):
    world.interrupt_at = 5
    one = Search(Project("nobody:runs", {}), tmp_path, 600.0, {"of": "a test"})
    with pytest.raises(KeyboardInterrupt):
        one.run()
    assert names(one.outcome) == ["precision"]
    assert one.outcome.is_faster
    assert "interrupted" in one.outcome.verdicts[-1].reason
    files = write_outcome(one.outcome, tmp_path, "a test", "2030-01-02")[:2]
    assert all("times as fast, NOT YET COMPARED" in file.read_text() for file in files)
    world.interrupt_at = None
    files = write_outcome(run(tmp_path), tmp_path, "a test", "2030-01-02")[:2]
    assert not any("NOT YET COMPARED" in file.read_text() for file in files)


@pytest.mark.slow
def test_what_is_not_shown_to_be_better_is_no_change_to_take(world, tmp_path):
    outcome = run(tmp_path)
    assert outcome.changes != Changes()
    outcome.proof = Measurement(Ratio(1.2, 0.9, 1.5, 8), over_run=1.2)
    assert outcome.changes == Changes()
    outcome.refused.append(Refusal("other", "the budget did not suffice"))
    report = write_outcome(outcome, tmp_path, "a test", "2030-01-02")[0].read_text()
    assert "times as fast, alone, and not shown to be at the end; of the measurements" in report
    assert " Nothing is changed." in report
    names = " and ".join(f"`{one.name}`" for one in outcome.chosen)
    assert f"At the end, {names} together were measured as 1.20 (0.90 to 1.50) times." in report


def test_want_of_time_is_told_from_want_of_speed(world, tmp_path):
    world.speed = {}
    nothing = run(tmp_path / "nothing")
    assert why_nothing(nothing) == "nothing was found that makes this run faster by more than the interval"
    world.start_seconds = {"threads": 90}
    short = run(tmp_path / "short", budget=60.0)
    assert short.num_cut == 1
    assert why_nothing(short).startswith(
        "nothing was shown within the budget that makes this run faster: of the measurements, 1 were left out"
    )
    world.speed, world.seed_seconds = {"precision": 1.4}, 1000
    unproven = why_nothing(run(tmp_path / "unproven"))
    assert ": precision=bf16-mixed was 1.40 (1.37 to 1.43) times as fast, without a proof; of the meas" in unproven
    with pytest.raises(NotReadyError, match=r"not trained a few steps within the budget of 3 s: give more"):
        run(tmp_path / "none", budget=3.0)


def test_a_run_without_a_loss_is_not_tuned(monkeypatch, tmp_path):
    World(monkeypatch, FACTS | {"bad_loss": "the loss is nan"})
    with pytest.raises(TrialError, match=r"^in the first step of the run as it is, the loss is nan$"):
        run(tmp_path)


def test_a_start_that_no_speed_makes_up_for_is_not_waited_for(monkeypatch, tmp_path):
    """The run trains for 10 s, and starts for 5."""
    world = World(monkeypatch, FACTS | {"planned_steps": 100})
    world.start_seconds = {"compile": 12, "channels_last": 5}
    outcome = run(tmp_path)
    assert outcome.alone["compile=children"].reason == "starts for longer than the whole run trains"
    assert world.needed["['channels_last']"] == pytest.approx(2)  # 5 s of 10 remain
    assert world.needed["['precision']"] == 1
    assert names(outcome) == ["precision"]


def test_measurements_of_another_run_are_not_mixed(world, tmp_path):
    run(tmp_path)
    with pytest.raises(ValueError, match=r"another run.*choose another by --output, output= in Python"):
        run(tmp_path, identity={"of": "another"})


@pytest.mark.slow
def test_the_overlay_says_what_each_line_gained(world, tmp_path):
    overlay, report, whole, _ = write_outcome(run(tmp_path), tmp_path, "lightning-accel tune", "2030-01-02")
    content = yaml.safe_load(overlay.read_text())
    (callback,) = content["trainer"]["callbacks+"]
    assert content["trainer"]["precision"] == "bf16-mixed"
    assert callback["init_args"].pop("measured_on")
    assert callback == {"class_path": "lightning_accel.callbacks.Speedups", "init_args": {"compile": "children"}}
    lines = {line.strip().partition(":")[0]: line for line in overlay.read_text().splitlines()}
    assert lines["precision"].endswith("# alone 1.40 (1.37 to 1.43), 2030-01-02")
    assert lines["compile"].endswith("# alone 1.50 (1.47 to 1.53), 2030-01-02")
    assert "**2.10 (2.06 to 2.14) times as fast**" in report.read_text()
    assert json.loads(whole.read_text())["proof"]["ratio"]["value"] == pytest.approx(2.1)


def test_where_memory_is_the_goal_what_saves_it_is_joined(world, tmp_path):
    world.speed = {"micro_batches": 0.9}
    outcome = run(tmp_path, goal="memory")
    assert names(outcome) == ["activation_checkpointing", "micro_batches", "precision"]
    assert outcome.proof.memory.value == pytest.approx(1 / (0.4 * 0.6 * 0.8))
    assert outcome.proof.memory.turns == 4
    assert outcome.proof.ratio.value == pytest.approx(0.9)
    assert outcome.alone["compile=children"].reason == "saves no memory to speak of"
    assert outcome.peak_bytes == 5e9
    overlay, report, *_ = write_outcome(outcome, tmp_path, "a test", "2030-01-02")
    callback = yaml.safe_load(overlay.read_text())["trainer"]["callbacks+"][0]
    assert callback["class_path"] == "lightning_accel.callbacks.MemorySavings"
    assert callback["init_args"] == {"micro_batches": 2, "activation_checkpointing": True}
    assert "micro_batches: 2  # alone 2.50 times less memory, 0.90 (0.88 to 0.92) times as fast" in overlay.read_text()
    assert "**5.21 (5.21 to 5.21) times less memory, 0.90" in report.read_text()
    assert "makes the run faster" not in report.read_text()


def test_savings_within_the_noise_of_a_process_are_a_tie(world, tmp_path, monkeypatch):
    monkeypatch.setattr(World, "names", staticmethod(lambda changes: [*changes.savings.values()]))
    world.bytes = {2: 0.40, 4: 0.39, 8: 0.385}
    assert run(tmp_path / "tie", goal="memory").changes == Changes(savings={"micro_batches": 2})
    world.bytes[8] = 0.3
    assert run(tmp_path / "shown", goal="memory").changes == Changes(savings={"micro_batches": 8})


def test_memory_is_not_saved_at_any_speed(world, tmp_path):
    """Alone 0.8 and 0.75 are fast enough, together 0.6 is not."""
    world.speed = {"micro_batches": 0.8, "activation_checkpointing": 0.75, "precision": 0.6}
    outcome = run(tmp_path, goal="memory")
    assert names(outcome) == ["micro_batches"]
    assert outcome.alone["precision=bf16-mixed"].reason == "0.60 times as fast, less than 0.7"


def test_nothing_is_handed_back_that_saves_no_memory(world, tmp_path):
    world.bytes = {"micro_batches": 0.97}
    outcome = run(tmp_path, goal="memory")
    assert not outcome.is_faster
    assert "train in less memory" in write_outcome(outcome, tmp_path, "a test", "today")[0].read_text()


def test_micro_batches_of_losses_that_are_no_means_are_dropped(monkeypatch, tmp_path):
    """Only a step that draws random numbers may have other losses, which are then judged over seeds."""
    world = World(monkeypatch)
    world.different = {"micro_batches"}
    assert "micro_batches" not in names(run(tmp_path / "draws nothing", goal="memory"))
    world = World(monkeypatch, FACTS | {"draws": True})
    world.different = {"micro_batches"}
    assert "micro_batches" in names(run(tmp_path / "draws", goal="memory"))


@pytest.mark.parametrize(
    ("facts", "name", "reason"),
    [
        ({"automatic_optimization": False}, "micro_batches", "by hand"),
        ({"has_batch_norms": True}, "micro_batches", "batch norms"),
        ({"strategy": "other"}, "micro_batches", "strategy"),
        ({"precision": "16-mixed"}, "micro_batches", "float16"),
        ({"items_per_step": 3, "world_size": 2}, "micro_batches", "one sample"),
        ({"num_repeated": 0}, "activation_checkpointing", "no repeated blocks"),
        ({"batch_norms_in_blocks": True}, "activation_checkpointing", "twice"),
    ],
)
def test_savings_are_refused_with_a_reason(facts, name, reason):
    found = list(savings_for(FACTS | facts))
    (refused,) = [one for one in found if isinstance(one, Refusal) and one.name == name]
    assert reason in refused.reason
    assert not [one for one in found if isinstance(one, Factor) and one.group == name]


def test_fewer_workers_are_tried_where_there_are_some():
    found = {one.name for one in savings_for(FACTS | {"loaders": [FACTS["loaders"][0] | {"num_workers": 4}]})}
    assert {"num_workers=0", "num_workers=1"} < found
    assert not any("num_workers" in one.name for one in savings_for(FACTS))


def test_offloads_are_tried_on_a_gpu():
    def found(**facts):
        return {one.name for one in savings_for(FACTS | facts) if isinstance(one, Factor) and "offload" in one.name}

    assert not found()
    assert found(device="cuda") == {"activation_offload", "strategy=accel_fsdp2_offload"}
    assert found(device="cuda", strategy="sharded") == {"strategy=accel_fsdp2_offload"}
    assert not found(device="cuda", strategy="other")


def test_allocators_are_tried_where_they_are_installed(monkeypatch):
    def found(**facts):
        every = {one.name: one for one in factors_for(FACTS | facts, SHARES)}
        return {name: every[f"allocator={name}"] for name in ("tcmalloc", "jemalloc", "huge_pages")}

    monkeypatch.setattr(factors, "why_no_allocator", lambda name: "" if name == "jemalloc" else "not here")
    assert found() == {
        "tcmalloc": Refusal("allocator=tcmalloc", "not here"),
        "jemalloc": Factor("allocator=jemalloc", "memory", "exact", Changes(speedups={"allocator": "jemalloc"})),
        "huge_pages": Refusal("allocator=huge_pages", "not here"),
    }
    monkeypatch.setattr(factors, "why_no_allocator", lambda name: "")
    kinds = {name: type(one) for name, one in found().items()}
    assert kinds == {"tcmalloc": Factor, "jemalloc": Refusal, "huge_pages": Factor}
    assert {one.reason for one in found(allocator="jemalloc").values()} == {"the process runs with jemalloc already"}


def test_a_simpler_change_gives_way_to_one_that_is_faster_in_its_place(world, tmp_path, monkeypatch):
    """Alone, intervals of both overlap, and turns against each other do not."""
    monkeypatch.setattr(factors, "why_no_allocator", lambda name: "" if name == "tcmalloc" else "not here")
    world.speed = {"compile": 1.3, "keep_freed_memory": 1.30, "allocator": 1.34}
    outcome = run(tmp_path / "faster")
    assert outcome.changes == Changes(speedups={"compile": "children", "allocator": "tcmalloc"})
    assert "allocator=tcmalloc in place of keep_freed_memory" in outcome.added
    assert "allocator: tcmalloc  # alone 1.34" in overlay(outcome, "a run", "today")
    world.speed["allocator"] = 1.32
    assert run(tmp_path / "equal").changes == Changes(speedups={"compile": "children", "keep_freed_memory": True})
    world.speed["allocator"], world.pairs = 1.34, {frozenset({"compile", "allocator"}): 0.95}
    assert run(tmp_path / "not beside").changes == Changes(speedups={"compile": "children", "keep_freed_memory": True})


def test_comparisons_leave_time_for_the_proof(world, tmp_path):
    """Of losses equal by one seed, and not over five."""
    world.speed = {"precision": 1.5, "channels_last": 1.3}
    world.seed_seconds = 130.0
    outcome = run(tmp_path)
    assert names(outcome) == ["channels_last"]
    assert outcome.is_faster
    assert any("not finished within the budget" in one.reason for one in outcome.verdicts)


def test_time_is_kept_to_compare_exact_changes_over_seeds(world, tmp_path):
    """Rounding that an optimizer enlarges makes losses deviate, after which five seeds decide."""
    one = Search(Project("nobody:runs", {}), tmp_path, 45.0, {"of": "a test"}).measurer
    one.measure_baseline()
    equal, exact = (Factor("one", "one", kind, Changes(trainer={"one": 1})) for kind in ("equal", "exact"))
    assert one.may_prove("of equal losses", [equal], 5.0)
    assert not one.may_prove("of exact losses", [exact], 5.0)


@pytest.mark.parametrize(("budget", "chosen"), [(60, ["channels_last"]), (600, ["channels_last", "memory"])])
def test_the_least_effective_gives_way_where_all_together_could_not_be_proven(world, tmp_path, budget, chosen):
    world.speed = {"channels_last": 1.3, "keep_freed_memory": 1.2}
    outcome = run(tmp_path, budget)
    assert names(outcome) == chosen
    assert outcome.is_faster
    refused = {one.name for one in outcome.refused if one.reason.endswith("to prove it beside the others")}
    assert refused == ({"keep_freed_memory"} if budget == 60 else set())


def tried(shares=SHARES, **facts):
    return {one.name for one in factors_for(FACTS | facts, shares) if isinstance(one, Factor)}


@pytest.mark.slow
def test_factors_are_those_that_the_run_admits(monkeypatch):
    monkeypatch.setattr(factors, "has_amx", lambda: True)
    monkeypatch.setattr(factors, "why_no_onednn_matmul", lambda: "no MKL")
    everything = tried()
    assert {"compile=blocks", "threads=1", "num_workers=2", "channels_last", "fused_optimizer"} < everything
    assert everything - tried(num_conv2d=0) == {"channels_last"}
    assert everything - tried(num_fusible_rnns=0) == {"fused_rnn"}
    assert tried(device="cuda") - tried(device="cuda", num_deferrable_attentions=0) == {"defer_attention_weights"}
    assert everything - tried(num_fusible_convolutions=0) == {"fused_messages"}
    bfloat16 = {"precision=bf16-mixed", "Bfloat16Precision", "matmul_precision=medium"}
    assert everything - tried(bfloat16_units=False) == bfloat16
    assert everything - tried(num_blocks=0) == {"compile=blocks"}
    assert everything - tried(replace(SHARES, data=0.001)) == {"batched_fetch", "num_workers=1", "num_workers=2"}
    assert everything - tried(replace(SHARES, optimizer=0.01)) == {"fused_optimizer"}
    assert everything - tried(loaders=[FACTS["loaders"][0] | {"by_sample": "a reason"}]) == {"batched_fetch"}
    assert everything - tried(loaders=[FACTS["loaders"][0] | {"is_iterable": True}]) == {
        "num_workers=1",
        "num_workers=2",
    }
    workers = FACTS["loaders"][0] | {"num_workers": 4, "prefetch_factor": 2}
    further = {"num_workers=0", "persistent_workers", "prefetch_factor=8"}
    assert tried(loaders=[workers]) - everything == further
    kept = workers | {"persistent_workers": True, "prefetch_factor": 9}
    assert tried(loaders=[kept]) - everything == {"num_workers=0"}
    assert tried(shapes_vary=True) - everything == {"compile=children, compile_dynamic"}
    assert everything - tried(precision="bf16-mixed") == bfloat16
    graphs = {f"compile=children, compile_mode={mode}" for mode in ("reduce-overhead", "max-autotune")}
    assert {"precision=16-mixed", "benchmark", "pin_memory"} | graphs < tried(device="cuda")
    assert not graphs & everything
    assert not {"threads=1", "fused_rnn", "fused_messages"} & tried(device="cuda")


@pytest.mark.slow
def test_settings_of_ddp_are_tried_where_there_are_several_ranks():
    def found(**ddp):
        facts = FACTS | {"world_size": 2, "threads": 1, "ddp": {"is_plain": True} | ddp}
        return {one.name for one in factors_for(facts, SHARES) if isinstance(one, Factor)} - tried()

    plain = {"bucket_cap_mb=5", "bucket_cap_mb=100", "gradient_as_bucket_view=True"}
    graph = {"static_graph=True", "compression=bf16"}
    assert found() == plain | graph
    assert found(bucket_cap_mb=5, static_graph=True) == (plain | graph) - {"bucket_cap_mb=5", "static_graph=True"}
    assert found(find_unused_parameters=True) == plain | graph | {"find_unused_parameters=False"}
    assert found(is_plain=False) == plain
    refused = [one.name for one in factors_for(FACTS | {"world_size": 2}, SHARES) if isinstance(one, Refusal)]
    assert "DDP" in refused


def test_strategies_are_tried_where_there_are_several_ranks():
    def found(factors, **facts):
        return {one.name for one in factors(FACTS | {"world_size": 2} | facts) if "strategy" in one.name}

    def of_speed(facts):
        return factors_for(facts, SHARES)

    assert found(of_speed, strategy="ddp", device="cuda") == {"strategy=accel_fsdp2"}
    assert found(of_speed, strategy="sharded", device="cuda") == {"strategy=ddp"}
    assert not found(of_speed, strategy="ddp")
    assert not found(of_speed, strategy="other", device="cuda")
    assert found(savings_for, strategy="ddp") == {"strategy=accel_fsdp2"}
    assert not found(savings_for, strategy="sharded")
    assert not found(savings_for, strategy="ddp", world_size=1)


def test_float8_is_tried_where_it_is_possible_and_allowed():
    def found(*allow, **facts):
        return list(float8_for(FACTS | facts, allow))

    assert not found()
    assert found("float8") == [Refusal("float8", "a cpu device")]
    (factor,) = found("float8", not_float8="")
    assert factor.changes == Changes(precision={"Float8Precision": {}}, speedups={"compile": "children"})
    (refusal,) = found(not_float8="")
    assert "--allow float8" in refusal.reason


def test_sparse_weights_are_tried_where_they_are_possible_and_allowed():
    def found(*allow, **facts):
        return list(sparsity_for(FACTS | facts, allow))

    assert not found()
    assert found("2:4") == [Refusal("2:4", "no kernels")]
    sparsity = {"exclude": None}
    (factor,) = found("2:4", not_sparsifiable="")
    assert factor.changes == Changes(trainer={"precision": "bf16-mixed"}, sparsity=sparsity)
    assert (factor.group, factor.kind) == ("precision", "learned")  # bfloat16 alone is the simpler one
    assert found("2:4", not_sparsifiable="", precision="bf16-true")[0].changes == Changes(sparsity=sparsity)
    (callback,) = factor.changes.callbacks()
    assert isinstance(callback, SemiStructuredSparsity)
    (refusal,) = found(not_sparsifiable="")
    assert "--allow 2:4" in refusal.reason


def test_what_is_said_to_be_allowable_is():
    facts = FACTS | {"not_bucketed": "", "not_float8": "", "not_sparsifiable": "", "not_padded": {"packed": ""}}
    candidates = [*learning_changes_for(facts, ()), *float8_for(facts, ()), *sparsity_for(facts, ())]
    reasons = " ".join(one.reason for one in candidates if isinstance(one, Refusal))
    assert set(re.findall(r"--allow (\S+)", reasons)) == set(ALLOWABLE)
    require_known(ALLOWABLE)


def test_ranks_share_the_cores():
    """Each of two ranks has one of two cores."""
    ddp = {"ddp": {"is_plain": True}, "world_size": 2}
    assert not any("threads" in name for name in tried(**ddp, threads=1))
    assert "threads=2" in tried(**ddp, threads=1, cores=4)
    assert "threads=4" not in tried(**ddp, threads=1, cores=4)


def test_dropout_is_replaced_where_there_is_any_and_a_kernel(monkeypatch):
    def found(reason, **facts):
        monkeypatch.setattr(factors, "missing_kernel", lambda: reason)
        return [one for one in factors_for(FACTS | facts, SHARES) if one.name == "native_dropout"]

    (factor,) = found("", has_dropout=True)
    assert factor.kind == "random"
    assert factor.changes == Changes(speedups={"native_dropout": True})
    assert found("no compiler", has_dropout=True) == [Refusal("native_dropout", "no compiler")]
    assert found("") == [Refusal("native_dropout", "the model has no dropout")]
    assert not found("", has_dropout=True, device="cuda")


def test_onednn_multiplies_float32_where_it_outruns_mkl(monkeypatch):
    def found(outruns=True, reason="", **facts):
        monkeypatch.setattr(factors, "onednn_outruns_mkl", lambda: outruns)
        monkeypatch.setattr(factors, "why_no_onednn_matmul", lambda: reason)
        return [one for one in factors_for(FACTS | facts, SHARES) if one.name == "onednn_matmul"]

    (factor,) = found()
    assert (factor.kind, factor.changes) == ("exact", Changes(speedups={"onednn_matmul": True}))
    assert found(reason="no compiler") == [Refusal("onednn_matmul", "no compiler")]
    for facts in ({"outruns": False}, {"precision": "bf16-mixed"}):
        (refusal,) = found(**facts)
        assert isinstance(refusal, Refusal)
    assert not found(device="cuda")


def test_rounding_by_onednn_is_tried_where_there_are_tiles(monkeypatch):
    for has_amx in (False, True):
        monkeypatch.setattr(factors, "has_amx", lambda has_amx=has_amx: has_amx)
        assert ("matmul_precision=medium" in tried()) == has_amx


def test_native_attention_is_tried_on_the_cpu_and_draws_where_layers_drop(monkeypatch):
    def found(reason="", **facts):
        monkeypatch.setattr(factors, "missing_kernel", lambda: reason)
        every = factors_for(FACTS | {"has_attention": True, "num_deferrable_attentions": 0} | facts, SHARES)
        return [one for one in every if one.name.startswith("attention=native")]

    name, changes = "attention=native", {"attention": "native"}
    assert found() == [Factor(name, "attention", "exact", Changes(speedups=changes))]
    (deferring,) = found(num_deferrable_attentions=2)
    assert deferring.name == "attention=native with defer_attention_weights"
    assert deferring.changes == Changes(speedups=changes | {"defer_attention_weights": True})
    assert found(has_dropout=True) == [Factor(name, "attention", "random", Changes(speedups=changes))]
    assert found("the processor has no AVX2") == [Refusal(name, "the processor has no AVX2")]
    assert found(has_attention=False) == [Refusal(name, "no layer of the model has attention in its name")]
    assert not found(device="cuda")


def test_backends_of_attention_are_tried_where_torch_may_not_choose_the_fastest():
    def found(**facts):
        every = factors_for(FACTS | {"has_attention": True} | facts, SHARES)
        others = ("attention=native", "defer")
        return [one for one in every if "attention" in one.name and not one.name.startswith(others)]

    mixed, master = found()
    assert {(one.group, one.kind) for one in (mixed, master)} == {("precision", "rounding")}
    assert mixed.changes == Changes(trainer={"precision": "bf16-mixed"}, speedups={"attention": "math"})
    assert master.changes == Changes(precision={"Bfloat16Precision": {}}, speedups={"attention": "math"})
    assert "Bfloat16Precision" not in tried(has_attention=True)
    (factor,) = found(precision="bf16-mixed")
    assert (factor.kind, factor.changes) == ("exact", Changes(speedups={"attention": "math"}))
    assert [one.name for one in found(device="cuda")] == ["attention=cudnn", "attention=efficient"]
    assert all(isinstance(one, Refusal) for one in [*found(has_attention=False), *found(bfloat16_units=False)])


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)), False),
        (nn.TripletMarginLoss(p=2.0), False),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout2d(0.1)), True),
        (nn.MultiheadAttention(4, 2, dropout=0.1), True),
        (nn.LSTM(2, 2, 2, dropout=0.1), True),
        (nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0), False),
    ],
)
def test_dropout_is_found_in_layers(module, expected):
    assert has_dropout(module) == expected


@pytest.mark.parametrize(
    ("shares", "first"),
    [
        (Shares(0.03, 0.15, 0.06), ["precision=bf16-mixed", "fused_rnn", "fused_messages", "fused_optimizer"]),
        (Shares(0.7, 0.15, 0.06), ["batched_fetch", "num_workers=1", "num_workers=2", "precision=bf16-mixed"]),
        (Shares(0.03, 0.15, 0.6), ["keep_freed_memory", "precision=bf16-mixed", "fused_rnn", "fused_messages"]),
    ],
)
def test_a_budget_goes_first_to_what_may_save_most_and_last_to_what_starts_slowly(shares, first):
    tried_in_turn = [one for one in factors_for(FACTS, shares) if isinstance(one, Factor)]
    assert [one.name for one in tried_in_turn if "allocator" not in one.name][:4] == first
    names = [one.name for one in factors_for(FACTS | {"has_dropout": True, "num_conv2d": 2}, shares)]
    assert names.index("channels_last") < names.index("native_dropout")  # one dropout among convolutions
    assert {one.group for one in tried_in_turn[-2:]} == {"compile"}


@pytest.mark.parametrize(("waited", "first"), [(0.2, "matmul_precision=high"), (0.7, "num_workers=1")])
def test_on_a_gpu_a_budget_goes_first_to_what_most_runs_gain_by(waited, first):
    facts = FACTS | {"device": "cuda", "has_attention": True, "num_blocks": 2}
    every = factors_for(facts, replace(SHARES, data=waited))
    names = [one.name for one in every if isinstance(one, Factor)]
    assert names[0] == first
    assert names[-1] == "compile=children, compile_mode=max-autotune"
    assert names.index("compile=blocks") < min(map(names.index, ("attention=cudnn", "precision=16-mixed")))


def test_changes_are_joined_field_by_field():
    joined = Changes({"precision": "a"}, {"threads": 1}) | Changes({"benchmark": True}, {"compile": "blocks"})
    assert astuple(joined)[:2] == (
        {"precision": "a", "benchmark": True},
        {"threads": 1, "compile": "blocks"},
    )
