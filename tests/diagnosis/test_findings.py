"""Slowness that is planted in a foreign module, and what the doctor says of it."""

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader as GraphLoader
from torch_geometric.nn import GPSConv

from lightning_accel.diagnosis import (
    Diagnosis,
    Examined,
    TooShortError,
    call_tree,
    doctor,
    examination,
    examine,
    find_slowness,
    loader_lines,
    loader_times,
)
from lightning_accel.diagnosis.examination import SlowLoop
from lightning_accel.diagnosis.findings import Finding
from lightning_accel.diagnosis.graph_breaks import Compilations, GraphBreaks
from lightning_accel.diagnosis.loader_lines import LoaderLine
from lightning_accel.diagnosis.picture import draw_step
from lightning_accel.diagnosis.run_tables import _findings, run_tables
from lightning_accel.measure import Rates, Segment, Step, describe_machine, part_times, step_parts
from lightning_accel.measure.machine import usable_cores
from lightning_accel.nn.graph_attention import padding_gps, replace_gps_
from tests.planted import SLEPT, Rows, Sleeping, rows, sleep, use_clock
from tests.ranks import run_ranks

RATES = Rates("cpu", 1, {"fp64": 1e9, "fp32": 2e9, "bf16": 4e9}, 1e10, None, None, None, None, {})


def trainer_of(**options):
    settings = {
        "max_epochs": 50,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "num_sanity_val_steps": 0,
    }
    return L.Trainer(**settings | options)


def findings(module, loader, max_steps=10, **options):
    seen = examine(trainer_of(**options), module, loader, seconds=60, max_steps=max_steps)
    found = find_slowness(seen, describe_machine(), RATES)
    assert [one.cost_ms for one in found] == sorted((one.cost_ms for one in found), reverse=True)
    return {one.name: one for one in found}, seen


@pytest.fixture(autouse=True)
def clear(run_folder):
    """An empty folder, which must stay empty."""
    SLEPT.clear()
    yield
    assert not [path for path in run_folder.rglob("*") if path.is_file()]


@pytest.fixture
def clock(monkeypatch):
    """Sleeps take no time but on a clock of their own."""
    use_clock(monkeypatch, examination, loader_lines, loader_times, step_parts)


@pytest.mark.slow
def test_a_sound_run_has_no_findings():
    class Sound(Sleeping):
        def training_step(self, batch, batch_idx):
            return self.net(batch).square().mean()

    found, seen = findings(Sound(forward=0.0), rows(8), log_every_n_steps=50)
    assert set(found) <= {"slow loader", "slow hook"}, found  # of microseconds, in a step of a millisecond
    assert seen.batch_size == 2
    assert seen.flops == 2 * 2 * 3 + 2 * 2 * 3  # forward, and the weights' gradient
    assert seen.memory.parameters == 16
    assert len(seen.steps) == 10
    rates = replace(RATES, matmul=RATES.matmul | {"fp32": 1e9, "fp32 by oneDNN": 4e9})

    def slow(**other):
        found = find_slowness(replace(seen, **{"onednn_flops": 8_000_000_000} | other), describe_machine(), rates)
        return [one for one in found if one.name == "slow products"]

    assert slow()[0].cost_ms == pytest.approx(6000)
    parts = part_times(seen.steps)
    work = parts["forward"] + parts["backward"]

    def full(**other):
        changed = replace(seen, **{"flops": 8_000_000_000} | other)
        return [one for one in find_slowness(changed, describe_machine(), RATES) if one.name == "full precision"]

    assert full()[0].cost_ms == pytest.approx(work / 2)  # of products at twice the rate
    assert full(flops=int(1.6e6 * work))[0].cost_ms == pytest.approx(0.4 * work, rel=0.01)
    assert "bf16-mixed" in full()[0].mend
    assert not full(flops=100)
    assert not full(precision="bf16-mixed")
    assert not full(float64=["weight"])
    # of matrix products at half the rate of float32
    emulating = replace(RATES, matmul=RATES.matmul | {"bf16": RATES.matmul["fp32"] / 2})
    emulated = replace(seen, flops=8_000_000_000, precision="bf16-mixed")
    told = [one for one in find_slowness(emulated, describe_machine(), emulating) if one.name == "emulated precision"]
    assert told[0].cost_ms == pytest.approx(work / 2)
    assert "products in float32 are here 2 times as fast" in told[0].what
    assert "emulated precision" not in {one.name for one in find_slowness(emulated, describe_machine(), RATES)}
    assert "4 times" in slow()[0].what
    assert not slow(onednn_flops=seen.onednn_flops)  # of small products
    assert not slow(multiplies_by_onednn=True)
    assert not slow(precision="bf16-mixed")


