"""Old names of arguments work for one release: in calls, subclasses, checkpoints; configs are in tests/cli."""

import inspect
from contextlib import nullcontext
from dataclasses import dataclass

import lightning as L
import pytest
import torch
from torch import nn

from lightning_accel.models.hooks import keep_plain_hyperparameters
from lightning_accel.ops.options import read_options
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


@dataclass(frozen=True)
class Layers:
    num_layers: int = 1
    dropout: float = 0.0


class GroupedModel(L.LightningModule):
    """A model whose options ``depth`` and ``dropout`` have become ``layers.num_layers`` and ``layers.dropout``."""

    @renamed_arguments(depth="layers.num_layers", num_layers="layers.num_layers", dropout="layers.dropout")
    def __init__(self, dim: int = 2, *, layers: Layers = Layers()) -> None:
        super().__init__()
        layers = read_options(Layers, layers)
        self.save_hyperparameters()
        keep_plain_hyperparameters(self)
        self.options = layers
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers.num_layers))


class UserGroupedModel(GroupedModel):
    def __init__(self, scale: float, **kwargs) -> None:
        super().__init__(**kwargs)
        self.scale = scale


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


@pytest.mark.slow
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


@pytest.mark.sampled(default=2)
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


def test_old_names_of_options_of_a_dataclass_warn_and_arrive_in_it():
    with pytest.warns(FutureWarning, match=r"^GroupedModel: depth is now called layers\.num_layers") as warned:
        assert GroupedModel(3, depth=2).options == Layers(2, 0.0)
    assert warned[0].filename == __file__
    for options in (
        {"num_layers": 2, "dropout": 0.5},
        {"depth": 2, "layers": {"dropout": 0.5}},
        {"layers": {"dropout": 0.5}, "depth": 2},
    ):
        with pytest.warns(FutureWarning):
            assert GroupedModel(**options).options == Layers(2, 0.5)
    with pytest.raises(
        TypeError, match=r"GroupedModel has layers\.num_layers and depth, its old name; leave depth out"
    ):
        GroupedModel(depth=2, layers=Layers(dropout=0.5))
    assert list(inspect.signature(GroupedModel).parameters) == ["dim", "layers"]
    assert GroupedModel(layers={"num_layers": 2}).options == GroupedModel(layers=Layers(2)).options == Layers(2)
    with pytest.raises(TypeError, match="Layers has no option 'depth'; it has num_layers, dropout"):
        GroupedModel(layers={"depth": 2})
    with pytest.raises(TypeError, match="need Layers, or a mapping of its options; got 2"):
        GroupedModel(layers=2)


@pytest.mark.sampled(default=1)
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")  # Lightning's call
@pytest.mark.parametrize("by_command_line", [False, True])
@pytest.mark.parametrize(
    "saved",
    [
        {"depth": 3, "dropout": 0.5},
        {"depth": 3, "layers": {"dropout": 0.5}},
        {"layers": {"num_layers": 3, "dropout": 0.5}},
    ],
    ids=str,
)
def test_checkpoints_with_options_by_old_and_new_names_load(tmp_path, saved, by_command_line):
    names = {"_class_path": f"{__name__}.GroupedModel", "_instantiator": "lightning.pytorch.cli.instantiate_module"}
    saved = {"dim": 4, "gone": 1, **saved}
    path = checkpoint(
        tmp_path / "1.ckpt", GroupedModel(4, layers=Layers(3)), **saved, **(names if by_command_line else {})
    )
    with pytest.warns(FutureWarning) if "depth" in saved else nullcontext():
        model = GroupedModel.load_from_checkpoint(path)
    assert model.options == Layers(3, 0.5)
    assert dict(model.hparams).items() >= {"dim": 4, "layers": {"num_layers": 3, "dropout": 0.5}}.items()
    if "depth" in saved:  # an override of an old name by the new one
        path = checkpoint(tmp_path / "2.ckpt", GroupedModel(4, layers=Layers(2)), **saved)
        loaded = GroupedModel.load_from_checkpoint(path, layers=Layers(2))
        assert len(loaded.layers) == 2


def test_options_of_subclasses_are_saved_and_restored(tmp_path):
    model = UserGroupedModel(0.5, dim=4, layers=Layers(2, 0.5))
    assert dict(model.hparams) == {"scale": 0.5, "dim": 4, "layers": {"num_layers": 2, "dropout": 0.5}}
    path = checkpoint(tmp_path / "1.ckpt", model, **model.hparams)
    assert UserGroupedModel.load_from_checkpoint(path, weights_only=True).options == Layers(2, 0.5)
    with pytest.warns(FutureWarning):
        model = UserGroupedModel(0.5, dim=4, depth=2)
    loaded = UserGroupedModel.load_from_checkpoint(checkpoint(tmp_path / "2.ckpt", model, **model.hparams))
    assert loaded.options == Layers(2)
