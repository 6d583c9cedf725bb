"""Readers of the blocks of a file: row groups of Parquet, record batches of Arrow, ranges of lines of JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, BinaryIO

from lightning_accel.data.quoting import cut
from lightning_accel.data.shards.files import ShardFiles
from lightning_accel.ops.extras import import_on_use

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.json as pj
    import pyarrow.parquet as pq
else:
    pa = import_on_use("pyarrow")
    pj = import_on_use("pyarrow.json")
    pq = import_on_use("pyarrow.parquet")

_LINES_BYTES = 4 << 20  # of a block of lines
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}  # bytes of a value of Parquet


@dataclass
class FileBlocks:
    """Hold where the blocks of a file are.

    Args:
        schema: names and types of its columns.
        rows: rows of each block.
        nbytes: bytes of each block in memory, about.
        places: for each block, the number of its row group or record batch and 0, or its first and last byte.
    """

    schema: pa.Schema
    rows: list[int]
    nbytes: list[int]
    places: list[tuple[int, int]]


def list_blocks(files: ShardFiles, file: int) -> FileBlocks:
    """List the blocks of a file; JSON lines are read once for it, of other files only descriptions.

    Raises:
        ValueError: if it cannot be read as what its suffix says.
    """
    try:
        match files.kind:
            case ".parquet":
                with files.fs.open(files.path_of(file)) as opened, pq.ParquetFile(opened) as parquet:
                    return _row_groups(parquet)
            case ".arrow" | ".feather":
                return _listed(_record_batches(files, file))
            case _:
                with files.fs.open(files.path_of(file)) as opened:
                    return _ranges_of_lines(opened)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{files.shown_path(file)} cannot be read as {files.kind}: {cut(error, 200)}") from error


def read_block(
    files: ShardFiles, file: int, place: tuple[int, int], schema: pa.Schema, columns: Sequence[str]
) -> pa.Table:
    """Read the columns of a block that :func:`list_blocks` listed, in their order, as the types of ``schema``.

    Raises:
        ValueError: if it cannot be read.
    """
    try:
        match files.kind:
            case ".parquet":
                table = _read_row_group(files, file, place[0], columns)
            case ".arrow" | ".feather":
                table = pa.Table.from_batches([_record_batch(files, file, place[0])])
            case _:
                piece = files.fs.cat_file(files.path_of(file), start=place[0], end=place[1])
                return _parse_lines(piece, schema).select(columns)
        wanted = pa.schema([schema.field(name) for name in columns])
        table = table.select(columns)
        return table if table.schema.equals(wanted) else table.cast(wanted)
    except (pa.ArrowException, OSError, KeyError) as error:
        where = f"{files.shown_path(file)}, {place_name(files.kind, place)},"
        raise ValueError(f"{where} cannot be read: {cut(error, 200)}") from error


def place_name(kind: str, place: tuple[int, int]) -> str:
    """Return what a message calls a block."""
    match kind:
        case ".parquet":
            return f"row group {place[0]}"
        case ".arrow" | ".feather":
            return f"record batch {place[0]}"
    return f"bytes {place[0]} to {place[1]}"


def _listed(batches: Iterator[pa.RecordBatch]) -> FileBlocks:
    found = FileBlocks(pa.schema([]), [], [], [])
    for number, batch in enumerate(batches):
        found.schema = batch.schema
        if batch.num_rows:
            found.rows.append(batch.num_rows)
            found.nbytes.append(batch.nbytes)
            found.places.append((number, 0))
    return found


def _row_groups(file: pq.ParquetFile) -> FileBlocks:
    metadata = file.metadata
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    places = [(number, 0) for number, group in enumerate(groups) if group.num_rows]
    groups = [groups[number] for number, _ in places]
    return FileBlocks(
        _without_index(file.schema_arrow), [group.num_rows for group in groups], [*map(_unpacked, groups)], places
    )


def _without_index(schema: pa.Schema) -> pa.Schema:
    """Return a schema without the columns that pandas reads as the index of a table."""
    written = json.loads((schema.metadata or {}).get(b"pandas", "{}")).get("index_columns", [])
    return pa.schema([field for field in schema if field.name not in written])


def _unpacked(group: Any) -> int:
    """Return the bytes of a row group in memory, about, where dictionaries are unpacked."""
    total = 0
    for column in (group.column(number) for number in range(group.num_columns)):
        width = _WIDTHS.get(column.physical_type, 0)
        if not width and column.has_dictionary_page and column.statistics is not None and column.statistics.has_min_max:
            width = 4 + (len(column.statistics.min) + len(column.statistics.max)) // 2
        total += max(column.total_uncompressed_size, column.num_values * width)
    return total


def _read_row_group(files: ShardFiles, file: int, group: int, columns: Sequence[str]) -> pa.Table:
    path = files.path_of(file)
    if files.is_local:
        with pq.ParquetFile(path, metadata=_metadata_of(path, files.versions[file])) as parquet:
            return parquet.read_row_group(group, columns=list(columns), use_threads=False)
    from fsspec.parquet import open_parquet_file  # needs pyarrow

    # fetches the ranges that are needed in one go, in place of one request for each column
    with (
        open_parquet_file(path, fs=files.fs, columns=list(columns), row_groups=[group], engine="pyarrow") as opened,
        pq.ParquetFile(opened) as parquet,
    ):
        return parquet.read_row_group(group, columns=list(columns), use_threads=False)


@lru_cache(maxsize=32)  # megabytes each, of files with many row groups
def _metadata_of(path: str, version: str) -> pq.FileMetaData:
    """Return the description at the end of a Parquet file, which takes as long to read as a block."""
    return pq.read_metadata(path)


def _record_batches(files: ShardFiles, file: int) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of an Arrow file, one by one."""
    mapped = _mapped(files, file)
    if mapped is not None:
        yield from mapped
        return
    reader = pa.ipc.open_file(pa.memory_map(files.path_of(file)))
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)


