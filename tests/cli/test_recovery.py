"""fit --ckpt_path auto, in one process; restarts by torchrun are in tests/test_launch.py."""

import re
import shutil
from pathlib import Path

import lightning as L
import pytest
import torch

import tests.store  # noqa: F401
from lightning_accel import Classifier
from lightning_accel.cli.checkpoints import _is_one_machine
from lightning_accel.compress import load_pruned
from lightning_accel.strategies.checkpoints.reading import find_damage
from tests.cli.test_runs import OWN, QUIET
from tests.strategies.checkpoints.test_reading import (
    beside_the_parts,
    damage,
    in_a_plain_value,
    in_the_table,
    without_a_bit,
    zeroed,
)

AUTO = ["fit", *QUIET, *OWN, "--ckpt_path=auto"]


@pytest.mark.slow
@pytest.mark.usefixtures("own")
def test_begins_goes_on_and_stays_in_one_folder(command, run_folder):
    first = command(*AUTO, "--trainer.max_epochs=2")
    assert first.status == 0, first.err
    assert "no checkpoint yet, a new run begins" in first.log
    checkpoints = run_folder / "lightning_logs/version_0/checkpoints"
    (checkpoints / "epoch=9-step=999.ckpt").write_bytes(b"PK half of one")
    with pytest.warns(UserWarning, match=r"epoch=9-step=999.ckpt is passed over"):
        second = command(*AUTO, "--trainer.max_epochs=4")
    assert second.status == 0, second.err
    assert "auto: going on from lightning_logs/version_0/checkpoints/epoch=1-step=8.ckpt" in second.log.replace(
        f"{run_folder}/", ""
    )
    assert (checkpoints / "epoch=3-step=16.ckpt").is_file()
    assert [path.name for path in (run_folder / "lightning_logs").iterdir()] == ["version_0"]


@pytest.mark.slow
@pytest.mark.usefixtures("own")
def test_checkpoints_in_a_store_are_written_in_the_background_and_gone_on_from(command, run_folder):
    store = f"store://{run_folder}/bucket"
    settings = f"dirpath: '{store}/run', monitor: loss, save_last: true"
    keeper = f"{{class_path: ModelCheckpoint, init_args: {{{settings}}}}}"
    options = [f"--trainer.callbacks+={keeper}", "--trainer.plugins+=BackgroundCheckpointIO"]
    options += ["--trainer.plugins.local_folder", "copies"]
    for epochs, words in (
        (2, "no checkpoint yet, a new run begins"),
        (4, f"auto: going on from {store}/run/last.ckpt"),
    ):
        result = command(*AUTO, *options, f"--trainer.max_epochs={epochs}")
        assert result.status == 0, result.err
        assert words in result.log
    assert {path.name for path in (run_folder / "bucket/run").iterdir()} == {"last.ckpt", "epoch=3-step=16.ckpt"}
    assert len([*(run_folder / "copies").glob("*/[!.]*")]) == 2
    shutil.rmtree(run_folder / "copies")
    for which, file in (("best", "epoch=3-step=16.ckpt"), ("last", "last.ckpt")):
        result = command("test", *QUIET, *OWN, *options, f"--ckpt_path={which}")
        assert result.status == 0, result.err
        assert f"{store}/run/{file}" in result.log
    refused = command(*AUTO, f"--trainer.default_root_dir={store}")
    assert refused.status == 2
    assert f"auto looks for the run's folder on a disk; got --trainer.default_root_dir {store}" in refused.err


