import gzip
import json

import numpy as np
import pandas as pd
import pytest

from lightning_accel.data.sequences.files import SequenceLayout, read_sequences


@pytest.fixture
def write(tmp_path):
    def write(content, name="walks.jsonl"):
        path = tmp_path / name
        if isinstance(content, pd.DataFrame):
            content.to_parquet(path) if path.suffix == ".parquet" else content.to_csv(path, index=False)
        else:
            text = content if isinstance(content, str) else "".join(json.dumps(line) + "\n" for line in content)
            path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
        return path

    return write


@pytest.fixture
def read(write):
    def read(content, name="walks.jsonl", with_target=True, **layout):
        return read_sequences(write(content, name), SequenceLayout(**layout), with_target)

    return read


def parts(found):
    return [part.tolist() for part in np.split(found.steps, found.lengths.cumsum()[:-1])]


@pytest.mark.parametrize("name", ["walks.jsonl", "walks.ndjson.gz"])
def test_json_lines_of_values(read, name):
    lines = [
        {"id": "a", "values": [[1, 2], [3, 4.5]], "target": "x"},
        {"id": 7, "values": [], "target": "y"},
        {"values": [[5, 6]], "target": "x"},
    ]
    found = read(lines, name)
    assert parts(found) == [[[1, 2], [3, 4.5]], [], [[5, 6]]]
    assert found.ids == ["a", "7", "3"]
    assert found.target.tolist() == ["x", "y", "x"]
    assert found.names == ["values_0", "values_1"]
    assert read(lines, name, with_target=False).target is None
    assert read([{"values": [[1]]}], target_kind="forecasting").target is None


def test_json_lines_of_numbers_tokens_and_text(read):
    assert parts(read([{"values": [1, 2.5], "target": 0}])) == [[[1], [2.5]]]
    tokens = read([{"tokens": [3, 0], "target": 0}, {"tokens": [300], "target": 1}])
    assert parts(tokens) == [[3, 0], [300]]
    assert parts(read([{"input_ids": [3], "target": 0}])) == [[3]]
    assert parts(read([{"text": "né", "target": 0}])) == [list("né".encode())]
    assert parts(read([{"body": "a\tb", "label": 0}], values=["body"], target="label")) == [list(b"a\tb")]
    assert parts(read([{"signal": [1], "target": 0}], values=["signal"])) == [[[1]]]


def test_json_lines_of_every_kind_of_target(read):
    assert read([{"values": [1], "target": 2}] * 2, target_kind="regression").target.tolist() == [[2], [2]]
    assert read([{"values": [1], "target": [2, 0.5]}], target_kind="regression").target.tolist() == [[2, 0.5]]
    labels = read(
        [{"values": [1, 2], "target": ["A", None]}, {"values": [], "target": []}, {"values": [3], "target": ["B"]}],
        target_kind="labelling",
    ).target
    assert labels.tolist() == ["A", None, "B"]


def table(**columns):
    rows = {
        "id": ["b", "a", "b", "a", "b"],
        "step": [2, 1, 1, 0, 10],
        "x": [2.0, 11, 1, 10, 3],
        "target": list("uvuvu"),
    }
    return pd.DataFrame(rows | columns)


@pytest.mark.parametrize("name", ["walks.csv", "walks.csv.gz", "walks.parquet"])
def test_long_tables_are_sorted_by_step(read, name):
    found = read(table(y=[0, 1, 2, 3, 4]), name)
    assert parts(found) == [[[1, 2], [2, 0], [3, 4]], [[10, 3], [11, 1]]]
    assert found.ids == ["b", "a"]
    assert found.names == ["x", "y"]
    assert found.target.tolist() == ["u", "v"]
    assert parts(read(table(y=[0, 1, 2, 3, 4], note=list("abcde")), name, values=["x"])) == [
        [[1], [2], [3]],
        [[10], [11]],
    ]
    assert parts(read(table(y=0), name, step_column=None, values=["x"])) == [[[2], [1], [3]], [[11], [10]]]


def test_long_tables_of_every_kind_of_target(read):
    numbers = read(table(target=[1.5, 2, 1.5, 2, 1.5]), "walks.csv", target_kind="regression")
    assert numbers.target.tolist() == [[1.5], [2]]
    labels = read(table(target=["p", "q", None, "r", "s"]), "walks.csv", target_kind="labelling").target
    assert labels.fillna("none").tolist() == ["none", "p", "s", "r", "q"]
    assert read(table(), "walks.csv", with_target=False).target is None
    assert read(table().drop(columns="target"), "walks.csv", target_kind="forecasting").names == ["x"]


