import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler
from matplotlib.figure import Figure
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

from lightning_accel.callbacks import RestoringEarlyStopping, RunReport, Watchdog
from lightning_accel.callbacks.monitors import run_report
from lightning_accel.measure import RUN_PARTS, run_parts
from tests.planted import SLEPT, Sleeping, rows, use_clock
from tests.ranks import run_ranks

QUIET = {
    "accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "enable_model_summary": False,
    "log_every_n_steps": 1,
}  # fmt: skip
FILES = ["run_report.json", "run_report.png", "run_report_curves.png"]
pytestmark = pytest.mark.filterwarnings("ignore:.*(directory .* not empty|treespec|You are overfitting|`shuffle=True`)")


class Steps(Sleeping):
    """Logs a validation loss that is least after the second epoch, and may fail in a step."""

    def __init__(self, error=None, **seconds):
        super().__init__(**seconds)
        self.error = error

    def training_step(self, batch, batch_idx):
        if self.error is not None and self.global_step == 3:
            raise self.error
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", abs(float(self.current_epoch) - 1.0) + 0.25)

    def test_step(self, batch, batch_idx): ...


def made(folder, report, **options):
    keeper = ModelCheckpoint(monitor="val/loss", filename="{epoch}")
    defaults = {"max_epochs": 3, "logger": CSVLogger(folder, name=None, version="run"), "callbacks": [report, keeper]}
    return L.Trainer(**QUIET | {"default_root_dir": folder} | defaults | options)


def names(folder):
    return sorted(path.name for path in folder.rglob("run_report*"))


def test_a_fit_ends_with_table_picture_and_json(tmp_path, capsys, monkeypatch):
    use_clock(monkeypatch, run_parts)  # on which the sleeps are what takes longest, however busy the machine is
    report, module = RunReport(), Steps()
    trainer = made(tmp_path, report)
    SLEPT.clear()
    trainer.fit(module, rows(4, seconds=0.02), rows(1))
    out, summary = capsys.readouterr().out, report.summary
    best = tmp_path / "run" / "checkpoints" / "epoch=1.ckpt"
    assert [tuple(each) for each in summary.best] == [("val/loss", 0.25, str(best))]
    assert best.is_file()
    assert (summary.status, summary.epochs, summary.batches, summary.steps) == ("finished", 3, 12, 12)
    assert tuple(summary.parts) == RUN_PARTS
    assert sum(summary.parts.values()) == pytest.approx(summary.seconds)
    assert SLEPT["data"] <= summary.parts["data"] + 1e-6  # the loader's sleeps are waiting
    assert max(summary.parts, key=summary.parts.get) == "data"
    training = summary.seconds - summary.parts["validation"] - summary.parts["checkpoints"]
    assert summary.samples_per_s == pytest.approx(12 * 2 / training)
    size = sum(parameter.nbytes for parameter in module.parameters())
    assert (summary.memory["parameters"], summary.memory["gradients"], summary.memory["optimizer"]) == (size, size, 0)
    assert summary.memory["peak"] > 2**24
    for told in ("The fit: epochs 3, batches 12", "waiting for data", "best val/loss 0.25", "epoch=1.ckpt"):
        assert told in out
    assert "1.25 at first, 1.25 at the end, least 0.25 at step 8" in " ".join(out.split())
    assert f"\n  trainer.test(ckpt_path={str(best)!r})\n" in out
    assert json.loads((tmp_path / "run" / "run_report.json").read_text()) == summary.to_dict()
    assert (tmp_path / "run" / "run_report.png").stat().st_size > 1000
    assert isinstance(trainer.profiler, PassThroughProfiler)


@pytest.mark.slow
def test_another_fit_of_the_trainer_counts_anew_and_overwrites_nothing(tmp_path):
    report = RunReport()
    trainer = made(tmp_path, report, max_epochs=1)
    trainer.fit(Steps(), rows(2), rows(1))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Steps(), rows(2), rows(1))
    assert (report.summary.epochs, report.summary.batches, report.summary.steps) == (1, 2, 2)
    resumed = RunReport()
    made(tmp_path, resumed, max_epochs=4).fit(Steps(), rows(2), rows(1), ckpt_path=report.summary.best[0].path)
    assert resumed.summary.epochs == resumed.summary.steps / 2 == 2
    files = [f"run_report{n}.{kind}" for n in ("", "_2", "_3") for kind in ("json", "png")]
    assert names(tmp_path) == sorted([*files, "run_report_3_curves.png"])  # of the fit that validated twice


