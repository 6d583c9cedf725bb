"""Changes of what is learned: what allows them, how they are counted, and how they are judged."""

import math

import lightning as L
import pytest
import torch
import yaml
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from lightning_accel.tuning.comparison import compare
from lightning_accel.tuning.factors import Factor, Refusal
from lightning_accel.tuning.learning import larger_batches_of, learning_changes_for, samples_per_step
from lightning_accel.tuning.program import tune
from lightning_accel.tuning.project import Changes, Project
from lightning_accel.tuning.search import Search
from lightning_accel.tuning.writing import write_outcome
from tests.tuning.test_search import FACTS, World, names, run
from tests.tuning.test_statistics import Turns

ALL = ("batch_size",)


@pytest.fixture
def world(monkeypatch):
    """Return a world where larger batches alone are faster, the largest most."""
    one = World(monkeypatch)
    one.speed = {"x2": 1.3, "x4": 1.5, "x8": 1.6}
    return one


@pytest.mark.slow
def test_they_are_tried_only_if_they_are_allowed(world, tmp_path):
    outcome = run(tmp_path / "without")
    assert not outcome.chosen
    (refused,) = [one for one in outcome.refused if one.name == "batch_size"]
    assert refused.reason.endswith("allow it by name with --allow batch_size")
    assert "- batch_size: it changes what is learned" in write_outcome(outcome, tmp_path, "a", "b")[0].read_text()
    outcome = run(tmp_path / "with", allow=ALL)
    assert names(outcome) == ["batch_size"]
    assert not [one for one in outcome.refused if one.name.startswith("batch_size")]
    overlay = write_outcome(outcome, tmp_path, "a test", "2030-01-02")[0].read_text()
    origin, callback = yaml.safe_load(overlay)["trainer"]["callbacks+"]
    assert list(origin["init_args"]) == ["measured_on"]  # another machine is warned of these, too
    assert callback == {"class_path": "lightning_accel.callbacks.Batching", "init_args": {"batch_size_factor": 8}}
    assert "batch_size_factor: 8  # alone 1.60 " in overlay


def test_batches_of_similar_length_are_tried_where_samples_have_lengths(monkeypatch, tmp_path):
    facts = FACTS | {"not_bucketed": ""}
    world = World(monkeypatch, facts)
    world.speed = {"xTrue": 1.7, "x2": 1.2}
    outcome = run(tmp_path / "both", allow=("batch_size", "length_bucketed"))
    assert outcome.changes == Changes(batching={"length_bucketed": True, "batch_size_factor": 2})
    assert "length_bucketed" in [one.name for one in run(tmp_path / "one", allow=ALL).refused]
    assert "length_bucketed" not in [one.name for one in learning_changes_for(FACTS, ALL)]
    assert Refusal("length_bucketed", FACTS["not_bucketed"]) in learning_changes_for(FACTS, ("length_bucketed",))


def test_padding_is_taken_out_where_there_is_any():
    def found(allow=(), **reasons):
        facts = FACTS | {"not_padded": {"trimmed": "", "packed": ""} | reasons}
        return [one for one in learning_changes_for(facts, allow) if "padd" in one.name or "packed" in one.name]

    is_trimmed, is_packed = found(["packed"])
    assert is_trimmed == Factor("padding=trimmed", "padding", "checked", Changes(batching={"padding": "trimmed"}))
    assert is_packed == Factor("padding=packed", "padding", "checked", Changes(batching={"padding": "packed"}))
    assert found()[0] == is_trimmed
    assert found()[1].reason.endswith("allow it by name with --allow packed")
    assert found(["packed"], packed="as it is")[1] == Refusal("padding=packed", "as it is")
    assert not found(trimmed="no mask", packed="no mask")


def test_what_the_run_compares_itself_is_not_compared_over_seeds(monkeypatch, tmp_path):
    """Other shapes draw other random numbers, so losses would differ."""
    world = World(monkeypatch, FACTS | {"not_padded": {"trimmed": "", "packed": ""}})
    world.speed, world.unequal = {"xtrimmed": 1.5, "precision": 1.3, "channels_last": 1.1}, {"xtrimmed"}
    outcome = run(tmp_path / "alone")
    assert names(outcome) == ["channels_last", "padding"]  # what is compared beside it over seeds fails with it
    assert any("padding=trimmed: before it trains" in one.reason for one in outcome.verdicts if one.passed)
    assert not any("padding" in name for name, _ in world.seeds if "precision" not in name)
    world.unequal = set()
    assert names(run(tmp_path / "all")) == ["channels_last", "padding", "precision"]


def test_the_fastest_whose_losses_are_equivalent_is_taken(world, tmp_path):
    world.unequal = {"x8"}
    outcome = run(tmp_path / "one", allow=ALL)
    assert outcome.changes == Changes(batching={"batch_size_factor": 4})
    assert [verdict.passed for verdict in outcome.verdicts] == [False, True]
    world.unequal = {"x2", "x4", "x8"}
    assert not run(tmp_path / "none", allow=ALL).chosen


def test_what_is_dropped_is_not_added_beside_others(world, tmp_path):
    world.speed |= {"compile": 1.2, "x2": 0.95, "x4": 0.5, "x8": 0.5}
    outcome = run(tmp_path, allow=ALL)
    assert names(outcome) == ["compile"]
    assert not any(name.startswith("batch_size") for name in outcome.added)


