"""What a user can get wrong: one message that names the cause and the way out, no traceback, nothing trained."""

import os
import re
import shutil
import sys
import traceback
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_accel import MoEClassifier, models
from lightning_accel.__main__ import main
from lightning_accel.callbacks.distillation.teacher import load_teacher
from lightning_accel.cli.checkpoints import Checkpoint
from lightning_accel.cli.checks import require_even_processes
from lightning_accel.cli.errors import UsageError, require_config_files
from lightning_accel.cli.run_folder import require_names
from tests.strategies.test_launched import Dealt

OFF = ["--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--trainer.enable_progress_bar=false"]
OURS = ["fit", *OFF, "--model=MoEClassifier", "--data=DigitsDataModule"]
OWN = ["fit", *OFF, "--model=own_module.OwnModule", "--model.width=3", "--data=own_module.OwnData"]
THREE_EXPERTS = ["--model.dim=8", "--model.experts.hidden_dim=8", "--model.experts.num_experts=3"]
TABLE = ["fit", *OFF, "--model=MoEClassifier", "--data=TabularDataModule"]


def config(text):
    """Arguments of a run whose config file holds ``text``."""
    return ("fit", *OFF, "--config=wrong.yaml"), text


WRONG = [
    ([*OURS, "--config=absent.yaml"], r"no config file absent.yaml; did you mean 'present.yaml'\?"),
    ([*OURS, "--config=moe_digit.yaml"], r"no config file moe_digit.yaml; did you mean 'moe_digits"),
    (
        [*OURS, "--config=quarterly_sales.yaml"],
        r"no config file quarterly_sales.yaml; the package has compress_cnn.yaml, compress_lm",
    ),
    ([*OURS, "--config=runs/q3.yaml"], r"no config file runs/q3.yaml\n?$"),
    (["fot"], r"no subcommand 'fot'; did you mean 'fit'\?"),
    (
        ["train"],
        r"no subcommand 'train'; did you mean 'fit'\?\nThere are: fit, .*, tune, plan, doctor, build-ops",
    ),
    (["--trainer.max_epochs=3"], r"'trainer.max_epochs' comes after the subcommand"),
    ([*OURS, "--trainer.max_epoch=3"], r"no option 'trainer.max_epoch'; did you mean 'trainer.max_epochs'\?"),
    ([*OURS, "--model.num_expert=3"], r"no option 'num_expert'; did you mean 'experts.num_experts'\?\nIt has: num_"),
    (
        [*OURS, "--model.gate.k=3"],
        r"MoEClassifier gives lightning_accel.TopKGate its 'k'; did you mean 'model.experts.k'",
    ),
    (["fit", *OFF, "--model=MoEClasifier"], r"model: no class 'MoEClasifier'; did you mean 'MoEClassifier'\?"),
    (["fit", *OFF, "--model=own_module.OwnModul"], r"own_module has no 'OwnModul'; did you mean 'OwnModule'\?"),
    (
        ["fit", *OFF, "--model=own_module.py:OwnModule"],
        r"no class .*\nName one of own_module.py: own_module.OwnModule\n?$",
    ),
    (
        ["fit", *OFF, "--model=own_module.py"],
        r"model: no class 'own_module.py'\nName one of own_module.py: own_module\.Own",
    ),
    (
        ["fit", *OFF, "--data=./own_module.py"],
        r"data: no class .*\nName one of own_module.py: own_module\.OwnModule or ",
    ),
    (["fit", *OFF, "--model=MoEClassifier"], r"no data: MoEClassifier has no train_dataloader\(\); give a datamodule"),
    (
        ["fit", *OFF, "--model=own_module.py.OwnModule"],
        r"own_module has no 'py'; leave out .py, as in own_module.MyClass",
    ),
    (["fit", *OFF, "--model=own_modul.OwnModule"], r"no module 'own_modul'; did you mean 'own_module'\?"),
    (["fit", *OFF, "--model=torch.nn.Linear"], r"model: expected a LightningModule, got torch.nn.Linear"),
    ([*OURS, "--model.optimizer=AdmW"], r"model.optimizer: no class 'AdmW'; did you mean 'AdamW'\?"),
    ([*OURS, "--model.optimizer.lrr=1"], r"model.optimizer: torch.optim.AdamW has no option 'lrr'"),
    ([*OURS, "--trainer.callbacks=EarlyStoping"], r"trainer.callbacks: no class 'EarlyStoping'; did you mean"),
    ([*OURS, "--optimizer.lr=3"], r"optimizer: 'lr' belongs to no class\nName the class: --optimizer CLASS"),
    ([*OURS, "--verbose=1"], r"'verbose' comes after a subcommand, and belongs to validate, test"),
    ([*OURS, "-trainer.max_epochs=1"], r"no option '-trainer.max_epochs=1'; did you mean '--trainer.max_epochs=1'"),
    (
        ["fit", *OFF, "--model=bad_syntax.M"],
        r"bad_syntax cannot be imported: invalid syntax \(bad_syntax.py, line 1",
    ),
    ([*OURS, "--model.dim=wide"], r"model.dim: expected int; got wide"),
    ([*OURS, "--model.experts=4"], r"model.experts: expected options, --model.experts.OPTION.*; got 4\nIt has: num_"),
    (
        config("model: {class_path: MoEClassifier, init_args: {experts: 4}}"),
        r"model.experts: expected options, --model.experts.OPTION VALUE or a mapping in a config; got 4\nIt has: num_e",
    ),
    ([*OURS, "--seed_everything=-3"], r"seed_everything: expected an int from 0 to 4294967295; got -3"),
    (
        config("trainer: {plugins: [{class_path: AmpPrecision, init_args: {dtype: x}}]}"),
        r"trainer.plugins.dtype: expected 'auto' or 'bf16' or 'fp16'; got x",
    ),
    ([*OURS, "--model.experts.k=9"], r"k must lie in \[1, num_experts\]; got k=9, num_experts=8\n\(ValueError"),
    ([*OURS, "--trainer.strategy=dpp"], r"no strategy 'dpp'; did you mean 'ddp'"),
    (["fit", *OFF], r"fit needs a model: --model MoEClassifier, --model my_file.MyModule"),
    (
        ["fit", *OFF, "--model=own_module.OwnModule"],
        r"model.width is missing for own_module.OwnModule\nAdd --model.width \.\.\.; .*help OwnModule",
    ),
    ([*OURS, "--lr_interval=step"], r"--lr_interval step has no effect without --lr_scheduler"),
    ([*OURS, "--data.batch_size=0"], r"batch_size must be at least 1; got 0"),
    ([*OURS, "--config"], r"argument -c/--config: expected one argument"),
    ([*OURS, "--model.num_features=63"], r"num_features=63, but DigitsDataModule has num_features=64"),
    ([*OURS, "--lr_scheduler=StepLR", "--lr_scheduler.step_size=1"], r"--lr_scheduler needs --optimizer"),
    (
        config("model: {class_path: MoEClassifier, init_args: {num_expert: 3}}"),
        r"has no option 'num_expert'; did you mean 'experts.num_experts'\?",
    ),
    (
        [*OURS, "--trainer.default_root_dir=own_module.py/logs"],
        r"cannot write to the log folder own_module.py/logs",
    ),
    ([*TABLE, "--data.path=present.csv", "--data.target=z"], r"present.csv has no column 'z'.*Its columns: x, y"),
    (
        [*OURS, "--ckpt_path=best"],
        r"to resume, name the file, or give --ckpt_path auto.*; --ckpt_path best is not for fit",
    ),
    (
        config(
            "model: MoEClassifier\ndata: DigitsDataModule\ntrainer: {plugins: BackgroundCheckpointIO, "
            "strategy: {class_path: lightning.pytorch.strategies.ModelParallelStrategy}}"
        ),
        r"ModelParallelStrategy writes sharded checkpoints itself.* Take the strategy accel_fsdp2 with checkpoints",
    ),
    (
        config(
            "model: MoEClassifier\ndata: DigitsDataModule\ntrainer: {devices: 2, strategy: ddp, plugins: {class_path: "
            "tests.strategies.test_launched.Dealt, init_args: {rank: 0, size: 3}}}"
        ),
        r"3 processes were started, but rows would be dealt to 2: the Trainer has num_nodes=1 and devices=2",
    ),
    (
        [*OURS, "--trainer.plugins=BackgroundCheckpointIO", "--trainer.plugins.local_folder=present.csv"],
        r"cannot write to the log folder .*present.csv: File exists. Give another: .* or the plug-in's local_folder",
    ),
    (
        ["test", *OURS[1:], "--ckpt_path=best"],
        r"best: no checkpoint of MoEClassifier under .*lightning_logs. Run fit",
    ),
]
ALIKE = [  # found by the same checks, at other options
    ([*OURS, "--max_epochs=3"], r"no option 'max_epochs'; did you mean 'trainer.max_epochs'\?"),
    ([*OWN, "--model.widht=3"], r"own_module.OwnModule has no option 'widht'; did you mean 'width'\?"),
    ([*OURS, "--optimizer=AdmW"], r"optimizer: no class 'AdmW'; did you mean 'AdamW'\?"),
    ([*OURS, "--optimizer=AdamW", "--optimizer.lrr=1"], r"torch.optim.AdamW has no option 'lrr'"),
    ([*OURS, "--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitr=x"], r"did you mean 'monitor'"),
    ([*OURS, "--trainer.plugins=AmpPrecison"], r"trainer.plugins: no class 'AmpPrecison'; did you mean 'AmpPrecision'"),
    ([*OURS, "--trainer.plugins.dtype=x"], r"'dtype' belongs to no class\nName the class: --trainer.plugins CLASS"),
    ([*OURS, "--trainer.logger=CSVLoger"], r"trainer.logger: no class 'CSVLoger'; did you mean 'CSVLogger'"),
    (
        [*OURS, "--trainer.logger.save_dir=x"],
        r"trainer.logger: 'save_dir' belongs to no class\nName the class: --trainer.logger CLASS",
    ),
    (
        config("trainer: {logger: {save_dir: x}}"),
        r"trainer.logger: 'save_dir' belongs to no class\nName the class: --trainer.logger CLASS",
    ),
    ([*OURS, "--trainer.strategy.timeout=x"], r"'timeout' belongs to no class\nName the class: --trainer.strategy"),
    ([*OURS, "--trainer.logger=CSVLogger", "--trainer.logger.name=[]"], r"expected str"),
    ([*OURS, "--trainer.logger+=CSVLogger", "--trainer.logger.save_dirr=x"], r"did you mean 'save_dir'"),
    (["fit", *OFF, "--model=bad_key.M"], r"bad_key cannot be imported: 'k'\n\(KeyError in .*bad_key.py, line 2\)"),
    (["fit", *OFF, "--model=bad_need.M"], r"bad_need needs the module 'nosuchpkg', which is not installed"),
    ([*OURS, "--optimizer=SGD", "--optimizer.lr=fast"], r"optimizer.lr: expected float; got fast"),
    ([*OURS, "--trainer.max_epochs=many"], r"trainer.max_epochs: expected int; got many"),
    ([*OURS, "--lr_interval=steps"], r"lr_interval: expected 'epoch' or 'step'; got steps; did you mean 'step'\?"),
    ([*OURS, "--optimizer=Adam", "--lr_scheduler=StepLR"], r"lr_scheduler.step_size is missing for .*StepLR"),
    (["fit", *OFF, "--model=own_module.Broken", "--model.width=3"], r"no_such_attribute"),
    (
        config("model: {class_path: MoEClassifier, init_arg: {k: 1}}"),
        r"'init_arg.k' belongs to no class; .*init_args",
    ),
    (config("modle: {class_path: MoEClassifier}"), r"no option 'modle'; did you mean 'model'\?"),
    (config("model: {class_path: MoEClassifier}\ntrainer: {max_epoch: 3}"), r"did you mean 'trainer.max_epochs'\?"),
    (
        config("trainer: {callbacks: [{class_path: EarlyStopping, init_args: {monitr: x}}]}"),
        r"did you mean 'monitor'",
    ),
    ([*TABLE, "--data.path=absent.csv", "--data.target=y"], r"no file absent.csv; did you mean present.csv\?"),
    (
        [*OURS, "--ckpt_path=last"],
        r"to resume, name the file, or give --ckpt_path auto.*; --ckpt_path last is not for fit",
    ),
]