@pytest.mark.sampled(default=2)
@pytest.mark.parametrize(
    ("options", "files"),
    [
        ({"fast_dev_run": True}, []),
        ({"logger": False}, []),
        ({"overfit_batches": 1}, FILES),
        ({"callbacks": [], "enable_checkpointing": False}, FILES),
        ({"limit_val_batches": 0, "callbacks": [], "enable_checkpointing": False}, FILES[:2]),
    ],
    ids=["fast_dev_run", "no logger", "overfit_batches", "no checkpoints", "no validation"],
)
def test_other_fits(options, files, tmp_path, capsys):
    report = RunReport()
    options = options | ({"callbacks": [report]} if "callbacks" in options else {})
    made(tmp_path, report, **options).fit(Steps(), rows(2), rows(1))
    assert names(tmp_path) == files
    assert ("The fit: " in capsys.readouterr().out) == ("fast_dev_run" not in options)
    if report.summary is not None:
        assert bool(report.summary.best) == ("callbacks" not in options)


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), "interrupted"), (ValueError("planted"), "failed")])
def test_a_fit_that_is_stopped_is_reported_up_to_there(error, status, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("signal.signal", lambda *_: None)  # Lightning ignores further interrupts for good
    report = RunReport()
    trainer = made(tmp_path, report)
    with pytest.raises((SystemExit, ValueError)):
        trainer.fit(Steps(error), rows(4), rows(1))
    told = json.loads((tmp_path / "run" / "run_report.json").read_text())
    assert (told["status"], told["batches"]) == (status, 3)
    assert told["error"] == ("ValueError: planted" if status == "failed" else None)
    assert f"batches 3, {told['seconds']:.3g} s, {status}" in capsys.readouterr().out
    assert isinstance(trainer.profiler, PassThroughProfiler)


@pytest.fixture
def drawn(monkeypatch):
    """Figures by the names of their files."""
    figures = {}
    save = Figure.savefig

    def record(figure, path, **options):
        figures[next(name for name in FILES if name in str(path))] = figure
        save(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", record)
    return figures


@pytest.mark.slow
def test_pictures_have_units_and_mark_the_best_checkpoint(tmp_path, drawn):
    report = RunReport()
    made(tmp_path, report).fit(Steps(), rows(4), rows(1))
    (axis,) = drawn["run_report.png"].axes
    assert axis.get_xlabel().startswith("time, s (")
    assert len({bar.get_facecolor() for bar in axis.patches}) == 1  # parts are told by their names
    (axis,) = drawn["run_report_curves.png"].axes
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("optimizer step", "val/loss")
    curve, best = axis.lines
    assert curve.get_xydata().tolist() == [[4, 1.25], [8, 0.25], [12, 1.25]]
    assert [[*point] for point in report.summary.curves["val/loss"]] == curve.get_xydata().tolist()
    assert best.get_xydata().tolist() == [[8, 0.25]]
    assert best.get_color() != curve.get_color()
    assert axis.get_title() == "best checkpoint: 0.25"


class OnGraphs(Steps):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch.x, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", 1.0, batch_size=1)


def test_batches_of_graphs_are_noticed(tmp_path):
    report = RunReport()
    graphs = DataLoader([Data(torch.ones(2, 3), num_nodes=2)] * 3)
    made(tmp_path, report, max_epochs=1).fit(OnGraphs(), graphs, graphs)
    assert report.has_graphs
    made(tmp_path, report, max_epochs=1).fit(Steps(), rows(1), rows(1))
    assert not report.has_graphs


@pytest.mark.sampled(default=1)
@pytest.mark.parametrize(
    ("keeper", "epochs", "is_told"),
    [
        (ModelCheckpoint(), 5, True),
        (ModelCheckpoint(), 3, False),  # one validation after the least loss may be noise
        (ModelCheckpoint(monitor="val/loss"), 5, False),
        (RestoringEarlyStopping("val/loss", patience=9), 5, False),
    ],
)
def test_a_loss_that_rises_to_the_end_is_told_unless_the_best_is_kept(keeper, epochs, is_told, tmp_path, capsys):
    report = RunReport()
    made(tmp_path, report, max_epochs=epochs, callbacks=[report, Watchdog(), keeper]).fit(Steps(), rows(2), rows(1))
    told = capsys.readouterr().out
    assert bool(report.summary.health) == ("overfitting, first at batch 4" in told) == is_told
    text = "val/loss was least at step 4, 0.25, and is 3.25 at the end; keep the best by ModelCheckpoint(monitor="
    assert (text in " ".join(told.split())) == is_told  # lines of the table are broken


@pytest.mark.slow
def test_rates_are_not_written_as_powers_of_ten(tmp_path, drawn):
    report = RunReport()
    made(tmp_path, report, max_epochs=1).fit(Steps(), rows(1), rows(1))
    summary = replace(report.summary, samples_per_s=18412.3)
    summary.draw(tmp_path / "run_report.png")
    assert drawn["run_report.png"].axes[0].get_xlabel().endswith("in all, 18,412 samples/s)")
    assert ("samples", "18,412 a second") in summary.table().rows


@pytest.mark.slow
def test_long_curves_are_thinned(tmp_path, monkeypatch):
    monkeypatch.setattr(run_report, "_MOST_POINTS", 4)
    report = RunReport()
    made(tmp_path, report, max_epochs=6).fit(Steps(), rows(1), rows(1))
    assert [step for step, _ in report.summary.curves["val/loss"]] == [1, 3, 5, 6]


class Counting(SimpleProfiler):
    counts = 0

    def start(self, action_name):
        self.counts += 1
        super().start(action_name)


def test_a_profiler_of_the_user_stays_and_gets_all_actions(tmp_path):
    counts = []
    for report in ([], [RunReport()]):
        profiler = Counting()
        trainer = L.Trainer(**QUIET, max_epochs=1, logger=False, enable_checkpointing=False, callbacks=report,
                            profiler=profiler)  # fmt: skip
        trainer.fit(Steps(), rows(4), rows(1))
        assert trainer.profiler is profiler
        assert {"start", "stop"}.isdisjoint(vars(profiler))
        counts.append(sum(not name.startswith("[Callback]RunReport") for name in profiler.recorded_durations))
    assert counts[0] == counts[1] > 20
    assert report[0].summary.parts["forward"] > 0


@pytest.mark.sampled(default=1)
@pytest.mark.parametrize("broken", ["attach_run_parts", "peak_bytes", "print_tables", "write_atomically"])
def test_errors_become_warnings(broken, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("planted")

    monkeypatch.setattr(run_report, broken, fail)
    trainer = made(tmp_path, RunReport())
    with pytest.warns(UserWarning, match="the report of the run failed: RuntimeError: planted"):
        trainer.fit(Steps(), rows(2), rows(1))
    assert trainer.global_step == 6
    assert isinstance(trainer.profiler, PassThroughProfiler)


def test_without_matplotlib_there_is_no_picture_and_no_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(run_report, "find_spec", lambda name: None)
    made(tmp_path, RunReport()).fit(Steps(), rows(2), rows(1))  # pytest makes warnings errors
    assert names(tmp_path) == ["run_report.json"]


@pytest.mark.slow
def test_the_share_of_the_peak_is_counted_in_one_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(run_report, "_COUNT_AFTER", 0.0)
    monkeypatch.setattr(run_report, "num_compiled_graphs", lambda: 0)
    monkeypatch.setattr(run_report, "matmul_rate", lambda *_, **__: 1e6)
    report = RunReport()
    made(tmp_path, report).fit(Steps(), rows(4), rows(1))
    flops = 2 * (2 * 2 * 3 * 1)  # forward, and backward to the weights, of 2 samples
    training = report.summary.seconds - report.summary.parts["validation"] - report.summary.parts["checkpoints"]
    assert report.summary.share_of_peak == pytest.approx(12 * flops / training / 1e6)


@pytest.mark.slow
def test_numbers_that_are_not_finite_are_none_in_json(tmp_path):
    class Lost(Steps):
        def validation_step(self, batch, batch_idx):
            self.log("val/loss", float("nan"))

    report = RunReport()
    made(tmp_path, report).fit(Lost(), rows(2), rows(1))
    told = json.loads((tmp_path / "run" / "run_report.json").read_text())
    assert told["metrics"]["val/loss"] is told["best"][0]["value"] is None


def check_waiting(rank):
    report = RunReport()
    trainer = L.Trainer(**QUIET | {"devices": 2}, strategy="ddp", max_epochs=1, logger=False, callbacks=[report],
                        enable_checkpointing=False, use_distributed_sampler=False)  # fmt: skip
    trainer.fit(Steps(forward=0.05 * rank), rows(10))
    if rank:
        assert report.summary is None
    else:
        parts = report.summary.parts
        assert 0.35 < parts["waiting"] < 0.75, parts
        assert sum(parts.values()) == pytest.approx(report.summary.seconds)


@pytest.mark.slow
def test_the_first_rank_reports_how_long_it_waits_for_the_other():
    run_ranks(check_waiting)


@pytest.mark.slow
def test_a_full_disk_leaves_a_warning_and_no_half_written_picture(tmp_path, monkeypatch):
    def fill(figure, path, **_):
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fill)
    trainer = made(tmp_path, RunReport())
    with pytest.warns(UserWarning, match=r"the report of the run failed: .*run_report\.png could not be written"):
        trainer.fit(Steps(), rows(2), rows(1))
    assert trainer.state.finished
    assert names(tmp_path) == ["run_report.json"]
    assert not list(tmp_path.rglob(".*png*"))
