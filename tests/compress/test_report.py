import io
import json

import pytest
import torch
from rich.console import Console
from torch import nn

from lightning_accel.compress import Latency, Report, Row, describe_layers, measure_forms, plain_forms
from lightning_accel.compress.calls import first_rows, num_rows


def printed(report):
    file = io.StringIO()
    report.print(Console(file=file, width=200))
    return file.getvalue()


def filled():
    report = Report("trial")
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


def test_files_hold_what_was_measured(tmp_path):
    report = filled()
    report.layers = describe_layers(nn.Sequential(nn.Linear(3, 2), nn.ReLU()), (torch.ones(1, 3),), {}, {"0": "kept"})
    picture, data = report.save(tmp_path)
    assert picture == tmp_path / "figures" / "trial.png"
    assert picture.read_bytes()[:4] == b"\x89PNG"
    content = json.loads(data.read_text())
    assert content["rows"][1] == {
        "name": "int8", "parameters": None, "nonzero": None, "file_bytes": 2048, "macs": None,
        "latencies": {"1": {"p50_ms": 0.5, "p95_ms": 0.6, "num_calls": 11}}, "metrics": {}, "note": "a note",
    }  # fmt: skip
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
    rows = measure_forms(module, ((torch.randn(6, 3),), {}), forms, plain=plain, seconds=0.01)
    assert list(rows) == ["fp32 eager", "bf16 eager", "own", "broken"]
    assert rows["fp32 eager"][:5] == ("fp32 eager", 26, 26, None, 20)
    assert rows["own"].macs is None
    assert all(set(rows[name].latencies) == {1, 6} for name in ("fp32 eager", "bf16 eager", "own"))
    assert set(seen) == {1, 6}
    assert rows["broken"].note == "cannot run: RuntimeError: planted"
    assert not rows["broken"].latencies


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
    assert num_rows(inputs) == 3
    args, kwargs = first_rows(inputs, 5)
    assert args[0][:, 0].tolist() == [0, 2, 4, 0, 2]
    assert kwargs["lengths"].tolist() == [0, 1, 2, 0, 1]
    assert kwargs["table"].shape == (7,)
    assert kwargs["flag"] is True
    with pytest.raises(ValueError, match="needs a tensor"):
        num_rows(((torch.tensor(1),), {}))
