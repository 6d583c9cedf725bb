"""OneShotPruning in a Trainer: what the function gives, in all processes, at the step, and without a trace on data."""

import copy
from functools import partial

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_accel.callbacks import ExactResume, OneShotPruning, Pruning
from lightning_accel.compress import prune_on_data_
from lightning_accel.strategies import FullyShardedStrategy, PipelineStrategy
from tests.callbacks.pruning.test_callback import Net, fit, rows
from tests.callbacks.pruning.test_resume import SaveAt, assert_same, state_of
from tests.ranks import run_ranks
from tests.strategies.trained import Rows, make


class Seen(Net):
    """Record the samples that its steps meet, and have a part that validation does not call."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(8, 3)
        self.first, self.noise = [], []

    def training_step(self, batch, batch_idx):
        self.first.append(float(batch[0][0, 0]))
        self.noise.append(float(torch.rand(())))
        return F.cross_entropy(self(batch[0]) + self.other(batch[0]), batch[1])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(list(rows()))


@pytest.mark.parametrize("data", [rows(), Stream()], ids=["shuffled", "a stream"])
def test_masks_are_those_of_the_function_and_data_come_as_ever(data):
    def train(*callbacks):
        torch.manual_seed(7)
        module = Seen()
        loader = DataLoader(data, 8, shuffle=not isinstance(data, Stream))
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = L.Trainer(
            max_epochs=2, accelerator="cpu", callbacks=[*callbacks], enable_checkpointing=False, **quiet
        )
        trainer.fit(module, loader, DataLoader(rows(), 8))
        return module

    pruning, plain = OneShotPruning(exclude=["net.0"]), train()
    module = train(pruning)
    assert (module.first, module.noise) == (plain.first, plain.noise)
    assert pruning.left_out["net.0.weight"] == "excluded by 'net.0'"
    assert pruning.left_out["other.weight"] == "no product with it was seen"
    assert list(pruning.masks()) == ["net.3.weight", "net.5.weight"]
    assert pruning.sparsity() == pytest.approx(0.5, abs=0.01)
    for name, mask in pruning.masks().items():
        value = module.get_parameter(name)
        assert not value[~mask].any()
        assert value[mask].all()


@pytest.mark.sampled(default=2)
@pytest.mark.parametrize(("begin", "method"), [(0.0, "wanda"), (1.0, "sparsegpt"), (5, "sparsegpt")])
def test_pruned_at_its_step_from_what_the_module_is_then(begin, method, monkeypatch):
    seen = {}
    own = OneShotPruning._update

    def update(self, trainer, module):
        before = copy.deepcopy(module.net)
        own(self, trainer, module)
        if self.is_final_phase and not seen:
            seen.update(step=trainer.global_step, before=before, after=copy.deepcopy(module.net))

    monkeypatch.setattr(OneShotPruning, "_update", update)
    pruning = OneShotPruning(structure="2:4", method=method, begin=begin)
    trainer = fit(Net(), pruning)
    assert seen["step"] == {0.0: 0, 1.0: 18, 5: 5}[begin]
    x = torch.stack([x for x, _ in rows()])
    prune_on_data_(seen["before"], [((part,), {}) for part in x.split(8)], structure="2:4", method=method)
    for one, other in zip(seen["after"].parameters(), seen["before"].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    zeros = {name: ~mask for name, mask in pruning.masks().items()}
    for name, value in trainer.lightning_module.named_parameters():
        if name in zeros:
            moments = [one for one in trainer.optimizers[0].state[value].values() if one.shape == value.shape]
            assert not any(one[zeros[name]].any() for one in [value, *moments])


@pytest.mark.parametrize("begin", [0.5, 1.0])
def test_averages_start_anew_from_the_pruned_weights(begin, monkeypatch):
    seen = []
    own = OneShotPruning._update

    def update(self, trainer, module):
        own(self, trainer, module)
        if self.is_final_phase and not seen:
            seen.append([one.detach().clone() for one in module.net.parameters()])

    monkeypatch.setattr(OneShotPruning, "_update", update)
    average = EMAWeightAveraging(decay=1.0 - 1e-9)  # which stays where it is
    trainer = fit(Net(), [average, OneShotPruning(begin=begin)])
    matrices = [one for one in trainer.lightning_module.net.parameters() if one.dim() > 1]
    for value, pruned in zip(matrices, (one for one in seen[0] if one.dim() > 1), strict=True):
        torch.testing.assert_close(value, pruned, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_resumed_with_equal_bits(tmp_path):
    def run(steps=(), resume=None):
        torch.manual_seed(1 if resume is None else 2)
        pruning = OneShotPruning(0.6, begin=6)
        trainer = fit(Seen(), [pruning, ExactResume(), SaveAt(tmp_path, steps)], ckpt_path=resume)
        return state_of(trainer), pruning.masks()

    whole = run([4, 6, 11])
    for step in (4, 6, 11):
        assert_same(run(resume=tmp_path / f"{step}.ckpt"), whole)


class Pairs:
    """Give batches of the user's own, which know what they have given."""

    def __init__(self):
        self.given = 0

    def __len__(self):
        return 6

    def __iter__(self):
        for first in range(6):
            self.given += 1
            yield [first, first + 6]


