"""List malformed, hostile and odd but right data files, with what each datamodule has to make of them.

``cases()`` gives them; a case writes its file into a folder, and reads it as a fit would begin. Run alone, this file
reads each case in this process and prints those that go another way than they should. A caller that reads each in a
process of its own, with little memory and time, also sees what would take too much of either.

    python benchmarks/malformed_data.py
"""

import gzip
import io
import json
import os
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from lightning_accel import GraphDataModule, SequenceDataModule, TabularDataModule, TextDataModule
from lightning_accel.data import GraphLayout, IdxDataModule, read_idx

LONG = "z" * 3_000_000
MOST_SHOWN = 2000  # characters of a message, whatever the file holds


class Case(NamedTuple):
    """A file and what is to be made of it.

    Args:
        name: of the case.
        write: makes the file in a folder and returns its path.
        read: reads it as a fit would begin.
        accept: True if it must be read; False if it must be refused by a ValueError or TypeError that names the file;
            None if either will do.
    """

    name: str
    write: Callable[[Path], Path]
    read: Callable[[Path], object]
    accept: bool | None


Read = Callable[[Path], object]


def cases() -> list[Case]:
    """Return all cases; their names differ."""
    every = [*_tables(), *_sequences(), *_graphs(), *_images(), *_texts()]
    assert len({case.name for case in every}) == len(every)
    return every


def table(path: Path, **options: Any) -> object:
    return _begun(TabularDataModule(path, "y", **options))


def sequences(path: Path, **options: Any) -> object:
    return _begun(SequenceDataModule(path, **options))


def graphs(path: Path, **options: Any) -> object:
    return _begun(GraphDataModule(path, **options))


def images(path: Path, **options: Any) -> object:
    return _begun(IdxDataModule(path.parent, **options))


def text(path: Path, **options: Any) -> object:
    return _begun(TextDataModule(path, context_length=8, batch_size=2, **options))


def with_words(path: Path) -> object:
    return text(path, tokenizer=Words(), cache_dir=path.parent / "cache")


class Words:
    """A tokenizer of characters."""

    vocab_size = 1000

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 1000 for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


def _begun(data: Any) -> object:
    """Set the datamodule up, take a batch of training and make what a checkpoint holds."""
    data.prepare_data()
    data.setup("fit")
    for batch in data.train_dataloader():
        data.state_dict()
        return batch
    raise AssertionError("no batch trains")


