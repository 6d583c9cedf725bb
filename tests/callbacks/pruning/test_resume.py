"""A run that is killed at any step and resumed ends with the bits of one that was not."""

import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_accel.callbacks import ExactResume, Pruning
from lightning_accel.strategies import FullyShardedStrategy
from tests.callbacks.pruning.test_callback import Net, fit
from tests.ranks import run_ranks

KINDS = {
    "cubic": {"sparsity": 0.8, "begin": 2, "end": 13, "every_n_steps": 1},
    "global": {"sparsity": 0.8, "begin": 3, "end": 13, "every_n_steps": 5, "scope": "global"},
    "2:4": {"structure": "2:4", "begin": 1, "end": 13},
    "rigl": {"sparsity": 0.7, "schedule": "one_shot", "regrowth": "rigl", "end": 0.8, "every_n_steps": 2},
    "cubic rigl": {"sparsity": 0.7, "regrowth": "rigl", "end": 0.8, "every_n_steps": 3},
}


class SaveAt(L.Callback):
    def __init__(self, folder, steps):
        self.folder, self.steps, self.last = folder, steps, 0

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step in self.steps and trainer.global_step != self.last:  # not within the next step
            self.last = trainer.global_step
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def local(value):
    return value.to_local() if isinstance(value, DTensor) else value


def state_of(trainer):
    module = trainer.lightning_module
    values = {name: local(value).clone() for name, value in module.state_dict().items()}
    for number, parameter in enumerate(trainer.optimizers[0].param_groups[0]["params"]):
        for name, value in trainer.optimizers[0].state[parameter].items():
            values[f"{number}.{name}"] = local(value).clone()
    return values


def run(kind, folder, steps=(), first=False, resume=None, more=(), **options):
    torch.manual_seed(1 if resume is None else 2)
    pruning, save = Pruning(**KINDS[kind]), SaveAt(folder, steps)
    callbacks = [save, pruning, *more] if first else [pruning, *more, save]
    trainer = fit(Net(), [*callbacks, ExactResume()], ckpt_path=resume, **options)
    return state_of(trainer), pruning.masks()


def assert_same(one, other):
    for before, after in zip(one, other, strict=True):
        assert list(before) == list(after)
        assert all(before[name].equal(after[name]) for name in before), [
            name for name in before if not before[name].equal(after[name])
        ]


SAVED_BEFORE = [pytest.param(kind, True, id=f"{kind}, saved before pruning") for kind in ("cubic", "rigl")]
SAVED_AFTER = [pytest.param(kind, False, id=kind) for kind in KINDS]


@pytest.mark.sampled(default=1)
@pytest.mark.parametrize(("kind", "first"), SAVED_BEFORE + SAVED_AFTER)
def test_one_process(tmp_path, kind, first):
    steps = [2, 5, 12]
    whole = run(kind, tmp_path, steps, first)
    for step in steps:
        assert_same(run(kind, tmp_path, resume=tmp_path / f"{step}.ckpt"), whole)
        torch.load(tmp_path / f"{step}.ckpt", weights_only=True)


@pytest.mark.parametrize("precision", ["bf16-mixed", pytest.param("32-true", marks=pytest.mark.slow)])
def test_with_averages_and_accumulation(tmp_path, precision):
    options = {"accumulate_grad_batches": 2, "max_epochs": 6, "precision": precision}
    whole = run("rigl", tmp_path, [4, 9], more=[EMAWeightAveraging(decay=0.9)], **options)
    for step in (4, 9):
        resumed = run("rigl", tmp_path, resume=tmp_path / f"{step}.ckpt",
                      more=[EMAWeightAveraging(decay=0.9)], **options)  # fmt: skip
        assert_same(resumed, whole)


def test_masks_are_kept_as_bits(tmp_path):
    run("cubic", tmp_path, [8])
    state = torch.load(tmp_path / "8.ckpt", weights_only=True)["callbacks"]["Pruning{'structure': 'unstructured'}"]
    packed = state["masks"]["pruned"]
    assert [(name, value.dtype, len(value)) for name, value in packed.items()] == [
        ("net.0.weight", torch.uint8, 16), ("net.3.weight", torch.uint8, 24), ("net.5.weight", torch.uint8, 5),
    ]  # fmt: skip


