"""Sequences in folders, a row each: the same numbers as in the files, similar lengths, every row once."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lightning_accel.data import SequenceDataModule, SequenceLayout, ShardOptions
from lightning_accel.data.samplers import ResumableLoader


def rows_of(count=420, kind="values"):
    rng = np.random.default_rng(0)
    rows = []
    for number in range(count):
        length = int(rng.integers(0 if number % 50 == 7 else 1, 40))
        sequence = {
            "values": [[float(number), step / 2] for step in range(length)],
            "tokens": rng.integers(0, 30, length).tolist(),
            "text": "ä" * (length // 2) + "b" * (length % 2),
            "flat": [number + step / 2 for step in range(length)],
        }
        rows.append(
            {"id": f"s{number}", ("values" if kind == "flat" else kind): sequence[kind], "target": "ab"[number % 2]}
        )
    return rows


def folder_of(path, rows, files=4, group=10, lines=False):
    path.mkdir(parents=True)
    size = -(-len(rows) // files)
    for number in range(files):
        part = rows[size * number : size * (number + 1)]
        if lines:
            (path / f"{number}.jsonl").write_text("\n".join(map(json.dumps, part)))
        else:
            pq.write_table(pa.Table.from_pylist(part), path / f"{number}.parquet", row_group_size=group)
    return path


def data_of(folder, layout=None, **options):
    layout = replace(layout or SequenceLayout(), shards=ShardOptions(cache_dir=folder.parent / "cache"))
    data = SequenceDataModule(folder, layout=layout, **{"global_batch_size": 12, **options})
    data.prepare_data()
    data.setup()
    return data


def test_batches_hold_the_sequences_of_the_files(tmp_path):
    rows = rows_of()
    data = data_of(folder_of(tmp_path / "rows", rows))
    train = data._sequences.splits["train"]
    ids = [row for block in range(len(train)) for row in train.read(block, ["id"])["id"].to_pylist()]
    steps = np.array([step for row in rows if row["id"] in {*ids} for step in row["values"]])
    np.testing.assert_allclose(data.feature_mean, steps.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(data.feature_std, steps.std(axis=0), rtol=1e-12)
    assert (data.num_features, data.feature_names) == (2, ["values_0", "values_1"])
    assert (data.class_names, data.num_classes, data.vocab_size) == (["a", "b"], 2, None)
    found = {}
    for batch in data.train_dataloader():
        assert batch.x.shape == (12, max(1, int(batch.lengths.max())), 2)
        for x, length, target in zip(batch.x, batch.lengths.tolist(), batch.target.tolist(), strict=True):
            values = x.double() * torch.tensor(data.feature_std) + torch.tensor(data.feature_mean)
            assert not x[length:].any()
            if length:
                number = round(values[0, 0].item())
                found[number] = length
                assert data.class_names[target] == rows[number]["target"]
                torch.testing.assert_close(
                    values[:length, 1], torch.arange(length) / 2.0, atol=1e-4, rtol=0, check_dtype=False
                )
    assert len(found) > 280
    assert all(len(rows[number]["values"]) == length for number, length in found.items())


@pytest.mark.sampled(default=3)
@pytest.mark.filterwarnings("ignore:column 'values_0' of .* all outside those of the training rows")
@pytest.mark.parametrize("lines", [False, True], ids=["parquet", "lines"])
@pytest.mark.parametrize("kind", ["values", "tokens", "text", "flat"])
def test_rows_to_predict_come_in_order_as_one_file_gives_them(tmp_path, kind, lines):
    rows = rows_of(kind=kind)
    names = ("train", "val", "test")
    for part, name in enumerate(names):
        folder_of(tmp_path / "rows" / name, rows[140 * part : 140 * (part + 1)], lines=lines)
    data = data_of(tmp_path / "rows")
    assert data.predict_ids == [f"s{number}" for number in range(280, 420)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows[:140])))
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, rows[280:])))
    whole = SequenceDataModule(
        tmp_path / "train.jsonl", val_share=0.01, test_share=0.01, predict_path=tmp_path / "test.jsonl"
    )
    whole.setup()
    assert data.vocab_size in (None, 256, 30)
    for batch, expected in zip(data.predict_dataloader(), _batched(whole.predict_rows, 12), strict=True):
        assert batch.target is None
        assert batch.lengths.tolist() == expected.lengths.tolist()
        if data.vocab_size is None:
            scaled = _unscaled(batch, data), _unscaled(expected, whole)
            torch.testing.assert_close(*scaled, rtol=1e-6, atol=1e-3)
        else:
            assert batch.x.equal(expected.x)
            assert batch.x.dtype == torch.int64


def _batched(rows, size):
    return [rows[[*range(start, min(start + size, len(rows)))]] for start in range(0, len(rows), size)]


def _unscaled(batch, data):
    inside = torch.arange(batch.x.shape[1]) < batch.lengths[:, None]
    values = batch.x.double() * torch.tensor(data.feature_std) + torch.tensor(data.feature_mean)
    return values * inside[:, :, None]


@pytest.mark.parametrize(
    ("kind", "targets", "expected"),
    [
        ("regression", [1.5, 2.5], ([[1.5], [2.5]], 1)),
        ("regression", [[1.0, 2.0], [3.0, 4.0]], ([[1.0, 2.0], [3.0, 4.0]], 2)),
        ("labelling", [["a", "b"], ["b", None]], ([0, 1], [1, -100])),
        ("forecasting", [None, None], None),
    ],
)
def test_targets_of_each_kind(tmp_path, kind, targets, expected):
    rows = [{"values": [1.0, 2.0], "target": targets[number % 2]} for number in range(80)]
    layout = SequenceLayout(target_kind=kind)
    data = data_of(folder_of(tmp_path / "rows", rows, group=2), layout=layout)
    batch = next(iter(data.train_dataloader()))
    match kind:
        case "regression":
            found = batch.target.view(12, -1).unique(dim=0).tolist()
            assert found == expected[0]
            assert data.num_targets == expected[1]
            blocks = data._sequences.splits["train"]
            numbers = np.array(
                [one for n in range(len(blocks)) for one in blocks.read(n, ["target"])["target"].to_pylist()]
            )
            np.testing.assert_allclose(data.target_mean, numbers.reshape(-1, expected[1]).mean(axis=0))
            np.testing.assert_allclose(data.target_std, numbers.reshape(-1, expected[1]).std(axis=0))
        case "labelling":
            assert batch.target.unique(dim=0).tolist() == [*expected]
            assert data.class_names == ["a", "b"]
        case "forecasting":
            assert batch.target is None


def lengths_of(data, replicas, rank, epoch=0, state=None, steps=None):
    loader = data.train_dataloader()
    assert isinstance(loader, ResumableLoader)
    loader.sampler.batch_size = 12 // replicas
    loader.sampler.deal_to(replicas, rank)
    loader.sampler.set_epoch(epoch)
    if state is not None:
        loader.load_state_dict(state)
    found = []
    for batch in loader:
        first = batch.x[:, 0, 0].double() * data.feature_std[0] + data.feature_mean[0]
        found.append(
            [(round(number), length) for number, length in zip(first.tolist(), batch.lengths.tolist(), strict=True)]
        )
        if len(found) == steps:
            break
    loader.dataset.close()
    return found, loader.state_dict()


@pytest.mark.slow
def test_sorted_steps_are_the_same_on_any_number_of_processes_and_resume(tmp_path):
    data = data_of(folder_of(tmp_path / "rows", rows_of(900)))
    whole, _ = lengths_of(data, 1, 0, epoch=1)
    numbers = [row for batch in whole for row in batch if row[1]]
    assert len(numbers) == len({*numbers})
    for replicas in (2, 3):
        parts = [lengths_of(data, replicas, rank, epoch=1)[0] for rank in range(replicas)]
        assert [sorted(row for part in step for row in part) for step in zip(*parts, strict=True)] == [
            *map(sorted, whole)
        ]
    _, state = lengths_of(data, 2, 0, epoch=1, steps=17)
    rest, _ = lengths_of(data, 1, 0, epoch=1, state=state)
    assert rest == whole[17:]


@pytest.mark.slow
def test_the_sequences_that_are_dropped_are_not_the_longest(tmp_path):
    """Eleven of them are dropped in each epoch, others in each; lengths are uniform up to 39."""
    data = data_of(folder_of(tmp_path / "rows", rows_of(410)))
    train = data._sequences.splits["train"].num_rows
    assert train % 12 == 11
    blocks = data._sequences.splits["train"]
    values = [row for block in range(len(blocks)) for row in blocks.read(block, ["values"])["values"].to_pylist()]
    lengths = {round(row[0][0]): len(row) for row in values if row}
    dropped = []
    for epoch in range(8):
        taken = {number for batch in lengths_of(data, 1, 0, epoch=epoch)[0] for number, length in batch if length}
        dropped += [length for number, length in lengths.items() if number not in taken]
    assert len(dropped) > 70
    assert 16 < np.mean(dropped) < 24


def test_another_batch_size_is_refused_on_resuming(tmp_path):
    folder = folder_of(tmp_path / "rows", rows_of())
    _, state = lengths_of(data_of(folder), 1, 0, steps=2)
    with pytest.raises(ValueError, match=r"in another order: digest .* global_batch_size of sequences"):
        data_of(folder, global_batch_size=24).train_dataloader().load_state_dict(state)


@pytest.mark.parametrize("kind", ["values", "tokens", "text"])
def test_batches_of_empty_sequences_are_taken(tmp_path, kind):
    rows = [{kind: "" if kind == "text" else [], "target": number % 2} for number in range(200)]
    for row in rows[::7]:
        row[kind] = {"values": [1.0, 2.0], "tokens": [1, 2], "text": "ab"}[kind]
    data = data_of(folder_of(tmp_path / "rows", rows))
    batches = [*data.train_dataloader()]
    assert min(int(batch.lengths.max()) for batch in batches) == 0
    assert all(batch.x.shape[1] == max(1, int(batch.lengths.max())) for batch in batches)


@pytest.mark.slow
def test_sorting_saves_padding(tmp_path):
    """Half of the steps of batches in random order are padding, an eighth of those of sorted ones."""
    rows = [
        {"values": [0.0] * int(length), "target": "ab"[length % 2]}
        for length in np.random.default_rng(0).integers(1, 60, 6000)
    ]
    data = data_of(folder_of(tmp_path / "rows", rows, group=100))
    padding = []
    for sort in (True, False):
        loader = data.train_dataloader()
        if not sort:
            loader.dataset.options = data._sequences.reading(12, in_order=True)
        batches = [*loader]
        padding.append(
            1 - sum(int(b.lengths.sum()) for b in batches) / sum(b.x.shape[0] * b.x.shape[1] for b in batches)
        )
    assert padding[0] < 0.13 < 0.4 < padding[1]


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (
            {"series": [1.0]},
            {},
            "has no column values, tokens, input_ids, text, whose rows are sequences; name it in layout",
        ),
        ({"values": [1.0]}, {"layout": SequenceLayout(target="class")}, "has no column 'class'"),
        ({"values": [float("nan")]}, {}, "column 'values' of .* must hold numbers of at most 1e"),
        ({"values": None}, {}, "column 'values' of .*row group 0 .* 10 of 10"),
        ({"values": "text"}, {}, None),
        ({"values": 1.5}, {}, r"column 'values' of .* must hold lists; got double"),
        ({"values": [[1.0, 2.0], [3.0]]}, {}, "must have equally many values; some have 1, others 2"),
        ({"tokens": [-1]}, {}, "column 'tokens' of .* must hold lists of whole numbers from 0"),
        ({"tokens": [0.5]}, {}, "column 'tokens' of .* must hold lists of whole numbers from 0"),
        ({"values": []}, {}, "all sequences of .* that train are empty; others are needed"),
        ({"values": [1.0], "target": None}, {}, "column 'target' of .* lacks 10 classes"),
        ({"values": [1.0], "target": "a"}, {}, "holds one class only, a; two or more are needed"),
        (
            {"values": [1.0]},
            {"layout": SequenceLayout(target_kind="labelling")},
            "column 'target' of .* must hold a list of classes; got string",
        ),
        (
            {"values": [1.0], "target": ["a", "b"]},
            {"layout": SequenceLayout(target_kind="labelling")},
            "row 1; got 2|a class for each",
        ),
    ],
)
def test_files_that_cannot_be_read_are_refused_before_training(tmp_path, row, options, message):
    rows = [{"target": "ab"[number % 2], **row} for number in range(200)]
    folder = folder_of(tmp_path / "rows", rows)
    if message is None:
        assert data_of(folder, **options).vocab_size == 256
        return
    with pytest.raises(ValueError, match=message):
        data_of(folder, **options)


@pytest.mark.parametrize("options", [{"chunk_steps": 5}, {"max_tokens": 9}], ids=str)
def test_options_without_effect_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match="on which chunk_steps and max_tokens have no effect"):
        SequenceDataModule(tmp_path, **options)
