"""Tables in folders: encoded as scikit-learn encodes their training rows, split by blocks, read once."""

import datetime
import json
import warnings

import lightning as L
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lightning_accel.callbacks import PredictionWriter
from lightning_accel.data import CSVFormat, ShardOptions, TabularDataModule
from lightning_accel.data.tables import statistics
from lightning_accel.data.tables.encoding import make_encoder
from lightning_accel.models import MoEClassifier


@pytest.fixture(scope="module")
def flowers():
    rng = np.random.default_rng(0)
    rows = 400
    table = pd.DataFrame(
        {
            "length": rng.normal(1e6, 5, rows),
            "width": np.where(rng.random(rows) < 0.2, np.nan, rng.integers(0, 9, rows)),
            "colour": rng.choice(["red", "blue", None], rows),
            "zone": rng.integers(8, 11, rows),
            "wild": rng.random(rows) < 0.5,
            "constant": 0.1,
            "species": rng.choice(["iris", "rose", "tulip"], rows),
        }
    )
    table["half"] = pd.array(np.where(table["zone"] == 9, None, table["zone"]), "Int64")
    return pa.Table.from_pandas(table, preserve_index=False)


def folder_of(path, table, kind="parquet"):
    path.mkdir()
    for number in range(4):
        part = table.slice(100 * number, 100)
        if kind == "parquet":
            pq.write_table(part, path / f"{number}.parquet", row_group_size=9)
        else:
            (path / f"{number}.jsonl").write_text("\n".join(json.dumps(row) for row in part.to_pylist()))
    return path


def data_of(folder, **options):
    shards = ShardOptions(cache_dir=folder.parent / "cache")
    return TabularDataModule(
        folder, "species", **{"categorical": "zone", "batch_size": 16, "shards": shards, **options}
    )


def test_rows_are_encoded_as_scikit_learn_encodes_the_training_rows(tmp_path, flowers):
    data = data_of(folder_of(tmp_path / "rows", flowers))
    data.prepare_data()
    data.setup()
    names = ["length", "width", "wild", "constant", "half", "colour", "zone"]
    splits = {}
    for split, blocks in data._table.splits.items():
        found = pa.concat_tables([blocks.read(block, flowers.column_names) for block in range(len(blocks))]).to_pandas()
        found["colour"] = found["colour"].astype(object).where(found["colour"].notna(), "<missing>")
        splits[split] = found.assign(
            zone=found["zone"].astype(str).astype(object),
            half=found["half"].astype(float),
            wild=found["wild"].astype(float),
        )
    assert [len(found) for found in splits.values()] == [290, 63, 47]
    encoder = make_encoder({name: name not in ("colour", "zone") for name in names}).fit(splits["train"][names])
    assert data.feature_names[:5] == names[:5]
    assert data.feature_names[5:8] == ["missingindicator_width", "missingindicator_half", "colour=<missing>"]
    assert data.class_names == ["iris", "rose", "tulip"]
    for split, loader in (("test", data.test_dataloader()), ("val", data.val_dataloader())):
        features, classes = map(torch.cat, zip(*loader, strict=True))
        expected = torch.tensor(encoder.transform(splits[split][names]), dtype=torch.float32)
        torch.testing.assert_close(features, expected, rtol=1e-6, atol=2e-6)  # the length's mean is 2e5 deviations off
        assert [data.class_names[number] for number in classes] == splits[split]["species"].tolist()
    rows = torch.cat([batch[0] for batch in data.train_dataloader()])
    assert rows.shape == (288, data.num_features)  # 18 whole batches
    assert sum(len(batch[0]) for batch in data.predict_dataloader()) == 47
    columns = data.preprocessing().columns
    assert columns[-1] == {"name": "zone", "categories": ["10", "8", "9"]}


