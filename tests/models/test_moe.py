from functools import partial

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_accel import DigitsDataModule, MixtureOfExperts, MoEClassifier, TopKGate
from lightning_accel.models import Experts
from tests.ranks import run_ranks


def quiet_trainer(**kwargs) -> L.Trainer:
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return L.Trainer(**{"accelerator": "cpu", "devices": 1, "max_epochs": 1, **dict.fromkeys(off, False), **kwargs})


def rows(num_rows=24, num_features=6, num_classes=3) -> TensorDataset:
    x = torch.randn(num_rows, num_features, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :num_classes].argmax(dim=1))


@pytest.fixture
def small():
    return MoEClassifier(6, 3, dim=8, experts=Experts(4, hidden_dim=8), optimizer=partial(torch.optim.AdamW, lr=0.02))


@pytest.mark.slow
def test_overfits_one_batch(small):
    data = DataLoader(rows(), batch_size=24)
    trainer = quiet_trainer(max_epochs=60, limit_val_batches=0)
    trainer.fit(small, data)
    assert trainer.test(small, data, verbose=False)[0]["test/accuracy"] == 1


def test_training_loss_adds_the_weighted_balance_loss(small):
    x, target = rows().tensors
    small.balance_weight = 0.5
    trainer = quiet_trainer()
    small.trainer = trainer
    logits, report = small(x)
    expected = F.cross_entropy(logits, target) + 0.5 * report.balance_loss
    torch.testing.assert_close(small.training_step((x, target), 0), expected)


def test_every_figure_is_logged(small, tmp_path):
    loader = DataLoader(rows(), batch_size=7)
    trainer = quiet_trainer(max_epochs=2, logger=CSVLogger(tmp_path), log_every_n_steps=2)
    trainer.fit(small, loader, loader)
    logged = {name for name in trainer.logged_metrics if not name.endswith(("_step", "_epoch"))}
    load = {f"train/expert_load_{i}" for i in range(4)}
    assert logged == load | {
        "train/loss", "train/balance_loss", "train/accuracy", "val/loss", "val/accuracy",
        "train/load_entropy", "train/max_violation", "train/dropped_fraction", "train/gate_confidence",
    }  # fmt: skip
    assert sum(float(trainer.logged_metrics[name]) for name in load) == pytest.approx(1)
    assert not small.epoch_load.update_called  # each epoch counts its own slots


def test_validation_figures_are_means_over_rows_not_batches(small):
    data = rows(10)  # batches of 4, 4 and 2
    x, target = data.tensors
    small.eval()
    result = quiet_trainer().validate(small, DataLoader(data, batch_size=4), verbose=False)[0]
    with torch.no_grad():
        logits = small(x).logits
    assert result["val/loss"] == pytest.approx(float(F.cross_entropy(logits, target)), rel=1e-5)
    assert result["val/accuracy"] == pytest.approx(float((logits.argmax(dim=1) == target).float().mean()))


@pytest.mark.slow
def test_one_model_through_every_trainer_call_and_back(small):
    data = DataLoader(rows(), batch_size=7)
    for _ in range(2):
        quiet_trainer().validate(small, data, verbose=False)
        quiet_trainer(accumulate_grad_batches=2).fit(small, data, data)
        quiet_trainer().test(small, data, verbose=False)
        assert len(quiet_trainer().predict(small, data)) == 4
        quiet_trainer(max_epochs=-1, max_steps=3).fit(small, data, data)  # ends in mid-epoch


def test_sizes_and_names_come_from_the_datamodule_and_go_into_the_checkpoint(run_folder):
    model = MoEClassifier(dim=8, experts=Experts(hidden_dim=8))
    keeper = ModelCheckpoint(dirpath="kept")
    trainer = quiet_trainer(enable_checkpointing=True, callbacks=[keeper], limit_train_batches=2, limit_val_batches=1)
    data = DigitsDataModule()
    trainer.fit(model, data)
    assert model(torch.randn(2, 64)).logits.shape == (2, 10)

    torch.load(keeper.best_model_path, weights_only=True)
    loaded = MoEClassifier.load_from_checkpoint(keeper.best_model_path, weights_only=True)
    images, _ = next(iter(data.test_dataloader()))
    torch.testing.assert_close(loaded.eval()(images).logits, model.eval()(images).logits, rtol=0, atol=0)
    assert set(loaded.predict_step((images,), 0)["class"]) <= set("0123456789")


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model that overrides")
def test_averaged_weights_are_kept_of_a_model_whose_sizes_the_datamodule_tells():
    model = MoEClassifier(dim=8, experts=Experts(hidden_dim=8))
    trainer = quiet_trainer(callbacks=[EMAWeightAveraging()], limit_train_batches=2, limit_val_batches=1)
    trainer.fit(model, DigitsDataModule())
    assert model.head[1].out_features == 10


