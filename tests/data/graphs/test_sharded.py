"""Graphs in folders, a row each: batches as one file gives them, statistics of those that train."""

import copy
import json

import lightning as L
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lightning_accel.data import GraphDataModule, GraphLayout, ShardOptions
from lightning_accel.models import RelationalGNN

TARGETS = {
    "class": lambda number, n: ["ring", "tree"][number % 2],
    "number": lambda number, n: number / 10,
    "numbers": lambda number, n: [number / 10, float(n)],
    "node class": lambda number, n: [["a", "b"][node % 2] for node in range(n)],
    "node number": lambda number, n: [number + node / 10 for node in range(n)],
}
LAYOUTS = {
    "class": {},
    "number": {"target_kind": "regression"},
    "numbers": {"target_kind": "regression"},
    "node class": {"level": "node"},
    "node number": {"level": "node", "target_kind": "regression"},
}


def rows_of(count=300, target="class", edge_attr="types", x=True):
    rng = np.random.default_rng(0)
    rows = []
    for number in range(count):
        n = int(rng.integers(2, 9))
        edges = np.unique(rng.integers(0, n, (int(rng.integers(0, 12)), 2)), axis=0).tolist()
        row = {"id": f"g{number}", "edges": edges, "y": TARGETS[target](number, n), "num_nodes": n}
        if x:
            row["x"] = np.stack([rng.normal(3, 2, n), rng.integers(0, 2, n)], axis=1).tolist()
        if edge_attr == "types":
            row["edge_attr"] = rng.integers(0, 3, len(edges)).tolist()
        elif edge_attr == "features":
            row["edge_attr"] = rng.normal(5, 2, (len(edges), 2)).tolist()
        rows.append(row)
    return rows


def folder_of(path, rows, lines=False):
    path.mkdir(parents=True)
    for number in range(3):
        part = rows[len(rows) * number // 3 : len(rows) * (number + 1) // 3]
        if lines:
            (path / f"{number}.jsonl").write_text("\n".join(map(json.dumps, part)))
        else:
            pq.write_table(pa.Table.from_pylist(part), path / f"{number}.parquet", row_group_size=9)
    return path


def data_of(folder, layout=None, **options):
    held = GraphLayout(**(layout or {}), shards=ShardOptions(cache_dir=folder.parent / "cache"))
    data = GraphDataModule(folder, layout=held, **{"global_batch_size": 16, **options})
    data.prepare_data()
    data.setup()
    return data


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "edge_attr", "x", "lines"),
    [
        ("class", "types", True, False),
        ("number", "features", True, True),
        ("numbers", "none", False, False),
        ("node class", "features", False, True),
        ("node number", "types", True, False),
    ],
)
def test_batches_hold_what_one_file_gives(tmp_path, target, edge_attr, x, lines):
    """Of a file with the rows that train, in memory, and one with those that test, as predict_path."""
    rows = rows_of(300, target, edge_attr, x)
    for part, name in enumerate(("train", "val", "test")):
        folder_of(tmp_path / "rows" / name, rows[100 * part : 100 * (part + 1)], lines)
    data = data_of(tmp_path / "rows", LAYOUTS[target])
    for part, name in ((0, "train"), (2, "test")):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows[100 * part : 100 * (part + 1)])))
    whole = GraphDataModule(
        tmp_path / "train.jsonl",
        layout=GraphLayout(**LAYOUTS[target]),
        split={"val_share": 0.011, "test_share": 0.011}
        if target != "class"
        else {"val_share": 0.02, "test_share": 0.02},
        predict_path=tmp_path / "test.jsonl",
    )
    whole.setup()
    for name in (
        "level",
        "target_kind",
        "num_features",
        "edge_dim",
        "num_relations",
        "class_names",
        "num_targets",
        "target_names",
    ):
        assert getattr(data, name) == getattr(whole, name), name
    assert data.predict_ids == whole.predict_ids
    sizes = [row["num_nodes"] for row in rows[200:]]
    scales = data._graphs.statistics.scales
    of_x = np.concatenate([row["x"] for row in rows[:100]]) if x else None
    if x:
        np.testing.assert_allclose(scales["x"][0], [of_x[:, 0].mean(), 0], rtol=1e-12)  # 0 and 1 stay
        np.testing.assert_allclose(scales["x"][1], [of_x[:, 0].std(), 1], rtol=1e-12)
    first = 0
    for batch in data.test_dataloader():
        part = range(first, first + batch.num_graphs)
        first += batch.num_graphs
        assert batch.ptr.diff().tolist() == [sizes[number] for number in part]
        assert batch.batch.tolist() == [place for place, number in enumerate(part) for _ in range(sizes[number])]
        expected_x = torch.tensor([line for number in part for line in rows[200 + number]["x"]]) if x else None
        if x:
            mean, std = map(torch.tensor, scales["x"])
            torch.testing.assert_close(batch.x, ((expected_x - mean) / std).float(), rtol=1e-5, atol=1e-5)
        else:
            assert batch.x.equal(torch.ones(int(batch.ptr[-1]), 1))
        edges = {}
        for place, number in enumerate(part):
            row, start = rows[200 + number], int(batch.ptr[place])
            attributes = row.get("edge_attr", [None] * len(row["edges"]))
            given = {(a + start, b + start): one for (a, b), one in zip(row["edges"], attributes, strict=True)}
            edges |= {(b, a): one for (a, b), one in given.items() if (b, a) not in given} | given
        assert sorted(map(tuple, batch.edge_index.t().tolist())) == sorted(edges)
        if edge_attr == "types":
            assert batch.edge_attr.tolist() == [edges[tuple(edge)] for edge in batch.edge_index.t().tolist()]
        elif edge_attr == "features":
            mean, std = map(torch.tensor, scales["edge_attr"])
            found = torch.tensor([edges[tuple(edge)] for edge in batch.edge_index.t().tolist()])
            torch.testing.assert_close(batch.edge_attr, ((found - mean) / std).float(), rtol=1e-5, atol=1e-5)
        targets = [rows[200 + number]["y"] for number in part]
        if data.level == "node":
            targets = [one for row in targets for one in row]
            assert batch.target_index.tolist() == [*range(batch.num_nodes)]
        if data.class_names is not None:
            assert [data.class_names[number] for number in batch.y] == targets
        else:
            torch.testing.assert_close(batch.y, torch.tensor(targets))
    assert first == 100
    if data.target_mean is not None:
        numbers = np.array([one for row in rows[:100] for one in (row["y"] if data.level == "node" else [row["y"]])])
        np.testing.assert_allclose(data.target_mean, numbers.reshape(len(numbers), -1).mean(axis=0))


