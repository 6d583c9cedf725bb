"""What ``tune`` rejects before anything runs."""

import os
import subprocess
import sys

import lightning as L
import pytest
from torch import nn

from lightning_accel.cli.errors import UsageError
from lightning_accel.cli.tune import fit_config
from lightning_accel.strategies.checkpoints.atomic import NotWrittenError
from lightning_accel.tuning.program import parse_budget, tune
from lightning_accel.tuning.project import Changes
from lightning_accel.tuning.variant import IN_TRIAL


@pytest.fixture
def config(run_folder):
    """The only file of an empty folder."""
    path = run_folder / "run.yaml"
    path.write_text("model: Classifier\n")
    return path


def test_budgets_have_units():
    assert [parse_budget(text) for text in (90, "90s", "1.5m", "1h")] == [90, 90, 90, 3600]


@pytest.mark.parametrize("budget", ["soon", "0m", "-5", "10 days"])
def test_rejects_other_budgets(command, config, run_folder, budget):
    with pytest.raises(ValueError, match="such as 600, 90s, 10m or 1h"):
        parse_budget(budget)
    done = command("tune", "--config", "run.yaml", f"--budget={budget}")
    assert done.status == 2
    assert done.err.startswith("lightning-accel tune: error: the budget must be a time")
    assert list(run_folder.iterdir()) == [config]


def test_a_file_has_a_line_for_each_measurement(monkeypatch, tmp_path, capsys):
    def run(self):
        for what in ("alone a", "alone a", "alone b"):
            self.measurer.progress(what, 0.25, 1.5)
        return self.outcome

    monkeypatch.setattr("lightning_accel.tuning.program.Search.run", run)
    monkeypatch.setattr("lightning_accel.tuning.program.KERNELS.build_ahead", lambda: None)
    tune(["--model", "Classifier"], output=tmp_path / "tuned")
    lines = [line for line in capsys.readouterr().out.splitlines() if "of the budget" in line]
    assert lines == [f" 25% of the budget, best so far 1.50; now alone {name}" for name in "ab"]


def test_a_missing_package_is_named_before_anything_is_measured(command, config, run_folder, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f'{name} is needed here: pip install "lightning_accel[tune]"')

    monkeypatch.setattr("lightning_accel.tuning.program.require_module", missing)
    done = command("tune", "--config", "run.yaml")
    assert done.status == 1
    assert "lightning_accel[tune]" in done.err
    assert list(run_folder.iterdir()) == [config]


def test_rejects_other_goals(command, run_folder):
    with pytest.raises(ValueError, match="goal must be speed or memory or latency; got 'size'"):
        tune("run.yaml", goal="size")
    done = command("tune", "--config", "run.yaml", "--goal", "size")
    assert done.status == 2
    assert "choose from" in done.err
    assert not list(run_folder.iterdir())


def test_tune_without_a_run_says_what_is_missing(command):
    done = command("tune", "--budget", "1m")
    assert done.status == 2
    assert "give the run to tune" in done.err


def test_a_word_too_many_is_named(command):
    done = command("tune", "--budget", "5", "minutes", "--config", "run.yaml")
    assert done.status == 2
    assert "unexpected 'minutes'" in done.err


def test_mistakes_of_the_command_line_are_named_as_by_fit(command, config, run_folder):
    done = command("tune", "--config", "runs.yaml")
    assert done.status == 2
    assert done.err == "lightning-accel tune: error: no config file runs.yaml; did you mean 'run.yaml'?\n"
    assert list(run_folder.iterdir()) == [config]
    config.write_text("model: {class_path: Classifier, init_args: {hiden_dims: [3]}}\ndata: DigitsDataModule\n")
    with pytest.raises(UsageError, match=r"Classifier has no option 'hiden_dims'; did you mean 'hidden_dims'\?"):
        fit_config(Changes(), [], run_folder, 0, ["--config", "run.yaml"])


@pytest.mark.parametrize(
    ("place", "reason"), [("run.yaml", "a file"), ("run.yaml/tuned", "a file"), ("/proc/tuned", "no folders")]
)
def test_a_folder_that_cannot_be_made_is_one_message(command, config, place, reason):
    with pytest.raises(NotWrittenError, match=rf"{place} cannot be made a folder: .*{reason}; choose another output"):
        tune("run.yaml", output=place)
    assert command("tune", "--config", "run.yaml", "--output", place).status == 1


def test_a_call_within_a_trial_is_told_from_a_run(monkeypatch):
    monkeypatch.setenv(IN_TRIAL, "1")
    with pytest.raises(RuntimeError, match='put the call below `if __name__ == "__main__":`'):
        tune("run.yaml")


@pytest.mark.slow
@pytest.mark.weekly
def test_a_script_without_a_guard_is_told_at_once(run_folder):
    (run_folder / "script.py").write_text(
        "from lightning_accel import tune\n"
        "from tests.tuning.foreign_run import works\n"
        "def make(**options):\n    return works(**options)\n"
        "tune(make, budget='300s')\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, env=environment, timeout=200)
    assert done.stderr.splitlines()[-1].endswith("which an import does not run")


def without_options():
    """What a newcomer may write: nothing could be changed in its run."""


def test_what_is_no_run_is_named_before_anything_is_measured(run_folder):
    with pytest.raises(TypeError, match=r"got tuple. Pass the function itself, tune\(make\), not what it returns"):
        tune((1, 2, 3))
    with pytest.raises(ValueError, match=r"takes no further options.*define it as without_options\(\*\*options\)"):
        tune(without_options)
    assert not list(run_folder.iterdir())


def given_twice(**options):
    return L.Trainer(precision="64-true", **options), nn.Linear(2, 2), None


def not_passed_on(**options):
    return L.Trainer(precision="64-true", logger=False), nn.Linear(2, 2), None


def without_data(**options):
    return L.Trainer(logger=False, **options), nn.Linear(2, 2)


def broken(**options):
    raise OSError("no such table")


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (given_twice, TypeError, r"multiple values for keyword argument 'precision': .* let these come last"),
        (not_passed_on, TypeError, r"has the precision 64-true: trials change the run by options"),
        (without_data, TypeError, r"must return \(trainer, module, data\), in this order; got \(Trainer, Linear\)"),
        (broken, OSError, "no such table"),
    ],
)
def test_a_function_that_makes_no_run_is_told_before_kernels_are_built(make, kind, message, run_folder, monkeypatch):
    monkeypatch.setattr("lightning_accel.tuning.program.KERNELS.build_ahead", lambda: pytest.fail("builds"))
    with pytest.raises(kind, match=message) as found:
        tune(make)
    assert isinstance(found.value.__cause__ or found.value.__context__, TypeError | None)  # its own error stands once
    assert not list(run_folder.iterdir())
