import json
import re
import warnings
from collections import OrderedDict
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import lightning as L
import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader as GraphLoader

from lightning_accel import Classifier, DigitsDataModule, MoEClassifier, RelationalGNN, TabularDataModule
from lightning_accel.callbacks import Export, Pruning, Quantization
from lightning_accel.compress import ExportError, load_compressed
from lightning_accel.models import ConvolutionLayers, Experts
from tests.ranks import run_ranks

ROWS = TensorDataset(torch.randn(20, 6), torch.arange(20) % 3)


class Own(L.LightningModule):
    """Calls its network, never itself."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        scores = self.net(batch[0])
        self.log("val/loss", nn.functional.cross_entropy(scores, batch[1]))
        self.log("val/accuracy", scores.argmax(1).eq(batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module, callbacks, folder, data=None, **options):
    trainer = L.Trainer(
        accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=callbacks, **options,
    )  # fmt: skip
    data = (DataLoader(ROWS, 5), DataLoader(ROWS, 8)) if data is None else (data,)
    trainer.fit(module, *data)
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize("format", ["auto", pytest.param("onnx", marks=pytest.mark.slow)])
def test_trained_model_is_in_the_file_and_in_the_report(format, tmp_path):
    module, callback = Own(), Export(format, compare=False, class_names=["a", "b", "c"])
    fit(module, [callback], tmp_path)
    loaded = load_compressed(callback.exported.path)
    x, target = ROWS.tensors
    module.eval()
    torch.testing.assert_close(loaded(x), module.net(x))
    assert loaded.predict(x)["class"] == ["abc"[number] for number in module.net(x).argmax(1)]
    of_tables = dict.fromkeys(("columns", "missing", "decimal"))
    assert loaded.metadata["metadata"] == {"model": "Own", "submodule": "net", "step": 2, **of_tables}
    rows = json.loads((tmp_path / "figures" / "export.json").read_text())["rows"]
    name = "onnx file" if format == "onnx" else "pt2 file"
    assert [row["name"] for row in rows] == ["fp32 eager", name]
    accuracy = module.net(x).argmax(1).eq(target).float().mean().item()
    for row in rows:
        assert row["metrics"]["val/accuracy"] == pytest.approx(accuracy)
        assert set(row["latencies"]) == {"1", "8"}
    assert rows[1]["file_bytes"] == callback.exported.path.stat().st_size
    assert (rows[0]["parameters"], rows[0]["macs"]) == (63, 45)
    assert (tmp_path / "figures" / "export.png").exists()


@pytest.mark.slow
def test_report_has_the_model_before_channels_were_removed(tmp_path):
    module, callback = Own(), Export(compare=False)
    fit(module, [callback, Pruning(0.4, structure="channel", schedule="one_shot")], tmp_path)
    content = json.loads((tmp_path / "figures" / "export.json").read_text())
    assert [row["name"] for row in content["rows"]] == ["before training", "fp32 eager", "pt2 file"]
    assert [row["parameters"] for row in content["rows"]] == [63, 39, None]
    assert set(content["rows"][0]["latencies"]) == {"1", "8"}
    assert "samples of a validation batch" in content["measured"]


@pytest.mark.slow
def test_export_of_a_checkpoint_says_that_it_does_not_quantize(tmp_path):
    callback = Export(compare=False)
    callback.exports_on = {TrainerFn.VALIDATING}
    trainer = L.Trainer(
        accelerator="cpu", logger=False, callbacks=[callback, Quantization("qat")], default_root_dir=tmp_path,
        enable_checkpointing=False, enable_progress_bar=False, inference_mode=False,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="Export writes the float model: Quantization makes its form at"):
        trainer.validate(Own(), DataLoader(ROWS, 8))
    assert callback.exported is not None


@pytest.mark.slow
def test_a_file_of_a_checkpoint_tells_its_step_and_that_it_gives_probabilities(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(Export, "_measure", MagicMock())  # takes seconds
    module = Own()
    fit(module, [], tmp_path).save_checkpoint(tmp_path / "second.ckpt")
    callback = Export(compare=False, postprocess="probabilities")
    callback.exports_on = {TrainerFn.VALIDATING}
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[callback],
        default_root_dir=tmp_path, inference_mode=False,
    )  # fmt: skip
    with caplog.at_level("INFO"):
        trainer.validate(module, DataLoader(ROWS, 8), ckpt_path=tmp_path / "second.ckpt", verbose=False)
    assert load_compressed(callback.exported.path).metadata["metadata"]["step"] == 2
    assert "which gives probabilities of output; " in caplog.text


@pytest.mark.slow
def test_report_judges_probabilities_and_left_out_outputs_by_the_users_metrics(tmp_path):
    data = DigitsDataModule(batch_size=32)
    module = MoEClassifier(64, 10, dim=8, experts=Experts(hidden_dim=4))
    callback = Export(compare=False, postprocess="probabilities", preprocess="datamodule")
    fit(module, [callback], tmp_path, data)
    eager, file = callback.report.rows
    assert file.metrics == pytest.approx(eager.metrics, rel=1e-4)
    assert callback.exported.outputs == ["logits"]
    assert "report.balance_loss" in callback.exported.left_out
    loaded = load_compressed(callback.exported.path)
    images = data.val_rows.tensors[0][:5]
    expected = module.eval()(images).logits.softmax(1)
    torch.testing.assert_close(loaded(images * 16).logits, expected, rtol=1e-4, atol=1e-6)
    assert loaded.class_names == list("0123456789")


@pytest.mark.slow
def test_rows_of_a_table_go_in_as_they_are(tmp_path):
    generator = torch.Generator().manual_seed(0)
    lines = ["length,colour,width,kind"]
    for row in range(60):
        length = "" if row % 7 == 3 else f"{float(torch.randn((), generator=generator)) * 9 + 50:.4f}"
        lines.append(f"{length},{['red', 'green', 'blue'][row % 3]},{row % 11},{['oak', 'ash'][row % 2]}")
    path = tmp_path / "trees.csv"
    path.write_text("\n".join(lines))
    data = TabularDataModule(path, "kind", batch_size=9)
    data.setup()
    module, callback = Classifier(data.num_features, 2, hidden_dims=[4]), Export(compare=False, preprocess="datamodule")
    fit(module, [callback], tmp_path, data)
    loaded = load_compressed(callback.exported.path)
    columns = loaded.metadata["metadata"]["columns"]
    assert columns == [
        {"name": "length", "categories": None},
        {"name": "width", "categories": None},
        {"name": "colour", "categories": ["blue", "green", "red"]},
    ]
    raw = torch.tensor([[52.5, 3, 2], [torch.nan, 3, 0], [40.0, 1, -1]], dtype=torch.float64)
    features = data.preprocessing()(raw)
    encoded = data._encoder.transform(
        __import__("pandas").DataFrame(
            {"length": [52.5, None, 40.0], "colour": ["red", "blue", "pink"], "width": [3, 3, 1]}
        )
    )
    torch.testing.assert_close(features, torch.tensor(encoded, dtype=torch.float32))
    torch.testing.assert_close(loaded(raw), module.eval()(features))
    restored = data.preprocessing().inverse(features)
    torch.testing.assert_close(restored, raw, equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_guide_reads_a_table_as_predict_does(run_folder):
    """Columns of both kinds, with missing values of both, a code for them, a decimal comma and a new category."""
    colours = ["red", "green", None, "blue"]
    lengths = [-999 if row % 7 == 3 else row * 1.5 for row in range(60)]
    trees = pd.DataFrame({"colour": (colours * 15), "length": lengths, "wet": [row % 3 == 0 for row in range(60)]})
    trees["zone"] = np.arange(60) // 2 % 3
    new = trees.head(8).assign(colour=["pink", *colours, *colours[:3]])
    trees["kind"] = ["oak", "ash"] * 30
    for name, table in (("trees.csv", trees), ("new_trees.csv", new)):
        table.to_csv(name, index=False, sep=";", decimal=",")
    csv = {"decimal": ",", "missing": "-999"}
    data = TabularDataModule("trees.csv", "kind", categorical="zone", csv=csv, predict_path="new_trees.csv")
    with pytest.warns(UserWarning, match="holds pink"):
        data.setup()
    model, export = MoEClassifier(), Export("onnx", compare=False, preprocess="datamodule", postprocess="probabilities")
    fit(model, [export], run_folder, data)
    expected = L.Trainer(logger=False, accelerator="cpu", enable_progress_bar=False).predict(model, data)
    session = pytest.importorskip("onnxruntime").InferenceSession(export.exported.path)
    about = json.loads(session.get_modelmeta().custom_metadata_map["lightning_accel.json"])
    page = (Path(__file__).parents[3] / "docs/guides/smaller.md").read_text()
    (code,) = re.findall(r"```python tested_by=tests/callbacks/deployment/test_export.py\n(.*?)```", page, re.DOTALL)
    exec(code.replace('"new_trees.csv"', '"new_trees.csv", sep=";"'), scope := {"about": about, "np": np})
    (probabilities,) = session.run(None, {session.get_inputs()[0].name: scope["rows"]})
    np.testing.assert_allclose(probabilities, expected[0]["probabilities"].numpy(), atol=1e-5)


class MakesResult(L.Callback):
    """Leaves what Quantization leaves, in ``on_fit_end``."""

    result = None

    def __init__(self, onnx=False):
        self.onnx = onnx

    def on_fit_end(self, trainer, pl_module):
        net = pl_module.net.eval()
        rounded = nn.Sequential(*net)
        x = torch.randn(4, 6)
        program = torch.export.export(rounded, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=1)},))
        content = None
        if self.onnx:
            made = torch.onnx.export(program, dynamo=True, input_names=["input__0"], verbose=False)
            content = made.model_proto.SerializeToString()
        self.result = SimpleNamespace(
            name="int8 planted", run=rounded, program=None if self.onnx else program, onnx=content, deployed="net",
            left_float={"0": "planted reason"}, device="cpu",
        )  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("onnx", [False, True])
def test_what_quantization_left_is_exported_whatever_the_order(onnx, tmp_path):
    module, callback, before = Own(), Export(compare=False), MakesResult(onnx)
    trainer = fit(module, [callback, before], tmp_path)
    assert trainer.callbacks.index(callback) > trainer.callbacks.index(before)
    assert callback.exported.format == ("onnx" if onnx else "pt2")
    assert callback.report.rows[1].name == f"int8 planted, {callback.exported.format} file"
    assert callback.report.layers[0].note == "planted reason"
    x = ROWS.tensors[0]
    torch.testing.assert_close(load_compressed(callback.exported.path)(x), module.eval().net(x))


@pytest.mark.slow
def test_what_cannot_work_is_refused_before_training(tmp_path):
    class Blind(Own):
        validation_step = L.LightningModule.validation_step

    with pytest.raises(TypeError, match=r"Export needs a validation_step of Blind"):
        fit(Blind(), [Export()], tmp_path, DataLoader(ROWS, 5))
    with pytest.raises(TypeError, match=r"module must be the name of a submodule; got \['net'\]"):
        fit(Own(), [Export(module=["net"])], tmp_path)
    with pytest.raises(ValueError, match=r"Own has no submodule 'nett'; it has: net"):
        fit(Own(), [Export(module="nett")], tmp_path)
    with pytest.raises(ValueError, match=r"'onnx' must end in \.onnx; got .*model\.pt2"):
        fit(Own(), [Export("onnx", "model.pt2")], tmp_path)
    with pytest.raises(ValueError, match=r"two Export callbacks write 'model' as onnx; give one another filename"):
        fit(Own(), [Export("onnx"), Export("onnx")], tmp_path)
    with pytest.raises(TypeError, match=r"preprocess='datamodule' needs a datamodule with a method preprocessing"):
        fit(Own(), [Export(preprocess="datamodule")], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"Export cannot write to .*file"):
        fit(Own(), [Export(filename=str(tmp_path / "file" / "model"))], tmp_path)
    with pytest.raises(ValueError, match="format must be one of auto, pt2, onnx; got 'tflite'"):
        Export("tflite")
    with pytest.raises(TypeError, match=r"a Linear, needs a method inverse"):
        Export(preprocess=nn.Linear(2, 2))
    with pytest.raises(ValueError, match="postprocess must be"):
        Export(postprocess="softmax")


class Draws(Own):
    def __init__(self):
        super().__init__()
        self.net.append(Noise())


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch, through Lightning
def test_a_model_that_its_file_does_not_follow_leaves_no_file(tmp_path):
    module, callback = Draws(), Export(compare=False)
    with pytest.warns(UserWarning, match=r"wrote no file: .*model\.pt2 was not written: its output 'output' differs"):
        trainer = fit(module, [callback], tmp_path)
    assert trainer.state.finished
    assert callback.exported is callback.report is None
    assert not list(tmp_path.glob("*.pt2"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch, through Lightning
def test_a_report_that_fails_leaves_the_file(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(Export, "_measure", fails)
    callback = Export()
    with pytest.warns(UserWarning, match=r"wrote .*model.pt2, but made no report of it: OSError: No space left"):
        trainer = fit(Own(), [callback], tmp_path)
    assert trainer.state.finished
    assert callback.exported.path.stat().st_size == callback.exported.file_bytes


class Mixes(Own):
    """Takes which row reads which, as dense networks of graphs do."""

    def __init__(self):
        super().__init__()
        self.net = Neighbours()

    def training_step(self, batch, batch_idx):
        return self.net(*batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx), batch_size=7)


class Neighbours(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)

    def forward(self, x, adjacency):
        return adjacency @ super().forward(x)


class Graphs(L.LightningDataModule):
    def __init__(self, graph):
        super().__init__()
        self.graph = graph

    def train_dataloader(self):
        return DataLoader([self.graph], batch_size=None)

    val_dataloader = train_dataloader


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch, through Lightning
def test_what_has_no_single_rows_is_reported_and_told_of(tmp_path, caplog):
    graph = torch.randn(7, 3), torch.rand(7, 7)
    callback = Export(compare=False)
    with caplog.at_level("INFO"):
        fit(Mixes(), [callback], tmp_path, Graphs(graph))
    assert [(layer.name, layer.parameters) for layer in callback.report.layers] == [("", 8)]
    assert list(callback.report.rows[0].latencies) == [7]
    assert "export: measures 2 forms at batch 7" in caplog.text


@dataclass
class Outputs(OrderedDict):
    """Is a dict and a dataclass, as the outputs of transformers are."""

    loss: Any = None
    logits: Any = None
    cache: Any = None

    def __post_init__(self):
        for field in fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


class Tagger(nn.Module):
    """Takes tokens, a mask and labels, which only the loss needs, and gives a cache besides."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 6), nn.Linear(6, 4)

    def forward(self, tokens, mask=None, labels=None):
        logits = self.head(self.table(tokens) * mask[..., None])
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Outputs(loss, logits, object())


