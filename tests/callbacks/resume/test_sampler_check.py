"""The mistake is first made without the check, in real processes, and then found by it."""

import copy
import warnings

import lightning as L
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, default_collate

from lightning_accel.callbacks import ExactResume, SamplerCheck
from lightning_accel.data import LengthBatchSampler, length_batch_loader
from lightning_accel.strategies import AccelDDPStrategy, FullyShardedStrategy
from tests.ranks import run_ranks
from tests.strategies.trained import make, trainer

LENGTHS = [3, 9, 4, 8, 3, 9, 4, 8]


class LengthBatches(BatchSampler):
    """As people write it: it takes lengths, and no sampler."""

    def __init__(self, lengths, batch_size, drop_last=False):
        self.lengths, self.batch_size, self.drop_last = lengths, batch_size, drop_last

    def __iter__(self):
        rows = sorted(range(len(LENGTHS)), key=LENGTHS.__getitem__)
        yield from (rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size))

    def __len__(self):
        return len(LENGTHS) // self.batch_size


class OverRows(LengthBatches):
    """Takes a sampler under another name, which Lightning serves."""

    def __init__(self, inner, batch_size, drop_last=False):
        super().__init__(LENGTHS, batch_size, drop_last)
        self.inner = inner

    def __iter__(self):
        return BatchSampler.__iter__(BatchSampler(self.inner, self.batch_size, False))


class TellsItsEpoch(OverRows):
    def set_epoch(self, epoch):
        pass


class Seen(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.rows = []

    def training_step(self, batch, batch_idx):
        self.rows += batch.tolist()
        return self.weight * batch.float().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class InAHook(Seen):
    def train_dataloader(self):
        return DataLoader(range(8), batch_sampler=LengthBatches(LENGTHS, 2))


def fit(loader=None, module=Seen, callbacks=(), **options):
    model = module()
    options = {"devices": 2, "strategy": "ddp", "max_epochs": 1, "max_steps": -1} | options
    trainer(callbacks=list(callbacks), **options).fit(model, loader)
    return model.rows


def mistaken():
    return DataLoader(range(8), batch_sampler=LengthBatches(LENGTHS, 2))


def check_that_nothing_fails_without_it(rank):
    return fit(mistaken())


@pytest.mark.slow
def test_without_it_every_process_silently_trains_on_all_rows():
    assert [sorted(rows) for rows in run_ranks(check_that_nothing_fails_without_it)] == [list(range(8))] * 2


def check_refusals(rank):
    message = (
        r"would make LengthBatches, the batch_sampler of a loader, anew .* first argument, which is no sampler.* "
        r"LengthBatchSampler with length_batch_loader\(dataset, sampler\).*use_distributed_sampler=False"
    )
    for options in (
        {"callbacks": [SamplerCheck()]},
        {"callbacks": [ExactResume()]},
        {"strategy": AccelDDPStrategy()},
        {"strategy": FullyShardedStrategy()},
    ):
        with pytest.raises(TypeError, match=message):
            fit(mistaken(), **options)
    with pytest.raises(TypeError, match="does not have an argument called `sampler"):  # Lightning's own
        fit(module=InAHook, callbacks=[SamplerCheck()])
    for callbacks in ([], [SamplerCheck()]):
        with pytest.raises(TypeError, match=r"length_batch_loader\(dataset, "):
            fit(DataLoader(range(8), batch_sampler=LengthBatchSampler(LENGTHS, 4)), callbacks=callbacks)


@pytest.mark.slow
def test_mistakes_are_refused_before_training():
    run_ranks(check_refusals)


def check_what_works(rank):
    rows = {
        "inner": fit(
            DataLoader(range(8), batch_sampler=OverRows(RandomSampler(range(8)), 2)), callbacks=[SamplerCheck()]
        )
    }
    rows["flag"] = fit(mistaken(), callbacks=[SamplerCheck()], use_distributed_sampler=False)
    ours = LengthBatchSampler(LENGTHS, 4)
    rows["ours"] = fit(length_batch_loader(range(8), ours, torch.tensor), callbacks=[SamplerCheck()])
    rows["ours, plain loader"] = fit(DataLoader(Selected(), sampler=ours, batch_size=None), callbacks=[SamplerCheck()])
    in_order = DataLoader(range(8), sampler=DistributedSampler(range(8), shuffle=False), batch_size=2)
    rows["in order"] = fit(in_order, callbacks=[SamplerCheck()])
    return rows


class Selected:
    def __getitem__(self, rows):
        return torch.tensor(rows)


@pytest.mark.slow
def test_what_works_is_left_alone():
    ranks = run_ranks(check_what_works)
    for name in ranks[0].keys() - {"flag"}:
        assert sorted(ranks[0][name] + ranks[1][name]) == list(range(8)), name
    assert sorted(ranks[1]["flag"]) == list(range(8))


def check_warnings(rank):
    found = {}
    for name, loader in {
        "epochs": DataLoader(range(8), batch_sampler=TellsItsEpoch(RandomSampler(range(8)), 2)),
        "shuffled": DataLoader(range(8), batch_size=2),
    }.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            fit(loader, callbacks=[SamplerCheck()])
        found[name] = "\n".join(str(one.message) for one in caught)
    return found


@pytest.mark.slow
def test_what_is_ignored_without_a_word_is_told():
    told = run_ranks(check_warnings)[0]
    assert "never that of a batch_sampler, so every epoch of TellsItsEpoch has one order" in told["epochs"]
    assert "has shuffle=False, but Lightning shuffles it" in told["shuffled"]


def check_pipeline(rank):
    module, rows = make("plain", num_rows=8)
    found = {}
    for name, sampler in (
        ("ours", LengthBatchSampler([1] * 8, 4)),
        ("made for two", LengthBatchSampler([1] * 8, 4, num_replicas=2, rank=rank)),
        ("DistributedSampler", DistributedSampler(rows)),
    ):
        loader = DataLoader(rows, batch_size=4, sampler=sampler)
        if name != "DistributedSampler":
            loader = length_batch_loader(rows, sampler, collate_fn=default_collate)
        try:
            trainer(strategy="accel_pipeline", devices=2, max_steps=2).fit(copy.deepcopy(module), loader)
            found[name] = sampler.num_replicas
        except ValueError as error:
            found[name] = str(error)
    return found


@pytest.mark.slow
def test_stages_of_a_pipeline_get_the_same_rows():
    for rank, found in enumerate(run_ranks(check_pipeline)):
        assert found["ours"] == 1
        assert f"made with num_replicas=2 and rank={rank}, but the strategy deals rows to 1" in found["made for two"]
        assert f"of which this is number {rank}, but the strategy has 1 groups" in found["DistributedSampler"]


@pytest.mark.parametrize("callbacks", [(), (SamplerCheck(),)])
def test_one_process_makes_no_sampler_anew(callbacks):
    options = {"devices": 1, "strategy": "auto", "callbacks": callbacks}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert sorted(fit(mistaken(), **options)) == list(range(8))