@pytest.mark.sampled(default=30)
@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("arguments", "said"), [*WRONG, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALIKE)]
)
def test_wrong_input(command, run_folder, arguments, said):
    for name in ("present.yaml", "present.ckpt"):
        (run_folder / name).touch()
    (run_folder / "present.csv").write_text("x,y\n1,a\n")
    (run_folder / "bad_syntax.py").write_text("def f(:\n")
    (run_folder / "bad_key.py").write_text("empty = {}\nempty['k']\n")
    (run_folder / "bad_need.py").write_text("import nosuchpkg\n")
    (run_folder / "folder").mkdir()
    if isinstance(arguments, tuple):
        arguments, text = arguments
        (run_folder / "wrong.yaml").write_text(text)
    before = sorted(run_folder.rglob("*.*"))
    result = command(*arguments)
    assert result.status in (1, 2)
    message = result.err[result.err.index("lightning-accel: error: ") :]
    assert re.search(said, message, re.DOTALL), message
    assert "Traceback" not in result.err
    left = [path for path in sorted(run_folder.rglob("*.*")) if path not in before and "__pycache__" not in path.parts]
    if result.status == 1:  # the Trainer opens its loggers before anybody's setup runs
        left = [path for path in left if path.parts[-3] != "lightning_logs" or path.suffix == ".ckpt"]
    assert not left


