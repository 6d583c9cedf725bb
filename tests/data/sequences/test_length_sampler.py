"""Batches of like length: the lengths are those on which the field's samplers were measured."""

import warnings
from itertools import chain

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_accel.callbacks import ExactResume
from lightning_accel.data import LengthBatchSampler, length_batch_loader
from lightning_accel.data.sequences.batch import IGNORED, collate_sequences
from lightning_accel.data.sequences.dataset import SequenceDataset
from lightning_accel.data.sequences.length_sampler import Chunk
from tests.ranks import run_ranks
from tests.strategies.trained import make, trainer


def log_normal(rows=5000, seed=0):
    return np.random.default_rng(seed).lognormal(np.log(43), 0.8, rows).clip(1, 500).astype(int)


def ranks_of(lengths, world_size, epoch=0, state=None, **options):
    """What each rank gets."""
    batches = []
    for rank in range(world_size):
        sampler = LengthBatchSampler(lengths, num_replicas=world_size, rank=rank, **options)
        sampler.set_epoch(epoch)
        if state is not None:
            sampler.load_state_dict(state)
        batches.append(list(sampler))
        assert len(batches[-1]) == len(sampler) - (0 if state is None else state["batches"])
    return batches


def all_of(batches):
    return sorted(chain.from_iterable(batches))


def steps_of(ranks):
    """The rows of each step, of all ranks together."""
    return [sorted(row for rows in step for row in rows) for step in zip(*ranks, strict=True)]


SIZES = [
    {"batch_size": 64},
    {"batch_size": 67, "window": None},
    {"batch_size": 64, "window": 3},
    {"max_tokens": 8192},
    {"batch_size": 100, "max_tokens": 6001, "window": 10},
    {"max_steps": 4000},
    {"batch_size": 64, "shuffle": False},
]


@pytest.mark.parametrize("options", SIZES, ids=str)
def test_every_row_once_within_the_sizes(options):
    lengths = log_normal(3001)
    counts = set()
    for epoch in range(3):
        batches = ranks_of(lengths, 1, epoch, **options)[0]
        assert all_of(batches) == list(range(3001))
        counts.add((len(batches), sum(lengths[rows].max() for rows in batches)))
        assert max(map(len, batches)) <= options.get("batch_size", 3001)
        assert max(len(rows) * lengths[rows].max() for rows in batches) <= options.get("max_tokens", np.inf)
        assert sum(lengths[rows].max() for rows in batches) <= options.get("max_steps", np.inf)
    assert len(counts) == 1, "the Trainer asks once how many batches an epoch has"


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 129, 191])
@pytest.mark.parametrize("window", [None, 1, 50])
def test_any_number_of_rows(rows, window):
    batches = list(LengthBatchSampler(log_normal(rows), 64, window=window))
    assert all_of(batches) == list(range(rows))
    assert min(map(len, batches)) >= min(rows, 32), "no batch of a few left over"


def test_budget_of_steps_is_met_by_the_smallest_batches():
    lengths = log_normal()
    sampler = LengthBatchSampler(lengths, max_steps=3000)
    assert sampler.report(1).steps <= 3000 < LengthBatchSampler(lengths, sampler.batch_size - 1).report(1).steps
    with pytest.raises(ValueError, match=r"max_steps=3000 cannot be met: an epoch has \d+ sequential steps or more"):
        LengthBatchSampler(lengths, max_steps=3000, max_tokens=4000)


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_ranks_have_alike_batches(world_size):
    lengths = log_normal()
    ranks = ranks_of(lengths, world_size, batch_size=60 * world_size)
    assert all_of(steps_of(ranks)) == list(range(5000))
    for step in zip(*ranks, strict=True):
        sizes = [len(rows) for rows in step]
        assert max(sizes) - min(sizes) <= 1
        tokens = [lengths[rows].sum() / len(rows) for rows in step]
        assert max(tokens) <= 1.1 * min(tokens)
    totals = [lengths[all_of(batches)].sum() for batches in ranks]
    assert max(totals) <= 1.01 * min(totals)


