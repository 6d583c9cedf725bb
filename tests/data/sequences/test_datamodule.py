import json
import re
import warnings
from types import SimpleNamespace

import lightning as L
import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LightningCLI

from lightning_accel import DigitsDataModule, PredictionWriter, SequenceDataModule
from lightning_accel.data import GeneratedSequences, SequenceLayout
from lightning_accel.data.sequences.batch import IGNORED, collate_sequences
from lightning_accel.data.sequences.dataset import SequenceDataset
from lightning_accel.data.sequences.length_sampler import Chunk, LengthBatchSampler
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.* sequences of .* have no steps:UserWarning")


def lines_of_values(number=60):
    """Sequences of 0 to 5 steps of two features, each step with a number of its own; three classes."""
    rng = np.random.default_rng(0)
    kinds = ["walk"] * (number // 2) + ["run"] * (number // 3) + ["rest"] * (number - number // 2 - number // 3)
    lengths = rng.permutation(np.arange(number) % 6)
    return [
        {
            "id": f"s{i}",
            "values": [[100 * (7 * i % number) + step, float(rng.normal())] for step in range(lengths[i])],
            "target": kinds[i],
        }
        for i in range(number)
    ]


@pytest.fixture
def make(tmp_path):
    def make(lines=None, name="walks.jsonl", **options):
        path = tmp_path / name
        if isinstance(lines, pd.DataFrame):
            lines.to_csv(path, index=False)
        else:
            found = lines_of_values() if lines is None else lines
            path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in found))
        data = SequenceDataModule(path, **options)
        data.setup()
        return data

    return make


def rows_of(data):
    return data.train_rows, data.val_rows, data.test_rows


@pytest.mark.parametrize("features", [None, 1, 3])
@pytest.mark.parametrize("target", ["none", "class", "values", "labels"])
def test_gathered_batches_equal_padded_ones(features, target):
    lengths = torch.tensor([3, 0, 5, 1, 4, 5])
    items = [torch.randn(n, features) if features else torch.randint(1, 9, (n,)) for n in lengths]
    targets = {
        "none": [None] * 6,
        "class": list(torch.arange(6)),
        "values": list(torch.randn(6, 2)),
        "labels": [torch.randint(3, (int(n),)) for n in lengths],
    }[target]
    whole = torch.cat(items) if features else torch.cat(items).to(torch.uint8)
    rows = SequenceDataset(
        whole,
        lengths,
        torch.stack(targets) if target in ("class", "values") else None,
        torch.cat(targets).to(torch.int16) if target == "labels" else None,
    )
    for chosen in ([0, 1, 2, 3, 4, 5], [4, 1], [2, 2, 5], [3]):
        expected = collate_sequences([(items[i], targets[i]) for i in chosen])
        for found in (rows[chosen], rows.select(chosen)[list(range(len(chosen)))]):
            assert found.lengths.equal(expected.lengths)
            assert found.x.equal(expected.x)
            assert found.x.dtype == expected.x.dtype
            assert found.carried is None
            assert (found.target is None) == (expected.target is None)
            assert found.target is None or found.target.equal(expected.target)
    assert rows.without_targets()[[0, 1]].target is None
    assert rows[[1]].lengths.tolist() == [0]


@pytest.mark.parametrize("target", ["class", "value", "labels"])
def test_chunks_are_the_steps_of_the_whole(target):
    lengths = torch.tensor([9, 7, 4, 0])
    rows = SequenceDataset(
        torch.randn(20, 2),
        lengths,
        {"class": torch.arange(4), "value": torch.arange(4.0)}.get(target),
        torch.arange(20) if target == "labels" else None,
    )
    whole = rows[[0, 1, 2, 3]]
    for start in (0, 4, 8):
        alive = max(1, int((lengths > start).sum())) if start else 4
        found = rows[Chunk(list(range(alive)), start, start + 4, list(range(alive)))]
        assert found.x.equal(whole.x[:alive, start : start + 4])
        assert found.lengths.tolist() == [min(4, max(0, n - start)) for n in lengths.tolist()[:alive]]
        assert found.carried.tolist() == list(range(alive))
        if target == "labels":
            assert found.target.equal(whole.target[:alive, start : start + 4])
        else:
            known = (found.target.isfinite() & (found.target != IGNORED)).tolist()
            assert known == [n <= start + 4 for n in lengths.tolist()[:alive]]
            assert found.target[known].equal(torch.arange(alive).to(found.target)[known])


