"""Every notebook runs from top to bottom."""

import json
import logging
import re
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest

NOTEBOOKS = sorted(Path(__file__).parents[1].glob("notebooks/*.ipynb"))
LONG = [pytest.mark.slow, pytest.mark.weekly]
MARKS: dict[str, list[pytest.MarkDecorator]] = {
    "belief_network": LONG,
    "compression": LONG,
    "custom_ops": [],
    "language_models": LONG,
    "mixture_of_experts": LONG,
    "time_series": LONG,
    "tune": LONG,
}


@pytest.fixture(autouse=True)
def restored():
    """Show no windows, and take back what notebooks change in this process."""
    backend, log = matplotlib.get_backend(), logging.getLogger("lightning.pytorch")
    level = log.level
    matplotlib.use("agg")
    yield
    plt.close("all")
    matplotlib.use(backend)
    log.setLevel(level)


def words(text: str) -> list[str]:
    """``text`` without numbers, whose last digits differ from machine to machine."""
    return re.sub(r"-?\d+(\.\d+)?", "", text).split()


@pytest.mark.filterwarnings("ignore:tutorial_add")  # that there is no compiler: formulas take the place of kernels
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=MARKS.get(path.stem, [pytest.mark.slow])) for path in NOTEBOOKS],
)
def test_cells_run_and_say_what_is_stored_below_them(path, capsys, run_folder, monkeypatch):
    """Except for cells with the tag ``varies``, whose words depend on the machine."""
    monkeypatch.setenv("BUDGET", "90s")  # of tune
    names: dict[str, object] = {"__name__": "__main__"}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
            stored = [line for output in cell["outputs"] for line in output.get("text", [])]
            said = capsys.readouterr().out
            assert "varies" in cell["metadata"].get("tags", []) or words(said) == words("".join(stored))


def test_there_is_one():
    assert NOTEBOOKS
