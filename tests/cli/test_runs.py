"""Command lines that work, start to end."""

import contextlib
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import lightning as L
import pandas as pd
import pytest
import torch
import yaml
from lightning_utilities.core.imports import package_available

import lightning_accel
from lightning_accel import DigitsDataModule, MoEClassifier
from lightning_accel.cli import help_imports
from lightning_accel.cli.command import AccelCLI, _require_long_enough
from lightning_accel.cli.errors import UsageError
from lightning_accel.models import Experts

QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
OWN = ["--model=own_module.OwnModule", "--model.width=3", "--data=own_module.OwnData", "--trainer.log_every_n_steps=2"]
SMALL = ["--model=MoEClassifier", "--model.dim=8", "--model.experts.hidden_dim=8", "--trainer.log_every_n_steps=1"]
DIGITS = [*SMALL, "--data=DigitsDataModule", "--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1"]


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def saved(path: Path) -> dict:
    return yaml.safe_load(path.read_text())


@pytest.mark.slow
@pytest.mark.usefixtures("own")
def test_somebody_elses_module_and_data_through_every_subcommand(command, run_folder):
    assert command("fit", *QUIET, *OWN, "--trainer.max_epochs=20").status == 0
    checkpoint = only(run_folder, "lightning_logs/version_0/checkpoints/*.ckpt")
    for name in ("validate", "test", "predict"):
        assert command(name, *QUIET, *OWN, "--ckpt_path", checkpoint).status == 0
    weight = torch.load(checkpoint, weights_only=True)["state_dict"]["layer.weight"]
    torch.testing.assert_close(weight, torch.tensor([[1.0, -2.0, 3.0]]), rtol=0, atol=0.1)
    configs = sorted(str(path.relative_to(run_folder)) for path in run_folder.rglob("config*.yaml"))
    assert configs == [
        f"lightning_logs/version_{i}/config_{name}.yaml"
        for i, name in enumerate(("fit", "validate", "test", "predict"))
    ]
    predictions = pd.read_csv(run_folder / "lightning_logs/version_3/predictions.csv")
    assert len(predictions) == 32


@pytest.mark.slow
@pytest.mark.usefixtures("own")
def test_own_subclass_of_ours_trains(command, run_folder):
    model = ["--model=own_module.SmoothedMoE", *SMALL[1:], "--data=DigitsDataModule"]
    assert (
        command("fit", *QUIET, *model, "--trainer.max_epochs=2", "--optimizer=Adam", "--optimizer.lr=0.01").status == 0
    )
    result = command("test", *QUIET, *model, "--ckpt_path=best")
    assert result.status == 0
    assert "test/accuracy" in result.out


@pytest.mark.slow
def test_optimizer_and_scheduler_from_the_command_line(command, run_folder):
    schedule = ["--lr_scheduler=ExponentialLR", "--lr_scheduler.gamma=0.5"]
    sgd = ["--optimizer=SGD", "--optimizer.lr=1.0", *schedule, "--trainer.max_epochs=2"]
    for interval, lr in (("epoch", 0.25), ("step", 0.0625)):
        folder = run_folder / interval
        root = f"--trainer.default_root_dir={folder}"
        assert command("fit", *QUIET, *DIGITS, *sgd, f"--lr_interval={interval}", root).status == 0
        state = torch.load(only(folder, "*/*/checkpoints/*.ckpt"), weights_only=True)
        assert state["optimizer_states"][0]["param_groups"][0]["lr"] == lr


@pytest.mark.slow
def test_schedule_shorter_than_the_run_is_refused(command, run_folder):
    cycle = ["--lr_scheduler=OneCycleLR", "--lr_scheduler.max_lr=1", "--lr_interval=step"]
    fit = ["fit", *QUIET, *DIGITS, "--optimizer=SGD", *cycle, "--trainer.max_epochs=2"]
    result = command(*fit, "--lr_scheduler.total_steps=3")
    assert result.status == 2
    assert "OneCycleLR ends after 3 steps, but the run takes 4 of its lr_interval, 'step'" in result.err
    assert not list(run_folder.rglob("*.ckpt"))


