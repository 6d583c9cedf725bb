from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_accel import Classifier, DigitsDataModule, MoEClassifier, MoERegressor, RelationalGNN
from lightning_accel.callbacks import RunReport
from lightning_accel.cli.next_commands import next_commands
from lightning_accel.compress import load_compressed

QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
DIGITS = ["--model=Classifier", "--model.hidden_dims=[4]", "--data=DigitsDataModule"]
FIT = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=2"]


@pytest.mark.slow  # it measures the file for seconds
def test_a_checkpoint_becomes_a_file(command, run_folder):
    assert command("fit", *QUIET, *DIGITS, *FIT).status == 0
    result = command(
        "export", *QUIET, *DIGITS, "--ckpt_path=best", "--output=model.pt2", "--compare=false", "--preprocess=true"
    )
    assert result.status == 0, result.err
    assert "pt2 file" in result.out
    assert "load_compressed" in result.log
    assert "which gives output; " in result.log
    (checkpoint,) = run_folder.glob("lightning_logs/version_0/checkpoints/*.ckpt")
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    data = DigitsDataModule()
    data.setup()
    images = data.val_rows.tensors[0]
    hidden = (images.flatten(1) @ state["network.1.weight"].T + state["network.1.bias"]).relu()
    expected = hidden @ state["network.3.weight"].T + state["network.3.bias"]
    loaded = load_compressed("model.pt2")
    torch.testing.assert_close(loaded(images * 16), expected)
    assert loaded.class_names == list("0123456789")
    assert loaded.metadata["metadata"]["step"] == 2
    assert (run_folder / "lightning_logs/version_1/config_export.yaml").exists()
    assert (run_folder / "lightning_logs/version_1/figures/export.png").exists()


@pytest.mark.slow
def test_the_model_of_the_checkpoint_is_exported_without_a_config(command, run_folder):
    assert command("fit", *QUIET, *DIGITS, *FIT).status == 0
    (checkpoint,) = run_folder.glob("lightning_logs/version_0/checkpoints/*.ckpt")
    to = "--compare=false", "--output=model.onnx"
    result = command("export", *QUIET, "--data=DigitsDataModule", "--ckpt_path", checkpoint, *to)
    assert result.status == 0, result.err
    assert (
        f"run it without lightning_accel by onnxruntime.InferenceSession('{run_folder / 'model.onnx'}')" in result.log
    )
    assert load_compressed(run_folder / "model.onnx")(torch.rand(2, 1, 8, 8)).shape == (2, 10)


OWN = '''
import lightning as L
import torch
from lightning_accel import Classifier

class Draws(Classifier):
    def forward(self, x):
        return super().forward(x) + torch.randn(len(x), 10)[:1]

class Removed(Classifier):
    """Has more units than a checkpoint in which some were removed."""

class Remover(L.Callback):
    def state_dict(self):
        return {"width": 4}

    def rebuild(self, model, state):
        model.network[1] = torch.nn.Linear(64, state["width"])
        model.network[3] = torch.nn.Linear(state["width"], 10)
'''


@pytest.fixture
def own(own):
    own.write_text(OWN)
    return own


@pytest.mark.slow
@pytest.mark.usefixtures("own")
def test_what_fails_is_one_message_and_no_file(command, run_folder):
    result = command("export", *QUIET, "--model=own_module.Draws", *DIGITS[1:], "--output=m.pt2", "--compare=false")
    assert (result.status, result.out.count("Traceback")) == (1, 0)
    assert "lightning-accel: error: " in result.err
    assert "m.pt2 was not written" in result.err or "cannot be exported as pt2" in result.err
    assert not (run_folder / "m.pt2").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("own")
def test_a_checkpoint_of_a_smaller_model_is_rebuilt_first(command, run_folder):
    small = ["--model=Classifier", "--model.hidden_dims=[4]", "--data=DigitsDataModule"]
    large = ["--model=Classifier", "--model.hidden_dims=[9]", "--data=DigitsDataModule"]
    remover = "--trainer.callbacks=own_module.Remover"
    assert command("fit", *QUIET, *small, *FIT, remover).status == 0
    (checkpoint,) = run_folder.glob("lightning_logs/version_0/checkpoints/*.ckpt")
    options = ["--ckpt_path", checkpoint, "--output=m.pt2", "--compare=false"]
    assert "is 4x64 in the checkpoint, 9x64 in the model" in command("export", *QUIET, *large, *options).err
    result = command("export", *QUIET, *large, remover, *options)
    assert result.status == 0, result.err
    assert load_compressed("m.pt2")(torch.rand(3, 1, 8, 8)).shape == (3, 10)


@pytest.mark.slow
def test_options_that_cannot_work_are_refused_before_anything_is_made(command):
    error = command("export", *QUIET, *DIGITS, "--format=onnx", "--output=m.pt2").err
    assert "--output m.pt2: a file of --format onnx ends in .onnx" in error
    assert "format: expected 'pt2' or 'onnx'; got tflite" in command("export", *DIGITS, "--format=tflite").err
    assert "did you mean 'output'" in command("export", *DIGITS, "--outptu=m.pt2").err
    assert "export needs a model" in command("export", "--output=m.pt2").err


@pytest.mark.parametrize(
    ("kind", "has_graphs", "is_named"),
    [(Classifier, False, True), (RelationalGNN, False, False), (Classifier, True, False)],
)
def test_export_is_suggested_for_models_that_it_takes(kind, has_graphs, is_named, monkeypatch):
    """The shapes of a RelationalGNN depend on the values of its inputs, so that it is refused as a whole."""
    saver = SimpleNamespace(path=Path("config_fit.yaml"), config={})
    report = RunReport()
    report.has_graphs = has_graphs
    monkeypatch.setattr(
        "lightning_accel.cli.next_commands.callbacks_of", lambda _, kind: [report if kind is RunReport else saver]
    )
    trainer = SimpleNamespace(interrupted=False, enable_validation=True, datamodule=None)
    lines = next_commands(trainer, kind(), "a.ckpt")
    assert any(line.startswith("lightning-accel export") for line in lines) == is_named


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (MoEClassifier(), "--preprocess true --probabilities true"),
        (MoERegressor(), "--preprocess true"),
    ],
)
def test_the_suggested_export_takes_data_as_they_are(model, options, monkeypatch):
    saver = SimpleNamespace(path=Path("config_fit.yaml"), config={}, has_graphs=False)
    monkeypatch.setattr("lightning_accel.cli.next_commands.callbacks_of", lambda *_: [saver])
    trainer = SimpleNamespace(interrupted=False, enable_validation=True, datamodule=DigitsDataModule())
    (line,) = (line for line in next_commands(trainer, model, "a.ckpt") if "export" in line)
    assert line.endswith(f"--ckpt_path a.ckpt {options}")