@pytest.mark.usefixtures("own")
def test_a_missing_extra_hides_no_mistake(monkeypatch, command):
    monkeypatch.delitem(sys.modules, "lightning_accel.models.estimators", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert "has no option 'widht'; did you mean 'width'?" in command(*OWN, "--model.widht=3").err
    with pytest.raises(ModuleNotFoundError, match=r"sklearn is needed here .*lightning_accel\[data\]"):
        models.DBNClassifier  # noqa: B018


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: [a: b\n  c", r"config wrong.yaml is not YAML: .*line 1"),
        ("# only a comment", r"config wrong.yaml must be a mapping .*it holds nothing"),
        ("trainer: {max_epochs: 1}\nmodel: {}\ntrainer: {}", r"config wrong.yaml is not YAML: 'trainer' stands"),
        ("just words", r"config wrong.yaml must be a mapping .*'just words'"),
    ],
)
def test_config_that_is_no_mapping(run_folder, text, said):
    (run_folder / "wrong.yaml").write_text(text)
    with pytest.raises(UsageError, match=f"(?s){said}"):
        require_config_files(["fit", "--config=wrong.yaml"])


@pytest.fixture(scope="module")
def checkpoint_of_three_experts(tmp_path_factory):
    """A whole checkpoint of a run with three experts."""
    folder = tmp_path_factory.mktemp("kept")
    keep = f"--trainer.callbacks+={{class_path: ModelCheckpoint, init_args: {{dirpath: {folder}, filename: whole}}}}"
    batches = ["--trainer.limit_train_batches=1", "--trainer.limit_val_batches=1", "--trainer.logger=false"]
    assert main([*OURS, *THREE_EXPERTS, *batches, keep]) == 0
    return folder / "whole.ckpt"