def _file(name: str, content: str | bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
        return folder / name

    return write


def _cases(kind: str, name: str, read: Read, accept: bool | None, **contents: str | bytes) -> list[Case]:
    return [Case(f"{kind}: {key.replace('_', ' ')}", _file(name, it), read, accept) for key, it in contents.items()]


def _odd_paths(kind: str, name: str, read: Read) -> list[Case]:
    def folder_of_that_name(folder: Path) -> Path:
        (folder / name).mkdir()
        return folder / name

    def pipe(folder: Path) -> Path:
        os.mkfifo(folder / name)
        return folder / name

    def device(folder: Path) -> Path:
        (folder / name).symlink_to("/dev/zero")
        return folder / name

    return [
        Case(f"{kind}: {what}", write, read, False)
        for what, write in (("a folder", folder_of_that_name), ("a FIFO", pipe), ("an endless device", device))
    ]


# Compressed files


def _repeated(compress: Callable[[bytes], bytes], head: bytes, piece: bytes, times: int, tail: bytes = b"") -> bytes:
    """Compress 16 MiB of ``piece``, ``times`` times over: streams may stand one after another."""
    return compress(head) + compress(piece * ((1 << 20) // len(piece))) * (16 * times) + compress(tail)


def _damaged_gzip(content: bytes) -> dict[str, bytes]:
    whole = gzip.compress(content)
    crc = bytearray(whole)
    crc[-8] ^= 1
    return {
        "gzip_cut": whole[: len(whole) // 2],
        "gzip_of_a_wrong_checksum": bytes(crc),
        "gzip_in_name_alone": content,
        "gzip_and_garbage": whole + b"garbage",
        "gzip_without_end": whole[:-8],
    }


# Tables


def _rows(change: Callable[[list[list[str]]], None] | None = None, header: str = "a,c,y") -> str:
    rows = [[str(i * 0.5), "uvw"[i % 3], "pq"[i % 2]] for i in range(60)]
    if change is not None:
        change(rows)
    return header + "\n" + "".join(",".join(row) + "\n" for row in rows)


def _cell(column: int, value: str, row: int = 10) -> str:
    def change(rows: list[list[str]]) -> None:
        rows[row][column] = value

    return _rows(change)


def _column(column: int, make: Callable[[int], str]) -> str:
    def change(rows: list[list[str]]) -> None:
        for i, row in enumerate(rows):
            row[column] = make(i)

    return _rows(change)


def _parquet(**columns: Any) -> bytes:
    frame = {"a": range(60), "y": ["p", "q"] * 30, **columns}
    pq.write_table(pa.table(frame), buffer := io.BytesIO())
    return buffer.getvalue()


def _parquet_of(rows: int, **values: Any) -> Callable[[Path], Path]:
    """Write one value a column, ``rows`` times, which takes a few bytes."""

    def write(folder: Path) -> Path:
        step = min(rows, 1 << 20)
        arrays = {
            name: pa.DictionaryArray.from_arrays(pa.array(np.arange(step, dtype=np.int32) % len(each)), pa.array(each))
            for name, each in values.items()
        }
        piece = pa.table(arrays)
        with pq.ParquetWriter(folder / "t.parquet", piece.schema, compression="zstd") as file:
            for _ in range(rows // step):
                file.write_table(piece)
        return folder / "t.parquet"

    return write


def _flipped(content: bytes, at: float) -> bytes:
    changed = bytearray(content)
    place = int(at * len(changed))
    changed[place : place + 8] = bytes(255 - byte for byte in changed[place : place + 8])
    return bytes(changed)


def _wide(columns: int) -> str:
    header = ",".join(f"c{i}" for i in range(columns)) + ",y\n"
    return header + "".join(f"{','.join(str((i * j) % 7) for j in range(columns))},{'pq'[i % 2]}\n" for i in range(24))


def _tables() -> Iterable[Case]:
    whole = _rows()
    kind, name = "table", "t.csv"
    yield from _cases(
        kind,
        name,
        table,
        True,
        plain=whole,
        CRLF=whole.replace("\n", "\r\n"),
        byte_order_mark="\ufeff" + whole,
        CR=whole.replace("\n", "\r"),
        blank_lines=whole.replace("\n", "\n\n"),
        without_last_newline=whole.rstrip("\n"),
        quoted=_cell(1, '"u,\nv"'),
        letters_of_all_kinds=_cell(1, "żółć 日本 🙂"),
        missing=_cell(0, ""),
        exponents=_cell(0, "-1.5e-3"),
        formulas_as_classes=whole.replace(",p", ",=HYPERLINK(0)").replace(",q", ",@SUM(1)"),
        booleans=whole.replace(",u,", ",True,").replace(",v,", ",False,").replace(",w,", ",True,"),
        spaces_about_names=whole.replace("a,c,y", "a, c ,y"),
        twenty_thousand_columns=_wide(20_000),
    )
    yield from _cases(
        kind,
        name,
        table,
        False,
        empty="",
        newlines_alone="\n\n\n",
        header_alone="a,c,y\n",
        latin_1=whole.replace(",u,", ",é,").encode("latin-1"),
        UTF_16=whole.encode("utf-16"),
        NUL_among_numbers=_cell(0, "1\0"),
        row_too_long=_cell(1, "u,v"),
        names_twice=_rows(header="a,a,y"),
        no_target=_rows(header="a,c,z"),
        one_class=whole.replace(",q", ",p"),
        class_of_one_row=_cell(2, "r"),
        no_class=_cell(2, ""),
        infinity=_cell(0, "inf"),
        beyond_float32=_cell(0, "1e39"),
        beyond_float64=_cell(0, "1e400"),
        hexadecimal=_cell(0, "0x1F"),
        text_among_numbers=_cell(0, "abc"),
        decimal_commas=_column(0, lambda i: f'"{i},5"'),
        unclosed_quote=_cell(1, '"u'),
        keys=_column(1, lambda i: f"k{i}"),
        class_of_3_MB=_cell(2, LONG),
        value_of_3_MB=_cell(0, LONG),
        digits_of_1_MB=_cell(0, "9" * 1_000_000),
        name_of_3_MB=_rows(header=f"{LONG},{LONG},y"),
        nameless_column=_rows(header=",c,y"),
        other_separator=whole.replace(",", ";"),
        binary=os.urandom(4096),
        binary_zeros=bytes(4096),
        HTML="<!DOCTYPE html><html><body>404</body></html>\n",
        target_alone="y\n" + "p\nq\n" * 20,
    )
    yield from _cases(
        kind,
        name,
        table,
        None,
        dates_that_repeat=_column(0, lambda i: f"2024-01-{i % 28 + 1:02}"),
        row_too_short=_cell(1, "u").replace("5.0,u,p", "5.0"),
        NUL_among_text=_cell(1, "u\0v"),
        formula_as_value=_cell(1, "=1+1"),
        a_cell_of_3_MB=_cell(1, LONG),
        surrogate=_cell(1, "\ud800"),
    )
    yield from _cases(kind, "t.txt", table, False, another_suffix=whole)
    yield from _odd_paths(kind, name, table)
    data = whole.encode()
    yield Case("table: gzip", _file("t.csv.gz", gzip.compress(data)), table, True)
    yield Case(
        "table: gzip in two members",
        _file("t.csv.gz", gzip.compress(data[:300]) + gzip.compress(data[300:])),
        table,
        True,
    )
    for suffix in ("bz2", "xz", "zip"):
        yield Case(f"table: {suffix}", _file(f"t.csv.{suffix}", data), table, False)
    yield from _cases(kind, "t.csv.gz", table, False, **_damaged_gzip(data))
    for what, head, piece in (("", data, b"1,u,p\n"), ("one line of ", b"a,c,y\n", b"1")):
        content = _repeated(gzip.compress, head, piece, 200)
        yield Case(f"table: gz of {what}3 GB", _file("t.csv.gz", content), table, False)
    parquet = _parquet()
    name = "t.parquet"
    yield from _cases(
        kind,
        name,
        table,
        True,
        parquet=parquet,
        parquet_with_missing=_parquet(b=[None, 1.5] * 30),
        parquet_of_categories=_parquet(b=pa.array(["u", "v"] * 30).dictionary_encode()),
    )
    yield from _cases(
        kind,
        name,
        table,
        False,
        parquet_of_bytes=_parquet(b=[b"\xff\xfe", b"\xfd"] * 30),
        parquet_empty=b"",
        parquet_of_byte_classes=_parquet(y=[b"\xff\xfe", b"\xfd"] * 30),
        parquet_of_lists=_parquet(b=[[1, 2]] * 60),
        parquet_of_structs=_parquet(b=[{"u": 1}] * 60),
        parquet_cut=parquet[: len(parquet) // 2],
        parquet_of_magic=b"PAR1PAR1",
        parquet_of_garbage=b"PAR1" + os.urandom(500) + b"PAR1",
        parquet_in_name_alone=data,
        parquet_of_infinities=_parquet(b=[np.inf, 1.0] * 30),
        parquet_of_no_rows=_parquet(a=[], y=pa.array([], pa.string())),
        parquet_of_dates=_parquet(b=pd.date_range("2024", periods=60)),
        parquet_footer_of_2_GB=parquet[:-8] + struct.pack("<I", 2**31 - 1) + b"PAR1",
    )
    yield from _cases(
        kind,
        name,
        table,
        None,
        **{f"parquet_flipped_at_{at}": _flipped(parquet, at) for at in (0.1, 0.3, 0.5, 0.7, 0.85, 0.95)},
    )
    yield Case("table: parquet of 2**28 rows", _parquet_of(1 << 28, a=[1.0, 2.0, 3.0], y=["p", "q"]), table, False)
    yield Case(
        "table: parquet of a text of 1 MB in 65536 rows",
        _parquet_of(1 << 16, c=["z" * 1_000_000, "u"], y=["p", "q"]),
        table,
        False,
    )


# Sequences


def _lines(entries: Iterable[Any], *raw: str) -> str:
    return "\n".join([*(json.dumps(entry) for entry in entries), *raw]) + "\n"


def _values(change: dict[str, Any] | None = None, *raw: str, field: str = "values") -> str:
    inside: dict[str, Any] = {"values": [[1.0, 2.0], [3.0, 4.5]], "tokens": [1, 2, 3], "text": "abc"}
    entries = [{field: inside[field], "target": "ab"[i % 2]} for i in range(40)]
    entries[5].update(change or {})
    return _lines(entries, *raw)


def _tokens(found: Any) -> str:
    return _values({"tokens": found}, field="tokens")


def _long(change: Callable[[list[list[str]]], None] | None = None) -> str:
    rows = [[str(i // 2), str(i % 2), str(i * 0.5), "ab"[(i // 2) % 2]] for i in range(80)]
    if change is not None:
        change(rows)
    return "id,step,v,target\n" + "".join(",".join(row) + "\n" for row in rows)


def _long_cell(column: int, value: str) -> str:
    return _long(lambda rows: rows[11].__setitem__(column, value))


def _hostile_json(prefix: str, suffix: str = '"target": "a"') -> dict[str, str]:
    """Return lines that are hostile in JSON itself, after ``prefix``, where a value stands."""
    return {
        "deep_lists": f"{{{prefix}{'[' * 100_000}{']' * 100_000}, {suffix}}}",
        "deep_lists_of_900": f"{{{prefix}{'[' * 900}{']' * 900}, {suffix}}}",
        "deep_objects": "{" + prefix + '{"u": ' * 100_000 + "1" + "}" * 100_000 + f", {suffix}}}",
        "unclosed_lists": f"{{{prefix}{'[' * 100_000}",
        "number_of_5000_digits": f"{{{prefix}[{'9' * 5000}], {suffix}}}",
        "number_of_4000_digits": f"{{{prefix}[{'9' * 4000}], {suffix}}}",
        "field_twice": f"{{{prefix}[1], {prefix}[2], {suffix}}}",
        "not_JSON": "{values: [1]}",
        "single_quotes": "{'target': 1}",
        "trailing_comma": f"{{{prefix}[1], {suffix},}}",
        "a_list": "[1, 2]",
        "a_number": "7",
        "null": "null",
        "a_text": '"abc"',
        "two_objects": f"{{{prefix}[1]}} {{}}",
        "a_cut_line": f"{{{prefix}[1",
        "field_of_3_MB": f'{{"{LONG}": 1}}',
        "line_of_3_MB": LONG,
        "text_of_3_MB": f'{{{prefix}"{"[" * 3_000_000}", {suffix}',
        "NUL": f"{{{prefix}[1\0], {suffix}}}",
    }


def _sequences() -> Iterable[Case]:
    kind, name = "sequences", "t.jsonl"
    whole = _values()
    yield from _cases(
        kind,
        name,
        sequences,
        True,
        plain=whole,
        CRLF=whole.replace("\n", "\r\n"),
        byte_order_mark="\ufeff" + whole,
        blank_lines=whole.replace("\n", "\n\n \n"),
        tokens=_values(field="tokens"),
        texts=_values(field="text"),
        an_empty_sequence=_values({"values": []}),
        numbers_as_classes=_values().replace('"a"', "1").replace('"b"', "2"),
        letters_of_all_kinds=_values({"text": "żółć 日本 🙂"}, field="text"),
        pairs_of_surrogates=_values({"text": "\U0001f642"}, field="text"),
        a_token_of_50_000=_tokens([50_000]),
        one_number_a_step=_values({"values": [[1, 2]]}),
    )
    yield from _cases(
        kind, name, sequences, False, **{key: _values(None, line) for key, line in _hostile_json('"values": ').items()}
    )
    yield from _cases(
        kind,
        name,
        sequences,
        False,
        empty="",
        blank="\n \n",
        binary=os.urandom(4096),
        UTF_16=whole.encode("utf-16"),
        latin_1=whole.encode() + b'{"values": "\xe9"}',
        NaN=_values({"values": [[float("nan"), 1.0]]}),
        Infinity=_values({"values": [[float("inf"), 1.0]]}),
        exponent_400=_values(None, '{"values": [[1e400, 1]], "target": "a"}'),
        beyond_float32=_values({"values": [[1e39, 1.0]]}),
        boolean_among_numbers=_values({"values": [[True, 2.0]]}),
        a_text_among_numbers=_values({"values": [["1", 2.0]]}),
        null_among_numbers=_values({"values": [[None, 2.0]]}),
        ragged=_values({"values": [[1, 2], [3]]}),
        deeper=_values({"values": [[[1], [2]]]}),
        other_width=_values({"values": [[1, 2, 3]]}),
        an_object=_values({"values": {"u": 1}}),
        a_number_for_a_list=_values({"values": 7}),
        no_values=_values(None, '{"target": "a"}'),
        no_target=_values(None, '{"values": [[1, 2]]}'),
        null_target=_values({"target": None}),
        list_as_target=_values({"target": [1]}),
        object_as_target=_values({"target": {"u": 1}}),
        NaN_as_target=_values({"target": float("nan")}),
        one_class=whole.replace('"b"', '"a"'),
        class_of_one=_values({"target": "c"}),
        class_of_3_MB=_values({"target": LONG}),
        one_class_as_number_and_text=whole.replace('"a"', "1").replace('"b"', '"2"').replace(": 1}", ': "1"}', 5),
        ids_twice=_values({"id": "3"}, '{"id": "3", "values": [[1, 2]], "target": "a"}'),
        all_empty=whole.replace("[[1.0, 2.0], [3.0, 4.5]]", "[]"),
        surrogate_in_a_target=_values(None, *['{"values": [[1, 2]], "target": "\\ud800"}'] * 6),
        surrogate_in_an_id=_values({"id": "\ud800"}),
        surrogate_in_a_text=_values({"text": "\ud800"}, field="text"),
        huge_target=_values({"target": 10**4000}),
        negative_token=_tokens([-1]),
        fraction_as_token=_tokens([1.5]),
        boolean_as_token=_tokens([True, 2]),
        text_as_token=_tokens(["a"]),
        list_as_token=_tokens([[1]]),
        token_2_to_31=_tokens([2**31]),
        token_2_to_40=_tokens([2**40]),
        token_2_to_62=_tokens([2**62]),
        token_2_to_63=_tokens([2**63]),
        token_2_to_64=_tokens([2**64 - 1]),
        token_2_to_70=_tokens([2**70]),
        token_10_to_300=_tokens([10**300]),
    )
    yield from _cases(
        kind,
        name,
        sequences,
        None,
        booleans_alone=_values({"values": [[True, False]]}),
        fields_by_the_100_000=_values({f"u{i}": i for i in range(100_000)}),
    )
    yield from _odd_paths(kind, name, sequences)
    data = whole.encode()
    yield Case("sequences: gzip", _file("t.jsonl.gz", gzip.compress(data)), sequences, True)
    yield from _cases(kind, "t.jsonl.gz", sequences, False, **_damaged_gzip(data))
    one_line = _repeated(gzip.compress, data + b'{"values": [1', b",1", 200, b'], "target": "a"}\n')
    blanks = _repeated(gzip.compress, data, b"\n", 200)
    lines = _repeated(gzip.compress, data, b'{"values": [[1, 2]], "target": "a"}\n', 200)
    yield from _cases(
        kind,
        "t.jsonl.gz",
        sequences,
        False,
        gzip_of_a_line_of_3_GB=one_line,
        gzip_of_lines_of_3_GB=lines,
        gzip_of_blank_3_GB=blanks,
    )
    steps = _values({"target": [0]}).replace('"a"', "[0, 1]").replace('"b"', "[1, 0]")
    labelling: Read = lambda path: sequences(path, layout={"target_kind": "labelling"})  # noqa: E731
    regression: Read = lambda path: sequences(path, layout={"target_kind": "regression"})  # noqa: E731
    yield Case("sequences: one label too few", _file(name, steps), labelling, False)
    yield Case("sequences: a class for a number", _file(name, whole), regression, False)
    yield Case(
        "sequences: NaN for a number", _file(name, whole.replace('"a"', "NaN").replace('"b"', "1")), regression, False
    )
    name = "t.csv"
    yield from _cases(
        kind, name, sequences, True, steps_in_rows=_long(), steps_in_any_order=_long(lambda rows: rows.reverse())
    )
    yield from _cases(
        kind,
        name,
        sequences,
        False,
        step_twice=_long_cell(1, "0"),
        no_id=_long_cell(0, ""),
        no_step=_long_cell(1, ""),
        text_as_step=_long_cell(1, "first"),
        text_as_value=_long_cell(2, "abc"),
        no_value=_long_cell(2, ""),
        infinity=_long_cell(2, "inf"),
        two_targets_of_one=_long_cell(3, "zz"),
        no_column_of_values="id,step,target\n1,1,a\n",
        no_column_of_ids="step,v,target\n1,1,a\n",
        header_alone="id,step,v,target\n",
        id_of_3_MB=_long_cell(0, LONG).replace("z,1,", "z,,"),
    )
    yield Case(
        "sequences: csv gzip of 3 GB",
        _file("t.csv.gz", _repeated(gzip.compress, _long().encode(), b"1,1,1,a\n", 200)),
        sequences,
        False,
    )
    yield Case(
        "sequences: parquet of 2**28 rows",
        _parquet_of(1 << 28, id=["1", "2"], step=[1.0], v=[1.0], target=["a", "b"]),
        sequences,
        False,
    )
    yield from _cases(kind, "t.npy", sequences, False, another_suffix=whole)


# Graphs


def _ring(change: dict[str, Any] | None = None, *raw: str, **fields: Any) -> str:
    entries = [{"edges": [[0, 1], [1, 2]], **fields, "y": "ab"[i % 2]} for i in range(40)]
    entries[7].update(change or {})
    return _lines(entries, *raw)


def _edges(*rows: str, header: str = "source,target") -> str:
    return "\n".join([header, *(f"{i},{(i + 1) % 40}" for i in range(40)), *rows]) + "\n"


def _with_nodes(path: Path) -> object:
    """Read a table of edges beside one of nodes, which is right."""
    nodes = path.parent / "nodes.csv"
    nodes.write_text("node,y\n" + "".join(f"{i},{'ab'[i % 2]}\n" for i in range(40)))
    return graphs(path, layout=GraphLayout(nodes_path=nodes))


def _graph6(n: int, lead: str = "", size: int | None = None) -> str:
    needed = -(-(n * (n - 1) // 2) // 6)
    return (lead or chr(63 + n)) + "?" * (needed if size is None else size)


def _graphs() -> Iterable[Case]:
    kind, name = "graphs", "t.jsonl"
    whole = _ring()
    x: list[Any] = [[0.5], [1.5], [2.5]]
    yield from _cases(
        kind,
        name,
        graphs,
        True,
        plain=whole,
        CRLF=whole.replace("\n", "\r\n"),
        features=_ring(x=x),
        types=_ring(edge_attr=[0, 1]),
        features_of_edges=_ring(edge_attr=[[0.5], [1.5]]),
        no_edges=_ring({"edges": [], "num_nodes": 3}),
        loop=_ring({"edges": [[1, 1]]}),
        lone_nodes=_ring({"num_nodes": 1000}),
        repeated_edge=_ring({"edges": [[0, 1], [0, 1]]}),
        a_node_of_10_to_5=_ring({"edges": [[0, 10**5]]}),
        no_nodes=_ring({"edges": [], "num_nodes": 0}),
    )
    yield from _cases(
        kind,
        name,
        graphs,
        False,
        **{key: _ring(None, line) for key, line in _hostile_json('"edges": ', '"y": "a"').items()},
    )
    yield from _cases(
        kind,
        name,
        graphs,
        False,
        empty="",
        binary=os.urandom(4096),
        node_10_to_8=_ring({"edges": [[0, 10**8]]}),
        node_10_to_9=_ring({"edges": [[0, 10**9]]}),
        node_10_to_10=_ring({"edges": [[0, 10**10]]}),
        node_2_to_63=_ring({"edges": [[0, 2**63]]}),
        node_2_to_64=_ring({"edges": [[0, 2**64 - 1]]}),
        node_2_to_70=_ring({"edges": [[0, 2**70]]}),
        num_nodes_10_to_9=_ring({"num_nodes": 10**9}),
        num_nodes_10_to_30=_ring({"num_nodes": 10**30}),
        a_million_nodes_in_each=_ring(num_nodes=2_000_000),
        num_nodes_too_few=_ring({"num_nodes": 2}),
        num_nodes_a_fraction=_ring({"num_nodes": 3.0}),
        num_nodes_a_text=_ring({"num_nodes": "3"}),
        num_nodes_a_boolean=_ring({"num_nodes": True}),
        num_nodes_negative=_ring({"num_nodes": -3}),
        negative_node=_ring({"edges": [[0, -1]]}),
        fraction_as_node=_ring({"edges": [[0, 1.5]]}),
        boolean_as_node=_ring({"edges": [[0, True]]}),
        text_as_node=_ring({"edges": [[0, "1"]]}),
        null_as_node=_ring({"edges": [[0, None]]}),
        triples=_ring({"edges": [[0, 1, 2]]}),
        flat=_ring({"edges": [0, 1]}),
        ragged_edges=_ring({"edges": [[0, 1], [1]]}),
        edges_null=_ring({"edges": None}),
        edges_an_object=_ring({"edges": {"0": 1}}),
        no_field_edges=_ring(None, '{"y": "a"}'),
        x_of_a_row_too_few=_ring({"x": x[:2]}, x=x),
        x_ragged=_ring({"x": [[1], [2, 3], [4]]}, x=x),
        x_wider=_ring({"x": [[1.0, 2]] * 3}, x=x),
        x_missing=_ring({"x": None}, x=x),
        x_in_one_alone=_ring({"x": x}),
        x_NaN=_ring({"x": [[float("nan")]] * 3}, x=x),
        x_text=_ring({"x": [["1"]] * 3}, x=x),
        x_null=_ring({"x": [[None], [1], [1]]}, x=x),
        x_boolean_among_numbers=_ring({"x": [[True], [1.5], [1]]}, x=x),
        x_of_3_MB=_ring({"x": [LONG]}, x=x),
        x_beyond_float32=_ring({"x": [[1e39]] * 3}, x=x),
        types_too_few=_ring({"edge_attr": [0]}, edge_attr=[0, 1]),
        type_negative=_ring({"edge_attr": [0, -1]}, edge_attr=[0, 1]),
        type_10_to_6=_ring({"edge_attr": [0, 10**6]}, edge_attr=[0, 1]),
        type_2_to_63=_ring({"edge_attr": [0, 2**63]}, edge_attr=[0, 1]),
        features_among_types=_ring({"edge_attr": [[0.5], [1]]}, edge_attr=[0, 1]),
        no_target=_ring(None, '{"edges": [[0, 1]]}'),
        null_target=_ring({"y": None}),
        list_as_target=_ring({"y": [1, 2]}),
        object_as_target=_ring({"y": {"u": 1}}),
        unknown_field=_ring({"edge": 1}),
        ids_twice=_ring({"id": "1"}),
        one_class=whole.replace('"b"', '"a"'),
        class_of_one=_ring({"y": "c"}),
        class_of_3_MB=_ring({"y": LONG}),
        surrogate_in_a_target=_ring(None, *['{"edges": [[0, 1]], "y": "\\ud800"}'] * 6),
        one_class_as_number_and_text=whole.replace('"a"', "1").replace('"b"', '"2"').replace(": 1}", ': "1"}', 5),
    )
    yield from _odd_paths(kind, name, graphs)
    data = whole.encode()
    yield Case("graphs: gzip", _file("t.jsonl.gz", gzip.compress(data)), graphs, True)
    yield from _cases(kind, "t.jsonl.gz", graphs, False, **_damaged_gzip(data))
    one_line = _repeated(gzip.compress, data + b'{"edges": [[0, 1]', b",[0,1]", 200, b'], "y": "a"}\n')
    lines = _repeated(gzip.compress, data, b'{"edges": [[0, 1]], "y": "a"}\n', 200)
    yield from _cases(kind, "t.jsonl.gz", graphs, False, gzip_of_a_line_of_3_GB=one_line, gzip_of_lines_of_3_GB=lines)
    name = "t.g6"
    whole = "".join(f"{['Bw', 'BW'][i % 2]} {'ab'[i % 2]}\n" for i in range(40))
    yield from _cases(
        kind,
        name,
        graphs,
        True,
        graph6=whole,
        graph6_with_header=">>graph6<<" + whole,
        graph6_of_no_node=whole + "? a\n",
    )
    yield from _cases(
        kind,
        name,
        graphs,
        False,
        graph6_empty="",
        graph6_without_target=whole + "Bw\n",
        graph6_too_short=whole + "E? a\n",
        graph6_too_long=whole + "Bwww a\n",
        graph6_of_2_to_36_nodes=whole + "~~~~~~~~ a\n",
        graph6_of_258047_nodes=whole + "~}~~ a\n",
        graph6_of_a_lone_lead=whole + "~ a\n",
        sparse6=whole + ":An a\n",
        digraph6=whole + "&Bw a\n",
        graph6_of_letters_beyond=whole + "Bé a\n",
        graph6_of_controls=whole + "B\x01 a\n",
        graph6_of_3_MB=whole + "B" + "w" * 3_000_000 + " a\n",
    )
    large = _graph6(20_000, lead="~" + "".join(chr(63 + (20_000 >> s & 63)) for s in (12, 6, 0)))
    yield Case("graphs: graph6 of 20,000 nodes without edges", _file("t.g6", whole + large + " a\n"), graphs, True)
    yield Case(
        "graphs: graph6 gzip of a line of 3 GB",
        _file("t.g6.gz", _repeated(gzip.compress, whole.encode(), b"?", 200)),
        graphs,
        False,
    )
    name = "t.csv"
    yield from _cases(kind, name, _with_nodes, True, edges_in_rows=_edges())
    yield from _cases(
        kind,
        name,
        _with_nodes,
        False,
        edges_without_source=_edges(header="from,target"),
        edge_without_end=_edges("3,"),
        edge_of_another_node=_edges("99,1"),
        edges_header_alone="source,target\n",
        edges_row_too_long=_edges("3,4,5"),
        text_as_a_feature="source,target,w\n" + "".join(f"{i},0,abc\n" for i in range(40)),
        node_of_3_MB=_edges(LONG + ",1"),
    )


# Images


def _idx(array: Any, code: int = 8, shape: tuple[int, ...] | None = None) -> bytes:
    array = np.asarray(array)
    shape = array.shape if shape is None else shape
    types = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
    return (
        struct.pack(f">BBBB{len(shape)}I", 0, 0, code, len(shape), *shape)
        + array.astype(types.get(code, ">u1")).tobytes()
    )


def _mnist(pixels: bytes, labels: bytes | None = None, suffix: str = "") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        labels_name = "train-labels-idx1-ubyte"
        (folder / labels_name).write_bytes(_idx(np.arange(60) % 3) if labels is None else labels)
        (folder / f"train-images-idx3-ubyte{suffix}").write_bytes(pixels)
        return folder / (f"train-images-idx3-ubyte{suffix}" if labels is None else labels_name)

    return write


def _images() -> Iterable[Case]:
    pixels = np.arange(60 * 4 * 4).reshape(60, 4, 4) % 251
    whole = _idx(pixels)
    packed = gzip.compress(whole)
    right = {
        "plain": (whole, None, ""),
        "gzip": (packed, None, ".gz"),
        "rows": (_idx(pixels.reshape(60, 16)), None, ""),
        "colours": (_idx(np.arange(60 * 48).reshape(60, 3, 4, 4) % 251), None, ""),
        "labels of int32": (whole, _idx(np.arange(60) % 3 * 1000, 12), ""),
        "gzip without a suffix": (packed, None, ""),
    }
    wrong: dict[str, tuple[bytes, bytes | None, str]] = {
        "empty": (b"", None, ""),
        "three bytes": (whole[:3], None, ""),
        "header cut": (whole[:9], None, ""),
        "cut": (whole[:-1], None, ""),
        "longer": (whole + b"1", None, ""),
        "another magic": (b"\x89PNG" + whole, None, ""),
        "another type": (_idx(pixels, 10), None, ""),
        "no dimension": (b"\0\0\x08\0", None, ""),
        "255 dimensions of 2**32 - 1": (b"\0\0\x08\xff" + b"\xff" * 1020, None, ""),
        "2**31 images": (_idx(pixels, shape=(2**31, 4, 4)), None, ""),
        "no images": (_idx(pixels[:0]), None, ""),
        "no pixels": (_idx(pixels[:, :0]), None, ""),
        "product of 2**64": (_idx(pixels, shape=(2**31, 2**31, 4)), None, ""),
        "constant": (_idx(pixels * 0), None, ""),
        "int32": (_idx(pixels * 1000, 12), None, ""),
        "float64": (_idx(pixels / 7, 14), None, ""),
        "one dimension": (_idx(pixels.ravel()), None, ""),
        "labels of fractions": (whole, _idx(np.arange(60) % 3, 13), ""),
        "labels of two dimensions": (whole, _idx(np.zeros((60, 2))), ""),
        "labels too few": (whole, _idx(np.arange(59) % 3), ""),
        "a class of one": (whole, _idx(np.arange(60) // 59), ""),
        "labels empty": (whole, b"", ""),
        "text": (b"a,b\n1,2\n", None, ""),
        "gzip of 960 bytes and 3 GB": (_repeated(gzip.compress, whole, b"\0", 200), None, ".gz"),
        "gzip that promises 64 GB": (
            _repeated(gzip.compress, _idx(pixels, shape=(2**28, 16, 16)), b"\0", 200),
            None,
            ".gz",
        ),
        "gzip that promises 3 GB and has it": (
            _repeated(gzip.compress, _idx(pixels[:0], shape=(200 << 20, 4, 4)), b"\0", 200),
            None,
            ".gz",
        ),
        "gzip of nothing": (gzip.compress(b""), None, ".gz"),
    }
    damaged = {key: it for key, it in _damaged_gzip(whole).items() if "name_alone" not in key}
    wrong |= {key.replace("_", " "): (it, None, ".gz") for key, it in damaged.items()}
    for accept, found in ((True, right), (False, wrong)):
        for key, content in found.items():
            yield Case(f"images: {key}", _mnist(*content), images, accept)
    yield Case("images: read alone", _file("a.idx", whole), read_idx, True)
    yield from _odd_paths("images", "a.idx", read_idx)


# Texts


def _texts() -> Iterable[Case]:
    whole = "a line of some text\n" * 200
    yield from _cases(
        "text",
        "t.txt",
        text,
        True,
        plain=whole,
        binary=bytes(range(256)) * 20,
        zeros=bytes(5000),
        UTF_16=whole.encode("utf-16"),
        one_line="z" * 5000,
    )
    yield from _cases("text", "t.txt", text, False, empty="", too_short="abc")
    yield from _cases("text", "t.txt", with_words, True, of_characters=whole)
    yield from _cases(
        "text", "t.txt", with_words, False, characters_of_no_UTF_8=whole.encode() + b"\xff", characters_of_none=""
    )
    yield from _odd_paths("text", "t.txt", with_words)[1:]  # a folder is one of texts


def outcome(case: Case) -> str:
    """Read a case and return what is wrong with what came of it, nothing if it is as it should be."""
    with tempfile.TemporaryDirectory() as folder:
        path = case.write(Path(folder))
        try:
            case.read(path)
        except (ValueError, TypeError) as error:
            said = str(error)
            if case.accept:
                return f"refused: {said[:300]}"
            if case.accept is False and path.name not in said and str(path.parent) not in said:
                return f"does not name the file: {type(error).__name__}: {said[:300]}"
            return f"a message of {len(said)} characters: {said[:100]}" if len(said) > MOST_SHOWN else ""
        except BaseException as error:
            return f"{type(error).__name__}: {str(error)[:300]}"
        return "accepted" if case.accept is False else ""


if __name__ == "__main__":
    wanted = " ".join(sys.argv[1:])
    chosen = [case for case in cases() if wanted in case.name]
    failures = 0
    for case in chosen:
        start = time.perf_counter()
        said = outcome(case)
        failures += bool(said)
        if said or time.perf_counter() - start > 10:
            print(f"{case.name} ({time.perf_counter() - start:.1f} s): {said or 'slow'}", flush=True)
    print(f"{len(chosen)} cases, {failures} of them otherwise than they should be")