class Tagging(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Tagger()

    def forward(self, **batch):
        return self.model(**batch)

    def training_step(self, batch, batch_idx):
        return self(**batch).loss * torch.rand(())

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self(**batch).loss)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def tagged(rows):
    tokens = torch.arange(rows * 5).view(rows, 5)
    mask = torch.ones(rows, 5).tril(2)
    return [{"tokens": one % 9, "mask": other, "labels": one % 4} for one, other in zip(tokens, mask, strict=True)]


class Shuffled(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(tagged(12), 3, shuffle=True)

    def val_dataloader(self):
        return DataLoader(tagged(6), 4)


@pytest.mark.slow
def test_outputs_with_attributes_and_batches_by_name(tmp_path):
    """And training is what it is without the callback."""
    weights = []
    for callbacks in ([], [callback := Export(compare=False)]):
        torch.manual_seed(1)
        module = Tagging()
        fit(module, callbacks, tmp_path, Shuffled())
        weights.append(module.state_dict())
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    loaded = load_compressed(callback.exported.path)
    assert (callback.exported.outputs, callback.exported.unused) == (["logits"], ["labels"])
    assert [one["name"] for one in loaded.metadata["inputs"]] == ["tokens", "mask"]
    assert [row.metrics.keys() for row in callback.report.rows] == [{"val/loss"}, {"val/loss"}]
    module.eval()
    longer = {"tokens": torch.arange(14).view(2, 7) % 9, "mask": torch.ones(2, 7)}
    out = loaded(**longer)
    torch.testing.assert_close(out.logits, module(**longer).logits)
    assert out[0] is out["logits"]
    assert out.loss is None
    torch.testing.assert_close(loaded(**longer, labels=torch.zeros(2, 7).long())[0], out.logits)


class Chooses(Own):
    """Branches on a value, as code for graphs does."""

    def forward(self, x):
        return self.net(x) if x.sum().item() > 0 else self.net(-x)

    def training_step(self, batch, batch_idx):
        raise AssertionError("training has begun")

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self(batch[0]).sum())