def test_every_sequence_is_in_one_split_and_classes_keep_their_share(make):
    data, again, other = make(val_share=0.2), make(val_share=0.2), make(val_share=0.2, seed=1)
    numbers = [rows.starts.tolist() for rows in rows_of(data)]
    lengths = torch.cat([rows.lengths for rows in rows_of(data)])
    assert [len(part) for part in numbers] == [36, 12, 12]
    assert lengths.sort().values.tolist() == sorted(len(line["values"]) for line in lines_of_values())
    assert data.class_names == ["rest", "run", "walk"]
    assert torch.bincount(data.train_rows.target).tolist() == [6, 12, 18]
    assert torch.bincount(data.test_rows.target).tolist() == [2, 4, 6]
    steps = [set(starts(rows)) for rows in rows_of(data)]
    assert sum(map(len, steps)) == len(set.union(*steps)) == int(lengths.sum())
    for rows, same in zip(rows_of(data), rows_of(again), strict=True):
        assert rows.starts.equal(same.starts)
    assert not data.train_rows.starts.equal(other.train_rows.starts)
    assert data.val_rows.lengths.diff().min() >= 0


def starts(rows):
    return [
        start + step for start, n in zip(rows.starts.tolist(), rows.lengths.tolist(), strict=True) for step in range(n)
    ]