@pytest.mark.slow
def test_a_sleeping_dataset_is_a_slow_loader(clock):
    found, seen = findings(Sleeping(), rows(8, seconds=0.02))
    assert found["slow loader"].cost_ms == pytest.approx(20, rel=0.01)
    assert seen.loading_ms == pytest.approx(20, rel=0.01)
    assert "num_workers=" in found["slow loader"].mend
    assert "; of loading, 100% in " in found["slow loader"].what
    assert "(self.now_ns += round(1e9 * seconds))" in found["slow loader"].what


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_are_drawn_are_not_to_be_prepared_once(workers):
    facts = {"class": "DataLoader", "num_workers": workers, "pin_memory": False}
    steps = [Step((Segment("data", "", 0, 10_000_000), Segment("forward", "", 10_000_000, 14_000_000)))]
    lines = [LoaderLine("cnn.py:27", "sample(x)", 0.62), LoaderLine("cnn.py:26", "affine_grid(x)", 0.2)]
    once, drawn = (
        find_slowness(
            seen_without_a_run(loader_facts=[facts], steps=steps, loader_lines=lines, loader_draws=draws),
            replace(describe_machine(), cores=4),
            RATES,
        )[0]
        for draws in (False, True)
    )
    assert once.what.endswith("; of loading, 62% in cnn.py:27 (sample(x)) and 20% in cnn.py:26 (affine_grid(x))")
    assert "prepare samples once, ahead" in once.mend
    assert "prepare samples" not in drawn.mend
    assert "whole batches in on_after_batch_transfer" in drawn.mend


def test_the_table_says_which_findings_count_the_same_time():
    def rows_of(*parts):
        return _findings([Finding(f"cause {n}", "seen", 1.0, "mend", part) for n, part in enumerate(parts)]).rows

    assert "may count the same" not in str(rows_of("data", "logging"))
    for parts in (("data", "data"), ("data", "")):
        assert "may count the same milliseconds" in rows_of(*parts)[-1][-1]


@pytest.mark.parametrize(
    ("findings", "data_ms", "is_named"),
    [
        ([], 5, True),
        ([], 15, False),  # the data take longer
        ([Finding("slow loader", "seen", 5.0, "mend", "data")], 5, True),
        ([Finding("full precision", "seen", 5.0, "mend", "forward and backward")], 5, False),
        ([Finding("bad loss", "seen", 0.0, "mend")], 5, False),
    ],
)
def test_tune_is_named_where_no_finding_names_both_passes(findings, data_ms, is_named):
    times = {"forward": 6, "backward": 8, "data": data_ms}
    step = Step(tuple(Segment(part, "", 0, ms * 10**6) for part, ms in times.items()))
    time, _, table = run_tables(seen_without_a_run(steps=[step]), None, findings)
    assert time.rows[-1][-1] == "mean of 1: few, take more seconds"
    assert run_tables(seen_without_a_run(steps=[step] * 10), None, [])[0].rows[-1][-1] == "mean of 10"
    hint = "forward and backward take 74% of a step, and no finding names them: tune measures what makes them faster"
    assert table.rows[-1][-1].startswith(hint) == is_named
    assert str(table.rows).count("tune measures") == is_named