@pytest.mark.sampled(default=3)
@pytest.mark.filterwarnings("ignore:A `OneCycleLR` scheduler is using:RuntimeWarning")
@pytest.mark.parametrize(
    ("limits", "total_steps", "enough"),
    [
        ({"max_epochs": 3}, 2, False),
        ({"max_epochs": 3}, 3, True),
        ({"max_epochs": 9, "max_steps": 5}, 2, True),  # the third epoch ends in the middle
        ({"max_epochs": 9, "max_steps": 6}, 2, False),
        ({"max_steps": 6}, 2, False),
        ({"max_steps": 3, "accumulate_grad_batches": 2}, 2, False),
        ({"max_steps": 2, "accumulate_grad_batches": 2}, 2, True),
    ],
)
def test_schedule_by_epochs_is_held_against_the_epochs_that_end(run_folder, limits, total_steps, enough):
    class Scheduled(MoEClassifier):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1, total_steps=total_steps)
            _require_long_enough(scheduler, self.trainer, "epoch", None)
            return [optimizer], [scheduler]

    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    batches = {"limit_train_batches": 2, "limit_val_batches": 0}
    trainer = L.Trainer(accelerator="cpu", devices=1, **dict.fromkeys(off, False), **batches, **limits)
    said = "OneCycleLR ends after 2 steps, but the run takes 3 of its lr_interval, 'epoch'"
    with contextlib.nullcontext() if enough else pytest.raises(UsageError, match=said):
        trainer.fit(Scheduled(dim=8, experts=Experts(hidden_dim=8)), DigitsDataModule())
    assert trainer.global_step == (0 if not enough else 2 * 3 if total_steps == 3 else limits["max_steps"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A `OneCycleLR` scheduler is using:RuntimeWarning")
@pytest.mark.parametrize(
    ("interval", "length", "longer"), [("step", 2, 4), pytest.param("epoch", 1, 2, marks=pytest.mark.slow)]
)
def test_schedule_of_the_checkpoint_shorter_than_the_resumed_run_is_refused(
    command, run_folder, interval, length, longer
):
    cycle = ["--lr_scheduler=OneCycleLR", "--lr_scheduler.max_lr=1", f"--lr_interval={interval}"]
    fit = ["fit", *QUIET, *DIGITS, "--optimizer=SGD", *cycle]
    assert command(*fit, "--trainer.max_epochs=1", f"--lr_scheduler.total_steps={length}").status == 0
    resume = [*fit, "--ckpt_path", only(run_folder, "lightning_logs/*/checkpoints/*.ckpt")]
    result = command(*resume, "--trainer.max_epochs=2", f"--lr_scheduler.total_steps={longer}")
    assert result.status == 2
    assert re.search(
        rf"goes on with the OneCycleLR of its checkpoint, which ends after {length} steps, but the run takes {longer} "
        rf"of its lr_interval, '{interval}'; end it there with --trainer.max_{interval}s {length}, or train anew",
        result.err,
    )


@pytest.mark.slow
def test_resumed_run_ends_with_the_schedule_of_its_checkpoint(command, run_folder):
    cycle = ["--lr_scheduler=OneCycleLR", "--lr_scheduler.max_lr=1", "--lr_interval=step"]
    fit = ["fit", *QUIET, *DIGITS, "--optimizer=SGD", *cycle, "--lr_scheduler.total_steps=4"]
    assert command(*fit, "--trainer.max_epochs=1").status == 0
    half = only(run_folder, "lightning_logs/*/checkpoints/*.ckpt")
    result = command(*fit, "--data.num_workers=0", "--trainer.max_epochs=2", "--ckpt_path", half)
    assert result.status == 0, result.err
    resumed = torch.load(only(run_folder, "lightning_logs/version_1/checkpoints/*.ckpt"), weights_only=True)
    assert (resumed["epoch"], resumed["global_step"]) == (1, 4)


@pytest.mark.slow
def test_scheduler_that_watches_a_metric(command):
    plateau = ["--lr_scheduler=ReduceLROnPlateau", "--lr_scheduler.monitor=val/loss"]
    result = command(
        "fit", *QUIET, *DIGITS, "--optimizer=SGD", "--optimizer.lr=0.1", *plateau, "--trainer.max_epochs=2"
    )
    assert result.status == 0, result.err


@pytest.mark.slow
def test_later_config_and_command_line_win(command, run_folder):
    (run_folder / "a.yaml").write_text(
        "model: {class_path: MoEClassifier, init_args: {dim: 8, experts: {hidden_dim: 8, num_experts: 3}}}\n"
        "data: {class_path: DigitsDataModule}\ntrainer: {max_epochs: 7, limit_val_batches: 1}\n"
    )
    (run_folder / "b.yaml").write_text(
        "trainer: {max_epochs: 1}\nmodel: {init_args: {experts: {num_experts: 4, k: 1}}}\n"
    )
    arguments = ["--config=a.yaml", "--config", "b.yaml", "--model.experts.k=3"]
    shown = yaml.safe_load(command("fit", *QUIET, *arguments, "--print_config").out)
    assert shown["trainer"]["max_epochs"] == 1
    assert shown["model"]["init_args"]["dim"] == 8
    experts = shown["model"]["init_args"]["experts"]
    assert (experts["num_experts"], experts["k"], experts["hidden_dim"]) == (4, 3, 8)


@pytest.mark.slow
def test_saved_config_repeats_the_run(command, run_folder):
    assert command("fit", *QUIET, *DIGITS, "--trainer.max_epochs=1", "--seed_everything=5").status == 0
    first = only(run_folder, "lightning_logs/version_0/checkpoints/*.ckpt")
    assert command("fit", "--config", run_folder / "lightning_logs/version_0/config_fit.yaml").status == 0
    second = only(run_folder, "lightning_logs/version_1/checkpoints/*.ckpt")
    states = [torch.load(path, weights_only=True)["state_dict"] for path in (first, second)]
    torch.testing.assert_close(*states, rtol=0, atol=0)
    assert command("fit", *QUIET, *DIGITS, "--trainer.max_epochs=1", "--seed_everything=6").status == 0
    third = torch.load(only(run_folder, "lightning_logs/version_2/checkpoints/*.ckpt"), weights_only=True)["state_dict"]
    assert not third["head.1.weight"].equal(states[0]["head.1.weight"])


LOGGERS = [
    "--trainer.logger+={class_path: CSVLogger, init_args: {save_dir: runs, name: x}}",
    "--trainer.logger+={class_path: TensorBoardLogger, init_args: {save_dir: runs, name: x}}",
]


@pytest.mark.slow
def test_loggers_of_one_name_share_the_run_folder(command, run_folder):
    for _ in range(2):
        assert command("fit", *QUIET, *DIGITS, *LOGGERS, "--trainer.max_epochs=1").status == 0
    assert sorted(path.name for path in (run_folder / "runs/x").iterdir()) == ["version_0", "version_1"]
    for version in (run_folder / "runs/x").iterdir():
        names = {path.name.partition(".tfevents")[0] for path in version.iterdir()}
        reports = {"run_report.json", "run_report.png"}
        assert names == reports | {"checkpoints", "config_fit.yaml", "events.out", "hparams.yaml", "metrics.csv"}


@pytest.mark.slow
def test_best_checkpoint_is_that_of_the_newest_run(command, run_folder):
    fit = ["fit", *QUIET, *DIGITS, *LOGGERS, KEEPER % "monitor: val/loss, save_last: true"]
    assert command(*fit, "--trainer.max_epochs=3").status == 0
    # a diverging second run: its first epoch is its best, its last the newest file
    log = command(
        *fit, "--trainer.max_epochs=3", "--optimizer=SGD", "--optimizer.lr=1", "--optimizer.maximize=true"
    ).log
    best = re.search(r"best checkpoint: (\S*version_1/\S*epoch=0\S*) \(val/loss", log)[1]
    tested = command("test", *fit[1:], "--ckpt_path=best")
    assert tested.status == 0
    assert f"best checkpoint of the newest run: {best}" in tested.log
    assert (run_folder / "runs/x/version_2/config_test.yaml").exists()


KEEPER = "--trainer.callbacks+={class_path: ModelCheckpoint, init_args: {%s}}"
DIVERGING = ["--trainer.max_epochs=3", "--optimizer=SGD", "--optimizer.lr=1", "--optimizer.maximize=true"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "keepers",
    [
        [
            KEEPER % "save_top_k: -1, filename: 'all-{epoch}'",
            KEEPER % "monitor: val/loss",
            "--trainer.callbacks+=EarlyStopping",
            "--trainer.callbacks.monitor=val/accuracy",
        ],
        pytest.param(
            [KEEPER % "monitor: val/loss, filename: '{epoch}-{val/loss:.3f}', save_last: true"], marks=pytest.mark.slow
        ),
    ],
    ids=["beside early stopping and a keeper of all", "in a folder below"],
)
def test_best_checkpoint_is_the_monitored_one(command, keepers):
    assert command("fit", *QUIET, *DIGITS, *DIVERGING, *keepers).status == 0
    result = command("test", *QUIET, *DIGITS, "--ckpt_path=best")
    assert re.search(r"best checkpoint of the newest run: \S*epoch=0", result.log), result.err
    if "last" in keepers[-1]:
        assert "last.ckpt" in command("test", *QUIET, *DIGITS, "--ckpt_path=last").log


@pytest.mark.slow
@pytest.mark.usefixtures("own")
def test_best_is_of_the_model_that_is_asked_for(command):
    """Both runs stand in one log folder, and neither monitors anything."""
    short = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=1", "--trainer.limit_val_batches=1"]
    digits = [*QUIET, "--model=Classifier", "--model.hidden_dims=[4]", "--data=DigitsDataModule"]
    assert re.search(r" last checkpoint: \S*version_0/", command("fit", *digits, *short).log)
    assert command("fit", *QUIET, *DIGITS, *short).status == 0
    result = command("test", *digits, "--ckpt_path=best")
    assert result.status == 0, result.err
    assert re.search(r"last checkpoint of the newest run, which monitored nothing: \S*version_0/", result.log)
    result = command("test", *QUIET, *OWN, "--ckpt_path=last")
    assert re.search(r"no checkpoint of OwnModule under \S+; those there are of MoEClassifier, Classifier", result.err)


@pytest.mark.slow
def test_best_of_several_weights_is_not_guessed(command):
    keeper = KEEPER % "monitor: val/loss, save_top_k: 3, save_weights_only: true"
    assert command("fit", *QUIET, *DIGITS, *DIVERGING, keeper).status == 0
    result = command("test", *QUIET, *DIGITS, "--ckpt_path=best")
    assert result.status == 2
    assert re.search(r"the 3 files in \S+ do not say which is the best", result.err)


@pytest.mark.slow
def test_the_model_is_the_config_s_and_where_it_has_none_the_checkpoint_s(command, run_folder):
    five = [*DIGITS, "--model.experts.num_experts=5"]
    assert command("fit", *QUIET, *five, "--trainer.max_epochs=1").status == 0
    log = command("test", *QUIET, *five, "--model.experts.k=1", "--ckpt_path=best").log
    assert "settings other than the checkpoint's: experts.k: 2 in the checkpoint, 1 in the model" in log
    assert "no --ckpt_path is given" in command("test", *QUIET, *five).log
    checkpoint = only(run_folder, "lightning_logs/*/checkpoints/*.ckpt")
    result = command("test", *QUIET, "--data=DigitsDataModule", "--ckpt_path", checkpoint)
    assert result.status == 0, result.err
    config = saved(run_folder / "lightning_logs/version_3/config_test.yaml")
    assert config["model"]["init_args"]["experts"]["num_experts"] == 5


@pytest.mark.slow
@pytest.mark.usefixtures("own")
def test_layers_built_in_setup_load_from_their_own_checkpoint(command):
    own = ["--model=own_module.BuildsInSetup", *OWN[1:]]
    assert command("fit", *QUIET, *own, "--trainer.max_epochs=1").status == 0
    result = command("test", *QUIET, *own, "--ckpt_path=best")
    assert result.status == 0, result.err


@pytest.mark.slow
def test_other_rows_than_the_trained_ones_are_refused(command, run_folder):
    """Columns in another order would be read as each other."""
    table = pd.DataFrame({"a": [x * x for x in range(60)], "b": [x % 7 for x in range(60)], "y": ["u", "v"] * 30})
    table.to_csv("t.csv", index=False)
    data = ["--data=TabularDataModule", "--data.path=t.csv", "--data.target=y"]
    assert command("fit", *QUIET, *SMALL, *data, "--trainer.max_epochs=1").status == 0
    assert command("test", *QUIET, *SMALL, *data, "--ckpt_path=best").status == 0
    table[["b", "a", "y"]].to_csv("t.csv", index=False)
    result = command("test", *QUIET, *SMALL, *data, "--ckpt_path=best")
    assert result.status == 1
    assert re.search(r"trained on other data than t.csv .*columns \['a', 'b'\] there, \['b', 'a'\] here", result.err)


@pytest.mark.slow
@pytest.mark.usefixtures("own")
def test_config_of_a_run_in_the_same_folder_is_kept(command, run_folder):
    logger = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=.", "--trainer.logger.version=here"]
    keep = [*OWN, *logger, "--trainer.max_epochs=1", "--trainer.enable_checkpointing=false"]
    assert command("fit", *QUIET, *keep, "--data.rows=8").status == 0
    for rows in (8, 16):
        with pytest.warns(UserWarning, match="exists and is not empty"):
            assert command("fit", *QUIET, *keep, f"--data.rows={rows}").status == 0
    folder = run_folder / "lightning_logs/here"
    assert saved(folder / "config_fit.yaml")["data"]["init_args"]["rows"] == 8
    assert saved(folder / "config_fit_2.yaml")["data"]["init_args"]["rows"] == 16
    assert not (folder / "config_fit_3.yaml").exists()


@pytest.mark.usefixtures("own")
def test_run_without_a_logger_leaves_no_config(command, run_folder):
    off = ["--trainer.logger=false", "--trainer.enable_checkpointing=false", "--trainer.max_epochs=1"]
    assert command("fit", *QUIET, *OWN, *off).status == 0
    assert [path.name for path in run_folder.iterdir() if path.name != "__pycache__"] == ["own_module.py"]


@pytest.mark.slow
def test_short_names_in_a_fresh_process(run_folder):
    """Nothing but the command line has imported the classes here."""
    arguments = ["--model=MoEClassifier", "--data=TabularDataModule", "--data.path=x.csv", "--data.target=y"]
    finished = subprocess.run(
        [sys.executable, "-m", "lightning_accel", "fit", *arguments, "--print_config"], capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
    shown = yaml.safe_load(finished.stdout)
    assert shown["model"]["class_path"].endswith("MoEClassifier")
    assert shown["data"]["init_args"]["target"] == "y"


def test_version_and_help_need_no_torch():
    script = (
        "import sys; from lightning_accel.__main__ import main; "
        "status = main({}); sys.exit(status or 'torch' in sys.modules)"
    )
    for arguments, said in ((["--version"], lightning_accel.__version__), (["--help"], "--ckpt_path")):
        finished = subprocess.run([sys.executable, "-c", script.format(arguments)], capture_output=True, text=True)
        assert finished.returncode == 0, finished.stderr
        assert said in finished.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["fit", "--help"], "--lr_interval"), (["fit", "--model.help", "MoEClassifier"], "--model.experts.num_experts")],
)
def test_help_of_a_subcommand_and_of_a_class(command, arguments, said):
    result = command(*arguments)
    assert result.status == 0
    assert said in result.out


