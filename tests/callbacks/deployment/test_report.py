"""What a report says is what the model is."""

import json
import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import Classifier, CompressionReport, DigitsDataModule, Pruning
from tests.compress.networks import Graphs, two_graphs
from tests.ranks import run_ranks


def fit(folder, *callbacks, model=None, data=None, **options):
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        enable_checkpointing=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
        **quiet | {"max_epochs": 1} | options,
    )
    model = Classifier(hidden_dims=[12]) if model is None else model
    trainer.fit(model, DigitsDataModule(batch_size=256) if data is None else data)
    return trainer, model


@pytest.mark.slow
def test_channels_that_are_gone_are_reported_beside_the_model_of_the_start(tmp_path, capsys):
    seen = CompressionReport(compiled=False, seconds=0.02)
    _, model = fit(tmp_path, seen, Pruning(0.5, structure="channel", schedule="one_shot"))
    rows = {row.name: row for row in seen.report.rows}
    assert list(rows) == ["before training", "fp32 eager", "bf16 eager"]
    assert rows["before training"].parameters == 65 * 12 + 13 * 10
    assert rows["before training"].macs == 64 * 12 + 12 * 10
    assert not rows["before training"].metrics
    now = rows["fp32 eager"]
    assert (now.parameters, now.macs) == (65 * 6 + 7 * 10, 64 * 6 + 6 * 10)
    assert set(now.latencies) == {1, 180}
    assert rows["bf16 eager"].file_bytes < now.file_bytes < rows["before training"].file_bytes
    images, labels = DigitsDataModule(), None
    images.setup()
    images, labels = images.val_rows[:]
    assert now.metrics["val/accuracy"] == pytest.approx(model.eval()(images).argmax(1).eq(labels).float().mean().item())
    assert [layer.parameters for layer in seen.report.layers] == [65 * 6, 7 * 10]
    assert "before training" in capsys.readouterr().out
    assert json.loads((tmp_path / "figures/compression.json").read_text())["rows"][1]["macs"] == now.macs
    assert (tmp_path / "figures/compression.png").stat().st_size > 1000


@pytest.mark.slow
def test_zeros_are_counted_and_shapes_are_the_same(tmp_path):
    seen = CompressionReport(compiled=False, seconds=0.02)
    fit(tmp_path, seen, Pruning(0.5, schedule="one_shot", scope="layer"))
    assert [row.name for row in seen.report.rows] == ["fp32 eager", "bf16 eager"]
    assert seen.report.rows[0].nonzero == 32 * 12 + 12 + 6 * 10 + 10


class WholeBatches(nn.Linear):
    """Has no kernel of bfloat16 for the last batch, as compilers may have none."""

    def forward(self, x):
        if x.dtype == torch.bfloat16 and len(x) == 3:
            raise RuntimeError("no kernel for 3 rows\nand a long trace")
        return super().forward(x)


class OfWholeBatches(BoringModel):
    def __init__(self):
        super().__init__()
        self.layer = WholeBatches(32, 2)

    def validation_step(self, batch, batch_idx):
        self.log("val/mean", self.layer(batch).mean())


def test_a_form_that_fails_in_validation_has_a_note(tmp_path):
    seen, loader = CompressionReport(compiled=False, seconds=0.02), DataLoader(RandomDataset(32, 11), 8)
    trainer = L.Trainer(max_steps=1, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[seen],
                        enable_checkpointing=False, enable_model_summary=False, default_root_dir=tmp_path)  # fmt: skip
    trainer.fit(OfWholeBatches(), loader, loader)
    eager, bfloat16 = seen.report.rows
    assert eager.metrics
    assert bfloat16.note == "fails in validation: RuntimeError: no kernel for 3 rows"
    assert bfloat16.status == "failed"


class OfNoLastBatch(OfWholeBatches):
    has_trained = False

    def on_train_end(self):
        self.has_trained = True

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        if self.has_trained and len(batch) == 3:
            raise RuntimeError("too few rows")


