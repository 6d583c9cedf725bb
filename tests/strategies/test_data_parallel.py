import copy
from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC

from lightning_accel.callbacks import WeightedAccumulation
from lightning_accel.models import Experts, MoEClassifier, MoELanguageModel
from tests.tolerance import ADAM_EPS, CLOSE

QUIET = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "enable_checkpointing": False, "max_epochs": 1,
}  # fmt: skip


class Plain(L.LightningModule):
    """A module of somebody else's, with metrics, a recurrent layer and tied weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Linear(4, 4)
        self.network = nn.Sequential(self.inner, nn.Tanh(), self.inner, nn.LayerNorm(4))
        self.recurrent = nn.LSTM(4, 6, batch_first=True)
        self.head = nn.ParameterList([torch.randn(6)])
        self.metrics = MetricCollection({"accuracy": BinaryAccuracy(), "auroc": BinaryAUROC()})
        self.val_accuracy, self.mean = BinaryAccuracy(), MeanMetric()
        self.dtypes, self.threads, self.seen = set(), [], {}

    def forward(self, x):
        out, _ = self.recurrent(self.network(x))
        self.dtypes.add(self.network[0](x).dtype)
        return out[:, -1] @ self.head[0].to(out.dtype)

    def loss(self, batch, stage):
        x, y = batch["x"], batch["y"]
        logits = self(x).float()
        loss = F.binary_cross_entropy_with_logits(logits, y)
        self.log(f"{stage}/loss", loss, on_step=stage == "train", on_epoch=True)
        self.log(f"{stage}/count", float(len(x)), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log_dict({f"{stage}/largest": x.max()}, reduce_fx="max", on_step=False, on_epoch=True)
        return loss, logits.sigmoid(), y.long()

    def training_step(self, batch, batch_idx):
        loss, p, y = self.loss(batch, "train")
        self.metrics.update(p, y)
        self.log_dict(self.metrics, on_step=False, on_epoch=True)
        return {"loss": loss, "p": p}

    def validation_step(self, batch, batch_idx):
        loss, p, y = self.loss(batch, "val")
        assert not torch.is_grad_enabled()
        self.log("val/batch_accuracy", self.val_accuracy(p, y), on_epoch=True)
        self.log("val/accuracy", self.val_accuracy)
        self.mean(loss, weight=len(p))

    def on_validation_epoch_end(self):
        self.log("val/mean", self.mean.compute())
        self.mean.reset()

    def predict_step(self, batch, batch_idx):
        return self(batch["x"])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01, eps=ADAM_EPS)


def rows(sizes=(5, 4, 7, 1)):
    generator = torch.Generator().manual_seed(4)
    return [
        {"x": torch.randn(n, 3, 4, generator=generator), "y": torch.randint(2, (n,), generator=generator).float()}
        for n in sizes
    ]


def trainer_of(devices, **options):
    strategy = "auto" if devices == 1 else "accel_dp"
    return L.Trainer(strategy=strategy, devices=devices, **{**QUIET, **options})


def fit(model, devices, data=None, ckpt_path=None, **options):
    data = DataLoader(rows() if data is None else data, batch_size=None)
    trainer_of(devices, **options).fit(model, data, data if model_validates(model) else None, ckpt_path=ckpt_path)
    return model


def model_validates(model):
    return type(model).validation_step is not L.LightningModule.validation_step


def assert_same(actual, expected, rtol=1e-5, atol=1e-5):
    torch.testing.assert_close(actual.state_dict(), expected.state_dict(), rtol=rtol, atol=atol)
    a, b = actual.trainer.callback_metrics, expected.trainer.callback_metrics
    assert a.keys() == b.keys()
    torch.testing.assert_close(dict(a), dict(b), rtol=rtol, atol=atol)


@pytest.mark.sampled(default=1)
@pytest.mark.parametrize("devices", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    "options",
    [{"max_epochs": 2}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}, {"precision": "64-true"}],
    ids=["plain", "accumulated_and_clipped", "double"],
)
def test_equals_one_device(devices, options):
    actual = fit(Plain(), devices, **options)
    assert_same(actual, fit(Plain(), 1, **options))
    assert "log" not in vars(actual)
    data = DataLoader(rows(), batch_size=None)
    precision = {"precision": options.get("precision", "32-true")}
    predicted = trainer_of(devices, **precision).predict(copy.deepcopy(actual), data)
    torch.testing.assert_close(predicted, trainer_of(1, **precision).predict(copy.deepcopy(actual), data))


def scaled():
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8))


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_autocast_reaches_the_replicas(half):
    options = {"plugins": [scaled()]} if half == "fp16" else {"precision": "bf16-mixed"}
    actual = fit(Plain(), 2, **options)
    assert actual.dtypes == {torch.float16 if half == "fp16" else torch.bfloat16}
    expected = fit(Plain(), 1, **({"plugins": [scaled()]} if half == "fp16" else options))
    assert_same(actual, expected, rtol=3e-2, atol=3e-2)


def test_logged_once_with_the_value_of_the_whole_batch(tmp_path):
    for devices in (1, 2):
        logger = CSVLogger(tmp_path, name="", version=str(devices))
        fit(Plain(), devices, logger=logger, log_every_n_steps=1)
    one, two = ((tmp_path / str(d) / "metrics.csv").read_text().splitlines() for d in (1, 2))
    assert len(one) == len(two)
    header = one[0].split(",")
    assert header == two[0].split(",")
    column = header.index("train/loss_step")
    losses = [[float(line.split(",")[column]) for line in lines[1:] if line.split(",")[column]] for lines in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(losses[0]) == 4


@pytest.mark.slow
def test_checkpoint_goes_on_with_either_number_of_devices(tmp_path):
    whole = fit(Plain(), 2, max_epochs=2)
    half = fit(Plain(), 2)
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    for devices in (1, 2):
        resumed = fit(Plain(), devices, max_epochs=2, ckpt_path=tmp_path / "half.ckpt")
        exact = {"rtol": 0, "atol": 0} if devices == 2 else CLOSE
        torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), **exact)


class Dropping(Plain):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.5, self.training))


def test_random_numbers_come_in_the_same_order_each_time():
    first, second = (fit(Dropping(), 2) for _ in range(2))
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)


class Normalised(Plain):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("rows_seen", torch.zeros((), dtype=torch.int64))
        self.last = 0

    def forward(self, x):
        if self.training:
            self.rows_seen += len(x)
            self.last = len(x)
        return super().forward(self.norm(x))


def test_buffers_and_attributes_of_the_first_device_survive():
    model = fit(Normalised(), 2, rows((5, 6)))
    assert model.rows_seen == 3 + 3
    assert model.last == 3
    assert model.norm.num_batches_tracked == 2
    firsts = nn.BatchNorm1d(3)
    for batch in rows((5, 6)):
        firsts(batch["x"][:3])
    torch.testing.assert_close(model.norm.running_mean, firsts.running_mean)


class LogsAndChanges(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("level", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        for value in (batch["x"].mean(), batch["y"].mean()):
            self.log("train/twice", value, on_step=False, on_epoch=True)
        self.log("train/level", self.level, on_step=False, on_epoch=True)
        self.level.add_(1)
        return super().training_step(batch, batch_idx)


def test_values_are_those_of_the_time_of_logging():
    assert_same(fit(LogsAndChanges(), 2), fit(LogsAndChanges(), 1))


class Weighted(Plain):
    def training_step(self, batch, batch_idx):
        tokens = batch["tokens"]
        loss = (self(batch["x"]).square() * tokens).sum() / tokens.sum()
        return {"loss": loss, "weight": tokens.sum()}


def test_weights_of_losses_are_heeded():
    data = [{**batch, "tokens": torch.arange(1.0, len(batch["x"]) + 1)} for batch in rows()]
    models = []
    for devices in (1, 2):
        callback = WeightedAccumulation()
        options = {"accumulate_grad_batches": 2, "callbacks": [callback], "limit_val_batches": 0}
        models.append(fit(Weighted(), devices, data, **options))
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), **CLOSE)


ADAMW = partial(torch.optim.AdamW, lr=0.01, eps=ADAM_EPS)


def classifier():
    torch.manual_seed(5)
    return MoEClassifier(num_features=6, num_classes=3, dim=8, experts=Experts(4, hidden_dim=8), optimizer=ADAMW)


def language_model():
    torch.manual_seed(5)
    sizes = {
        "dim": 8,
        "num_layers": 2,
        "attention": {"num_heads": 2},
        "experts": Experts(4, hidden_dim=8, z_weight=0.1),
    }
    return MoELanguageModel(vocab_size=11, **sizes, optimizer=ADAMW)


def classified():
    return [(torch.randn(n, 6), torch.randint(3, (n,))) for n in (7, 8, 3, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "data"), [(classifier, classified), (language_model, None)])
def test_our_models_equal_one_device(make, data):
    """The load of the experts is that of the whole batch, which the balance loss of the next step takes."""
    data = [torch.randint(11, (n, 9)) for n in (5, 6, 2)] if data is None else data()
    options = {"max_epochs": 3, "log_every_n_steps": 1}
    models = [fit(make(), devices, data, **options) for devices in (2, 1)]
    states = [{k: v for k, v in model.state_dict().items() if k != "tokens_seen"} for model in models]
    torch.testing.assert_close(*states, **CLOSE)
    metrics = [dict(model.trainer.callback_metrics) for model in models]
    for logged in metrics:
        logged.pop("train/tokens", None)
    torch.testing.assert_close(*metrics, **CLOSE)


class Failing(Plain):
    def forward(self, x):
        if len(x) == 2:  # the second part
            raise ArithmeticError("in the second replica")
        return super().forward(x)


def test_errors(monkeypatch):
    model = Failing()
    with pytest.raises(ArithmeticError, match="in the second replica"):
        fit(model, 2)
    assert "log" not in vars(model)
    by_hand = Plain()
    by_hand.automatic_optimization = False
    with pytest.raises(TypeError, match="accel_dp needs automatic optimization, but Plain"):
        fit(by_hand, 2)
    compiled = Plain()
    compiled.network.compile(backend="eager")
    with pytest.raises(TypeError, match="accel_dp cannot copy network, which is compiled"):
        fit(compiled, 2)
    with pytest.raises(ValueError, match="one process on one node, but there are 2 nodes"):
        fit(Plain(), 2, num_nodes=2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes; use strategy=ddp"):
        fit(Plain(), 2)


@pytest.mark.gpu(2)
def test_equals_one_device_on_cuda():
    options = {"accelerator": "cuda", "max_epochs": 2}
    actual, expected = fit(Plain(), 2, **options), fit(Plain(), 1, **options)
    assert_same(actual, expected, rtol=1e-4, atol=1e-5)
