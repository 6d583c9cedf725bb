"""Reports that compare forms of a model, such as quantized ones, in a table, a figure and a JSON file."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn

from lightning_accel.compress.calls import num_samples
from lightning_accel.compress.report.frontier import Point, draw_frontier, limits
from lightning_accel.compress.report.latency import Latency, Speedup, speedup
from lightning_accel.compress.report.macs import count_macs
from lightning_accel.ops.extras import import_on_use
from lightning_accel.ops.figures import BLUE, GREY, ORANGE, new_axes
from lightning_accel.strategies import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table

patches = import_on_use("matplotlib.patches")
consoles = import_on_use("rich.console")
tables = import_on_use("rich.table")

_REFERENCE = "fp32 eager"  # the form that latencies are compared to
_COLOURS = {"fp32 eager": GREY, "float": BLUE, "quantized": ORANGE}
_PICKED = "0.88"  # colour of its background


class Row(NamedTuple):
    """Hold the measurements of one form of a model, None where there is none."""

    name: str
    parameters: int | None = None
    nonzero: int | None = None
    file_bytes: int | None = None
    macs: int | None = None  # multiply-accumulates per sample
    latencies: Mapping[int, Latency] = {}  # by batch size
    metrics: Mapping[str, float] = {}  # metrics of the user, such as val/accuracy
    note: str = ""
    float_row: str = ""  # for a quantized form, the name of the row with the same runtime in floating point
    status: Literal["", "picked", "tie", "refused", "failed"] = ""  # a tie is as fast as the picked one
    prompts: Mapping[int, Latency] = {}  # for a decoder of text, of whole prompts, where latencies are of next tokens
    memory_bytes: int | None = None  # to load and run a decoder of text


class Layer(NamedTuple):
    """Hold the measurements of one layer, a module with parameters or multiplications of its own."""

    name: str
    kind: str
    parameters: int
    nonzero: int
    macs: int | None = None  # multiply-accumulates per sample
    dtype: str = ""
    note: str = ""  # such as the reason why it is not quantized


class Report:
    """Show the measurements of one run as a table, figures and a JSON file.

    Speedups are relative to the row named ``fp32 eager`` at the same batch size; quantized forms also have those
    relative to their ``float_row``, which exclude the effect of the runtime.

    Args:
        title: title of the report and name of its files, such as ``"export"``.
        device: device of the measurements.

    Attributes:
        prompt_length: for a decoder of text, the number of tokens of its prompts; its rows have memory and tokens per
            second of prompts and of next tokens.
        conditions: what was measured and how, where another report of the run measures otherwise.
        quality: the metric that forms are drawn by, beside their latency at the last batch size that was measured, and
            whether higher values are better; None for no such picture.

    >>> report = Report("pruning", "cpu")
    >>> report.add(Row("fp32 eager", parameters=10, nonzero=1))
    >>> report.rows[0].macs is None
    True
    """

    def __init__(self, title: str, device: torch.device | str) -> None:
        self.title = title
        self.device = torch.device(device)
        self.rows: list[Row] = []
        self.layers: list[Layer] = []
        self.prompt_length: int | None = None
        self.conditions = ""
        self.quality: tuple[str, bool] | None = None

    def add(self, row: Row) -> None:
        self.rows.append(row)

    def print(self, console: Console | None = None) -> None:
        """Print a table of the forms, and one of the layers if there are any, to the terminal."""
        if console is None:
            console = consoles.Console()
            console = console if console.is_terminal else consoles.Console(width=200)  # else files are wrapped at 80
        forms = _table_of_rows if self.prompt_length is None else _table_of_decoder
        for table in [forms(self), *([_table_of_layers(self)] if self.layers else [])]:
            console.print(table)

    def save(self, folder: str | Path) -> list[Path]:
        """Write ``<title>.png`` and ``<title>.json`` to ``figures/`` in the run folder ``folder``; return their paths.

        If at least two forms have a ``quality``, they are drawn by it in ``<title>_frontier.png``, too. Files of an
        earlier report with this title are overwritten.
        """
        places = {suffix: Path(folder, "figures", f"{self.title}{suffix}") for suffix in (".png", ".json")}
        with write_atomically(places[".json"]) as path:  # first, since pictures need matplotlib
            path.write_text(json.dumps(self.as_dict(), indent=1))
        pictures = {".png": _draw(self)}
        if (frontier := _draw_frontier(self)) is not None:
            places["_frontier.png"] = Path(folder, "figures", f"{self.title}_frontier.png")
            pictures["_frontier.png"] = frontier
        for suffix, picture in pictures.items():
            with write_atomically(places[suffix]) as path, path.open("wb") as file:
                picture.savefig(file, format="png")
        return list(places.values())

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, as in the JSON file."""
        rows = []
        for row in self.rows:
            latencies = {str(batch): latency._asdict() for batch, latency in row.latencies.items()}
            ratios = {str(batch): _plain_ratios(self, row, batch) for batch in row.latencies}
            plain = row._asdict() | {"latencies": latencies, "metrics": dict(row.metrics), "times_faster_than": ratios}
            rows.append(plain | _plain_decoding(self, row))
            if self.prompt_length is None:
                del rows[-1]["prompts"], rows[-1]["memory_bytes"]
        return {
            "title": self.title,
            "machine": platform.machine(),
            "device": _describe_device(self.device),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "measured": _caption(self),
            **({} if self.prompt_length is None else {"prompt_length": self.prompt_length}),
            "rows": rows,
            "layers": [layer._asdict() for layer in self.layers],
        }