@pytest.mark.slow
@pytest.mark.usefixtures("own")
def test_goes_on_with_the_newest_fit_whatever_ran_since(command, run_folder):
    """Each logger goes back to its folder of that run, though they number theirs apart."""
    (run_folder / "b/version_4").mkdir(parents=True)
    loggers = [
        "--trainer.logger+={class_path: TensorBoardLogger, init_args: {save_dir: ., name: a, sub_dir: within}}",
        "--trainer.logger+={class_path: CSVLogger, init_args: {save_dir: ., name: b}}",
    ]
    wanted = [*QUIET, *OWN, *loggers]

    def folders(name, pattern):
        return sorted(path.parent.name for path in (run_folder / name).glob(pattern))

    first = command("fit", *wanted, "--trainer.max_epochs=1", "--ckpt_path=auto")
    assert first.status == 0, first.err
    for other in ("test", "validate", "predict"):
        result = command(other, *wanted, "--ckpt_path=last")
        assert result.status == 0, result.err
        assert re.search(r"last checkpoint of the newest run\S* \S*a/version_0/checkpoints/epoch=0-step=4", result.log)
    for _ in range(2):  # a folder that says of no command may be anybody's; one that says fit comes first
        second = command("fit", *wanted, "--trainer.max_epochs=2", "--ckpt_path=auto")
        assert second.status == 0, second.err
        assert re.search(r"auto: going on from \S*a/version_0/checkpoints/epoch=[01]-step=[48].ckpt", second.log)
        (run_folder / "a/version_9").mkdir(exist_ok=True)
    assert folders("a", "*/checkpoints") == ["version_0"]
    assert folders("a", "*/within/config_fit.yaml") == folders("a", "*/within/config_fit_2.yaml") == ["within"]
    assert folders("b", "*/metrics_1.csv") == folders("b", "*/config_fit.yaml") == ["version_4"]


@pytest.mark.slow
@pytest.mark.usefixtures("own")
def test_begins_anew_where_only_others_ran(command, run_folder):
    assert command("test", *QUIET, *OWN).status == 0
    result = command(*AUTO, "--trainer.max_epochs=1")
    assert (result.status, "no checkpoint yet, a new run begins" in result.log) == (0, True)
    folders = [path.parent.name for path in (run_folder / "lightning_logs").glob("*/config_fit.yaml")]
    assert folders == ["version_1"]


@pytest.mark.usefixtures("own")
def test_auto_is_for_fit(command):
    result = command("test", *QUIET, *OWN, "--ckpt_path=auto")
    assert result.status == 2
    assert "--ckpt_path auto is for fit; give test a file, best or last" in result.err


