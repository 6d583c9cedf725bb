"""The layer in which numbers cease to be finite."""

import random
from collections import namedtuple
from dataclasses import dataclass
from enum import Enum

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_accel.callbacks import Watchdog
from lightning_accel.callbacks.watchdog.nonfinite import NonFiniteError, _in_batch, any_nonfinite

QUIET = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "enable_checkpointing": False, "max_epochs": 1,
}  # fmt: skip


DRAWN = []


class Log(nn.Module):
    def forward(self, x):
        return x.log()


class Root(nn.Module):
    def forward(self, x):
        return (x * 0).sqrt()  # whose gradient at 0 is not finite


class Branches(nn.Module):
    """Two layers of one input, of which the second has no finite gradient."""

    def __init__(self):
        super().__init__()
        self.straight, self.root = nn.Linear(2, 2), Root()

    def forward(self, x):
        return self.straight(x) + self.root(x)


class Net(L.LightningModule):
    def __init__(self, *layers, loss=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(2, 2), *layers)
        nn.init.zeros_(self.net[0].weight)
        nn.init.constant_(self.net[0].bias, -1.0)
        self.mean = MeanMetric()
        self.loss = loss or torch.mean
        self.steps = []

    def training_step(self, batch):
        DRAWN.append((torch.rand(1).item(), random.random(), np.random.rand()))  # noqa: NPY002
        self.steps.append(1)
        self.log("loss", loss := self.loss(self.net(batch["x"])))
        self.mean(1.0)
        return {"loss": loss}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def end_of(module, batch=None, **options):
    data = DataLoader([{"x": torch.ones(2)} if batch is None else batch] * 2, batch_size=2)
    trainer = L.Trainer(**QUIET | options, callbacks=[Watchdog(on_nonfinite="end")])
    with pytest.raises(NonFiniteError) as error:
        trainer.fit(module, data)
    return str(error.value).partition(": ")[2].removesuffix(". The weights are those before the step")


OF_LOSS = "the outputs of all layers are finite, and training_step makes nan of them"
ROOT_OF_LOSS = "the backward pass of what follows net.1 (Linear) makes nan"


@pytest.mark.parametrize(
    ("layers", "loss", "where"),
    [
        ([Log(), nn.Linear(2, 2)], None, "net.1 (Log) makes nan of finite numbers in the forward pass"),
        ([nn.Linear(2, 2)], lambda out: (out * 0 - 1).log().mean(), OF_LOSS),
        ([Root(), nn.Linear(2, 2)], None, "the backward pass of net.1 (Root) makes nan"),
        ([Branches()], None, "the backward pass of net.1.root (Root) makes nan"),
        ([nn.Linear(2, 2)], lambda out: (out * 0).norm(dim=1).sqrt().mean(), ROOT_OF_LOSS),
    ],
    ids=["forward", "loss", "backward", "branch", "after"],
)  # fmt: skip
def test_the_layer_is_found(layers, loss, where):
    module = Net(*layers, loss=loss)
    DRAWN.clear()
    assert end_of(module) == where
    assert DRAWN[0] == DRAWN[1]  # the same numbers are drawn again
    assert module.steps == [1]
    assert module.mean.update_count == 1


def test_the_layer_is_found_in_compiled_modules_and_under_autocast():
    module = Net(Log(), nn.Linear(2, 2))
    module.net = torch.compile(module.net, backend="eager")
    assert "1 (Log) makes nan of finite numbers in the forward pass" in end_of(module, precision="bf16-mixed")


def test_functions_between_layers_are_found_by_what_they_give():
    class Between(Net):
        def training_step(self, batch):
            return self.net[1](self.net[0](batch["x"]).log()).mean()

    where = "net.1 (Linear) is given nan by what stands before it in the forward pass"
    assert end_of(Between(nn.Linear(2, 2))) == where