@pytest.fixture
def checkpoints(checkpoint_of_three_experts, run_folder):
    """A copy of that checkpoint, in the current folder."""
    (run_folder / "kept").mkdir()
    return Path(shutil.copy(checkpoint_of_three_experts, run_folder / "kept"))


def cut_short(path, run_folder):
    (run_folder / "cut.ckpt").write_bytes(path.read_bytes()[:-1000])
    return "cut.ckpt"


def renamed_text(path, run_folder):
    (run_folder / "text.ckpt").write_text("not a checkpoint")
    return "text.ckpt"


def line_of_text(path, run_folder):
    (run_folder / "line.ckpt").write_text("hello\n")
    return "line.ckpt"


def emptied(path, run_folder):
    (run_folder / "empty.ckpt").touch()
    return "empty.ckpt"


def weights_alone(path, run_folder):
    torch.save(torch.load(path, weights_only=True)["state_dict"], run_folder / "weights.ckpt")
    return "weights.ckpt"


def with_an_object(path, run_folder):
    torch.save({**torch.load(path, weights_only=True), "object": zipfile.ZipFile}, run_folder / "object.ckpt")
    return "object.ckpt"


@pytest.mark.sampled(default=3)
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (cut_short, r"cut.ckpt is not a whole checkpoint \([\d,]+ bytes\): it was cut short"),
        (line_of_text, r"line.ckpt is not a whole checkpoint \(6 bytes\)"),
        (renamed_text, r"text.ckpt is not a whole checkpoint \(16 bytes\)"),
        (emptied, r"empty.ckpt is not a whole checkpoint \(0 bytes\)"),
        (weights_alone, r"weights.ckpt is not a checkpoint of a Trainer: it holds no state_dict"),
        (with_an_object, r"object.ckpt holds objects other than tensors and plain values \(.*ZipFile"),
    ],
)
def test_file_that_is_no_checkpoint(run_folder, checkpoints, make, said):
    with pytest.raises(UsageError, match=f"(?s){said}"):
        Checkpoint.read(make(checkpoints, run_folder))