@pytest.mark.slow
def test_a_sleeping_hook_is_named(clock):
    found, _ = findings(Sleeping(callbacks=0.02), rows(8))
    assert found["slow hook"].cost_ms == pytest.approx(20, rel=0.01)
    assert "Sleeping.on_train_batch_end" in found["slow hook"].what


class SleepingCSV(CSVLogger):
    def log_metrics(self, metrics, step=None):
        sleep("logging", 0.03)
        super().log_metrics(metrics, step)


@pytest.mark.sampled(slow=2)
@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2, 50])
def test_logging_at_each_step_costs_what_the_logger_takes(clock, every, run_folder):
    logger = SleepingCSV(str(run_folder / "logs"))
    found, seen = findings(Sleeping(forward=0.001), rows(8), logger=logger, log_every_n_steps=every)
    assert sum(seen.logged) == pytest.approx(10 / every, abs=1)
    if every == 50:
        assert "frequent logging" not in found
    else:
        assert found["frequent logging"].cost_ms == pytest.approx(30 * (1 / every - 1 / 50), rel=0.01)


@pytest.mark.slow
def test_items_and_prints_are_found_by_their_function(capsys):
    class Reading(Sleeping):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.last = loss.item()
            self.total = float(batch.sum())  # float() is no call of a function
            if loss > 0:
                print("loss", loss)
            self.some = batch[torch.ones((), dtype=torch.int64)]  # an operator has no line
            return loss

    found = findings(Reading(), rows(8))[1].syncs
    first = Reading.training_step.__code__.co_firstlineno
    read = {one.place: (one.is_print, one.times) for one in found}
    assert read == {
        f"{__file__}:{first + 2} in training_step": (False, 1.0),
        f"{__file__}:{first + 3} in training_step": (False, 1.0),
        f"{__file__}:{first + 4} in training_step": (False, 1.0),
        f"{__file__}:{first + 5} in training_step": (True, pytest.approx(5, abs=5)),
        f"{__file__} in training_step": (False, 1.0),
    }
    assert not {"__bool__", "__float__"} & vars(torch.Tensor).keys()
    assert all(one.ms > 0 for one in found)


@pytest.mark.slow
def test_items_between_steps_are_counted_in_each_batch():
    class Reading(Rows):
        def __getitem__(self, index):
            row = super().__getitem__(index)
            return row * float(torch.ones(()))

    class Hooked(Sleeping):
        def on_train_batch_end(self, *_):
            torch.ones(()).item()

    loader = DataLoader(Reading(8, 5), batch_size=5)
    seen = findings(Hooked(), loader)[1]
    lines = [Reading.__getitem__.__code__.co_firstlineno + 2, Hooked.on_train_batch_end.__code__.co_firstlineno + 1]
    places = [f"{__file__}:{lines[0]} in __getitem__", f"{__file__}:{lines[1]} in on_train_batch_end"]
    read = {one.place: (one.times, one.is_loading) for one in seen.syncs}
    assert read == {places[0]: (5, True), places[1]: (1, False)}
    for device, told in (("cpu", {places[1]}), ("cuda", set(places))):
        found = find_slowness(replace(seen, device=torch.device(device)), describe_machine(), RATES)
        named = {one.what.split(" reads a number")[0]: one.what for one in found if one.name == "host sync"}
        assert set(named) == told
        assert device == "cpu" or [named[place].endswith("if it is on the GPU") for place in places] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_float64_is_found_in_weights_and_batches(precision):
    class Double(Rows):
        def __getitem__(self, index):
            return super().__getitem__(index).double()

    loader = DataLoader(Double(8), batch_size=2)
    found, seen = findings(Sleeping(forward=0.01).double(), loader, precision=precision)
    assert seen.multiplies_in == "fp64"
    if precision == "64-true":  # it is asked for
        assert "float64" not in found
        return
    assert "in net.weight, net.bias, the batch, though precision is 32-true" in found["float64"].what
    parts = part_times(seen.steps)
    assert found["float64"].cost_ms == pytest.approx((parts["forward"] + parts["backward"]) / 2)