def test_packages_are_hidden_only_while_open(monkeypatch):
    monkeypatch.setattr(help_imports, "_OPTIONAL", ("wave",))
    with help_imports.imports_for_help():
        assert not package_available("wave")
        with pytest.raises(ModuleNotFoundError):
            import_module("wave")
    assert package_available("wave")
    assert import_module("wave").Wave_read


@pytest.mark.weekly
@pytest.mark.slow
def test_help_imports_less_and_says_the_same():
    names = ("onnx", "onnxruntime", "pandas", "sklearn", "torch_geometric", "torchao")
    names += ("matplotlib", "scipy", "torch._dynamo", "transformers")
    script = (
        "import sys; from lightning_accel.__main__ import main; sys.argv = ['lightning-accel', 'fit', '--help']; "
        f"status = main(); sys.exit(status or ' '.join(name for name in {names} if name in sys.modules) or None)"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    plain = "from lightning_accel.cli import run; run(['fit', '--help'])"
    assert finished.stdout == subprocess.run([sys.executable, "-c", plain], capture_output=True, text=True).stdout
    for package in (lightning_accel.data, lightning_accel.models):
        for name in package.__all__:
            value = getattr(package, name)
            if isinstance(value, type) and issubclass(value, L.LightningModule | L.LightningDataModule):
                assert name in finished.stdout


def test_only_the_subcommand_that_is_asked_for_gets_options(run_folder):
    class Counting(AccelCLI):
        subcommands_with_options = 0

        def add_arguments_to_parser(self, parser):
            super().add_arguments_to_parser(parser)
            Counting.subcommands_with_options += 1

    with pytest.raises(SystemExit):
        Counting(["validate", "--print_config"])
    assert Counting.subcommands_with_options == 1


@pytest.mark.slow
@pytest.mark.usefixtures("own")
def test_config_with_sections_of_several_subcommands(command):
    model = {"class_path": "own_module.OwnModule", "init_args": {"width": 3}}
    section = {"model": model, "trainer": {"max_epochs": 7}}
    Path("both.yaml").write_text(yaml.safe_dump({"fit": section, "validate": section}))
    shown = yaml.safe_load(command("--config", "both.yaml", "validate", "--print_config").out)
    assert shown["model"]["init_args"]["width"] == 3
    assert shown["trainer"]["max_epochs"] == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        pytest.param([sys.executable, "-m", "lightning_accel"], id="m"),
        pytest.param(["lightning-accel"], id="script", marks=pytest.mark.weekly),
    ],
)
def test_both_programs_start_two_processes_with_own_module(own, program):
    """In a process of its own: sys.path, sys.argv and the launcher of further processes are the real ones."""
    if program == ["lightning-accel"]:
        program = [str(Path(sys.executable).with_name("lightning-accel"))]
    arguments = [*QUIET, *OWN, "--trainer.max_epochs=2", "--trainer.devices=2", "--trainer.strategy=ddp"]
    finished = subprocess.run([*program, "fit", *arguments], capture_output=True, text=True, cwd=own.parent)
    assert finished.returncode == 0, finished.stderr
    assert sorted(path.name for path in own.parent.glob("lightning_logs/*")) == ["version_0"]
    assert only(own.parent, "lightning_logs/version_0/config_fit.yaml").exists()
    assert finished.stderr.count("last checkpoint") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("own")