def test_no_checkpoint_at_the_path(run_folder, checkpoints):
    (run_folder / "folder").mkdir()
    with pytest.raises(UsageError, match="folder is a folder that holds no sharded checkpoint"):
        Checkpoint.read("folder")
    with pytest.raises(UsageError, match=r"no checkpoint kept/hole.ckpt; did you mean 'kept/whole.ckpt'\?"):
        Checkpoint.read("kept/hole.ckpt")


@pytest.mark.slow
@pytest.mark.usefixtures("own")
def test_wrong_checkpoint(command, run_folder, checkpoints):
    of_another_kind = r"a MoEClassifier, another model than OwnModule .*class_path: .*checkpoint has no layer.bias"
    of_other_settings = (
        r"another model than MoEClassifier as configured:.*experts.num_experts: 3 in the checkpoint, 8 in the model.*"
        r"mixture.experts.up_weight is 3x8x8 in the checkpoint, 8x256x128 in the model"
    )
    cut = cut_short(checkpoints, run_folder)
    for subcommand, path, model, said in [
        ("fit", cut, OURS, "it was cut short"),
        ("test", cut, OURS, "it was cut short"),
        ("fit", checkpoints, OURS, of_other_settings),
        ("test", checkpoints, OURS, of_other_settings),
        ("test", checkpoints, OWN, rf"{of_another_kind}.*\d+ more"),
    ]:
        result = command(subcommand, *model[1:], f"--ckpt_path={path}")
        assert result.status == 2
        assert re.search(said, result.err, re.DOTALL), result.err
        assert "Traceback" not in result.err
        assert not (run_folder / "lightning_logs").exists()


@pytest.mark.slow
def test_an_error_of_one_class_in_a_list_is_shown(command, run_folder, monkeypatch):
    logger = "--trainer.logger=TensorBoardLogger", "--trainer.logger.save_dir=."
    command("fit", "--model=Classifier", *logger, "--print_config")  # its options, which are found once, are as always
    monkeypatch.setattr("lightning.pytorch.loggers.tensorboard._TENSORBOARD_AVAILABLE", False)
    monkeypatch.setattr("lightning.fabric.loggers.tensorboard._TENSORBOARD_AVAILABLE", False)
    monkeypatch.setattr("lightning.fabric.loggers.tensorboard._TENSORBOARDX_AVAILABLE", False)
    (run_folder / "two.yaml").write_text(
        "trainer: {logger: [{class_path: CSVLogger, init_args: {save_dir: .}}, "
        "{class_path: TensorBoardLogger, init_args: {save_dir: .}}]}"
    )
    result = command("fit", "--model=Classifier", "--data=lightning_accel.DigitsDataModule", "--config=two.yaml")
    assert result.status == 1
    assert "TensorBoardLogger': Neither `tensorboard` nor `tensorboardX` is available" in result.err