class Unused(Sleeping):
    def __init__(self):
        super().__init__()
        self.branch = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout()

    def training_step(self, batch, batch_idx):
        return super().training_step(self.drop(self.norm(batch)), batch_idx)

    def validation_step(self, batch, batch_idx):
        self.drop.train()


@pytest.mark.slow
def test_what_the_modules_structure_tells():
    found, _ = findings(Unused(), rows(8))
    assert "branch.weight, branch.bias" in found["unused parameters"].what
    assert "norm" in found["tiny batch norms"].what
    assert "train mode in validation" not in found  # there is no validation


@pytest.mark.slow
def test_a_module_in_train_mode_is_seen_in_validation():
    class Validated(Unused):
        def train_dataloader(self):
            return rows(8)

        val_dataloader = train_dataloader

    found, _ = findings(Validated(), None)
    assert found["train mode in validation"].what.endswith("drop")


@pytest.mark.slow
def test_parameters_of_another_optimizer_are_used():
    """Each backward pass of a GAN reaches the parameters of one network."""

    class Two(Sleeping):
        def __init__(self):
            super().__init__(manual=True)
            self.other = nn.Linear(3, 1)

        def training_step(self, batch, batch_idx):
            for net, optimizer in zip((self.net, self.other), self.optimizers(), strict=True):
                optimizer.zero_grad()
                self.manual_backward(net(batch).mean())
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self):
            return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.net, self.other)]

    assert "unused parameters" not in findings(Two(), rows(8))[0]


@pytest.mark.slow
def test_too_many_threads_are_measured_with_fewer(monkeypatch, clock):
    """Threads cost what they are planted to: each beyond the cores 10 ms."""

    class Crowded(Sleeping):
        def training_step(self, batch, batch_idx):
            sleep("forward", 0.01 * torch.get_num_threads())
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr("lightning_accel.diagnosis.examination.usable_cores", lambda: 1.0)
    monkeypatch.setattr("lightning_accel.measure.machine.usable_cores", lambda root: 1.0)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        found, seen = findings(Crowded(), rows(8))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert found["too many threads"].cost_ms == pytest.approx(20, rel=0.01)
    assert part_times(seen.steps)["forward"] == pytest.approx(30, rel=0.01)


class SlowToStart(DataLoader):
    def __iter__(self):
        sleep("start", 0.04 * self.num_workers)
        return super().__iter__()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker")
@pytest.mark.parametrize("persistent", [False, True])
def test_too_many_workers_are_measured_with_fewer(monkeypatch, clock, persistent):
    """Workers cost what they are planted to: each beyond the cores 50 ms a step, and 40 ms an epoch of 40 batches."""

    class Crowded(Sleeping):
        def training_step(self, batch, batch_idx):
            sleep("forward", 0.05 * self.trainer.train_dataloader.num_workers)
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr("lightning_accel.diagnosis.examination.usable_cores", lambda: 1.0)
    loader = SlowToStart(Rows(40, 2), batch_size=2, num_workers=3, persistent_workers=persistent)
    found, seen = findings(Crowded(), loader, max_steps=12)
    assert seen.fewer_workers_saved_ms == pytest.approx(100, rel=0.01)
    assert len(seen.steps) >= 11
    assert seen.loader_facts[0]["num_workers"] == loader.num_workers == 3
    if persistent:
        assert seen.workers_start_ms is None
    else:
        assert (seen.workers_start_ms, seen.fewer_workers_start_ms) == pytest.approx((3, 1), rel=0.01)
    assert found["too many workers"].cost_ms == pytest.approx(100 if persistent else 102, rel=0.001)


class SleepingBranch(nn.Linear):
    def forward(self, x):
        sleep("branch", 0.05)
        return super().forward(x)