def test_missing_sizes_are_refused_before_training():
    with pytest.raises(ValueError, match="needs num_features and num_classes; got num_features=None, num_classes=3"):
        quiet_trainer(limit_val_batches=0).fit(MoEClassifier(num_classes=3), DataLoader(rows()))


def test_sizes_that_contradict_the_datamodule_are_refused():
    with pytest.raises(ValueError, match="num_classes=3, but DigitsDataModule has num_classes=10"):
        quiet_trainer().fit(MoEClassifier(64, 3), DigitsDataModule())


class Wide(MoEClassifier):
    def __init__(self, width: int = 8):
        super().__init__(dim=width, experts=Experts(hidden_dim=width))


def test_subclass_with_fewer_arguments_loads_its_checkpoint(run_folder):
    model, data = Wide(), DigitsDataModule()
    trainer = quiet_trainer(limit_train_batches=2, limit_val_batches=1)
    trainer.fit(model, data)
    trainer.save_checkpoint("wide.ckpt")
    loaded = Wide.load_from_checkpoint("wide.ckpt", weights_only=True)
    images, _ = next(iter(data.test_dataloader()))
    torch.testing.assert_close(loaded.eval()(images).logits, model.eval()(images).logits, rtol=0, atol=0)


class NumpyData(DigitsDataModule):
    num_classes = np.int64(10)
    class_names = np.array(list("0123456789"))


def test_sizes_that_are_numpys_stay_out_of_the_checkpoint(run_folder):
    trainer = quiet_trainer(limit_train_batches=2, limit_val_batches=1)
    trainer.fit(MoEClassifier(dim=8, experts=Experts(hidden_dim=8)), NumpyData())
    trainer.save_checkpoint("plain.ckpt")
    assert torch.load("plain.ckpt", weights_only=True)["hyper_parameters"]["class_names"] == list("0123456789")


class Renamed(MoEClassifier):
    """Hyperparameters are then what this constructor was called with, too."""

    def __init__(self, num_classes, dim):
        super().__init__(6, num_classes, dim=dim, experts=Experts(hidden_dim=8))


@pytest.mark.parametrize(
    "build",
    [
        lambda: MoEClassifier(
            num_features=np.int64(6),
            num_classes=np.int64(3),
            dim=np.int32(8),
            experts=Experts(np.int64(4), np.int64(1), np.int64(8), balance_weight=np.float64(0.5)),
            dropout=np.float64(0.1),
            class_names=np.array(["a", "b", "c"]),
        ),
        lambda: Renamed(np.int64(3), np.int32(8)),
    ],
    ids=["itself", "subclass"],
)
def test_numpys_arguments_stay_out_of_the_checkpoint(build, run_folder):
    model = build()
    trainer = quiet_trainer(limit_val_batches=0)
    trainer.fit(model, DataLoader(rows(), batch_size=12))
    trainer.save_checkpoint("plain.ckpt")
    loaded = type(model).load_from_checkpoint("plain.ckpt", weights_only=True)
    assert dict(loaded.hparams) == dict(model.hparams)
    x = rows().tensors[0]
    torch.testing.assert_close(loaded.eval()(x).logits, model.eval()(x).logits, rtol=0, atol=0)


def test_sizes_that_are_no_whole_numbers_are_refused():
    with pytest.raises(TypeError, match=r"dim must be a whole number; got 8.5"):
        MoEClassifier(6, 3, dim=8.5)


def test_names_must_be_as_many_as_classes():
    with pytest.raises(ValueError, match="num_classes is 3, but there are 2 class_names"):
        MoEClassifier(6, 3, class_names=["a", "b"])