PLANTED = """
from pathlib import Path
import lightning as L
import torch
Path(__file__).with_name("MARKER").touch()
class M(L.LightningModule): pass
class G(torch.nn.Module): pass
"""
MAKES_THE_MARKER = {"class_path": "os.mkdir", "init_args": {"path": "MARKER"}}  # a parser calls functions, too
IN_YAML = "{class_path: planted.G}"
GRAPHS = {"_class_path": "lightning_accel.RelationalGNN", "num_features": 1, "num_classes": 2}


@pytest.mark.slow
def test_checkpoint_has_nothing_imported(command, run_folder, checkpoints, monkeypatch):
    monkeypatch.syspath_prepend(run_folder)
    (run_folder / "planted.py").write_text(PLANTED)
    (run_folder / "gate.yaml").write_text(IN_YAML)
    content = torch.load(checkpoints, weights_only=True)
    data = ["--data=DigitsDataModule", "--ckpt_path=named.ckpt"]
    for settings, named in [
        ({"_class_path": "planted.M"}, "planted.M"),
        ({**content["hyper_parameters"], "gate": {"class_path": "planted.G"}}, "planted.G"),
        ({**content["hyper_parameters"], "gate": "planted.G"}, "planted.G"),
        ({**content["hyper_parameters"], "gate": IN_YAML}, "planted.G"),
        ({**content["hyper_parameters"], "gate": "gate.yaml"}, "gate.yaml"),
        ({**content["hyper_parameters"], "gate": "memory://gate.yaml"}, "memory://gate.yaml"),
        ({**GRAPHS, "layers": {"conv": "planted.G"}}, "planted.G"),
        ({**content["hyper_parameters"], "optimizer": MAKES_THE_MARKER}, "os.mkdir"),
    ]:
        torch.save({**content, "hyper_parameters": settings}, "named.ckpt")
        said = f"named.ckpt names {named}, which is not imported"
        with pytest.raises(UsageError, match=said):
            Checkpoint.read("named.ckpt").model_config()
        with pytest.raises(ValueError, match=said):
            load_teacher("named.ckpt")
        assert not (run_folder / "MARKER").exists()
    for subcommand in ("test", "predict"):
        result = command(subcommand, *OFF, *data)
        assert result.status == 2
        assert said in result.err, result.err
    assert not (run_folder / "MARKER").exists()
    command("test", *OFF, "--model=planted.M", *data)
    assert (run_folder / "MARKER").exists()  # as the user asked
    sys.modules.pop("planted")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("/tmp/x", "is a name in its dirpath; got '/tmp/x'. Give the folder as dirpath"),
        ("a/../../x", "is a name in its dirpath"),
        ("x" * 300, "has at most 200 bytes between slashes, so that files can be named by it; got 300"),
    ],
)
def test_checkpoints_stay_in_the_folder_of_their_run(run_folder, name, said):
    trainer = L.Trainer(accelerator="cpu", logger=False, callbacks=[ModelCheckpoint(filename=name)])
    with pytest.raises(UsageError, match=re.escape(f"ModelCheckpoint.filename {said}")):
        require_names(trainer)


@pytest.mark.slow
def test_logs_stay_in_the_folder_that_is_given(command, run_folder):
    result = command(*OURS, "--trainer.logger+={class_path: CSVLogger, init_args: {save_dir: runs, name: ../..}}")
    assert result.status == 2
    assert "CSVLogger.name is a name in its save_dir; got '../..'" in result.err
    assert not list(run_folder.iterdir())


@pytest.mark.slow
def test_checkpoint_with_objects_is_read_on_request(command, run_folder, checkpoints):
    path = with_an_object(checkpoints, run_folder)
    arguments = ["test", *OFF, "--data=DigitsDataModule", f"--ckpt_path={path}"]
    assert command(*arguments, "--weights_only=false").status == 0


@pytest.mark.slow
def test_resuming_needs_the_config_of_the_run(command, checkpoints):
    result = command("fit", *OFF, "--data=DigitsDataModule", f"--ckpt_path={checkpoints}")
    assert re.search(r"fit needs the model and the optimizer of its run: give --config", result.err)