def describe_layers(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], notes: Mapping[str, str] | None = None
) -> list[Layer]:
    """Return the parameters and multiply-accumulates of each layer, without those of its children.

    Args:
        module: module, which is run once.
        args: positional arguments of a call.
        kwargs: keyword arguments of the call.
        notes: notes by layer name, such as the reason why a layer is not quantized.
    """
    rows = num_samples((args, dict(kwargs)))
    of_layer = count_macs(module, args, kwargs).of_layer
    layers = []
    for name, one in module.named_modules():
        own = list(one.parameters(recurse=False))
        if not own and not of_layer.get(name):
            continue
        dtypes = ", ".join(dict.fromkeys(str(value.dtype).removeprefix("torch.") for value in own))
        parameters, nonzero = count_parameters(own)
        note = (notes or {}).get(name, "")
        macs = of_layer.get(name, 0) // rows
        layers.append(Layer(name, type(one).__name__, parameters, nonzero, macs, dtypes, note))
    return layers


def count_parameters(parameters: Iterable[torch.Tensor]) -> tuple[int, int]:
    """Count the values, each tensor once, and those that are not zero.

    >>> shared = torch.tensor([1.0, 0.0, 2.0])
    >>> count_parameters([shared, shared])
    (3, 2)
    """
    distinct = {id(value): value for value in parameters}.values()
    return sum(value.numel() for value in distinct), sum(int(value.detach().count_nonzero()) for value in distinct)


def saved_bytes(module: nn.Module) -> int:
    """Return the size of the weights of a module as ``torch.save`` writes them."""
    counter = ByteCounter()
    torch.save(module.state_dict(), counter)
    return counter.num_bytes


class ByteCounter(BytesIO):
    """Count the bytes that are written, without a copy of them in memory."""

    num_bytes = 0

    def write(self, data: Any) -> int:
        self.num_bytes += len(data)
        return len(data)


def _batches(report: Report) -> list[int]:
    return sorted({batch for row in report.rows for batch in row.latencies})


def _metric_names(report: Report) -> list[str]:
    return list(dict.fromkeys(name for row in report.rows for name in row.metrics))