def test_training_loss_can_be_watched_in_epochs_shorter_than_the_logging_interval(small, tmp_path):
    keeper = ModelCheckpoint(dirpath=tmp_path, monitor="train/loss")
    trainer = quiet_trainer(enable_checkpointing=True, callbacks=[keeper], limit_val_batches=0)
    trainer.fit(small, DataLoader(rows(), batch_size=12))
    assert keeper.best_model_score is not None


def test_training_loss_can_be_watched_in_mid_epoch(small, tmp_path):
    keeper = ModelCheckpoint(dirpath=tmp_path, monitor="train/loss")
    trainer = quiet_trainer(enable_checkpointing=True, callbacks=[keeper], max_epochs=-1, max_steps=3)
    trainer.fit(small, DataLoader(rows(), batch_size=6))
    assert keeper.best_model_path.endswith("step=3.ckpt")


def test_training_step_needs_no_trainer(small):
    assert small.training_step(rows().tensors, 0).requires_grad


def test_model_of_unknown_sizes_says_so():
    with pytest.raises(RuntimeError, match="pass num_features and num_classes"):
        MoEClassifier()(torch.zeros(2, 3))


def test_own_encoder_takes_the_place_of_num_features():
    encoder = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(4 * 36, 8))
    model = MoEClassifier(encoder=encoder, dim=8, experts=Experts(hidden_dim=8))
    quiet_trainer(limit_train_batches=2, limit_val_batches=1).fit(model, DigitsDataModule())
    assert model(torch.randn(2, 1, 8, 8)).logits.shape == (2, 10)


class ConvMoE(MoEClassifier):
    """Layer 1 of its encoder is not the linear layer of the default one."""

    def __init__(self, norm: bool):
        layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4) if norm else nn.GELU(), nn.Flatten(), nn.Linear(4 * 36, 8)]
        super().__init__(encoder=nn.Sequential(*layers), dim=8, experts=Experts(hidden_dim=8))


@pytest.mark.parametrize("norm", [True, False], ids=["weight of one dimension", "no weight"])
def test_subclass_with_its_own_encoder_loads_its_checkpoint(run_folder, norm):
    model = ConvMoE(norm)
    trainer = quiet_trainer(limit_train_batches=2, limit_val_batches=1)
    trainer.fit(model, DigitsDataModule())
    trainer.save_checkpoint("conv.ckpt")
    loaded = ConvMoE.load_from_checkpoint("conv.ckpt", weights_only=True)
    x = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(loaded.eval()(x).logits, model.eval()(x).logits, rtol=0, atol=0)


def test_checkpoint_with_own_encoder_names_it_where_it_is_not_given():
    state = MoEClassifier(num_classes=3, encoder=nn.Sequential(nn.Flatten(), nn.LayerNorm(4)), dim=4).state_dict()
    with pytest.raises(RuntimeError, match=r"size mismatch for encoder.1.weight"):
        MoEClassifier(dim=4).load_state_dict(state)


class SmoothedMoE(MoEClassifier):
    def training_step(self, batch, batch_idx):
        x, target = batch
        logits, report = self(x)
        return F.cross_entropy(logits, target, label_smoothing=0.1) + 0.1 * report.balance_loss


@pytest.mark.slow
def test_subclass_with_its_own_training_step_trains():
    model = SmoothedMoE(6, 3, dim=8, experts=Experts(4, hidden_dim=8), optimizer=partial(torch.optim.AdamW, lr=0.02))
    data = DataLoader(rows(), batch_size=24)
    trainer = quiet_trainer(max_epochs=60)
    trainer.fit(model, data, data)
    assert trainer.callback_metrics["val/accuracy"] == 1


@pytest.mark.sampled(slow=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "precision", ["bf16-true", *(pytest.param(one, marks=pytest.mark.slow) for one in ("bf16-mixed", "64-true"))]
)
def test_precisions(small, precision):
    data = DataLoader(rows(), batch_size=12)
    trainer = quiet_trainer(precision=precision, max_epochs=30)
    trainer.fit(small, data, data)
    assert trainer.callback_metrics["val/accuracy"] > 0.6


