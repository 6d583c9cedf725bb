"""What a run saves of its config is read again by the commands that come next, in any order of their options."""

import re

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_accel.cli.checkpoints import find_checkpoint, folder_of_configs
from lightning_accel.cli.command import _checkpoint_last
from lightning_accel.cli.errors import UsageError

TABLE = ["--data=TabularDataModule", "--data.target=kind", "--trainer.accelerator=cpu", "--trainer.logger=false"]


@pytest.fixture
def table(run_folder):
    rows = "".join(f"{i % 7},{i % 3},{('a', 'b')[i % 2]}\n" for i in range(60))
    (run_folder / "table.csv").write_text("x,y,kind\n" + rows)
    return "--data.path=table.csv"


@pytest.mark.parametrize("given", [["--ckpt_path", "x"], ["--ckpt_path=x"]])
def test_a_config_does_not_take_the_checkpoint_away(given):
    """Its ``ckpt_path: null`` came after the option, and an untrained model was run."""
    assert _checkpoint_last(["test", *given, "--config", "c.yaml"]) == ["test", "--config", "c.yaml", *given]
    assert _checkpoint_last(["test", "--ckpt_path"]) == ["test", "--ckpt_path"]


@pytest.mark.slow
@pytest.mark.parametrize("first", [["--ckpt_path=missing.ckpt"], []])
def test_the_checkpoint_counts_in_any_order(command, table, first):
    shown = command("fit", "--model=MoEClassifier", *TABLE, table, "--print_config")
    with open("saved.yaml", "w") as file:
        file.write(shown.out)
    last = [] if first else ["--ckpt_path=missing.ckpt"]
    assert "no checkpoint missing.ckpt" in command("test", *first, "--config=saved.yaml", *last).err


@pytest.mark.sampled(default=1)
@pytest.mark.parametrize(
    "model",
    [
        "Classifier",
        "DeepBeliefNetwork",
        "MoEClassifier",
        "MoELanguageModel",
        "MoERegressor",
        "RelationalGNN",
        "SequenceModel",
    ],
)
def test_default_options_are_written_and_read(command, table, model):
    shown = command("fit", f"--model={model}", *TABLE, table, "--print_config")
    assert shown.status == 0, shown.err
    assert "Unable to serialize" not in shown.out
    with open("saved.yaml", "w") as file:
        file.write(shown.out)
    again = command("fit", "--config=saved.yaml", "--print_config")
    assert again.status == 0, again.err
    assert yaml.safe_load(again.out) == yaml.safe_load(shown.out)


class TestRunFolders:
    @pytest.fixture
    def trainer(self, run_folder):
        return L.Trainer(logger=CSVLogger("runs", "x"), accelerator="cpu")

    def test_a_config_in_the_folder_of_a_run_means_that_run(self, trainer, run_folder):
        for number in (1, 9):
            path = run_folder / f"runs/x/version_{number}/checkpoints/a.ckpt"
            path.parent.mkdir(parents=True)
            torch.save({"state_dict": {}}, path)
        folder = folder_of_configs(["shipped.yaml", "runs/x/version_1/config.yaml"], trainer)
        assert find_checkpoint(trainer, nn.Linear(1, 1), "last", None, folder)[0].endswith(
            "version_1/checkpoints/a.ckpt"
        )
        assert folder_of_configs(["shipped.yaml"], trainer) is None
        assert find_checkpoint(trainer, nn.Linear(1, 1), "last")[0].endswith("version_9/checkpoints/a.ckpt")

    def test_a_run_without_a_checkpoint_is_named(self, trainer, run_folder):
        folder = folder_of_configs(["runs/x/version_2/config.yaml"], trainer)
        with pytest.raises(
            UsageError, match=r"best: no checkpoint of Linear under \S*version_2/checkpoints. The config lies"
        ):
            find_checkpoint(trainer, nn.Linear(1, 1), "best", None, folder)

    def test_checkpoints_elsewhere_are_not_missed(self, run_folder):
        trainer = L.Trainer(logger=CSVLogger("runs", "x"), callbacks=[ModelCheckpoint("kept")], accelerator="cpu")
        assert folder_of_configs(["runs/x/version_2/config.yaml"], trainer) is None


@pytest.mark.slow
def test_last_is_that_of_the_configs_run(command, table):
    fit = [
        "fit",
        *TABLE[:3],
        "--trainer.max_epochs=1",
        table,
        "--trainer.logger=CSVLogger",
        "--trainer.logger.save_dir=.",
    ]
    for dim in (8, 16):
        assert command(*fit, "--model=MoEClassifier", f"--model.experts.hidden_dim={dim}").status == 0
    for version in (0, 1):
        config = f"lightning_logs/version_{version}/config_fit.yaml"
        tested = command("test", f"--config={config}", "--ckpt_path=last")
        assert tested.status == 0, tested.err
        assert re.search(rf"last checkpoint of the config's run: \S*version_{version}/", tested.log)
    without = command("test", "--config=lightning_logs/version_2/config_test.yaml", "--ckpt_path=last")
    assert "version_2/checkpoints. The config lies in the folder of this run" in without.err
