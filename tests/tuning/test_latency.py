"""Decisions where latency is the goal, of a search whose variants are as fast as a table says."""

import json

import pytest
import yaml

from lightning_accel.tuning import factors
from lightning_accel.tuning.factors import Factor, Refusal
from lightning_accel.tuning.latencies import Latency, LatencyRate, latency_factors_for
from lightning_accel.tuning.program import tune
from lightning_accel.tuning.project import Changes
from lightning_accel.tuning.variant import Step
from lightning_accel.tuning.writing import write_outcome
from tests.tuning import foreign_run
from tests.tuning.test_search import FACTS, World, names, run

OF_MACHINE = "device", "precision", "world_size", "threads", "allocator", "cores", "bfloat16_units"
SERVED = {name: FACTS[name] for name in OF_MACHINE} | {
    "code": FACTS["code"], "shapes_vary": False,
    "num_conv2d": 3, "has_attention": False, "num_deferrable_attentions": 0,
    "num_children": 1, "num_blocks": 4,
    "planned_steps": None, "stage": "predict",
}  # fmt: skip


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch, SERVED)


def test_what_shortens_a_sample_is_joined_however_long_it_starts(world, tmp_path):
    world.start_seconds = {"compile": 90}
    outcome = run(tmp_path, goal="latency")
    assert names(outcome) == ["compile", "precision"]
    assert outcome.proof.ratio.value == pytest.approx(1.5 * 1.4)
    assert outcome.proof.before.median_ms == pytest.approx(100)
    assert outcome.proof.after.median_ms == pytest.approx(100 / 2.1)
    assert outcome.alone["compile=children"].start_seconds == 95
    assert {factor.kind for factor in outcome.chosen} == {"equal", "rounding"}


@pytest.mark.slow
def test_the_report_is_of_milliseconds(world, tmp_path):
    world.start_seconds = {"compile": 90}
    overlay, report, whole, _ = write_outcome(run(tmp_path, goal="latency"), tmp_path, "a test", "2030-01-02")
    text = report.read_text()
    assert "As it is, one sample takes 100 ms (100 to 100) in `predict`." in text
    assert "**2.10 (2.06 to 2.14) times as fast: one sample takes 47.6 ms (47.6 to 47.6) instead of 100 ms" in text
    assert "it starts in 95 s" in text
    assert "| compile=children | 1.50 (1.47 to 1.53) | 66.7 ms (66.7 to 66.7) | 95 |  |" in text
    assert not [word for word in ("per second", "steps", "losses", "over the run", "train") if word in text]
    content = yaml.safe_load(overlay.read_text())
    assert content["trainer"]["precision"] == "bf16-mixed"
    assert content["trainer"]["callbacks+"][0]["init_args"]["compile"] == "children"
    assert not {"steps_per_second", "peak_bytes"} & set(json.loads(whole.read_text()))
    world.speed = {}
    nothing = write_outcome(run(tmp_path / "none", goal="latency"), tmp_path, "a test", "2030-01-02")[0].read_text()
    assert "Nothing was found that lowers the latency of this model by more than the interval" in nothing


def test_changes_whose_outputs_deviate_are_dropped(world, tmp_path):
    world.unequal = {"precision"}
    assert names(run(tmp_path / "rounding", goal="latency")) == ["compile"]
    world.unequal, world.different = set(), {"compile"}  # exact ones may not even deviate like fewer digits
    assert names(run(tmp_path / "exact", goal="latency")) == ["precision"]
    world.speed = {"compile": 1.5, "channels_last": 1.4, "threads": 1.2}
    world.different, world.deviating_pairs = set(), [{"compile", "threads"}]
    outcome = run(tmp_path / "together", goal="latency")
    assert names(outcome) == ["channels_last", "compile"]
    assert [verdict.passed for verdict in outcome.verdicts] == [False, True, True, True, True]


