import copy
import gc

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import HalfPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.nn import GCN

from lightning_accel.data import DigitsDataModule
from lightning_accel.models import Experts, MoEClassifier
from lightning_accel.precision import Bfloat16Precision
from lightning_accel.precision.bfloat16 import Float32Step
from tests.precision.plain_module import PlainClassifier, batches, fit, make_trainer
from tests.ranks import run_ranks


class OneWeight(L.LightningModule):
    """4000 weights of 1, each with a gradient of 1, so that a step of SGD takes ``lr`` from each."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4000))

    def training_step(self, batch, batch_idx):
        return self.weight.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def test_small_updates_are_lost_by_plain_bf16_and_kept_by_ours():
    plain = fit(HalfPrecision("bf16-true"), model=OneWeight).weight
    assert torch.equal(plain, torch.ones(4000, dtype=torch.bfloat16))
    assert torch.equal(fit(Bfloat16Precision(), model=OneWeight).weight, torch.full((4000,), 0.99).bfloat16())


def masters_by_hand(num_epochs, make_optimizer, options):
    torch.manual_seed(0)
    model = PlainClassifier().bfloat16()
    masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    optimizer = make_optimizer(masters, **options)
    for _ in range(num_epochs):
        for x, target in batches():
            loss = F.cross_entropy(model.net(x.bfloat16()), target)
            grads = torch.autograd.grad(loss, list(model.parameters()))
            for master, grad in zip(masters, grads, strict=True):
                master.grad = grad.float()
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
            with torch.no_grad():
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    parameter.copy_(master)
    return model


@pytest.mark.parametrize(
    ("make_optimizer", "options"),
    [
        (torch.optim.AdamW, {"lr": 0.01}),
        (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adagrad, {"lr": 0.1}),  # has state before its first step
    ],
)
def test_masters_equal_those_kept_by_hand(make_optimizer, options):
    expected = masters_by_hand(2, make_optimizer, options)
    actual = fit(Bfloat16Precision(), model=lambda: PlainClassifier(make_optimizer, **options), max_epochs=2)
    assert actual.state_dict().keys() == PlainClassifier().state_dict().keys()
    for name, weight in expected.state_dict().items():
        assert actual.state_dict()[name].dtype == torch.bfloat16
        assert torch.equal(actual.state_dict()[name], weight)
    for state in actual.trainer.optimizers[0].state.values():
        assert {value.dtype for value in state.values() if isinstance(value, torch.Tensor)} == {torch.float32}
    held = [parameter for group in actual.trainer.optimizers[0].param_groups for parameter in group["params"]]
    assert all(a is b for a, b in zip(held, actual.parameters(), strict=True))


@pytest.mark.sampled(default=1)
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}])
def test_learns_as_float32_does(options):
    expected = fit(max_epochs=3, **options)
    actual = fit(Bfloat16Precision(), max_epochs=3, **options)
    torch.testing.assert_close(actual.losses, expected.losses, rtol=0, atol=0.05)


@pytest.mark.slow
def test_mixture_of_experts_learns():
    accuracy = []
    for plugins in ([], [Bfloat16Precision()]):
        torch.manual_seed(0)
        model = MoEClassifier(dim=16, experts=Experts(4, hidden_dim=24), optimizer=lambda p: torch.optim.AdamW(p, 3e-3))
        trainer = make_trainer(*plugins, max_epochs=3)
        trainer.fit(model, DigitsDataModule())
        accuracy.append(trainer.callback_metrics["val/accuracy"].item())
    assert accuracy == pytest.approx(accuracy[:1] * 2, abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("make_optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_resumes_bit_for_bit(make_optimizer, tmp_path):
    def make():
        return PlainClassifier(make_optimizer)

    expected = fit(Bfloat16Precision(), model=make, max_epochs=4)
    first = fit(Bfloat16Precision(), model=make, max_epochs=2)
    first.trainer.save_checkpoint(tmp_path / "half.ckpt")
    actual = fit(Bfloat16Precision(), model=make, max_epochs=4, ckpt_path=tmp_path / "half.ckpt")
    for name, weight in expected.state_dict().items():
        assert torch.equal(actual.state_dict()[name], weight)
    for a, b in zip(actual.trainer.optimizers[0].state.values(), expected.trainer.optimizers[0].state.values()):  # noqa: B905
        assert a.keys() == b.keys()
        assert "master_weight" in a
        assert all(torch.equal(a[key], b[key]) for key in a if a[key] is not None)


def test_takes_checkpoints_of_plain_runs(tmp_path):
    fit(HalfPrecision("bf16-true")).trainer.save_checkpoint(tmp_path / "plain.ckpt")
    resumed = fit(Bfloat16Precision(), max_epochs=2, ckpt_path=tmp_path / "plain.ckpt")
    assert all(state["master_weight"].dtype == torch.float32 for state in resumed.trainer.optimizers[0].state.values())


class GraphClassifier(L.LightningModule):
    """Written for PyG's batches, and for float32."""

    def __init__(self):
        super().__init__()
        self.net = GCN(4, 8, 2, 3)

    def training_step(self, batch, batch_idx):
        assert batch["graph"].x.dtype == batch["graph"].edge_weight.dtype == torch.bfloat16
        out = self.net(batch["graph"].x, batch["graph"].edge_index, batch["graph"].edge_weight)
        return F.cross_entropy(out.float(), batch["graph"].y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_graphs_of_pyg_are_converted_and_left_as_they_were():
    edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    graph = Data(torch.randn(4, 4), edge_index, edge_weight=torch.rand(4), y=torch.tensor([0, 1, 2, 0]))
    module = GraphClassifier()
    before = module.net.convs[0].lin.weight.detach().clone()
    make_trainer(Bfloat16Precision()).fit(module, DataLoader([{"graph": graph}], batch_size=None))
    assert not torch.equal(module.net.convs[0].lin.weight, before.bfloat16())
    assert graph.x.dtype == graph.edge_weight.dtype == torch.float32


def test_clips_gradients():
    torch.manual_seed(0)
    model = PlainClassifier(torch.optim.SGD, lr=1.0)
    before = [parameter.detach().bfloat16().float() for parameter in model.parameters()]
    make_trainer(Bfloat16Precision(), max_steps=1, gradient_clip_val=1e-3).fit(model, batches())
    masters = [model.trainer.optimizers[0].state[parameter]["master_weight"] for parameter in model.parameters()]
    moved = torch.cat([(a - b).flatten() for a, b in zip(masters, before, strict=True)])
    assert moved.norm().item() == pytest.approx(1e-3, rel=0.02)  # the norm and the gradients are bf16


class ZeroFirstRow(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, *_):
        with torch.no_grad():
            pl_module.weight[:7] = 0


def test_masters_follow_what_others_do_to_the_weights():
    model = fit(Bfloat16Precision(), model=OneWeight, callbacks=[ZeroFirstRow()], max_steps=5)
    master = model.trainer.optimizers[0].state[model.weight]["master_weight"]
    assert (master[:7] == -1e-3).all()
    torch.testing.assert_close(master[7:], torch.full((3993,), 0.995))


def test_masters_survive_steps_without_gradient():
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    Float32Step(optimizer)
    for _ in range(3):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
    torch.testing.assert_close(optimizer.state[weight]["master_weight"], torch.full((3,), 0.997))


def test_new_groups_get_masters_and_frozen_weights_stay():
    old, new, frozen = (nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(3))
    optimizer = torch.optim.SGD([old, frozen.requires_grad_(False)], lr=1e-3)
    step = Float32Step(optimizer)
    for _ in range(2):
        old.grad, new.grad = torch.ones_like(old), torch.ones_like(new)
        optimizer.step()
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": [new], "lr": 1e-2})
    torch.testing.assert_close(optimizer.state[old]["master_weight"], torch.full((2,), 0.998))
    torch.testing.assert_close(optimizer.state[new]["master_weight"], torch.full((2,), 0.99))
    assert torch.equal(frozen, torch.ones(2, dtype=torch.bfloat16))
    step.remove()
    old.grad = torch.ones_like(old)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[old]["master_weight"], torch.full((2,), 0.998))