def test_lines_of_json_are_encoded_as_parquet_files(tmp_path, flowers):
    parquet = data_of(folder_of(tmp_path / "parquet", flowers.slice(0, 400)), val_share=0.25, test_share=0.25)
    lines = data_of(folder_of(tmp_path / "lines", flowers, "jsonl"), val_share=0.25, test_share=0.25)
    parquet.setup()
    lines.setup()
    assert lines.feature_names == parquet.feature_names
    assert lines._table.splits["train"].num_rows == 200


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_dates_are_read_as_days(tmp_path, flowers, kind):
    days = [None if row % 7 == 0 else 19000 + row + row % 4 / 4 for row in range(400)]
    first = datetime.datetime(1970, 1, 1)
    dates = [None if one is None else first + datetime.timedelta(one) for one in days]
    texts = [one and (f"{one}Z" if row % 2 else f"{one:%Y/%m/%d %H:%M}") for row, one in enumerate(dates)]
    written = pa.array(dates, pa.timestamp("ms")) if kind == "parquet" else pa.array(texts)
    shares = {"val_share": 0.25, "test_share": 0.25}
    found = data_of(folder_of(tmp_path / "dates", changed(flowers, day=written), kind), dates="day", **shares)
    expected = data_of(folder_of(tmp_path / "days", changed(flowers, day=pa.array(days)), kind), **shares)
    new = changed(flowers.slice(0, 5), day=pa.array([datetime.date(2024, 2, 29)] * 5))
    (tmp_path / "new").mkdir()
    pq.write_table(new, tmp_path / "new" / "0.parquet")
    found.predict_path = tmp_path / "new"
    found.setup()
    expected.setup()
    assert found.feature_names == expected.feature_names
    assert "missingindicator_day" in found.feature_names
    for one, other in zip(found.test_dataloader(), expected.test_dataloader(), strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(found.preprocessing().mean, expected.preprocessing().mean)
    (new_rows,) = next(iter(found.predict_dataloader()))
    column = [one["name"] for one in found.preprocessing().columns].index("day")
    assert found.preprocessing().inverse(new_rows)[:, column].round(decimals=2).tolist() == [19782] * 5
    if kind == "jsonl":
        with pytest.raises(ValueError, match=r"column 'day' of .* holds dates, such as .*; list it under dates"):
            data_of(tmp_path / "dates", **shares).setup()


def test_statistics_are_collected_once(tmp_path, flowers, monkeypatch):
    folder = folder_of(tmp_path / "rows", flowers)
    first = data_of(folder)
    first.setup()
    monkeypatch.setattr("lightning_accel.data.tables.sharded.table_statistics", lambda *_: pytest.fail("read again"))
    again = data_of(folder, batch_size=3)
    again.setup()
    assert again._table.encoder.mean.equal(first._table.encoder.mean)
    assert again.state_dict() == first.state_dict()


def test_medians_of_many_rows_are_those_of_a_sample(tmp_path, flowers, monkeypatch):
    monkeypatch.setattr(statistics, "_SAMPLE", 600)  # values, of 6 columns
    data = data_of(folder_of(tmp_path / "rows", flowers), categorical=[], exclude="colour")
    data.setup()
    length = np.array(flowers["length"])
    assert abs(data._table.encoder.median[0].item() - np.median(length)) < 5 * 3 / 100**0.5
    assert data._table.encoder.median[0].item() != np.median(length)


def doubts_told(folder, **options):
    data = TabularDataModule(folder, shards=ShardOptions(cache_dir=folder.parent / "cache"), **options)
    data.trainer = L.Trainer(logger=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data.prepare_data()
        data.setup()
    return [str(one.message).replace(str(folder), "ROWS") for one in caught]


def test_doubtful_columns_are_told_as_of_one_file_at_each_start(tmp_path):
    rng = np.random.default_rng(0)
    table = pa.table(
        {
            "key": rng.permutation(400),
            "weight": np.where(np.arange(400) % 9 == 0, -999, rng.normal(5, 1, 400)),
            "same": np.full(400, 3),
            "place": ["here"] * 400,
            "day": [f"2024-03-{1 + row % 25:02}" for row in range(400)],
            "month": [f"2024-03-{1 + row % 25:02}" for row in range(400)],
            "price": np.where(np.arange(400) % 11 == 0, -1e6, rng.normal(5, 1, 400)),
        }
    )
    folder = folder_of(tmp_path / "rows", table)
    options = {"target": "price", "target_kind": "regression", "categorical": "month"}
    told = [doubts_told(folder, **options) for _ in range(2)]  # the second reads what the first has kept
    assert told[0] == told[1]
    starts = [
        "column 'price' of ROWS holds -1e+06 in ",
        "columns of ROWS that are empty or hold one value in all training rows: same, place.",
        "column 'key' of ROWS holds the numbers 0 to 399, each in one row",
        "column 'weight' of ROWS holds -999 in ",
        "column 'day' of ROWS holds 25 texts that are dates",
    ]
    assert len(told[0]) == len(starts)
    assert all(one.startswith(start) for one, start in zip(told[0], starts, strict=True))


def test_copies_and_answers_are_told_as_of_one_file(tmp_path, monkeypatch):
    kinds = ["oak", "ash"] * 50
    part = pa.table({"width": np.random.default_rng(0).normal(size=100), "code": [kind[0] for kind in kinds]})
    folder = folder_of(tmp_path / "rows", pa.concat_tables([part.append_column("kind", [kinds])] * 4))
    few = part.append_column("kind", [["elm"] * 4 + kinds[4:]])
    rare = folder_of(tmp_path / "few", pa.concat_tables([few, *[part.append_column("kind", [kinds])] * 3]))
    assert any("classes of fewer than 10 rows of ROWS: elm (4)" in one for one in doubts_told(rare, target="kind"))
    copies, answers = doubts_told(folder, target="kind")
    assert "rows of ROWS that validate and test (100%) are copies of training rows" in copies
    assert "on their own, with each value in rows of one class alone: code. If" in answers
    monkeypatch.setattr(statistics, "_SAMPLE_OF_ROWS", 600)  # copies of rows that are not looked at are not seen
    data = TabularDataModule(folder, "kind", shards=ShardOptions(cache_dir=tmp_path / "other"))
    data.setup()
    assert data._table.doubts == [answers.replace("ROWS", str(folder))]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("{},466", r"holds '0,466' and the like, which are no numbers .* marks of thousands; otherwise"),
        ("k{}", r"holds 400 different texts in 400 rows; list it under exclude if it is a key"),
    ],
)
def test_texts_that_are_numbers_or_keys_are_refused_as_in_one_file(tmp_path, flowers, texts, message):
    folder = folder_of(tmp_path / "rows", changed(flowers, odd=pa.array([texts.format(row) for row in range(400)])))
    with pytest.raises(ValueError, match=message):
        data_of(folder).setup()
    data_of(folder, categorical=["odd", "zone"]).setup()