@pytest.mark.parametrize("options", [{"window": 50}, {"window": None}, {"window": 20}], ids=str)
def test_eight_ranks_lose_less_than_a_hundredth_to_stragglers(options):
    lengths = log_normal(20_000)
    ranks = ranks_of(lengths, 8, batch_size=512, **options)
    longest = np.array([[lengths[rows].max() for rows in batches] for batches in ranks])
    work = np.array([[lengths[rows].max() * len(rows) for rows in batches] for batches in ranks])
    assert 1 - longest.mean(0).sum() / longest.max(0).sum() <= 0.01
    assert 1 - work.mean(0).sum() / work.max(0).sum() <= 0.01
    report = LengthBatchSampler(lengths, 512, **options).report(8)
    assert report.batches == longest.shape[1]
    assert report.steps == longest.max(0).sum()
    assert report.padding == pytest.approx(1 - lengths.sum() / work.sum())
    assert report.straggling == pytest.approx(1 - work.mean(0).sum() / work.max(0).sum())


@pytest.mark.parametrize("options", [{"batch_size": 64}, {"max_tokens": 8192}], ids=str)
def test_the_plan_is_a_function_of_seed_and_epoch(options):
    lengths = log_normal(1000)

    def order(epoch=0, **more):
        return ranks_of(lengths, 1, epoch, **options, **more)[0]

    first, state = order(), torch.random.get_rng_state()
    np.random.seed(3)  # noqa: NPY002
    assert order() == first
    assert torch.random.get_rng_state().equal(state)
    others = [order(epoch=1), order(seed=1)]
    assert len({str(sorted(map(sorted, batches))) for batches in (first, *others)}) == 3, "other mates, too"
    sampler = LengthBatchSampler(lengths, **options)
    sampler.set_epoch(1)
    list(sampler)
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_equal_lengths_are_shuffled_freely():
    mates = {
        frozenset(rows) for epoch in range(5) for rows in ranks_of([7] * 64, 1, epoch, batch_size=8, window=None)[0]
    }
    assert len(mates) > 35


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (1, 3)])
def test_other_numbers_of_ranks_go_on_with_the_same_steps(before, after):
    lengths, options = log_normal(500), {"max_tokens": 4000, "seed": 5}
    whole = steps_of(ranks_of(lengths, before, epoch=3, **options))
    state = LengthBatchSampler(lengths, num_replicas=before, rank=0, **options).state_after(3, 4)
    assert steps_of(ranks_of(lengths, after, epoch=3, state=state, **options)) == whole[4:]