@pytest.mark.filterwarnings("ignore:column 'values_0' of .* holds 1e")
def test_values_are_normalised_by_the_training_steps_alone(make):
    lines = lines_of_values()
    data = make(lines)
    raw = {tuple(step) for line in lines for step in line["values"]}
    train = data.train_rows.steps[starts(data.train_rows)].double()
    torch.testing.assert_close(train.mean(dim=0), torch.zeros(2).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(train.std(dim=0, correction=0), torch.ones(2).double(), atol=1e-6, rtol=0)
    mean, std = torch.tensor(data.feature_mean), torch.tensor(data.feature_std)
    found = data.train_rows.steps * std + mean
    torch.testing.assert_close(
        found[:, 0].sort().values.double(), torch.tensor(sorted(r[0] for r in raw)).double(), atol=1e-2, rtol=0
    )
    changes = set()
    for i in range(0, 60, 4):
        if not lines[i]["values"]:
            continue
        changed = [dict(line) for line in lines]
        changed[i]["values"] = [[1e6, step[1]] for step in lines[i]["values"]]
        after = make(changed)
        in_train = i in [
            sequence_of(lines, start) for start in data.train_rows.starts[data.train_rows.lengths > 0].tolist()
        ]
        assert (after.feature_mean == data.feature_mean) != in_train
        changes.add(in_train)
    assert changes == {True, False}


def sequence_of(lines, start):
    lengths = [len(line["values"]) for line in lines]
    return int(np.searchsorted(np.cumsum(lengths), start, side="right"))


def test_constant_targets_have_a_unit(make):
    lines = [{"values": [i, 1], "target": [i / 7, 5.0]} for i in range(20)]
    data = make(lines, layout=SequenceLayout("regression"))
    assert data.target_mean[1] == 5
    assert data.target_std[1] == 1
    assert data.target_std[0] > 0


def test_constant_features_become_zero(make):
    data = make([{**line, "values": [[7, step[1]] for step in line["values"]]} for line in lines_of_values()])
    assert data.train_rows.steps[:, 0].abs().max() == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("classification", 2, None, 3, None, ["rest", "run", "walk"])),
        ({"target_kind": "forecasting"}, ("forecasting", 2, None, None, None, None)),
        ({"target_kind": "labelling", "target": "labels"}, ("labelling", 2, None, 2, None, ["0", "1"])),
        ({"target_kind": "regression", "target": "size"}, ("regression", 2, None, None, 1, None)),
        ({"target_kind": "regression", "target": "sizes"}, ("regression", 2, None, None, 2, None)),
        ({"values": "tokens"}, ("classification", None, 31, 3, None, ["rest", "run", "walk"])),
        ({"values": ["text"]}, ("classification", None, 256, 3, None, ["rest", "run", "walk"])),
    ],
    ids=["classes", "forecasting", "labels", "size", "sizes", "tokens", "text"],
)
def test_what_a_model_is_told(make, options, expected):
    lines = [
        line
        | {
            "labels": [None if step == 3 else step % 2 for step in range(len(line["values"]))],
            "size": float(i),
            "sizes": [i, 2 * i],
            "tokens": [i % 31] * (i % 4),
            "text": "ab" * (i % 4),
        }
        for i, line in enumerate(lines_of_values())
    ]
    data = make(lines, layout=SequenceLayout(**options))
    names = ("target_kind", "num_features", "vocab_size", "num_classes", "num_targets", "class_names")
    assert tuple(getattr(data, name) for name in names) == expected
    batch = next(iter(data.train_dataloader()))
    kind = expected[0]
    assert batch.x.dtype == (torch.float32 if data.num_features else torch.int64)
    if kind == "forecasting":
        assert batch.target is None
    elif kind == "labelling":
        shown = torch.arange(batch.x.shape[1]).expand(batch.x.shape[:2])
        hidden = (shown >= batch.lengths[:, None]) | (shown == 3)
        assert batch.target.equal((shown % 2).masked_fill(hidden, IGNORED))
    elif kind == "regression":
        assert batch.target.shape == (len(batch.x), 2)[: data.num_targets]
        assert batch.target.dtype == torch.float32
        size = data.train_rows.target.view(-1, data.num_targets)
        assert data.target_mean == pytest.approx(size.mean(dim=0).tolist())
        assert data.target_std == pytest.approx(size.std(dim=0, correction=0).tolist())


def test_long_tables(make):
    rows = [
        {"id": line["id"], "step": step, "target": line["target"], "a": a, "b": b}
        for line in lines_of_values()
        for step, (a, b) in enumerate(line["values"])
    ]
    data = make(pd.DataFrame(rows).sample(frac=1, random_state=0), "walks.csv")
    assert data.feature_names == ["a", "b"]
    assert sum(map(len, rows_of(data))) == 50
    assert sum(int(part.lengths.sum()) for part in rows_of(data)) == len(rows)


def test_digits_are_split_as_images_are():
    images, rows, pixels = DigitsDataModule(), SequenceDataModule(), SequenceDataModule(task="digits_pixels")
    for data in (images, rows, pixels):
        data.setup()
    for name in ("train_rows", "val_rows", "test_rows"):
        expected, target = getattr(images, name).tensors
        everything = list(range(len(target)))
        assert getattr(rows, name)[everything].x.equal(expected.squeeze(1))
        assert getattr(pixels, name)[everything].x.equal(expected.view(-1, 64, 1))
        assert getattr(rows, name)[everything].target.equal(target)


def test_parts_of_generated_tasks_differ_and_tests_are_longer():
    data = SequenceDataModule(task="adding", generated=GeneratedSequences((3, 40), (41, 256), num_sequences=200))
    data.setup()
    assert [len(rows) for rows in rows_of(data)] == [140, 20, 40]
    assert (int(data.train_rows.lengths.min()), int(data.train_rows.lengths.max())) == (3, 40)
    assert (int(data.test_rows.lengths.min()) > 40, int(data.test_rows.lengths.max()) > 100) == (True, True)
    thirds = SequenceDataModule(
        task="adding",
        generated=GeneratedSequences(length=(5, 9), num_sequences=30),
        val_share=1 / 3,
        test_share=1 / 3,
    )
    thirds.setup()
    assert int(thirds.test_rows.lengths.max()) <= 9
    sums = [set(rows.target.tolist()) for rows in rows_of(thirds)]
    assert not any(sums[i] & sums[j] for i, j in ((0, 1), (0, 2), (1, 2)))