class TwoOptimizers(PlainClassifier):
    """Gradients that one optimizer's loss leaves in the other's weights are cleared by its ``zero_grad``."""

    def __init__(self):
        super().__init__(torch.optim.SGD, lr=0.1)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 2)]


def test_manual_optimization():
    expected = fit(model=TwoOptimizers)
    actual = fit(Bfloat16Precision(), model=TwoOptimizers)
    torch.testing.assert_close(actual.losses, expected.losses, rtol=0, atol=0.03)


@pytest.mark.slow
def test_masters_are_all_that_is_kept():
    """float32 masters and Adam's two moments; nothing of the gradients in float32."""
    linear = nn.Linear(300, 200, bias=False, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(linear.parameters(), foreach=False)
    Float32Step(optimizer)
    linear(torch.ones(1, 300, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    gc.collect()
    kept = {
        tensor.untyped_storage().data_ptr(): tensor.nbytes
        for tensor in gc.get_objects()
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.numel() == 60000
    }
    assert sum(kept.values()) == 60000 * (2 + 2 + 4 + 8)


def test_refuses_what_cannot_work():
    with pytest.raises(ValueError, match="copies of the parameters, which LBFGS does not allow; use another optimizer"):
        fit(Bfloat16Precision(), model=lambda: PlainClassifier(torch.optim.LBFGS))


class Sharded(PlainClassifier):
    def configure_model(self):
        if self.device_mesh is not None and not isinstance(next(self.parameters()), torch.distributed.tensor.DTensor):
            fully_shard(self.net[0], mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def full(weight):
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def check_strategy(rank, name, folder):
    def train(num_epochs, ckpt_path=None):
        strategy = DDPStrategy() if name == "ddp" else ModelParallelStrategy(2, 1)
        torch.manual_seed(0)
        model = (PlainClassifier if name == "ddp" else Sharded)(torch.optim.SGD, lr=0.1, momentum=0.9)
        trainer = make_trainer(Bfloat16Precision(), strategy=strategy, devices=2, max_epochs=num_epochs)
        trainer.fit(model, batches(rank, 2), ckpt_path=ckpt_path)
        return trainer, {key: full(weight.detach()).clone() for key, weight in model.named_parameters()}

    _, expected = train(2)
    trainer, _ = train(1)
    trainer.save_checkpoint(f"{folder}/half.ckpt")
    _, resumed = train(2, f"{folder}/half.ckpt")
    for key, weight in expected.items():
        assert torch.equal(resumed[key], weight), key
    return {key: weight.float() for key, weight in expected.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_strategies_match_one_process_and_resume(name, tmp_path):
    one, other = run_ranks(check_strategy, name, str(tmp_path))
    expected = fit(max_epochs=2, model=lambda: PlainClassifier(torch.optim.SGD, lr=0.1, momentum=0.9))
    for key, weight in expected.named_parameters():
        assert torch.equal(one[key], other[key])
        torch.testing.assert_close(one[key], weight.detach(), rtol=0, atol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_trains_on_cuda_as_in_float32(fused):
    expected = fit(accelerator="cuda")
    actual = fit(Bfloat16Precision(), model=lambda: PlainClassifier(fused=fused), accelerator="cuda")
    torch.testing.assert_close(actual.losses, expected.losses, rtol=0, atol=0.05)


def test_copies_of_a_trained_module_are_plain():
    model = fit(Bfloat16Precision())
    assert {type(parameter) for parameter in copy.deepcopy(model).parameters()} == {nn.Parameter}