def _caption(report: Report) -> str:
    """Describe device, method and precision of the measurements."""
    latencies = [latency for row in report.rows for latency in row.latencies.values()]
    text = f"on {_describe_device(report.device)}, {torch.get_num_threads()} threads"
    text += f"; {report.conditions}" if report.conditions else ""
    if latencies and report.prompt_length is not None:
        text += "; tokens/s: of the median call, calls in a row; x: times faster than fp32 eager"
    elif latencies:
        text += "; ms: median (95 of 100 calls stay below), calls in a row; x: times faster than fp32 eager"
    if any(latency.rounds_ms for latency in latencies):
        text += ", the median of rounds in which all take turns, ± to the end of its 98% interval"
    if any(latency.is_noisy for latency in latencies):
        text += "; ~ where the machine was busy with other things, too: measure again"
    return text


def _describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({torch.backends.cpu.get_cpu_capability()})"


def _latency_of(report: Report, name: str, batch: int, of_prompts: bool = False) -> Latency | None:
    row = next((row for row in report.rows if row.name == name), Row(name))
    return (row.prompts if of_prompts else row.latencies).get(batch)


def _plain_ratios(report: Report, row: Row, batch: int, of_prompts: bool = False) -> dict[str, Any]:
    found = {}
    for name in filter(None, (_REFERENCE, row.float_row)):
        other = _latency_of(report, name, batch, of_prompts)
        if other is not None:
            one = speedup((row.prompts if of_prompts else row.latencies)[batch], other)
            high = one.high if math.isfinite(one.high) else None  # JSON has no infinity
            found[name] = {"ratio": one.ratio, "low": one.low, "high": high}
    return found


def _plain_decoding(report: Report, row: Row) -> dict[str, Any]:
    """Return what the row of a decoder has further: tokens per second, and prompts as plain values."""
    if report.prompt_length is None:
        return {}
    speeds = {
        "prompt": {str(batch): batch * report.prompt_length * 1e3 / one.p50_ms for batch, one in row.prompts.items()},
        "next": {str(batch): batch * 1e3 / one.p50_ms for batch, one in row.latencies.items()},
    }
    return {
        "prompts": {str(batch): latency._asdict() for batch, latency in row.prompts.items()},
        "prompts_times_faster_than": {str(batch): _plain_ratios(report, row, batch, True) for batch in row.prompts},
        "tokens_per_second": speeds,
    }


def _table_of_decoder(report: Report) -> Table:
    table = tables.Table(title=f"{report.title}, prompts of {report.prompt_length} tokens", caption=_caption(report))
    table.add_column("form")
    batches, metrics = _batches(report), _metric_names(report)
    headings = [f"{kind} tokens/s at {batch}" for kind in ("prompt", "next") for batch in batches]
    for heading in ("file", "memory", *headings, *metrics):
        table.add_column(heading, justify="right")
    table.add_column("note")
    for row in report.rows:
        speeds = _plain_decoding(report, row)["tokens_per_second"]
        cells = [
            _format_rate(speeds[kind].get(str(batch)), (row.prompts if kind == "prompt" else row.latencies).get(batch),
                         _latency_of(report, _REFERENCE, batch, kind == "prompt"))
            for kind in ("prompt", "next") for batch in batches
        ]  # fmt: skip
        table.add_row(
            _label(row),
            *(_count(value) for value in (row.file_bytes, row.memory_bytes)),
            *cells,
            *_format_metrics(row, metrics),
            row.note,
            style="bold" if row.status == "picked" else None,
        )
    return table


