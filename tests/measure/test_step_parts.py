import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_accel.measure import PARTS, StepParts, action_times, bad_loss_of, batch_size_of, part_times
from tests.planted import SLEEPS, SLEPT, Sleeping, SleepingCallback, SleepingLogger, rows
from tests.ranks import run_ranks


def fit(module, loader, profiler, callbacks=(), logger=False, **options):
    trainer = L.Trainer(
        max_epochs=1,
        profiler=profiler,
        callbacks=list(callbacks),
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        **options,
    )
    SLEPT.clear()
    trainer.fit(module, *loader)


def check_parts(profiler, count, overhead_ms=6.0):
    """Parts are those that slept, within 25 % and what Lightning itself takes, and sum to the wall time exactly."""
    assert len(profiler.steps) == count
    for step in profiler.steps:
        assert sum(step.parts_ns().values()) == step.wall_ns
        ends = [segment.end for segment in step.segments[:-1]]
        assert ends == [segment.begin for segment in step.segments[1:]]
    times = part_times(profiler.steps)
    assert times.keys() == set(PARTS)
    for part, spent in times.items():
        planted = 1000 * SLEPT[part] / count
        assert planted <= spent + 1e-6, part
        least = min(step.parts_ns()[part] for step in profiler.steps) / 1e6  # the step that others disturbed least
        if planted:
            assert least <= 1.25 * planted + overhead_ms, (part, least, planted)


@pytest.mark.slow
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_planted_sleeps_are_found_in_their_parts(manual):
    profiler = StepParts()
    module = Sleeping(manual=manual, **SLEEPS)
    fit(module, [rows(8, seconds=0.02)], profiler, [SleepingCallback()], SleepingLogger())
    assert {"data", "logging", *SLEEPS} == SLEPT.keys()
    check_parts(profiler, 8)
    slowest = list(action_times(profiler.steps, "callbacks"))[:2]
    assert {name.rpartition(".")[2] for name in slowest} == {"on_after_backward", "on_train_batch_end"}


def test_with_accumulation_most_steps_have_no_update():
    profiler = StepParts()
    fit(Sleeping(optimizer=0.1, backward=0.01), [rows(6)], profiler, accumulate_grad_batches=3)
    check_parts(profiler, 6)
    updates = [step.parts_ns()["optimizer"] >= 0.1e9 for step in profiler.steps]
    assert updates == [False, False, True, False, False, True]


def test_validation_within_an_epoch_is_a_part_of_its_own():
    profiler = StepParts()
    module = Sleeping(validation=0.01, transfer=0.05)
    fit(module, [rows(4), rows(3)], profiler, val_check_interval=2, num_sanity_val_steps=0)
    times = part_times(profiler.steps)
    # 2 validations of 3 batches; the second one, at the end of the epoch, belongs to its last step
    assert times["validation"] >= 1000 * SLEPT["validation"] / 4
    assert times["transfer"] < 1.5 * 1000 * SLEPT["transfer"] / 4  # with those of validation it would be 2.5 times
    assert [step.parts_ns()["validation"] > 0 for step in profiler.steps] == [False, True, False, True]


def test_only_complete_steps_are_kept_the_last_ones():
    class Failing(Sleeping):
        def training_step(self, batch, batch_idx):
            if batch_idx == 5:
                raise RuntimeError("planted")
            return super().training_step(batch, batch_idx)

    profiler = StepParts(keep=3)
    with pytest.raises(RuntimeError, match="planted"):
        fit(Failing(), [rows(8)], profiler)
    assert len(profiler.steps) == 3
    fit(Sleeping(), [rows(2)], profiler)
    assert len(profiler.steps) == 3
    assert part_times([]) == dict.fromkeys(PARTS, 0.0)


def check_waiting(rank):
    """Rank 1 is slower: rank 0 waits for it, before forward for its data and before backward for its forward."""
    profiler = StepParts(exact=True)
    module = Sleeping(forward=0.2 * rank)
    loader = rows(8, seconds=0.15 * rank)  # each rank takes every other batch
    fit(module, [loader], profiler, strategy="ddp", devices=2)
    dist.barrier()
    return part_times(profiler.steps), len(profiler.steps), dict(SLEPT)


@pytest.mark.slow
def test_ranks_that_wait_for_others_are_seen():
    (fast, count, _), (slow, _, slept) = run_ranks(check_waiting)
    expected = 1000 * sum(slept.values()) / count
    assert fast["waiting"] == pytest.approx(expected, rel=0.25)
    assert slow["waiting"] < 0.25 * expected
    assert slow["data"] + slow["forward"] == pytest.approx(expected, rel=0.25)


def test_bad_losses_are_told():
    module = BoringModel()
    for good in (torch.tensor(1.0), {"loss": torch.tensor(1.0), "y": 2}):
        assert bad_loss_of(module, good) == ""
    for none in (None, {}, {"loss": None}):
        assert "returns no loss" in bad_loss_of(module, none)
    for value in ("nan", "inf"):
        assert f"the loss is {value}; " in bad_loss_of(module, {"loss": torch.tensor(float(value))})
    module.automatic_optimization = False
    assert bad_loss_of(module, None) == ""


def test_sizes_of_batches():
    x, y = torch.zeros(5, 2), torch.zeros(3)
    for batch in (x, (x, y), {"ids": [x], "text": ["a"]}, ("a", x)):
        assert batch_size_of(batch) == 5


def test_batches_without_a_size():
    batches = iter([torch.zeros(5, 2)])
    assert batch_size_of(batches) is batch_size_of(torch.tensor(1.0)) is batch_size_of(["a"]) is None
    assert next(batches).shape == (5, 2)
