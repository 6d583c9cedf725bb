import io
import json

import pytest
import torch
from rich.console import Console
from torch import nn

from lightning_accel.compress import Latency, Report, Row, Speedup, describe_layers, measure_forms, plain_forms
from lightning_accel.compress.calls import first_samples, num_samples, smallest_call
from lightning_accel.compress.report.progress import Progress
from lightning_accel.compress.report.report import _draw, describe_speedup
from tests.compress.networks import Graphs, two_graphs


def printed(report):
    file = io.StringIO()
    report.print(Console(file=file, width=200))
    return file.getvalue()


def filled():
    report = Report("trial", "cpu")
    report.add(Row("fp32 eager", 1000, 990, None, 2_500_000, {1: Latency(2.0, 3.0, 11)}, {"val/accuracy": 0.9}))
    report.add(Row("int8", file_bytes=2048, latencies={1: Latency(0.5, 0.6, 11)}, note="a note"))
    return report


def test_table_has_ratios_and_dashes_for_what_was_not_measured():
    lines = printed(filled()).splitlines()
    (float_row,) = [line for line in lines if "│ fp32 eager" in line]
    (int8_row,) = [line for line in lines if "│ int8" in line]
    float_cells = [cell.strip() for cell in float_row.strip("│ ").split("│")]
    assert float_cells == ["fp32 eager", "1.00k", "990", "-", "2.50M", "2 (3) 1.00x", "0.9"]
    cells = [cell.strip() for cell in int8_row.strip("│ ").split("│")]
    assert cells == ["int8", "-", "-", "2.05k", "-", "0.5 (0.6) 4.00x", "-", "a note"]


def test_ratios_of_a_busy_machine_are_marked():
    report = filled()
    assert "~" not in printed(report)
    report.add(Row("slowed", latencies={1: Latency(0.5, 1.6, 11)}))
    text = printed(report)
    assert "0.5 (1.6) ~4.00x" in text
    assert "0.5 (0.6) 4.00x" in text
    assert "~ where the machine was busy with other things, too: measure again" in " ".join(text.split())


def compared():
    """int8 is 6 times as fast as eager, of which 5 are the runtime's; a refused form is the fastest."""
    report = Report("trial", "cpu")
    rounds = {
        "fp32 eager": [6.0] * 11,
        "fp32 runtime": [1.2] * 11,
        "int8 runtime": [1.0] * 9 + [0.9, 1.1],
        "int8": [0.1] * 11,
    }
    accuracies = {"fp32 eager": 0.99, "fp32 runtime": 0.99, "int8 runtime": 0.98, "int8": 0.1}
    marks = {"int8 runtime": "picked", "int8": "refused"}
    for name, taken in rounds.items():
        latency = Latency(taken[0], taken[0], 11, tuple(taken))
        report.add(Row(name, file_bytes=2048, latencies={8: latency}, metrics={"val/accuracy": accuracies[name]},
                       float_row="fp32 runtime" if "int8" in name else "", status=marks.get(name, "")))  # fmt: skip
    report.add(Row("int8 lost", note="cannot run", float_row="fp32 runtime", status="failed"))
    return report


def test_what_int8_gains_over_floats_of_its_runtime_is_given():
    lines = [[cell.strip() for cell in line.split("│")] for line in printed(compared()).splitlines() if "│" in line]
    cells = {line[1]: line for line in lines}
    assert cells["fp32 eager"][6:8] == ["6 (6) 1.00x ±0%", "-"]
    assert cells["fp32 runtime"][6:8] == ["1.2 (1.2) 5.00x ±0%", "-"]
    assert cells["int8 runtime (picked)"][6:8] == ["1 (1) 6.00x ±0%", "1.20x ±0%"]
    assert cells["int8 (refused)"][6] == "0.1 (0.1) 60.00x ±0%"
    assert cells["int8 lost (failed)"][6:8] == ["-", "-"]
    assert describe_speedup(Speedup(2.0, 0.01, 3.0)) == "2.00x ±over 100%"
    rows = {row["name"]: row for row in compared().as_dict()["rows"]}
    assert rows["int8 runtime"]["status"] == "picked"
    gains = rows["int8 runtime"]["times_faster_than"]["8"]
    assert gains["fp32 runtime"] == {"ratio": 1.2, "low": 1.2, "high": 1.2}
    assert gains["fp32 eager"]["ratio"] == 6