PRUNED = ["--model=Classifier", "--model.num_features=1", "--model.channels=[6, 9]", "--model.hidden_dims=[5]"]
PRUNING = [
    "--trainer.callbacks+={class_path: Pruning, init_args: {target: 0.5, structure: channel, begin: 1, end: 3}}",
    "--trainer.callbacks+={class_path: Distillation, init_args: {teacher: dense}}",  # a copy of the whole model
    "--trainer.callbacks+=ExactResume",
    "--trainer.callbacks+={class_path: ModelCheckpoint, init_args: {filename: kept}}",
    "--trainer.limit_train_batches=2",
    "--trainer.limit_val_batches=1",
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # the test has no Distillation
@pytest.mark.weekly
def test_a_run_whose_channels_are_removed_goes_on_as_if_never_stopped(command, run_folder):
    fit = ["fit", *QUIET, "--data=DigitsDataModule", "--data.num_workers=0", *PRUNING]
    kept = Path("lightning_logs/version_0/checkpoints/kept.ckpt")

    def weights(root, *runs):
        for model, more in runs:
            result = command(*fit, *model, f"--trainer.default_root_dir={root}", *more)
            assert result.status == 0, result.err
        return torch.load(run_folder / root / kept, weights_only=True)["state_dict"]

    whole = weights("whole", (PRUNED, ["--trainer.max_epochs=4"]))
    first = (PRUNED, ["--trainer.max_epochs=2", "--ckpt_path=auto"])
    resumed = weights("auto", first, (PRUNED, ["--trainer.max_epochs=4", "--ckpt_path=auto"]))
    assert whole["network.0.weight"].shape == (3, 1, 3, 3)
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name
    with pytest.raises(RuntimeError, match=r"load_pruned\(model, path\)"):
        Classifier.load_from_checkpoint(run_folder / "auto" / kept, weights_only=True)
    settings = {"num_features": 1, "num_classes": 10, "channels": [6, 9], "hidden_dims": [5]}
    loaded = load_pruned(Classifier(**settings), run_folder / "auto" / kept)
    assert loaded.network[0].weight.shape == (3, 1, 3, 3)
    with pytest.raises(RuntimeError) as error:
        Classifier(**{**settings, "hidden_dims": [4]}).load_state_dict(Classifier(**settings).state_dict())
    assert "load_pruned" not in str(error.value)  # nothing is smaller there
    file = f"--ckpt_path={run_folder / 'auto' / kept}"
    other = command(*fit, *PRUNED, "--model.channels=[7, 9]", file, "--trainer.max_epochs=5")
    assert (other.status, "channels: [6, 9] in the checkpoint, [7, 9] in the model" in other.err) == (2, True)
    result = command(*fit, *PRUNED, file, "--trainer.max_epochs=5")
    assert result.status == 0, result.err
    test = ["test", *QUIET, "--data=DigitsDataModule", "--data.num_workers=0", *PRUNED, file]
    pruned = command(*test)
    advice = (
        "Add the callback that did it, --trainer.callbacks+=Pruning --trainer.callbacks.structure=channel, or load it"
    )
    assert (pruned.status, advice in pruned.err) == (2, True)
    result = command(*test, "--trainer.callbacks+=Pruning", "--trainer.callbacks.structure=channel")
    assert result.status == 0, result.err


@pytest.fixture
def finished(command, own, run_folder):
    """The checkpoints folder of a run of two epochs: a file of the first, a newer ``last.ckpt``."""
    keeper = "--trainer.callbacks+={class_path: ModelCheckpoint, init_args: {save_top_k: -1, save_last: true}}"
    assert command(*AUTO, keeper, "--trainer.max_epochs=2").status == 0
    folder = run_folder / "lightning_logs/version_0/checkpoints"
    (folder / "epoch=1-step=8.ckpt").unlink()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param(zeroed, marks=pytest.mark.slow), without_a_bit])
def test_goes_on_from_the_newest_that_is_not_damaged(command, finished, how):
    last = finished / "last.ckpt"
    damage(last, how)
    named = command("fit" if how is zeroed else "test", *QUIET, *OWN, f"--ckpt_path={last}")
    assert named.status == 2
    assert re.search(r"last.ckpt is (damaged|not a whole).*another checkpoint", named.err), named.err
    assert "weights_only" not in named.err
    with pytest.warns(UserWarning, match="last.ckpt is passed over, since it is damaged"):
        result = command(*AUTO, "--trainer.max_epochs=3")
    assert result.status == 0, result.err
    assert re.search(r"auto: going on from \S*epoch=0-step=4.ckpt", result.log)
    assert find_damage(finished / "epoch=2-step=12.ckpt") == ""


@pytest.mark.slow
def test_a_sharded_folder_runs_no_code(command, finished, run_folder):
    marker, folder = run_folder / "MARKER", finished / "newest.ckpt"
    named = f"--ckpt_path={folder}"
    for hostile, *commands in (
        (in_the_table, ["fit", named], ["predict", "--ckpt_path=last"]),
        (in_a_plain_value, ["test", named], ["fit", "--ckpt_path=auto"]),
        (beside_the_parts, ["test", named, "--weights_only=true"], ["fit", "--ckpt_path=auto"]),
    ):
        hostile(folder, torch.nn.Linear(3, 1), marker)
        for arguments in commands:
            result = command(arguments[0], *QUIET, *OWN, *arguments[1:])
            assert (result.status, marker.exists()) == (2, False)
            assert re.search(r"newest.ckpt holds objects other than tensors .*mkdir", result.err), result.err
        shutil.rmtree(folder)


def test_copies_that_other_machines_do_not_have_are_no_places_to_go_on_from(monkeypatch):
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert _is_one_machine(trainer)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert _is_one_machine(trainer)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # the launcher's machines, of which the Trainer was not told
    assert not _is_one_machine(trainer)
