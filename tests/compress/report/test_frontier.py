"""The Pareto front of forms, and its picture."""

import json
import random

import pytest
from matplotlib.collections import PathCollection
from matplotlib.colors import to_rgba

from lightning_accel.compress import Latency, Report, Row
from lightning_accel.compress.report.frontier import Point, draw_frontier, pareto_front
from lightning_accel.compress.report.report import _draw, _draw_frontier
from lightning_accel.ops.figures import BLUE, GREY


def beats(one, other, higher_is_better):
    sign = 1 if higher_is_better else -1
    qualities = sign * one[1], sign * other[1]
    return one[0] <= other[0] and qualities[0] >= qualities[1] and one != other


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_the_front_is_that_of_comparing_all_pairs(higher_is_better):
    """Values of few levels, so that many are equal in one or both."""
    draw = random.Random(0)
    for _ in range(300):
        pairs = [(float(draw.randrange(5)), float(draw.randrange(5))) for _ in range(draw.randrange(9))]
        front = pareto_front(pairs, higher_is_better)
        expected = [
            place for place, own in enumerate(pairs) if not any(beats(one, own, higher_is_better) for one in pairs)
        ]
        assert sorted(front) == expected
        assert [pairs[place][0] for place in front] == sorted(pairs[place][0] for place in expected)


def at(ms):
    return Latency(ms, ms, 11)


def test_picture_joins_the_front_and_leaves_refused_forms_hollow():
    points = [
        Point(at(4.0), 3.2, "fp32 eager", 8_000_000, colour=GREY),
        Point(at(2.0), 3.2, "int8", 2_000_000, "picked"),
        Point(at(1.0), 3.3, "int4", 1_000_000),
        Point(Latency(3.0, 10.0, 11, tuple(2.5 + 0.1 * i for i in range(11))), 3.25, "bf16"),
        Point(at(0.5), 3.1, "wrong", 1_000_000, "refused"),
    ]
    axis = draw_frontier(points, "decoding", "ms", "perplexity", higher_is_better=False).axes[0]
    (line,) = axis.lines
    assert line.get_xydata().tolist() == [[1.0, 3.3], [2.0, 3.2]]
    assert [text.get_text() for text in axis.texts] == [
        "wrong, 1 MB", "int8, 2 MB", "fp32 eager, 8 MB", "bf16, ~", "int4, 1 MB"
    ]  # fmt: skip
    heights = [text.xyann[1] for text in axis.texts]
    assert heights == sorted(heights)
    assert [text.get_fontweight() for text in axis.texts] == ["normal", "bold", "normal", "normal", "normal"]
    markers = [one for one in axis.collections if isinstance(one, PathCollection)]
    intervals = [one.get_segments()[0][:, 0] for one in axis.collections if one not in markers]
    assert [tuple(one.round(3)) for one in intervals] == [(0.5, 0.5), (2, 2), (4, 4), (2.6, 3.4), (1, 1)]
    assert [len(one.get_facecolors()) for one in markers] == [0, 1, 1, 1, 1]
    assert tuple(markers[0].get_edgecolors()[0][:3]) == to_rgba(BLUE)[:3]
    wrong, int8, eager, bf16, int4 = (float(one.get_sizes()[0]) for one in markers)
    assert eager == 4 * int8 == 8 * int4 == 8 * wrong
    assert bf16 < int4
    assert [to_rgba("black")[:3] == tuple(one.get_edgecolors()[0][:3]) for one in markers] == [0, 1, 0, 0, 0]
    notes = axis.figure.get_suptitle()
    assert all(note in notes for note in ("bar: 98% interval", "bold: picked", "hollow: refused", "~: busy machine"))
    assert axis.get_ylabel() == "perplexity (lower is better)"


