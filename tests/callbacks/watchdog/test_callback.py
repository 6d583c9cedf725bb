"""The watch over fits: steps that are not finite, and what a report says."""

import logging
from contextlib import nullcontext

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel.callbacks import RunReport, Watchdog
from lightning_accel.callbacks.watchdog.nonfinite import NonFiniteError
from lightning_accel.strategies import FullyShardedStrategy, SyncBatchNormPlugin
from tests.ranks import run_ranks

QUIET = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "enable_checkpointing": False, "max_epochs": 1,
}  # fmt: skip


class Net(L.LightningModule):
    def __init__(self, manual=False, norm=nn.BatchNorm1d):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), norm(4), nn.Dropout(0.2), nn.Linear(4, 2))
        self.automatic_optimization = not manual

    def training_step(self, batch, batch_idx):
        torch.manual_seed(int(batch[1][0]))  # the same dropout whatever came before
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[0][:, :2])
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def rows(bad=(), batch_size=4, count=6):
    x = torch.randn(batch_size * count, 3, generator=torch.Generator().manual_seed(1))
    numbers = torch.arange(count).repeat_interleave(batch_size)
    for batch in bad:
        x[batch * batch_size + 1, 2] = float("nan")
    return x, numbers


def loader(bad=(), left_out=(), count=6):
    x, numbers = rows(bad, count=count)
    kept = ~torch.isin(numbers, torch.tensor([*left_out]))
    return DataLoader(TensorDataset(x[kept], numbers[kept]), batch_size=4)


def fit(data, watchdog, *callbacks, module=None, **options):
    module = Net() if module is None else module
    trainer = L.Trainer(**QUIET | {"callbacks": [watchdog, *callbacks]} | options)
    trainer.fit(module, data)
    return module


@pytest.mark.sampled(default=2)
@pytest.mark.parametrize(
    "options", [{}, {"manual": True}, {"precision": "bf16-mixed"}, {"gradient_clip_val": 0.1}], ids=str
)
def test_a_skipped_step_leaves_weights_optimizer_and_batch_norms_as_they_were(options):
    watchdog, options = Watchdog(on_nonfinite="skip"), dict(options)
    manual = options.pop("manual", False)
    found = fit(loader(bad=[2, 3]), watchdog, module=Net(manual), **options)
    expected = fit(loader(left_out=[2, 3]), Watchdog(), module=Net(manual), **options)
    for (name, one), other in zip(found.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    assert [one.step for one in watchdog.findings] == [2, 3]
    assert (
        "batch 2 is skipped: the batch itself is not finite: nan in batch[0], samples 1 of 4"
        in watchdog.findings[0].text
    )


def test_a_run_ends_before_the_update_and_keeps_its_weights():
    module = Net()
    trainer = L.Trainer(**QUIET, callbacks=[Watchdog(on_nonfinite="end")])
    with pytest.raises(NonFiniteError, match=r"batch 2 is not finite: the batch itself.*weights are those before"):
        trainer.fit(module, loader(bad=[2]))
    expected = fit(loader(left_out=[2, 3, 4, 5]), Watchdog())
    assert torch.equal(module.net[3].weight, expected.net[3].weight)


class Counts(Net):
    """Counts batches in a buffer, averages statistics over all, and has buffers of which the numbers share memory."""

    def __init__(self):
        super().__init__()
        self.net[1] = nn.BatchNorm1d(4, momentum=None)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros(0))
        self.register_buffer("mask", torch.ones(1, 3).expand(2, 3))

    def on_train_batch_end(self, *_):
        self.seen += 1

    def training_step(self, batch, batch_idx):
        self.last = batch[0].mean(1)[: 1 + batch_idx % 3]
        return super().training_step(batch, batch_idx)


def test_buffers_of_all_kinds_are_given_back():
    found = fit(loader(bad=[2, 3]), Watchdog(on_nonfinite="skip"), module=Counts()).state_dict()
    expected = fit(loader(left_out=[2, 3]), Watchdog(), module=Counts()).state_dict()
    assert found.pop("seen") == expected.pop("seen") + 2  # after the step
    for name in found.keys() - {"last"}:
        assert torch.equal(found[name], expected[name]), name


