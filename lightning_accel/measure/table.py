"""Tables for a terminal, by rich where it is installed, and numbers with units for their cells."""

import shutil
import textwrap
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple


class Table(NamedTuple):
    """Hold a title, the names of columns (none for a list of facts) and rows of as many cells each."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def print_tables(tables: Sequence[Table]) -> None:
    """Print tables to stdout, as plain text where rich is not installed."""
    if find_spec("rich") is None:
        print(as_texts(tables))
        return
    import rich.box
    import rich.console
    import rich.table
    import rich.text

    console = rich.console.Console(highlight=False)
    for table in tables:
        shown = rich.table.Table(
            *table.columns,
            title=table.title,
            title_justify="left",
            title_style="bold",
            box=rich.box.SIMPLE,
            show_header=bool(table.columns),
        )
        for row in table.rows:
            shown.add_row(*map(rich.text.Text, row))  # as it is: brackets are no markup
        console.print(shown)


def as_texts(tables: Sequence[Table]) -> str:
    """Return tables as plain text, with a blank line between them."""
    return "\n\n".join(map(as_text, tables))


def as_text(table: Table) -> str:
    """Return a table as plain lines, its last column wrapped to the width of the terminal."""
    lines = [table.columns, *table.rows] if table.columns else table.rows
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)][:-1]
    begin = sum(width + 2 for width in widths) + 2
    space = max(shutil.get_terminal_size().columns - begin, 30)
    text = [table.title]
    for *cells, last in lines:
        head = "  " + "".join(f"{cell:{width}}  " for cell, width in zip(cells, widths, strict=True))
        wrapped = textwrap.wrap(last, space) or [""]
        text += [head + wrapped[0], *(" " * begin + more for more in wrapped[1:])]
    return "\n".join(line.rstrip() for line in text)


def with_unit(value: float, unit: str) -> str:
    """Return a number with three digits and a decimal prefix.

    >>> with_unit(12_340_000_000, "FLOP/s"), with_unit(0, "B")
    ('12.3 GFLOP/s', '0 B')
    """
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def in_bytes(value: float) -> str:
    """Return a number of bytes with a binary prefix.

    >>> in_bytes(3 * 2**30), in_bytes(512)
    ('3.0 GiB', '512 B')
    """
    for factor, prefix in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= factor:
            return f"{value / factor:.1f} {prefix}"
    return f"{value:.0f} B"
