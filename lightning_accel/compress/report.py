"""What smaller forms of a model cost and are worth, side by side: a table, a picture and a JSON file."""

import json
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import nn

from lightning_accel.compress.latency import Latency
from lightning_accel.compress.macs import count_macs
from lightning_accel.strategies import write_atomically

_REFERENCE = "fp32 eager"  # the form that ratios of latencies are to


class Row(NamedTuple):
    """One form of a model; None stands for what was not measured."""

    name: str
    parameters: int | None = None
    nonzero: int | None = None
    file_bytes: int | None = None
    macs: int | None = None  # of one row
    latencies: Mapping[int, Latency] = {}  # by the rows of a batch
    metrics: Mapping[str, float] = {}  # the user's own, such as val/accuracy
    note: str = ""


class Layer(NamedTuple):
    """One layer, that is a module with parameters or products of its own."""

    name: str
    kind: str
    parameters: int
    nonzero: int
    macs: int | None = None  # of one row
    dtype: str = ""
    note: str = ""  # such as why it was left out


class Report:
    """A table, a picture and a JSON file of what was measured in one run.

    Ratios are to the latency of the row named ``fp32 eager``, at the same batch.

    Args:
        title: names the files; such as ``"export"``.

    >>> report = Report("pruning")
    >>> report.add(Row("fp32 eager", parameters=10, nonzero=1))
    >>> report.rows[0].macs is None
    True
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.rows: list[Row] = []
        self.layers: list[Layer] = []

    def add(self, row: Row) -> None:
        self.rows.append(row)

    def print(self, console: Console | None = None) -> None:
        """Show the forms, and the layers if there are any, in the terminal."""
        if console is None:
            console = Console()
            console = console if console.is_terminal else Console(width=200)  # a file has no width to break lines at
        for table in [_table_of_rows(self), *([_table_of_layers(self)] if self.layers else [])]:
            console.print(table)

    def save(self, folder: str | Path) -> list[Path]:
        """Write ``<title>.png`` and ``<title>.json`` to ``figures/`` in the run folder ``folder``; return their paths.

        Files of an earlier report of this title are replaced.
        """
        places = [Path(folder, "figures", f"{self.title}.{suffix}") for suffix in ("png", "json")]
        with write_atomically(places[0]) as path, path.open("wb") as file:
            _draw(self).savefig(file, format="png", dpi=150)
        with write_atomically(places[1]) as path:
            path.write_text(json.dumps(self.as_dict(), indent=1))
        return places

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as the JSON file holds them."""
        rows = []
        for row in self.rows:
            latencies = {str(batch): latency._asdict() for batch, latency in row.latencies.items()}
            rows.append({**row._asdict(), "latencies": latencies, "metrics": dict(row.metrics)})
        return {
            "title": self.title,
            "machine": platform.machine(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "rows": rows,
            "layers": [layer._asdict() for layer in self.layers],
        }


def describe_layers(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], notes: Mapping[str, str] | None = None
) -> list[Layer]:
    """Parameters and multiply-accumulates of each layer, those of its children left out.

    Args:
        module: run once.
        args: of one call, with one row.
        kwargs: of the same call.
        notes: by the name of a layer, such as why it was left out.
    """
    of_layer = count_macs(module, args, kwargs).of_layer
    layers = []
    for name, one in module.named_modules():
        own = list(one.parameters(recurse=False))
        if not own and not of_layer.get(name):
            continue
        dtypes = ", ".join(dict.fromkeys(str(value.dtype).removeprefix("torch.") for value in own))
        parameters, nonzero = count_parameters(own)
        note = (notes or {}).get(name, "")
        layers.append(Layer(name, type(one).__name__, parameters, nonzero, of_layer.get(name, 0), dtypes, note))
    return layers


def count_parameters(parameters: Iterable[torch.Tensor]) -> tuple[int, int]:
    """How many values there are, each tensor counted once, and how many of them are not zero.

    >>> count_parameters([torch.tensor([1.0, 0.0, 2.0])])
    (3, 2)
    """
    distinct = {id(value): value for value in parameters}.values()
    return sum(value.numel() for value in distinct), sum(int(value.detach().count_nonzero()) for value in distinct)