@pytest.mark.weekly
@pytest.mark.slow
def test_a_loop_and_a_branch_cost_what_they_are_planted_to(monkeypatch):
    monkeypatch.setattr(call_tree, "_SMALL_NS", 5 * call_tree._SMALL_NS)  # after a sleep, and on a slow machine

    class Wasteful(Sleeping):
        def __init__(self):
            super().__init__()
            self.branch = SleepingBranch(3, 3)
            self.slept = []

        def training_step(self, batch, batch_idx):
            SLEPT.clear()
            self.branch(batch)
            loss = super().training_step(batch, batch_idx)
            for _ in range(20):
                sleep("loop", 0.005)
                loss = loss + batch.sum()
            self.slept.append(Counter(SLEPT))
            return loss

    module = Wasteful()
    found, seen = findings(module, rows(8), max_steps=5)
    costs = found["unused parameters"].cost_ms, found["small operations"].cost_ms
    profiled = [(1000 * slept["branch"], 950 * slept["loop"]) for slept in module.slept[3:5]]  # one pass of 20 remains
    assert any(costs == pytest.approx(planted, rel=0.25) for planted in profiled), (costs, profiled)
    first = Wasteful.training_step.__code__.co_firstlineno
    assert [(one.place, one.times) for one in seen.loops] == [(f"{__file__}:{first + 5} in training_step", 20)]


@pytest.mark.slow
def test_files_of_callbacks_go_elsewhere(run_folder):
    """The fixture finds those that do not."""

    class Writing(Sleeping):
        def on_train_start(self):
            folders = [Path(self.trainer.default_root_dir), Path(self.trainer.log_dir)]
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "mine.txt").write_text("written")
            self.folders = folders

    module = Writing()
    trainer = trainer_of(logger=CSVLogger("logs"), enable_checkpointing=True, callbacks=[ModelCheckpoint("kept")])
    seen = examine(trainer, module, rows(8), seconds=1e-3, max_steps=50)
    assert len(seen.steps) == 4  # as soon as there are three, without those that had instruments
    assert all(run_folder not in folder.parents and folder != run_folder for folder in module.folders)


@pytest.mark.weekly
@pytest.mark.slow
def test_graph_breaks_of_a_compiled_part_are_counted():
    class Net(nn.Module):
        def forward(self, x):
            x = x + 1
            print("broken")
            x = x + 1
            print("broken")
            return x + 1

    class Compiled(Sleeping):
        def __init__(self):
            super().__init__()
            self.shift = torch.compile(Net(), backend="eager")

        def training_step(self, batch, batch_idx):
            return super().training_step(self.shift(batch), batch_idx)

    found, seen = findings(Compiled(), rows(8), max_steps=3)
    assert seen.graph_breaks[0].breaks == 2
    assert f"{Path(__file__).name}:" in found["graph breaks"].what


@pytest.mark.slow
def test_accumulated_batches_are_examined():
    _, seen = findings(Sleeping(), rows(8), accumulate_grad_batches=3)
    assert len(seen.steps) == 10
    assert seen.memory.gradients == 16


def test_a_run_that_is_too_short_says_so():
    with pytest.raises(TooShortError, match="ended after 4 batches, and the doctor needs at least 9"):
        findings(Sleeping(), rows(4), max_epochs=1)


@pytest.mark.slow
def test_a_diagnosis_is_told_written_and_drawn(monkeypatch, clock, run_folder, capsys, caplog, tmp_path_factory):
    monkeypatch.setattr("lightning_accel.diagnosis.diagnosing.measure_rates", lambda folder, device=None: RATES)
    found = doctor(lambda: (trainer_of(), Sleeping(callbacks=0.01, forward=0.01), rows(8)), seconds=0.2)
    assert "train with instruments for 6 batches, then for about 0.2 s" in caplog.text
    assert "measure this machine" in caplog.text
    assert isinstance(found, Diagnosis)
    assert found.share_of_peak == pytest.approx(found.run.flops / sum(part_times(found.run.steps).values()) * 1e3 / 2e9)
    found.print()
    out = capsys.readouterr().out
    for told in (out, str(found)):
        parts = "callbacks and hooks", "slow hook", "of the measured peak", "optimizer states"
        assert all(text in told for text in parts)
    assert len(repr(found)) < 2000
    target = tmp_path_factory.mktemp("told")
    found.write_json(target / "x.json")
    told = json.loads((target / "x.json").read_text())
    assert told["findings"][0]["name"] == "slow hook"
    assert sum(told["run"]["parts_ms"].values()) == pytest.approx(told["run"]["step_ms"])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="matplotlib is needed"):
        found.draw(target)


