"""Steps in less memory, on modules that know nothing of it: losses, gradients and logs are those of whole batches."""

from functools import partial

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel.callbacks import MemorySavings
from lightning_accel.callbacks.memory_savings import activations_on_host
from tests.ranks import run_ranks
from tests.zoo import ZOO

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(does not have many workers|number of training batches|treespec|sync_dist|find_unused|.grad attribute)"
)
QUIET = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False, "logger": False}


class Block(nn.Module):
    def __init__(self, dropout=0.0, norm=None):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Dropout(dropout), nn.Linear(9, 6))
        self.norm = norm or nn.Identity()

    def forward(self, x):
        return self.norm(x + self.inner(x))


class Net(L.LightningModule):
    def __init__(self, weighted=False, **block):
        super().__init__()
        self.blocks = nn.Sequential(*[Block(**block) for _ in range(3)])
        self.head = nn.Linear(6, 2)
        self.unused = nn.Linear(2, 2)
        self.weighted = weighted
        self.losses, self.logged, self.sizes = [], [], []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.sizes.append(len(x))
        losses = F.cross_entropy(self.head(self.blocks(x)), y, reduction="none")
        weight = y.sum() if self.weighted else torch.tensor(len(y))
        loss = (losses * y if self.weighted else losses).sum() / weight.clamp(min=1)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "weight": weight} if self.weighted else loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())
        self.logged.append(self.trainer.callback_metrics["loss_step"].item())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


Weighted = partial(Net, weighted=True)
Dropping = partial(Net, dropout=0.5)


def fit(callback=None, make=Net, batch_size=5, **options):
    L.seed_everything(1, verbose=False)
    net = make()
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(13, 6, generator=generator), torch.arange(13).remainder(3).clamp(max=1))
    callbacks = [callback] if callback else []
    trainer = L.Trainer(**{"max_epochs": 2, "accelerator": "cpu", "callbacks": callbacks} | QUIET | options)
    trainer.fit(net, DataLoader(data, batch_size=batch_size))
    return net


def assert_same(net, other):
    torch.testing.assert_close(torch.tensor(net.losses), torch.tensor(other.losses))
    torch.testing.assert_close(torch.tensor(net.logged), torch.tensor(other.logged))
    assert net.trainer.callback_metrics["loss_epoch"].item() == pytest.approx(
        other.trainer.callback_metrics["loss_epoch"].item()
    )
    torch.testing.assert_close(net.state_dict(), other.state_dict(), rtol=1e-4, atol=1e-5)
    assert net.trainer.global_step == other.trainer.global_step


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}])
def test_micro_batches_train_as_whole_batches(options):
    """The last batch, of 3 samples, is split into 2 and 1."""
    whole, split = fit(**options), fit(MemorySavings(micro_batches=2), **options)
    assert split.sizes == [3, 2, 3, 2, 2, 1] * 2
    assert_same(split, whole)
    assert split.unused.weight.grad is None
    assert "training_step" not in vars(split)


def test_micro_batches_of_losses_with_weights_are_weighed():
    """The numbers of samples that count differ from part to part, and are 0 in the last."""
    split, whole = (fit(callback, Weighted) for callback in (MemorySavings(micro_batches=2), None))
    torch.testing.assert_close(torch.tensor(split.losses), torch.tensor(whole.losses))
    torch.testing.assert_close(split.state_dict(), whole.state_dict(), rtol=1e-4, atol=1e-5)


def test_micro_batches_may_be_as_many_as_samples():
    assert_same(fit(MemorySavings(micro_batches=9)), fit())


@pytest.mark.slow
def test_activations_of_one_micro_batch_are_held_at_a_time():
    def most_held(callback):
        held, most = [0], [0]

        def pack(tensor):
            token = Token(held, tensor)
            most[0] = max(most[0], held[0])
            return token

        with saved_tensors_hooks(pack, lambda token: token.tensor):
            fit(callback, batch_size=12)
        return most[0]

    whole = most_held(None)
    assert most_held(MemorySavings(micro_batches=4)) < 0.5 * whole
    assert most_held(MemorySavings(activation_checkpointing=True)) < 0.7 * whole


class Token:
    """Count the numbers in saved activations while they are kept."""

    def __init__(self, held, tensor):
        self.held, self.tensor = held, tensor
        self.size = tensor.numel() * (tensor.ndim > 1 and not isinstance(tensor, nn.Parameter))
        held[0] += self.size

    def __del__(self):
        self.held[0] -= self.size


def test_recomputed_activations_train_alike_with_dropout():
    plain = fit(None, Dropping)
    checkpointed = fit(MemorySavings(activation_checkpointing=True), Dropping)
    assert_same(checkpointed, plain)
    assert "forward" not in vars(checkpointed.blocks[0])