def test_an_interrupted_search_goes_on(world, tmp_path):
    whole = run(tmp_path / "whole", goal="latency")
    world.interrupt_at = len(world.started) + 4
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", goal="latency")
    world.interrupt_at, before = None, len(world.started)
    parts = run(tmp_path / "parts", goal="latency")
    assert parts.changes == whole.changes
    assert parts.latency == whole.latency == Latency(100.0, 100.0, 100.0)
    assert len(world.started) - before < before


def test_measurements_of_another_goal_are_not_used(world, tmp_path):
    tune(foreign_run.works, 600, tmp_path, "latency")
    with pytest.raises(ValueError, match="goal was latency, and is speed"):
        tune(foreign_run.works, 600, tmp_path)


def tried(**facts):
    return [one.name for one in latency_factors_for(SERVED | facts) if isinstance(one, Factor)]


def test_factors_are_those_of_a_model_in_use(monkeypatch):
    monkeypatch.setattr(factors, "why_no_allocator", lambda name: "" if name == "jemalloc" else "not here")
    monkeypatch.setattr(factors, "onednn_outruns_mkl", lambda: True)
    monkeypatch.setattr(factors, "why_no_onednn_matmul", lambda: "")
    monkeypatch.setattr(factors, "has_amx", lambda: True)
    everything = tried()
    exact = ["threads=1", "onednn_matmul", "keep_freed_memory", "allocator=jemalloc", "channels_last"]
    digits = ["matmul_precision=medium", "precision=bf16-mixed", "Bfloat16Precision"]
    assert everything == [*exact, *digits, "compile=children", "compile=blocks"]
    assert set(everything) - set(tried(bfloat16_units=False)) == set(digits)
    assert set(everything) - set(tried(num_conv2d=0)) == {"channels_last"}
    assert set(tried(num_deferrable_attentions=1)) - set(everything) == {"defer_attention_weights"}
    assert set(tried(has_attention=True)) - set(everything) == {
        "attention=math",
        "precision=bf16-mixed with attention=math",
        "Bfloat16Precision with attention=math",
    }
    assert set(tried(has_attention=True, bfloat16_units=False)) - set(everything) == {"attention=math"}
    assert {"benchmark", "precision=16-mixed", "attention=cudnn"} < set(tried(device="cuda", has_attention=True))
    assert "compile=blocks" in [one.name for one in latency_factors_for(SERVED | {"num_blocks": 0}) if _is_refused(one)]
    assert "exact" not in {one.kind for one in latency_factors_for(SERVED) if isinstance(one, Factor)}


def _is_refused(one):
    return isinstance(one, Refusal)


def test_a_turn_is_as_fast_as_its_median_sample():
    """Pauses of the machine hit few samples."""
    steps = [Step(0.0, seconds, 0.0, 0.0) for seconds in (0.1, 0.1, 0.1, 0.1, 5.0)]
    rate = LatencyRate()
    assert rate("one", steps) == pytest.approx(10)
    rate("one", [Step(0.0, 0.3, 0.0, 0.0)] * 5)
    assert rate.latency_of("one") == Latency(pytest.approx(300), pytest.approx(100), pytest.approx(300))
    assert str(Latency(12.345, 1.0, 100.0)) == "12.3 ms (1 to 100)"


@pytest.mark.slow
def test_changes_hold_for_predict(command, run_folder):
    """The overlay of a latency, given to the command of its stage."""
    overlay = run_folder / "tuned.yaml"
    overlay.write_text(yaml.safe_dump(Changes({"precision": "bf16-mixed"}, {"threads": 1}).config()))
    run = ("--model", "Classifier", "--data", "DigitsDataModule", "--trainer.accelerator", "cpu")
    for stage in ("predict", "validate"):
        printed = command(stage, *run, "--config", overlay, "--print_config")
        trainer = yaml.safe_load(printed.out)["trainer"]
        assert trainer["precision"] == "bf16-mixed"
        assert trainer["callbacks"][0]["init_args"]["threads"] == 1
        assert command(stage, *run, "--config", overlay, "--trainer.fast_dev_run", "true").status == 0
