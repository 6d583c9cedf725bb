import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_accel import AmpPrecision
from lightning_accel.strategies import FullyShardedStrategy, SyncBatchNormPlugin, find_blocks
from tests.ranks import run_ranks
from tests.strategies.trained import ADAMW, SGD, Plain, Rows, fit, make, trainer, whole_weights
from tests.tolerance import CLOSE

close = partial(torch.testing.assert_close, **CLOSE)


def check_fit(rank, name, strategy, options, world_size, rows=4):
    run = fit(name, rows, strategy=FullyShardedStrategy(**strategy), devices=world_size, **options)
    assert any(isinstance(parameter, DTensor) for parameter in run.lightning_module.parameters())
    return whole_weights(run)


def equals_one_process(name, strategy, options, world_size=2):
    expected = whole_weights(fit(name, 8, **options))
    for actual in run_ranks(check_fit, name, strategy, options, world_size, 8 // world_size, world_size=world_size):
        close(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "classifier", pytest.param("language_model", marks=pytest.mark.slow)])
def test_training_equals_one_process(name):
    equals_one_process(name, {}, {})


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param({"activation_checkpointing": True}, marks=pytest.mark.slow),
        {"cpu_offload": True},
        {"blocks": ["Linear"]},
        pytest.param({"expert_parallel_size": "all"}, marks=pytest.mark.slow),
        {"expert_parallel_size": 2, "activation_checkpointing": True},
    ],
    ids=str,
)
def test_options_change_no_result(strategy):
    equals_one_process("language_model", strategy, {"gradient_clip_val": 0.1, "optimizer": SGD})


@pytest.mark.slow
@pytest.mark.parametrize("expert_parallel_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_accumulated_and_clipped_gradients_equal_those_of_one_process(expert_parallel_size):
    strategy = {"expert_parallel_size": expert_parallel_size}
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "max_steps": 2, "optimizer": SGD}
    equals_one_process("classifier", strategy, options)  # not Adam, to which the scale of gradients is nothing


@pytest.mark.sampled(slow=2)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", [{}, {"shard_size": 2}, {"expert_parallel_size": 2}, {"expert_parallel_size": 4}])
def test_four_processes_equal_one(strategy):
    equals_one_process("language_model", strategy, {"gradient_clip_val": 0.1}, world_size=4)


one_batch = partial(fit, num_rows=8)  # an epoch is a step: Lightning replays an epoch that was cut short


