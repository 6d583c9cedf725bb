"""The projects of benchmarks/foreign, which know nothing of this package, train."""

import importlib
import math
from importlib.util import find_spec
from pathlib import Path

import lightning as L
import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks/foreign"
PROJECTS = sorted(path.stem for path in FOLDER.glob("*.py"))
CONFIGS = sorted(FOLDER.glob("*.yaml"))
OF_TRANSFORMERS = "bert", "gpt"
LONG = {
    "augmented_digits",
    "bert",
    "diffusion",
    "gnn",
    "gpt",
    "resnet",
    "unet",
    "vit",
}  # more than a second of CPU time
FALLS = {"gan": "d_loss"}  # the generator's own loss rises as the discriminator learns

pytestmark = pytest.mark.filterwarnings("ignore")  # of projects as their users wrote them


def projects(long):
    return [pytest.param(name, marks=[pytest.mark.slow] if name in long else []) for name in PROJECTS]


class Losses(L.Callback):
    """Record what a project logs as its training loss."""

    def __init__(self, name):
        self.name = name
        self.values = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        metrics = trainer.callback_metrics
        name = self.name if self.name in metrics else "train_loss"
        self.values.append(float(metrics[name]))


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Trains a project, imported as its own folder would be."""
    monkeypatch.syspath_prepend(FOLDER)

    def run(name, **options):
        if name in OF_TRANSFORMERS and find_spec("transformers") is None:
            pytest.skip("needs transformers")
        L.seed_everything(0)
        losses = Losses(FALLS.get(name))
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        options = quiet | {"accelerator": "cpu", "callbacks": [losses], "default_root_dir": tmp_path} | options
        trainer, module, data = importlib.import_module(name).make(**options)
        trainer.fit(module, data)
        return losses.values

    return run


def test_the_set_is_whole():
    assert len(PROJECTS) >= 12
    assert len(CONFIGS) >= 3
    assert not [name for name in PROJECTS if "lightning_accel" in (FOLDER / f"{name}.py").read_text()]


@pytest.mark.sampled(default=2, slow=4)
@pytest.mark.parametrize("name", projects(LONG))
def test_two_steps_run(train, name):
    values = train(name, fast_dev_run=2)
    assert len(values) == (1 if name == "gan" else 2)  # the Trainer counts updates, and the GAN has two optimizers
    assert all(math.isfinite(value) for value in values)


@pytest.mark.slow
@pytest.mark.weekly
@pytest.mark.parametrize("name", PROJECTS)
def test_losses_fall(train, name):
    values = train(name, max_steps=40, limit_val_batches=0, enable_checkpointing=False)
    assert sum(values[-5:]) < 0.85 * sum(values[:5])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gan", "vae"])
def test_equal_seeds_give_equal_losses(train, name):
    options = {"max_steps": 3, "limit_val_batches": 0, "enable_checkpointing": False}
    assert train(name, **options) == train(name, **options)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_are_read(command, monkeypatch, path):
    if path.stem in OF_TRANSFORMERS and find_spec("transformers") is None:
        pytest.skip("needs transformers")
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.chdir(FOLDER)
    result = command("fit", "--config", path, "--print_config")
    assert result.status == 0, result.err


@pytest.mark.sampled(slow=3)
@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_run(command, monkeypatch, tmp_path, path):
    if path.stem in OF_TRANSFORMERS and find_spec("transformers") is None:
        pytest.skip("needs transformers")
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.chdir(FOLDER)
    options = "--trainer.fast_dev_run=true", "--trainer.accelerator=cpu", f"--trainer.default_root_dir={tmp_path}"
    result = command("fit", "--config", path, *options)
    assert result.status == 0, result.err
