import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import RBM, FullyShardedStrategy
from lightning_accel.callbacks import RBMMonitor
from lightning_accel.callbacks.monitors.rbm_pictures import (
    RBMView,
    draw_rbm,
    filters,
    picture_shape,
    plain_copy,
    tile,
    to_pixels,
)
from lightning_accel.models import DeepBeliefNetwork, FineTuning, Stage
from lightning_accel.nn import ContrastiveDivergence
from tests.ranks import run_ranks


class Foreign(L.LightningModule):
    """A module that knows nothing of the callback, with two machines, the upper one with labels."""

    def __init__(self, samplers=("pcd", "pcd"), sizes=(12, 5, 4), **options):
        super().__init__()
        first, second, third = sizes
        self.lower = RBM(first, second, **options)
        self.upper = nn.ModuleDict({"inner": RBM(second, third, num_labels=3)})
        self.sampling = [ContrastiveDivergence(one, num_chains=6) for one in samplers]

    def training_step(self, batch, batch_idx):
        visible = batch[0].flatten(1)
        gap = self.sampling[0](self.lower, visible)
        above = torch.cat([self.lower(visible).detach(), F.one_hot(batch[1], 3)], dim=1)
        return gap + self.sampling[1](self.upper["inner"], above)

    def validation_step(self, batch, batch_idx): ...

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OneMachine(L.LightningModule):
    """The smallest module that trains a machine; batches are a tensor alone."""

    def __init__(self, sampler="pcd", rbm=None):
        super().__init__()
        self.rbm = rbm or RBM(12, 5)
        self.sampling = ContrastiveDivergence(sampler, num_chains=6)

    def training_step(self, batch, batch_idx):
        return self.sampling(self.rbm, batch.flatten(1))

    def validation_step(self, batch, batch_idx): ...

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rows(seed, num_rows=20):
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(num_rows, 1, 4, 3, generator=generator).round()
    return images, torch.arange(num_rows) % 3


def trainer(callback, folder, **options):
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return L.Trainer(
        **{
            **dict.fromkeys(off, False), "accelerator": "cpu", "devices": 1, "max_epochs": 2, "callbacks": callback,
            "default_root_dir": folder, "log_every_n_steps": 1, **options,
        }
    )  # fmt: skip


def loaders(labelled=True):
    data = [TensorDataset(*rows(seed)) if labelled else rows(seed)[0] for seed in (0, 1)]
    return [DataLoader(one, 6) for one in data]


def fit(module, callback, folder, labelled=True, ckpt_path=None, **options):
    run = trainer(callback, folder, **options)
    run.fit(module, *loaders(labelled), ckpt_path=ckpt_path, **({} if ckpt_path is None else {"weights_only": True}))
    return run


@pytest.fixture
def empty_pictures(monkeypatch):
    """Nothing is in the pictures, which take most of a run's time."""
    monkeypatch.setattr("lightning_accel.callbacks.monitors.rbm.draw_rbm", lambda *_: Figure())