def test_old_names_of_arguments_work_in_configs_and_options(command):
    old = {"class_path": "own_module.Renamed", "init_args": {"factors": [1.0, 2.0], "size": 4}}
    Path("old.yaml").write_text(yaml.safe_dump({"model": old}))

    def printed(*options):
        with pytest.warns(FutureWarning) as warned:
            result = command("fit", *options, "--print_config")
        assert {str(one.message).partition(";")[0] for one in warned} >= {
            "Renamed: size is now called width",
            "Renamed: factors is now called scales",
        }
        assert result.status == 0, result.err
        return yaml.safe_load(result.out)["model"]["init_args"]

    assert printed("--config", "old.yaml") == {"scales": [1.0, 2.0], "width": 4}
    assert printed("--config", "old.yaml", "--model.size=5", "--model.factors+=3") == {
        "scales": [1.0, 2.0, 3.0],
        "width": 5,
    }
    assert printed("--model=own_module.Renamed", "--model.factors=[3]", "--model.init_args.size=6") == {
        "scales": [3.0],
        "width": 6,
    }
    result = command("fit", "--model.help=own_module.Renamed")
    assert "--model.scales" in result.out
    assert "--model.size" not in result.out
    with pytest.warns(FutureWarning) as warned:
        result = command("fit", "--model=own_module.Renamed", "--model.size=5", "--model.fators=[3]")
    assert "no option 'fators'" in result.err
    assert ["size is now" in str(one.message) for one in warned].count(True) == 1


