"""Which files a folder, pattern or URL holds, and the blocks of each kind."""

import json
from datetime import datetime
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch

from lightning_accel.data import ShardDataset, shard_loader
from lightning_accel.data.shards import formats
from lightning_accel.data.shards.blocks import find_blocks
from lightning_accel.data.shards.files import find_files, is_sharded
from lightning_accel.data.shards.splits import split_blocks

TABLE = pa.table({"row": np.arange(50), "text": [f"ä{row}" for row in range(50)]})


def names_in(location):
    return find_files(location).names


def test_folders_patterns_and_single_files_are_found(tmp_path):
    for name in ("b/2.jsonl", "a.jsonl", "b/1.jsonl", "_temporary/3.jsonl", "b/.hidden.jsonl", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"row": 1}\n')
    assert names_in(tmp_path) == ["a.jsonl", "b/1.jsonl", "b/2.jsonl"]
    assert names_in(f"{tmp_path}/b/*.jsonl") == ["1.jsonl", "2.jsonl"]
    assert names_in(tmp_path / "a.jsonl") == ["a.jsonl"]
    assert is_sharded(tmp_path)
    assert is_sharded("s3://bucket/rows")
    assert not is_sharded(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        ([], ValueError, r"is a folder without a file; .parquet, .arrow, .feather, .jsonl, .ndjson files were needed"),
        (["a.csv"], ValueError, r"no .parquet, .* file in .*; it holds a.csv"),
        (["a.jsonl.gz"], ValueError, r"holds a.jsonl.gz: a packed file can be read from its start alone. Unpack it"),
        (["a.jsonl", "b.parquet"], ValueError, r"files of several kinds \(1 .parquet, 1 .jsonl\); name one, such as"),
        (["year=2026/a.jsonl"], ValueError, "whose folder stands for a value that is not in the file"),
    ],
)
def test_other_folders_are_refused(tmp_path, names, error, message):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(error, match=message):
        find_files(tmp_path)


def test_a_folder_that_is_not_there_is_said_to_be_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder, and no file, .*/rwos"):
        find_files(tmp_path / "rwos")


def test_a_protocol_without_its_package_is_named():
    with pytest.raises((ImportError, ValueError), match=r"nothing://bucket cannot be opened: .*nothing"):
        find_files("nothing://bucket")


def test_names_that_look_like_patterns_or_urls_are_folders_where_they_are_there(tmp_path, monkeypatch):
    for name in ("br[1]", "st*r", "a::b", "home/rows"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "part-7.jsonl").write_text('{"row": 1}')
        assert is_sharded(tmp_path / name)
        assert names_in(tmp_path / name) == ["part-7.jsonl"]
    assert names_in(f"{tmp_path}/home/rows/part-?.jsonl") == ["part-7.jsonl"]
    assert names_in(f"{tmp_path}/home/rows/part-[0-9].jsonl") == ["part-7.jsonl"]
    assert names_in(f"{tmp_path}/home/*") == ["rows/part-7.jsonl"]
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert is_sharded("~/rows")
    assert names_in("~/rows") == ["part-7.jsonl"]
    for location in ("", Path("s3://bucket/rows")):
        with pytest.raises(ValueError, match="a folder, a pattern, or a URL as a str was needed"):
            find_files(location)


def test_links_to_files_are_followed_and_links_to_folders_refused(tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "a.jsonl").write_text('{"row": 1}')
    (tmp_path / "rows" / "b.jsonl").symlink_to(tmp_path / "a.jsonl")
    assert find_blocks(tmp_path / "rows", tmp_path / "cache").num_rows == 1
    (tmp_path / "a.jsonl").write_text('{"row": 1}\n{"row": 2}')
    assert find_blocks(tmp_path / "rows", tmp_path / "cache").num_rows == 2
    (tmp_path / "rows" / "more").symlink_to(tmp_path)
    with pytest.raises(
        ValueError, match=r"more is a link to a folder, whose files would be left out; name that folder"
    ):
        find_files(tmp_path / "rows")


def rows_in(location, cache):
    blocks = find_blocks(location, cache)
    tables = [blocks.read(block, blocks.schema.names) for block in range(len(blocks))]
    assert blocks.rows.tolist() == [table.num_rows for table in tables]
    return blocks, pa.concat_tables(tables)


