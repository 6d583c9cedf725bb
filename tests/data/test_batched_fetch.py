"""Batches that are indexed at once equal those that are collated sample by sample."""

import copy
import itertools
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from lightning_accel.data.batched_fetch import fetch_batches, why_by_sample


def samples(n=13):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (n, 1, 2, 3), dtype=torch.uint8, generator=generator)
    return torch.randn(n, 3, generator=generator), images, torch.arange(n), torch.rand(n, generator=generator) < 0.5


PLAIN = TensorDataset(*samples())


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


class Ratings(Dataset):
    """Arrays that are indexed, as users write them; ``read`` makes the sample."""

    def __init__(self, read, n=29):
        rng = np.random.default_rng(0)
        self.users, self.x = rng.integers(0, 9, n), rng.normal(size=(n, 2, 3)).astype(np.float32)
        self.x[3, 0] = np.nan
        self.y = torch.arange(n) / 7
        self.rng, self.read, self.asked = np.random.default_rng(1), read, []

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        self.asked.append(index)
        return self.read(self, index)


def features(data, index):
    return {"user": data.users[index], "x": data.x[index]}, data.y[index]


def number_and_tuple(data, index):
    return [(data.x[index] - 0.5) / 2, data.y[index].bool()], data.users[index].astype(np.uint8)


def fortran(data, index):
    return np.asfortranarray(data.x)[index]


@pytest.mark.parametrize("read", [features, number_and_tuple, fortran])
def test_other_datasets_are_given_arrays_of_indices(read):
    """Equal bits and layouts, from three batches on by one call for all samples and one for a single one."""
    dataset = Ratings(read)
    nested = Subset(Subset(dataset, range(1, 29)), np.arange(27))
    plain, found = (DataLoader(nested, 4) for _ in range(2))
    fetch_batches(found)
    assert why_by_sample(found) == ""
    expected = list(plain)
    dataset.asked.clear()
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, check_stride=True)
        assert type(one) is type(other)
    calls = [type(index) for index in dataset.asked]
    assert calls == [np.ndarray, *[int] * 4] * 3 + [np.ndarray, int] * 4


class Late(Ratings):
    """Special from sample 20 on, in a way that an array of indices does not tell."""

    def __getitem__(self, index):
        return self.y[index] if np.ndim(index) or index < 20 else -self.y[index]


def draws(data, index):
    return data.x[index] + np.random.rand()  # noqa: NPY002  # as datasets of users do


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (Ratings(lambda data, index: float(data.y[index])), "array of indices"),
        (Ratings(lambda data, index: data.x[index] - data.x[index].mean()), "array of indices"),
        (Ratings(lambda data, index: (data.y[index], 1)), "array of indices"),
        (Ratings(lambda data, index: data.y[index] if index else data.y[0]), "array of indices"),
        (Ratings(lambda data, index: data.y), "array of indices"),
        (Ratings(draws), "draws random numbers"),
        (Ratings(lambda data, index: data.y[index] + torch.rand(())), "draws random numbers"),
        (ConcatDataset([PLAIN]), "array of indices"),
        ([3.0, 4.0, 5.0, 6.0, 7.0], "array of indices"),
    ],
)
def test_samples_are_read_one_by_one_where_an_array_returns_something_else(dataset, reason):
    def read(loader):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        found = list(loader)
        return found, torch.rand(1), np.random.rand()  # noqa: NPY002

    plain, loader = (DataLoader(dataset, 4, shuffle=True) for _ in range(2))
    fetch_batches(loader)
    assert reason in why_by_sample(loader)
    torch.testing.assert_close(read(loader), read(plain), rtol=0, atol=0, equal_nan=True)


def test_asking_draws_no_random_numbers():
    states = []
    for asks in (False, True):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        if asks:
            assert "draws random numbers" in why_by_sample(DataLoader(Ratings(draws), 4))
        states.append((torch.rand(1).item(), np.random.rand()))  # noqa: NPY002
    assert states[0] == states[1]


def test_datasets_with_generators_of_their_own_are_read_by_sample():
    """Whose samples are others each time that they are read."""
    dataset = Ratings(lambda data, index: data.y[index] + data.rng.random())
    assert "array of indices" in why_by_sample(DataLoader(dataset, 4))


def test_batches_of_one_sample_show_nothing():
    """What is centred by itself is the same in a batch of one."""
    dataset = Ratings(lambda data, index: data.x[index] - np.nanmean(data.x[index]))
    plain, loader = (DataLoader(dataset, batch_sampler=[[0], [1], [2], [4, 5, 6]]) for _ in range(2))
    fetch_batches(loader)
    torch.testing.assert_close(list(loader), list(plain), rtol=0, atol=0)


def test_a_dataset_that_deviates_later_is_noticed():
    loader = DataLoader(Late(None), 4)
    fetch_batches(loader)
    with pytest.warns(UserWarning, match="Late does not return for an array .* it did in the batches before"):
        found = torch.cat(list(loader))
    assert torch.equal(found, torch.cat(list(DataLoader(Late(None), 4))))


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


class OwnSubset(Subset):
    def __getitems__(self, indices):
        return [self.dataset[0] for _ in indices]


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(*samples(), strict=True)


class OwnLoader(DataLoader):
    def _get_iterator(self):
        return super()._get_iterator()


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(PLAIN, batch_size=None), "without collating"),
        (DataLoader(PLAIN, batch_size=4, collate_fn=len), "collate_fn of its own"),
        (OwnLoader(PLAIN, batch_size=4), "OwnLoader makes iterators of its own"),
        (DataLoader(PLAIN, batch_size=4, num_workers=1, worker_init_fn=print), "worker_init_fn"),
        (DataLoader(OwnSubset(PLAIN, [1, 2]), batch_size=4), "OwnSubset reads batches in a way of its own"),
        (DataLoader(Stream(), batch_size=4), "an order of its own: Stream"),
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
