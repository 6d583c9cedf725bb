"""Whether data are those that a checkpoint was trained on, for every datamodule of files."""

import json
import os
import random
import shutil
import struct

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from lightning_accel.data import IdxDataModule, SequenceDataModule, TabularDataModule, TextDataModule
from lightning_accel.data.digest import digest_of, require_same_data
from lightning_accel.data.graphs.datamodule import GraphDataModule
from lightning_accel.data.text import tokens


def write_table(folder, change):
    rng = random.Random(0)
    rows = [[rng.randint(0, 999), rng.choice("uvw"), "pq"[i % 2]] for i in range(90)]
    match change:
        case "one label":
            rows[10][2] = "q"
        case "two labels swapped":
            rows[10][2], rows[11][2] = rows[11][2], rows[10][2]
        case "a category":
            rows[10][1] = "v" if rows[10][1] == "u" else "u"
        case "categories permuted":
            column = [row[1] for row in rows]
            rows = [[a, c, y] for (a, _, y), c in zip(rows, rng.sample(column, 90), strict=True)]
        case "two values swapped":
            rows[0][0], rows[2][0] = rows[2][0], rows[0][0]
        case "rows reversed":
            rows.reverse()
    (folder / "t.csv").write_text("a,c,y\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    return TabularDataModule(folder / "t.csv", "y", val_share=0.2, test_share=0.01 + 3 / 90)


def write_sequences(folder, change, field="tokens"):
    rng = random.Random(0)
    lines = [
        {field: [rng.randint(1, 50) * (1 if field == "tokens" else 0.5) for _ in range(8)], "target": "ab"[i % 2]}
        for i in range(60)
    ]
    match change:
        case "steps permuted":
            for line in lines:
                rng.shuffle(line[field])
        case "targets flipped":
            for line in lines:
                line["target"] = "ba"["ab".index(line["target"])]
        case "half the targets":
            for line in lines[:30]:
                line["target"] = rng.choice("ab")
        case "lines reversed":
            lines.reverse()
    (folder / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return SequenceDataModule(folder / "t.jsonl")


def write_values(folder, change):
    return write_sequences(folder, change, "values")


def write_idx(folder, change):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (40, 4, 3), dtype=np.uint8), (np.arange(40) % 3).astype(np.uint8)
    match change:
        case "labels permuted":
            labels = rng.permutation(labels)
        case "images permuted":
            images = rng.permutation(images)
        case "two labels swapped":
            labels[[7, 8]] = labels[[8, 7]]
    for name, array in (("train-images-idx3-ubyte", images), ("train-labels-idx1-ubyte", labels)):
        header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
        (folder / name).write_bytes(header + array.tobytes())
    return IdxDataModule(folder)


def write_graphs(folder, change):
    rng = random.Random(0)
    lines = [
        {"edges": [[0, 1], [1, 2]], "x": [[rng.random()] for _ in range(3)], "edge_attr": [[i], [2]], "y": "ab"[i % 2]}
        for i in range(30)
    ]
    match change:
        case "labels flipped":
            for line in lines:
                line["y"] = "ba"["ab".index(line["y"])]
        case "an edge in each":
            for line in lines:
                line["edges"] = [[0, 1], [0, 2]]
        case "features of nodes reversed":
            for line in lines:
                line["x"].reverse()
        case "features of edges":
            for line in lines:
                line["edge_attr"].reverse()
    (folder / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return GraphDataModule(folder / "t.jsonl")


def write_text(folder, change):
    text = bytearray(random.Random(0).randbytes(200_000))
    match change:
        case "a stretch of zeros":
            text[15_000:20_000] = bytes(5000)
        case "one byte":
            text[77_777] ^= 1
        case "halves swapped":
            text = text[100_000:] + text[:100_000]
    (folder / "t.txt").write_bytes(text)
    return TextDataModule(folder / "t.txt", context_length=16)


CHANGES = {
    write_table: [
        "one label", "two labels swapped", "a category", "categories permuted", "two values swapped", "rows reversed",
    ],
    write_sequences: ["steps permuted", "targets flipped", "half the targets", "lines reversed"],
    write_values: ["steps permuted", "targets flipped", "half the targets", "lines reversed"],
    write_idx: ["labels permuted", "images permuted", "two labels swapped"],
    write_graphs: ["labels flipped", "an edge in each", "features of nodes reversed", "features of edges"],
    write_text: ["a stretch of zeros", "one byte", "halves swapped"],
}  # fmt: skip


def state_of(data):
    data.setup("fit")
    return data.state_dict()


@pytest.mark.parametrize(("write", "change"), [(write, change) for write in CHANGES for change in CHANGES[write]])
def test_changed_data_are_refused(write, change, tmp_path):
    state = state_of(write(tmp_path, None))
    changed = write(tmp_path, change)
    changed.setup("fit")
    with pytest.raises(ValueError, match=r"trained on other .* there, .* here.*grew or were mended.*begin a new one"):
        changed.load_state_dict(state)


@pytest.mark.parametrize("write", CHANGES)
def test_the_same_data_elsewhere_are_accepted_and_an_older_checkpoint_is_too(write, tmp_path):
    """A copy has another path and another time of change."""
    (first := tmp_path / "first").mkdir()
    state = json.loads(json.dumps(state_of(write(first, None))))
    (digest,) = (name for name in state if name.startswith("digest of the"))
    assert state[digest] is not None
    (second := tmp_path / "second").mkdir()
    copied = write(second, None)
    for file in first.iterdir():
        shutil.copyfile(file, second / file.name)
        os.utime(second / file.name, (1, 1))
    copied.setup("fit")
    copied.load_state_dict(state)
    del state[digest]  # as an older release wrote it
    copied.load_state_dict(state)


@pytest.mark.weekly
@pytest.mark.slow
def test_a_table_may_change_in_rows_that_only_test(tmp_path):
    """No row but those that train and validate is part of what was trained."""
    state = state_of(write_table(tmp_path, None))
    lines = (tmp_path / "t.csv").read_text().splitlines()
    accepted = 0
    for number in range(1, len(lines)):
        value, *rest = lines[number].split(",")
        changed = [*lines]
        changed[number] = ",".join([str(int(value) + 1), *rest])
        (tmp_path / "t.csv").write_text("\n".join(changed) + "\n")
        data = TabularDataModule(tmp_path / "t.csv", "y", val_share=0.2, test_share=0.01 + 3 / 90)
        data.setup("fit")
        try:
            data.load_state_dict(state)
        except ValueError:
            continue
        accepted += 1
    assert accepted == len(data.test_rows) == 4


def test_features_that_a_transform_draws_are_no_change():
    graphs = [
        Data(edge_index=torch.tensor([[0, 1], [1, 2]]), x=torch.randn(3, 2), y=torch.tensor(i % 2)) for i in range(30)
    ]

    def noisy(graph):
        graph.x = graph.x + torch.randn(3, 2)
        return graph

    state = state_of(GraphDataModule(dataset=graphs, transform=noisy))
    again = GraphDataModule(dataset=graphs, transform=noisy)
    again.setup("fit")
    again.load_state_dict(state)
    changed = GraphDataModule(dataset=[Data(edge_index=g.edge_index, x=g.x.flip(0), y=g.y) for g in graphs])
    changed.setup("fit")
    with pytest.raises(ValueError, match="digest of the graphs"):
        changed.load_state_dict(state)


def test_whatever_else_a_graph_holds_is_compared():
    """``edge_type`` in place of ``edge_attr``, positions, sparse matrices; no masks, and nothing an older one lacks."""
    index = torch.tensor([[0, 1], [1, 2]])
    made = [
        Data(
            edge_index=index, x=torch.rand(3, 2), y=torch.tensor(i % 2), edge_type=torch.tensor([0, 1]),
            pos=torch.rand(3, 3), adj=torch.eye(3).to_sparse(), odd_mask=torch.ones(3),
        )
        for i in range(30)
    ]  # fmt: skip

    def changed(**values):
        return GraphDataModule(dataset=[*made[:4], *(Data(**one.to_dict() | values) for one in made[4:])])

    state = state_of(changed())
    sparse = torch.eye(3).mul(2).to_sparse()
    for change in ({"edge_type": torch.tensor([1, 0])}, {"pos": torch.zeros(3, 3)}, {"adj": sparse}):
        other = changed(**change)
        other.setup("fit")
        with pytest.raises(ValueError, match=r"trained on other graphs .*: digest of the graphs"):
            other.load_state_dict(state)
    same = changed(odd_mask=torch.zeros(3))
    same.setup("fit")
    same.load_state_dict(state)
    del state["digest of the graphs"]
    other.load_state_dict(state)


class _Codes:
    vocab_size = 256

    def encode(self, text):
        return list(text.encode())

    def decode(self, tokens):
        return bytes(tokens).decode()


def test_tokens_are_made_anew_of_a_text_whose_size_and_time_are_kept(tmp_path):
    path, lines = tmp_path / "t.txt", ["abcd\n"] * 2000
    state = None
    for changed in (lines, [*lines[:1500], "abcx\n", *lines[1501:]]):
        path.write_text("".join(changed))
        os.utime(path, ns=(10**18, 10**18))
        data = TextDataModule(path, context_length=8, tokenizer=_Codes(), cache_dir=tmp_path / "cache")
        data.setup("fit")
        state = state or data.state_dict()
    with pytest.raises(ValueError, match="trained on other text"):
        data.load_state_dict(state)


def test_a_text_too_long_to_read_whole_is_sampled_evenly(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "_MOST_DIGESTED", 100_000)
    monkeypatch.setattr(tokens, "_SAMPLE", 20)
    read = []
    whole = tokens.TokenStream.read
    monkeypatch.setattr(tokens.TokenStream, "read", lambda self, a, b: read.append(b - a) or whole(self, a, b))
    state = state_of(write_text(tmp_path, None))
    assert read.count(20) == 1024
    same = write_text(tmp_path, None)
    same.setup("fit")
    same.load_state_dict(state)
    changed = write_text(tmp_path, None)
    content = bytearray((tmp_path / "t.txt").read_bytes())
    gap = 200_000 // 1023 + 1
    content[150_000 : 150_000 + gap] = bytes(gap)
    (tmp_path / "t.txt").write_bytes(content)
    changed.setup("fit")
    with pytest.raises(ValueError, match="trained on other text"):
        changed.load_state_dict(state)


def test_digests_tell_values_types_shapes_and_order():
    array = np.arange(6.0)
    parts = [
        [array], [array[::-1]], [array.reshape(2, 3)], [array.astype(np.float32)], [array.astype(int)], [array, array],
        [array[:0]], [["ab", "c"]], [["a", "bc"]], [["abc"]], [["c", "ab"]], [["ab\udc80"]],
    ]  # fmt: skip
    assert len({digest_of(*part) for part in parts}) == len(parts)
    assert digest_of(array.astype(">f8")) == digest_of(array)
    other = np.array([0x7FF8000000000001, 0xFFF8000000000000], dtype=np.uint64).view(np.float64)
    assert digest_of(other) == digest_of(np.array([np.nan, np.nan]))


def test_a_message_about_other_data_is_short():
    names = [f"column {i}" for i in range(20_000)]
    with pytest.raises(ValueError, match="columns") as raised:
        require_same_data({"columns": ["z" * 3_000_000]}, {"columns": names}, "data", "Give the file of its run")
    assert len(str(raised.value)) < 1000