def test_batches_are_within_their_sizes_and_hold_each_sequence_once(make):
    data = make(
        [{**line, "target": 0 if i % 2 else 1} for i, line in enumerate(lines_of_values())],
        global_batch_size=8,
        max_tokens=12,
    )
    for rows, loader in zip(
        rows_of(data), (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()), strict=True
    ):
        batches = list(loader)
        assert all(len(batch.x) <= 8 for batch in batches)
        assert all(batch.lengths.max() * len(batch.x) <= 12 for batch in batches)
        assert torch.cat([batch.lengths for batch in batches]).sort().values.equal(rows.lengths.sort().values)
        first = [step[0] for batch in batches for step, n in zip(batch.x, batch.lengths, strict=True) if n]
        expected = rows.steps[rows.starts[rows.lengths > 0]]
        assert torch.stack(first)[:, 0].sort().values.equal(expected[:, 0].sort().values)


def test_processes_share_every_batch(make):
    shares = []
    for rank in (0, 1):
        data = make(global_batch_size=8)
        deal = {"num_replicas": 2, "rank": rank}
        data.trainer = SimpleNamespace(distributed_sampler_kwargs=deal, accelerator=None, **NO_LOOPS)
        shares.append([batch.x for batch in data.val_dataloader()])
    whole = [batch.x for batch in make(global_batch_size=8).val_dataloader()]
    assert len(shares[0]) == len(shares[1]) == len(whole)
    for first, second, both in zip(*shares, whole, strict=True):
        assert len(first) + len(second) == len(both)
        assert abs(len(first) - len(second)) <= 1


NO_LOOPS = {"fit_loop": None, "num_training_batches": 0}


def test_sequences_to_predict_are_scaled_as_the_training_ones(make, tmp_path):
    new = tmp_path / "new.jsonl"
    new.write_text('{"id": "b", "values": [[1, 2], [3, 4]]}\n{"id": "a", "values": [[5, 6]]}\n')
    data = make(predict_path=new)
    (batch,) = data.predict_dataloader()
    expected = (torch.tensor([[[1.0, 2], [3, 4]], [[5, 6], [0, 0]]]) - torch.tensor(data.feature_mean)) / torch.tensor(
        data.feature_std
    )
    expected[1, 1] = 0
    torch.testing.assert_close(batch.x, expected)
    assert batch.lengths.tolist() == [2, 1]
    assert batch.target is None
    assert data.predict_ids == ["b", "a"]