def _table_of_rows(report: Report) -> Table:
    table = tables.Table(title=report.title, caption=_caption(report))
    table.add_column("form")
    for heading in ("parameters", "not 0", "file", "MACs a row"):
        table.add_column(heading, justify="right")
    batches, metrics = _batches(report), _metric_names(report)
    quantized = any(row.float_row for row in report.rows)
    for batch in batches:
        table.add_column(f"ms at {batch}", justify="right")
        if quantized:
            table.add_column("by integers alone", justify="right")
    for name in metrics:
        table.add_column(name, justify="right")
    table.add_column("note")
    for row in report.rows:
        speeds = []
        for batch in batches:
            own = row.latencies.get(batch)
            speeds.append(_format_latency(own, _latency_of(report, _REFERENCE, batch)))
            if quantized:
                in_float = _latency_of(report, row.float_row, batch)
                speeds.append("-" if own is None or in_float is None else describe_speedup(speedup(own, in_float)))
        table.add_row(
            _label(row),
            *(_count(value) for value in (row.parameters, row.nonzero, row.file_bytes, row.macs)),
            *speeds,
            *_format_metrics(row, metrics),
            row.note,
            style="bold" if row.status == "picked" else None,
        )
    return table


def _table_of_layers(report: Report) -> Table:
    table = tables.Table(title=f"{report.title}: layers")
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


def describe_speedup(found: Speedup) -> str:
    """Format a speedup with the margin of its interval.

    >>> describe_speedup(Speedup(2.0, 1.9, 2.1))
    '2.00x ±5%'
    """
    digits = ".2f" if found.ratio >= 0.1 else ".2g"
    margin = "" if found.margin is None else f" ±{found.margin:.0%}" if found.margin <= 1 else " ±over 100%"
    return f"{found.ratio:{digits}}x{margin}"


def _format_metrics(row: Row, names: Iterable[str]) -> list[str]:
    return [f"{row.metrics[name]:.4g}" if name in row.metrics else "-" for name in names]


def _format_latency(latency: Latency | None, reference: Latency | None) -> str:
    if latency is None:
        return "-"
    return f"{latency.p50_ms:.3g} ({latency.p95_ms:.3g}){_format_ratio(latency, reference)}"


def _format_rate(rate: float | None, latency: Latency | None, reference: Latency | None) -> str:
    if rate is None or latency is None:
        return "-"
    digits = ",.0f" if rate >= 100 else ".3g"
    return f"{rate:{digits}}{_format_ratio(latency, reference)}"


def _format_ratio(latency: Latency, reference: Latency | None) -> str:
    if reference is None:
        return ""
    about = "~" if latency.is_noisy or reference.is_noisy else ""
    return f" {about}{describe_speedup(speedup(latency, reference))}"


