"""Loaders of shards: every row once, on any number of processes, also where a run resumes."""

import gc
import os
import threading
import time

import lightning as L
import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler

from lightning_accel.callbacks.deployment.loaders import undistributed
from lightning_accel.data import shard_loader
from lightning_accel.data.shards.reader import _Reader
from lightning_accel.data.shards.sampler import Step, positions_of


def rows_of(table):
    return torch.tensor(table["row"].to_numpy())


def loader_of(folder, replicas=1, rank=0, batch_size=5, **options):
    loader = shard_loader(folder, batch_size, rows_of, cache_dir=folder / "cache", **options)
    loader.sampler.deal_to(replicas, rank)
    return loader


def taken(folder, replicas, batch_size=5, epoch=0, state=None, steps=None, **options):
    """Return the rows of each process, in lists of batches, and the position of the first process after them."""
    found = []
    for rank in range(replicas):
        loader = loader_of(folder, replicas, rank, batch_size, **options)
        loader.sampler.set_epoch(epoch)
        if state is not None:
            loader.load_state_dict(state)
        batches = []
        for batch in loader:
            batches.append(batch.tolist())
            if len(batches) == steps:
                break
        found.append((batches, loader.state_dict()))
        loader.dataset.close()
    assert len({len(batches) for batches, _ in found}) == 1
    return [row for batches, _ in found for batch in batches for row in batch], found[0][1]


@pytest.mark.parametrize(("replicas", "batch_size"), [(1, 5), (2, 5), (3, 4), (4, 1), (5, 7)])
def test_training_takes_each_row_once_but_for_the_last_step(numbered, replicas, batch_size):
    rows, _ = taken(numbered, replicas, batch_size, epoch=1)
    size = replicas * batch_size
    assert len(rows) == len({*rows}) == 211 // size * size


def test_epochs_differ_and_repeat_with_their_seed(numbered):
    first, _ = taken(numbered, 1)
    assert taken(numbered, 1)[0] == first
    assert taken(numbered, 1, epoch=1)[0] != first != taken(numbered, 1, seed=1)[0]


