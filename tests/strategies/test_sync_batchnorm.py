import copy
import inspect
import warnings

import lightning as L
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel.strategies import SyncBatchNormPlugin, convert_sync_batchnorm_, revert_sync_batchnorm_
from tests.ranks import run_ranks
from tests.tolerance import CLOSE, rounding

LAYERS = {
    "1d": (nn.BatchNorm1d, ()),
    "1d_long": (nn.BatchNorm1d, (4,)),
    "2d": (nn.BatchNorm2d, (3, 2)),
    "3d": (nn.BatchNorm3d, (2, 3, 2)),
}
SUMS = 10 * rounding(torch.float32, 8 * 12)  # of a channel's 8 * 12 numbers of about 10
OPTIONS = [{}, {"momentum": None}, {"track_running_stats": False}, {"affine": False}]
if "bias" in inspect.signature(nn.BatchNorm1d).parameters:  # torch 2.12 and later
    OPTIONS.append({"bias": False})


def whole_and_synced(layer, options, dtype, group=None):
    torch.manual_seed(1)
    whole = layer(3, **options).to(dtype)
    for parameter in whole.parameters():
        nn.init.normal_(parameter)
    synced = copy.deepcopy(whole)
    assert convert_sync_batchnorm_(synced, group) == [""]
    return whole, synced


def check_layers(rank, sizes):
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, SUMS)):
        for layer, shape in LAYERS.values():
            for options in OPTIONS:
                compare(rank, sizes, *whole_and_synced(layer, options, dtype), shape, dtype, tolerance)


def compare(rank, sizes, whole, synced, shape, dtype, tolerance):
    """Three steps of one process with all rows, against those of each rank with its own."""
    near = {"rtol": tolerance, "atol": tolerance}
    for _ in range(3):
        x = (torch.randn(sum(sizes), 3, *shape, dtype=dtype) * 2 + 5).requires_grad_()
        weights = torch.randn_like(x)
        mine = x.detach().split(sizes)[rank].clone().requires_grad_()
        y_whole, y = whole(x), synced(mine)
        (y_whole * weights).sum().backward()
        (y * weights.split(sizes)[rank]).sum().backward()
        torch.testing.assert_close(y, y_whole.split(sizes)[rank], **near)
        torch.testing.assert_close(mine.grad, x.grad.split(sizes)[rank], **near)
        for (name, one), other in zip(whole.named_parameters(), synced.parameters(), strict=True):
            total = other.grad.clone()
            torch.distributed.all_reduce(total)
            torch.testing.assert_close(total, one.grad, **near, msg=name)
    torch.testing.assert_close(dict(synced.named_buffers()), dict(whole.named_buffers()), **near)
    torch.testing.assert_close(synced.eval()(mine), whole.eval()(mine), **near)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [pytest.param((5, 3), marks=pytest.mark.slow), (4, 0), pytest.param((0, 3), marks=pytest.mark.slow)]
)
def test_equals_one_process_with_all_rows(sizes):
    run_ranks(check_layers, sizes)


def check_deviation_beside_a_large_mean(rank):
    x = torch.randn(400, 3) + 1e4
    x[300:] += 2  # means of the ranks differ
    synced = nn.BatchNorm1d(3)
    convert_sync_batchnorm_(synced)
    sizes = (300, 100)
    y = synced(x.split(sizes)[rank])
    expected = nn.BatchNorm1d(3, dtype=torch.float64)(x.double()).split(sizes)[rank]
    torch.testing.assert_close(
        y.double(), expected, rtol=0, atol=1e4 * rounding(torch.float32, 4)
    )  # of E[x^2] - E[x]^2 nothing is left
    exact = x.double().var(0, correction=0)
    torch.testing.assert_close(synced.running_var.double(), 0.9 + 0.1 * exact * 400 / 399, rtol=1e-3, atol=0)


def test_deviation_beside_a_large_mean_keeps_its_digits():
    run_ranks(check_deviation_beside_a_large_mean)