def test_other_batches_are_refused_on_resuming():
    lengths = log_normal(100)
    state = LengthBatchSampler(lengths, 8).state_after(0, 3)
    for sampler, message in (
        (LengthBatchSampler(lengths, 16), r"batch_size=8 there, 16 here\. .*of all processes together"),
        (LengthBatchSampler(lengths, 8, seed=1), "seed=0 there, 1 here"),
        (LengthBatchSampler(lengths[:-1], 8), "sequences=100 there, 99 here"),
        (LengthBatchSampler(lengths + (np.arange(100) == 7), 8), "other sizes of the sequences"),
    ):
        with pytest.raises(ValueError, match=message):
            sampler.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give batch_size, max_tokens or max_steps"),
        ({"batch_size": 0}, "batch_size must be at least 1; got 0"),
        ({"batch_size": 4, "seed": -1}, "seed must be at least 0; got -1"),
        ({"max_tokens": 20}, "max_tokens=20 holds no sequence of 30 steps"),
        ({"lengths": [[1]], "batch_size": 1}, r"got int64 of shape \(1, 1\)"),
        ({"lengths": [1, -2], "batch_size": 1}, r"with -2"),
        ({"lengths": [], "batch_size": 1}, r"got float64 of shape \(0,\)"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LengthBatchSampler(**{"lengths": [10, 30]} | options)


def test_batches_of_fewer_rows_than_ranks_are_refused():
    sampler = LengthBatchSampler([10, 30, 20], max_tokens=60, num_replicas=3, rank=2)
    with pytest.raises(ValueError, match=r"each of 3 processes needs a sequence of every batch, but one has 1.*raise"):
        len(sampler)


def pairs(lengths, of_steps=False):
    return [(torch.arange(n) + 1.0, torch.arange(n) if of_steps else torch.tensor(i)) for i, n in enumerate(lengths)]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("of_steps", [False, True])
def test_chunks_put_together_are_the_sequences(world_size, of_steps):
    lengths = [*np.random.default_rng(0).integers(0, 30, 50).tolist(), 90]
    x, targets = (torch.cat([torch.atleast_1d(pair[i]) for pair in pairs(lengths, of_steps)]) for i in (0, 1))
    target = {"labels" if of_steps else "target": targets}
    data = SequenceDataset(x[:, None], torch.tensor(lengths), **target)
    found, counts = {}, set()
    for rank in range(world_size):
        sampler = LengthBatchSampler(lengths, 10, chunk_steps=7, num_replicas=world_size, rank=rank)
        kept, taken = [], 0
        for chunk in sampler:
            batch = data[chunk]
            assert batch.x.shape[1] <= 7
            assert batch.carried.tolist() == chunk.carried
            for place, (row, before) in enumerate(zip(chunk.rows, chunk.carried, strict=True)):
                assert before == -1 or kept[before] == row
                part = batch.x[place, : batch.lengths[place]]
                found.setdefault(row, []).append((part, batch.target[place]))
            kept = chunk.rows
            taken += 1
        assert taken == len(sampler)
        counts.add(taken)
    assert len(counts) == 1
    for row, length in enumerate(lengths):
        parts, targets = zip(*found[row], strict=True)
        torch.testing.assert_close(torch.cat(parts)[:, 0], torch.arange(length) + 1.0)
        if of_steps:
            assert [int(t) for target in targets for t in target if t != IGNORED] == list(range(length))
        else:
            assert [int(target) for target in targets if target != IGNORED] == [row]


def test_a_run_goes_on_within_a_sequence():
    lengths, options = log_normal(60), {"batch_size": 6, "chunk_steps": 20}
    whole = ranks_of(lengths, 2, epoch=2, **options)
    state = LengthBatchSampler(lengths, num_replicas=4, rank=1, **options).state_after(2, 5)
    rest = ranks_of(lengths, 2, epoch=2, state=state, **options)
    assert rest == [batches[5:] for batches in whole]
    assert rest[0][0].start > 0
    assert all(isinstance(chunk, Chunk) for chunk in rest[0])


def test_dataset_and_sampler_of_different_length_are_refused():
    with pytest.raises(ValueError, match="knows the lengths of 2 sequences, the dataset holds 3"):
        length_batch_loader(pairs([3, 4, 5]), LengthBatchSampler([3, 4], 2))
    with pytest.raises(ValueError, match="chunk_steps needs a data set that takes a Chunk"):
        length_batch_loader(pairs([3, 4]), LengthBatchSampler([3, 4], 2, chunk_steps=2))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_counts_what_it_handed_out(num_workers):
    lengths = log_normal(40)
    loader = length_batch_loader(pairs(lengths), LengthBatchSampler(lengths, 5), num_workers=num_workers)
    whole = [batch.target.tolist() for batch in loader]
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    assert (state["epoch"], state["batches"]) == (0, 3)
    del batches
    again = length_batch_loader(pairs(lengths), LengthBatchSampler(lengths, 5), num_workers=num_workers)
    again.load_state_dict(state)
    assert [batch.target.tolist() for batch in again] == whole[3:]
    assert [batch.target.tolist() for batch in again] == whole, "the next round is a whole one"


def test_the_collate_and_getitems_of_others_are_used():
    class Rows:
        def __len__(self):
            return 4

        def __getitems__(self, rows):
            return f"rows {sorted(rows)}"

    sampler = LengthBatchSampler([1, 2, 3, 4], 2, shuffle=False)
    assert list(length_batch_loader(Rows(), sampler, str.upper)) == ["ROWS [2, 3]", "ROWS [0, 1]"]


class Mean(L.LightningModule):
    """Knows nothing of us; its dropout draws."""

    steps = False  # whether a scheduler has the Trainer make loaders before it reads the checkpoint

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))
        self.rows = []

    def training_step(self, batch, batch_idx):
        self.rows.append(batch.target.tolist())
        return self.net(batch.x.mean(1, keepdim=True) / 100).square().mean()

    def configure_optimizers(self):
        if self.steps:
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Planned(Mean):
    steps = True


class SaveAt(L.Callback):
    def __init__(self, folder, step):
        self.folder, self.step = folder, step

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.folder / "saved.ckpt")

    def on_train_epoch_end(self, trainer, *_):
        if self.step is not None and trainer.global_step == -self.step:
            trainer.save_checkpoint(self.folder / "saved.ckpt")


LENGTHS = log_normal(60)


