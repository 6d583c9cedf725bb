"""What a run saves of its config is read again by the commands that come next, in any order of their options."""

import pytest
import yaml

from lightning_accel.cli.command import _checkpoint_last

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


@pytest.mark.parametrize("first", [["--ckpt_path=missing.ckpt"], []])
def test_the_checkpoint_counts_in_any_order(command, table, first):
    shown = command("fit", "--model=MoEClassifier", *TABLE, table, "--print_config")
    with open("saved.yaml", "w") as file:
        file.write(shown.out)
    last = [] if first else ["--ckpt_path=missing.ckpt"]
    assert "no checkpoint missing.ckpt" in command("test", *first, "--config=saved.yaml", *last).err


@pytest.mark.parametrize(
    "model", ["Classifier", "DeepBeliefNetwork", "MoEClassifier", "MoELanguageModel", "RelationalGNN", "SequenceModel"]
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