@pytest.mark.parametrize(
    "text",
    [
        "a: &a {x: 1}\ndeep: {b: &b {<<: *a, x: 2}}\nc: {<<: *b, x: 3}\nd: *b\n",
        "a: &a {x: 1}\nb: &b {x: 2}\nc: {<<: [*a, *b], x: 3}\n",
        "a: {1: one, '1': text}\n",
        "a: [{x: 1}, {x: 1}]\n",
        "a: &a [*a]\n",
    ],
    ids=["merged from deeper", "merged from two", "number and text", "list", "holds itself"],
)
def test_yaml_whose_keys_differ_is_accepted(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    require_config_files(["--config", str(path)])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: {x: 1, y: 2, x: 1}\n", r"'x' stands twice.*line 1, column 17"),
        ("a:\n  - b: 1\n    b: 2\n", r"'b' stands twice.*line 3"),
        ("a: &a {x: 1}\nb: {<<: *a, x: 2, x: 3}\n", r"'x' stands twice.*line 2"),
        ("a: &a {x: 1, x: 2}\nb: {<<: *a}\n", r"'x' stands twice.*line 1"),
        ("a: {'x': 1, x: 2}\n", r"'x' stands twice"),
    ],
)
def test_key_that_stands_twice_is_refused_at_any_depth(tmp_path, text, said):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=rf"(?s){said}"):
        require_config_files(["--config", str(path)])


@pytest.mark.usefixtures("own")
def test_exit_of_own_code_keeps_its_words(command, own):
    own.write_text(
        own.read_text() + "\n\nclass Exits(OwnModule):\n    def setup(self, stage):\n        sys.exit('enough')\n"
    )
    own.write_text("import sys\n" + own.read_text())
    arguments = ["fit", *OFF, "--model=own_module.Exits", "--model.width=3", "--data=own_module.OwnData"]
    result = command(*arguments, "--trainer.logger=false", "--trainer.enable_checkpointing=false")
    assert (result.status, "enough" in result.err) == (1, True)


@pytest.mark.slow
def test_missing_layers_are_refused_even_where_later_ones_are_built(command, run_folder, checkpoints):
    state = torch.load(checkpoints, weights_only=True)
    del state["state_dict"]["norm.weight"]
    torch.save(state, run_folder / "less.ckpt")
    result = command("test", *OURS[1:], *THREE_EXPERTS, "--ckpt_path=less.ckpt")
    assert "the checkpoint has no norm.weight" in result.err


@pytest.mark.usefixtures("own")
def test_debug_shows_the_traceback(command):
    with pytest.raises(ValueError, match="no_such_attribute") as caught:
        command("fit", *OFF, "--model=own_module.Broken", "--model.width=3", "--debug")
    assert "self.layer.no_such_attribute.use()" in "".join(traceback.format_exception(caught.value))


@pytest.mark.usefixtures("own")
def test_error_of_own_code_says_where_it_was_raised(command, run_folder):
    result = command("fit", *OFF, "--model=own_module.Broken", "--model.width=3")
    assert re.search(
        rf"\(AttributeError.*{run_folder}/own_module.py, line \d+; --debug shows the traceback\)", result.err
    )


@pytest.mark.usefixtures("own")
def test_error_in_mid_run_keeps_its_traceback(command):
    arguments = ["fit", *OFF, "--model=own_module.BreaksLater", "--model.width=3", "--data=own_module.OwnData"]
    with pytest.raises(RuntimeError, match="planted in mid-run"):
        command(*arguments, "--trainer.logger=false", "--trainer.enable_checkpointing=false")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_folder_without_write_permission(command, run_folder):
    (run_folder / "locked").mkdir(mode=0o500)
    result = command(*OURS, "--trainer.default_root_dir=locked")
    assert re.search(r"cannot write to the log folder .*locked.*: Permission denied", result.err)


@pytest.mark.slow
@pytest.mark.usefixtures("own")
def test_folder_that_nothing_is_written_to_may_be_anywhere(command, run_folder):
    off = ["--trainer.logger=false", "--trainer.enable_checkpointing=false"]
    result = command(*OWN, *off, "--trainer.default_root_dir=own_module.py/logs")
    assert result.status == 0, result.err


