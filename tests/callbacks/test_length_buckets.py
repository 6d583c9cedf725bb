"""Batches of samples of similar length, of loaders that know nothing of them."""

import re

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, TensorDataset

from lightning_accel.callbacks import Batching, ExactResume
from lightning_accel.callbacks.length_buckets import length_of, lengths_of, why_not_bucketed

pytestmark = pytest.mark.filterwarnings("ignore:.*(does not have many workers|number of training batches|treespec)")
LENGTHS = torch.randint(1, 50, (40,), generator=torch.Generator().manual_seed(0)).tolist()


class Sentences(Dataset):
    """Samples of somebody else's, which draws a random number for each."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.rand(()), {"tokens": torch.full((self.lengths[index],), index), "label": 1}


def pad(samples):
    return pad_sequence([tokens["tokens"] for _, tokens in samples], batch_first=True, padding_value=-1)


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.batches = []

    def training_step(self, batch, batch_idx):
        self.batches.append(batch[:, 0].tolist())
        return self.net.weight.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(callbacks, seed=0, batch_size=4, loader=None):
    L.seed_everything(seed, verbose=False)
    loader = DataLoader(Sentences(LENGTHS), batch_size, shuffle=True, collate_fn=pad) if loader is None else loader
    module = Net()
    L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=2,
        enable_model_summary=False, callbacks=callbacks,
    ).fit(module, loader)  # fmt: skip
    return module.batches, loader


def padding(batches):
    return sum(max(LENGTHS[row] for row in rows) * len(rows) for rows in batches) / (2 * sum(LENGTHS)) - 1


@pytest.mark.sampled(default=1)
@pytest.mark.parametrize("others", [[], [ExactResume()]], ids=["alone", "resumable"])
def test_batches_have_similar_lengths_and_are_drawn_anew(others):
    random, _ = fit(others)
    batches, loader = fit([*others, Batching(length_bucketed=True)])
    assert padding(batches) < 0.5 * padding(random)
    for epoch in (batches[:10], batches[10:]):
        assert sorted(row for rows in epoch for row in rows) == list(range(40))
        assert [len(rows) for rows in epoch] == [4] * 10
    assert batches[:10] != batches[10:]
    assert batches == fit([*others, Batching(length_bucketed=True)])[0]
    assert batches != fit([*others, Batching(length_bucketed=True)], seed=1)[0]
    assert type(loader.batch_sampler) is BatchSampler
    assert loader.batch_sampler.sampler is loader.sampler


def test_both_changes_of_batches_go_together():
    batches, loader = fit([Batching(2, length_bucketed=True)])
    assert [len(rows) for rows in batches] == [8] * 10
    assert padding(batches) < 0.5 * padding(fit([], batch_size=8)[0])
    assert loader.batch_sampler.batch_size == 4


@pytest.mark.parametrize(
    ("sample", "length"),
    [
        (torch.zeros(3), 3),
        (np.zeros(4), 4),
        ([1, 2], 2),
        ((1.0, torch.zeros(2, 2), [torch.zeros(()), torch.zeros(5)]), 5),
        ({"label": 3, "tokens": [5, 6, 7]}, 3),
        ((1, 2), None),
        (torch.zeros(2, 3), None),
        ("text", None),
    ],
)
def test_length_is_that_of_the_first_sequence(sample, length):
    assert length_of(sample) == length


def test_reading_lengths_draws_nothing():
    state = torch.get_rng_state()
    assert lengths_of(Sentences([2, 3]), [1, 0]) == [3, 2]
    assert torch.equal(state, torch.get_rng_state())


ROWS = Sentences([1, 2, 3])


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(ROWS, 2, shuffle=True), "pads nothing"),
        (DataLoader(ROWS, 2, collate_fn=pad), "does not shuffle all samples"),
        (DataLoader(Sentences([1, "2"]), 2, shuffle=True, collate_fn=pad), "cannot be read outside .* TypeError"),
        (DataLoader(ROWS, batch_sampler=[[0, 1]], collate_fn=pad), "made by list"),
        (DataLoader(ROWS, batch_size=None, collate_fn=pad), "made by Sentences"),
        (DataLoader(Sentences([4, 4, 4]), 2, shuffle=True, collate_fn=pad), "equally long"),
        (DataLoader(TensorDataset(torch.zeros(3, 2, 2)), 2, shuffle=True, collate_fn=pad), "have no length"),
        (DataLoader(ROWS, batch_sampler=BatchSampler(SequentialSampler(ROWS), 2, True), collate_fn=pad), "Sequential"),
    ],
)
def test_loaders_are_refused_with_a_reason(loader, reason):
    assert re.search(reason, why_not_bucketed(loader))
    with pytest.raises(TypeError, match=f"length_bucketed=True.*{reason}"):
        fit([Batching(length_bucketed=True)], loader=loader)


def test_a_spread_of_the_samples_tells_for_all():
    loader = DataLoader(Sentences([3] * 99 + [4]), 2, shuffle=True, collate_fn=pad)
    assert why_not_bucketed(loader, 2) == why_not_bucketed(loader) == ""
    assert why_not_bucketed(DataLoader(Sentences([3, 4, 3]), 2, shuffle=True, collate_fn=pad), 2)