def test_each_kind_of_file_gives_the_same_rows(tmp_path):
    parquet, arrow, stream, lines = (tmp_path / name for name in ("parquet", "arrow", "stream", "lines"))
    for folder in (parquet, arrow, stream, lines):
        folder.mkdir()
    pq.write_table(TABLE, parquet / "a.parquet", row_group_size=7)
    with pa.ipc.new_file(arrow / "a.arrow", TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=7)
    with pa.ipc.new_stream(stream / "a.arrow", TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=7)
    (lines / "a.ndjson").write_text("\n\n".join(map(json.dumps, TABLE.to_pylist())))
    for folder, blocks in ((parquet, 8), (arrow, 8), (stream, 8), (lines, 1)):
        found, table = rows_in(folder, tmp_path / "cache")
        assert len(found) == blocks
        assert table.equals(TABLE)
        assert found.nbytes.sum() >= TABLE.nbytes * 0.7


@pytest.mark.parametrize("size", [1, 13, 64, 400, 10_000])
@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_lines_are_whole_wherever_a_file_is_cut(tmp_path, monkeypatch, size, end):
    monkeypatch.setattr(formats, "_LINES_BYTES", size)
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, TABLE.to_pylist())) + end)
    assert rows_in(tmp_path, tmp_path / "cache")[1].equals(TABLE)


def test_types_that_differ_between_blocks_are_joined(tmp_path):
    """Whole numbers beside fractions, texts that look like times beside others, fields that some lines lack."""
    first = {"number": 1, "text": "2026-01-01", "values": [1, 2]}
    second = {"number": 0.5, "text": "word", "values": [0.5], "more": None}
    (tmp_path / "a.jsonl").write_text(json.dumps(first))
    (tmp_path / "b.jsonl").write_text(json.dumps(second))
    _, table = rows_in(tmp_path, tmp_path / "cache")
    assert table.to_pylist() == [first | {"number": 1.0, "values": [1.0, 2.0], "more": None}, second]


def test_categories_of_pandas_become_texts(tmp_path):
    for name, words in (("a", ["x", "y"]), ("b", ["y", "z"])):
        pq.write_table(pa.table({"word": pa.array(words).dictionary_encode()}), tmp_path / f"{name}.parquet")
    assert rows_in(tmp_path, tmp_path / "cache")[1].to_pydict() == {"word": ["x", "y", "y", "z"]}


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ('{"a": 1}', '{"a": "one"}', "files in .* do not fit together: a column is of one type in some rows and of"),
        ('{"a": 1}', '{"a": 1', r"b.jsonl cannot be read as .jsonl: JSON parse error"),
        ("", "\n", r"holds 2 .jsonl files without a row"),
    ],
)
def test_lines_that_cannot_be_read_are_refused(tmp_path, first, second, message):
    (tmp_path / "a.jsonl").write_text(first)
    (tmp_path / "b.jsonl").write_text(second)
    with pytest.raises(ValueError, match=message):
        find_blocks(tmp_path, tmp_path / "cache")


def test_views_become_texts_and_packed_arrow_files_are_read_block_by_block(tmp_path):
    for folder in ("views", "feather", "stream"):
        (tmp_path / folder).mkdir()
    views = TABLE.set_column(1, "text", TABLE["text"].cast(pa.string_view()))
    with pa.ipc.new_file(tmp_path / "views" / "a.arrow", views.schema) as writer:
        writer.write_table(views)
    pa.feather.write_feather(TABLE, tmp_path / "feather" / "a.feather", compression="zstd", chunksize=9)
    for folder, blocks in (("views", 1), ("feather", 6)):
        found, table = rows_in(tmp_path / folder, tmp_path / "cache")
        assert len(found) == blocks
        assert table.equals(TABLE)
    path = tmp_path / "feather" / "a.feather"
    assert formats._map_batches(str(path), "") is None  # else all of it would stay in memory
    packed = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(tmp_path / "stream" / "a.arrow", TABLE.schema, options=packed) as writer:
        writer.write_table(TABLE)
    with pytest.raises(ValueError, match="is a compressed stream; write it uncompressed, or as an Arrow file"):
        find_blocks(tmp_path / "stream", tmp_path / "cache")