@pytest.mark.slow
def test_a_module_trains_and_a_checkpoint_of_another_split_is_refused(tmp_path, flowers):
    folder = folder_of(tmp_path / "rows", flowers)
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    data = data_of(folder, exclude="constant")
    data.setup()
    model = MoEClassifier(data.num_features, data.num_classes, experts={"hidden_dim": 4, "num_experts": 2})
    trainer.fit(model, data)
    [ckpt_path] = tmp_path.rglob("*.ckpt")
    trainer.callbacks.append(PredictionWriter("told.csv"))
    assert len(trainer.predict(model, data)) == 3
    told, held = pd.read_csv(next(tmp_path.rglob("told.csv"))), data._predicted
    wanted = [one for block in range(len(held)) for one in held.read(block, ["species"])["species"].to_pylist()]
    assert told["species"].tolist() == wanted
    assert list(told)[:3] == ["row", "species", "constant"]
    trainer.validate(model, data_of(folder, exclude="constant"), ckpt_path=ckpt_path, verbose=False)
    with pytest.raises(ValueError, match=r"the checkpoint was trained on other data than .*rows as configured: split"):
        trainer.validate(model, data_of(folder, exclude="constant", seed=1), ckpt_path=ckpt_path, verbose=False)


def test_other_files_are_predicted(tmp_path, flowers):
    folder = folder_of(tmp_path / "rows", flowers)
    (tmp_path / "new").mkdir()
    new = flowers.drop_columns("species").slice(0, 5).to_pandas()
    new.loc[0, "colour"] = "green"  # not among the training rows
    pq.write_table(pa.Table.from_pandas(new, preserve_index=False), tmp_path / "new" / "a.parquet")
    data = data_of(folder, predict_path=tmp_path / "new")
    data.setup()
    with pytest.warns(UserWarning, match=r"'colour' of rows beside the training rows of .* holds green"):
        [[features]] = data.predict_dataloader()
    assert features.shape == (5, data.num_features)
    assert data.predict_columns.shape == (5, 0)
    keyed = changed(flowers, key=pa.array([7, None, *range(398)]))
    keyed = data_of(folder_of(tmp_path / "keyed", keyed), exclude="key", predict_path=tmp_path / "keyed")
    keyed.setup()
    assert keyed.predict_columns["key"].tolist() == [7, None, *range(398)]
    assert keyed.predict_columns["species"].tolist() == flowers["species"].to_pylist()
    assert features[:, -6:].sum(dim=1).tolist() == [1, 2, 2, 2, 2]


