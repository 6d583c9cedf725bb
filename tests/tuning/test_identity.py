"""Which measurements of an earlier search are used again, and which are rejected or repeated."""

import importlib
import sys

import pytest

from lightning_accel.tuning import identity
from lightning_accel.tuning.identity import distributions_of, files_in, identity_of, imported_code, state_of
from lightning_accel.tuning.journal import Journal
from lightning_accel.tuning.program import tune
from lightning_accel.tuning.project import Changes, Project
from tests.tuning import foreign_run
from tests.tuning.test_search import FACTS, World, names, run

PROJECT = Project("nobody:runs", {})


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.yaml").write_text("class_path: Net\n")
    (tmp_path / "run.yaml").write_text("model: model.yaml\ndata: {file: data.csv}\ntrainer: {max_epochs: 3}\n")
    return tmp_path / "run.yaml"


@pytest.mark.parametrize("arguments", [["--config", "run.yaml"], ["--config=run.yaml"]])
@pytest.mark.parametrize("name", ["run.yaml", "model.yaml"])
def test_configs_belong_to_it_however_they_are_given(config, arguments, name):
    def current():
        return identity_of(PROJECT, "speed", files_in(arguments))

    before = current()
    assert current() == before
    with open(config.with_name(name), "a") as file:
        file.write("seed_everything: 3\n")
    with pytest.raises(ValueError, match=rf"folder holds measurements .*: {name} has changed\. Remove the folder"):
        identity.require_same(before, current(), "folder")


def test_a_config_that_cannot_be_read_is_left_to_the_run(config):
    config.write_text("model: [\n")
    assert "run.yaml" in identity_of(PROJECT, "speed", files_in(["--config", "run.yaml"]))["files"]


def test_what_differs_is_named(config, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    before = identity_of(PROJECT, "speed", [])
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setenv("HISTFILE", "nobody measures this")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "a folder of this job")
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "True")  # libraries set it
    monkeypatch.setattr(identity.torch, "__version__", "9.9")
    monkeypatch.setattr(identity, "machine_name", lambda: "another machine")
    now = identity_of(PROJECT, "memory", [])
    with pytest.raises(ValueError, match=r"goal was speed, and is memory; machine was .*, and is another") as raised:
        identity.require_same(before, now, "folder")
    message = str(raised.value)
    assert "; torch was " in message
    assert "; OMP_NUM_THREADS was 2, and is not given; ONEDNN_MAX_CPU_ISA was not given, and is AVX2" in message
    assert "HISTFILE" not in message
    assert "CACHE_DIR" not in message
    assert "KMP" not in message


def test_code_of_the_run_belongs_to_it_wherever_it_stands(monkeypatch, tmp_path):
    """A config names classes of other files, and these import more."""
    own = tmp_path / "net_of_a_user.py"
    own.write_text("width = 5\n")
    world = World(monkeypatch, FACTS | {"code": {"files": [str(own)], "packages": ["torch", "yaml"]}})
    run(tmp_path / "tuned")
    world.started.clear()
    run(tmp_path / "tuned")
    assert not world.started
    monkeypatch.setattr(identity, "_version", lambda name: "9.9")
    with pytest.raises(ValueError, match=r"PyYAML was 6.*, and is 9\.9; torch was .*, and is 9\.9\."):
        run(tmp_path / "tuned")
    monkeypatch.undo()
    own.write_text("width = 7\n")
    with pytest.raises(ValueError, match=r"net_of_a_user\.py has changed\."):
        run(tmp_path / "tuned")
    own.unlink()
    with pytest.raises(ValueError, match=r"net_of_a_user\.py belongs to it no more\."):
        run(tmp_path / "tuned")


def test_a_folder_without_measurements_takes_another_run(monkeypatch, tmp_path):
    path, identity = tmp_path / "journal.jsonl", {"files": {"run.yaml": "a digest"}}
    Journal(path, identity, 600.0)  # of a run that could not start
    corrected = {"files": {"run.yaml": "another"}}
    Journal(path, corrected, 600.0).result("baseline", lambda: ({"rate": 1.0}, None))
    assert "baseline" in Journal(path, corrected, 600.0)
    with pytest.raises(ValueError, match=r"run\.yaml was another, and is a digest"):
        Journal(path, identity, 600.0)