def test_a_doctor_is_given_a_function():
    made = (trainer_of(), Sleeping(), rows())
    for no_function in (made[0], made):
        with pytest.raises(TypeError, match=f"got {type(no_function).__name__}. Pass the function itself"):
            doctor(no_function)


def test_the_timeline_has_a_unit(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: (drawn.append(figure), path.touch()))
    step = Step((Segment("forward", "", 0, 10_000_000), Segment("waiting", "", 10_000_000, 14_000_000)))
    draw_step([step] * 3, tmp_path / "step.png")
    (tmp_path / "step.png").unlink()
    (axis,) = drawn[0].axes
    assert axis.get_xlabel() == "time, ms (step of median time, of 3)"
    assert axis.get_xlim() == (0, 14)
    assert [label.get_text() for label in axis.get_yticklabels()] == ["forward", "waiting for other ranks"]


def seen_without_a_run(**facts):
    step = Step((Segment("forward", "", 0, 10_000_000), Segment("waiting", "", 10_000_000, 14_000_000)))
    module = nn.Sequential(nn.Linear(30, 64), nn.Linear(64, 65))
    settings = {"world_size": 1, "precision": "32-true", "batch_size": 64, "log_every_n_steps": 50}
    settings["threads"] = max(int(usable_cores()), 1)
    known = {"device": torch.device("cpu"), "module": module, "steps": [step], "logged": [False]}
    return Examined(**known | settings | facts)


def test_a_bad_loss_comes_first():
    facts = {"loader_facts": [{"class": "DataLoader", "num_workers": 0, "pin_memory": False}]}
    bad, good = (
        find_slowness(seen_without_a_run(bad_loss=loss, **facts), describe_machine(), RATES)
        for loss in ("the loss is nan", "")
    )
    assert (bad[0].name, bad[0].what) == ("bad loss", "in the first batch, the loss is nan")
    assert bad[1:] == good


class Tokens(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Embedding(5, 4)

    def training_step(self, batch, batch_idx):
        return self.net(batch["input_ids"]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ((8, 32), {"padding": 1 - 32 / 40, "uneven lengths": 1 - 20 / 40 - 0.2}),
        ((30, 31), {"padding": 0.2}),
        ((40, 39), {}),
    ],
)
def test_padding_costs_its_share_of_both_passes(lengths, expected):
    masks = [(torch.arange(40) < length).long() for length in lengths] * 12
    samples = [{"input_ids": mask, "attention_mask": mask} for mask in masks]
    found, seen = findings(Tokens(), DataLoader(samples, 2))
    parts = part_times(seen.steps)
    costs = {name: found[name].cost_ms / (parts["forward"] + parts["backward"]) for name in expected}
    assert costs == pytest.approx(expected)
    assert {"padding", "uneven lengths"} & set(found) == set(expected)


class Blocks(Sleeping):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([GPSConv(32, None, 4), GPSConv(32, None, 4, attn_kwargs={"dropout": 0.1})])
        self.never_called = GPSConv(32, None, 4)

    def training_step(self, batch, batch_idx):
        x = self.net(torch.ones(batch.num_nodes, 3))
        for block in self.blocks:
            x = block(x.expand(-1, 32), batch.edge_index, batch.batch)
        return x.mean()


@pytest.mark.slow
def test_attention_of_gps_that_pads_is_found(native):
    graphs = [Data(edge_index=torch.zeros(2, 0, dtype=torch.int64), num_nodes=200) for _ in range(24)]
    _, seen = findings(Blocks(), GraphLoader(graphs, 2))
    assert seen.padding_gps == 1
    assert seen.padding_gps_ms > 0
    replace_gps_(seen.module)
    assert padding_gps(seen.module) == []