@pytest.mark.slow
def test_what_cannot_be_traced_is_refused_before_training(tmp_path):
    hint = r"Export would fail at the end of the run: Chooses .*depends on values.*Export\(module='net'\) would"
    with pytest.raises(ExportError, match=hint):
        fit(Chooses(), [Export()], tmp_path)


class Rows(L.LightningDataModule):
    def __init__(self, batch_size, drop_last=False):
        super().__init__()
        self.loader = DataLoader(ROWS, batch_size, drop_last=drop_last)

    def train_dataloader(self):
        return self.loader

    val_dataloader = train_dataloader


class Pools(Own):
    """Takes the number of groups beside the group of each row, as code for graphs does."""

    def forward(self, x, group, num_groups):
        return self.net(x.new_zeros(num_groups, x.shape[1]).index_add(0, group, x))

    def training_step(self, batch, batch_idx):
        raise AssertionError("training has begun")

    def validation_step(self, batch, batch_idx):
        x = batch[0]
        self.log("val/loss", self(x, torch.arange(len(x)), len(x)).sum())


def test_numbers_that_differ_between_calls_are_refused_or_told_of_before_training(tmp_path):
    data = Rows(8)
    with pytest.raises(ExportError, match=r"num_groups is 8 and 4 in its calls, and a file holds .* as a constant"):
        fit(Pools(), [Export()], tmp_path)
    with pytest.raises(ValueError, match="backend='pt2e' needs a graph of Pools, and num_groups is 8 and 4 in"):
        fit(Pools(), [Quantization(backend="pt2e")], tmp_path, data)
    with (
        pytest.warns(UserWarning, match="no form of Pools for ONNX Runtime or PT2E: num_groups is 8 and 4"),
        pytest.raises(AssertionError, match="training has begun"),
    ):
        fit(Pools(), [Quantization()], tmp_path, data)


