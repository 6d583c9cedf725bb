"""Searches of hyperparameters over a config, by Optuna and by Ray Tune."""

import re
import subprocess
import sys

import pandas as pd
import pytest

from tests.test_launch import ROOT, environment

pytestmark = pytest.mark.slow
RUN = ["--", f"--config={ROOT / 'configs/moe_digits.yaml'}", "--trainer.max_epochs=2", "--trainer.accelerator=cpu"]


def start(script, folder, *options):
    command = [sys.executable, ROOT / "configs/launch" / script, *options, "--trainer.enable_progress_bar=false"]
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, check=False, timeout=300
    )


def search(script, folder, *options):
    done = start(script, folder, *options, *RUN)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return float(re.search(r"best val/accuracy: (\d\.\d+), with .*dropout", done.stdout)[1])


@pytest.mark.slow
@pytest.mark.weekly
@pytest.mark.parametrize(
    "script",
    ["optuna_search.py", *(pytest.param(name, marks=pytest.mark.weekly) for name in ("ray_tune.py", "ray_train.py"))],
)
def test_wrong_options_are_told_once(tmp_path, script):
    pytest.importorskip("optuna_integration")
    pytest.importorskip("ray")
    done = start(script, tmp_path, *RUN, "--model.dropuot=0.1")
    assert done.returncode == 2
    assert "has no option 'dropuot'; did you mean 'dropout'?" in done.stderr
    assert done.stderr.count("Traceback") == 0


def accuracies(folder):
    """The last val/accuracy of each run below a folder."""
    tables = [pd.read_csv(path) for path in folder.glob("**/metrics.csv")]
    return [table["val/accuracy"].dropna().iloc[-1] for table in tables]


@pytest.mark.weekly
def test_optuna_searches_and_goes_on(tmp_path):
    optuna = pytest.importorskip("optuna")
    pytest.importorskip("optuna_integration")
    search("optuna_search.py", tmp_path, "--trials=1")
    best = search("optuna_search.py", tmp_path, "--trials=3")
    [summary] = optuna.get_all_study_summaries(f"sqlite:///{tmp_path}/search.db")
    study = optuna.load_study(study_name=summary.study_name, storage=f"sqlite:///{tmp_path}/search.db")
    assert sorted(accuracies(tmp_path)) == pytest.approx(sorted(trial.value for trial in study.trials))
    assert len({trial.params["dropout"] for trial in study.trials}) == 3
    assert best == pytest.approx(study.best_value, abs=1e-4)


@pytest.mark.weekly
def test_ray_tune_searches(tmp_path):
    pytest.importorskip("ray.tune")
    best = search("ray_tune.py", tmp_path, "--trials=2", f"--storage={tmp_path / 'search'}")
    found = accuracies(tmp_path / "search")
    assert len(found) == 2
    assert best == pytest.approx(max(found), abs=1e-4)
