"""Batches that are indexed at once equal those that are collated sample by sample."""

import copy
import itertools
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from lightning_accel.data.batched_fetch import fetch_batches, why_by_sample


def samples(n=13):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (n, 1, 2, 3), dtype=torch.uint8, generator=generator)
    return torch.randn(n, 3, generator=generator), images, torch.arange(n), torch.rand(n, generator=generator) < 0.5


class Counted(torch.overrides.TorchFunctionMode):
    """Count calls of torch's functions while open."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls.append(function.__name__)
        return function(*args, **(kwargs or {}))


def batches(loader, batched):
    """Return two epochs of batches, the next random number, and the calls of torch.stack."""
    torch.manual_seed(3)
    if batched:
        fetch_batches(loader)
    with Counted() as counted:
        found = [batch for _ in range(2) for batch in loader]
    return found, torch.rand(1), counted.calls.count("stack")


def assert_equal_batches(make, is_batched=True):
    plain, drawn, stacks = batches(make(), batched=False)
    found, drawn_too, stacks_too = batches(make(), batched=True)
    assert torch.equal(drawn, drawn_too)
    assert len(plain) == len(found) > 0
    for one, other in zip(plain, found, strict=True):
        assert type(one) is type(other) is list
        for a, b in zip(one, other, strict=True):
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            assert torch.equal(a, b)
    assert stacks > 0
    assert stacks_too == (0 if is_batched else stacks)


INDICES = {
    "list": [7, 3, 3, 0, 11],
    "tuple": (7, 3, 3, 0, 11),
    "range": range(2, 12, 2),
    "array": np.array([7, 3, 3, 0, 11]),
    "list of array": list(np.array([7, 3, 3, 0, 11])),
    "tensor": torch.tensor([7, 3, 3, 0, 11]),
}


@pytest.mark.parametrize(
    "options", [{}, {"shuffle": True}, {"drop_last": True}, {"batch_size": 1}, {"pin_memory": True}]
)
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
def test_batches_of_tensors_are_equal(options):
    assert_equal_batches(lambda: DataLoader(TensorDataset(*samples()), **{"batch_size": 4} | options))


@pytest.mark.parametrize("kind", INDICES)
def test_batches_of_nested_subsets_are_equal(kind):
    dataset = Subset(Subset(TensorDataset(*samples()), INDICES[kind]), [4, 2, 0, 1])
    assert_equal_batches(lambda: DataLoader(dataset, batch_size=3, shuffle=True))


def test_strides_are_those_of_a_stack():
    for shape in itertools.product((1, 2), (1, 3), (1, 4)):
        dataset = TensorDataset(torch.randn(5, *shape))
        assert_equal_batches(lambda dataset=dataset: DataLoader(dataset, batch_size=2))


@pytest.mark.parametrize(
    ("dataset", "sampler"),
    [
        (TensorDataset(*samples()), [-1, 3, 0]),
        (Subset(TensorDataset(*samples()), [-2, 5, 7]), None),
        (TensorDataset(*samples()), [torch.tensor(3), torch.tensor(0)]),
        (Subset(TensorDataset(*samples()), torch.tensor([3, 0, 1], dtype=torch.int32)), None),
    ],
)
def test_other_indices_are_looked_up_one_by_one(dataset, sampler):
    assert_equal_batches(lambda: DataLoader(dataset, batch_size=3, sampler=sampler), is_batched=False)


def test_tensors_that_are_replaced_are_seen():
    dataset = TensorDataset(*samples())
    loader = DataLoader(dataset, batch_size=4)
    fetch_batches(loader)
    iterator = iter(loader)
    next(iterator)
    dataset.tensors = (torch.arange(26).view(2, 13).T,)  # whose rows are not contiguous
    (batch,) = next(iterator)
    assert batch.tolist() == [[row, row + 13] for row in (4, 5, 6, 7)]


def test_errors_are_those_of_the_dataset():
    loader = DataLoader(TensorDataset(*samples()), batch_size=2, sampler=[0, 13])
    fetch_batches(loader)
    with pytest.raises(IndexError, match="index 13 is out of bounds for dimension 0 with size 13"):
        list(loader)


def test_the_loader_shows_what_it_showed():
    dataset = TensorDataset(*samples())
    loader = DataLoader(dataset, batch_size=4)
    fetch_batches(loader)
    fetch_batches(loader)
    assert loader.dataset is dataset
    assert loader.collate_fn is default_collate
    assert len(loader) == 4
    again = pickle.loads(pickle.dumps(loader))
    assert [len(x) for x, *_ in again] == [4, 4, 4, 1]
    loader.collate_fn = len
    assert list(loader) == [4, 4, 4, 1]


@pytest.mark.slow
def test_workers_fetch_batches():
    def make():
        seeded = partial(pl_worker_init_function, rank=0)
        options = {"num_workers": 2, "persistent_workers": True, "worker_init_fn": seeded}
        return DataLoader(Subset(TensorDataset(*samples()), INDICES["list"]), batch_size=2, shuffle=True, **options)

    loader = make()
    fetch_batches(loader)
    torch.manual_seed(3)
    found = [batch for _ in range(2) for batch in loader]
    torch.manual_seed(3)
    plain = [batch for other in [make()] for _ in range(2) for batch in other]
    pairs = [pair for both in zip(plain, found, strict=True) for pair in zip(*both, strict=True)]
    assert len(pairs) == 6 * 4
    assert all(torch.equal(a, b) for a, b in pairs)
    dataset = loader._iterator._dataset
    assert len(dataset.__getitems__([0, 1])) == 4


class Noisy(TensorDataset):
    def __getitem__(self, index):
        return tuple(tensor + 1 for tensor in super().__getitem__(index))


class OwnSubset(Subset):
    def __getitems__(self, indices):
        return [self.dataset[0] for _ in indices]


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(*samples(), strict=True)


class OwnLoader(DataLoader):
    def _get_iterator(self):
        return super()._get_iterator()


PLAIN = TensorDataset(*samples())


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(PLAIN, batch_size=None), "without collating"),
        (DataLoader(PLAIN, batch_size=4, collate_fn=len), "collate_fn of its own"),
        (OwnLoader(PLAIN, batch_size=4), "OwnLoader makes iterators of its own"),
        (DataLoader(PLAIN, batch_size=4, num_workers=1, worker_init_fn=print), "worker_init_fn"),
        (DataLoader(Noisy(*samples()), batch_size=4), "no TensorDataset: Noisy"),
        (DataLoader(OwnSubset(PLAIN, [1, 2]), batch_size=4), "no TensorDataset: OwnSubset"),
        (DataLoader(ConcatDataset([PLAIN]), batch_size=4), "no TensorDataset: ConcatDataset"),
        (DataLoader(Stream(), batch_size=4), "no TensorDataset: Stream"),
        (DataLoader(TensorDataset(torch.zeros(3, 5).T), batch_size=4), "contiguous"),
        (DataLoader(TensorDataset(torch.zeros(5, requires_grad=True)), batch_size=4), "gradients"),
        (DataLoader(TensorDataset(torch.zeros(5).to_sparse()), batch_size=4), "dense"),
    ],
)
def test_other_loaders_are_left_as_they_are(loader, reason):
    assert reason in why_by_sample(loader)
    fetch_batches(loader)
    try:
        iterator = iter(loader)
    finally:
        loader.num_workers = 0
    assert iterator._dataset is loader.dataset
    assert iterator._collate_fn is loader.collate_fn


def test_a_loader_may_be_copied_before_its_iterators_change():
    loader = DataLoader(PLAIN, batch_size=4)
    copied = copy.copy(loader)
    fetch_batches(loader)
    assert why_by_sample(loader) == why_by_sample(copied) == ""
