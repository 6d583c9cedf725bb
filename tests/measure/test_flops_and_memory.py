from dataclasses import replace

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils import flop_counter
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel.measure import FlopCount, MemoryCount, MemoryUse, Rates, share_of_peak


class Perceptron(L.LightningModule):
    def __init__(self, manual=False):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        self.register_buffer("scale", torch.ones(7))
        self.automatic_optimization = not manual

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def fit(*callbacks, module=None, batches=3, **options):
    data = TensorDataset(torch.randn(5 * batches, 3), torch.randn(5 * batches, 2))
    trainer = L.Trainer(
        max_epochs=1,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        **options,
    )
    trainer.fit(module or Perceptron(), DataLoader(data, batch_size=5))


# Forward: 5·3·4 + 5·4·2 products and sums; backward: as many for the weights, and 5·4·2 for the hidden layer's gradient
BY_HAND = 2 * (60 + 40) + 2 * (60 + 40) + 2 * 40


@pytest.mark.parametrize("manual", [False, True])
def test_operations_are_those_counted_by_hand(manual):
    counter = FlopCount(batch=2)
    fit(counter, module=Perceptron(manual))
    assert (counter.flops, counter.onednn_flops) == (BY_HAND, 0)  # of small products


class Attending(Perceptron):
    """Attend from 3 queries of width 8 to 4 keys, with values of the same width, then multiply groups of rows."""

    def training_step(self, batch, batch_idx):
        query, key = (self.net(batch[0]).sum() * torch.ones(1, 2, length, 8) for length in (3, 4))
        found = nn.functional.scaled_dot_product_attention(query, key, key).sum()
        groups = self.net(batch[0]).sum() * torch.ones(3, 8, 16, dtype=torch.bfloat16)
        rows = torch.ones(10, 8, dtype=torch.bfloat16)
        ends = torch.tensor([2, 2, 10], dtype=torch.int32)
        return found + nn.functional.grouped_mm(rows, groups, offs=ends).float().sum()


def test_attention_of_the_cpu_and_products_of_groups_are_counted():
    """Attention has 2 products forward, and 5 backward, with the scores again; the groups' weights alone learn."""
    counter = FlopCount(batch=1)
    fit(counter, module=Attending())
    assert counter.flops == 3 * BY_HAND + 7 * 2 * (2 * 3 * 4 * 8) + 2 * 2 * (10 * 8 * 16)


@pytest.mark.slow
def test_compiled_modules_are_counted_and_stay_compiled():
    runs = []

    def backend(graph, inputs):
        def call(*values):
            runs.append(graph)
            return graph(*values)

        return call

    class Net(nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            return self.layers(x)

    module = Perceptron()
    module.net = Net(module.net)
    module.net.compile(backend=backend)
    counter = FlopCount(batch=1)
    fit(counter, module=module, batches=4)
    assert counter.flops == BY_HAND
    assert len(runs) == 3  # all batches but the counted one


def test_a_batch_that_never_comes_or_fails_is_not_counted():
    late = FlopCount(batch=3)
    fit(late)
    assert late.flops is None

    class Failing(Perceptron):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("planted")

    counters = FlopCount(batch=0), MemoryCount(batch=0)
    with pytest.raises(RuntimeError, match="planted"):
        fit(*counters, module=Failing())
    assert counters[0].flops is None
    assert counters[1].use is None
    kept = nn.Linear(2, 2)(torch.ones(1, 2, requires_grad=True))
    kept.sum().backward()
    assert not counters[1]._kept  # neither counts on


def test_the_share_of_the_peak_is_that_of_the_precision():
    rates = Rates("cpu", 1, {"fp32": 2e9}, 1.0, None, None, None, None, {})
    assert share_of_peak(1e9, 2.0, rates, "fp32") == 0.25
    assert share_of_peak(1e9, 2.0, replace(rates, matmul={}), "fp32") is None
    emulating = replace(rates, matmul={"fp32": 2e9, "bf16": 1e8})
    assert share_of_peak(1e9, 2.0, emulating, "bf16") == 0.25
    assert share_of_peak(1e9, 2.0, replace(rates, matmul={"fp32": 2e9, "bf16": 8e9}), "bf16") == 0.0625
    either = replace(rates, matmul={"fp32": 2e9, "fp32 by oneDNN": 4e9})
    assert share_of_peak(1e9, 2.0, either, "fp32") == 0.125  # convolutions are oneDNN's


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_memory_is_that_counted_by_hand(manual, accumulate):
    if manual and accumulate > 1:
        return  # Lightning rejects it
    counter = MemoryCount(batch=1)
    fit(counter, module=Perceptron(manual), accumulate_grad_batches=accumulate)
    weights = 3 * 4 + 4 + 4 * 2 + 2
    activations = 5 * 4 + 5 * 2  # of the rectifier, which the next layer shares, and of the loss; the batch is none
    assert counter.use == MemoryUse(
        parameters=4 * weights,
        buffers=4 * 7,
        gradients=4 * weights,
        optimizer_states=2 * 4 * weights + 4 * 4,  # two means, and a count for each tensor
        activations=4 * activations,
    )
    assert counter.use.to_dict()["gradients"] == 4 * weights


def test_a_formula_that_fails_ends_no_step(monkeypatch):
    def fails(*args, **kwargs):
        raise AssertionError("shapes that it does not know")

    monkeypatch.setitem(flop_counter.flop_registry, torch.ops.aten.addmm, fails)
    counter = FlopCount()
    fit(counter)
    assert counter.flops is None
