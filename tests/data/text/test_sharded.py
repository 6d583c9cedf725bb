"""Documents that are rows of files: their tokens, one stream, written once."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_accel.data import TextDataModule

DOCUMENTS = [f"{number} " + "äb" * (number % 9) for number in range(300)] + [""]


class Words:
    """Tokenize words by their numbers."""

    vocab_size = 70_000

    def encode(self, text):
        return [len(word) * 1000 for word in text.split()]

    def decode(self, tokens):
        return str(tokens)


def folder_of(path, rows, lines=False):
    path.mkdir()
    for number in range(3):
        part = rows[len(rows) * number // 3 : len(rows) * (number + 1) // 3]
        if lines:
            (path / f"{number}.jsonl").write_text("\n".join(map(json.dumps, part)))
        else:
            pq.write_table(pa.Table.from_pylist(part), path / f"{number}.parquet", row_group_size=11)
    return path


def stream_of(location, tmp_path, **options):
    data = TextDataModule(location, 7, cache_dir=tmp_path / "cache", **options)
    data.prepare_data()
    data.setup()
    return data, data.stream.read(0, len(data.stream)).tolist()


@pytest.mark.parametrize("lines", [True, False], ids=["lines", "parquet"])
def test_each_document_is_followed_by_the_separator(tmp_path, lines):
    folder = folder_of(tmp_path / "rows", [{"text": text, "url": "x"} for text in DOCUMENTS], lines)
    data, tokens = stream_of(folder, tmp_path)
    assert tokens == [token for text in DOCUMENTS for token in [*text.encode(), 256]]
    assert data.bytes_per_token == 1
    assert len(data.train_windows) > 200
    assert stream_of(f"{folder}/*", tmp_path)[1] == tokens
    assert stream_of(next(folder.glob("0.*")), tmp_path)[1] == tokens[: len("".join(DOCUMENTS[:100]).encode()) + 100]


def test_a_tokenizer_and_its_token_ids(tmp_path):
    numbers = [{"ids": Words().encode(text)} for text in DOCUMENTS]
    texts = folder_of(tmp_path / "texts", [{"body": text} for text in DOCUMENTS])
    ids = folder_of(tmp_path / "ids", numbers)
    data, tokens = stream_of(texts, tmp_path, tokenizer=Words(), field="body")
    assert tokens == [token for row in numbers for token in [*row["ids"], 70_000]]
    assert data.bytes_per_token == (len("".join(DOCUMENTS).encode()) + len(DOCUMENTS)) / len(tokens)
    assert stream_of(ids, tmp_path, tokenizer=Words(), field="ids")[1] == tokens


def test_tokens_are_written_once(tmp_path, monkeypatch):
    folder = folder_of(tmp_path / "rows", [{"text": text} for text in DOCUMENTS])
    first = stream_of(folder, tmp_path)[1]
    monkeypatch.setattr("lightning_accel.data.text.sharded._tokens_of", lambda *_: pytest.fail("read again"))
    assert stream_of(folder, tmp_path)[1] == first


def test_texts_beside_rows_are_refused_but_for_a_readme(tmp_path):
    folder = folder_of(tmp_path / "rows", [{"text": text} for text in DOCUMENTS])
    (folder / "a.txt").write_text("only this " * 100)
    with pytest.raises(ValueError, match=r"holds texts \(a.txt\) and files of rows \(0.parquet\); name one kind"):
        stream_of(folder, tmp_path)
    assert stream_of(f"{folder}/*.parquet", tmp_path)[0].rows_of is not None
    (folder / "a.txt").rename(folder / "README.md")
    assert stream_of(folder, tmp_path)[0].rows_of == folder


def test_names_of_files_are_the_splits(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    for name, letter, count in (("train-0-of-2", "a", 90), ("train-1-of-2", "b", 60), ("test-0-of-1", "c", 50)):
        pq.write_table(pa.table({"text": [letter * 9] * count}), folder / f"{name}.parquet")
    data, _ = stream_of(folder, tmp_path)
    letters = [
        {chr(token) for window in windows for token in window.tolist() if token != 256}
        for windows in (data.train_windows, data.val_windows, data.test_windows)
    ]
    assert letters[0] == {"a", "b"}
    assert letters[1] <= {"a", "b"}
    assert letters[2] == {"c"}
    assert len(data.test_windows) == 500 // 8  # a window that borders on the training text is left out


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"txt": "a"}], {}, r"no column 'text'; did you mean 'txt'\?"),
        ([{"text": None}, {"text": "a"}], {}, r"column 'text' of .*row group 0 lacks 1 of 2 texts"),
        (
            [{"text": [300]}],
            {},
            r"token ids from 300 to 300, and the vocabulary of ByteTokenizer 256; give the tokenizer",
        ),
        ([{"text": 1.5}], {}, r"column 'text' of .* must hold texts, or lists of token ids; got 1.5"),
        ([{"text": "short"}], {}, r"the text of .*rows holds 6 tokens, 0 windows of context_length=7"),
    ],
)
def test_files_that_cannot_be_read_are_refused(tmp_path, rows, options, message):
    (tmp_path / "rows").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows" / "a.parquet")
    with pytest.raises(ValueError, match=message):
        stream_of(tmp_path / "rows", tmp_path, **options)
    assert not [*(tmp_path / "cache").glob("*.bin")] or "windows" in message


def test_windows_are_of_rows_in_their_order(tmp_path):
    folder = folder_of(tmp_path / "rows", [{"text": text} for text in DOCUMENTS])
    data, tokens = stream_of(folder, tmp_path)
    window = data.train_windows[5].tolist()
    start = int(data.train_windows.numbers[5]) * 8
    assert window == tokens[start : start + 8]