def _draw(report: Report) -> Figure:
    """Draw a panel of dots for the accuracy, else the first metric, and of bars for the file size and each latency."""
    metrics = _metric_names(report)
    shown = next((name for name in metrics if "acc" in name.lower()), metrics[0] if metrics else None)
    bars: list[tuple[str, list[float | Latency | None]]] = []
    bars.append(("file size, MB", [_megabytes(row.file_bytes) for row in report.rows]))
    if report.prompt_length is not None:
        bars.append(("memory, MB", [_megabytes(row.memory_bytes) for row in report.rows]))
        for batch in _batches(report):
            bars.append((f"prompt at batch {batch}, ms", [row.prompts.get(batch) for row in report.rows]))
    call = "latency" if report.prompt_length is None else "token"
    for batch in _batches(report):
        bars.append((f"{call} at batch {batch}, ms", [row.latencies.get(batch) for row in report.rows]))
    panels = len(bars) + (shown is not None)
    figure, axes = new_axes((2 + 2.6 * panels, 1.6 + 0.35 * len(report.rows)), columns=panels, sharey=True)
    if shown is not None:
        _draw_metric(axes[0], shown, report.rows)
    for axis, (heading, values) in zip(axes[panels - len(bars) :], bars, strict=True):
        _draw_bars(axis, heading, values, report.rows)
    axes[0].set_yticks(range(len(report.rows)), [_label(row) for row in report.rows])
    for number, (label, row) in enumerate(zip(axes[0].get_yticklabels(), report.rows, strict=True)):
        if row.status == "picked":
            label.set_fontweight("bold")
            for axis in axes:
                axis.axhspan(number - 0.5, number + 0.5, facecolor=_PICKED, zorder=0)
    axes[0].set_ylim(max(len(report.rows), 1) - 0.5, -0.5)
    for axis in axes:
        axis.locator_params(axis="x", nbins=4)  # labels of neighbours would touch
    used = {_kind(row) for row in report.rows}
    handles = [patches.Patch(color=colour, label=kind) for kind, colour in _COLOURS.items() if kind in used]
    if any(row.status == "picked" for row in report.rows):
        handles.append(patches.Patch(facecolor=_PICKED, label="picked"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    latencies = [value for _, values in bars for value in values if isinstance(value, Latency)]
    notes = ["line: 98% interval of the median"] if any(one.rounds_ms for one in latencies) else []
    notes += ["~: the machine was busy with other things, too"] if any(one.is_noisy for one in latencies) else []
    figure.suptitle("\n".join([report.title, *filter(None, ["; ".join(notes)])]), fontsize="medium")
    return figure


def _draw_frontier(report: Report) -> Figure | None:
    """Draw forms by quality and latency at the batch size that was measured last; None without two such forms."""
    batch = next((list(row.latencies)[-1] for row in report.rows if row.latencies), None)
    if report.quality is None or batch is None:
        return None
    metric, higher_is_better = report.quality
    points = [
        Point(
            row.latencies[batch], row.metrics[metric], row.name, row.file_bytes, row.status, _COLOURS[_kind(row)]
        )
        for row in report.rows
        if batch in row.latencies and math.isfinite(row.metrics.get(metric, math.nan))
    ]  # fmt: skip
    if len(points) < 2:
        return None
    time = f"latency of {'a call' if report.prompt_length is None else 'a token after the prompt'} at batch {batch}, ms"
    return draw_frontier(points, report.title, time, metric, higher_is_better)


def _draw_bars(axis: Axes, heading: str, values: list[float | Latency | None], rows: list[Row]) -> None:
    for number, (value, row) in enumerate(zip(values, rows, strict=True)):
        about, end = "", 0.0
        if isinstance(value, Latency):
            about, (low, end) = "~" if value.is_noisy else "", value.interval_ms
            if low < end:
                axis.plot((low, end), (number, number), color="black", linewidth=1.5)
            value = value.p50_ms
        axis.barh(number, value or 0, color=_COLOURS[_kind(row)], alpha=_alpha(row))
        axis.text(max(value or 0, end), number, " -" if value is None else f" {about}{value:.3g}", va="center")
    axis.set_xlabel(heading)
    axis.margins(x=0.3)
    axis.set_xlim(left=0)


def _draw_metric(axis: Axes, name: str, rows: list[Row]) -> None:
    """Draw dots, on an axis that need not start at 0: bars would look equally long."""
    known = [one for row in rows if math.isfinite(one := row.metrics.get(name, math.nan))]
    for number, row in enumerate(rows):
        value = row.metrics.get(name)
        if value is None or not math.isfinite(value):
            axis.annotate(" -" if value is None else f" {value}", (0, number), xycoords=("axes fraction", "data"),
                          va="center")  # fmt: skip
        else:
            axis.plot(value, number, "o", color=_COLOURS[_kind(row)], alpha=_alpha(row))
            axis.annotate(f"{value:.4g}", (value, number), xytext=(6, 0), textcoords="offset points", va="center")
    axis.set_xlabel(name)
    axis.set_xlim(limits(known or [0.0], 0.35))


def _kind(row: Row) -> str:
    if row.name == _REFERENCE:
        return row.name
    return "quantized" if row.name.startswith(("int", "float8")) else "float"


def _alpha(row: Row) -> float:
    return 0.3 if row.status in ("refused", "failed") else 1.0


def _label(row: Row) -> str:
    return f"{row.name} ({row.status})" if row.status else row.name


def _megabytes(size: int | None) -> float | None:
    return None if size is None else size / 1e6