class Late(Own):
    """Passes a number that differs from the third batch on."""

    def forward(self, x, factor, scale=None, return_half=False, **options):
        return factor * self.net(x) * (scale or 3)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0], 1), batch[1])

    def validation_step(self, batch, batch_idx):
        scores = self(batch[0], 1 if batch_idx < 2 else 2, scale=2, return_half=True, sizes={"of_all": [5]})
        self.log("val/loss", scores.sum())


@pytest.mark.slow
def test_a_file_that_fails_in_validation_is_told_and_takes_no_default_of_its_own(tmp_path):
    callback = Export(filename="late", compare=False)
    with (
        pytest.warns(UserWarning, match=r"will hold factor=1, scale=2, sizes\.of_all\.0=5 as a constant, for all"),
        pytest.warns(UserWarning, match=r"late\.pt2 fails in validation: ValueError: .* with factor=1, which is fixed"),
    ):
        fit(Late(), [callback], tmp_path)
    file = load_compressed(callback.exported.path)
    given = {"scale": 2, "sizes": {"of_all": [5]}}
    assert file(torch.zeros(2, 6), 1, **given).shape == (2, 3)
    with pytest.raises(TypeError, match=r"was exported with factor=1, which forward requires or has another default"):
        file(torch.zeros(2, 6), **given)
    for name in given:
        with pytest.raises(TypeError, match=rf"was exported with {name}.*=\d, which forward requires or has another"):
            file(torch.zeros(2, 6), 1, **{key: one for key, one in given.items() if key != name})


