"""What ``tune`` rejects before anything runs."""

import pytest

from lightning_accel.tuning.program import parse_budget, tune


def test_budgets_have_units():
    assert [parse_budget(text) for text in (90, "90s", "1.5m", "1h")] == [90, 90, 90, 3600]


@pytest.mark.parametrize("budget", ["soon", "0m", "-5", "10 days"])
def test_rejects_other_budgets(command, run_folder, budget):
    with pytest.raises(ValueError, match="such as 600, 90s, 10m or 1h"):
        parse_budget(budget)
    done = command("tune", "--config", "run.yaml", f"--budget={budget}")
    assert done.status == 1
    assert done.err.startswith("lightning-accel tune: error: the budget must be a time")
    assert not list(run_folder.iterdir())


def test_a_missing_package_is_named_before_anything_is_measured(command, run_folder, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f'{name} is needed here: pip install "lightning_accel[tune]"')

    monkeypatch.setattr("lightning_accel.tuning.program.require_module", missing)
    done = command("tune", "--config", "run.yaml")
    assert done.status == 1
    assert "lightning_accel[tune]" in done.err
    assert not list(run_folder.iterdir())


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