def test_losses_are_compared_after_as_many_samples(world, tmp_path):
    """A step sees 0.9 * 8 times as many; 5 seeds have a twentieth of the budget, 120 steps of 0.1 s each."""
    run(tmp_path / "alone", budget=1200.0, allow=ALL)
    assert world.num_steps["[]"] == 120
    assert world.num_steps["['x8']"] == int(120 / 7.2)
    assert world.samples["['x8']"] == pytest.approx(7.2)
    world.speed |= {"compile": 1.2, "precision": 1.1}
    run(tmp_path / "together", allow=ALL)
    assert world.samples["['precision', 'compile', 'x8']"] == pytest.approx(7.2)
    assert world.samples["['precision', 'compile']"] == pytest.approx(1 / 7.2)  # against all


def test_an_interrupted_search_hands_back_nothing_that_learns_otherwise(world, tmp_path):
    world.interrupt_at = 5
    one = Search(Project("nobody:runs", {}), tmp_path, 600.0, {"of": "a test"}, "speed", ALL)
    with pytest.raises(KeyboardInterrupt):
        one.run()
    assert one.outcome.alone["batch_size x 8"].wins
    assert not one.outcome.chosen


def test_speed_is_that_of_samples():
    turns = {"width": 0.02, "least": 3, "most": 9, "seconds": 1, "deadline": math.inf}
    assert compare(Turns(0.1), Turns(0.2, 0.2001), samples=3.0, **turns).value == pytest.approx(1.5, rel=1e-3)


def test_unknown_names_end_it_before_anything_starts(command, run_folder):
    with pytest.raises(ValueError, match=r"among batch_size.*; got 'batches'; did you mean 'batch_size'"):
        tune("run.yaml", allow=("batch_size", "batches"))
    for allow, found in ("batch_size", "'batch_size'"), (None, "None"), (5, "5"):
        with pytest.raises(ValueError, match=rf"list of names, such as \['packed'\], among batch_size.*got {found}"):
            tune("run.yaml", allow=allow)
    with pytest.raises(ValueError, match="leave it out with goal='memory'"):
        tune("run.yaml", goal="memory", allow=ALL)
    done = command("tune", "--model", "Classifier", "--allow", "batch_size, packed, batches")
    assert done.status == 2
    assert "got 'batches'" in done.err
    assert not list(run_folder.iterdir())


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(9))


class Fixed:
    """A batch sampler of somebody else's."""

    def __len__(self):
        return 3

    def __iter__(self):
        return iter([[0, 1], [2, 3], [4, 5]])


class Deaf(Fixed):
    batch_size = 2

    def __len__(self):
        return 9


def larger(loader, optimizer=torch.optim.SGD, factor=2, **options):
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **{"max_epochs": 1} | options)
    trainer.strategy.optimizers = [optimizer([torch.zeros(2, requires_grad=True)])]
    return larger_batches_of(trainer, loader if isinstance(loader, list) else [loader])[str(factor)]


ROWS = TensorDataset(torch.arange(20))


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(Stream(), 3), "IterableDataset"),
        (DataLoader(ROWS, batch_sampler=Fixed()), "Fixed, has no batch_size"),
        (DataLoader(ROWS, batch_sampler=Deaf()), "Deaf, does not follow its batch_size"),
        (DataLoader(ROWS, batch_size=None), "no batch sampler"),
        (DataLoader(ROWS, 15), "an epoch has 2 batches"),
        ([1, 2, 3], "not in one torch DataLoader"),
        ([DataLoader(ROWS, 2), DataLoader(ROWS, 2)], "not in one torch DataLoader"),
    ],
)
def test_loaders_are_refused_with_a_reason(loader, reason):
    assert reason in larger(loader, factor=4 if reason.startswith("an epoch") else 2)["reason"]


def test_runs_are_refused_with_a_reason():
    loader = DataLoader(ROWS, 2)
    assert larger(loader)["reason"] == ""
    assert "max_steps=7 counts updates" in larger(loader, max_steps=7)["reason"]
    assert "by their number" in larger(loader, limit_train_batches=4)["reason"]
    assert larger(loader, limit_train_batches=0.5)["reason"] == ""
    assert "LBFGS has no scaling rule" in larger(loader, torch.optim.LBFGS)["reason"]
    assert larger(loader, lambda each: torch.optim.Adam(each, betas=(0.5, 0.9)))["reason"] == ""
    assert "beta of 0.5 in Adam" in larger(loader, lambda each: torch.optim.Adam(each, betas=(0.5, 0.9)), 4)["reason"]


def test_what_is_refused_is_named_only_where_it_is_allowed():
    facts = FACTS | {"larger_batches": {str(factor): {"reason": "a stream", "samples": 1.0} for factor in (2, 4, 8)}}
    assert list(learning_changes_for(facts, ())) == []
    assert next(iter(learning_changes_for(facts, ALL))) == Refusal("batch_size x 2", "a stream")
    assert {one.kind for one in learning_changes_for(FACTS, ALL) if isinstance(one, Factor)} == {"learned"}


@pytest.mark.parametrize(("size", "drop_last", "samples"), [(3, False, 7 / 4), (6, True, 2.0)])
def test_samples_of_a_step_are_those_of_an_epoch(size, drop_last, samples):
    """Twenty in batches of 3: 7 of them, or 4 of 6; where incomplete ones are dropped, 3 of 6, or 1 of 12."""
    sampler = BatchSampler(SequentialSampler(ROWS), size, drop_last)
    found = larger(DataLoader(ROWS, batch_sampler=sampler))
    facts = {"larger_batches": {"2": found}}
    assert samples_per_step(facts, Changes(batching={"batch_size_factor": 2})) == pytest.approx(samples)
    assert samples_per_step(facts, Changes(speedups={"threads": 1})) == 1
    assert sampler.batch_size == size