def test_texts_that_repeat_are_counted_at_their_length(tmp_path):
    table = pa.table({"text": ["a" * 500, "b" * 700] * 1000})
    pq.write_table(table, tmp_path / "a.parquet")
    assert 0.9 < find_blocks(tmp_path, tmp_path / "cache").nbytes[0] / table.nbytes < 1.1


def test_two_columns_of_one_name_are_refused(tmp_path):
    pq.write_table(pa.Table.from_arrays([[1], [2]], names=["a", "a"]), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet has two columns named 'a'; rename or remove one"):
        find_blocks(tmp_path, tmp_path / "cache")


def test_a_damaged_list_is_made_again_and_a_folder_that_cannot_be_made_named(tmp_path):
    (tmp_path / "rows").mkdir()
    pq.write_table(TABLE, tmp_path / "rows" / "a.parquet")
    find_blocks(tmp_path / "rows", tmp_path / "cache")
    [kept] = (tmp_path / "cache").glob("*.npz")
    kept.write_bytes(kept.read_bytes()[:100])
    assert find_blocks(tmp_path / "rows", tmp_path / "cache").num_rows == 50
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"file/cache cannot be made: .*; name another folder as cache_dir"):
        find_blocks(tmp_path / "rows", tmp_path / "file" / "cache")


def test_files_with_other_columns_are_refused(tmp_path):
    pq.write_table(TABLE, tmp_path / "a.parquet")
    pq.write_table(TABLE.select(["row"]), tmp_path / "b.parquet")
    with pytest.raises(
        ValueError, match=r"a.parquet and .*b.parquet must have the same columns; text is in one of them"
    ):
        find_blocks(tmp_path, tmp_path / "cache")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 is no file PAR1")
    with pytest.raises(ValueError, match=r"b.parquet cannot be read as .parquet: "):
        find_blocks(tmp_path, tmp_path / "cache")


def test_a_list_of_blocks_is_kept_until_a_file_changes(tmp_path, monkeypatch):
    folder, cache = tmp_path / "rows", tmp_path / "cache"
    folder.mkdir()
    pq.write_table(TABLE, folder / "a.parquet", row_group_size=20)
    assert find_blocks(folder, cache).rows.tolist() == [20, 20, 10]
    monkeypatch.setattr("lightning_accel.data.shards.blocks.list_blocks", lambda *_: pytest.fail("read again"))
    kept = find_blocks(folder, cache)
    assert kept.rows.tolist() == [20, 20, 10]
    assert kept.read(2, ["row"]).equals(TABLE.select(["row"])[40:])
    monkeypatch.undo()
    pq.write_table(TABLE.slice(0, 20), folder / "b.parquet")
    assert find_blocks(folder, cache).num_rows == 70


def test_urls_are_read_by_ranges(tmp_path):
    memory = fsspec.filesystem("memory")
    memory.makedirs("/bucket/rows", exist_ok=True)
    with memory.open("/bucket/rows/a.parquet", "wb") as file:
        pq.write_table(TABLE, file, row_group_size=9)
    loader = shard_loader("memory://bucket/rows", 5, lambda table: table["row"].to_pylist(), cache_dir=tmp_path)
    assert sorted(row for batch in loader for row in batch) == [*range(50)]
    assert loader.dataset.blocks.name_of(1) == "memory:///bucket/rows/a.parquet, row group 1"
    memory.rm("/bucket", recursive=True)