def test_padded_attention_costs_half_of_both_passes():
    costs = {}
    for ms in (0.1, 4.0):
        found = find_slowness(seen_without_a_run(padding_gps=2, padding_gps_ms=ms), describe_machine(), RATES)
        costs[ms] = [one.cost_ms for one in found if one.name == "padded attention"]
    parts = part_times(seen_without_a_run().steps)
    assert costs == {0.1: [], 4.0: [pytest.approx(2 * (1 + parts["backward"] / parts["forward"]))]}


def test_unpinned_batches_cost_the_difference_of_the_rates():
    facts = {"class": "DataLoader", "num_workers": 0, "pin_memory": False}
    rates = replace(RATES, pinned_bytes_per_s=20e9, pageable_bytes_per_s=5e9)
    cuda = {"device": torch.device("cuda"), "batch_bytes": 10**8}
    (found,) = [
        one
        for one in find_slowness(seen_without_a_run(**cuda, loader_facts=[facts]), describe_machine(), rates)
        if one.name == "no pinned memory"
    ]
    assert found.cost_ms == pytest.approx(20 - 5)
    for other in ({"loader_facts": [facts]}, cuda | {"loader_facts": [facts | {"pin_memory": True}]}):
        names = [one.name for one in find_slowness(seen_without_a_run(**other), describe_machine(), rates)]
        assert "no pinned memory" not in names


def test_costs_of_loops_branches_and_compilations():
    facts = {
        "loops": [SlowLoop("mine.py:3 in loss", 8, 40, 4.0), SlowLoop("mine.py:9 in forward", 100, 300, 0.1)],
        "unused": ["branch.weight"],
        "unused_ms": 2.5,
        "graph_breaks": [GraphBreaks("encoder", 3, "print"), GraphBreaks("decoder", 1, "item")],
        "graph_breaks_ms": 2.0,
        "compilations": Compilations(2, 60.0, "forward at mine.py:3"),
    }
    found = find_slowness(seen_without_a_run(**facts), describe_machine(), RATES)
    costs = [(one.name, one.cost_ms) for one in found if one.name != "uneven ranks"]
    assert costs == [
        ("recompilations", 60.0),
        ("small operations", 3.5),  # one operation in place of eight; the other loop costs less than 3 % of 14 ms
        ("unused parameters", 2.5),
        ("graph breaks", 1.5),
        ("graph breaks", 0.5),
    ]
    assert json.dumps(seen_without_a_run(**facts).to_dict())


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ({}, {}),
        ({"workers_start_ms": 0.3}, {}),  # less than 3 % of 14 ms
        ({"workers_start_ms": 5.0}, {"restarted workers": 5.0}),
        ({"fewer_workers_saved_ms": 2.0}, {"too many workers": 2.0}),
        ({"fewer_workers_saved_ms": -1.0}, {"too many workers": 0.0}),
        (
            {"fewer_workers_saved_ms": 2.0, "workers_start_ms": 5.0, "fewer_workers_start_ms": 1.0},
            {"too many workers": 6.0, "restarted workers": 1.0},
        ),
    ],
)
def test_costs_of_workers(costs, expected):
    facts = {"class": "DataLoader", "num_workers": 8, "pin_memory": False}
    found = find_slowness(seen_without_a_run(loader_facts=[facts], **costs), describe_machine(), RATES)
    assert {one.name: one.cost_ms for one in found if "workers" in one.name} == expected


@pytest.mark.parametrize(("saved", "cost"), [(3.0, 3.0), (-2.0, 0.0), (None, 0.0)])
def test_threads_that_cost_nothing_are_told_with_what_fewer_take(saved, cost):
    seen = seen_without_a_run(threads=8, fewer_threads_saved_ms=saved)
    found = find_slowness(seen, replace(describe_machine(), cores=4), RATES)
    (one,) = [one for one in found if one.name == "too many threads"]
    assert one.cost_ms == cost
    assert ("with 4 threads a step took 2 ms longer" in one.what) == (cost != saved and saved is not None)
    assert one.mend.startswith("OMP_NUM_THREADS=4")