@pytest.mark.parametrize("name", ["walks.csv", "walks.parquet"])
def test_steps_may_be_dates_and_ids_stay_as_written(read, name):
    dates = ["2026-01-31T12:00", "2026-01-02", "2026-01-31T11:59:59", "2025-01-02", "2026-02-01"]
    found = read(table(step=dates, id=["01", "1", "01", "1", "01"]), name)
    assert parts(found) == [[[1], [2], [3]], [[10], [11]]]
    assert found.ids == ["01", "1"]


def test_dates_of_several_time_zones_are_sorted_by_time(read):
    dates = ["2026-01-01T00:30+02:00", "2026-01-01", "2025-12-31T22:00Z", "2025-01-02", "2025-12-31T23:00Z"]
    assert parts(read(table(step=dates), "walks.csv")) == [[[1], [2], [3]], [[10], [11]]]


def test_own_names(read):
    text = "who,when,v\nA,1,1.5\nA,0,2.5\n"
    layout = {"id_column": "who", "step_column": "when", "target_kind": "forecasting"}
    assert parts(read(text, "walks.csv", **layout)) == [[[2.5], [1.5]]]


GOOD = {"values": [1], "target": 0}


@pytest.mark.parametrize(
    ("lines", "layout", "said"),
    [
        ("", {}, r"walks.jsonl is empty; a sequence a line was needed"),
        ("\n \n", {}, r"walks.jsonl is empty"),
        ('{"values": [1]\n', {}, r"line 1 of .* is no JSON: .*one whole object"),
        ("[1, 2]\n", {}, r"line 1 of .* must hold an object.*got '\[1, 2\]'"),
        (
            [{"signal": [1]}],
            {},
            r"line 1 of .* has no field values, tokens.*name the field.* in layout.values.*Its fields: signal",
        ),
        ([GOOD, {"target": 0}], {}, r"line 2 of .* has no field 'values'. Its fields: target"),
        ([GOOD], {"values": ["value"]}, r"no field 'value'; did you mean 'values'\?"),
        ([GOOD], {"values": ["a", "b"]}, r"layout.values must name one field.*\['a', 'b'\]"),
        ([{"values": [1], "targets": 0}], {}, r"line 1 of .* has no field 'target'; did you mean 'targets'"),
        ([{**GOOD, "id": "k"}] * 2, {}, r"two lines with id 'k'"),
        ([GOOD, {**GOOD, "values": [[1], [1, 2]]}], {}, r"line 2 of .* equally long .*entry 1, .* is \[1, 2\]"),
        ([{**GOOD, "values": [1, [2]]}], {}, r"line 1 .* entry 1, counted from 0, is \[2\] and the first one 1"),
        ([GOOD, {**GOOD, "values": [[1, 2]]}], {}, r"line 2 of .* has 2 a step, line 1 of .* 1"),
        (
            [{**GOOD, "values": [1, None]}],
            {},
            r"'values' in line 1 .* a list of numbers.*got None in entry 1",
        ),
        ([{**GOOD, "values": ["1.5"]}], {}, r"must be a list of numbers.*got '1.5' in entry 0"),
        ([{**GOOD, "values": [[[1]]]}], {}, r"must be a list of numbers .*, or of.*got \[1\] in entry 0"),
        ([{**GOOD, "values": [[0], [float("nan")]]}], {}, r"at most 1e\+30, or .*; got nan in entry 1"),
        ([{**GOOD, "values": [1e31]}], {}, r"at most 1e\+30, or .*; got 1e\+31 in entry 0"),
        ([{**GOOD, "values": 3}], {}, r"must be a list of numbers .*; got 3"),
        ([{**GOOD, "values": []}], {}, r"every sequence is empty up to line 1"),
        ([{**GOOD, "values": [[], []]}], {}, r"line 1 of .* steps without values"),
        ([{"tokens": ["the"], "target": 0}], {}, r"must be a list of whole numbers.*got 'the' in entry 0"),
        ([{"tokens": [-1], "target": 0}], {}, r"whole numbers from 0; got \[-1\]"),
        ([{"tokens": [1.0], "target": 0}], {}, r"must be a list of whole numbers.*; got \[1.0\]"),
        ([{**GOOD, "target": None}], {}, r"'target' in line 1 of .* must be a class.*got None"),
        (
            [{**GOOD, "target": [1]}],
            {},
            r"must be a class.*got \[1\].*set layout.target_kind to labelling or regression",
        ),
        ([{**GOOD, "target": "a"}], {"target_kind": "regression"}, r"must be a number, or a list of numbers; got 'a'"),
        ([{**GOOD, "target": float("nan")}], {"target_kind": "regression"}, r"must be a number.*got nan"),
        (
            [GOOD, {**GOOD, "target": [1, 2]}],
            {"target_kind": "regression"},
            r"equally long; line 2 of .* has 2, line 1 .* 1",
        ),
        ([GOOD], {"target_kind": "labelling"}, r"a class for each of its 1 steps; got 0"),
        ([{**GOOD, "target": [1, 2]}], {"target_kind": "labelling"}, r"a class for each of its 1 steps; got 2 of them"),
    ],
    ids=str,
)
def test_bad_json_lines_are_refused(read, lines, layout, said):
    with pytest.raises(ValueError, match=f"(?s){said}"):
        read(lines, **layout)


