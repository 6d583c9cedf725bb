"""Every config says what it is, and runs."""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch.utils._pytree import tree_leaves

from lightning_accel import DigitsDataModule
from lightning_accel.compress import load_compressed

LONG = "compress_cnn", "compress_lm", "compress_mlp", "compress_moe", "compress_rnn", "relational_counting"
CONFIGS = sorted(Path(__file__).parents[1].glob("configs/*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_first_line_says_what_runs(path):
    assert path.read_text().startswith("# ")


@pytest.mark.sampled(default=1, slow=2)
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path,
            id=path.stem,
            # compress_lm writes and measures all forms of two models, as its whole run does, which is weekly too
            marks=[*[pytest.mark.slow] * (path.stem in LONG), *[pytest.mark.weekly] * (path.stem == "compress_lm")],
        )
        for path in CONFIGS
    ],
)
def test_one_batch_runs(command, path):
    result = command("fit", "--config", path, "--trainer.fast_dev_run=true", "--trainer.accelerator=cpu")
    assert result.status == 0, result.err


@pytest.mark.slow
def test_all_options_are_known(command):
    for path in CONFIGS:
        if path.stem in LONG:
            result = command("fit", "--config", path, "--print_config")
            assert result.status == 0, result.err


@pytest.mark.weekly
@pytest.mark.slow
def test_moe_digits_reaches_the_accuracy_it_promises(command, run_folder):
    path = next(path for path in CONFIGS if path.stem == "moe_digits")
    assert command("fit", "--config", path).status == 0
    result = command("test", "--config", path, "--ckpt_path=best")
    accuracy = float(result.out.split("test/accuracy")[1].split()[1])
    assert accuracy >= 0.95


@pytest.mark.slow
@pytest.mark.weekly
def test_moe_lm_quick_reaches_what_it_promises(command, run_folder):
    path = next(path for path in CONFIGS if path.stem == "moe_lm_quick")
    result = command("fit", "--config", path)
    assert result.status == 0, result.err
    metrics = pd.read_csv(run_folder / "runs/moe_lm_quick/version_0/metrics.csv")
    assert metrics["val/bits_per_byte"].dropna().iloc[-1] < 3.6


@pytest.mark.slow
@pytest.mark.weekly
def test_moe_lm_reaches_what_it_promises(command, run_folder):
    path = next(path for path in CONFIGS if path.stem == "moe_lm")
    result = command("fit", "--config", path)
    assert result.status == 0, result.err
    metrics = pd.read_csv(run_folder / "runs/moe_lm/version_0/metrics.csv")
    assert metrics["val/bits_per_byte"].dropna().iloc[-1] < 1.85
    assert metrics["val/max_violation"].dropna().iloc[-1] < 0.2  # about 0.1: of 1500 steps of 0.001 each
    assert (run_folder / "runs/moe_lm/version_0/figures/expert_load.png").exists()
    assert command("predict", "--config", path, "--ckpt_path=best").status == 0
    predictions = pd.read_csv(run_folder / "runs/moe_lm/version_1/predictions.csv")
    assert predictions["prompt"].tolist() == ["The ", "def __init__("]
    assert predictions["text"].str.len().min() > 50


