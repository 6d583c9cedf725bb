import json
import subprocess
import sys

import pytest

from lightning_accel.measure import Collective, rates


@pytest.fixture
def quick(monkeypatch):
    """Rates measured in no time, without other processes."""
    monkeypatch.setattr(rates, "_DISK_BYTES", 2**22)
    monkeypatch.setattr(rates, "measure_collective", lambda *_: Collective("gloo", 2, 1.5e9, 80e-6))
    monkeypatch.setattr(rates.measure_rates, "__kwdefaults__", {"seconds": 0.001, "repeats": 1, "device": None})


def test_the_machine_is_printed_and_written(command, quick, run_folder):
    done = command("doctor", "--json", "machine.json")
    assert done.status == 0
    for told in ("cores", "instruction sets", "native kernels", "matrix products in fp32", "1.5 GB/s, 80 µs"):
        assert told in done.out
    found = json.loads((run_folder / "machine.json").read_text())
    assert found["rates"]["collective"]["bytes_per_s"] == 1.5e9
    assert found["machine"]["digest"] in done.out
    assert [path.name for path in run_folder.iterdir()] == ["machine.json"]


def test_without_rich_the_tables_are_plain_text(command, quick, monkeypatch):
    monkeypatch.setattr("lightning_accel.diagnosis.table.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.table", None)
    assert "\n  all-reduce, 2 processes   1.5 GB/s, 80 µs at least (gloo)\n" in command("doctor").out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--folder", "nowhere"], "--folder nowhere is no folder"),
        (["--json", "nowhere/x.json"], "--json nowhere/x.json cannot be written"),
    ],
)
def test_a_mistake_is_told_before_measuring(command, monkeypatch, arguments, told):
    monkeypatch.setattr("lightning_accel.diagnosis.doctor", lambda **_: pytest.fail("measured"))
    done = command("doctor", *arguments)
    assert done.status == 2
    assert told in done.err


def test_help_imports_no_torch():
    for arguments in (["--help"], ["doctor", "--help"]):
        script = (
            "import sys; from lightning_accel.__main__ import main\n"
            f"assert main({arguments}) == 0\n"
            "assert 'torch' not in sys.modules"
        )
        assert b"doctor" in subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout
