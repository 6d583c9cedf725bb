"""Each task against a slow formula of its own."""

import pytest
import torch

from lightning_accel.data.sequences.splits import adding_problem, digit_pixels


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


def test_seed_alone_decides():
    torch.manual_seed(1)
    first = adding_problem(5, (3, 9), 4)
    torch.manual_seed(2)
    assert adding_problem(5, (3, 9), 4).steps.equal(first.steps)
    assert adding_problem(5, (3, 9), 4).lengths.equal(first.lengths)
    other = adding_problem(5, (3, 9), 5)
    assert not (other.lengths.equal(first.lengths) and other.steps.equal(first.steps))


def test_impossible_lengths_are_refused():
    with pytest.raises(ValueError, match=r"pair \(least, most\) from 2 up; got \(1, 9\)"):
        adding_problem(5, (1, 9), 0)