def check_half(rank, dtype):
    whole, synced = whole_and_synced(nn.BatchNorm2d, {}, torch.float32)
    x = (torch.randn(6, 3, 4, 4) * 3 + 300).to(dtype)
    mine = x.chunk(2)[rank].requires_grad_()
    with torch.autocast("cpu", dtype):
        y = synced(mine)
    y.float().square().sum().backward()
    assert y.dtype == mine.grad.dtype == dtype
    assert synced.running_mean.dtype == synced.weight.grad.dtype == torch.float32
    torch.testing.assert_close(y.float(), whole(x.float()).chunk(2)[rank], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(synced.running_var, whole.running_var, rtol=1e-5, atol=1e-5)
    synced.bfloat16()(mine.detach().bfloat16()).sum().backward()  # bf16-true, buffers too
    assert synced.running_var.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_statistics_in_float32(dtype):
    run_ranks(check_half, dtype)


def check_number_of_collectives(rank):
    calls = []
    originals = torch.distributed.all_gather_into_tensor, torch.distributed.all_reduce
    torch.distributed.all_gather_into_tensor = lambda *a, **k: calls.append("gather") or originals[0](*a, **k)
    torch.distributed.all_reduce = lambda *a, **k: calls.append("reduce") or originals[1](*a, **k)
    try:
        layer = nn.BatchNorm1d(3)
        convert_sync_batchnorm_(layer)
        y = layer(torch.randn(4, 3, requires_grad=True))
        assert calls == ["gather"]
        y.sum().backward()
        assert calls == ["gather", "reduce"]
        layer.eval()(torch.randn(4, 3))
        layer.train()(torch.randn(4, 3)).sum().backward()  # the input wants no gradient
        assert calls == ["gather", "reduce", "gather"]
    finally:
        torch.distributed.all_gather_into_tensor, torch.distributed.all_reduce = originals


def test_sends_once_forward_and_once_backward():
    run_ranks(check_number_of_collectives)


def check_too_few(rank):
    synced = whole_and_synced(nn.BatchNorm1d, {}, torch.float32)[1]
    with pytest.raises(ValueError, match=r"more than 1 value a channel.*got 1, this process having \(" + str(rank)):
        synced(torch.randn(rank, 3))


def check_group_alone(rank):
    alone, _ = torch.distributed.new_subgroups(1)
    whole, synced = whole_and_synced(nn.BatchNorm1d, {}, torch.float32, alone)
    x = torch.randn(4, 3) + rank
    torch.testing.assert_close(copy.deepcopy(synced)(x), whole(x))


def check_groups_of_two(rank):
    group, _ = torch.distributed.new_subgroups(2)
    whole, synced = whole_and_synced(nn.BatchNorm1d, {}, torch.float64, group)
    rows, weights = torch.randn(4, 5, 3, dtype=torch.float64), torch.randn(4, 5, 3, dtype=torch.float64)
    ours = slice(rank // 2 * 2, rank // 2 * 2 + 2)
    x, mine = rows[ours].clone().requires_grad_(), rows[rank].clone().requires_grad_()
    (whole(x.flatten(0, 1)) * weights[ours].flatten(0, 1)).sum().backward()
    (synced(mine) * weights[rank]).sum().backward()
    torch.testing.assert_close(mine.grad, x.grad[rank % 2])
    torch.testing.assert_close(synced.running_var, whole.running_var)


@pytest.mark.slow
def test_groups_of_neighbouring_ranks():
    run_ranks(check_groups_of_two, world_size=4)


@pytest.mark.parametrize("check", [check_too_few, check_group_alone])
def test_groups_and_their_errors(check):
    run_ranks(check)


class OfMyOwn(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x).relu()


def test_conversion_changes_nothing_else():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm2d(2).eval(), nn.ReLU()))
    model[1].weight.requires_grad_(False)
    seen = []
    model[1].register_forward_hook(lambda *_: seen.append(1))
    parameters, buffers, keys = list(model.parameters()), list(model.buffers()), list(model.state_dict())
    plain = copy.deepcopy(model)
    for _ in range(2):  # twice is once
        assert convert_sync_batchnorm_(model) == ["1", "2.0"]
    assert isinstance(model[1], nn.BatchNorm1d)
    x = torch.randn(5, 4)
    torch.testing.assert_close(model[:2](x), plain[:2](x))  # without processes it is plain
    assert revert_sync_batchnorm_(model) == ["1", "2.0"]
    assert type(model[1]) is nn.BatchNorm1d
    assert type(model[2][0]) is nn.BatchNorm2d
    assert vars(model[1]).keys() == vars(plain[1]).keys()
    assert not model[2][0].training
    assert not model[1].weight.requires_grad
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(a is b for a, b in zip(buffers, model.buffers(), strict=True))
    model[:2](x)
    assert len(seen) == 3  # the copy has the hook, too