def _batches(report: Report) -> list[int]:
    return sorted({batch for row in report.rows for batch in row.latencies})


def _metric_names(report: Report) -> list[str]:
    return list(dict.fromkeys(name for row in report.rows for name in row.metrics))


def _table_of_rows(report: Report) -> Table:
    caption = "ms: median (95 of 100 calls stay below), times faster than fp32 eager"
    if any(latency.is_noisy for row in report.rows for latency in row.latencies.values()):
        caption += "; ~ where the machine was busy with other things, too: measure again"
    table = Table(title=report.title, caption=caption)
    table.add_column("form")
    for heading in ("parameters", "not 0", "file", "MACs a row"):
        table.add_column(heading, justify="right")
    batches, metrics = _batches(report), _metric_names(report)
    for batch in batches:
        table.add_column(f"ms at {batch}", justify="right")
    for name in metrics:
        table.add_column(name, justify="right")
    table.add_column("note")
    reference = next((row.latencies for row in report.rows if row.name == _REFERENCE), {})
    for row in report.rows:
        table.add_row(
            row.name,
            *(_count(value) for value in (row.parameters, row.nonzero, row.file_bytes, row.macs)),
            *(_speed(row.latencies.get(batch), reference.get(batch)) for batch in batches),
            *(f"{row.metrics[name]:.4g}" if name in row.metrics else "-" for name in metrics),
            row.note,
        )
    return table


def _table_of_layers(report: Report) -> Table:
    table = Table(title=f"{report.title}: layers")
    for heading in ("layer", "kind"):
        table.add_column(heading)
    for heading in ("parameters", "not 0", "MACs a row"):
        table.add_column(heading, justify="right")
    table.add_column("dtype")
    table.add_column("note")
    for layer in report.layers:
        counts = (_count(value) for value in (layer.parameters, layer.nonzero, layer.macs))
        table.add_row(layer.name or "(whole)", layer.kind, *counts, layer.dtype, layer.note)
    return table


def _count(value: int | None) -> str:
    if value is None:
        return "-"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.2f}{unit}"
    return str(value)


def _speed(latency: Latency | None, reference: Latency | None) -> str:
    if latency is None:
        return "-"
    ratio = ""
    if reference is not None:
        about = "~" if latency.is_noisy or reference.is_noisy else ""
        ratio = f" {about}{reference.p50_ms / latency.p50_ms:.2f}x"
    return f"{latency.p50_ms:.3g} ({latency.p95_ms:.3g}){ratio}"


def _draw(report: Report) -> Figure:
    """A panel of bars for the first metric, or the first called accuracy, for the file, and for each batch."""
    panels: list[tuple[str, list[float | None]]] = []
    metrics = _metric_names(report)
    shown = next((name for name in metrics if "acc" in name.lower()), metrics[0] if metrics else None)
    if shown is not None:
        panels.append((shown, [row.metrics.get(shown) for row in report.rows]))
    panels.append(("file, MB", [None if row.file_bytes is None else row.file_bytes / 1e6 for row in report.rows]))
    for batch in _batches(report):
        panels.append((f"ms at batch {batch}", [_median(row.latencies.get(batch)) for row in report.rows]))
    figure = Figure(figsize=(2 + 2.6 * len(panels), 1.2 + 0.35 * len(report.rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    names = [row.name for row in report.rows]
    for axis, (heading, values) in zip(axes, panels, strict=True):
        axis.barh(names, [0 if value is None else value for value in values])
        for number, value in enumerate(values):
            axis.text(0 if value is None else value, number, " -" if value is None else f" {value:.3g}", va="center")
        axis.set_title(heading, fontsize="medium")
        axis.margins(x=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.suptitle(report.title)
    return figure


def _median(latency: Latency | None) -> float | None:
    return None if latency is None else latency.p50_ms