class Fixed(Own):
    """Takes batches of eight rows alone."""

    def forward(self, x):
        return self.net(x).view(8, -1)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self(batch[0]).sum())


@pytest.mark.slow
def test_batches_of_one_size_are_exported_where_loaders_give_no_other(tmp_path):
    callback = Export(compare=False)
    fit(Fixed(), [callback], tmp_path, Rows(8, drop_last=True))
    assert load_compressed(callback.exported.path)(torch.zeros(8, 6)).shape == (8, 3)


@pytest.mark.slow
def test_batches_of_one_size_are_quantized_where_loaders_give_no_other(tmp_path):
    callback = Quantization("static", "onnxruntime", seconds=0.02)
    fit(Fixed(), [callback], tmp_path, Rows(8, drop_last=True))
    assert callback.result.run(torch.zeros(8, 6)).shape == (8, 3)


def test_a_loader_without_a_batch_is_told_before_training(tmp_path):
    message = r"validation gives no batch: it has 20 samples in batches of 21 and drop_last=True\. Lower"
    with pytest.raises(ValueError, match=message):
        fit(Own(), [Export()], tmp_path, Rows(21, drop_last=True))


class Doubles(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.zeros(8, 6).double(), torch.arange(8) % 3), 4)

    val_dataloader = train_dataloader