def test_a_batch_sampler_of_the_users_is_left_alone():
    samplers = [Pairs(), Pairs()]
    for sampler, callbacks in zip(samplers, ([], [OneShotPruning(begin=3)]), strict=True):
        loader = DataLoader(rows(), batch_sampler=sampler)
        quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
        trainer = L.Trainer(max_epochs=1, accelerator="cpu", callbacks=[*callbacks, ExactResume()], **quiet)
        trainer.fit(Net(), loader, DataLoader(rows(), 8))
    assert samplers[0].given == samplers[1].given > 0
    assert callbacks[0].sparsity() == pytest.approx(0.5, abs=0.01)


def pruned_weights(name, devices, strategy):
    module, data = make(name, partial(torch.optim.SGD, lr=0.0))
    pruning = OneShotPruning(0.5, calibrate=16)
    made = {"accel_pipeline": PipelineStrategy, "accel_fsdp2": FullyShardedStrategy}.get(strategy, lambda: strategy)()
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", devices=devices, strategy=made, logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                        callbacks=[pruning])  # fmt: skip
    trainer.fit(module, Rows(data, 4))
    state = trainer.strategy.lightning_module_state_dict()
    trained = {weight: value.clone() for weight, value in state.items() if value is not None and value.dim() > 1}
    return trained, pruning.masks(), pruning.sparsity()


def check_pruned_weights(rank, name, strategy):
    return pruned_weights(name, 2, strategy)


@pytest.mark.sampled(slow=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy"),
    [("plain", "accel_fsdp2"), ("plain", "accel_pipeline"), ("classifier", "accel_expert_parallel"),
     pytest.param("classifier", "accel_ddp", marks=pytest.mark.slow),
     pytest.param("sequence", "accel_fsdp2", marks=pytest.mark.slow)],
)  # fmt: skip
def test_all_processes_have_the_weights_of_one(name, strategy):
    expected, masks, sparsity = pruned_weights(name, 1, "auto")
    for state, theirs, their_sparsity in run_ranks(check_pruned_weights, name, strategy):
        assert their_sparsity == sparsity == pytest.approx(0.5, abs=0.03)
        assert all(theirs[weight].equal(mask) for weight, mask in masks.items())
        for weight, value in state.items():
            torch.testing.assert_close(value.cpu(), expected[weight], rtol=1e-5, atol=1e-6)


class Blind(Net):
    validation_step = L.LightningModule.validation_step


def test_wrong_options_are_found_before_training():
    with pytest.raises(ValueError, match="calibrate must be at least 1; got 0"):
        OneShotPruning(calibrate=0)
    with pytest.raises(ValueError, match="method must be one of"):
        OneShotPruning(method="magnitude")
    with pytest.raises(TypeError, match="OneShotPruning needs a validation_step of Blind"):
        fit(Blind(), OneShotPruning())
    with pytest.raises(ValueError, match="no submodule 'head'"):
        fit(Net(), OneShotPruning(module="head"))
    with pytest.raises(ValueError, match="several Pruning callbacks"):
        fit(Net(), [OneShotPruning(), Pruning(0.5)])
    picky = Net()
    picky.validation_step = lambda batch, batch_idx: batch["x"]
    with pytest.raises(ValueError, match="calls validation_step of Net with training batches, and that fails"):
        fit(picky, OneShotPruning(), limit_val_batches=0)
    started = []
    module = Net()
    module.on_train_start = lambda: started.append(1)
    module.net[3].forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fit(module, OneShotPruning(begin=4), limit_val_batches=0)
    assert not started