class ByHand(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("savings", "net", "options", "error", "words"),
    [
        ({"micro_batches": 2}, ByHand, {}, TypeError, "automatic optimization"),
        ({"micro_batches": 2}, Net, {"strategy": "accel_fsdp2"}, TypeError, "accumulate_grad_batches"),
        ({"micro_batches": 2}, lambda: Net(norm=nn.BatchNorm1d(6)), {}, ValueError, "smaller batches"),
        ({"activation_checkpointing": True}, lambda: Net(norm=nn.BatchNorm1d(6)), {}, ValueError, "twice"),
        ({"activation_offload": True}, Net, {}, ValueError, "those of a cpu device are already; take it out"),
    ],
)
def test_rejects_what_would_train_otherwise(savings, net, options, error, words):
    try:
        with pytest.raises(error, match=words):
            fit(MemorySavings(**savings), net, **options)
    finally:
        if dist.is_initialized():  # by the strategy, before the callback rejects it
            dist.destroy_process_group()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_recomputed_decoders_of_transformers_append_to_no_cache(name):
    """They get their cache by position, or by name; without labels they return it."""
    pytest.importorskip("transformers")
    model = ZOO[name]

    def losses(callbacks):
        torch.manual_seed(0)
        module = model.make()
        found = []
        step = module.training_step
        module.training_step = lambda *args: found.append(step(*args)) or found[-1]
        options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_steps": 3}
        L.Trainer(**options, enable_model_summary=False, accelerator="cpu", callbacks=callbacks).fit(
            module, model.loader()
        )
        return torch.stack(found).tolist()

    assert losses([MemorySavings(activation_checkpointing=True)]) == pytest.approx(losses([]), rel=1e-5)


def test_activations_move_to_the_host_and_parameters_do_not():
    """On a CPU, where what was moved is another tensor: it does not see what is written into its origin."""

    def gradients(after_forward=lambda: None, least_bytes=0):
        x.grad, layer.weight.grad = None, None
        with activations_on_host(layer, torch.device("cpu"), least_bytes):
            loss = layer(x).sum()
        kept = x.detach().clone(), layer.weight.detach().clone()
        after_forward()
        loss.backward()
        x.data.copy_(kept[0])
        layer.weight.data.copy_(kept[1])
        return x.grad.clone(), layer.weight.grad.clone()

    x, layer = torch.randn(5, 6, requires_grad=True), nn.Linear(6, 9)
    of_x, of_weight = gradients(least_bytes=2**40)
    moved = gradients(lambda: x.data.zero_())
    assert all(torch.equal(*pair) for pair in zip(moved, (of_x, of_weight), strict=True))
    assert not gradients(lambda: x.data.zero_(), least_bytes=x.nbytes + 1)[1].any()
    assert not gradients(lambda: layer.weight.data.zero_())[0].any()


class Wide(Net):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(6, 512), nn.Tanh(), nn.Linear(512, 6)) for _ in range(8)])


@pytest.mark.gpu
def test_activations_are_on_the_host_between_the_passes():
    def fitted(**options):
        L.seed_everything(0, verbose=False)
        module = Wide()
        trainer = L.Trainer(max_steps=3, accelerator="gpu", devices=1, callbacks=[MemorySavings(**options)], **QUIET)
        torch.cuda.reset_peak_memory_stats()
        rows = 1 << 14  # so that activations outweigh a workspace of cuBLAS, 32 MiB on an H100
        data = TensorDataset(torch.randn(3 * rows, 6), torch.arange(3 * rows) % 2)
        trainer.fit(module, DataLoader(data, rows))
        return module.losses, torch.cuda.max_memory_allocated()

    (plain, before), (losses, after) = fitted(), fitted(activation_offload=True)
    assert losses == plain
    assert after < 0.6 * before


def test_rejects_no_parts():
    with pytest.raises(ValueError, match="at least 1"):
        MemorySavings(micro_batches=0)


class Used(Net):
    def __init__(self):
        super().__init__()
        del self.unused


def check_two_processes(rank, strategy, make):
    plain, split = (fit(one, make, strategy=strategy, devices=2, max_epochs=1) for one in (None, MemorySavings(2)))
    assert (plain.sizes, split.sizes) == ([5, 2], [3, 2, 1, 1])
    torch.testing.assert_close(torch.tensor(split.losses), torch.tensor(plain.losses))
    torch.testing.assert_close(split.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("strategy", "make"), [("ddp", Used), ("accel_ddp", Net)])
def test_micro_batches_of_two_processes(strategy, make):
    run_ranks(check_two_processes, strategy, make)