def _record_batch(files: ShardFiles, file: int, number: int) -> pa.RecordBatch:
    mapped = _mapped(files, file)
    return pa.ipc.open_file(pa.memory_map(files.path_of(file))).get_batch(number) if mapped is None else mapped[number]


def _mapped(files: ShardFiles, file: int) -> list[pa.RecordBatch] | None:
    if not files.is_local:
        raise ValueError(
            f"{files.shown_path(file)} is read by memory map, which needs a local file; copy it, or take Parquet files"
        )
    return _map_batches(files.path_of(file), files.versions[file])


@lru_cache(maxsize=1024)
def _map_batches(path: str, version: str) -> list[pa.RecordBatch] | None:
    """Return the record batches of a file, without reading them; None if it is compressed.

    Raises:
        ValueError: if it is a compressed stream, whose batches cannot be read one by one.
    """
    whole = pa.memory_map(path).read_buffer()
    try:
        reader = pa.ipc.open_file(whole)
    except pa.ArrowInvalid:  # as the package datasets writes it
        stream = pa.ipc.open_stream(whole)
        batches = []
        for batch in stream:
            if not _is_within(batch, whole):
                raise ValueError(f"{path} is a compressed stream; write it uncompressed, or as an Arrow file") from None
            batches.append(batch)
        return batches
    numbers = range(reader.num_record_batches)
    if not numbers or not _is_within(reader.get_batch(0), whole):
        return None
    return [reader.get_batch(number) for number in numbers]


def _is_within(batch: pa.RecordBatch, whole: pa.Buffer) -> bool:
    """Return whether the values of a batch are in a memory-mapped file, not copied out of it."""
    buffers = [buffer for column in batch.columns for buffer in column.buffers() if buffer is not None and buffer.size]
    return all(whole.address <= buffer.address < whole.address + whole.size for buffer in buffers)


def _ranges_of_lines(opened: BinaryIO) -> FileBlocks:
    found = FileBlocks(pa.schema([]), [], [], [])
    for start, piece in _pieces(opened):
        table = _parse_lines(piece)
        found.schema = join_schemas([found.schema, table.schema])
        if table.num_rows:
            found.rows.append(table.num_rows)
            found.nbytes.append(table.nbytes)
            found.places.append((start, start + len(piece)))
    return found


def _pieces(opened: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield where whole lines start, and their bytes."""
    start, rest, piece = 0, b"", opened.read(_LINES_BYTES)
    while piece:
        following = opened.read(_LINES_BYTES)
        end = piece.rfind(b"\n") + 1 if following else len(piece)
        if end:
            yield start, rest + piece[:end]
            start += len(rest) + end
            rest = b""
        rest += piece[end:]
        piece = following


def _parse_lines(piece: bytes, schema: pa.Schema | None = None) -> pa.Table:
    if not piece.strip():
        return pa.table({})
    read = pj.ReadOptions(use_threads=False, block_size=len(piece) + 1)
    parse = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "ignore")
    return pj.read_json(io.BytesIO(piece), read_options=read, parse_options=parse)


def join_schemas(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Return the schema to which tables of all ``schemas`` can be cast: whole numbers become floats, if some are.

    Dictionaries become what they hold, and times that JSON's reader takes from texts become texts where others are.

    Raises:
        ValueError: if a column is of types that have nothing in common.
    """
    plain = [pa.schema([pa.field(one.name, _plain(one.type)) for one in schema]) for schema in schemas]
    try:
        return pa.unify_schemas(plain, promote_options="permissive")
    except pa.ArrowException:
        texts = [pa.schema([pa.field(one.name, _text_if_time(one.type)) for one in schema]) for schema in plain]
    try:
        return pa.unify_schemas(texts, promote_options="permissive")
    except pa.ArrowException as error:
        raise ValueError(f"a column is of one type in some rows and of another in others: {cut(error, 200)}") from error


def _text_if_time(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_timestamp(kind) else kind


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.string()
    return pa.binary() if pa.types.is_binary_view(kind) else kind