def test_a_model_that_fails_in_validation_has_no_report(tmp_path):
    seen, loader = CompressionReport(compiled=False, seconds=0.02), DataLoader(RandomDataset(32, 11), 8)
    trainer = L.Trainer(max_steps=1, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[seen],
                        enable_checkpointing=False, enable_model_summary=False, default_root_dir=tmp_path)  # fmt: skip
    with pytest.warns(UserWarning, match="CompressionReport failed: RuntimeError: too few rows"):
        trainer.fit(OfNoLastBatch(), loader, loader)
    assert seen.report is None


class OfGraphs(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = Graphs()

    def training_step(self, graphs, batch_idx):
        return nn.functional.cross_entropy(self.network(*graphs), torch.tensor([0, 1]))

    def validation_step(self, graphs, batch_idx):
        self.log("val/loss", self.training_step(graphs, batch_idx), batch_size=2)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_batches_of_graphs_are_measured_whole(tmp_path, caplog):
    seen = CompressionReport(compiled=False, seconds=0.02)
    loader = DataLoader([two_graphs()], None)
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[seen],
                        enable_checkpointing=False, enable_model_summary=False, default_root_dir=tmp_path)  # fmt: skip
    trainer.fit(OfGraphs(), loader, loader)
    rows = {row.name: row for row in seen.report.rows}
    assert list(rows["fp32 eager"].latencies) == [7]
    assert rows["fp32 eager"].macs == 6
    assert rows["fp32 eager"].metrics["val/loss"] > 0
    told = [one.getMessage() for one in caplog.records if one.name.startswith("lightning.pytorch")]
    assert any(line.startswith("compression report: measures 2 forms at batch 7, 0.02 s each") for line in told)


@pytest.mark.weekly
@pytest.mark.slow
def test_compiled_forms_are_measured_too(tmp_path):
    seen = CompressionReport(seconds=0.02)
    fit(tmp_path, seen)
    rows = {row.name: row for row in seen.report.rows}
    assert rows["fp32 compiled"].metrics == pytest.approx(rows["fp32 eager"].metrics, rel=1e-4)
    assert rows["bf16 compiled"].latencies.keys() == rows["fp32 eager"].latencies.keys()
    assert rows["bf16 compiled"].file_bytes is None


def check_one_process_reports(rank, folder):
    seen = CompressionReport(compiled=False, seconds=0.02)
    fit(folder, seen, strategy="accel_fsdp2", devices=2)
    return None if seen.report is None else seen.report.rows[0].parameters


@pytest.mark.slow
def test_one_process_reports_what_is_split(tmp_path):
    assert run_ranks(check_one_process_reports, tmp_path) == [65 * 12 + 13 * 10, None]


class Failing(Classifier):
    has_trained = False

    def on_train_end(self):
        self.has_trained = True

    def validation_step(self, batch, batch_idx):
        self(batch[0])
        if self.has_trained:
            raise OSError("no more")


class Calls(Classifier):
    """Its validation step has weights of its own, and calls no module."""

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", next(self.parameters()).sum())


def check_a_failure_ends_no_run(rank, folder):
    seen = CompressionReport(compiled=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(folder, seen, model=Failing(), strategy="ddp", devices=2)
    assert seen.report is None
    return [str(one.message) for one in caught if "CompressionReport" in str(one.message)]


@pytest.mark.slow
def test_a_failure_ends_no_run(tmp_path):
    found = run_ranks(check_a_failure_ends_no_run, tmp_path)
    assert found == [["CompressionReport failed: OSError: no more"], []]


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`:UserWarning")
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`:UserWarning")
def test_what_cannot_be_reported_is_refused(tmp_path):
    class Untested(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(64, 2)

        def training_step(self, batch, batch_idx):
            return self.net(batch[0]).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    with pytest.raises(TypeError, match="CompressionReport needs a validation_step of Untested"):
        fit(tmp_path, CompressionReport(), model=Untested())
    with pytest.raises(ValueError, match="validation_step of Calls calls no module, so what is to be deployed is not"):
        fit(tmp_path, CompressionReport(), model=Calls(), max_epochs=-1)
    rows = DataLoader(TensorDataset(torch.randn(6, 64), torch.arange(6)), 3)
    with pytest.raises(ValueError, match="CompressionReport measures on validation batches, and this run has none"):
        fit(tmp_path, CompressionReport(compiled=False), data=rows)