def test_doubles_of_a_run_in_float64_are_told_before_training(tmp_path):
    with pytest.raises(
        TypeError, match=r"cannot export: files and .* float32, and the loaders yield float64 .* Let them"
    ):
        fit(Own(), [Export()], tmp_path, Doubles(), precision="64-true")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "b"], "name the 3 classes that Sequential has scores of; got 2, a, b"),
        (["a", "a", "b"], "name each class once"),
    ],
)
def test_class_names_are_as_many_as_classes(names, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        fit(Own(), [Export(class_names=names)], tmp_path)


@pytest.mark.parametrize("name", ["", " ", ".", "a/..", "a\0b", 250 * "a"])
def test_names_that_no_file_can_have_are_refused_at_once(name):
    with pytest.raises(ValueError, match="filename must be the path of a file, such as 'model'; got"):
        Export(filename=name)


def check_export(rank, folder, strategy):
    torch.manual_seed(0)
    module, callback = Own(), Export(compare=False)
    fit(module, [callback], folder, strategy=strategy, devices=2, use_distributed_sampler=False)
    state = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in module.state_dict().items()
    }
    if rank == 0:
        plain = Own()
        plain.load_state_dict(state)
        x = ROWS.tensors[0]
        torch.testing.assert_close(load_compressed(callback.exported.path)(x), plain.eval().net(x))
    return callback.exported is not None


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "accel_fsdp2"])
def test_the_first_process_writes_what_all_hold(strategy, tmp_path):
    assert run_ranks(check_export, str(tmp_path), strategy) == [True, False]


def check_failure(rank, folder):
    options = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = fit(Draws(), [Export(compare=False)], folder, **options)
    with pytest.raises(RuntimeError, match=r"Export would fail at the end of the run: Chooses") as caught:
        fit(Chooses(), [Export(compare=False)], folder, **options)
    return (
        trainer.state.finished,
        ["was not written" in str(one.message) for one in told].count(True),
        str(caught.value),
    )


@pytest.mark.slow
def test_a_failure_of_the_first_process_ends_no_fit_and_is_one_of_all_before_it(tmp_path):
    own, other = run_ranks(check_failure, str(tmp_path))
    assert own[:2] == (True, 1)
    assert other[:2] == (True, 0)
    assert other[2].startswith("the first process could not export: ExportError: ")
    assert own[2] in other[2]


@pytest.mark.weekly
@pytest.mark.slow
def test_compiled_and_bfloat16_stand_beside(tmp_path):
    callback = Export()
    fit(Own(), [callback], tmp_path)
    names = [row.name for row in callback.report.rows]
    assert names == ["fp32 eager", "bf16 eager", "fp32 compiled", "bf16 compiled", "pt2 file", "pt2 file, compiled"]
    assert all(row.metrics and row.latencies and not row.note for row in callback.report.rows)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch, where it traces bytecode
def test_a_graph_network_of_ours_takes_any_number_of_graphs(tmp_path):
    torch.manual_seed(0)
    ring = torch.tensor([[0, 1, 2], [1, 2, 0]])  # as many edges in each batch but the last
    graphs = [Data(torch.rand(3 + i % 4, 2), ring, y=torch.tensor([i % 2])) for i in range(12)]
    module = RelationalGNN(
        2, 2, level="graph", target_kind="classification", layers=ConvolutionLayers(conv="GINConv", dim=4, num_layers=2)
    )
    trainer, callback = L.Trainer(max_steps=1, default_root_dir=tmp_path, logger=False), Export("onnx", compare=False)
    trainer.callbacks += [callback]
    trainer.fit(module, GraphLoader(graphs, 4), GraphLoader(graphs, 5))
    file = load_compressed(callback.exported.path)
    for size in (1, 5, 12):
        batch = next(iter(GraphLoader(graphs, size)))
        with torch.no_grad():
            expected = module.eval()(batch.x, batch.edge_index, batch=batch.batch)
        assert len(expected) == size
        torch.testing.assert_close(file(batch.x, batch.edge_index, batch=batch.batch), expected, rtol=1e-4, atol=1e-4)