def test_module_that_mends_old_checkpoints_is_left_to_do_so(checkpoints):
    class Mending(MoEClassifier):
        def on_load_checkpoint(self, checkpoint):
            pass

    checkpoint = Checkpoint.read(str(checkpoints))
    with pytest.raises(UsageError):
        checkpoint.require_fits(MoEClassifier(64, 10))
    checkpoint.require_fits(Mending(64, 10))
    lenient = L.LightningModule()
    lenient.strict_loading = False
    checkpoint.require_fits(lenient)


@pytest.mark.parametrize(
    ("callbacks", "parts", "options"),
    [
        (
            ["Pruning{'structure': 'width'}"],
            "Channels",
            "--trainer.callbacks+=Pruning --trainer.callbacks.structure=width",
        ),
        (
            ["OneShotPruning{'structure': 'block'}", "OneShotPruning{'structure': 'expert', 'exclude': []}"],
            "Blocks and experts",
            "structure=block --trainer.callbacks+=OneShotPruning --trainer.callbacks.structure=expert, or",
        ),
    ],
)
def test_checkpoint_of_a_model_without_some_parts_names_the_callback_that_removed_them(callbacks, parts, options):
    model = torch.nn.Linear(2, 3)
    plan = {"kept": {"weight": {"0": [0]}}, "shapes": {"weight": [3, 2]}, "attributes": {}}
    states = {key: {"masks": {"channel_plan": plan}} for key in callbacks}
    content = {"state_dict": {"weight": torch.zeros(1, 2), "bias": torch.zeros(3)}, "callbacks": states}
    checkpoint = Checkpoint(Path("x.ckpt"), content)
    whole = L.LightningModule()
    whole.register_parameter("weight", model.weight)
    whole.register_parameter("bias", model.bias)
    with pytest.raises(UsageError, match=f"{parts} of the checkpoint's model were removed") as error:
        checkpoint.require_fits(whole)
    assert options in str(error.value)
    present = [SimpleNamespace(state_key=key) for key in callbacks]
    with pytest.raises(UsageError, match="another model") as error:  # rebuilt: something else differs
        checkpoint.require_fits(whole, present)
    assert "were removed" not in str(error.value)


FAILING_LSTM = """
from lightning.pytorch.demos.boring_classes import BoringModel


class Recurrent(BoringModel):
    def forward(self, x):
        raise RuntimeError("could not create a primitive descriptor for the LSTM forward propagation primitive")
"""


def test_a_missing_kernel_is_told_with_what_to_do(command, run_folder):
    (run_folder / "recurrent.py").write_text(FAILING_LSTM)
    result = command("fit", *OFF, "--model=recurrent.Recurrent")
    assert "Give 32-true" in result.err
    assert "recurrent.py, line" in result.err


def test_a_full_disk_is_told_with_what_to_do(command, run_folder):
    fails = FAILING_LSTM.partition("RuntimeError")[0] + "OSError(28, 'No space left on device')\n"
    (run_folder / "without_room.py").write_text(fails)
    result = command("fit", *OFF, "--model=without_room.Recurrent")
    assert result.status == 1
    assert "give another by --trainer.default_root_dir" in result.err


def test_a_launcher_that_starts_other_processes_than_the_trainer_counts():
    options = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False}
    require_even_processes(L.Trainer(**options, strategy="ddp"))  # which starts them itself
    require_even_processes(L.Trainer(**options, strategy="ddp", plugins=[Dealt(0, 2)]))
    for strategy in ("accel_ddp", "accel_fsdp2", "accel_pipeline"):
        require_even_processes(L.Trainer(**options, strategy=strategy, plugins=[Dealt(0, 3)]))
    with pytest.raises(UsageError, match=r"3 processes were started, but rows would be dealt to 2: .* take accel_ddp"):
        require_even_processes(L.Trainer(**options, strategy="ddp", plugins=[Dealt(0, 3)]))


def test_warnings_of_the_package_are_told_without_their_place(command, monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", lambda message, category, filename, *_: f"{filename}: {message}\n")
    for _ in range(2):
        command("fit", "--no_such_option=1")
    assert warnings.formatwarning(UserWarning("x"), UserWarning, models.__file__, 3) == "warning: x\n"
    assert warnings.formatwarning(UserWarning("x"), UserWarning, L.__file__, 3) == f"{L.__file__}: x\n"
