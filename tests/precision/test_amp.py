import copy
import re
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_accel.data import DigitsDataModule
from lightning_accel.models import Experts, MoEClassifier
from lightning_accel.precision import AmpPrecision
from lightning_accel.precision.amp import WorldGradScaler
from tests.precision.plain_module import PlainClassifier, batches, fit, make_trainer
from tests.ranks import run_ranks

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def weights_of(model):
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


@pytest.mark.sampled(default=1)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_trains_as_float32_does(dtype):
    expected = fit(max_epochs=3)
    precision = AmpPrecision(dtype)
    actual = fit(precision, max_epochs=3)
    assert actual.dtypes == {DTYPES[dtype]}
    assert (precision.scaler is not None) == (dtype == "fp16")
    tolerance = 0.03 if dtype == "bf16" else 0.004  # 8 and 11 significant bits
    torch.testing.assert_close(actual.losses, expected.losses, rtol=0, atol=tolerance)
    assert isinstance(precision, MixedPrecision)
    assert precision.precision == {"bf16": "bf16-mixed", "fp16": "16-mixed"}[dtype]


@pytest.mark.slow
def test_mixture_of_experts_learns_as_in_float32_and_its_gate_stays_in_it(monkeypatch):
    losses, gate_dtypes = [], set()
    recording = SimpleNamespace(**vars(F))
    recording.linear = lambda x, weight: [y := F.linear(x, weight), gate_dtypes.add(y.dtype)][0]
    monkeypatch.setattr("lightning_accel.nn.moe.gating.F", recording)
    for plugins in ([], [AmpPrecision("bf16")], [AmpPrecision("fp16")]):
        torch.manual_seed(0)
        model = MoEClassifier(dim=16, experts=Experts(4, hidden_dim=24), optimizer=lambda p: torch.optim.AdamW(p, 3e-3))
        trainer = make_trainer(*plugins, max_epochs=1)
        trainer.fit(model, DigitsDataModule())
        losses.append(trainer.callback_metrics["val/loss"].item())
    assert gate_dtypes == {torch.float32}
    assert losses == pytest.approx(losses[:1] * 3, rel=0.05)