@pytest.mark.slow
def test_steps_hold_the_same_rows_on_any_number_of_processes(numbered):
    """With as many rows a step; a batch of one process is in the order of streams, so that sets are compared."""
    whole = [{*taken(numbered, 1, 12, steps=n)[0]} for n in (1, 2, 3)]
    for replicas in (2, 3, 4):
        assert [{*taken(numbered, replicas, 12 // replicas, steps=n)[0]} for n in (1, 2, 3)] == whole


def test_an_epoch_goes_on_with_other_numbers_of_processes(numbered):
    """Three runs of one epoch: 4 processes, 1, 3, each from the checkpoint of the one before."""
    first, state = taken(numbered, 4, 3, epoch=2, steps=3)
    second, state = taken(numbered, 1, 7, epoch=2, state=state, steps=5)
    third, _ = taken(numbered, 3, 4, epoch=2, state=state)
    rows = first + second + third
    assert len(first) == 36
    assert len(second) == 35
    assert len(rows) == len({*rows}) == 71 + 140 // 12 * 12


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [5, 64])
def test_rows_in_order_are_taken_by_all_processes_alike(numbered, replicas, batch_size):
    """Some take their last row again, so that all take equally many steps, and rows of each."""
    rows, _ = taken(numbered, replicas, batch_size, shuffle=False)
    assert {*rows} == {*range(211)}
    assert len(rows) == -(-211 // replicas) * replicas
    if replicas == 1:
        assert rows == [*range(211)]


def test_exact_steps_repeat_no_row():
    for rank, expected in enumerate(([4, 7], [5], [6])):
        assert positions_of(Step(0, 4, 8, 3, rank), exact=True).tolist() == expected
    assert positions_of(Step(0, 4, 8, 3, 1), exact=False).tolist() == [5, 5]
    assert positions_of(Step(0, 6, 7, 3, 2), exact=False).tolist() == [5]
    assert positions_of(Step(0, 0, 2, 3, 2), exact=False).tolist() == [0]


def comes_true(claim):
    """Return whether a claim on threads, which end a little later, holds within five seconds."""
    for _ in range(100):
        gc.collect()
        if claim():
            return True
        time.sleep(0.05)
    return False


class Recorder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.rows, self.validated = [], []

    def training_step(self, batch, batch_idx):
        self.rows.append(batch.tolist())
        return self.weight * batch.double().mean()

    def validation_step(self, batch, batch_idx):
        self.validated += batch.tolist()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class SaveAt(L.Callback):
    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def fit(folder, tmp_path, batch_size, step, ckpt_path=None):
    module = Recorder()
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        callbacks=[SaveAt(step, tmp_path / f"{step}.ckpt")],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    val = loader_of(folder, shuffle=False)
    trainer.fit(module, loader_of(folder, batch_size=batch_size), val, ckpt_path=ckpt_path)
    return module


def test_a_trainer_resumes_in_mid_epoch_and_with_larger_steps(numbered, tmp_path):
    whole = fit(numbered, tmp_path, 10, step=30)
    assert len(whole.rows) == 42
    assert sorted(whole.validated[10:]) == sorted([*range(211), *range(211)])  # after the sanity check
    resumed = fit(numbered, tmp_path, 10, step=1, ckpt_path=tmp_path / "30.ckpt")
    assert resumed.rows == whole.rows[30:]
    assert resumed.weight.equal(whole.weight)
    larger = fit(numbered, tmp_path, 25, step=1, ckpt_path=tmp_path / "30.ckpt")
    second_epoch = [row for batch in whole.rows[21:30] + larger.rows for row in batch]
    assert len(second_epoch) == len({*second_epoch}) == 90 + 121 // 25 * 25


@pytest.mark.sampled(default=1)
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_give_the_batches_of_threads(numbered, workers):
    alone = [batch.tolist() for batch in loader_of(numbered)]
    loader = loader_of(numbered, num_workers=workers)
    assert [batch.tolist() for batch in loader] == alone
    loader.sampler.set_epoch(1)
    assert [batch.tolist() for batch in loader] != alone


def test_a_checkpoint_of_other_files_is_refused(numbered, tmp_path):
    loader = loader_of(numbered)
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(ValueError, match="trained on other shards, or in another order: seed 0 there, 1 here"):
        loader_of(numbered, seed=1).load_state_dict(state)
    (numbered / "part-1.parquet").rename(numbered / "part-1a.parquet")
    with pytest.raises(ValueError, match=r"digest .* there, .* here. The digest is of the names of the files"):
        loader_of(numbered).load_state_dict(state)


def test_loading_ends_with_its_loader(numbered):
    """A thread that waits with what it has read ahead must not outlive whoever would take it."""
    loader = loader_of(numbered, batch_size=1)
    next(iter(loader))
    assert any(thread.name == "shards" for thread in threading.enumerate())
    del loader
    gc.collect()
    assert comes_true(lambda: not any(thread.name == "shards" for thread in threading.enumerate()))


def test_an_iteration_that_is_broken_off_leaves_no_thread(numbered):
    loader = loader_of(numbered, batch_size=1)
    for _ in loader:
        break
    assert comes_true(lambda: not any(thread.name == "shards" for thread in threading.enumerate()))


def test_a_position_is_kept_until_the_number_of_processes_is_known(numbered):
    _, state = taken(numbered, 1, 10, steps=8)
    loader = shard_loader(numbered, 5, rows_of, cache_dir=numbered / "cache")
    loader.load_state_dict(state)
    loader.sampler.deal_to(2, 1)
    assert len([*loader]) == 131 // 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_fork_reads_on(numbered):
    loader = loader_of(numbered)
    batches = iter(loader)
    first = [next(batches).tolist() for _ in range(3)]
    child = os.fork()
    if not child:
        os._exit(len([*batches]) - 39)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert first + [batch.tolist() for batch in batches] == [batch.tolist() for batch in loader_of(numbered)]


def test_a_checkpoint_of_the_last_step_begins_the_next_epoch(numbered, tmp_path):
    whole = fit(numbered, tmp_path, 10, step=21)
    assert fit(numbered, tmp_path, 10, step=1, ckpt_path=tmp_path / "21.ckpt").rows == whole.rows[21:]


def test_an_epoch_leaves_nothing_in_memory(numbered):
    loader = loader_of(numbered)
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        assert sum(map(len, loader)) == 210
        next(iter(loader))
    loader.dataset.close()
    assert comes_true(lambda: not any(isinstance(found, _Reader) for found in gc.get_objects()))  # with open blocks


def test_few_batches_are_made_ahead(numbered):
    made = []
    loader = shard_loader(numbered, 1, lambda table: made.append(1), cache_dir=numbered / "cache")
    next(iter(loader))
    time.sleep(0.3)
    assert 2 <= len(made) <= 1 + 8 + 1 + 5  # taken, waiting, about to wait, and one for each thread and one more


def test_a_step_that_the_rows_do_not_fill_is_refused_where_the_processes_are_known(numbered):
    loader = loader_of(numbered, replicas=3, rank=1, batch_size=100)
    with pytest.raises(ValueError, match="211 rows train, fewer than batch_size=100 on each of 3 processes"):
        next(iter(loader))


def test_blocks_that_are_too_large_to_mix_are_told(numbered):
    with pytest.warns(UserWarning, match="are mixed among 1 blocks at a time, since these have up to 0 MB"):
        loader_of(numbered, shuffle_bytes=600)


def test_an_error_is_raised_where_the_batch_is_taken(numbered):
    loader = shard_loader(numbered, 5, lambda table: 1 / 0, cache_dir=numbered / "cache")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            next(iter(loader))


def test_the_batches_of_a_copy_for_one_process_are_those_of_all(numbered):
    loader = loader_of(numbered, replicas=2, rank=1, shuffle=False)
    assert torch.cat([*undistributed(loader)]).tolist() == [*range(211)]


def test_other_samplers_are_refused(numbered):
    loader = loader_of(numbered)
    with pytest.raises(TypeError, match=r"needs its ShardSampler, .*overfit_batches"):
        next(iter(DataLoader(loader.dataset, sampler=SequentialSampler(range(5)), batch_size=None)))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1; got 0"),
        ({"batch_size": 212}, ValueError, "211 rows train, fewer than batch_size=212 on each of 1 processes"),
        ({"columns": "rwo"}, ValueError, r"no column 'rwo'; did you mean 'row'\? Its columns: row, half"),
    ],
    ids=str,
)
def test_impossible_options_are_refused(numbered, options, error, message):
    with pytest.raises(error, match=message):
        shard_loader(numbered, options.pop("batch_size", 5), rows_of, cache_dir=numbered / "cache", **options)


def test_a_file_that_changes_while_it_is_read_is_noticed(numbered):
    loader = loader_of(numbered, shuffle=False)
    rows = pa.table({"row": np.arange(3), "half": np.arange(3) / 2})
    pa.parquet.write_table(rows, numbered / "part-0.parquet")
    with pytest.raises(ValueError, match=r"part-0.parquet, row group 0 has 3 rows, and had 7 when the run began"):
        next(iter(loader))