def test_what_cannot_be_predicted_is_refused_before_training(tmp_path, flowers):
    folder = folder_of(tmp_path / "rows", flowers)
    keys = [f"row {at}" for at in range(400)]
    two = folder_of(tmp_path / "two", changed(flowers, key=pa.array(keys), name=pa.array(keys)))
    with pytest.raises(
        ValueError, match=r"(?s)'key' .*'name' .*To leave out all 2: --data.exclude '\[\"key\", \"name\"\]'"
    ):
        data_of(two).setup()
    with pytest.raises(FileNotFoundError, match=r"no folder, and no file, .*nowhere"):
        data_of(folder, predict_path=tmp_path / "nowhere").setup()
    new = folder_of(tmp_path / "new", changed(flowers, length=pa.array(["long"] * 400)))
    with pytest.raises(ValueError, match=r"column 'length' of .*new holds texts; the training rows have numbers there"):
        data_of(folder, predict_path=new).setup()


def test_quantities_are_no_classes(tmp_path, flowers):
    folder = folder_of(tmp_path / "rows", changed(flowers, species=pa.array(np.linspace(0, 1, 400))))
    with pytest.raises(ValueError, match=r"'species' of .* different numbers, 0.*target_kind='regression'"):
        data_of(folder).setup()


def test_quantities_of_a_folder(tmp_path, flowers):
    numbers = np.linspace(-3, 1000, 400)
    folder = folder_of(tmp_path / "rows", changed(flowers, species=pa.array(numbers)))
    data = data_of(folder, target_kind="regression")
    data.setup()
    blocks = data._table.splits["train"]
    of_training = np.concatenate([np.array(blocks.read(block, ["species"])["species"]) for block in range(len(blocks))])
    assert (data.num_targets, data.class_names) == (1, None)
    np.testing.assert_allclose(data.target_mean + data.target_std, [of_training.mean(), of_training.std()])
    found = torch.cat([targets for _, targets in data.test_dataloader()])
    assert found.dtype == torch.float32
    assert np.isin(found.numpy(), numbers.astype(np.float32)).all()
    assert len(found) == data._table.splits["test"].num_rows
    assert data_of(folder, target_kind="regression").setup() is None  # from the cache
    for name, column, said in (
        ("text", ["a", "b"] * 200, "holds texts"),
        ("same", [0.1] * 400, "one number only, 0.1"),
    ):
        wrong = folder_of(tmp_path / name, changed(flowers, species=pa.array(column)))
        with pytest.raises(ValueError, match=said):
            data_of(wrong, target_kind="regression").setup()


def test_whole_numbers_are_categories_without_a_point_where_some_are_missing(tmp_path, flowers):
    data = data_of(folder_of(tmp_path / "rows", flowers), categorical=["width"])
    data.setup()
    found = [name for name in data.feature_names if name.startswith("width=")]
    assert found == ["width=0", *(f"width={number}" for number in range(1, 9)), "width=<missing>"]


def test_the_index_of_pandas_is_no_feature(tmp_path, flowers):
    folder = folder_of(tmp_path / "rows", pa.Table.from_pandas(flowers.to_pandas().sample(frac=1).set_index("half")))
    data = data_of(folder)
    data.setup()
    assert "half" not in data.feature_names
    assert not any("index" in name for name in data.feature_names)