def test_batches_and_weights_come_first():
    found = end_of(Net(Log()), {"x": torch.tensor([1.0, float("inf")])})
    assert found == "the batch itself is not finite: inf in batch['x'], samples 0, 1 of 2"
    module = Net(nn.Linear(2, 2))
    nn.init.constant_(module.net[1].bias, float("nan"))
    assert end_of(module) == "weights were not finite before the step: net.1.bias"


def test_steps_that_cannot_be_repeated_say_why():
    class Once(Net):
        def training_step(self, batch):
            if DRAWN:
                raise ValueError("only once")
            return super().training_step(batch)

    DRAWN.clear()
    assert end_of(Once(Log())).endswith("since the step cannot be repeated: ValueError: only once")


def test_a_warning_names_the_layer_before_its_weights_are_lost():
    watchdog = Watchdog()
    trainer = L.Trainer(**QUIET, callbacks=[watchdog])
    trainer.fit(Net(Log(), nn.Linear(2, 2)), DataLoader([{"x": torch.ones(2)}] * 2, batch_size=2))
    (found,) = watchdog.findings
    assert found.text == (
        "the loss is not finite at training batch 0: net.1 (Log) makes nan of finite numbers in the forward pass"
    )


class Split(Enum):
    TRAIN = 1


@dataclass
class Row:
    x: torch.Tensor


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_batches_of_all_kinds_are_looked_through():
    nan = torch.tensor([[1.0, 2.0], [float("nan"), 1.0]])
    circle = {}
    circle["again"] = circle
    batches = {
        "batch['x']": {"split": Split.TRAIN, "circle": circle, "x": nan},
        "batch[1].x": (torch.tensor([1, 2]), Row(nan)),
        "batch.second": namedtuple("Pair", "first second")(None, nan),
        "batch[0]": [torch.complex(torch.ones(2, 2), nan)],
    }
    for path, batch in batches.items():
        assert next(_in_batch(batch)).startswith(f"nan in {path}"), path
    for sparse in (nan.to_sparse(), nan.to_sparse_csr()):
        assert list(_in_batch([sparse])) == ["nan in batch[0]"]
    assert list(_in_batch([torch.eye(3).to_sparse_csr()])) == []


def test_layers_in_scripts_are_left_out_and_no_hook_stays():
    module = Net(torch.jit.script(nn.ReLU()), Log())
    with torch.no_grad():
        module.net[0].bias.fill_(-1.0)
    assert end_of(module) == "net.2 (Log) makes inf of finite numbers in the forward pass"
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in module.modules() if one is not module.net[1])


@pytest.mark.slow
def test_the_number_of_the_batch_is_that_of_the_step():
    class Second(Net):
        def training_step(self, batch, batch_idx):
            return (self.net(batch["x"]) * (0 if batch_idx == 1 else 1)).abs().log().mean()

    data = [{"x": torch.ones(2)}] * 4
    trainer = L.Trainer(**QUIET, callbacks=[Watchdog(on_nonfinite="end")])
    with pytest.raises(NonFiniteError, match="batch 1 is not finite: the outputs of all layers are finite"):
        trainer.fit(Second(), DataLoader(data, batch_size=2))


def test_gradients_of_all_kinds_are_looked_at():
    assert any_nonfinite([]) is None
    assert not any_nonfinite([torch.full((3,), 1e38), torch.zeros(0)])  # whose squares are not finite
    assert not any_nonfinite([torch.full((30,), 6e4).half(), torch.ones(2, dtype=torch.float64) * 1e300])
    assert any_nonfinite([torch.ones(2), torch.tensor([1.0, float("nan")])])
    assert any_nonfinite([torch.tensor([1.0, -float("inf")]).half()])
    sparse = torch.sparse_coo_tensor([[1]], [float("nan")], (3,), check_invariants=True)
    assert any_nonfinite([sparse])
    assert any_nonfinite([torch.complex(torch.zeros(2), torch.tensor([0.0, float("nan")]))])
    assert not any_nonfinite([torch.ones(3).to(torch.float8_e4m3fn), torch.ones(2, dtype=torch.int64)])
