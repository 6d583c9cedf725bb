"""What settings of a checkpoint may name; a config parser calls functions with the arguments beside them."""

import sys
from pathlib import Path

import pytest

from lightning_accel.strategies.checkpoints.named_code import code_named_in


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """A module of the user's own, imported."""
    (tmp_path / "own_code.py").write_text("class Plan: pass\n\n\ndef run(command): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import own_code

    yield own_code
    sys.modules.pop("own_code")


@pytest.mark.parametrize(
    "path",
    [
        "os.system", "os.mkdir", "subprocess.Popen", "builtins.exec", "torch.load", "torch.hub.load",
        "torch.distributed.run.main", "torch.nn.Module.load_state_dict", "torch.utils.data.DataLoader",
        "lightning.pytorch.LightningModule.load_from_checkpoint", "lightning_accel.RelationalGNN.load_from_checkpoint",
        "lightning_accel.callbacks.distillation.teacher.load_teacher",
        "lightning_accel.ops.native.NativeLibrary", "own_code.run",
        "numpy.memmap", "wave.open",
    ],
)  # fmt: skip
def test_functions_and_classes_that_act_are_named(path, user_module):
    assert code_named_in({"x": [{"class_path": path, "init_args": {"command": "true"}}]}) == [path]
    escaped = '{"class_path": "' + path.replace(".", "\\x2e") + '"}'
    assert path not in escaped
    assert code_named_in({"x": escaped}) == [path]


def test_what_checkpoints_of_a_command_line_name_is_harmless(user_module, tmp_path):
    settings = {
        "_class_path": "lightning_accel.models.moe.MoEClassifier",
        "gate": {"class_path": "lightning_accel.nn.TopKGate", "init_args": {"noise": 0.5}},
        "optimizer": "torch.optim.SGD",
        "more": [
            "torch.optim.lr_scheduler.CosineAnnealingLR",
            "torch.nn.functional.relu",
            "torch.tanh",
            "torch.float32",
        ],
        "plan": {"class_path": "own_code.Plan"},
        "texts": ["a.b", "1.5", "torch.no_such_name", r"\w+\.x", "sys", "e.g. this"],
    }
    assert code_named_in(settings) == []


def test_a_file_in_the_home_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    Path(tmp_path, "gate.yaml").touch()
    assert code_named_in({"gate": "~/gate.yaml"}) == ["~/gate.yaml"]