@pytest.mark.slow
def test_a_module_trains_on_each_graph_once(tmp_path):
    data = data_of(folder_of(tmp_path / "rows", rows_of()))
    options = {"num_relations": data.num_relations, "layers": {"dim": 4, "num_layers": 1}}
    model = RelationalGNN(data.num_features, data.num_classes, **options)
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    assert trainer.global_step == data._graphs.splits["train"].num_rows // 16
    assert sum(len(part["class"]) for part in trainer.predict(model, data)) == len(data.predict_ids)


@pytest.mark.parametrize(
    ("row", "layout", "message"),
    [
        ({"edges": [[0, 1, 2]]}, {}, r"'edges' of .* must hold pairs of nodes"),
        (
            {"edges": [[0, 5]], "num_nodes": 3},
            {},
            r"nodes 0 to 2, numbered from 0, as row 0 \(from 0\) of it has 3 by its num_nodes; got \[0.0, 5.0\]",
        ),
        ({"edges": [[0, -1]]}, {}, r"0 to 0, numbered .* row 0 \(from 0\) of it has 1 by its edges; got \[0.0, -1.0\]"),
        ({"edges": [[0, 0.5]]}, {}, r"0 to 0, numbered .* row 0 \(from 0\) of it has 1 by its edges; got \[0.0, 0.5\]"),
        (
            {"edges": [[0, 1]], "x": [[1.0]], "num_nodes": 2},
            {},
            r"'x' of .* must have an entry for each of the 2 nodes of its row 0 \(from 0\)",
        ),
        (
            {"edges": [[0, 1]], "edge_attr": [1, 2]},
            {},
            r"'edge_attr' of .* must have an entry for each of the 1 edges of its row 0 \(from 0\)",
        ),
        ({"edges": [[0, 1]], "edge_attr": [-1]}, {}, "'edge_attr' of .* holds the type -1; 0 or more"),
        ({"edges": [[0, 1]], "x": [[1e31], [0.0]]}, {}, "'x' of .* must hold numbers of at most 1e"),
        (
            {"edges": [[0, 1]], "weight": 1},
            {},
            "has the column 'weight', which would not be read. Known ones are edges, num_nodes",
        ),
        ({"edge": [[0, 1]]}, {}, r"no column 'edges'; did you mean 'edge'\?"),
        ({"edges": [[0, 1]], "y": None}, {}, "column 'y' of .* lacks 9 classes"),
        ({"edges": [[0, 1]], "y": "a"}, {}, "holds one class only, a"),
        (
            {"edges": [[0, 1]], "y": ["a"]},
            {"level": "node"},
            r"'y' of .* must have an entry for each of the 2 nodes of its row 0 \(from 0\); got 1",
        ),
        ({"edges": [[0, 1]], "z": 1}, {"target": ["y", "z"]}, "a class of each is one value; layout.target names y, z"),
    ],
)
def test_files_that_cannot_be_read_are_refused_before_training(tmp_path, row, layout, message):
    rows = [{"y": "ab"[number % 2], **row} for number in range(300)]
    with pytest.raises(ValueError, match=message):
        data_of(folder_of(tmp_path / "rows", rows), layout)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"batches": {"max_nodes": 9}}, "batches.max_nodes"),
        ({"transform": copy.copy}, "transform"),
    ],
    ids=["nodes", "transform"],
)
def test_options_without_effect_are_refused(tmp_path, options, named):
    with pytest.raises(ValueError, match=f"{named} would have no effect on {tmp_path}, a folder or URL of files"):
        GraphDataModule(tmp_path, **options)