def test_checkpoints_of_runs_that_end_hold_finite_statistics(tmp_path):
    with pytest.raises(NonFiniteError):
        fit(loader(bad=[2]), Watchdog(on_nonfinite="end"), ModelCheckpoint(tmp_path, save_on_exception=True),
            enable_checkpointing=True, default_root_dir=tmp_path)  # fmt: skip
    (path,) = tmp_path.rglob("*.ckpt")
    assert all(one.isfinite().all() for one in torch.load(path, weights_only=True)["state_dict"].values())


class Pair(L.LightningModule):
    """Trains two networks by hand, of which one gets what is not finite."""

    def __init__(self, bad):
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)) for _ in range(2))
        self.automatic_optimization, self.bad = False, bad

    def training_step(self, batch, batch_idx):
        for number, optimizer in enumerate(self.optimizers()):
            x = batch[0] if number != self.bad or batch_idx < 3 else batch[0] * float("nan")
            optimizer.zero_grad()
            self.manual_backward(self.nets[number](x).square().mean())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.Adam(net.parameters(), lr=0.01) for net in self.nets]


@pytest.mark.parametrize("bad", [0, 1])
def test_each_of_several_optimizers_skips_and_counts_for_itself(bad):
    module = fit(loader(), Watchdog(on_nonfinite="skip"), module=Pair(bad))
    assert all(one.isfinite().all() for one in module.state_dict().values())
    assert [net[1].num_batches_tracked for net in module.nets] == [3 if number == bad else 6 for number in range(2)]
    with pytest.raises(NonFiniteError, match="batch 5 is not finite, nor are the 2 before"):
        fit(loader(), Watchdog(on_nonfinite="skip", max_skipped=2), module=Pair(bad))


@pytest.mark.parametrize("how", ["skip", "end", "warn"])
def test_the_bad_batch_of_several_whose_gradients_are_summed_is_named(how):
    watchdog = Watchdog(on_nonfinite=how)
    with pytest.raises(NonFiniteError, match="batch 1 is not finite: the batch") if how == "end" else nullcontext():
        fit(loader(bad=[1]), watchdog, accumulate_grad_batches=3)
    if how == "skip":
        assert watchdog.findings[0].text.startswith("the update of training batch 2 is skipped: in batch 1, the batch")
    if how == "warn":
        assert watchdog.findings[0].text.startswith("the loss is not finite at training batch 1: the batch itself")


@pytest.mark.gpu
def test_a_gpu_skips_and_warns_without_a_wait():
    watchdog = Watchdog(on_nonfinite="skip")
    found = fit(loader(bad=[2, 3]), watchdog, accelerator="gpu", devices=1)
    expected = fit(loader(left_out=[2, 3]), Watchdog(), accelerator="gpu", devices=1)
    assert all(torch.equal(one, found.state_dict()[name]) for name, one in expected.state_dict().items())
    assert "nan in batch[0], samples 1 of 4" in watchdog.findings[0].text
    warns = Watchdog()
    fit(loader(bad=[2], count=30), warns, accelerator="gpu", devices=1)
    (found,) = warns.findings
    assert found[:2] == ("not finite", 2)
    early, late = "the batch itself is not finite: nan in batch[0], samples 1 of 4", "on_nonfinite='end' says where"
    assert any(part in found.text for part in (early, late))  # early if the GPU was done before the next step began


def test_lbfgs_is_refused_before_training():
    class Second(Net):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(TypeError, match="cannot keep the weights of a step of LBFGS"):
        fit(loader(), Watchdog(on_nonfinite="skip"), module=Second())


def test_a_run_ends_after_too_many_skipped_steps_in_a_row():
    fit(loader(bad=[0, 1, 3, 4]), Watchdog(on_nonfinite="skip", max_skipped=2))
    with pytest.raises(NonFiniteError, match="batch 3 is not finite, nor are the 2 before: the batch itself is not"):
        fit(loader(bad=[1, 2, 3]), Watchdog(on_nonfinite="skip", max_skipped=2))


def test_losses_that_are_not_finite_are_said_once_and_stand_in_the_report(caplog, capsys):
    watchdog, report = Watchdog(), RunReport()
    with caplog.at_level(logging.WARNING):
        fit(loader(bad=[2]), watchdog, report)
    (finding, second, *_) = watchdog.findings
    assert finding[:2] == ("not finite", 2)
    assert finding.text == (
        "the loss is not finite at training batch 2: the batch itself is not finite: nan in batch[0], samples 1 of 4"
    )
    assert "weights were not finite before the step: net.0.weight and 5 more" in second.text  # of the update
    assert finding.text in caplog.text
    assert report.summary.to_dict()["health"][0]["step"] == 2
    assert "3 times not finite, first at batch 2" in capsys.readouterr().out