@pytest.mark.slow
def test_saved_config_with_old_flat_options_of_sequences(command, run_folder):
    """One of the options is called values, as a method of the parser's namespaces is."""
    flat = {"length": None, "test_length": None, "num_sequences": None, "target_kind": "regression", "target": "y"}
    flat |= {"values": [], "id_column": "who", "step_column": None}
    old = {"class_path": "lightning_accel.SequenceDataModule", "init_args": flat}
    (run_folder / "old.yaml").write_text(yaml.safe_dump({"data": old}))

    def layout(*options):
        with pytest.warns(FutureWarning, match=r"SequenceDataModule: \w+ is now called"):
            result = command("fit", "--model=SequenceModel", "--config=old.yaml", *options, "--print_config")
        assert result.status == 0, result.err
        shown = yaml.safe_load(result.out)["data"]["init_args"]
        assert set(shown["generated"].values()) == {None}
        assert not shown.keys() & flat.keys()
        del shown["layout"]["shards"]
        return shown["layout"]

    expected = {"target_kind": "regression", "target": "y", "values": [], "id_column": "who", "step_column": None}
    assert layout() == expected
    assert layout("--data.values=[x]") == layout("--data.layout.values=[x]") == expected | {"values": ["x"]}


@pytest.mark.slow
def test_null_turns_an_option_of_a_dataclass_off(command):
    """The parser passed it on as None, which was read as a text."""
    data = ["--data=SequenceDataModule", "--data.layout.step_column=null", "--data.layout.target", "None"]
    result = command("fit", "--model=MoEClassifier", "--model.experts.z_weight", "null", *data, "--print_config")
    assert result.status == 0, result.err
    shown = yaml.safe_load(result.out)
    assert shown["data"]["init_args"]["layout"]["step_column"] is None
    assert shown["data"]["init_args"]["layout"]["target"] == "None"
    assert shown["model"]["init_args"]["experts"]["z_weight"] is None