def changed(flowers, **columns):
    for name, values in columns.items():
        flowers = flowers.drop_columns([name] if name in flowers.column_names else []).append_column(name, [values])
    return flowers


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({}, {"target": "specie"}, r"no column 'specie'; did you mean 'species'\?"),
        ({}, {"exclude": ["lenght"]}, r"no column 'lenght', which exclude or group names; did you mean 'length'\?"),
        (
            {"length": [np.inf] * 400},
            {},
            r"column 'length' of .*0.parquet, row group 0 must hold numbers of at most 1e",
        ),
        (
            {"code": ["1", "2"] * 200},
            {},
            r"column 'code' of .* holds '1' and the like, numbers that are written as texts",
        ),
        ({"day": pa.array([0] * 400, pa.timestamp("s"))}, {}, "column 'day' of .* holds dates; list it under dates"),
        (
            {"species": pa.array([0] * 400, pa.date32())},
            {},
            "column 'species' of .* holds dates; write classes as texts",
        ),
        ({"day": pa.array([0] * 400, pa.duration("s"))}, {}, r"column 'day' of .* holds times \(duration\[s\]\)"),
        ({"day": ["2024-06-07", "1.6.2024"] * 200}, {"dates": "day"}, r"0.parquet, row group 0 must .* got '1.6.2024'"),
        ({}, {"dates": ["dya"]}, r"no column 'dya', which dates names"),
        ({"list": [[1]] * 400}, {}, r"column 'list' of .* holds lists or bytes \(list<.*>\)"),
        (
            {"species": [None] + ["a", "b", "c"] * 133},
            {},
            r"column 'species' .*0.parquet, row group 0 lacks 1 of 9 values",
        ),
        ({"species": [0.0, 1.0, np.nan, 1.0] * 100}, {}, r"column 'species' .* lacks 2 of 9 values"),
        ({"species": [[1]] * 400}, {}, r"column 'species' of .* holds lists or bytes"),
        ({"species": ["a"] * 400}, {}, r"holds one class only, a; two or more are needed"),
        ({"colour=red": [1.0] * 400}, {}, r"gives two features the name 'colour=red'"),
    ],
)
def test_tables_that_cannot_be_read_are_refused_before_training(tmp_path, flowers, columns, options, message):
    table = changed(flowers, **{name: pa.array(values) for name, values in columns.items()})
    folder = folder_of(tmp_path / "rows", table)
    target = options.pop("target", "species")
    data = TabularDataModule(folder, target, shards=ShardOptions(cache_dir=tmp_path / "cache"), **options)
    with pytest.raises(ValueError, match=message):
        data.setup()


@pytest.mark.slow
def test_keys_are_refused_and_classes_that_do_not_train(tmp_path, flowers, monkeypatch):
    monkeypatch.setattr(statistics, "_MOST_TEXTS", 50)
    folder = folder_of(tmp_path / "keys", changed(flowers, key=pa.array([f"k{row}" for row in range(400)])))
    with pytest.raises(
        ValueError, match=r"column 'key' of .* holds more than 50 different texts; list it under exclude if it is a"
    ):
        data_of(folder).setup()
    data_of(folder, exclude="key").setup()
    data_of(folder, categorical=["key"]).setup()
    data = data_of(folder, exclude="key")
    data.setup()
    [name] = {data._table.splits["val"].name_of(0)}
    number = int(name.split("/")[-1].split(".")[0]) * 100 + int(name.split()[-1]) * 9
    species = flowers["species"].to_pylist()
    species[number] = "rare"
    folder = folder_of(tmp_path / "rare", changed(flowers, species=pa.array(species)))
    with pytest.raises(
        ValueError, match=r"holds rare in rows that validate or test alone; each class must be in rows that"
    ):
        data_of(folder).setup()


@pytest.mark.parametrize("options", [{"csv": CSVFormat(separator=";")}, {"csv": CSVFormat(missing="-")}], ids=str)
def test_options_without_effect_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match="on which csv has no effect; leave it out"):
        TabularDataModule(tmp_path, "y", **options)


def test_files_that_say_what_they_are_for_are_checked_for_groups(tmp_path, flowers):
    keyed = flowers.append_column("patient", pa.array(np.repeat(np.arange(100), 4)))
    folder = folder_of(tmp_path / "rows", keyed)
    with pytest.raises(ValueError, match=r"a folder .*not split by group='patient'.* folders train, val and"):
        data_of(folder, group="patient").setup()
    for name, number in (("train", 0), ("train", 1), ("val", 2), ("test", 3)):
        (folder / name).mkdir(exist_ok=True)
        (folder / f"{number}.parquet").rename(folder / name / f"{number}.parquet")
    data = data_of(folder, group="patient")
    data.setup()
    assert "patient" not in data.feature_names
    assert data.predict_columns["patient"].tolist() == np.repeat(np.arange(75, 100), 4).tolist()
    lacking = keyed.slice(200, 100).set_column(
        keyed.num_columns - 1, "patient", pa.array([None, *[60] * 99], pa.int64())
    )
    pq.write_table(lacking, folder / "val" / "2.parquet", row_group_size=9)
    with pytest.raises(ValueError, match=r"column 'patient' of .* lacks values for val: name the group of each row"):
        data_of(folder, group="patient").setup()
    pq.write_table(keyed.slice(150, 60), folder / "val" / "2.parquet", row_group_size=9)
    with pytest.raises(ValueError, match=r"for train and val share values of group='patient': 37, .* 41 and 8 more"):
        data_of(folder, group="patient").setup()