def test_auto_tells_once_what_it_took_and_why(caplog, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    precision = AmpPrecision()
    with caplog.at_level("INFO"):
        model = fit(precision)
        make_trainer(precision).fit(PlainClassifier(), batches())
    assert caplog.text.count("AmpPrecision: 32-true, since the CPU emulates bf16") == 1
    assert precision.precision == "32-true"
    assert model.dtypes == {torch.float32}


def test_auto_guesses_before_the_device_is_known():
    assert AmpPrecision().precision in ("bf16-mixed", "16-mixed", "32-true")
    assert AmpPrecision("fp16").precision == "16-mixed"


class Overflowing(PlainClassifier):
    """Its last layer gets a gradient of ``value`` at the ``steps`` named."""

    steps = (2, 3)
    value = torch.inf

    def on_after_backward(self):
        if self.trainer.global_step in self.steps:
            self.net[2].bias.grad[1] = self.value


class WeightsAfterEachStep(L.Callback):
    def __init__(self):
        self.weights, self.rates = [], []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.weights.append(pl_module.net[0].weight.detach().clone())
        self.rates.append(pl_module.learning_rate)


def test_skipped_steps_hold_the_schedule(tmp_path):
    precision, record = AmpPrecision("fp16"), WeightsAfterEachStep()
    model = fit(precision, model=Overflowing(), callbacks=[record], logger=CSVLogger(tmp_path))
    assert precision.skipped_steps == 2
    assert precision.consecutive_skips == 0
    moved = [not torch.equal(a, b) for a, b in zip(record.weights, record.weights[1:], strict=False)]
    assert moved == [True, False, False, True, True, True, True, True, True]
    torch.testing.assert_close(record.rates, [0.01 * 0.9**n for n in (1, 2, 2, 2, 3, 4, 5, 6, 7, 8)])
    assert model.trainer.global_step == 10  # Lightning tells the place in an epoch by it
    assert model.trainer.callback_metrics["precision/skipped_steps"] == 2
    assert model.trainer.callback_metrics["precision/scale"] == 2.0**14
    assert model.trainer.lr_scheduler_configs[0].frequency == 1


def test_skip_at_the_last_step_leaves_the_schedule_usable():
    model = Overflowing()
    model.steps = (9,)
    fit(AmpPrecision("fp16"), model=model)
    assert model.trainer.lr_scheduler_configs[0].frequency == 1
    assert model.learning_rate == pytest.approx(0.01 * 0.9**9)


@pytest.mark.parametrize("fused", [False, True])
def test_clips_unscaled_gradients(fused):
    make = {"make_optimizer": torch.optim.SGD, "lr": 1.0, "fused": fused}
    torch.manual_seed(0)
    model = PlainClassifier(**make)
    before = copy.deepcopy(model.net)
    trainer = make_trainer(AmpPrecision("fp16"), max_steps=1, gradient_clip_val=1e-3)
    trainer.fit(model, batches())
    moved = torch.cat([(a - b).flatten() for a, b in zip(model.parameters(), before.parameters(), strict=True)])
    assert moved.norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_accumulates_gradients_of_one_scale():
    expected = fit(accumulate_grad_batches=3, max_epochs=2)
    actual = fit(AmpPrecision("fp16", growth_interval=1, init_scale=8.0), accumulate_grad_batches=3, max_epochs=2)
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(actual.state_dict()[name], weight, rtol=0, atol=5e-3)


def test_endless_skips_end_with_the_names_of_the_gradients():
    model = Overflowing()
    model.steps, model.value = range(100), torch.nan  # which clipping would spread over all gradients
    message = "20 optimizer steps in a row.*went down to 0.125. Not finite are the gradients of net.2.bias. "
    with pytest.raises(FloatingPointError, match=message + "The loss is finite"):
        fit(AmpPrecision("fp16"), model=model, gradient_clip_val=1.0, max_epochs=3)
    with pytest.raises(FloatingPointError, match="The loss itself is nan"):
        fit(AmpPrecision("fp16"), model=NanLoss(), max_epochs=3)


class NanLoss(PlainClassifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * torch.nan


@pytest.mark.slow
@pytest.mark.parametrize("saved_by", ["ours", "Lightning"])
def test_scaler_resumes(tmp_path, saved_by):
    # steps are skipped in ours alone, since Lightning's moves the schedule on skipped steps
    options = {"init_scale": 2.0**30, "growth_interval": 7} if saved_by == "ours" else {"growth_interval": 100}
    straight = AmpPrecision("fp16", **options)
    expected = fit(straight, max_epochs=4)
    theirs = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **options))
    first = fit(AmpPrecision("fp16", **options) if saved_by == "ours" else theirs, max_epochs=2)
    first.trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = AmpPrecision("fp16")
    actual = fit(resumed, max_epochs=4, ckpt_path=tmp_path / "half.ckpt")
    assert resumed.scaler.state_dict() == straight.scaler.state_dict()
    assert (straight.skipped_steps > 3) == (saved_by == "ours")
    assert resumed.skipped_steps == straight.skipped_steps
    for name, weight in expected.state_dict().items():
        assert torch.equal(actual.state_dict()[name], weight)


class TwoOptimizers(PlainClassifier):
    """One backward pass, then a step of each of two optimizers."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 2)]


def test_manual_optimization_with_two_optimizers_after_one_backward_pass():
    expected = fit(model=TwoOptimizers)
    precision = AmpPrecision("fp16", init_scale=4.0, growth_interval=1)
    actual = fit(precision, model=TwoOptimizers)
    assert precision.scaler.get_scale() == 4.0 * 2**9  # the tenth change is due at the next backward pass
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(actual.state_dict()[name], weight, rtol=0, atol=2e-3)


def test_refuses_what_cannot_work():
    with pytest.raises(ValueError, match="dtype must be auto, bf16 or fp16; got 'float16'"):
        AmpPrecision("float16")
    with pytest.raises(ValueError, match="growth_interval must be at least 1; got 0"):
        AmpPrecision(growth_interval=0)
    with pytest.raises(ValueError, match=r'LBFGS evaluates.*use AmpPrecision\(dtype="bf16"\)'):
        fit(AmpPrecision("fp16"), model=PlainClassifier(torch.optim.LBFGS))
    with pytest.raises(ValueError, match="needs float32 parameters; got float16 ones"):
        fit(AmpPrecision("fp16"), model=PlainClassifier().half())


def check_one_rank_overflows(rank):
    scaler = WorldGradScaler("cpu")
    scaler.start(torch.device("cpu"), across_ranks=True)
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    answers = []
    for overflowing in (None, 0, 1):
        if rank or overflowing is None:  # in a pipeline, a rank may compute no loss, or hold no gradient
            weight.grad = torch.full((3,), torch.nan if overflowing == rank else 2.0)
            expected = weight.grad / 2.0**16 / (0.5 if overflowing == 1 else 1.0)
        scaler.unscale_(optimizer)
        answers.append(scaler.found_non_finite(optimizer))
        scaler.update()
    del expected
    return answers, scaler.get_scale()


def test_ranks_skip_together():
    for answers, scale in run_ranks(check_one_rank_overflows):
        assert answers == [False, False, True]
        assert scale == 2.0**15


class Sharded(PlainClassifier):
    def configure_model(self):
        if self.device_mesh is not None:
            fully_shard(self.net[0], mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
            self.head = nn.Parameter(torch.zeros(1))  # beside the sharded ones, a whole one

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + self.head.sum() if self.device_mesh is not None else loss


class OverflowingOnce(Overflowing):
    steps = (3,)


class OverflowOnOneRank(L.Callback):
    """At one step, the gradients of one rank's samples alone are infinite."""

    def on_after_backward(self, trainer, pl_module):
        if trainer.global_step == 3 and trainer.global_rank == 1:
            grad = pl_module.net[2].bias.grad
            (grad.to_local() if hasattr(grad, "to_local") else grad).fill_(torch.inf)