def test_tables_to_predict_may_hold_other_columns(make, tmp_path):
    table = pd.DataFrame(
        {"id": np.arange(60) // 2, "step": [0, 1] * 30, "a": np.arange(60) * 7 % 60, "target": np.arange(60) // 20}
    )
    pd.DataFrame({"b": [9], "a": [29.5], "step": [0], "id": ["x"]}).to_csv(tmp_path / "new.csv")
    data = make(table, "walks.csv", predict_path=tmp_path / "new.csv")
    assert data.predict_rows.steps.tolist() == [[pytest.approx((29.5 - data.feature_mean[0]) / data.feature_std[0])]]
    pd.DataFrame({"b": [9], "step": [0], "id": ["x"]}).to_csv(tmp_path / "new.csv")
    with pytest.raises(ValueError, match=r"new.csv has no column 'a'"):
        make(table, "walks.csv", predict_path=tmp_path / "new.csv")


def test_a_run_tells_how_sequences_are_read(make, caplog):
    data = make()
    assert not caplog.text  # tune and others set data up again and again
    del data.train_rows
    data.trainer = L.Trainer(accelerator="cpu", logger=False)
    caplog.clear()
    with caplog.at_level("INFO"):
        data.setup()
    sizes = f"{len(data.train_rows)} sequences train, {len(data.val_rows)} validate, {len(data.test_rows)} test"
    assert caplog.messages == [
        f"{data.path}: target of {data.num_classes} classes, {', '.join(data.class_names)}; "
        f"features of a step: values_0, values_1; {sizes}, of 0 to 5 steps"
    ]


@pytest.mark.slow
def test_copies_and_values_that_tell_the_target_are_told(make):
    def told(lines, **options):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make(lines, **options)
        return [str(one.message) for one in caught if "have no steps" not in str(one.message)]

    lines = lines_of_values()
    assert not told(lines)
    (copies,) = told([*lines, *({**line, "id": f"{line['id']} again"} for line in lines)])
    assert re.match(r"\d+ of the 36 sequences of .* that validate and test \(\d+%\) are copies of training", copies)
    kinds = {"walk": 1.0, "run": 2.0, "rest": 5.0}
    leaking = [{**line, "values": [[*values, kinds[line["target"]]] for values in line["values"]]} for line in lines]
    (answers,) = told(leaking)
    assert "that tell the target of the training rows on their own" in answers
    assert "class alone: values_2. If one" in answers
    for place, which in (0, "first"), (-1, "last"):
        late = [{**line, "values": [[*step, 0.0] for step in line["values"]]} for line in lines]
        for line in late:
            if line["values"]:
                line["values"][place][2] = kinds[line["target"]]
        (answers,) = told(late)
        assert f"class alone: values_2 of the {which} step. If one" in answers
    texts = [
        {"tokens": [*np.random.default_rng(i % 60).integers(9, size=12).tolist()], "target": i % 3} for i in range(120)
    ]
    (copies,) = told(texts)
    assert "sequences of" in copies
    short = [{"tokens": [i % 3, i % 2], "target": i % 3} for i in range(120)]
    assert not told(short)  # equal by chance


def test_sequences_without_steps_are_told(make):
    with pytest.warns(
        UserWarning, match=r"10 of 60 sequences of .* have no steps, so that they all get one prediction"
    ):
        make()


def test_a_code_is_told_in_any_split(make):
    lines = [
        {**line, "values": [[abs(value) for value in step] for step in line["values"]]} for line in lines_of_values()
    ]
    tested = int(make(lines).predict_ids[-1].removeprefix("s"))
    lines[tested]["values"] = [[5.0, -999.0]]
    with pytest.warns(UserWarning, match=r"column 'values_1' of .* holds -999 in 1 of"):
        make(lines)


def test_codes_for_missing_values_and_new_ranges_are_told(make, tmp_path):
    values = np.random.default_rng(0).normal(size=60)
    values[::7] = -999
    table = pd.DataFrame(
        {"id": np.arange(60) // 2, "step": [0, 1] * 30, "a": values, "b": [4, 5, 6] * 20, "target": np.arange(60) // 20}
    )
    pd.DataFrame({"a": [900.0] * 6, "b": [4] * 6, "id": range(6), "step": [0] * 6}).to_csv(tmp_path / "new.csv")
    with (
        pytest.warns(UserWarning, match="column 'a' of .* holds -999 in .*, fill it"),
        pytest.warns(UserWarning, match="new.csv holds numbers from 900 to 900, all outside .* rows, -999 to"),
    ):
        make(table, "walks.csv", predict_path=tmp_path / "new.csv")


def test_without_a_file_to_predict_the_test_sequences_are(make):
    data = make(layout=SequenceLayout("forecasting"), global_batch_size=99)
    (batch,) = data.predict_dataloader()
    assert batch.x.equal(data.test_rows[list(range(12))].x)
    lengths = {line["id"]: len(line["values"]) for line in lines_of_values()}
    assert [lengths[name] for name in data.predict_ids] == batch.lengths.tolist()


@pytest.mark.parametrize(
    ("field", "lines", "said"),
    [
        ("values", '{"values": [1, 2]}', r"new.jsonl has 1 values a step; the training sequences have 2 values a step"),
        ("values", '{"text": "a"}', r"new.jsonl holds text; the training sequences hold values"),
        ("text", '{"values": [1, 2]}', r"new.jsonl has 1 values a step; the training sequences have tokens or text"),
        ("tokens", '{"tokens": [1, 9]}', r"new.jsonl holds the token 9; those trained on go up to 2"),
    ],
    ids=["features", "text", "values", "tokens"],
)
def test_other_sequences_to_predict_are_refused(make, tmp_path, field, lines, said):
    new = tmp_path / "new.jsonl"
    new.write_text(lines + "\n")
    found = {"values": [[1, 2]], "text": "ab", "tokens": [1, 2]}[field]
    with pytest.raises(ValueError, match=said):
        make([{field: found, "target": i % 2} for i in range(20)], predict_path=new)


def test_checkpoint_keeps_what_was_fitted(make):
    lines = lines_of_values()
    state = make(lines).state_dict()
    make(lines).load_state_dict(state)
    shifted = [{**line, "values": [[a + 1, b] for a, b in line["values"]]} for line in lines]
    wider = [{**line, "values": [[a, b, 0] for a, b in line["values"]]} for line in lines]
    renamed = [{**line, "target": line["target"].replace("run", "hop")} for line in lines]
    for other, said in (
        (make(shifted), "means of the training steps"),
        (make(wider), "features"),
        (make(lines, seed=1), "split"),
        (make(renamed), "target"),
    ):
        with pytest.raises(ValueError, match=rf"trained on other sequences than those of .*walks.jsonl .*: {said}"):
            other.load_state_dict(state)


def test_generated_tasks_may_be_tested_at_other_lengths_but_not_resumed():
    def adding(fn, **options):
        data = SequenceDataModule(task="adding", generated=GeneratedSequences(num_sequences=20, **options))
        data.setup()
        data.trainer = SimpleNamespace(state=SimpleNamespace(fn=fn))
        return data

    state = adding("fit", length=10).state_dict()
    adding("test", length=30).load_state_dict(state)
    adding("fit", length=10).load_state_dict(state)
    adding("fit", length=10, test_length=50).load_state_dict(state)
    with pytest.raises(ValueError, match=r"other sequences than those of adding .*: task \['adding', 10, 20\] there"):
        adding("fit", length=30).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"task": "addition"}, r"task must be one of digits_rows, .*; got 'addition'"),
        (
            {"generated": {"length": 9}},
            r"generated\.length would have no effect on task='digits_rows', which is not generated",
        ),
        (
            {"layout": {"target_kind": "regression"}},
            r"layout and predict_path describe files; without a path, task='digits_rows' alone is read",
        ),
        ({"predict_path": __file__}, r"describe files; without a path"),
        ({"path": __file__, "task": "adding"}, r"give path or task, not both"),
        (
            {"path": __file__, "generated": {"num_sequences": 5}},
            r"generated\.num_sequences would have no effect on the file .*test_datamodule.py",
        ),
        (
            {"layout": {"target_kind": "regresion"}},
            r"layout\.target_kind must be one of classification, .*; got 'regresion'",
        ),
        ({"global_batch_size": 0}, r"global_batch_size must be at least 1; got 0"),
        ({"max_tokens": 0}, r"max_tokens must be at least 1; got 0"),
        ({"chunk_steps": 0}, r"chunk_steps must be at least 1; got 0"),
        ({"val_share": 0.5, "test_share": 0.5}, r"leave items to train on; got val_share=0.5, test_share=0.5"),
    ],
    ids=str,
)
def test_options_are_checked_at_once(options, said):
    with pytest.raises(ValueError, match=said):
        SequenceDataModule(**options)