def test_imported_code_is_told_from_packages_and_the_standard_library(tmp_path, monkeypatch):
    own = tmp_path / "net_of_a_user.py"
    own.write_text("import json\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("net_of_a_user")
    code = imported_code()
    del sys.modules["net_of_a_user"]
    assert str(own) in code["files"]
    assert not [file for file in code["files"] if "site-packages" in file or file.endswith("json/__init__.py")]
    assert {"torch", "lightning", "yaml"} <= set(code["packages"])
    assert not {"json", "net_of_a_user"} & set(code["packages"])
    assert distributions_of(["yaml", "torch"]) == ["PyYAML", "torch"]
    assert state_of([str(own)], ["torch", "no-such-package"])["versions"]["no-such-package"] is None


@pytest.mark.slow
def test_other_changes_may_be_allowed_between_searches(monkeypatch, tmp_path):
    """What was measured holds, and what is decided is what a new search decides."""
    world = World(monkeypatch)
    world.speed |= {"x2": 1.3, "x4": 1.5, "x8": 1.6}
    fresh = run(tmp_path / "fresh", allow=("batch_size",))
    before = len(world.started)
    assert names(run(tmp_path / "tuned")) == ["compile", "precision"]
    between = len(world.started)
    allowed = run(tmp_path / "tuned", allow=("batch_size",))
    assert allowed.changes == fresh.changes
    assert names(allowed) == ["batch_size", "compile", "precision"]
    assert len(world.started) - between < before
    assert names(run(tmp_path / "tuned")) == ["compile", "precision"]


@pytest.mark.slow
def test_what_a_smaller_budget_cut_short_is_repeated(monkeypatch, tmp_path):
    world = World(monkeypatch)
    world.start_seconds = {"compile": 20}
    compiled = Changes(speedups={"compile": "children"})
    short = run(tmp_path, budget=60.0)
    assert short.alone["compile=children"].reason == "not ready within its share of the budget"
    for budget, repeats in ((60.0, False), (50.0, False), (1200.0, True)):
        world.started.clear()
        outcome = run(tmp_path, budget)
        assert (compiled in world.started) == repeats
    assert names(outcome) == ["compile", "precision"]
    world.started.clear()
    assert run(tmp_path, 60.0).alone["compile=children"].ratio  # what was measured within more time holds


def test_losses_are_compared_again_over_the_steps_of_a_larger_budget(monkeypatch, tmp_path):
    world = World(monkeypatch)
    run(tmp_path, budget=100.0)
    assert world.num_steps["['precision', 'compile']"] == 12
    world.unequal = {"precision"}
    assert "precision" in names(run(tmp_path, budget=100.0))
    assert "precision" not in names(run(tmp_path, budget=600.0))
    assert world.num_steps["['precision', 'compile']"] == 30


def test_seeds_that_a_smaller_budget_did_not_suffice_for_are_added(monkeypatch, tmp_path):
    world = World(monkeypatch)
    world.deciding_seeds, world.seed_seconds = 40, 7.0
    assert names(run(tmp_path, 600.0)) == ["compile"]
    world.seed_seconds = 0.0
    assert names(run(tmp_path, 600.0)) == ["compile"]
    assert names(run(tmp_path, 6000.0)) == ["compile", "precision"]


@pytest.mark.slow
def test_tune_says_what_it_uses_again(monkeypatch, tmp_path, capsys):
    world = World(monkeypatch)
    world.start_seconds = {"compile": 20}
    tune(foreign_run.works, 60, tmp_path)
    assert "holds" not in capsys.readouterr().out
    tune(foreign_run.works, 1200, tmp_path)
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "measurements of this run, which are used again; 2 that a smaller budget or a full disk cut short are repeated"
        in said
    )
    report = (tmp_path / "report.md").read_text()
    monkeypatch.setattr(identity, "machine_name", lambda: "another machine")
    with pytest.raises(ValueError, match=r"machine was .*, and is another machine"):
        tune(foreign_run.works, 1200, tmp_path)
    assert (tmp_path / "report.md").read_text() == report


@pytest.mark.parametrize(
    ("name", "before", "after", "stays"),
    [
        ("run.py", 'tune(make, budget="90s")', "tune(make, budget='10m')", True),
        ("run.py", 'tune(make, budget="90s")', "tune(make, budget = 600)", True),
        ("run.py", 'tune(make, budget="90s")', 'tune(build, budget="90s")', False),
        ("run.py", "Net(budget=3)", "Net(budget=4)", False),  # of a module, which it may change
        ("run.yaml", 'budget="90s"', 'budget="10m"', False),
    ],
)
def test_a_budget_in_code_does_not_make_another_run(tmp_path, name, before, after, stays):
    path = tmp_path / name
    path.write_text(before)
    first = state_of([str(path)], [])
    path.write_text(after)
    assert (state_of([str(path)], []) == first) == stays
