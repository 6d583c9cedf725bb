"""A whole search, from the command line to the overlay that a fit takes."""

import shutil
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml
from matplotlib.colors import to_hex

from lightning_accel.ops.figures import BLUE, GREY
from lightning_accel.tuning.comparison import Ratio
from lightning_accel.tuning.factors import Factor
from lightning_accel.tuning.outcome import Measurement, Outcome
from lightning_accel.tuning.project import Changes
from lightning_accel.tuning.writing import _draw, write_outcome

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.weekly
def test_tune_finds_what_fit_takes(command, run_folder):
    """Which changes win depends on the machine; on one that is busy, none may."""
    shutil.copytree(ROOT / "configs", run_folder / "configs")
    longer = ("--trainer.max_epochs", "200", "--lr_scheduler.epochs", "200")
    run = ("--config", "configs/moe_digits.yaml", *longer)
    done = command("tune", *run, "--budget", "4m")
    assert done.status == 0, done.err
    report = (run_folder / "tuned/report.md").read_text()
    assert "precision=" in report
    assert "killed" not in report
    assert sorted(path.name for path in run_folder.iterdir()) == ["configs", "tuned"]
    overlay = run_folder / "tuned/tuned.yaml"
    if overlay.exists():
        assert yaml.safe_load(overlay.read_text())["trainer"]
        assert command("fit", *run, "--config", overlay, "--trainer.fast_dev_run", "true").status == 0


def test_the_legend_of_the_picture_covers_no_bar(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path, **_: drawn.append(figure))
    monkeypatch.setattr("lightning_accel.tuning.writing.write_atomically", lambda path: nullcontext(path))
    found = Measurement(Ratio(1.5, 1.4, 1.6, 8), 5.0, 1.5)
    alone = {"threads=1": found, "workers=2": Measurement(Ratio(0.9, 0.8, 1.0, 8), 5.0, 0.9)}
    factor = Factor("threads=1", "threads", "exact", Changes(speedups={"threads": 1}))
    _draw(Outcome({"items_per_step": 1}, 1.0, alone, chosen=[factor], proof=found), tmp_path / "x.png")
    (figure,) = drawn
    figure.canvas.draw()
    (axes,), (legend,) = figure.axes, figure.legends
    assert legend.get_window_extent().y0 >= axes.get_window_extent().y1
    assert [text.get_text() for text in legend.texts] == ["chosen, if need be beside others", "not chosen"]
    assert [to_hex(patch.get_facecolor()).upper() for patch in legend.get_patches()] == [BLUE, GREY]
    assert [to_hex(bar.get_facecolor()).upper() for bar in axes.patches] == [BLUE, GREY, BLUE]


@pytest.mark.slow
def test_fit_takes_an_overlay_after_its_config(command, run_folder, tmp_path):
    """The overlay of any outcome: another machine's, here, which is warned of."""
    found = Measurement(Ratio(1.5, 1.4, 1.6, 8), 5.0, 1.5)
    factors = [
        Factor("Bfloat16Precision", "precision", "rounding", Changes(precision={"Bfloat16Precision": {}})),
        Factor("threads=1", "threads", "exact", Changes(speedups={"threads": 1, "fused_optimizer": True})),
    ]
    alone = {factor.name: found for factor in factors}
    outcome = Outcome({"items_per_step": 1}, 1.0, alone, chosen=factors, proof=found)
    overlay, *_ = write_outcome(outcome, tmp_path, "a test", "2030-01-02")
    assert "precision.Bfloat16Precision  # alone 1.50 (1.40 to 1.60), 2030-01-02\n" in overlay.read_text()
    overlay.write_text(overlay.read_text().replace("measured_on: ", "measured_on: not "))
    run = ["--config", str(ROOT / "configs/moe_digits.yaml"), "--trainer.precision", "32-true"]
    run += ["--trainer.plugins", "AtomicCheckpointIO", "--config", str(overlay)]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        done = command("fit", *run, "--trainer.fast_dev_run", "true")
    assert done.status == 0, done.err
    assert any("measured on another machine" in str(one.message) for one in seen)
    printed = command("fit", *run, "--print_config")
    trainer = yaml.safe_load(printed.out)["trainer"]
    kept, added = (one["class_path"].rpartition(".")[2] for one in trainer["plugins"])
    assert (kept, added) == ("AtomicCheckpointIO", "Bfloat16Precision")
    assert trainer["precision"] is None
    assert [one["class_path"].rpartition(".")[2] for one in trainer["callbacks"]] == ["ModelCheckpoint", "Speedups"]
    assert trainer["callbacks"][1]["init_args"]["fused_optimizer"] is True