def test_old_names_of_grouped_options_warn(make):
    def renamed(make, *arguments, **old):
        with pytest.warns(FutureWarning) as warned:
            data = make(*arguments, **old)
        said = [str(one.message) for one in warned if "SequenceDataModule: " in str(one.message)]
        return data, dict(message.partition(": ")[2].partition(";")[0].split(" is now called ") for message in said)

    old = {"length": (3, 9), "test_length": 12, "num_sequences": 30}
    data, names = renamed(SequenceDataModule, task="adding", **old)
    assert names == {name: f"generated.{name}" for name in old}
    assert (data.lengths, data.num_sequences) == (((3, 9), 12), 30)
    old = {"target_kind": "regression", "target": "y", "values": "x", "id_column": "who", "step_column": "when"}
    lines = [{"who": f"w{i}", "x": [i, 1], "y": i / 7} for i in range(20)]
    data, names = renamed(make, lines, **old)
    assert names == {name: f"layout.{name}" for name in old}
    assert data.layout == SequenceLayout("regression", "y", ("x",), "who", "when")
    assert data.predict_ids[0].startswith("w")


@pytest.mark.parametrize(
    ("lines", "options", "said"),
    [
        (
            [{"values": [1], "target": i % 2} for i in range(5)],
            {},
            r"each needs 3.*--data\.layout\.target_kind regression",
        ),
        ([{"values": [1], "target": i / 7} for i in range(5)], {}, r"set layout\.target_kind to regression"),
        ([{"values": [1], "target": 0}] * 5, {}, r"one class only, '0'"),
        (
            [{"values": [1], "target": 0}] * 2,
            {"layout": {"target_kind": "regression"}},
            r"too few rows to split as asked",
        ),
        ([{"values": [1], "target": [None]}] * 9, {"layout": {"target_kind": "labelling"}}, r"holds no label"),
        ([{"values": [1], "goal": 1}], {}, r"has no field 'target'\. Its fields: values, goal"),
        (None, {"max_tokens": 4}, r"max_tokens=4 holds no sequence of 5 steps"),
    ],
    ids=["rare", "quantity", "one", "few", "unlabelled", "no field", "long"],
)
def test_files_that_cannot_be_split_are_refused(make, lines, options, said):
    with pytest.raises(ValueError, match=said):
        make(lines, **options)