def check_resumed(rank, name, strategy, path, world_size=2):
    options = {"strategy": FullyShardedStrategy(**strategy), "devices": world_size, "ckpt_path": path}
    other = partial(ADAMW, lr=0.5, betas=(0.5, 0.5))  # in whose place come those of the checkpoint
    return whole_weights(one_batch(name, 8 // world_size, optimizer=other, **options))


def check_saved(rank, name, strategy, path, world_size=2, max_steps=1):
    options = {"strategy": FullyShardedStrategy(**strategy), "devices": world_size, "max_steps": max_steps}
    one_batch(name, 8 // world_size, **options).save_checkpoint(path)


@pytest.mark.sampled(slow=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param("plain", {}, marks=pytest.mark.slow),
        ("language_model", {"expert_parallel_size": 2}),
        pytest.param("plain", {"cpu_offload": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_whole_checkpoints_go_both_ways(name, strategy, tmp_path):
    if name == "plain" and "expert_parallel_size" in strategy:
        pytest.skip("has no experts")
    expected = whole_weights(one_batch(name, 8))
    one = one_batch(name, 8, max_steps=1)
    one.save_checkpoint(tmp_path / "one.ckpt")
    run_ranks(check_saved, name, strategy, tmp_path / "split.ckpt")
    ours, theirs = (torch.load(tmp_path / f"{made}.ckpt", weights_only=True) for made in ("split", "one"))
    assert list(ours["state_dict"]) == list(theirs["state_dict"])
    close(ours["state_dict"], theirs["state_dict"])
    assert ours["optimizer_states"][0]["param_groups"] == theirs["optimizer_states"][0]["param_groups"]
    close(ours["optimizer_states"][0]["state"], theirs["optimizer_states"][0]["state"])
    close(whole_weights(one_batch(name, 8, ckpt_path=tmp_path / "split.ckpt")), expected)
    for made in ("split", "one"):
        for actual in run_ranks(check_resumed, name, strategy, tmp_path / f"{made}.ckpt"):
            close(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("expert_parallel_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_sharded_checkpoints_resume(expert_parallel_size, tmp_path):
    options = {"checkpoints": "sharded", "expert_parallel_size": expert_parallel_size}
    expected = whole_weights(one_batch("language_model", 8))
    path = tmp_path / "parts.ckpt"
    run_ranks(check_saved, "language_model", options, path)
    assert {file.name for file in path.iterdir()} == {"__0_0.distcp", "__1_0.distcp", ".metadata", "meta.pt"}
    for actual in run_ranks(check_resumed, "language_model", options, path):
        close(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", ["whole", "sharded"])
def test_checkpoints_resume_on_another_number_of_processes(checkpoints, tmp_path):
    expected = whole_weights(one_batch("language_model", 8))
    path = tmp_path / "some.ckpt"
    run_ranks(check_saved, "language_model", {"checkpoints": checkpoints}, path)
    for strategy in ({"shard_size": 2}, {"expert_parallel_size": 4}):
        for actual in run_ranks(check_resumed, "language_model", strategy, path, 4, world_size=4):
            close(actual, expected)


def check_kept_checkpoints(rank, folder):
    keeper = L.pytorch.callbacks.ModelCheckpoint(
        folder, every_n_train_steps=1, save_top_k=1, monitor="step", mode="max"
    )
    strategy = FullyShardedStrategy(checkpoints="sharded")
    fit("plain", 4, strategy=strategy, devices=2, enable_checkpointing=True, callbacks=[keeper], max_steps=4)
    return keeper.best_model_path


@pytest.mark.slow
def test_the_older_checkpoint_goes_when_the_newer_is_complete(tmp_path):
    best, _ = run_ranks(check_kept_checkpoints, tmp_path)
    assert [str(file) for file in tmp_path.iterdir()] == [best]


def check_one_start(rank):
    module, data = make("plain_batch_norm")
    torch.manual_seed(rank)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    run = trainer(strategy=FullyShardedStrategy(), devices=2, max_steps=1)
    first = {name: value.clone() for name, value in module.state_dict().items()}
    module.make_optimizer = partial(torch.optim.SGD, lr=0.0)
    run.fit(module, Rows(data, 4))
    return first, whole_weights(run)


@pytest.mark.slow
def test_all_processes_start_with_the_weights_of_the_first():
    (first, after), (other, after_other) = run_ranks(check_one_start)
    assert not first["end.weight"].equal(other["end.weight"])
    weights = [name for name in first if "running" not in name and "tracked" not in name]
    close({name: after[name] for name in weights}, {name: first[name] for name in weights})
    close({name: after_other[name] for name in weights}, {name: first[name] for name in weights})


def check_batch_norm(rank):
    run = fit("plain_batch_norm", 4, strategy=FullyShardedStrategy(), devices=2)
    before = run.lightning_module.norm.running_mean.clone()
    run.validate(run.lightning_module, Rows(make("plain")[1], 4), verbose=False)
    return before, run.lightning_module.norm.running_mean.clone()


@pytest.mark.slow
def test_statistics_of_batch_norms_are_those_of_the_first_process():
    (first, used), (other, used_other) = run_ranks(check_batch_norm)
    assert not first.equal(other)
    assert used.equal(first)
    assert used_other.equal(first)


class Tied(Plain):
    def __init__(self):
        super().__init__()
        self.blocks[2][2].weight = self.blocks[0][2].weight
        self.blocks[1][0].weight = self.start_weight = nn.Parameter(torch.randn(13, 12))

    def forward(self, x):
        return super().forward(x) + self.start_weight.sum()


def check_tied(rank, world_size):
    torch.manual_seed(1)
    module, (_, data) = Tied(), make("plain")
    strategy = FullyShardedStrategy() if world_size > 1 else "auto"
    run = trainer(strategy=strategy, devices=world_size)
    run.fit(module, Rows(data, 8 // world_size))
    return whole_weights(run)


@pytest.mark.slow
def test_parameters_in_several_places_stay_one():
    for actual in run_ranks(check_tied, 2):
        close(actual, check_tied(0, 1))


class Spy(L.Callback):
    """Dtypes in which a module sees its weights, and whether its gradients have the digits of bfloat16 alone."""

    def on_fit_start(self, trainer, pl_module):
        self.seen = {}
        for name, layer in pl_module.named_modules():
            if {"weight", "up_weight"} & set(layer._parameters):
                layer.register_forward_pre_hook(partial(self.note, name))

    def note(self, name, layer, inputs):
        weight = layer._parameters.get("weight", layer._parameters.get("up_weight"))
        self.seen[name] = weight.dtype, weight.shape

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        gradient = pl_module.blocks[1].attention.out.weight.grad.to_local()
        self.has_digits_of_float32 = bool((gradient != gradient.bfloat16()).any())


def check_dtypes(rank):
    spy = Spy()
    run = fit(
        "language_model",
        4,
        strategy=FullyShardedStrategy(),
        devices=2,
        precision="bf16-mixed",
        callbacks=[spy],
        optimizer=SGD,
    )
    master = {parameter.dtype for parameter in run.lightning_module.parameters()}
    return spy.seen, spy.has_digits_of_float32, master, whole_weights(run)


@pytest.mark.slow
def test_mixed_precision_gathers_low_reduces_in_float32_and_keeps_gates_and_master_weights():
    expected = whole_weights(fit("language_model", precision="bf16-mixed", optimizer=SGD))
    for seen, has_digits_of_float32, master, weights in run_ranks(check_dtypes):
        assert has_digits_of_float32  # a mean of two numbers of bfloat16 often has more digits
        assert seen["blocks.0.feed_forward.gate"] == (torch.float32, (4, 16))
        assert seen["blocks.1.attention.out"] == (torch.bfloat16, (16, 16))
        assert seen["blocks.0.feed_forward.experts"] == (torch.bfloat16, (4, 12, 16))
        assert master == {torch.float32}
        for key in set(weights) - {key for key in weights if key.endswith("expert_slots")}:  # near ties go either way
            # the norm of small embeddings enlarges what their rounding changes: 0.04 in one process, too
            atol = 0.05 if key in ("embedding.weight", "head.weight") else 0.01
            torch.testing.assert_close(weights[key], expected[key], rtol=0.02, atol=atol)


def check_stages(rank):
    run = fit("plain", 4, strategy=FullyShardedStrategy(), devices=2, limit_val_batches=2)
    module, data = run.lightning_module, Rows(make("plain")[1], 4)
    first = run.validate(module, data, verbose=False)[0]["val/loss"]
    run.fit_loop.epoch_loop.max_steps = 5
    run.fit(module, data)
    second = run.validate(module, data, verbose=False)[0]["val/loss"]
    fresh = trainer(strategy=FullyShardedStrategy(), devices=2).validate(make("plain")[0], data, verbose=False)
    return first, second, fresh[0]["val/loss"]


@pytest.mark.slow
def test_fit_and_evaluation_follow_each_other():
    data = Rows(make("plain")[1], 8)

    def loss(steps):
        run = fit("plain", 8, max_steps=steps, limit_val_batches=2)
        return run.validate(run.lightning_module, data, verbose=False)[0]["val/loss"]

    fresh = trainer().validate(make("plain")[0], data, verbose=False)[0]["val/loss"]
    for actual in run_ranks(check_stages):
        assert actual[0] == pytest.approx(loss(3), abs=1e-5)
        assert actual[1] != pytest.approx(actual[0], abs=1e-4)
        assert actual[2] == pytest.approx(fresh, abs=1e-5)


class Reductions(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += "reduce_scatter" in str(func)
        return func(*args, **kwargs or {})


def check_reductions(rank):
    with Reductions() as counted:
        fit("plain", 4, strategy=FullyShardedStrategy(), devices=2, accumulate_grad_batches=2, max_steps=2)
    return counted.number


@pytest.mark.slow
def test_accumulated_gradients_are_reduced_once():
    assert run_ranks(check_reductions) == [2 * 5] * 2  # steps, and groups: four blocks and the rest


def check_refused(rank, name, strategy):
    with pytest.raises((ValueError, TypeError)) as error:
        fit(name, 4, strategy=FullyShardedStrategy(**strategy), devices=2)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "strategy", "message"),
    [
        ("plain", {"expert_parallel_size": 2}, "Plain has no layer that holds experts.*expert_parameters.*accel_fsdp2"),
        ("plain", {"blocks": ["Block"]}, "no submodule of Plain is a Block; its classes are .*Linear"),
        ("plain", {"shard_size": 3}, "shard_size must divide the number of processes, 2; got 3"),
        ("language_model", {"expert_parallel_size": 3}, "expert_parallel_size must divide .* 2; got 3"),
    ],
)
def test_what_cannot_work_is_refused(name, strategy, message):
    for actual in run_ranks(check_refused, name, strategy):
        assert re.search(message, actual)


def check_copies_refused(rank, callback):
    with pytest.raises(ValueError, match=r"keeps a whole copy of the weights.*'ddp'"):
        fit("plain", 4, strategy=FullyShardedStrategy(), devices=2, callbacks=[callback()])


@pytest.mark.parametrize("callback", [EMAWeightAveraging, partial(StochasticWeightAveraging, 0.1)])
def test_callbacks_that_copy_the_weights_are_refused(callback):
    run_ranks(check_copies_refused, callback)


class ListExperts(nn.Module):
    """Experts of somebody else: stacked matrices, used one by one."""

    expert_parameters = ("weight",)

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 12, 12) / 4)

    def forward(self, tokens, token_of_slot, weight_of_slot, counts):
        out, start = torch.zeros_like(tokens), 0
        for matrix, count in zip(self.weight, counts.tolist(), strict=True):
            mine = token_of_slot[start : start + count]
            made = tokens[mine] @ matrix.tanh() * weight_of_slot[start : start + count, None]
            out = out.index_add(0, mine, made)
            start += count
        return out


class Theirs(Plain):
    """A module with a mixture of its own: the sign of two features picks the expert."""

    def __init__(self):
        super().__init__()
        self.experts = ListExperts()

    def forward(self, x):
        tokens = self.start(x)
        expert = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0.5)
        order = expert.argsort(stable=True)
        mixed = self.experts(tokens, order, x[order, 2].sigmoid(), expert.bincount(minlength=4))
        return self.end(self.norm(tokens + mixed))


def check_their_experts(rank, world_size):
    torch.manual_seed(1)
    module, (_, data) = Theirs(), make("plain")
    strategy = "accel_expert_parallel" if world_size > 1 else "auto"
    run = trainer(strategy=strategy, devices=world_size, gradient_clip_val=0.3)
    run.fit(module, Rows(data, 8 // world_size))
    return module.experts.weight.to_local().shape if world_size > 1 else None, whole_weights(run)


@pytest.mark.slow
def test_experts_of_any_module_are_dealt():
    _, expected = check_their_experts(0, 1)
    for shape, actual in run_ranks(check_their_experts, 2):
        assert shape == (2, 12, 12)
        close(actual, expected)


def check_fp16(rank, name, options):
    plugins = [MixedPrecision("16-mixed", "cpu")]
    options = {"strategy": FullyShardedStrategy(**options), "devices": 2, "gradient_clip_val": 0.3}
    run = fit(name, 4, plugins=plugins, optimizer=SGD, **options)
    return whole_weights(run), run.precision_plugin.scaler.get_scale()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [pytest.param("plain", {}, marks=pytest.mark.slow), ("language_model", {"expert_parallel_size": 2})],
)
def test_fp16_with_a_scaler_trains(name, options):
    expected = whole_weights(fit(name, optimizer=SGD, gradient_clip_val=0.3))
    for actual, scale in run_ranks(check_fp16, name, options):
        assert scale == 2**16
        for key in set(actual) - {key for key in actual if key.endswith("expert_slots")}:
            torch.testing.assert_close(actual[key], expected[key], rtol=0.02, atol=0.005)


class Unusual(Plain):
    """A number among the parameters, and layers with two names."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.backbone, self.rest = self.blocks[:2], self.blocks[2:]

    def forward(self, x):
        return super().forward(x) * self.temperature


def check_unusual(rank, world_size):
    torch.manual_seed(1)
    module, (_, data) = Unusual(), make("plain")
    options = {"strategy": FullyShardedStrategy() if world_size > 1 else "auto", "devices": world_size}
    run = trainer(accumulate_grad_batches=2, max_steps=2, gradient_clip_val=0.3, **options)
    run.fit(module, Rows(data, 8 // world_size))
    return whole_weights(run)


@pytest.mark.slow
def test_numbers_and_layers_with_two_names():
    for actual in run_ranks(check_unusual, 2):
        close(actual, check_unusual(0, 1))


def check_low_batch_norm(rank):
    run = fit("plain_batch_norm", 4, strategy="accel_fsdp2", devices=2, precision="bf16-mixed", optimizer=SGD)
    return whole_weights(run)["norm.weight"]


class RepeatedNorms(L.LightningModule):
    """Repeats layers side by side, so that batch norms are blocks of their own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(kind(6) for _ in range(3) for kind in (nn.LazyLinear, nn.BatchNorm1d)))
        self.layers(torch.randn(4, 6))

    def training_step(self, x, batch_idx):
        return self.layers(x).square().mean()

    def validation_step(self, x, batch_idx):
        self.training_step(x, batch_idx)

    def configure_optimizers(self):
        return SGD(self.parameters())


def check_repeated_norms(rank):
    module, loader = RepeatedNorms(), torch.utils.data.DataLoader(torch.randn(8, 6), 4)
    assert any(isinstance(block, nn.BatchNorm1d) for block in find_blocks(module))
    run = trainer(strategy=FullyShardedStrategy(), devices=2, precision="bf16-mixed", max_steps=2)
    run.fit(module, loader, loader)


@pytest.mark.slow
def test_batch_norms_train_in_mixed_precision():
    first, second = run_ranks(check_low_batch_norm)
    assert first.equal(second)
    assert not first.equal(torch.ones(12))
    run_ranks(check_repeated_norms)


def check_second_trainer(rank):
    module, data = make("plain")
    for _ in range(2):
        run = trainer(strategy=FullyShardedStrategy(), devices=2)
        run.fit(module, Rows(data, 4))
        run.validate(module, Rows(data, 4), verbose=False)
    with pytest.raises(ValueError, match="was split by an earlier run, with other options"):
        trainer(strategy=FullyShardedStrategy(blocks=["Linear"]), devices=2).fit(module, Rows(data, 4))
    return whole_weights(run)


@pytest.mark.slow
def test_a_second_trainer_takes_the_module():
    module, data = make("plain")
    for _ in range(2):
        run = trainer()
        run.fit(module, Rows(data, 8))
    for actual in run_ranks(check_second_trainer):
        close(actual, whole_weights(run))


class FailsOnOne(Plain):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 1:
            raise ValueError("not in this batch")
        return super().training_step(batch, batch_idx)


def check_failure(rank):
    with pytest.raises((ValueError, RuntimeError)) as error:
        trainer(strategy=FullyShardedStrategy(), devices=2).fit(FailsOnOne(), Rows(make("plain")[1], 4))
    if rank == 1:
        assert str(error.value) == "not in this batch"
        os._exit(3)  # as the end of its program would


@pytest.mark.slow
def test_a_process_that_fails_says_so_at_once():
    with pytest.raises(AssertionError, match="rank 1: the process died, exit code 3"):
        run_ranks(check_failure)


@pytest.mark.weekly
@pytest.mark.slow
def test_processes_started_by_fork_hand_the_weights_back(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from lightning_accel import AtomicCheckpointIO, FullyShardedStrategy\n"
        "from tests.strategies.trained import Rows, make, trainer\n"
        "module, data = make('plain')\n"
        "strategy = FullyShardedStrategy(start_method='fork')\n"
        "trainer(strategy=strategy, devices=2, plugins=[AtomicCheckpointIO()]).fit(module, Rows(data, 4))\n"
        "torch.save(module.state_dict(), 'weights.pt')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    subprocess.run([sys.executable, script], check=True, cwd=tmp_path, env=environment, timeout=600)
    close(torch.load(tmp_path / "weights.pt"), whole_weights(fit("plain", 8)))


class Large(Plain):
    """Made where it takes no memory; its own parameters, which nothing could draw, are on the CPU."""

    def __init__(self):
        super().__init__()
        for layer in [self.start, *self.blocks.modules(), self.norm, self.end]:
            layer._apply(lambda tensor: tensor.to("meta"), recurse=False)


def check_large(rank, path):
    data = Rows(make("plain", num_rows=8)[1], 4)
    drawn, resumed = Large(), Large()
    torch.manual_seed(4)
    first = trainer(strategy=FullyShardedStrategy(), devices=2, max_steps=1)
    first.fit(drawn, data)
    run = trainer(strategy=FullyShardedStrategy(), devices=2)
    run.fit(resumed, data, ckpt_path=path)
    return whole_weights(first), whole_weights(run)


@pytest.mark.slow
def test_modules_on_the_meta_device_draw_their_parts_or_load_them(tmp_path):
    one_batch("plain", 8, max_steps=1).save_checkpoint(tmp_path / "one.ckpt")
    expected = whole_weights(one_batch("plain", 8))
    (drawn, resumed), (drawn_there, resumed_there) = run_ranks(check_large, tmp_path / "one.ckpt")
    close(resumed, expected)
    close(resumed_there, expected)
    weight = drawn["start.weight"]  # (12, 5), in parts of 6 rows
    assert weight.equal(drawn_there["start.weight"])
    assert 0.2 < weight.std() < 0.35  # uniform in 1 / sqrt(5)
    assert (weight[:6] - weight[6:]).abs().mean() > 0.1


def check_each_run_is_set_up(rank):
    module, data = make("plain_batch_norm", SGD)
    seen = []

    class Look(L.Callback):
        def on_train_start(self, trainer, pl_module):
            scaled = trainer.precision_plugin.scaler is not None
            seen.append((pl_module.norm._sync_group is not None, scaled))

    for stage in ("validate", "fit", "fit"):
        plugins = [SyncBatchNormPlugin(), AmpPrecision("fp16")]
        run = trainer(strategy=FullyShardedStrategy(), devices=2, plugins=plugins, callbacks=[Look()], max_steps=1)
        getattr(run, stage)(module, datamodule=Rows(data, 4))
    return seen


@pytest.mark.slow
def test_each_run_has_its_precision_and_its_synchronised_batch_norms():
    assert run_ranks(check_each_run_is_set_up) == [[(True, True)] * 2] * 2
