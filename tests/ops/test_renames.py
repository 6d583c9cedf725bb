"""Old names of arguments work for one release: in calls, subclasses, checkpoints; configs are in tests/cli."""

import inspect

import lightning as L
import pytest
import torch
from torch import nn

from lightning_accel.ops.renames import DROPPED_IN, new_names_of, rename, renamed_arguments


@renamed_arguments(width="hidden_dim")
def make(dim: int, *, hidden_dim: int = 3) -> tuple[int, int]:
    return dim, hidden_dim


class Model(L.LightningModule):
    @renamed_arguments(width="hidden_dim")
    def __init__(self, dim: int = 2, hidden_dim: int = 3) -> None:
        """Make a layer."""
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(dim, hidden_dim)


class UserModel(Model):
    def __init__(self, scale: float, **kwargs) -> None:
        super().__init__(**kwargs)
        self.scale = scale


class UserModelOfFixedWidth(Model):
    def __init__(self, scale: float, width: int) -> None:
        super().__init__(hidden_dim=2 * width)
        self.scale = scale


def checkpoint(path, model, **hyperparameters):
    content = {"state_dict": model.state_dict(), "hyper_parameters": hyperparameters}
    torch.save({**content, "pytorch-lightning_version": L.__version__}, path)
    return path


def test_old_name_warns_and_arrives_under_the_new_one():
    assert make(1) == (1, 3)
    assert make(1, hidden_dim=5) == (1, 5)
    with pytest.warns(FutureWarning, match=f"^make: width is now called hidden_dim; .* {DROPPED_IN}$") as warned:
        assert make(1, width=5) == (1, 5)
    assert warned[0].filename == __file__
    with pytest.raises(TypeError, match="make has hidden_dim and width, its old name; leave width out"):
        make(1, width=5, hidden_dim=5)
    with pytest.raises(TypeError, match="unexpected keyword argument 'with'"):
        make(1, **{"with": 5})


def test_signature_shows_new_names_alone():
    assert list(inspect.signature(make).parameters) == ["dim", "hidden_dim"]
    assert list(inspect.signature(Model).parameters) == ["dim", "hidden_dim"]
    assert Model.__init__.__doc__ == "Make a layer."
    assert new_names_of(make) == new_names_of(Model) == new_names_of(UserModel) == {"width": "hidden_dim"}
    assert new_names_of(UserModelOfFixedWidth) == {}  # the name is its own
    assert new_names_of(L.LightningModule) == {}


def test_rename_leaves_other_values_and_their_order():
    with pytest.warns(FutureWarning, match="One: a is now called b"):
        assert list(rename({"x": 1, "a": 2, "y": 3}, {"a": "b"}, "One").items()) == [("x", 1), ("b", 2), ("y", 3)]


def test_hyperparameters_of_subclasses_are_saved_and_restored(tmp_path):
    model = UserModel(0.5, dim=4, hidden_dim=5)
    assert dict(model.hparams) == {"scale": 0.5, "dim": 4, "hidden_dim": 5}
    loaded = UserModel.load_from_checkpoint(checkpoint(tmp_path / "1.ckpt", model, **model.hparams))
    assert (loaded.scale, loaded.layer.weight.shape) == (0.5, (5, 4))
    assert dict(UserModelOfFixedWidth(0.5, 3).hparams) == {"scale": 0.5, "width": 3, "dim": 2, "hidden_dim": 6}

    with pytest.warns(FutureWarning):
        model = UserModel(0.5, dim=4, width=5)
    loaded = UserModel.load_from_checkpoint(checkpoint(tmp_path / "2.ckpt", model, **model.hparams))
    assert loaded.layer.weight.shape == (5, 4)


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")  # Lightning's call
@pytest.mark.parametrize(("loader", "by_command_line"), [(Model, False), (Model, True), (L.LightningModule, True)])
def test_checkpoints_with_old_names_load(tmp_path, loader, by_command_line):
    names = {"_class_path": f"{__name__}.Model", "_instantiator": "lightning.pytorch.cli.instantiate_module"}
    saved = {"dim": 4, "width": 5, "gone": 1, **(names if by_command_line else {})}
    path = checkpoint(tmp_path / "old.ckpt", Model(4, 5), **saved)
    with pytest.warns(FutureWarning, match="Model: width is now called hidden_dim"):
        model = loader.load_from_checkpoint(path)
    assert type(model) is Model
    assert dict(model.hparams).items() >= {"dim": 4, "hidden_dim": 5}.items()


def test_overrides_of_old_checkpoints_take_precedence(tmp_path):
    path = checkpoint(tmp_path / "old.ckpt", Model(4, 6), dim=4, width=5)
    assert Model.load_from_checkpoint(path, hidden_dim=6).layer.weight.shape == (6, 4)
    with pytest.raises(TypeError, match="unexpected keyword argument 'gone'"):
        Model(gone=1)