@pytest.mark.slow
def test_another_number_of_epochs_does_not_move_a_ramp_that_runs(tmp_path):
    options = {"sparsity": 0.8, "begin": 0.0, "end": 0.5, "every_n_steps": 1}
    saved = SaveAt(tmp_path, [5])
    fit(Net(), [Pruning(**options), saved, ExactResume()], max_epochs=3)
    longer = Pruning(**options)
    fit(Net(), [longer, ExactResume()], max_epochs=9, ckpt_path=tmp_path / "5.ckpt")
    assert longer._last == 9
    other = Pruning(**options | {"end": 0.6})
    fit(Net(), [other, ExactResume()], max_epochs=9, ckpt_path=tmp_path / "5.ckpt")
    assert other._last == 32


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks:UserWarning")
def test_masks_of_other_weights_are_refused(tmp_path):
    run("cubic", tmp_path, [5])
    with pytest.raises(
        ValueError, match=r"masks for other weights than this run prunes: net.3.weight. Give Pruning the"
    ):
        fit(Net(), [Pruning(0.8, exclude=["net.3"]), ExactResume()], ckpt_path=tmp_path / "5.ckpt")


def test_an_earlier_key_that_names_what_is_excluded(tmp_path):
    def go(*more, **options):
        torch.manual_seed(1)
        pruning = Pruning(0.8, begin=1, end=13, exclude=["net.3"])
        return state_of(fit(Net(), [pruning, *more, ExactResume()], **options))

    whole = go(SaveAt(tmp_path, [5]))
    saved = torch.load(tmp_path / "5.ckpt", weights_only=True)
    key = "Pruning{'structure': 'unstructured'"
    saved["callbacks"][key + ", 'exclude': ['net.3']}"] = saved["callbacks"].pop(key + "}")
    torch.save(saved, tmp_path / "earlier.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a key that no callback has
        assert_same([go(ckpt_path=tmp_path / "earlier.ckpt")], [whole])


class Sharded(Net):
    def configure_model(self):
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


STRATEGIES = {
    "ddp": ("ddp", Net),
    "accel_fsdp2": (FullyShardedStrategy, Net),
    "accel_fsdp2, folder": (lambda: FullyShardedStrategy(checkpoints="sharded"), Net),
    "Lightning's own FSDP2": (lambda: ModelParallelStrategy(save_distributed_checkpoint=False), Sharded),
}


def check_resumed(rank, folder, name, kinds, steps):
    strategy, module = STRATEGIES[name]
    for kind in kinds:
        place = folder / kind

        def go(steps=(), resume=None, kind=kind, place=place):
            torch.manual_seed(1 if resume is None else 2)
            pruning = Pruning(**KINDS[kind])
            made = strategy if isinstance(strategy, str) else strategy()
            callbacks = [pruning, SaveAt(place, steps), ExactResume()]
            options = {"strategy": made, "devices": 2, "max_epochs": 6, "ckpt_path": resume}
            trainer = fit(module(), callbacks, **options)
            return state_of(trainer), pruning.masks()

        whole = go(steps)
        for step in steps:
            assert_same(go(resume=place / f"{step}.ckpt"), whole)


@pytest.mark.sampled(slow=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kinds", "steps"),
    [("accel_fsdp2", ["rigl"], [9]),
     pytest.param("ddp", [*KINDS], [4, 9], marks=pytest.mark.slow),
     pytest.param("accel_fsdp2, folder", ["cubic", "rigl"], [4, 9], marks=pytest.mark.slow),
     pytest.param("Lightning's own FSDP2", ["rigl"], [4, 9], marks=pytest.mark.slow)],
)  # fmt: skip
def test_every_process_goes_on(tmp_path, name, kinds, steps):
    run_ranks(check_resumed, tmp_path, name, kinds, steps)


@pytest.mark.weekly
@pytest.mark.slow
def test_every_kind_goes_on_under_fsdp2(tmp_path):
    run_ranks(check_resumed, tmp_path, "accel_fsdp2", [*KINDS], [4, 9])


def check_saved_elsewhere(rank, folder, kind):
    """Under FSDP2 go on from a file of one process, and write one for it."""
    torch.manual_seed(2)
    pruning = Pruning(**KINDS[kind])
    options = {"strategy": "accel_fsdp2", "devices": 2, "max_epochs": 6, "ckpt_path": folder / "one" / "4.ckpt"}
    warnings.simplefilter("ignore")
    fit(Net(), [pruning, SaveAt(folder / "two", [9]), ExactResume()], **options)
    return pruning.masks()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cubic", pytest.param("cubic rigl", marks=pytest.mark.slow)])
def test_checkpoints_serve_one_process_and_fsdp2(tmp_path, kind):
    run(kind, tmp_path / "one", [4], max_epochs=6)
    first, second = run_ranks(check_saved_elsewhere, tmp_path, kind)
    assert all(first[name].equal(second[name]) for name in first)
    torch.manual_seed(2)
    pruning = Pruning(**KINDS[kind])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the order of rows is that of two processes
        fit(Net(), [pruning, ExactResume()], max_epochs=6, ckpt_path=tmp_path / "two" / "9.ckpt")
    assert pruning.sparsity() == pytest.approx(KINDS[kind]["sparsity"], abs=0.01)