def check_strategy(rank, name):
    make = {"ddp": DDPStrategy, "fsdp2": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)}
    precision = AmpPrecision("fp16")
    torch.manual_seed(0)
    model = (Sharded if name == "fsdp2" else PlainClassifier)(torch.optim.SGD, lr=0.1)
    trainer = make_trainer(precision, strategy=make[name](), devices=2, callbacks=[OverflowOnOneRank()])
    trainer.fit(model, batches(rank, 2))
    weights = {
        name: weight.detach().full_tensor() if hasattr(weight, "full_tensor") else weight.detach()
        for name, weight in model.net.named_parameters()
    }
    return precision.skipped_steps, precision.scaler.get_scale(), model.learning_rate, weights


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_strategies_skip_together_and_match_one_process(name):
    one, other = run_ranks(check_strategy, name)
    assert one[:3] == other[:3]
    assert one[:2] == (1, 2.0**15)
    for key, weight in one[3].items():
        assert torch.equal(weight, other[3][key])

    expected = fit(AmpPrecision("fp16"), model=lambda: OverflowingOnce(torch.optim.SGD, lr=0.1))
    assert one[2] == pytest.approx(expected.learning_rate)
    for key, weight in expected.net.named_parameters():
        torch.testing.assert_close(one[3][key], weight.detach(), rtol=0, atol=1e-3)


def check_names_are_gathered(rank):
    precision = AmpPrecision("fp16")
    trainer = make_trainer(precision, strategy="ddp", devices=2, max_epochs=3, callbacks=[EndlessOverflow()])
    with pytest.raises(FloatingPointError) as error:
        trainer.fit(PlainClassifier(), batches())
    return str(error.value)


class EndlessOverflow(L.Callback):
    def on_after_backward(self, trainer, pl_module):
        pl_module.net[2 * trainer.global_rank].weight.grad.fill_(torch.nan)


@pytest.mark.slow
def test_all_ranks_end_with_the_names_of_all():
    messages = run_ranks(check_names_are_gathered)
    assert messages[0] == messages[1]
    assert re.search("gradients of net.0.weight, net.2.weight. The loss is finite", messages[0])


@pytest.mark.gpu
def test_cuda_waits_once_a_step_for_fp16_and_never_for_bf16():
    for dtype, waits in (("bf16", 0), ("fp16", 1)):
        model = PlainClassifier().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        precision = AmpPrecision(dtype)
        precision.choose(torch.device("cuda"))
        x, target = torch.randn(4, 6, device="cuda"), torch.zeros(4, dtype=torch.long, device="cuda")
        if precision.scaler is not None:
            precision.scaler.start(torch.device("cuda"), across_ranks=False)
        found = 0
        for _ in range(3):
            with precision.forward_context():
                loss = F.cross_entropy(model.net(x), target)
            torch.cuda.set_sync_debug_mode("error")
            try:
                (loss if precision.scaler is None else precision.scaler.scale(loss)).backward()
                if precision.scaler is not None:
                    precision.scaler.unscale_(optimizer)
                    torch.cuda.set_sync_debug_mode("default")
                    found += precision.scaler.found_non_finite(optimizer) is not None
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            if precision.scaler is not None:
                precision.scaler.update()
        assert found == 3 * waits


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["auto", "bf16", "fp16"])
def test_trains_on_cuda_as_in_float32(dtype):
    expected = fit(accelerator="cuda")
    actual = fit(AmpPrecision(dtype), accelerator="cuda")
    torch.testing.assert_close(actual.losses, expected.losses, rtol=0, atol=0.03)