@pytest.mark.parametrize(
    ("facts", "what"),
    [
        ({}, "torch uses 1 of 4 cores (OMP_NUM_THREADS=1)"),
        ({"threads": 3}, "torch uses 3 of 4 cores"),
        ({"threads": 4}, None),
        ({"world_size": 2}, "each of 2 processes uses 1 of 4 cores (OMP_NUM_THREADS=1)"),
        ({"world_size": 4}, None),
        ({"num_workers": 2}, "torch uses 1 of 4 cores (OMP_NUM_THREADS=1), beside 2 workers"),
        ({"num_workers": 3}, None),
        ({"device": torch.device("cuda")}, None),
        ({"forward_ms": 4}, None),  # of small operations
        ({"data_ms": 20}, None),
    ],
)
def test_cores_that_no_thread_uses(monkeypatch, facts, what):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    facts = {"threads": 1, "num_workers": 0, "forward_ms": 10, "data_ms": 0} | facts
    loader = {"class": "DataLoader", "num_workers": facts.pop("num_workers"), "pin_memory": True}
    times = 10**6 * facts.pop("forward_ms"), 10**6 * facts.pop("data_ms")
    step = Step((Segment("forward", "", 0, times[0]), Segment("data", "", times[0], sum(times))))
    machine = replace(describe_machine(), cores=4.0, physical_cores=4)
    seen = seen_without_a_run(loader_facts=[loader], steps=[step], **facts)
    found = [one for one in find_slowness(seen, machine, RATES) if one.name == "unused cores"]
    assert [(one.what, one.cost_ms) for one in found] == ([] if what is None else [(what, 0.0)])
    if what == "torch uses 1 of 4 cores (OMP_NUM_THREADS=1)":
        assert found[0].mend == "set it to 4, or leave it out; tune measures which is faster"
        halved = find_slowness(replace(seen, threads=2), replace(machine, physical_cores=2), RATES)
        assert "unused cores" not in [one.name for one in halved]  # of two hyperthreads each


def test_waiting_for_ranks_is_a_finding():
    (found,) = find_slowness(seen_without_a_run(world_size=2, threads=2), replace(describe_machine(), cores=4), RATES)
    assert (found.name, found.cost_ms) == ("uneven ranks", 4.0)


def test_widths_matter_where_there_are_tiles():
    amx = replace(describe_machine(), instruction_sets=("AVX2", "AMX", "AMX-BF16"), cores=4)
    named = {one.name: one for one in find_slowness(seen_without_a_run(precision="bf16-mixed"), amx, RATES)}
    assert named["narrow widths"].what.endswith("0 (30 to 64), 1 (64 to 65)")
    for machine, precision in ((replace(amx, instruction_sets=("AVX2",)), "bf16-mixed"), (amx, "32-true")):
        found = find_slowness(seen_without_a_run(precision=precision), machine, RATES)
        assert "narrow widths" not in [one.name for one in found]


def check_ranks(rank):
    SLEPT.clear()
    trainer = trainer_of(strategy="ddp", devices=2)
    seen = examine(trainer, Sleeping(forward=0.1 * rank), rows(16), seconds=60, max_steps=5)
    if seen is not None:
        return seen.world_size, part_times(seen.steps)["waiting"]
    return 1000 * SLEPT["forward"] / trainer.global_step


@pytest.mark.slow
def test_of_two_ranks_the_first_tells():
    (world_size, waiting), planted = run_ranks(check_ranks)
    assert world_size == 2
    assert waiting == pytest.approx(planted, rel=0.25)


def test_the_timeline_has_a_row_for_each_part(tmp_path_factory):
    segments = [("data", 0, 2), ("forward", 2, 5), ("rest", 5, 6), ("forward", 6, 9)]
    step = Step(tuple(Segment(part, "action", begin * 10**6, end * 10**6) for part, begin, end in segments))
    path = tmp_path_factory.mktemp("drawn") / "figures" / "step.png"
    draw_step([step], path)
    assert path.read_bytes().startswith(b"\x89PNG")