@pytest.mark.parametrize(
    ("columns", "layout", "said"),
    [
        ({}, {"step_column": "steps"}, r"no column 'steps'; did you mean 'step'\?.*step_column, or set it to null"),
        ({}, {"values": ["xx"]}, r"no column 'xx'"),
        ({"x": None}, {}, r"no column left for values beside id, step, target"),
        ({"step": [2, 1, 1, 0, 2]}, {}, r"two rows of id 'b' with step 2: rows 0 and 4 \(from 0\)"),
        ({"step": [2, 1, 1, 0, None]}, {}, r"'step' of .* lacks 1 of 5 values, the first in row 4 \(from 0\)"),
        ({"step": list("12x45")}, {}, r"'step' of .* must hold numbers, or dates.*got '1' in row 0 \(from 0\)"),
        ({"id": ["b", "a", None, "a", "b"]}, {}, r"'id' of .* lacks 1 of 5 values, the first in row 2 \(from 0\)"),
        (
            {"x": [1, 2, None, 4, 5]},
            {},
            r"'x' of .* lacks 1 of 5 values, the first in row 2 \(from 0\).*Fill.*in layout.values",
        ),
        ({"x": [1, 2, "a", 4, 5]}, {}, r"'x' of .* must hold numbers.*got 'a' in row 2 \(from 0\).*in layout.values"),
        (
            {"target": list("uvuvw")},
            {},
            r"same in all rows.*rows 0 and 4 \(from 0\), of one id, hold u and w.*labelling",
        ),
        (
            {"target": [1, 2, 1, 3, 1]},
            {"target_kind": "regression"},
            r"rows 3 and 1 \(from 0\), of one id, hold 3.0 and 2.0",
        ),
        (
            {"target": ["u", None, "u", "v", "u"]},
            {},
            r"'target' of .* lacks 1 of 5 values, the first in row 1 \(from 0\)",
        ),
        (
            {"target": [1, 2, 1, None, 1]},
            {"target_kind": "regression"},
            r"'target' of .* lacks 1 of 5.*row 3 \(from 0\)",
        ),
        (
            {"target": list("uvuvu")},
            {"target_kind": "regression"},
            r"'target' of .* must hold numbers.*got 'u' in row 0 \(from 0\)",
        ),
    ],
    ids=str,
)
def test_bad_tables_are_refused(read, columns, layout, said):
    with pytest.raises(ValueError, match=f"(?s){said}"):
        read(table(**columns).dropna(axis=1, how="all"), "walks.csv", **layout)


@pytest.mark.parametrize(
    ("text", "name", "layout", "said"),
    [
        ("x\ty\n", "a.txt", {}, r"need a .jsonl file .*got .*a.txt"),
        ("x", "a", {}, r"need a .jsonl file"),
        ("id,step,x,target\n", "a.csv", {}, "has a header but no rows"),
    ],
    ids=str,
)
def test_bad_texts_are_refused(read, text, name, layout, said):
    with pytest.raises(ValueError, match=f"(?s){said}"):
        read(text, name, **layout)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_what_is_not_text_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=f"{name} cannot be (read as UTF-8 text|unpacked: Not a gzipped file)"):
        read_sequences(tmp_path / name, SequenceLayout())
