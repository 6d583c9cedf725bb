"""A quantity predicted by a mixture of experts: the loss, the metrics, and the unit of the target."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LinearRegression
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import DigitsDataModule, MoEClassifier, MoERegressor, PredictionWriter, TabularDataModule
from lightning_accel.compress import export
from lightning_accel.compress.export.writing import Probabilities
from lightning_accel.models import Experts
from tests.models.test_moe import quiet_trainer

SIZES = {"dim": 8, "experts": Experts(4, hidden_dim=8)}


def regressor(lr=0.02, **options):
    return MoERegressor(optimizer=partial(torch.optim.AdamW, lr=lr), **SIZES, **options)


@pytest.fixture
def rows():
    """Two hundred rows with a linear target far from 0, whose standard deviation is far from 1."""
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, 500 + x @ torch.tensor([30.0, -20.0, 5.0]))


@pytest.fixture
def table(tmp_path, rows):
    x, y = rows.tensors
    path = tmp_path / "houses.csv"
    frame = pd.DataFrame(x.numpy(), columns=["a", "b", "c"]).assign(
        price=y.numpy(), town=["ab"[i % 2] for i in range(200)]
    )
    frame.to_csv(path, index=False)
    return path


def quantities(table, **options):
    return TabularDataModule(table, "price", **{"target_kind": "regression", "batch_size": 20, **options})


def test_figures_are_those_of_the_rows_in_the_unit_of_the_target(rows):
    model = regressor(num_features=3).eval()
    model.target_mean.fill_(500)
    model.target_std.fill_(40)
    found = quiet_trainer().validate(model, DataLoader(rows, batch_size=64), verbose=False)[0]
    x, y = rows.tensors
    with torch.no_grad():
        error = model(x).values - y
        torch.testing.assert_close(model(x).values, model._score(x)[0][:, 0] * 40 + 500)
    assert found == pytest.approx(
        {
            "val/loss": float((error / 40).square().mean()),
            "val/rmse": float(error.square().mean().sqrt()),
            "val/mae": float(error.abs().mean()),
        },
        rel=1e-5,
    )


@pytest.mark.slow
def test_a_linear_teacher_is_learnt_from_a_table(table, run_folder):
    model, data = regressor(), quantities(table)
    trainer = quiet_trainer(max_epochs=20, callbacks=[PredictionWriter("values.csv")], default_root_dir=run_folder)
    trainer.fit(model, data)
    assert (model.target_mean.tolist(), model.target_std.tolist()) == (
        pytest.approx(data.target_mean), pytest.approx(data.target_std)
    )  # fmt: skip
    figures = trainer.test(model, data, verbose=False)[0]
    assert figures["test/rmse"] < 0.25 * data.target_std[0]
    assert trainer.callback_metrics["test/loss"] < 0.06

    trainer.save_checkpoint("run.ckpt")
    loaded = MoERegressor.load_from_checkpoint("run.ckpt", weights_only=True).eval()
    features, target = data.test_rows.tensors
    torch.testing.assert_close(loaded(features).values, model.eval()(features).values, rtol=0, atol=0)

    trainer.predict(model, data)
    written = pd.read_csv("values.csv")
    assert list(written) == ["row", "file_row", "price", "value"]
    np.testing.assert_allclose(written["value"], loaded(features).values.detach(), rtol=1e-5)
    np.testing.assert_allclose(written["price"], target, rtol=1e-5)
    whole = pd.read_csv(table)
    np.testing.assert_allclose(whole["price"].iloc[written["file_row"]], written["price"])


@pytest.mark.slow
def test_the_error_on_diabetes_is_about_that_of_linear_regression(tmp_path):
    load_diabetes(as_frame=True, scaled=False).frame.to_csv(tmp_path / "diabetes.csv", index=False)
    data = TabularDataModule(tmp_path / "diabetes.csv", "target", target_kind="regression")
    torch.manual_seed(0)
    model = MoERegressor(dim=32, experts=Experts(4, hidden_dim=32))
    trainer = quiet_trainer(max_epochs=10)
    trainer.fit(model, data)
    (x, y), (held_out, target) = data.train_rows.tensors, data.test_rows.tensors
    linear = LinearRegression().fit(x.numpy(), y.numpy()).predict(held_out.numpy())
    expected = np.sqrt(np.square(linear - target.numpy()).mean())  # 60.9; that of the mean of the training rows is 69.4
    assert trainer.test(model, data, verbose=False)[0]["test/rmse"] == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("model", "data", "said"),
    [
        (MoEClassifier, quantities, "MoEClassifier predicts classes.*has a quantity as target. Take MoERegressor"),
        (partial(MoEClassifier, 5, 3), quantities, "Take MoERegressor"),
        (MoERegressor, lambda table: TabularDataModule(table, "town"), "predicts a quantity.*has classes as target"),
        (MoERegressor, lambda _: DigitsDataModule(), r"Take MoEClassifier, or .*--data\.target_kind regression"),
    ],
    ids=["classes", "given classes", "quantity", "digits"],
)
def test_targets_of_another_kind_are_refused_before_training(table, model, data, said):
    with pytest.raises(ValueError, match=rf"(?s){said}"):
        quiet_trainer().fit(model(), data(table))


@pytest.mark.parametrize("shape", [(4, 1), (4, 2), ()])
def test_targets_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"targets must be of shape \(4,\); got"):
        regressor(num_features=3).training_step((torch.randn(4, 3), torch.zeros(shape)), 0)


@pytest.mark.parametrize("kind", ["quantity", "classes"])
def test_figures_are_summed_in_float32_where_parameters_are_bf16(kind, rows):
    model = regressor(num_features=3) if kind == "quantity" else MoEClassifier(3, 3, **SIZES)
    x = rows.tensors[0]
    data = DataLoader(TensorDataset(x, x[:, 0] if kind == "quantity" else x.argmin(dim=1)), batch_size=50)
    trainer = quiet_trainer(precision="bf16-true")
    trainer.fit(model, data, data)
    assert trainer.callback_metrics["val/loss"].dtype == model.val_loss.weight.dtype == torch.float32
    trainer.test(model, data, verbose=False)
    assert model.test_loss.weight.dtype == torch.float32


def test_probabilities_of_values_are_refused(tmp_path, rows):
    model, x = regressor(num_features=3).eval(), rows.tensors[0]
    with pytest.raises(ValueError, match=r"of classes, .*first output is of shape \(200,\)"):
        export(model, [((x,), {})], tmp_path / "m.pt2", postprocess=Probabilities())