@pytest.mark.slow
@pytest.mark.usefixtures("own")
def test_old_names_of_options_of_a_dataclass_work_in_configs_and_options(command):
    old = {"class_path": "own_module.Grouped", "init_args": {"factors": [1.0, 2.0], "size": 4, "bias": False}}
    Path("old.yaml").write_text(yaml.safe_dump({"model": old}))
    Path("new.yaml").write_text("model: {class_path: own_module.Grouped, init_args: {layer: {width: 4}, bias: false}}")

    def layer(*options):
        with pytest.warns(FutureWarning) as warned:
            result = command("fit", *options, "--print_config")
        assert any("Grouped: size is now called layer.width;" in str(one.message) for one in warned)
        assert result.status == 0, result.err
        shown = yaml.safe_load(result.out)["model"]["init_args"]
        assert shown.keys() == {"bias", "layer"}
        return shown["layer"]

    assert layer("--config", "old.yaml") == {"width": 4, "scales": [1.0, 2.0]}
    added = ["--model.size=5", "--model.factors+=3"]
    assert layer("--config", "old.yaml", *added) == {"width": 5, "scales": [1.0, 2.0, 3.0]}
    assert layer("--config", "new.yaml", "--model.size", "6") == {"width": 6, "scales": []}
    assert layer("--config", "old.yaml", "--model.layer.width=7") == {"width": 7, "scales": [1.0, 2.0]}
    assert layer("--model=own_module.Grouped", "--model.init_args.size=6") == {"width": 6, "scales": []}
    result = command("fit", "--model.help=own_module.Grouped")
    assert "--model.layer.width" in result.out
    assert "--model.size" not in result.out
    result = command("fit", "--model=own_module.Grouped", "--model.layer.widht=3")
    assert "own_module.Grouped has no option 'layer.widht'; did you mean 'layer.width'?" in result.err
    Path("new.yaml").write_text("model: {class_path: own_module.Grouped, init_args: {layer: {widht: 4}}}")
    result = command("fit", "--config", "new.yaml")
    assert "own_module.Grouped has no option 'layer.widht'; did you mean 'layer.width'?" in result.err