@pytest.mark.slow
@pytest.mark.weekly
def test_compress_lm_leaves_a_small_file_that_generates(command, run_folder):
    path = next(path for path in CONFIGS if path.stem == "compress_lm")
    result = command("fit", "--config", path)
    assert result.status == 0, result.err
    folder = run_folder / "runs/compress_lm/version_0"
    perplexities = pd.read_csv(folder / "metrics.csv").set_index("step")["val/perplexity"].dropna()
    assert perplexities.iloc[-1] < 5.5
    rows = {row["name"]: row for row in json.loads((folder / "figures/decoding.json").read_text())["rows"]}
    (picked,) = (row for row in rows.values() if row["status"] == "picked")
    assert picked["name"].startswith(("int4", "int8"))
    assert picked["metrics"]["perplexity"] < rows["fp32 eager"]["metrics"]["perplexity"] + 0.05
    assert picked["file_bytes"] < 0.4 * rows["fp32 eager"]["file_bytes"]
    text = load_compressed(folder / "model.onnx").generate(torch.tensor([list(b"import ")]), max_new_tokens=8)
    assert text.shape == (1, 15)


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.parametrize(("name", "figure", "least", "most"), [
    pytest.param("rnn_digits", "test/accuracy", 0.975, 1, marks=pytest.mark.weekly),
    pytest.param("rnn_adding", "test/mse", 0, 1e-3, marks=pytest.mark.weekly),
    pytest.param("relational_csl", "test/accuracy", 1, 1, marks=pytest.mark.weekly),
    pytest.param("relational_counting", "test/loss", 0, 1e-5, marks=pytest.mark.weekly),
    pytest.param("compress_mlp", "test/accuracy", 0.93, 1, marks=pytest.mark.weekly),
    pytest.param("compress_rnn", "test/accuracy", 0.96, 1, marks=pytest.mark.weekly),
    ("dbn_digits", "test/accuracy", 0.94, 1),
    pytest.param("rbm_bars", "test/log_prob", -2.66, -2.59, marks=pytest.mark.weekly),
])  # fmt: skip
def test_run_reaches_what_it_promises(command, name, figure, least, most):
    path = next(path for path in CONFIGS if path.stem == name)
    assert command("fit", "--config", path).status == 0
    result = command("test", "--config", path, "--ckpt_path=best")
    assert least <= float(result.out.split(figure)[1].split()[1]) <= most


@pytest.mark.slow
@pytest.mark.weekly
def test_rbm_bars_comes_within_two_nats_of_larger_pictures(command):
    path = next(path for path in CONFIGS if path.stem == "rbm_bars")
    assert (
        command("fit", "--config", path, "--data.size=4", "--data.copies=3000").status == 0
    )  # in three quarters of its time
    result = command("test", "--config", path, "--data.size=4", "--ckpt_path=best")
    log_likelihood = 32 * float(result.out.split("test/log_prob")[1].split()[1])
    assert -108.14 - 2 < log_likelihood < -108.13


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fold", "options", "expected"),
    [
        *(pytest.param(fold, [], 1.0, marks=pytest.mark.weekly) for fold in range(1, 5)),
        (0, ["--model.marking.num_nodes=0", "--model.layers.norm=batch"], 0.1),
    ],
)
def test_circular_skip_links_of_each_fold(command, run_folder, fold, options, expected):
    """Of five folds; without marks one class of ten is told, for good."""
    path = next(path for path in CONFIGS if path.stem == "relational_csl")
    options = [f"--data.split.fold={fold}", *options]
    assert command("fit", "--config", path, *options).status == 0
    result = command("test", "--config", path, "--ckpt_path=best", *options)
    assert float(result.out.split("test/accuracy")[1].split()[1]) == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least", "parameters"), [
    pytest.param("compress_cnn", 0.97, 28_218, marks=pytest.mark.weekly),
    pytest.param("compress_moe", 0.96, None, marks=pytest.mark.weekly),
])  # fmt: skip
def test_compressed_run_leaves_a_file_as_good_as_it_promises(command, run_folder, name, least, parameters):
    path = next(path for path in CONFIGS if path.stem == name)
    result = command("fit", "--config", path)
    assert result.status == 0, result.err
    folder = run_folder / "runs" / name / "version_0"
    report = json.loads((folder / "figures/export.json").read_text())
    rows = {row["name"]: row for row in report["rows"]}
    assert parameters in (None, rows["fp32 eager"]["parameters"])
    assert all(row["metrics"]["val/accuracy"] > least for row in rows.values() if row["metrics"])
    data = DigitsDataModule()
    data.setup()
    images, labels = data.test_rows[:]
    (written,) = folder.glob("model.*")
    logits, *_ = tree_leaves(load_compressed(written)(images))
    assert logits.argmax(dim=1).eq(labels).float().mean() >= least
    result = command("test", "--config", path, "--ckpt_path=best")
    assert float(result.out.split("test/accuracy")[1].split()[1]) >= least