def report_of(prompt_length=None):
    report = Report("trial", "cpu")
    for name, (ms, loss, status) in {
        "fp32 eager": (4.0, 3.2, ""), "int8": (2.0, 3.21, "picked"), "int4": (1.0, 4.0, "refused"),
        "failed": (None, None, "failed"), "broken": (3.0, float("nan"), ""),
    }.items():  # fmt: skip
        latencies = {} if ms is None else {size: Latency(ms * size, ms * size, 11) for size in (8, 1)}
        prompts = {} if ms is None else {size: Latency(5 * ms * size, 6 * ms * size, 11) for size in (8, 1)}
        metrics = {} if loss is None else {"perplexity": loss, "val/loss": loss}
        report.add(Row(name, None, None, 2048, None, latencies, metrics, status=status, prompts=prompts))
    report.prompt_length = prompt_length
    return report


@pytest.mark.slow
def test_reports_draw_forms_at_the_batch_size_that_decides(tmp_path):
    report = report_of()
    assert _draw_frontier(report) is None
    assert [path.name for path in report.save(tmp_path)] == ["trial.png", "trial.json"]
    report.quality = "val/loss", False
    axis = _draw_frontier(report).axes[0]
    assert axis.lines[0].get_xydata().tolist() == [[2.0, 3.21], [4.0, 3.2]]  # single samples, measured last
    assert axis.get_xlabel() == "latency of a call at batch 1, ms"
    assert sum(isinstance(one, PathCollection) for one in axis.collections) == 3
    assert "interval" not in axis.figure.get_suptitle()
    paths = report.save(tmp_path)
    assert [path.name for path in paths] == ["trial.png", "trial.json", "trial_frontier.png"]
    assert paths[2].read_bytes()[:4] == b"\x89PNG"
    report.rows = report.rows[:1]
    assert _draw_frontier(report) is None


def test_numbers_are_written_where_no_picture_can_be(tmp_path, monkeypatch):
    def missing(*_):
        raise ModuleNotFoundError("planted")

    monkeypatch.setattr("lightning_accel.compress.report.report._draw", missing)
    with pytest.raises(ModuleNotFoundError, match="planted"):
        report_of().save(tmp_path)
    assert json.loads((tmp_path / "figures/trial.json").read_text())["rows"][1]["name"] == "int8"


def test_decoders_have_tokens_per_second(tmp_path, capsys):
    report = report_of(prompt_length=16)
    report.rows[1] = report.rows[1]._replace(memory_bytes=3_000_000)
    data = report.as_dict()
    assert data["prompt_length"] == 16
    row = data["rows"][1]
    assert row["tokens_per_second"] == {
        "prompt": {"8": 16 * 8 / 0.08, "1": 16 / 0.01},
        "next": {"8": 8 / 0.016, "1": 1 / 0.002},
    }
    assert row["prompts"]["8"]["p95_ms"] == 96
    assert row["prompts_times_faster_than"]["8"]["fp32 eager"]["ratio"] == 2
    assert row["memory_bytes"] == 3_000_000
    report.print()
    printed = capsys.readouterr().out
    cells = {line.split("│")[1].strip(): [one.strip() for one in line.split("│")[2:-1]]
             for line in printed.splitlines() if line.count("│") > 8}  # fmt: skip
    assert cells["int8 (picked)"] == [
        "2.05k", "3.00M", "1,600 2.00x", "1,600 2.00x", "500 2.00x", "500 2.00x", "3.21", "3.21", ""
    ]  # fmt: skip
    assert cells["failed (failed)"][1:6] == ["-"] * 5
    assert [axis.get_xlabel() for axis in _draw(report).axes] == [
        "perplexity", "file size, MB", "memory, MB", "prompt at batch 1, ms", "prompt at batch 8, ms",
        "token at batch 1, ms", "token at batch 8, ms",
    ]  # fmt: skip
    for key in ("prompt_length", "memory_bytes", "prompts", "tokens_per_second"):
        assert key not in report_of().as_dict() | report_of().as_dict()["rows"][0]