def fit(folder, module, ours=True, exact=False, save=None, resume=None, num_workers=0, **options):
    torch.manual_seed(4)
    model = module()
    if not exact:
        model.net[1].p = 0.0  # random numbers go on with ExactResume alone
    sampler = LengthBatchSampler(LENGTHS, 12, seed=2)
    if ours:
        loader = length_batch_loader(pairs(LENGTHS), sampler, num_workers=num_workers)
    else:
        loader = DataLoader(Selected(), sampler=sampler, batch_size=None, num_workers=num_workers)
    callbacks = [SaveAt(folder, save), *([ExactResume()] if exact else [])]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers")
        run = trainer(callbacks=callbacks, **{"max_epochs": 3, "max_steps": -1, "devices": 1} | options)
        run.fit(model, loader, ckpt_path=resume)
    return model


class Selected:
    """Batches of one's own, for a plain DataLoader."""

    def __getitem__(self, rows):
        return collate_sequences([pairs(LENGTHS)[row] for row in rows])


def check_resumed(rank, folder, devices, cases):
    options = {"devices": devices, "strategy": "ddp"} if devices > 1 else {}
    for case in cases:
        for save in (
            2,
            7,
            -5,
            10,
        ):  # 5 batches an epoch: in the midst of two, after the first, with the last of the second
            whole = fit(folder, save=save, **case, **options)
            epochs = [all_of(whole.rows[start : start + 5]) for start in (0, 5, 10)]
            if devices == 1:
                assert epochs == [list(range(60))] * 3
            assert len({str(whole.rows[start : start + 5]) for start in (0, 5, 10)}) == 3, "set_epoch was not called"
            resumed = fit(folder, resume=folder / "saved.ckpt", **case, **options)
            assert resumed.rows == whole.rows[abs(save) :], (case, save)
            for name, value in whole.state_dict().items():
                assert value.equal(resumed.state_dict()[name]), (case, save, name)


CASES = {
    "without": [
        {"module": Mean},
        {"module": Mean, "num_workers": 1},
    ],
    "exact": [
        {"module": Mean, "exact": True},
        {"module": Planned, "exact": True, "num_workers": 1},
        {"module": Planned, "exact": True, "max_steps": 15, "max_epochs": -1},
    ],
    "exact, plain loader": [{"module": module, "exact": True, "ours": False} for module in (Mean, Planned)],
}


@pytest.mark.sampled(slow=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "exact" else [pytest.mark.slow]) for name in CASES]
)
def test_a_killed_run_goes_on(tmp_path, name):
    check_resumed(0, tmp_path, 1, CASES[name])


@pytest.mark.sampled(slow=2)
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_killed_ranks_go_on(tmp_path, name):
    cases = [case for case in CASES[name] if "num_workers" not in case]  # fork beside gloo's threads may hang
    run_ranks(check_resumed, tmp_path, 2, cases)


def check_rows(rank, folder, devices, save, resume, exact, ours):
    options = {"devices": devices, "strategy": "ddp"} if devices > 1 else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ExactResume: the checkpoint was written by")
        return fit(folder, Mean, ours, exact, save, resume, **options).rows


@pytest.mark.slow
@pytest.mark.parametrize(("exact", "ours"), [(False, True), (True, True), (True, False)])
def test_two_ranks_go_on_as_four_and_as_one(tmp_path, exact, ours):
    whole = steps_of(run_ranks(check_rows, tmp_path, 2, 7, None, exact, ours))
    saved = tmp_path / "saved.ckpt"
    four = run_ranks(check_rows, tmp_path, 4, None, saved, exact, ours, world_size=4)
    assert steps_of(four) == whole[7:]
    assert steps_of([check_rows(0, tmp_path, 1, None, saved, exact, ours)]) == whole[7:]


def test_it_is_the_trainers_distributed_sampler():
    assert isinstance(LengthBatchSampler([1, 2], 1), DistributedSampler)


@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_a_trainer_that_puts_another_sampler_in_its_place_is_told():
    loader = length_batch_loader(pairs([3, 5, 4]), LengthBatchSampler([3, 5, 4], 2))
    run = trainer(overfit_batches=1, max_steps=1)
    with pytest.raises(TypeError, match=r"needs its LengthBatchSampler, but found another.*Take limit_train_batches"):
        run.fit(make("plain")[0], loader)