def test_picture_marks_what_was_picked_and_what_was_refused():
    figure = _draw(compared())
    accuracy, file, _ = figure.axes
    low, high = accuracy.get_xlim()
    assert low > -0.4  # dots, on an axis that need not begin at 0
    assert high > 0.99
    (highlight,) = accuracy.patches  # and no bars
    assert (highlight.get_y(), highlight.get_height()) == (1.5, 1)  # behind the third form, which was picked
    assert [one.get_y() for one in file.patches if one.get_height() == 1] == [1.5]
    colours = [patch.get_facecolor() for patch in file.patches if patch.get_height() < 1]
    assert colours[0][:3] != colours[1][:3] != colours[2][:3]
    assert colours[2][:3] == colours[3][:3]
    assert [colour[3] for colour in colours] == [1, 1, 1, 0.3, 0.3]
    labels = figure.axes[0].get_yticklabels()
    assert [one.get_text() for one in labels][2:] == ["int8 runtime (picked)", "int8 (refused)", "int8 lost (failed)"]
    assert [one.get_fontweight() for one in labels] == ["normal", "normal", "bold", "normal", "normal"]
    assert [one.get_text() for one in figure.legends[0].get_texts()] == ["fp32 eager", "float", "quantized", "picked"]


def test_picture_shows_intervals_and_what_is_noise():
    report = compared()
    steady = report.rows[1].latencies[8]
    report.rows[1] = report.rows[1]._replace(
        latencies={8: Latency(1.2, 1.3, 11, tuple(1.0 + 0.1 * i for i in range(9)))}
    )
    report.rows[2] = report.rows[2]._replace(latencies={8: steady._replace(p95_ms=9.0)})
    figure = _draw(report)
    axis = figure.axes[2]
    (line,) = axis.lines  # the others have none
    assert line.get_xydata().tolist() == [[pytest.approx(1.0), 1], [pytest.approx(1.8), 1]]
    texts = {text.get_position()[1]: text for text in axis.texts}
    assert texts[1].get_position()[0] == pytest.approx(1.8)  # beside the interval
    assert [text.get_text().strip() for _, text in sorted(texts.items())] == ["6", "1.2", "~1.2", "0.1", "-"]
    assert "98% interval" in figure.get_suptitle()
    assert "~: the machine was busy" in figure.get_suptitle()
    assert "busy" not in _draw(compared()).get_suptitle()


def test_panels_have_units_and_files_of_integers_their_colour():
    report = Report("export", "cpu")
    for name in ("fp32 eager", "int8 ONNX Runtime static, onnx file"):
        report.add(Row(name, file_bytes=10, latencies={8: Latency(1.0, 1.0, 1)}, metrics={"val/accuracy": 0.9778}))
    figure = _draw(report)
    accuracy, file, latency = figure.axes
    assert [one.get_xlabel() for one in figure.axes] == ["val/accuracy", "file size, MB", "latency at batch 8, ms"]
    assert [one.get_text() for one in figure.legends[0].get_texts()] == ["fp32 eager", "quantized"]
    assert accuracy.get_xlim()[1] < 1  # equal values do not stretch the axis beyond what can be
    assert file.get_xlim()[0] == latency.get_xlim()[0] == 0


def test_files_hold_what_was_measured(tmp_path):
    report = filled()
    report.layers = describe_layers(nn.Sequential(nn.Linear(3, 2), nn.ReLU()), (torch.ones(1, 3),), {}, {"0": "kept"})
    picture, data = report.save(tmp_path)
    assert picture == tmp_path / "figures" / "trial.png"
    assert picture.read_bytes()[:4] == b"\x89PNG"
    content = json.loads(data.read_text())
    assert content["rows"][1] == {
        "name": "int8", "parameters": None, "nonzero": None, "file_bytes": 2048, "macs": None,
        "latencies": {"1": {"p50_ms": 0.5, "p95_ms": 0.6, "num_calls": 11, "rounds_ms": []}}, "metrics": {},
        "note": "a note", "float_row": "", "status": "",
        "times_faster_than": {"1": {"fp32 eager": {"ratio": 4.0, "low": 0.0, "high": None}}},
    }  # fmt: skip
    assert content["device"].startswith("cpu (")
    assert f"{torch.get_num_threads()} threads" in content["measured"]
    assert content["layers"] == [
        {"name": "0", "kind": "Linear", "parameters": 8, "nonzero": 8, "macs": 6, "dtype": "float32", "note": "kept"}
    ]
    report.rows.pop()
    assert report.save(tmp_path) == [picture, data]
    assert len(json.loads(data.read_text())["rows"]) == 1