class Plain(L.LightningModule):
    """A module that knows nothing of this package but its batches."""

    def __init__(self, num_features: int = 2, num_classes: int = 3):
        super().__init__()
        self.head = torch.nn.Linear(num_features, num_classes)
        self.seen: list[list[int]] = []

    def training_step(self, batch, batch_idx):
        self.seen.append([*batch.lengths.tolist(), round(1000 * float(batch.x.sum()))])
        scores = self.head(batch.x.sum(dim=1) / batch.lengths[:, None].clamp(min=1))
        return F.cross_entropy(scores, batch.target)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.head(batch.x.sum(dim=1)).square().mean(), batch_size=len(batch.x))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        assert batch.target is None
        return {"length": batch.lengths}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trainer(folder, **options):
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(default_root_dir=folder, **{**quiet, "enable_checkpointing": False, **options})


def test_a_plain_module_trains_validates_tests_and_predicts(make, tmp_path):
    data = make(global_batch_size=16, num_workers=0)
    trained = trainer(tmp_path, max_epochs=2, callbacks=[PredictionWriter()])
    module = Plain()
    trained.fit(module, datamodule=data)
    first, second = module.seen[: len(module.seen) // 2], module.seen[len(module.seen) // 2 :]
    assert sorted(n for row in first for n in row[:-1]) == sorted(n for row in second for n in row[:-1])
    assert first != second
    trained.test(module, datamodule=data, verbose=False)
    trained.predict(module, datamodule=data)
    table = pd.read_csv(tmp_path / "predictions.csv")
    lengths = {line["id"]: len(line["values"]) for line in lines_of_values()}
    assert len(table) == 12
    assert [lengths[name] for name in table["id"]] == table["length"].tolist()


class SaveAfterThree(L.Callback):
    def on_train_batch_end(self, trainer, *unused):
        if trainer.global_step == 3:
            trainer.save_checkpoint(f"{trainer.default_root_dir}/third.ckpt")


def test_a_run_stopped_in_mid_epoch_goes_on_with_the_next_batch(make, tmp_path):
    whole, resumed = Plain(), Plain()
    trainer(tmp_path, max_epochs=2, callbacks=[SaveAfterThree()]).fit(whole, datamodule=make(global_batch_size=8))
    saved = {"ckpt_path": tmp_path / "third.ckpt", "weights_only": True}
    trainer(tmp_path, max_epochs=2).fit(resumed, datamodule=make(global_batch_size=8), **saved)
    assert len(whole.seen) == 2 * 6
    assert resumed.seen == whole.seen[3:]
    with pytest.raises(ValueError, match="trained on other sequences"):
        trainer(tmp_path, max_epochs=2).fit(Plain(), datamodule=make(global_batch_size=8, seed=3), **saved)


def test_options_are_read_from_a_command_line(monkeypatch):
    monkeypatch.setattr("sys.argv", ["fit"])
    cli = LightningCLI(
        Plain,
        SequenceDataModule,
        run=False,
        save_config_callback=None,
        args=[
            "--data.task=adding",
            "--data.generated.length=[3,9]",
            "--data.generated.test_length=12",
            "--data.layout.values=[]",
            "--data.max_tokens=99",
        ],
        seed_everything_default=1,
    )
    assert cli.datamodule.lengths == ((3, 9), 12)
    assert cli.datamodule.max_tokens == 99


def check_every_sequence_goes_to_one_process(rank, folder):
    data = SequenceDataModule(f"{folder}/walks.jsonl", global_batch_size=8)
    module = Plain()
    options = {"strategy": "ddp", "devices": 2, "max_epochs": 1, "num_sanity_val_steps": 0}
    trainer(folder, **options).fit(module, datamodule=data)
    seen = [None, None]
    torch.distributed.all_gather_object(seen, module.seen)
    assert len(seen[0]) == len(seen[1])
    lengths = [n for batches in seen for batch in batches for n in batch[:-1]]
    assert sorted(lengths) == data.train_rows.lengths.sort().values.tolist()
    module.seen.clear()
    trained = trainer(folder, **options, callbacks=[PredictionWriter(f"{folder}/two.csv")])
    trained.predict(module, datamodule=data)
    if rank == 0:
        assert pd.read_csv(f"{folder}/two.csv")["id"].tolist() == data.predict_ids


@pytest.mark.slow
def test_every_sequence_goes_to_one_process(make, tmp_path):
    make()
    run_ranks(check_every_sequence_goes_to_one_process, str(tmp_path))


def test_what_chunks_are_to_forecast_is_the_next_step_over_their_borders():
    lengths = torch.tensor([7, 3, 1, 4])
    rows = SequenceDataset(torch.arange(15.0)[:, None], lengths)
    tokens = SequenceDataset(torch.arange(15), lengths)
    sampler = LengthBatchSampler(lengths, 4, chunk_steps=3)
    follow = {"values": [], "tokens": []}
    for chunk in sampler:
        for name, data in (("values", rows), ("tokens", tokens)):
            batch = data[chunk]
            there = ~batch.target.isnan() if name == "values" else batch.target != IGNORED
            follow[name] += zip(batch.x[there].tolist(), batch.target[there].tolist(), strict=True)
    pairs = [(n, n + 1) for n in range(14) if n not in (6, 9, 10)]
    assert sorted(follow["tokens"]) == pairs
    assert sorted((a, b) for a, b in follow["values"]) == [(float(a), float(b)) for a, b in pairs]