def named(tmp_path, names):
    for number, name in enumerate(names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(TABLE.slice(number, 8), tmp_path / name, row_group_size=1)
    blocks = find_blocks(tmp_path, tmp_path / "cache")
    splits = split_blocks(blocks, (0.25, 0.25), 0, tmp_path)
    assert sorted(np.concatenate([*splits.values()]).tolist()) == [*range(len(blocks))]
    return {
        split: {blocks.files.names[file] for file in blocks.file_of[found]} for split, found in splits.items()
    }, splits


@pytest.mark.parametrize(
    "names",
    [
        ("train/a.parquet", "val/a.parquet", "test/a.parquet"),
        ("train-00000-of-00001.parquet", "validation-00000-of-00001.parquet", "test-00000-of-00001.parquet"),
        ("train_1.parquet", "dev_1.parquet", "test_1.parquet"),
        ("data/train-00000-of-00001-0b3b1b5e.parquet", "data/valid-0.parquet", "data/test-0.parquet"),
        ("x/imdb-train.parquet", "x/imdb-validation.parquet", "x/latest/imdb.testing.parquet"),
    ],
)
def test_names_of_files_say_what_they_are_for(tmp_path, names):
    found, _ = named(tmp_path, names)
    assert found == {split: {name} for split, name in zip(("train", "val", "test"), names, strict=True)}


def test_words_that_say_two_things_are_refused_and_those_without_training_told(tmp_path):
    with pytest.raises(ValueError, match=r"the path crash_test/train_1.parquet in .* has words for test and train"):
        named(tmp_path / "two", ("crash_test/train_1.parquet", "train_2.parquet"))
    with pytest.warns(
        UserWarning, match=r"the names of test_1.parquet, val_1.parquet in .* no file has the word train"
    ):
        found, _ = named(tmp_path / "none", ("test_1.parquet", "val_1.parquet"))
    assert found["train"] == {"test_1.parquet", "val_1.parquet"}


def test_blocks_of_all_parts_of_sorted_files_validate_and_test(tmp_path):
    found, splits = named(tmp_path, ("a.parquet", "b.parquet", "c.parquet", "d.parquet"))
    assert [len(splits[split]) for split in ("train", "val", "test")] == [16, 8, 8]
    assert (np.diff(splits["test"]) <= 7).all()  # one of every four
    assert found["train"] == {"a.parquet", "b.parquet", "c.parquet", "d.parquet"}
    _, again = named(tmp_path, ("a.parquet", "b.parquet", "c.parquet", "d.parquet"))
    assert all((again[split] == splits[split]).all() for split in splits)


def test_what_names_leave_out_comes_from_what_trains(tmp_path):
    found, splits = named(tmp_path, ("train/a.parquet", "test/a.parquet"))
    assert found["test"] == {"test/a.parquet"}
    assert found["val"] == {"train/a.parquet"}
    assert len(splits["val"]) == 3  # a quarter of all rows, a third of what is left for both


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ("train/a.parquet", "more/a.parquet"),
            "has files for training, .* by their names, and more/a.parquet without",
        ),
        (
            ("a.parquet",),
            r"has 3 blocks .* that train, of which 0.25 for test is less than one. Put the files in folders",
        ),
    ],
)
def test_splits_that_cannot_be_are_refused(tmp_path, names, message):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pq.write_table(TABLE, tmp_path / name, row_group_size=20)
    with pytest.raises(ValueError, match=message):
        split_blocks(find_blocks(tmp_path, tmp_path / "cache"), (0.25, 0.25), 0, tmp_path)


def arrow_rows(tmp_path):
    for number in range(3):
        with pa.ipc.new_file(tmp_path / f"{number}.arrow", TABLE.schema) as writer:
            writer.write_table(TABLE.slice(15 * number, 15), max_chunksize=4)
    return ShardDataset(tmp_path, cache_dir=tmp_path / "cache")


def test_any_row_is_read_by_its_number(tmp_path):
    rows = arrow_rows(tmp_path)
    assert len(rows) == 45
    assert rows[44] == rows[-1] == {"row": 44, "text": "ä44"}
    asked = np.random.default_rng(0).integers(0, 45, 200)
    assert rows.take(asked)["row"].to_pylist() == asked.tolist()
    assert rows.take([]).num_rows == 0
    with pytest.raises(IndexError, match="there are 45 rows; got the number 45"):
        rows[45]


def test_rows_go_into_any_loader(tmp_path):
    loader = torch.utils.data.DataLoader(arrow_rows(tmp_path), batch_size=8, shuffle=True, num_workers=1)
    batches = [*loader]
    assert sorted(torch.cat([batch["row"] for batch in batches]).tolist()) == [*range(45)]
    assert len(batches[0]["text"]) == 8


def test_times_stay_times_where_all_are(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"time": "2026-01-01 12:00:00"}')
    assert rows_in(tmp_path, tmp_path / "cache")[1].to_pylist() == [{"time": datetime(2026, 1, 1, 12)}]
