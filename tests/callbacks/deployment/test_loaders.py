import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info

from lightning_accel.callbacks.deployment.loaders import (
    first_batches_of,
    in_random_order,
    independent,
    undistributed,
)


class OfWorkers(Dataset):
    """Has its samples only in workers, as what opens a file in ``worker_init_fn``."""

    samples = None

    def __len__(self):
        return 7

    def __getitem__(self, index):
        return self.samples[index]


def open_samples(_):
    get_worker_info().dataset.samples = torch.arange(10, 17)


@pytest.mark.parametrize(
    ("again", "count"),
    [(first_batches_of, 7), (in_random_order, 7), (lambda one: independent(4, one), 4), (undistributed, 7)],
)
def test_workers_open_what_samples_come_from(again, count):
    dataset = OfWorkers()
    order = DistributedSampler(dataset, 1, 0, shuffle=False) if again is undistributed else None
    read = again(DataLoader(dataset, 4, sampler=order, num_workers=2, worker_init_fn=open_samples))
    samples = sorted(torch.cat(list(read)).tolist())
    assert samples == [*range(10, 10 + count)]


@pytest.mark.parametrize(
    ("size", "drop_last", "sizes"),
    [(4, False, [4, 2]), (4, True, [4, 4]), (5, False, [5, 5]), (6, True, [6]), (11, True, [10]), (1, False, [1, 1])],
)
def test_first_batches_are_unequal_where_a_loader_has_such(size, drop_last, sizes):
    loader = DataLoader(range(10), size, drop_last=drop_last)
    assert [len(batch) for batch in first_batches_of(loader)] == sizes


def test_loaders_in_a_dict_are_each_in_random_order():
    loaders = {"a": DataLoader(range(9), 9), "b": DataLoader(range(4), 4)}
    read = {name: next(iter(loader)).tolist() for name, loader in in_random_order(loaders).items()}
    assert {name: sorted(order) for name, order in read.items()} == {"a": [*range(9)], "b": [*range(4)]}
    assert read["a"] != [*range(9)]
