import datetime
import warnings

import numpy as np
import pandas as pd
import pytest
import torch

from lightning_accel.data import CSVFormat, TabularDataModule
from lightning_accel.data.tables.leakage import doubts_of_answers


@pytest.fixture
def table():
    """Sixty rows of three classes, with a numeric column that misses values, one of text, a key and a flag."""
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "key": [f"row{i}" for i in range(60)],
            "length": np.where(rng.random(60) < 0.2, np.nan, rng.normal(50, 9, 60)),
            "width": rng.integers(1, 90, 60),
            "colour": rng.choice(["red", "green", None], 60),
            "wet": rng.random(60) < 0.5,
            "kind": ["oak"] * 30 + ["ash"] * 18 + ["elm"] * 12,
        }
    )


@pytest.fixture
def make(table, tmp_path):
    def make(frame=table, name="trees.csv", **options):
        path = tmp_path / name
        if isinstance(frame, str):
            path.write_text(frame)
        elif path.suffix == ".parquet":
            frame.to_parquet(path)
        else:
            frame.to_csv(path, index=False)
        data = TabularDataModule(path, **{"target": "kind", "exclude": ["key"], **options})
        data.setup()
        return data

    return make


def test_features_match_a_computation_by_hand(make, table):
    data = make()
    assert data.class_names == ["ash", "elm", "oak"]
    assert data.feature_names == [
        "length", "width", "wet", "missingindicator_length", "colour=<missing>", "colour=green", "colour=red",
    ]  # fmt: skip
    assert data.num_features == 7
    assert data.num_classes == 3

    # rows are found again by their width, length and class
    def numbers_of(rows):
        return [tuple(row.tolist()) for row in rows.tensors[0]]

    labels = torch.cat([rows.tensors[1] for rows in (data.train_rows, data.val_rows, data.test_rows)])
    assert torch.bincount(labels).tolist() == [18, 12, 30]
    train = np.array(numbers_of(data.train_rows))
    np.testing.assert_allclose(train[:, :4].mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(train[:, :4].std(axis=0), 1, atol=1e-5)
    np.testing.assert_array_equal(train[:, 4:].sum(axis=1), 1)

    widths = table["width"].to_numpy(dtype=float)
    every = np.concatenate([np.array(numbers_of(rows)) for rows in (data.train_rows, data.val_rows, data.test_rows)])
    slope, shift = np.polyfit(np.sort(every[:, 1]), np.sort(widths), 1)  # one affine map takes all splits back
    np.testing.assert_allclose(np.sort(every[:, 1]) * slope + shift, np.sort(widths), atol=1e-3)


def test_raw_columns_are_encoded_as_the_rows_are_and_back(make, table):
    table["height"] = np.where(np.arange(60) % 5 == 0, np.nan, table["width"] + 0.5)  # gaps in a second column
    encoding = make(table).preprocessing()
    category = {"red": 2, "green": 1}
    kept = ["length", "width", "wet", "height"]
    assert [column["name"] for column in encoding.columns] == [*kept, "colour"]
    raw = table[kept].astype(float).assign(colour=[category.get(one, 0) for one in table["colour"]]).to_numpy()
    features = encoding(torch.from_numpy(raw)).numpy()
    lacking = np.isnan(raw[:, [0, 3]])
    assert ((features[:, 4:6] > 0) == lacking).all()
    np.testing.assert_array_equal(features[:, 6:], np.eye(3)[raw[:, 4].astype(int)])
    np.testing.assert_allclose(encoding.inverse(torch.from_numpy(features)), raw, rtol=1e-5, atol=1e-5)


def row_numbers(data):
    """The numbers of the rows of each split, from widths that grow with the number."""
    parts = [rows.tensors[0][:, 1] for rows in (data.train_rows, data.val_rows, data.test_rows)]
    return np.split(torch.cat(parts).argsort().argsort().numpy(), [42, 51])


@pytest.mark.slow
def test_only_training_rows_move_the_normalisation(make, table):
    """A value changed in a row of validation or test changes that one number, in a training row every row."""
    table = table.assign(width=np.arange(60.0))
    before = make(table)
    for numbers, expected in zip(row_numbers(before), [(42, 9, 9), (0, 1, 0), (0, 0, 1)], strict=True):
        for i in numbers[:3]:
            after = make(table.assign(width=table["width"].where(table.index != i, 10_000)))
            changes = tuple(
                int((getattr(after, part).tensors[0] != getattr(before, part).tensors[0]).sum())
                for part in ("train_rows", "val_rows", "test_rows")
            )
            assert changes == expected


def test_rows_without_a_class_train_where_that_is_asked_for(make, table):
    missing = table.index % 3 == 1
    without = table.assign(kind=table.kind.where(~missing))
    with pytest.raises(ValueError, match=r"20 .*set csv\.unlabeled, for a model"):
        make(without)
    data = make(without, csv=CSVFormat(unlabeled=True))
    known = make(table[~missing], name="known.csv")
    assert data.class_names == known.class_names
    for split in ("val_rows", "test_rows"):
        assert getattr(data, split).tensors[1].equal(getattr(known, split).tensors[1])
    labels = data.train_rows.tensors[1]
    assert labels[: len(known.train_rows)].equal(known.train_rows.tensors[1])
    assert labels[len(known.train_rows) :].tolist() == [-100] * 20
    width = data.feature_names.index("width")
    torch.testing.assert_close(data.train_rows.tensors[0][:, width].mean(), torch.tensor(0.0), atol=1e-6, rtol=0)


def test_splits_are_disjoint_complete_and_repeatable(make, table):
    unique = table.assign(width=np.arange(60.0), length=1.0, colour="red")
    data, again, other = make(unique), make(unique), make(unique, seed=1)
    parts = [rows.tensors[0][:, 1] for rows in (data.train_rows, data.val_rows, data.test_rows)]
    assert [len(part) for part in parts] == [42, 9, 9]
    assert len(torch.cat(parts).unique()) == 60
    assert again.train_rows.tensors[0].equal(data.train_rows.tensors[0])
    assert not other.train_rows.tensors[0].equal(data.train_rows.tensors[0])
    assert torch.bincount(data.test_rows.tensors[1]).tolist() == [3, 2, 4]


@pytest.mark.parametrize("name", ["trees.csv.gz", "trees.parquet"])
def test_other_formats_give_the_same_rows(make, name):
    torch.testing.assert_close(make(name=name).train_rows.tensors, make().train_rows.tensors)


def test_parquet_categories_and_whole_number_classes(make, table):
    frame = table.assign(colour=table["colour"].astype("category"), kind=np.repeat([10, 9, 2], 20))
    data = make(frame, name="trees.parquet")
    assert data.class_names == ["2", "9", "10"]
    assert "colour=red" in data.feature_names


@pytest.mark.parametrize("name", ["trees.csv", "trees.parquet"])
def test_numbers_as_categories_keep_their_names_beside_missing_values(make, table, name):
    data = make(table.assign(width=pd.array([1, 2, None] * 20, dtype="Int64")), categorical=["width"], name=name)
    assert {name for name in data.feature_names if name.startswith("width")} == {
        "width=1",
        "width=2",
        "width=<missing>",
    }


def test_persons_that_no_training_row_has_are_told_to_be_grouped(make, table):
    persons = table.assign(person=[f"P{row // 2}" for row in range(60)])
    with pytest.warns(
        UserWarning, match=r"'person' of .* which no training row has: .* things of several rows .* as group"
    ):
        make(persons)


def test_rows_to_predict_need_no_target_and_may_hold_what_training_lacked(make, table, tmp_path):
    new = table.drop(columns=["kind", "key"]).head(3).assign(colour=["blue", "red", None], width=[1.0, np.nan, 3.0])
    new.to_csv(tmp_path / "new.csv", index=False)
    with (
        pytest.warns(UserWarning, match=r"'colour' of .*new.csv holds blue, which no training row has"),
        pytest.warns(UserWarning, match=r"'width' of .*new.csv lacks 1 of 3 values, and 42 of 42 .* median"),
    ):
        data = make(predict_path=tmp_path / "new.csv")
    ((batch,),) = data.predict_dataloader()
    assert batch.shape == (3, 7)
    assert batch[:, 4:].tolist() == [[0, 0, 0], [0, 0, 1], [1, 0, 0]]
    assert batch.isfinite().all()


def test_without_a_file_to_predict_the_test_rows_are(make):
    data = make()
    ((batch,),) = data.predict_dataloader()
    assert batch.equal(data.test_rows.tensors[0])


@pytest.mark.parametrize("name", ["trees.csv", "trees.parquet"])
@pytest.mark.parametrize("mark", [-999, -999.0])
def test_own_marks_of_missing_values(make, table, name, mark):
    data = make(table.assign(width=[mark, 4, 5] * 20), csv=CSVFormat(missing=["-999"]), name=name)
    assert "missingindicator_width" in data.feature_names
    rows = torch.cat([rows.tensors[0] for rows in (data.train_rows, data.val_rows, data.test_rows)])
    values = rows[:, 1].unique()  # the two numbers and their median, which took the place of -999
    assert len(values) <= 3
    assert values.abs().max() < 3


@pytest.mark.filterwarnings("ignore:column .* of .*new.csv holds")
def test_texts_stay_as_they_are_written_in_every_file(make, table, tmp_path):
    """What else a file holds must not change what a text is: 01234 alone would be read as a number."""
    codes = ["01234", "02345", "1.0"] * 20
    pd.DataFrame({"code": ["02345", "A1"], "grade": ["1", "x"]}).to_csv(tmp_path / "new.csv", index=False)
    frame = pd.DataFrame({"code": codes, "grade": ["A", "B"] * 30, "kind": ["01", "10", "2"] * 20})
    data = make(frame, categorical=["code"], exclude=[], predict_path=tmp_path / "new.csv")
    assert data.feature_names == ["code=01234", "code=02345", "code=1.0", "grade=A", "grade=B"]
    assert data.class_names == ["01", "2", "10"]
    assert data.predict_rows.tensors[0].tolist() == [[0, 1, 0, 0, 0], [0, 0, 0, 0, 0]]


def test_category_beside_a_column_of_its_name(make, table):
    """A table that holds a column and, beside it, what somebody has made of it."""
    data = make(table.assign(colour_red=1.0), exclude=["key", "wet"])
    assert data.feature_names[2:] == [
        "colour_red", "missingindicator_length", "colour=<missing>", "colour=green", "colour=red",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "columns",
    [
        {"colour=red": 1.0},
        {"missingindicator_length": 1.0},
        {"a": "b=c", "a=b": "c"},
    ],
)
def test_features_of_one_name_are_refused(make, table, columns):
    name = "a=b=c" if "a" in columns else next(iter(columns))
    with pytest.raises(ValueError, match=f"trees.csv gives two features the name {name!r}.*rename"):
        make(table.assign(**columns))


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_other_separators_are_found(make, table, tmp_path, separator):
    table.to_csv(tmp_path / "others.csv", sep=separator, index=False)
    data = make((tmp_path / "others.csv").read_text())
    assert data.train_rows.tensors[0].equal(make(table).train_rows.tensors[0])


def test_whole_numbers_of_many_rows_are_classes(make):
    assert make("kind,x\n" + "".join(f"{i},1\n" for i in range(21)) * 9, exclude=[]).num_classes == 21


def test_a_run_tells_how_columns_are_read(make, caplog):
    data = make()
    assert not caplog.text  # tune and others set data up again and again
    del data.train_rows
    data.trainer = object()
    with caplog.at_level("INFO"):
        data.setup()
    right = sum(label == 2 for _, label in data.val_rows) / 9
    assert caplog.messages == [
        f"{data.path}: target 'kind' of 3 classes, ash, elm, oak (always oak: accuracy {right:.3g} in validation); "
        "numbers: length, width, wet; categories: colour (3); left out: key; 42 rows train, 9 validate, 9 test"
    ]


def warnings_of(make, frame, **options):
    """Return the warnings of the set-up that reads ``frame``."""
    data = make(frame, **options)
    del data.train_rows
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data.setup("fit")  # by hand, as without a Trainer
    return [str(one.message) for one in caught]


@pytest.mark.slow
def test_columns_that_mean_something_else_are_told(make, table):
    assert warnings_of(make, table) == []
    odd = table.assign(
        nothing=np.nan, same="x", number=np.random.default_rng(0).permutation(60) + 7,
        code=table["width"].where(table.index % 20 > 0, -999), outlier=table["width"].where(table.index > 0, -998),
    )  # fmt: skip
    constant, number, code = warnings_of(make, odd)
    assert "hold one value in all training rows: nothing, same. Models" in constant
    assert "column 'number' of" in number
    assert "holds the numbers 7 to 66, each in one row" in number
    (sevenths,) = warnings_of(make, table.assign(number=7 * odd["number"] + 10000))
    assert "holds the numbers 10049 to 10462, each in one row" in sevenths
    assert "column 'code' of" in code
    assert "holds -999 in 3 of 60 rows, far from all" in code
    assert "csv.missing, as by --data.csv.missing=-999" in code
    assert warnings_of(make, odd[["number", "kind"]], exclude=[]) == []  # nothing else is left
    (once,) = warnings_of(make, table.assign(code=table["width"].abs().where(table.index > 0, -999)))
    assert "holds -999 in 1 of 60 rows" in once
    signed = table["width"].sub(table["width"].median()).where(table.index > 0, -999)
    assert "holds -999 in 1 of 60 rows" in warnings_of(make, table.assign(code=signed))[0]


def warnings_of_dates(make, table, **options):
    return [one for one in warnings_of(make, table, **options) if "texts that are dates" in one]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:column 'day' of .* no training row")
@pytest.mark.parametrize("form", ["%Y-%m-%d", "%d.%m.%Y %H:%M", "%m/%d/%Y", "%Y/%m/%d %H:%M", "%Y-%m-%dT%H:%M:%S.000Z"])
def test_repeated_dates_are_told(make, table, form):
    days = pd.Series(pd.date_range("2024-03-01", periods=25, freq="D").strftime(form))
    dated = table.assign(day=[days[row % 25] if row else None for row in range(60)])
    (told,) = warnings_of_dates(make, dated)
    assert "column 'day' of" in told
    assert f"dates, such as {days[1]!r}, of which" in told
    year_first = "" if form.startswith("%Y") else "write them as 2024-06-07, and "
    assert told.endswith(
        f"none; {year_first}list it under dates, to be read as days since 1970-01-01, or under exclude"
    )
    assert warnings_of_dates(make, dated, categorical=["day"]) == []  # as it was asked for


@pytest.mark.sampled(default=2)
@pytest.mark.filterwarnings("ignore:column 'code' of .* no training row")
@pytest.mark.parametrize("form", ["12-34-{:02}", "v1.{}.2", "2024-{}-40", "{}/2024", "2024-03-{:02}"])
def test_codes_versions_and_few_dates_are_no_dates(make, table, form):
    num_values = 19 if form.startswith("2024-03") else 25
    codes = [form.format(row % num_values + 1) for row in range(60)]
    assert warnings_of_dates(make, table.assign(code=codes)) == []


@pytest.mark.slow
def test_copies_of_training_rows_are_told_once_with_their_share(make, table):
    unique = table.assign(width=np.random.default_rng(0).normal(size=60).round(3))
    (copies,) = warnings_of(make, pd.concat([unique] * 3))
    assert "54 of the 54 rows of" in copies
    assert "that validate and test (100%) are copies of training rows" in copies
    assert warnings_of(make, pd.concat([unique, unique.head(4)])) == []
    with_keys = pd.concat([unique] * 3, ignore_index=True)
    with_keys["number"] = np.random.default_rng(1).permutation(9999)[: len(with_keys)]
    assert any("are copies of training rows" in one for one in warnings_of(make, with_keys))


@pytest.mark.slow
def test_equal_rows_of_few_values_are_no_copies(make, table):
    assert warnings_of(make, pd.concat([table[["wet", "colour", "kind"]]] * 9), exclude=[]) == []
    grid = pd.DataFrame({"x": np.arange(900) % 30, "y": np.arange(900) // 30 % 3}).assign(
        kind=lambda it: it.sum(axis=1) % 2
    )
    assert warnings_of(make, grid, exclude=[]) == []  # each number of x is in training rows of several y


def warnings_of_answers(make, table, **options):
    return [one for one in warnings_of(make, table, **options) if "tell the target" in one]


@pytest.mark.slow
@pytest.mark.parametrize(
    "copy", [{"oak": 3, "ash": 1, "elm": 2}, {"oak": "Quercus", "ash": "Fraxinus", "elm": "Ulmus"}]
)
def test_columns_that_tell_the_class_are_told(make, table, copy):
    (answers,) = warnings_of_answers(make, table.assign(copy=table["kind"].map(copy)))
    assert "with each value in rows of one class alone: copy. If" in answers
    assert "list it under exclude" in answers
    one_error = table["kind"].map(copy).where(table.index > 0, copy["elm"])
    assert warnings_of_answers(make, table.assign(copy=one_error), seed=1) == []
    assert warnings_of_answers(make, table[["kind"]].assign(copy=table["kind"].map(copy)), exclude=[]) == []


@pytest.mark.slow
def test_values_that_are_missing_but_for_one_class_tell_it(make, table):
    many = pd.concat([table] * 2, ignore_index=True)
    amount = pd.Series(np.random.default_rng(0).normal(size=120).round(3))
    is_oak = many["kind"] == "oak"
    for known in (is_oak, ~is_oak, is_oak & (many.index % 4 > 0)):  # not of all oaks
        (answers,) = warnings_of_answers(make, many.assign(refund=amount.where(known)))
        assert "class alone: refund. If" in answers
    assert warnings_of_answers(make, many.assign(refund=amount.where(many.index % 4 > 0))) == []
    few = amount.where(many.index == many.index[is_oak][0])
    assert warnings_of_answers(make, many.assign(refund=few)) == []  # one by chance


def test_codes_of_many_rows_each_and_thresholds_tell_the_class(make, table):
    """Breeds tell the species, unless this may be chance, and so do thresholds on a measure."""
    many = pd.concat([table] * 4, ignore_index=True)
    breed = many["kind"] + (many.index % 2).astype(str)
    (answers,) = warnings_of_answers(make, many.assign(breed=breed))
    assert ": breed. If" in answers
    assert len(warnings_of_answers(make, table.assign(breed=breed.head(60)))) == 1
    own = pd.DataFrame({"own": list(map(str, [*range(18), *"aabbcc"])), "x": 1.0})
    assert list(doubts_of_answers(own, np.arange(24) // 2 % 3, "own.csv", is_quantity=False)) == []
    measure = many["kind"].map({"oak": 9.0, "ash": 4, "elm": 1}) + np.arange(240) % 200 / 100
    assert len(warnings_of_answers(make, many.assign(measure=measure.where(many.index % 30 > 0)))) == 1
    (answers,) = warnings_of_answers(make, many.assign(measure=measure))
    assert ": measure. If" in answers
    on_both_sides = measure.where((many["kind"] != "oak") | (many.index % 2 > 0), -measure)
    assert len(warnings_of_answers(make, many.assign(measure=on_both_sides))) == 1
    on_both_sides[(many["kind"] == "ash") & (many.index % 2 > 0)] += 20
    assert warnings_of_answers(make, many.assign(measure=on_both_sides)) == []
    measure[many["kind"] == "elm"] = 5.0 + np.arange(48) % 20 / 10  # as some ashes
    assert warnings_of_answers(make, many.assign(measure=measure)) == []
    few = pd.DataFrame({"measure": np.arange(24.0), "x": 1.0})
    assert list(doubts_of_answers(few, (np.arange(24) > 22).astype(int), "few.csv", is_quantity=False)) == []


def test_columns_that_tell_the_quantity_are_told(make, table):
    noise = np.random.default_rng(0).normal(size=60)
    prices = table.assign(
        price=100 + noise, tax=7 - 0.2 * noise, weight=noise + 0.1 * noise[::-1], log=np.log(100 + 30 * noise)
    )
    options = {"target": "price", "target_kind": "regression", "exclude": ["key", "kind"]}
    (answers,) = warnings_of_answers(make, prices, **options)
    assert "with a correlation above 0.9999 with it, or of ranks: tax, log. If" in answers


def test_a_quantity_is_read_in_the_unit_of_the_file(make, table):
    prices = table.assign(price=np.arange(60) * 1000.5)
    data = make(prices, target="price", target_kind="regression", exclude=["key", "kind"])
    assert (data.num_targets, data.num_classes, data.class_names) == (1, None, None)
    targets = [rows.tensors[1] for rows in (data.train_rows, data.val_rows, data.test_rows)]
    assert sorted(torch.cat(targets).tolist()) == prices["price"].tolist()
    assert (targets[0].dtype, [len(part) for part in targets]) == (torch.float32, [42, 9, 9])
    assert data.target_mean == pytest.approx([targets[0].mean().item()])
    assert data.target_std == pytest.approx([targets[0].std(correction=0).item()])
    assert data.predict_columns["price"].tolist() == targets[2].tolist()
    other = make(
        prices.assign(price=prices["price"] + 1), target="price", target_kind="regression", exclude=["key", "kind"]
    )
    with pytest.raises(ValueError, match="digest of the data"):
        other.load_state_dict(data.state_dict())
    del data.train_rows
    data.trainer = object()
    data.setup()
    assert "a quantity of mean " in data._describe_target()


@pytest.mark.parametrize(
    ("values", "options", "said"),
    [
        ([*range(30), ""], {}, r"'y' of .* lacks 1 of 31 values, the first in row 30 \(from 0\)\. Remove those rows"),
        (["low", "high"] * 9, {}, r"got 'low' in row 0 .*leave target_kind='regression' out"),
        (['"1,5"', '"2,5"'] * 9, {}, r"got '1,5' in row 0 .*Set csv\.decimal"),
        ([*range(30), "inf"], {}, r"got 'inf' in row 30"),
        ([0.1] * 30, {}, r"one number only, 0\.1"),
        (range(30), {"csv": {"unlabeled": True}}, r"csv\.unlabeled is for classes"),
        (range(30), {"target_kind": "number"}, r"target_kind must be one of classification, regression; got 'number'"),
    ],
    ids=["missing", "texts", "comma", "infinite", "constant", "unlabeled", "kind"],
)
def test_bad_quantities_are_refused(make, values, options, said):
    content = "x,y\n" + "".join(f"{i % 7},{value}\n" for i, value in enumerate(values))
    with pytest.raises(ValueError, match=rf"(?s){said}"):
        make(content, **{"target": "y", "target_kind": "regression", "exclude": [], **options})


def test_rows_to_predict_keep_the_columns_that_are_no_features(make, table, tmp_path):
    table["key"] = [f"{i:03}" for i in range(60)]  # which are no numbers
    data = make(table)
    columns = data.predict_columns
    assert list(columns) == ["file_row", "kind", "key"]
    assert columns["key"].astype(int).tolist() == columns["file_row"].tolist()
    assert columns["kind"].tolist() == [data.class_names[i] for i in data.test_rows.tensors[1].tolist()]
    table.drop(columns="kind").tail(4).to_csv(tmp_path / "new.csv", index=False)
    assert make(table, predict_path=tmp_path / "new.csv").predict_columns.to_dict("list") == {
        "key": ["056", "057", "058", "059"]
    }


def test_decimal_comma(make):
    text = "kind;width\n" + "oak;1,5\nash;2,5\n" * 15
    data = make(text, csv=CSVFormat(separator=";", decimal=","), exclude=[])
    assert data.feature_names == ["width"]


def test_new_rows_with_a_decimal_comma_are_refused_with_the_option(make, tmp_path):
    (tmp_path / "new.csv").write_text("width;size\n3,5;1\n")
    with pytest.raises(
        ValueError, match=r"got '3,5' in row 0 \(from 0\)\. Set csv\.decimal, as by --data\.csv\.decimal"
    ):
        make("kind;width;size\n" + "oak;1.5;1\nash;2.5;2\n" * 15, exclude=[], predict_path=tmp_path / "new.csv")


def test_classes_that_differ_by_case_or_spaces_are_told(make):
    with pytest.warns(UserWarning, match=r"in spaces at their ends alone.* different: 'Oak', 'oak', 'oak '\. Write"):
        make("kind,width\n" + "oak,1.5\nash,2.5\noak ,1.4\nOak,2\n" * 10, exclude=[])


@pytest.mark.parametrize("mark", [".", ","])
def test_marks_that_may_be_of_thousands_are_told(make, mark):
    prices = [*(f'"{618 + i}{mark}{695 - 3 * i}"' for i in range(20)), "900"]
    lines = [f"{price},{size}" for size, price in enumerate(prices)]
    options = {"target": "price", "target_kind": "regression", "exclude": [], "csv": {"decimal": mark}}
    with pytest.warns(UserWarning, match=rf"'price' of .* holds '618\{mark}695' .* read as 618\.695, .* if 618695 is"):
        make("\n".join(["price,size", *lines]), **options)


def test_versions_and_codes_that_are_read_as_numbers_are_told(make):
    """And prices of two decimals each, or of one or two, are not, nor numbers with exponents as programs write them."""
    for versions, message in (
        (["3.8", "3.9", "3.10"], "holds '3.10', read as 3.1, beside numbers with one decimal. If they are versions"),
        (["3.80", "3.90", "3.10"], ""),
        (["3.8", "3.9", "3.10", "4.0"], "holds '3.10', read as 3.1, beside numbers with one decimal. If they are"),
        (["3.8", "3.9", "3.11"], ""),
        (["3.0", "3.9", "3.11"], ""),
        (["01067", "10115", "20095"], "holds '01067', read as 1067. If these are codes, as postal ones are"),
        (["417", "1E5", "2E3"], "holds '1E5', read as 100000. If these are codes"),
        (["1e+05", "2e+03", "417"], ""),
        (["1E5", "2.5E3", "417"], ""),
    ):
        rows = "".join(f"{kind},{version}\n" for version in versions for kind in ("oak", "ash") * 9)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make(f"kind,python\n{rows}", exclude=[])
        told = [str(one.message) for one in caught]
        assert [message in one for one in told] == [True] * bool(message)


@pytest.mark.parametrize("odd", ["0.618", "1.5", "1234", "1234.567"])
def test_marks_of_other_numbers_are_decimal(make, odd):
    make("kind,x\n" + "oak,1.234\nash,22.345\n" * 10 + f"oak,{odd}\nash,900\n", exclude=[])


@pytest.mark.parametrize("odd", ["12.000", "-3.250", "0", "-1", ""])
def test_three_decimals_in_all_numbers_are_decimal(make, odd):
    make("kind,x\n" + "oak,1.234\nash,22.345\n" * 10 + f"oak,{odd}\n", exclude=[])


def test_a_code_in_a_quantity_is_told(make, table):
    odd = table.assign(price=(table["width"] * 1.5).where(table.index % 20 > 0, -999))
    (code,) = warnings_of(make, odd, target="price", target_kind="regression", exclude=["key", "kind"])
    assert "column 'price' of" in code
    assert "holds -999 in 3 of 60 rows, far from all its other numbers" in code
    assert "remove those rows" in code


@pytest.mark.parametrize(
    ("widths", "told"),
    [
        ([None] * 6, r"is empty, and 42 of 42 training rows have one: the median"),
        ([1000.0, 20000, 30000, 40000, 80000, 9000], r"from 1000 to 80000, all outside .* rows, 1 to 8\d"),
        ([1000.0], r"from 1000 to 1000, all outside"),
    ],
)
def test_new_numbers_unlike_those_of_training_are_told(widths, told, make, table, tmp_path):
    table.head(len(widths)).assign(width=widths).to_csv(tmp_path / "new.csv", index=False)
    with pytest.warns(UserWarning, match=rf"'width' of .*new.csv .*{told}"):
        make(predict_path=tmp_path / "new.csv")


def test_all_columns_that_are_no_features_are_told_at_once(make, table):
    days = pd.date_range("2022-11-28", periods=60)
    odd = table.assign(signup=days.strftime("%Y-%m-%d"), paid=days.strftime("%d.%m.%Y"))
    with pytest.raises(ValueError, match=r"'key' of .*60 different texts") as raised:
        make(odd, exclude=["wet"])
    message = str(raised.value)
    assert "column 'signup' of" in message
    assert "holds dates, such as '2022-11-28'; list it under dates, to be read as days" in message
    assert "holds dates, such as '28.11.2022'; write them as 2024-06-07, and list it under dates" in message
    assert message.endswith("""To leave out all 4: --data.exclude '["wet", "key", "signup", "paid"]'""")


@pytest.mark.slow
def test_checkpoint_keeps_what_was_fitted(make, table):
    state = make().state_dict()
    make().load_state_dict(state)
    for other, said in (
        (make(table.assign(width=table["width"] + 1)), "means of the training rows"),
        (make(table[["width", "length", "wet", "colour", "kind", "key"]]), "columns"),
        (make(seed=1), "split"),
        (make(table.assign(kind=table["kind"].replace("elm", "fir"))), "classes"),
    ):
        with pytest.raises(ValueError, match=rf"trained on other data than .*: {said}"):
            other.load_state_dict(state)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:column 'colour' of .* holds blue")
def test_only_rows_of_the_test_split_may_change_after_a_checkpoint(make, table):
    table = table.assign(width=np.arange(60.0))
    data = make(table)
    _, val, test = row_numbers(data)
    values = {"length": 1.5, "width": 30.5, "wet": ~table["wet"], "colour": "blue"}

    def changed(rows, names):
        return make(table.assign(**{name: table[name].where(~table.index.isin(rows), values[name]) for name in names}))

    data.load_state_dict(changed(test, values).state_dict())
    for name in values:
        with pytest.raises(ValueError, match="digest of the data"):
            data.load_state_dict(changed(val[:1], [name]).state_dict())


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        ("", {}, r"trees.csv is empty; a header and rows were needed"),
        ("kind,width\n", {}, r"trees.csv has a header but no rows"),
        ("kind,width\noak,1\n", {"target": "kin"}, r"no column 'kin'; did you mean 'kind'\? Its columns: kind, width"),
        ("kind:width\noak:1\n", {}, r"one column only: .* csv\.separator"),
        (
            "kind,width\noak,1\n",
            {"exclude": ["kin"]},
            r"no column 'kin', which exclude names; did you mean 'kind'\? Its columns: kind, width$",
        ),
        (
            "kind,width\noak,1\n",
            {"exclude": "kind,width"},
            r"'kind,width', which exclude names; write several .* '\[kind, width\]'\.",
        ),
        (
            "kind,x\n" + "".join(f"{i / 8},1\n" for i in range(21)) * 3,
            {},
            r"21 different numbers, 0.0, 0.125, 0.25 and 18 more; .*target_kind='regression'.*MoERegressor",
        ),
        ("kind,x\n" + "".join(f"{i},1\n" for i in range(21)), {}, r"21 different.*--data.target_kind regression"),
        (
            "kind,width\n" + "oak,1\nash,2\n" * 9 + "oak,wide\n",
            {},
            r"'width' of .* holds 'wide' in row 18 \(from 0\) among numbers",
        ),
        (
            "kind,width\n" + "oak,1\nash,2\n" * 9 + "oak,inf\n",
            {},
            r"'width' of .* numbers of at most 1e\+30; got 'inf' in row 18 \(from 0\)",
        ),
        (
            "kind,width\n" + "oak,1\nash,2\n" * 9 + ",3\n",
            {},
            r"'kind' of .* lacks 1 of 19 values, the first in row 18 \(from 0\)",
        ),
        (
            "kind,price\n" + "oak,618.695 €\nash,1.067.910 €\n" * 9 + "oak,3\n",
            {},
            r"'618.695 €' in row 0 \(from 0\) and 17 more of 19 values among numbers\. Remove currency signs and marks",
        ),
        (
            "kind,price\n" + "oak,618.695 €\nash,1.067.910 €\n" * 9,
            {"target": "price", "target_kind": "regression"},
            r"got '618.695 €' in row 0 \(from 0\) and 17 more of 18 values\. Remove currency signs and marks of thous",
        ),
        (
            "kind;price\n" + "oak;618,695\nash;1,067,910\n" * 9,
            {"target": "price", "target_kind": "regression"},
            r"Remove currency signs and marks of thousands if 618695 is meant; set csv\.decimal, as by",
        ),
        ("kind,width\n" + "oak,1\n" * 9, {}, r"one class only, 'oak'"),
        ("kind,width\n" + "oak,1\nash,2\n" * 9 + "elm,3\n", {}, r"'elm' has 1 of the rows; each needs 3.* out$"),
        ("kind,width\n" + "3.0,1\n4.0,2\n" * 9 + "5.0,3\n", {}, r"each needs 3.*; .*--data.target_kind regression"),
        ("kind,width\n" + "oak,1\nash,2\n" * 3, {"test_share": 0.1}, r"too few rows to split as asked"),
        ("kind,x\n" + "oak,1\nash,2\n,3\n" * 3, {"csv": {"unlabeled": True}}, r"too few rows of known class to split"),
        (
            "kind,x\n" + "oak,1\nash,2\n" * 9 + "elm,3\n" + ",4\n" * 5,
            {"csv": {"unlabeled": True}},
            r"'elm' has 1 of the rows; each needs 3.* 5 rows without a class do not count",
        ),
        ("kind,x\n" + "oak,1\nash,2\n ,3\n" * 9, {}, r"a class without a name, ' '; .*under csv\.missing"),
        ("kind,x\n" + "oak,1\nash,2\n ,3\n" * 9, {"csv": {"unlabeled": True}}, r"a class without a name, ' '"),
        ("kind,x\n" + "oak,1\nash,2\nNone,3\n" * 9, {}, r"lacks 9 .*None, NA and the like .* another name"),
        ("kind,width\noak,1,2,3\noak,1\n", {}, r"cannot be read as csv"),
        ("kind,id\n" + "".join(f"oak,a{i}\nash,b{i}\n" for i in range(15)), {}, r"30 different texts in 30 rows"),
        (
            "kind,host\n" + "".join(f"oak,10.0.0.{i}\nash,10.0.1.{i}\n" for i in range(15)),
            {},
            r"'host' of .* holds 30 different texts",
        ),
        ("kind,x,x\noak,1,2\n", {}, r"two columns named 'x'"),
        (",kind,x\n0,oak,1\n" + "1,ash,2\n2,oak,2\n" * 9, {}, r"column without a name.*exclude as 'Unnamed: 0'"),
        ("kind\n" + "oak\nash\n" * 9, {}, r"no column left for features"),
        ("kind,x\n" + 'oak,"1,5"\nash,"2,5"\n' * 9, {}, r"holds '1,5' and the like.*set csv\.decimal.*of thousands"),
        (
            "kind,x\n" + "oak,1e300\nash,-1e300\n" * 9,
            {},
            r"numbers of at most 1e\+30; got '1e\+300' in row 0 \(from 0\)",
        ),
    ],
)
def test_bad_files_are_refused(make, content, options, said):
    with pytest.raises(ValueError, match=rf"(?s){said}"):
        make(content, **{"exclude": [], **options})


def test_dates_are_refused(make, table):
    for wet, said in (
        (pd.Timestamp("2026-01-01"), "holds dates; list it under dates, .* or under exclude"),
        (pd.Timedelta("1h"), "holds durations; write them as numbers"),
    ):
        with pytest.raises(ValueError, match=rf"column 'wet' of .* {said}"):
            make(table.assign(wet=wet), name="trees.parquet")


def days_since_1970(date):
    return (date - datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)) / datetime.timedelta(days=1)


@pytest.mark.parametrize("name", ["trees.csv", "trees.parquet"])
def test_dates_are_read_as_days(make, table, tmp_path, name):
    offset = datetime.timezone(datetime.timedelta(hours=-3))
    first = datetime.datetime(2023, 12, 1, 20, 30, 15, tzinfo=offset)
    dates = [first + i * datetime.timedelta(hours=23, seconds=7) for i in range(59)]
    days = [*map(days_since_1970, dates), np.nan]
    forms = (
        lambda date: str(date),
        lambda date: date.isoformat(timespec="milliseconds"),
        lambda date: f"{date.astimezone(datetime.timezone.utc):%Y/%m/%d %H:%M:%SZ}",
        lambda date: f"{date.astimezone(datetime.timezone.utc):%Y-%m-%d %H:%M:%S}",  # without an offset
    )
    texts = [*(forms[i % 4](date) for i, date in enumerate(dates)), "-"]
    written = table.assign(day=texts) if name.endswith("csv") else table.assign(day=pd.to_datetime([*dates, None]))
    new = table.head(2).assign(day=["2024-02-29", "1969-12-31T12:00"])
    new.to_csv(tmp_path / "new.csv", index=False)
    options = {"seed": 3, "csv": CSVFormat(missing="-"), "predict_path": tmp_path / "new.csv"}
    found = make(written, name, dates="day", **options)
    options["predict_path"] = tmp_path / "days.csv"
    new_days = [(datetime.date(2024, 2, 29) - datetime.date(1970, 1, 1)).days, -0.5]
    new.assign(day=new_days).to_csv(options["predict_path"])
    expected = make(table.assign(day=days), f"days.{name}", **options)
    assert found.feature_names == expected.feature_names
    assert "missingindicator_day" in found.feature_names
    for rows in ("train_rows", "val_rows", "test_rows", "predict_rows"):
        for one, other in zip(getattr(found, rows).tensors, getattr(expected, rows).tensors, strict=True):
            torch.testing.assert_close(one, other)
    column = [one["name"] for one in found.preprocessing().columns].index("day")
    encoded = found.preprocessing().inverse(found.predict_rows.tensors[0])[:, column]
    torch.testing.assert_close(encoded, torch.tensor(new_days).double(), atol=0.01, rtol=0)


@pytest.mark.parametrize(
    ("day", "said"),
    [
        ("3/1/2024", r"got '3/1/2024' in row 1 .* and 1 more of 60 values\. Its day or its month .* write ISO dates"),
        ("2024-02-30", r"got '2024-02-30' in row 1 .* list it under csv\.missing if there is no date"),
        ("20240603", r"got '20240603' in row 1 .* Leave a column of numbers out of dates"),
    ],
)
def test_texts_that_are_no_dates_are_refused(make, table, day, said):
    days = ["2024-06-07", day, day] + ["2024/06/07 12:30"] * 57
    with pytest.raises(ValueError, match=rf"column 'day' of .*trees.csv must hold dates .*{said}"):
        make(table.assign(day=days), dates=["day"])


def test_dates_name_columns_of_the_file_that_no_other_option_names(make):
    with pytest.raises(ValueError, match=r"no column 'lenght', which dates names; did you mean 'length'"):
        make(dates=["lenght"])
    for option, name in (("target", "kind"), ("categorical", "wet"), ("exclude", "wet"), ("group", "wet")):
        with pytest.raises(ValueError, match=rf"dates names '{name}', which {option} names, too"):
            make(**{"dates": name, option: name})


def test_lists_are_refused(make, table):
    with pytest.raises(ValueError, match=r"column 'wet' of .* holds lists"):
        make(table.assign(wet=[[1, 2]] * 60), name="trees.parquet")


def test_text_that_is_not_utf8_is_refused(make, tmp_path):
    (tmp_path / "trees.csv").write_bytes(b"kind,width\n\xe9,1\n")
    with pytest.raises(ValueError, match=r"cannot be read as csv: 'utf-8' codec"):
        TabularDataModule(tmp_path / "trees.csv", "kind").setup()


def test_missing_column_of_rows_to_predict(make, table, tmp_path):
    table.drop(columns="wet").to_csv(tmp_path / "new.csv")
    with pytest.raises(ValueError, match=r"new.csv has no column 'wet'"):
        make(predict_path=tmp_path / "new.csv")


def test_missing_file_names_the_nearest(table, tmp_path):
    table.to_csv(tmp_path / "trees.csv")
    with pytest.raises(FileNotFoundError, match=r"no file .*tree.csv; did you mean .*trees.csv\?"):
        TabularDataModule(tmp_path / "tree.csv", "kind")


def test_a_path_may_begin_in_the_home_folder(table, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    table.to_csv(tmp_path / "trees.csv")
    assert TabularDataModule("~/trees.csv", "kind").path == tmp_path / "trees.csv"


def test_other_formats_are_refused(tmp_path):
    (tmp_path / "trees.xlsx").touch()
    with pytest.raises(ValueError, match=r"need a .csv, .csv.gz or .parquet file; got .*trees.xlsx"):
        TabularDataModule(tmp_path / "trees.xlsx", "kind").setup()


@pytest.mark.parametrize("shares", [(0, 0.1), (0.5, 0.5)])
def test_shares_that_leave_nothing_are_refused(tmp_path, shares):
    with pytest.raises(ValueError, match=r"leave items to train on|val_share must be above 0"):
        TabularDataModule(tmp_path, "kind", val_share=shares[0], test_share=shares[1])


@pytest.mark.parametrize("target", ["kind", "width"])
def test_rows_of_a_group_stay_together(make, table, target):
    rng = np.random.default_rng(2)
    garden = rng.permutation(np.repeat(np.arange(20), [1, 5] * 10))
    kind = "classification" if target == "kind" else "regression"
    frame = table.assign(garden=garden, number=np.arange(60))
    data = make(frame, target=target, group="garden", target_kind=kind)
    assert "number" in data.feature_names
    assert "garden" not in data.feature_names
    parts = data.train_rows, data.val_rows, data.test_rows
    numbers = torch.cat([part.tensors[0][:, data.feature_names.index("number")] for part in parts])
    rows = np.split(numbers.argsort().argsort().numpy(), np.cumsum([len(part) for part in parts])[:-1])
    groups = [{*garden[part].tolist()} for part in rows]
    assert [len(group) for group in groups] == [14, 3, 3]
    assert len(set.union(*groups)) == 20
    assert list(data.predict_columns) == ["file_row", target, "key", "garden"]
    assert data.predict_columns["file_row"].tolist() == rows[2].tolist()


@pytest.mark.parametrize(
    ("garden", "options", "message"),
    [
        (["a", "b"] * 30, {}, "too few groups to split as asked"),
        ([None, *range(59)], {}, "column 'garden' of .* lacks 1 of 60 values, .*Name the group of each row"),
        (
            ["a", "b", "c"] * 16 + ["d"] * 12,
            {},
            "rows of .* with the classes elm are in groups of 'garden' that validate",
        ),
        (["a", "b"] * 30, {"group": "kind"}, "group='kind' is the target"),
        (["a", "b"] * 30, {"csv": CSVFormat(unlabeled=["x"])}, "no effect on rows of unknown class"),
        (["a", "b"] * 30, {"group": "gardens"}, "has no column 'gardens', which group names; did you mean 'garden'"),
    ],
)
def test_groups_that_cannot_split_are_refused(make, table, garden, options, message):
    with pytest.raises(ValueError, match=message):
        make(table.assign(garden=garden), **{"group": "garden", "seed": 2, **options})


@pytest.mark.slow
def test_rows_of_persons_are_told_unless_they_are_grouped(make, table):
    many = pd.concat([table] * 3, ignore_index=True)
    frame = many.assign(width=np.random.default_rng(3).normal(size=180))
    (told,) = warnings_of(make, frame)
    assert "no features, of which rows of equal values are of one class: key. If" in told
    assert warnings_of(make, frame.assign(key=frame["key"].where(frame.index % 9 > 0))) == [told]
    assert warnings_of(make, frame, group="key") == []
    with pytest.raises(ValueError, match=r"group must be the name of one column; got \['key'\]"):
        make(frame, group=["key"])
    assert warnings_of(make, frame.assign(key=np.random.default_rng(4).permutation(frame["key"]))) == []
    assert warnings_of(make, frame.assign(key=range(180))) == []


def test_numbers_that_begin_with_0_are_told(make, table):
    codes = pd.Series([f"{number * 317 % 9000 + 100:05}" for number in range(60)])
    with pytest.warns(UserWarning, match=r"column 'zip' of .* holds '00100', read as 100\. If these are codes"):
        make(table.assign(zip=codes))
    make(table.assign(month=[f"{row % 12 + 1:02}" for row in range(60)]))


def test_the_target_is_not_excluded_and_decimals_have_a_mark(make, table):
    with pytest.raises(ValueError, match="exclude names the target, 'kind'; leave it out there"):
        make(table, exclude=["kind"])
    with pytest.raises(ValueError, match=r"csv\.decimal must be one of \., ,; got ';'"):
        make(table, csv=CSVFormat(decimal=";"))


def test_classes_of_few_rows_are_told(make, table):
    (told,) = warnings_of(make, table.drop(range(48, 55)))
    assert "classes of fewer than 10 rows of" in told
    assert ": elm (5). The test has" in told


@pytest.mark.slow
def test_points_beside_decimal_commas_are_refused(make):
    rows = "".join(f"{at},5;1.{at + 100};{'oak' if at % 2 else 'ash'}\n{at},2;899;oak\n" for at in range(12))
    options = {"exclude": [], "csv": CSVFormat(decimal=",")}
    with pytest.raises(ValueError, match=r"'price' of .* holds '1\.100', with a point, where csv\.decimal is ','"):
        make(f"width;price;kind\n{rows}", **options)
    assert make(f"width;price;kind\n{rows.replace('1.', '1')}", **options).feature_names == ["width", "price"]
    excluded = make(f"width;price;kind\n{rows}", **{**options, "exclude": "price"})
    assert excluded.feature_names == ["width"]
    for texts in (("1.2.2024", "15.3.2024"), ("10.0.0.1", "10.0.0.2"), ("1.2.3", "1.10.0")):
        rows = "".join(f"{at},5;{texts[at % 2]};{'oak' if at % 3 else 'ash'}\n" for at in range(24))
        assert make(f"width;text;kind\n{rows}", **options).feature_names[1:] == [f"text={one}" for one in sorted(texts)]
