"""Masks over processes: those of one process with the same weights."""

import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn

from lightning_accel.callbacks import Pruning
from lightning_accel.callbacks.pruning.weight_part import WeightPart
from lightning_accel.strategies import FullyShardedStrategy, PipelineStrategy
from tests.callbacks.pruning.test_callback import Net, fit, rows
from tests.ranks import run_ranks
from tests.strategies.trained import ADAMW, Rows, make

SCOPES = ["layer", "global", "erk"]


class Wide(Net):
    """Rows that two processes cannot deal in equal numbers, a convolution, many equal weights, a recurrent layer."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 3))
        self.conv = nn.Conv1d(4, 5, 3, padding=1)
        self.transposed = nn.ConvTranspose1d(5, 3, 3)
        self.lstm = nn.LSTM(4, 3)
        self.attention = nn.MultiheadAttention(8, 2)
        for value in self.parameters():
            value.data = value.data.mul(31).round().div(31)

    def forward(self, x):
        images = self.transposed(self.conv(x.view(-1, 4, 2))).mean((1, 2))
        states = self.lstm(x.view(-1, 2, 4).transpose(0, 1))[0].mean((0, 2))
        seen = self.attention(x[:, None], x[:, None], x[:, None])[0].mean((1, 2))
        return self.net(x) + (images + states + seen)[:, None]


def with_original_shapes(**options):
    return {"schedule": "one_shot", "begin": 0, "end": 0.9} | options


def first_masks(options, **trainer):
    """Of the weights that each module begins with, which are equal."""
    torch.manual_seed(4)
    pruning = Pruning(**with_original_shapes(**options))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Pruning covers")  # fewer values than a layer has in N:M
        fit(Wide(), pruning, max_epochs=1, limit_train_batches=1, limit_val_batches=0, **trainer)
    return pruning.masks(), pruning.sparsity(), pruning.left_out


KINDS = [{"sparsity": 0.5, "scope": scope} for scope in SCOPES] + [
    {"structure": "2:4"}, {"structure": "1:4"},
]  # fmt: skip


def check_first_masks(rank, strategy):
    return [first_masks(options, strategy=strategy, devices=2) for options in KINDS]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "accel_fsdp2"])
def test_masks_are_those_of_one_process(strategy):
    """Many weights tie: which of them go must not depend on who holds them."""
    for options, *found in zip(KINDS, *run_ranks(check_first_masks, strategy), strict=True):
        masks, sparsity, left_out = first_masks(options)
        for theirs, their_sparsity, their_left_out in found:
            split = {name for name in their_left_out if name not in left_out}
            assert split == ({"transposed.weight"} & masks.keys() if ":" in options.get("structure", "") and
                             strategy == "accel_fsdp2" else set())  # fmt: skip
            assert theirs.keys() == masks.keys() - split
            assert all(theirs[name].equal(masks[name]) for name in theirs), options
            if not split:
                assert their_sparsity == sparsity


def trained_masks(options, devices, **trainer):
    torch.manual_seed(4)
    pruning = Pruning(**options)
    batches = Rows(rows(64), 16 // devices)
    run = L.Trainer(max_epochs=3, accelerator="cpu", devices=devices, logger=False, enable_checkpointing=False,
                    enable_progress_bar=False, enable_model_summary=False, callbacks=[pruning], precision="64-true"
                    if devices == 1 or trainer.get("strategy") == "ddp" else "32-true", **trainer)  # fmt: skip
    run.fit(Net(), batches)
    return pruning.masks()


def check_trained_masks(rank, options, strategy):
    return trained_masks(options, 2, strategy=strategy)


@pytest.mark.slow
def test_regrown_masks_are_those_of_one_process():
    options = {"sparsity": 0.7, "schedule": "one_shot", "regrowth": "rigl", "end": 0.9, "every_n_steps": 2}
    one = trained_masks(options, 1)
    for strategy in ("ddp", "accel_fsdp2"):
        for masks in run_ranks(check_trained_masks, options, strategy):
            assert all(masks[name].equal(one[name]) for name in one), strategy


def check_zeros_in_every_part(rank, name, strategy):
    made = {"accel_pipeline": PipelineStrategy, "accel_fsdp2": FullyShardedStrategy}.get(strategy)
    module, data = make(name, ADAMW)
    pruning = Pruning(0.75, begin=0, end=2, every_n_steps=1, scope="global")
    made = strategy if made is None else made()
    trainer = L.Trainer(max_epochs=2, accelerator="cpu", devices=2, strategy=made, logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                        callbacks=[pruning])  # fmt: skip
    trainer.fit(module, Rows(data, 4))
    masks = pruning.masks()
    for part in pruning._masks.parts:
        if part.is_held:
            assert (part.value[~part.shard(masks[part.name])] == 0).all()
    return masks, pruning.sparsity()


@pytest.mark.sampled(slow=3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy"),
    [pytest.param("plain", "accel_pipeline", marks=pytest.mark.slow), ("classifier", "accel_expert_parallel"),
     pytest.param("classifier", "accel_fsdp2", marks=pytest.mark.slow),
     pytest.param("classifier", "accel_ddp", marks=pytest.mark.slow),
     pytest.param("sequence", "accel_fsdp2", marks=pytest.mark.slow),
     pytest.param("plain", "accel_fsdp2", marks=pytest.mark.slow)],
)  # fmt: skip
def test_every_part_has_the_zeros(name, strategy):
    (first, sparsity), (second, other) = run_ranks(check_zeros_in_every_part, name, strategy)
    assert all(first[weight].equal(second[weight]) for weight in first)
    assert sparsity == other == pytest.approx(0.75, abs=0.005)
    zeros = sum(int((~kept).sum()) for kept in first.values())
    assert zeros / sum(kept.numel() for kept in first.values()) == sparsity


def check_pipeline_resumes(rank, folder):
    def go(resume=None, **more):
        torch.manual_seed(1 if resume is None else 2)
        module, data = make("plain", ADAMW)
        pruning = Pruning(0.75, begin=1, end=7, every_n_steps=2, regrowth="rigl")
        trainer = L.Trainer(max_epochs=2, accelerator="cpu", devices=2, strategy="accel_pipeline", logger=False,
                            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                            callbacks=[pruning, *more.values()])  # fmt: skip
        trainer.fit(module, Rows(data, 8), ckpt_path=resume)
        return pruning.masks(), trainer.strategy.lightning_module_state_dict()

    class Save(L.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 4:
                trainer.save_checkpoint(folder / "4.ckpt")

    whole, resumed = go(save=Save()), go(folder / "4.ckpt")
    for before, after in zip(whole, resumed, strict=True):
        assert all(before[name].equal(after[name]) for name in before)


@pytest.mark.slow
def test_a_pipeline_goes_on_from_a_checkpoint(tmp_path):
    run_ranks(check_pipeline_resumes, tmp_path)


def test_several_devices_in_one_process():
    pruning = Pruning(0.75, begin=1, end=4)
    fit(Net(), pruning, strategy="accel_dp", devices=2)
    single = Pruning(0.75, begin=1, end=4)
    fit(Net(), single)
    assert pruning.sparsity() == single.sparsity()


def test_flattened_parameters_are_refused():
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.__class__ = FSDPStrategy
    with pytest.raises(TypeError, match=r"FSDPStrategy flattens parameters.*take the strategy 'accel_fsdp2'"):
        Pruning().setup(trainer, Net(), "fit")


def test_positions_of_a_part_are_those_in_the_whole():
    part = WeightPart("weight", nn.Parameter(torch.arange(30.0).view(5, 6)), 1, nn.Identity())
    assert part.to_whole(torch.tensor([3, 29])).tolist() == [3, 29]
