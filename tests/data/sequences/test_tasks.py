"""Each task against a slow formula of its own."""

import pytest
import torch

from lightning_accel.data.sequences.batch import IGNORED
from lightning_accel.data.sequences.tasks import (
    adding_problem,
    counting,
    digit_pixels,
    parity,
    random_counts,
    selective_copying,
)


def each(rows):
    """Sequence and target of each row, without padding."""
    for i in range(len(rows)):
        (x, (length,), target, carried) = rows[i]
        assert carried is None
        assert x.shape[1] == length
        yield x[0], target[0]


def test_adding_problem_sums_the_marked_numbers():
    rows = adding_problem(500, (2, 7), seed=0)
    lengths, places = set(), set()
    for x, target in each(rows):
        assert x.shape[1] == 2
        assert x.dtype == torch.float32
        numbers = [float(value) for value, mark in x if mark == 1]
        assert len(numbers) == 2
        assert int(x[:, 1].count_nonzero()) == 2
        assert target == pytest.approx(sum(numbers))
        lengths.add(len(x))
        places |= {(len(x), *x[:, 1].nonzero().flatten().tolist())}
    assert lengths == {2, 3, 4, 5, 6, 7}
    assert places == {(length, i, j) for length in range(2, 8) for j in range(length) for i in range(j)}
    assert rows.target.sub(1).square().mean() == pytest.approx(1 / 6, abs=0.03)


def test_parity_of_ones():
    at_end = list(each(parity(200, (1, 6), seed=3)))
    after_each = list(each(parity(200, (1, 6), seed=3, each_step=True)))
    assert {len(x) for x, _ in at_end} == {1, 2, 3, 4, 5, 6}
    assert {tuple(x.tolist()) for x, _ in at_end} > {(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)}
    for (x, label), (same, labels) in zip(at_end, after_each, strict=True):
        assert same.equal(x)
        odd = [sum(x.tolist()[: i + 1]) % 2 for i in range(len(x))]
        assert label == odd[-1]
        assert labels.tolist() == odd


def test_selective_copying_asks_for_the_symbols_in_order():
    rows = selective_copying(600, context=48, seed=0)
    places = torch.zeros(48)
    for x, target in each(rows):
        symbols = [symbol for symbol in x.tolist()[:48] if symbol]
        assert len(symbols) == 16
        assert set(symbols) <= {*range(1, 15)}
        assert x.tolist()[48:] == [15] * 16
        assert target.tolist() == [IGNORED] * 48 + [symbol - 1 for symbol in symbols]
        places += x[:48] > 0
    torch.testing.assert_close(places / 600, torch.full((48,), 1 / 3), atol=0.08, rtol=0)


def test_selective_copying_as_published():
    rows = selective_copying(700, context=40, seed=0)  # more than are drawn together
    tokens = rows.steps.view(700, 56)
    assert tokens.unique().tolist() == list(range(16))
    assert (tokens[:, :40] > 0).sum(dim=1).unique().tolist() == [16]
    assert rows.labels.unique().tolist() == [IGNORED, *range(14)]


def test_counting_labels_what_may_follow():
    for (x, labels), n in zip(each(counting(torch.tensor([3, 1, 5]))), (3, 1, 5), strict=True):
        word = ["ab"[letter] for letter in x.tolist()]
        assert "".join(word) == "a" * n + "b" * n
        for i, label in enumerate(labels.tolist()):
            prefix = word[: i + 1]
            may_end = prefix.count("a") == prefix.count("b")
            assert label == (2 if may_end else 1 if "b" in prefix else 0)


def test_random_counts_take_every_number():
    assert random_counts(200, (2, 5), seed=0).unique().tolist() == [2, 3, 4, 5]


def test_digits_as_sequences():
    rows, pixels, permuted = digit_pixels(True), digit_pixels(False), digit_pixels(False, permuted=True)
    assert rows[[0, 1]].x.shape == (2, 8, 8)
    assert pixels[[0, 1]].x.shape == (2, 64, 1)
    assert len(rows) == 1797
    assert rows[[5, 9]].x.reshape(2, 64).equal(pixels[[5, 9]].x.reshape(2, 64))
    columns = {tuple(column.tolist()) for column in pixels.steps.view(-1, 64).T}
    assert {tuple(column.tolist()) for column in permuted.steps.view(-1, 64).T} == columns  # alike in every image
    assert not permuted.steps.equal(pixels.steps)
    assert permuted[7].x.flatten().sort().values.equal(pixels[7].x.flatten().sort().values)
    assert permuted.steps.equal(digit_pixels(False, permuted=True).steps)
    assert rows.steps.min() == 0
    assert rows.steps.max() == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: adding_problem(5, (3, 9), seed),
        lambda seed: parity(5, (3, 9), seed),
        lambda seed: selective_copying(5, 20, seed),
    ],
    ids=["adding", "parity", "selective"],
)
def test_seed_alone_decides(make):
    torch.manual_seed(1)
    first = make(4)
    torch.manual_seed(2)
    assert make(4).steps.equal(first.steps)
    assert make(4).lengths.equal(first.lengths)
    assert not (make(5).lengths.equal(first.lengths) and make(5).steps.equal(first.steps))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: adding_problem(5, (1, 9), 0), r"pair \(least, most\) from 2 up; got \(1, 9\)"),
        (lambda: parity(5, (9, 3), 0), r"pair \(least, most\) from 1 up; got \(9, 3\)"),
        (lambda: parity(0, (3, 9), 0), "num_sequences must be at least 1; got 0"),
        (lambda: selective_copying(5, 15, 0), "must hold 16 symbols to recall; got a length of 15"),
        (lambda: counting(torch.tensor([2, 0])), r"at least 1; got \[2, 0\]"),
    ],
    ids=["adding", "parity", "none", "context", "counting"],
)
def test_impossible_tasks_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()