class Odd(Net):
    """Has a loss that is not finite once, and gradients that are."""

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[0][:, :2])
        self.kept = getattr(self, "kept", {})
        self.kept["last"] = loss.detach() + torch.ones(2)  # which cannot be compared with another
        return loss + (float("nan") if batch[1][0] == 2 else 0.0)


def test_a_step_that_runs_again_to_find_the_layer_leaves_no_trace():
    ends = []
    for callbacks in ([Watchdog()], []):
        torch.manual_seed(3)
        module = fit(loader(), *callbacks or [L.Callback()], module=Odd())
        ends.append((module.state_dict(), torch.get_rng_state()))
    assert all(torch.equal(one, other) for one, other in zip(ends[0][0].values(), ends[1][0].values(), strict=True))
    assert torch.equal(ends[0][1], ends[1][1])


def test_choices_are_checked():
    with pytest.raises(ValueError, match="timeout must be above 0; got 0"):
        Watchdog(timeout=0)
    with pytest.raises(ValueError, match="on_hang must be 'warn' or 'end'; got 'stop'"):
        Watchdog(on_hang="stop")
    with pytest.raises(ValueError, match="on_nonfinite must be 'warn', 'skip' or 'end'; got 'ignore'"):
        Watchdog(on_nonfinite="ignore")
    with pytest.raises(ValueError, match="max_skipped must be at least 1; got 0"):
        Watchdog(max_skipped=0)


def whole(module):
    return [(one.full_tensor() if hasattr(one, "full_tensor") else one).detach() for one in module.parameters()]


def check_ranks_skip(rank, kind):
    strategy = FullyShardedStrategy() if kind == "fsdp2" else kind
    watchdog, options = Watchdog(on_nonfinite="skip"), {"devices": 2, "use_distributed_sampler": False}
    data = loader(bad=[2, 3] if rank == 0 else [])
    found = whole(fit(data, watchdog, module=Net(norm=nn.LayerNorm), strategy=strategy, **options))
    torch.testing.assert_close(found, whole(fit(loader(left_out=[2, 3]), Watchdog(), module=Net(norm=nn.LayerNorm))))
    return [(one.step, one.text) for one in watchdog.findings]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_all_ranks_skip_what_is_not_finite_in_one(kind):
    bad, other = run_ranks(check_ranks_skip, kind)
    assert [step for step, _ in bad] == [2, 3]
    assert "nan in batch[0], samples 1 of 4" in bad[0][1]
    assert other == [(2, "the update of training batch 2 is skipped")]


class RaisesAgain(Net):
    """Fails in the second process when the step runs again."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == 1:
            AGAIN.append(1)
            if len(AGAIN) > 1:
                raise ValueError("out of memory")
        return super().training_step(batch, batch_idx) + (float("nan") if batch_idx == 2 else 0.0)


AGAIN: list[int] = []


def check_ranks_raise(rank):
    AGAIN.clear()
    watchdog = Watchdog(on_nonfinite="skip")
    fit(loader(), watchdog, module=RaisesAgain(), strategy="ddp", devices=2, use_distributed_sampler=False)
    return [one.text.partition(": ")[2] for one in watchdog.findings]


def test_a_step_that_cannot_be_repeated_in_one_process_holds_up_none():
    first, second = run_ranks(check_ranks_raise, timeout_s=60)
    assert first == ["the outputs of all layers are finite, and training_step makes nan of them"]
    assert second == ["the layer is not known, since the step cannot be repeated: ValueError: out of memory"]


class Negative(Net):
    """Has a loss that is not finite in the first process, after layers that processes compute together."""

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        is_odd = self.global_rank == 0 and batch[1][0] == 2
        return (out.abs() * (-1 if is_odd else 1)).add(0.1).log().mean()


def check_ranks_find(rank):
    watchdog = Watchdog(on_nonfinite="skip")
    options = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
    module = fit(loader(), watchdog, module=Negative(), plugins=[SyncBatchNormPlugin()], **options)
    assert all(one.isfinite().all() for one in module.state_dict().values())
    return [one.text.partition(": ")[2] for one in watchdog.findings]


def test_processes_that_compute_together_stop_to_look_for_the_layer_together():
    first, second = run_ranks(check_ranks_find)
    assert first == ["the outputs of all layers are finite, and training_step makes nan of them"]
    assert second == [""]