def test_layers_that_cannot_be_converted():
    with pytest.raises(ValueError, match="0 is a LazyBatchNorm1d that does not know"):
        convert_sync_batchnorm_(nn.Sequential(nn.LazyBatchNorm1d()))
    model = nn.Sequential(OfMyOwn(3), nn.BatchNorm1d(3))
    with pytest.warns(UserWarning, match=r"not synchronised between processes.*: 0 \(OfMyOwn\)"):
        assert convert_sync_batchnorm_(model) == ["1"]
    assert type(model[0]) is OfMyOwn
    with pytest.warns(UserWarning, match="no effect: Linear has no BatchNorm"):
        SyncBatchNormPlugin().apply(nn.Linear(2, 2))


def make_network():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def train(model, rows, share, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        F.mse_loss(model(rows[0][share]), rows[1][share]).backward()
        optimizer.step()
        optimizer.zero_grad()


def check_fully_shard(rank, layer_of_its_own, convert_last):
    rows = torch.randn(8, 4), torch.randn(8, 2)
    whole, sharded = make_network(), make_network()
    if not convert_last:
        convert_sync_batchnorm_(sharded)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    if layer_of_its_own:
        fully_shard(sharded[1], mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    if convert_last:
        convert_sync_batchnorm_(sharded)
    train(whole, rows, slice(None))
    train(sharded, rows, slice(rank * 4, rank * 4 + 4))
    expected = whole.state_dict()
    for name, value in sharded.state_dict().items():
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        torch.testing.assert_close(full, expected[name], **CLOSE)
    assert revert_sync_batchnorm_(sharded) == ["1"]
    x = torch.randn(4, 4) + rank
    torch.testing.assert_close(sharded(x), whole(x), **CLOSE)  # each by its own rows


def check_fully_shard_refuses(rank):
    layer = fully_shard(nn.BatchNorm1d(3), mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
    with pytest.raises(TypeError, match="the module is a BatchNorm that was given to fully_shard"):
        convert_sync_batchnorm_(layer)


@pytest.mark.sampled(default=2)
@pytest.mark.parametrize(("layer_of_its_own", "convert_last"), [(False, False), (True, False), (False, True)])
def test_sharded_model_equals_one_process(layer_of_its_own, convert_last):
    run_ranks(check_fully_shard, layer_of_its_own, convert_last)


def test_sharded_layer_is_refused():
    run_ranks(check_fully_shard_refuses)


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = make_network()

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.network(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def check_trainer(rank, folder):
    rows = torch.randn(24, 4), torch.randn(24, 2)
    model, whole = Regression(), make_network()
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", plugins=[SyncBatchNormPlugin()], max_steps=3, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        use_distributed_sampler=False,
    )  # fmt: skip
    mine = [torch.cat([x[i : i + 4] for i in range(4 * rank, 24, 8)]) for x in rows]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, DataLoader(TensorDataset(*mine), batch_size=4))
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    for i in range(0, 24, 8):
        F.mse_loss(whole(rows[0][i : i + 8]), rows[1][i : i + 8]).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(model.network.state_dict(), whole.state_dict(), **CLOSE)
    assert type(model.network[1]) is nn.BatchNorm1d


def test_plugin_under_ddp_equals_one_process(tmp_path):
    run_ranks(check_trainer, tmp_path)