def test_forms_are_measured_at_one_row_and_at_the_batch():
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).eval()
    seen = []

    def run(x):
        seen.append(len(x))
        return module(x)

    def broken(x):
        raise RuntimeError("planted\nand more")

    plain = plain_forms(module, compiled=False)
    forms = {"own": run, "broken": broken}
    lines = []
    progress = Progress(lines.append, "trial")
    rows = measure_forms(module, ((torch.randn(6, 3),), {}), plain | forms, seconds=0.01, progress=progress)
    assert list(rows) == ["fp32 eager", "bf16 eager", "own", "broken"]
    assert rows["fp32 eager"][:5] == ("fp32 eager", 26, 26, None, 20)
    assert rows["own"].macs is None
    assert all(set(rows[name].latencies) == {1, 6} for name in ("fp32 eager", "bf16 eager", "own"))
    assert set(seen) == {1, 6}
    assert rows["broken"].note == "cannot run at batch 1: RuntimeError: planted"
    assert rows["broken"].status == "failed"
    assert not rows["broken"].latencies
    assert lines[0].startswith("trial: measures 3 forms at batch 1, 0.01 s each (")
    assert lines[-1].startswith("trial: measures 3 forms at batch 6, 0.01 s each (")


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x, adjacency):
        return adjacency @ self.layer(x)


def test_calls_that_cannot_be_cut_are_measured_whole():
    graphs = two_graphs()
    calls = [(Graphs(), (graphs, {}), 3 * 2), (Dense(), ((graphs[0], torch.ones(7, 7)), {}), 3 * 2 + 7 * 2)]
    for module, call, macs in calls:
        plain = plain_forms(module, compiled=False)
        for batches in (None, [1]):
            rows = measure_forms(module.eval(), call, plain, batches=batches, seconds=0.01)
            assert list(rows["fp32 eager"].latencies) == [7]
        assert rows["fp32 eager"].macs == macs  # of one node
        whole = smallest_call(module, call)
        assert whole is call
        assert {layer.name: layer.macs for layer in describe_layers(module, *whole)}["layer"] == 6


def test_bfloat16_takes_and_returns_floats():
    module = nn.Linear(3, 2)
    half = plain_forms(module, compiled=False)["bf16 eager"]
    x = torch.randn(5, 3)
    assert half(x).dtype == torch.float32
    assert not torch.equal(half(x), module(x))
    torch.testing.assert_close(half(x), module(x), rtol=0.02, atol=0.02)
    assert module.weight.dtype == torch.float32


@pytest.mark.slow
def test_compiled_forms_give_what_the_module_gives():
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    forms, x = plain_forms(module), torch.randn(5, 3)
    with torch.no_grad():
        torch.testing.assert_close(forms["fp32 compiled"](x), module(x))
        half = forms["bf16 compiled"](x)
        torch.testing.assert_close(half, module(x), rtol=0.03, atol=0.03)
        assert half.dtype == torch.float32
        assert (half - module(x)).abs().max() > 1e-4


def test_rows_are_taken_from_tensors_that_have_them():
    inputs = ((torch.arange(6).view(3, 2),), {"lengths": torch.arange(3), "table": torch.ones(7), "flag": True})
    assert num_samples(inputs) == 3
    args, kwargs = first_samples(inputs, 5)
    assert args[0][:, 0].tolist() == [0, 2, 4, 0, 2]
    assert kwargs["lengths"].tolist() == [0, 1, 2, 0, 1]
    assert kwargs["table"].shape == (7,)
    assert kwargs["flag"] is True
    graphs = ((torch.randn(7, 3), torch.tensor([[0, 6], [6, 0]])), {})
    assert first_samples(graphs, 1) is graphs  # edges point at nodes; what points at none would be an error on a GPU
    with pytest.raises(ValueError, match="needs a tensor"):
        num_samples(((torch.tensor(1),), {}))