def test_mixture_that_a_subclass_puts_in_is_told_its_load():
    class Own(MoEClassifier):
        def __init__(self):
            super().__init__(6, 3, dim=8, experts=Experts(num_experts=4))
            self.mixture = MixtureOfExperts(8, 8, 5, gate=partial(TopKGate, bias_update_rate=0.1))

    model = Own()
    quiet_trainer(log_every_n_steps=1).fit(model, DataLoader(rows(), batch_size=12))
    assert model.mixture.gate.expert_slots.sum() == 24


def test_gate_of_a_subclass_with_its_own_training_step_is_told_its_load():
    torch.manual_seed(0)
    model = SmoothedMoE(6, 3, dim=8, experts=Experts(4, hidden_dim=8))
    quiet_trainer().fit(model, DataLoader(rows(), batch_size=12))
    assert model.mixture.gate.expert_slots.sum() == 24


def test_a_loop_of_ones_own_balances_by_the_load_of_each_batch(small):
    """Nothing there tells the gate the load of the step before."""
    x, target = rows().tensors
    small.training_step((x, target), 0)
    balance_loss = small(x).report.balance_loss
    (gradient,) = torch.autograd.grad(balance_loss, small.mixture.gate.weight)
    assert gradient.abs().sum() > 0
    torch.testing.assert_close(balance_loss, small.eval()(x).report.balance_loss)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_trains_on_cuda(small, precision):
    data = DataLoader(rows(), batch_size=12)
    trainer = quiet_trainer(accelerator="gpu", precision=precision, max_epochs=30)
    trainer.fit(small, data, data)
    assert trainer.callback_metrics["val/accuracy"] > 0.6


def trained(
    world_size=1, batch_size=4, rank=0, micro_batches=1
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights and figures after two epochs of SGD with every loss that looks at the batch as a whole."""
    torch.manual_seed(3)
    model = MoEClassifier(
        6,
        3,
        dim=8,
        experts=Experts(num_experts=9, hidden_dim=8, balance_weight=0.5, z_weight=0.1),
        gate=partial(TopKGate, score="sigmoid", bias_update_rate=0.01),
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )
    data = rows(12)
    sampler = None if world_size == 1 else DistributedSampler(data, world_size, rank, shuffle=False)
    trainer = quiet_trainer(
        devices=world_size,
        strategy="ddp" if world_size > 1 else "auto",
        max_epochs=2,
        limit_val_batches=0,
        accumulate_grad_batches=micro_batches,
        log_every_n_steps=1,
    )
    trainer.fit(model, DataLoader(data, batch_size, sampler=sampler))
    of_the_step = ("load", "accuracy", "max_violation", "dropped", "confidence")
    figures = {
        name: value for name, value in trainer.callback_metrics.items() if any(part in name for part in of_the_step)
    }
    return {name: value.clone() for name, value in model.state_dict().items()}, figures


def check_trained(rank):
    return trained(world_size=2, batch_size=2, rank=rank)


@pytest.mark.slow
def test_two_ranks_train_the_model_of_one_process():
    """Nine experts and four rows a step: experts that no row of a rank visits do not stop DDP."""
    expected = trained()
    assert len(expected[1]) == 14
    for actual in run_ranks(check_trained):
        torch.testing.assert_close(actual, expected)


def test_micro_batches_train_the_model_of_whole_batches():
    torch.testing.assert_close(trained(batch_size=1, micro_batches=4), trained())


@pytest.mark.slow
def test_gate_of_a_config_is_in_the_checkpoint(command, run_folder):
    gate = ["--model.gate=TopKGate", "--model.gate.score=sigmoid", "--model.gate.bias_update_rate=0.01"]
    options = ["--model=MoEClassifier", "--model.dim=8", "--model.experts.hidden_dim=8", "--data=DigitsDataModule"]
    short = ["--trainer.max_steps=2", "--trainer.accelerator=cpu", "--trainer.limit_val_batches=1"]
    assert command("fit", *options, *gate, *short).status == 0
    saved = next(run_folder.glob("**/*.ckpt"))
    loaded = MoEClassifier.load_from_checkpoint(saved, weights_only=True)
    assert loaded.mixture.gate.score == "sigmoid"
    assert loaded.mixture.gate.bias_steps.any()
    result = command("test", "--data=DigitsDataModule", f"--ckpt_path={saved}", "--trainer.accelerator=cpu")
    assert result.status == 0, result.err
    assert "test/accuracy" in result.out