@pytest.mark.slow
def test_picture_lies_in_the_run_folder_and_in_tensorboard(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    drawn = []
    logger.experiment.add_figure = lambda tag, figure, step: drawn.append((tag, step))
    fit(Foreign(), RBMMonitor("pictures"), tmp_path, logger=logger)
    folder = tmp_path / "lightning_logs" / "version_0" / "pictures"
    assert sorted(path.name for path in folder.iterdir()) == ["rbm_lower.png", "rbm_upper.inner.png"]
    assert all(path.stat().st_size > 5000 for path in folder.iterdir())
    assert drawn == [(f"rbm/{name}", step) for step in (4, 8) for name in ("lower", "upper.inner")]


@pytest.mark.slow
def test_loggers_that_take_images_get_them(tmp_path):
    class Images(L.pytorch.loggers.CSVLogger):
        images = []  # noqa: RUF012

        def log_image(self, key, images, step):
            self.images.append((key, images[0].shape[2], step))

    fit(OneMachine(), RBMMonitor(), tmp_path, labelled=False, logger=Images(tmp_path), max_epochs=1)
    assert Images.images == [("rbm/rbm", 4, 4)]


@pytest.mark.usefixtures("empty_pictures")
def test_views_show_chains_rows_and_what_they_stand_for(tmp_path):
    module, callback = Foreign(), RBMMonitor()
    fit(module, callback, tmp_path)
    views = callback._compute_views(module)
    lower, upper = views["lower"], views["upper.inner"]
    pixels = rows(1)[0][:6].flatten(1)
    assert lower.rows.equal(pixels)
    assert upper.pixels.equal(pixels)
    torch.testing.assert_close(upper.rows[:, :5], module.lower(pixels).detach())
    assert upper.rows[:, 5:].argmax(dim=1).tolist() == rows(1)[1][:6].tolist()
    assert lower.chains.equal(module.sampling[0].chains)
    assert upper.chains.equal(module.sampling[1].chains)
    assert [view.below for view in views.values()] == [[], [lower.rbm]]


def test_upper_machines_are_shown_in_the_lowest_ones_pixels():
    first, second, third = RBM(6, 5, num_labels=2), RBM(5, 4), RBM(4, 3, num_labels=2)
    for rbm in (first, second, third):
        nn.init.normal_(rbm.weight)
        nn.init.normal_(rbm.visible_bias)
    states = torch.rand(7, 6)
    middle = (states[:, :4] @ second.weight + second.visible_bias).sigmoid()
    pixels = (middle @ first.weight + first.visible_bias)[:, :6].sigmoid()
    torch.testing.assert_close(to_pixels(states, third, [first, second]), pixels)
    expected = third.weight[:, :4] @ second.weight @ first.weight[:, :6]
    torch.testing.assert_close(filters(third, [first, second]), expected)
    assert to_pixels(torch.rand(7, 8), first, []).shape == (7, 6)


@pytest.mark.usefixtures("empty_pictures")
def test_training_is_the_same_with_and_without_it(tmp_path):
    results = []
    for callback in (None, RBMMonitor()):
        torch.manual_seed(0)
        module = Foreign()
        fit(module, callback, tmp_path)
        results.append((module.state_dict(), torch.rand(1), [one.state_dict() for one in module.sampling]))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.usefixtures("empty_pictures")
def test_at_most_32_samples_are_kept_and_none_of_the_batch(tmp_path):
    callback, images = RBMMonitor(), rows(0, 40)[0]
    trainer(callback, tmp_path).fit(OneMachine(), *[DataLoader(images, 40)] * 2)
    assert callback._samples.values.equal(images[:32])
    assert callback._samples.values.untyped_storage().nbytes() == 32 * 12 * 4


@pytest.mark.slow
def test_without_validation_training_rows_are_drawn_at_the_end(tmp_path):
    module, callback = OneMachine(), RBMMonitor()
    trainer(callback, tmp_path).fit(module, loaders(False)[0])
    assert (tmp_path / "figures" / "rbm_rbm.png").stat().st_size > 5000
    assert callback._compute_views(module)["rbm"].rows.equal(rows(0)[0][:6].flatten(1))


@pytest.mark.usefixtures("empty_pictures")
def test_batches_may_be_dicts(tmp_path):
    class OfDicts(Foreign):
        def training_step(self, batch, batch_idx):
            return super().training_step(list(batch.values()), batch_idx)

    data = [[{"image": image, "class": label} for image, label in zip(*rows(seed), strict=True)] for seed in (0, 1)]
    module, callback = OfDicts(), RBMMonitor()
    trainer(callback, tmp_path).fit(module, *(DataLoader(one, 6) for one in data))
    assert callback._compute_views(module)["upper.inner"].rows[:, 5:].argmax(dim=1).tolist() == [0, 1, 2, 0, 1, 2]


def test_validation_outside_of_a_fit_draws_nothing(tmp_path):
    trainer(RBMMonitor(), tmp_path).validate(OneMachine(), loaders(False)[1], verbose=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of Lightning's own, which pytest.warns raises anew
def test_rows_that_fit_no_machine_are_told(tmp_path):
    class Encoded(OneMachine):
        def training_step(self, batch, batch_idx):
            return self.sampling(self.rbm, batch.flatten(1)[:, :7])

    with pytest.warns(UserWarning, match="rows of 12 values, the first part of a batch, fit no RBM of Encoded"):
        fit(Encoded(rbm=RBM(7, 5)), RBMMonitor(), tmp_path, labelled=False)
    assert (tmp_path / "figures" / "rbm_rbm.png").exists()


@pytest.mark.sampled(default=1)
@pytest.mark.parametrize(
    "rbm",
    [
        lambda: RBM(12, 5, visible="gaussian", learn_variance=True),
        lambda: RBM(12, 5).double(),
        lambda: RBM(12, 5).bfloat16(),
    ],
    ids=["gaussian", "double", "bfloat16"],
)
def test_every_kind_of_unit_and_type_is_drawn(tmp_path, rbm):
    module, callback = OneMachine("cd", rbm()), RBMMonitor()
    module.training_step = lambda batch, batch_idx: module.rbm.weight.sum() * 0
    fit(module, callback, tmp_path, labelled=False, max_epochs=1)
    assert (tmp_path / "figures" / "rbm_rbm.png").exists()
    view = callback._compute_views(module)["rbm"]
    dtype = torch.promote_types(module.rbm.weight.dtype, torch.float32)
    assert view.rows.dtype == view.rbm.weight.dtype == dtype
    assert view.rbm.weight.equal(module.rbm.weight.to(dtype))


def test_weights_that_are_not_finite_are_drawn(tmp_path):
    module = OneMachine("cd", RBM(12, 5))
    nn.init.constant_(module.rbm.weight, torch.nan)
    fit(module, RBMMonitor(), tmp_path, labelled=False, max_epochs=1)
    assert (tmp_path / "figures" / "rbm_rbm.png").exists()


def test_tiles_stand_in_rows_with_gaps():
    sheet = tile(np.arange(12.0).reshape(3, 2, 2), 2)
    nan = np.nan
    expected = [[0, 1, nan, 4, 5], [2, 3, nan, 6, 7], [nan] * 5, [8, 9, nan, nan, nan], [10, 11, nan, nan, nan]]
    np.testing.assert_array_equal(sheet, expected)


@pytest.mark.parametrize(
    ("num_pixels", "shape", "expected"),
    [(12, (4, 3), (4, 3)), (12, (1, 4, 3), (4, 3)), (12, (3, 2, 2), (6, 2)), (9, None, (3, 3)), (9, (4, 3), (3, 3)),
     (12, None, (1, 12)), (12, (12,), (1, 12))],
)  # fmt: skip
def test_shape_of_a_picture(num_pixels, shape, expected):
    assert picture_shape(num_pixels, shape) == expected


@pytest.mark.parametrize("num_rows", [1, 2, 5, 40])
def test_each_row_stands_over_its_reconstruction(tmp_path, num_rows):
    module, callback = OneMachine(rbm=RBM(12, 5)), RBMMonitor()
    view = callback._compute_views(module)["rbm"]
    data = torch.rand(num_rows, 12)
    figure = draw_rbm(view._replace(rows=data, pixels=data), "machine", (4, 3))
    assert len(figure.axes) == 2  # none of samples, as there are no chains
    (image,) = figure.axes[1].images
    sheet = image.get_array().filled(-1)
    columns = (sheet.shape[1] + 1) // 4
    assert (sheet.shape[0] + 1) % 10 == 0
    again = view.rbm.reconstruct(data).view(-1, 4, 3).numpy()
    for row in range((sheet.shape[0] + 1) // 10):
        for column in range(columns):
            at = row * columns + column
            top, left = row * 10, column * 4
            np.testing.assert_allclose(sheet[top : top + 4, left : left + 3], data[at].view(4, 3).numpy())
            np.testing.assert_allclose(sheet[top + 5 : top + 9, left : left + 3], again[at])
    marks = figure.axes[1].get_yticklabels()
    assert [mark.get_text() for mark in marks] == ["data", "model"] * ((sheet.shape[0] + 1) // 10)
    assert [mark.get_position()[1] for mark in marks] == [5 * row + 1.5 for row in range(len(marks))]


def test_only_what_is_there_has_a_panel():
    view = RBMView(plain_copy(RBM(12, 5)), [], torch.rand(3, 12), torch.rand(3, 12), torch.rand(4, 5))
    assert len(draw_rbm(view, "whole", (4, 3)).axes) == 3
    assert len(draw_rbm(view._replace(chains=None), "without chains", (4, 3)).axes) == 2
    (axis,) = draw_rbm(view._replace(chains=None, rows=None), "filters alone", (4, 3)).axes
    assert axis.get_title().startswith("filters of 5 hidden units")


def test_each_filter_has_a_colour_scale_of_its_own():
    rbm = RBM(12, 5)
    with torch.no_grad():
        rbm.weight.copy_(torch.logspace(-3, 1, 5)[:, None] * torch.linspace(-1, 0.5, 12))
        rbm.weight[4] = 0
    (axis,) = draw_rbm(RBMView(plain_copy(rbm), [], None, None, None), "machine", (4, 3)).axes
    (image,) = axis.images
    sheet = image.get_array()
    assert image.get_clim() == (-1, 1)
    for filter_ in (sheet[:4, :3], sheet[:4, 4:7], sheet[5:9, :3]):
        assert (filter_.min(), filter_.max()) == (-1, pytest.approx(0.5))


@pytest.mark.slow
def test_machines_are_drawn_while_they_are_trained(tmp_path, monkeypatch):
    """A belief network ends in a classifier, whose layers are no RBMs any more."""
    drawn = []
    monkeypatch.setattr(
        "lightning_accel.callbacks.monitors.rbm.draw_rbm", lambda view, title, _: drawn.append(title) or Figure()
    )
    fine_tuning = FineTuning(method="classifier", epochs=3)
    module = DeepBeliefNetwork(12, [5, 4], [Stage(2)], num_classes=3, fine_tuning=fine_tuning)
    run = trainer(RBMMonitor(), tmp_path, max_epochs=7, check_val_every_n_epoch=7)
    run.fit(module, *loaders())
    assert drawn == ["stack.rbms.0 after 8 steps", "stack.rbms.1 after 16 steps"]
    assert run.global_step == 28


@pytest.mark.usefixtures("empty_pictures")
@pytest.mark.parametrize("method", ["none", "updown"])
def test_rbms_of_a_belief_network_that_are_trained(tmp_path, method):
    epochs = 1 if method == "updown" else 0
    module = DeepBeliefNetwork(12, [5, 4], [Stage(1)], fine_tuning=FineTuning(method=method, epochs=max(1, epochs)))
    seen = []
    module.on_train_epoch_end = lambda: seen.append(
        [module.built_stack.layers.index(one) for one in module.trained_rbms]
    )
    trainer([], tmp_path, max_epochs=2 + epochs, limit_val_batches=0).fit(module, loaders(False)[0])
    assert seen == [[0], [1], [0, 1]][: 2 + epochs]


def test_module_without_machines_is_refused(tmp_path):
    class Plain(OneMachine):
        def __init__(self):
            L.LightningModule.__init__(self)
            self.layer = nn.Linear(2, 2)

    with pytest.raises(TypeError, match="RBMMonitor found no RBM in Plain; take the callback out, or put such layers"):
        fit(Plain(), RBMMonitor(), tmp_path)


def test_shapes_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"as many pixels as an RBM of Foreign has .*, 12, 5; got \(3, 3\), 9 pixels"):
        fit(Foreign(), RBMMonitor(image_shape=(3, 3)), tmp_path)


def check_ranks(rank, folder, sharded):
    torch.manual_seed(0)
    module, callback = OneMachine(), RBMMonitor()
    strategy = FullyShardedStrategy if sharded else DDPStrategy
    run = trainer(callback, folder, strategy=strategy(), devices=2, max_epochs=1)
    run.fit(module, *loaders(False))
    at_the_end = RBMMonitor("end")
    trainer(at_the_end, folder, strategy=strategy(), devices=2, max_epochs=1).fit(module, loaders(False)[0])
    return [path.name for path in sorted(folder.glob("*/*.png"))]


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_the_first_of_two_processes_draws(tmp_path, sharded):
    assert run_ranks(check_ranks, tmp_path, sharded)[0] == ["rbm_rbm.png", "rbm_rbm.png"]


@pytest.mark.gpu
def test_machines_on_cuda_are_drawn(tmp_path):
    module, callback = OneMachine(), RBMMonitor()
    fit(module, callback, tmp_path, labelled=False, accelerator="gpu", precision="bf16-mixed")
    view = callback._compute_views(module)["rbm"]
    assert (view.rows.device.type, view.rbm.weight.device.type) == ("cpu", "cpu")
    assert (tmp_path / "figures" / "rbm_rbm.png").exists()
