"""The order of rows: what each stream takes, how well rows are mixed."""

import numpy as np
import pytest

from lightning_accel.data.shards.streams import StreamPlan, choose_streams

ROWS = np.array([7, 3, 11, 1, 6, 9, 4])


def order_of(plan):
    """Return (block, row) of each position."""
    found = np.empty((plan.num_rows, 2), np.int64)
    shuffled = [plan.rows_of(place) for place in range(len(plan.order))]
    for stream in range(plan.streams):
        rows = np.arange(len(range(stream, plan.num_rows, plan.streams)))
        places, within = plan.locate(stream, rows)
        if plan.seed is not None:
            within = [shuffled[place][row] for place, row in zip(places, within, strict=True)]
        found[stream :: plan.streams] = np.stack([plan.order[places], within], axis=1)
    return [*map(tuple, found.tolist())]


@pytest.mark.parametrize("streams", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", [None, 5])
def test_every_row_has_one_position(streams, seed):
    found = order_of(StreamPlan(ROWS, streams, seed, epoch=2))
    assert sorted(found) == [(block, row) for block, rows in enumerate(ROWS) for row in range(rows)]


def test_files_are_read_in_order_without_a_seed():
    assert order_of(StreamPlan(ROWS, 1)) == [(block, row) for block, rows in enumerate(ROWS) for row in range(rows)]


def test_seed_and_epoch_alone_determine_the_order():
    first = order_of(StreamPlan(ROWS, 3, 5, 2))
    assert order_of(StreamPlan(ROWS, 3, 5, 2)) == first
    assert order_of(StreamPlan(ROWS, 3, 5, 1)) != first != order_of(StreamPlan(ROWS, 3, 6, 2))


def test_blocks_and_the_rows_of_each_are_shuffled_anew_in_each_epoch():
    plans = [StreamPlan(ROWS, 3, 5, epoch) for epoch in (0, 1)]
    assert not np.array_equal(plans[0].order, plans[1].order)
    rows = [plan.rows_of(plan.order.tolist().index(2)).tolist() for plan in plans]
    assert sorted(rows[0]) == sorted(rows[1]) == [*range(11)]
    assert rows[0] != rows[1]


def test_processes_that_divide_the_streams_read_no_block_twice_but_where_streams_end():
    plan = StreamPlan(np.full(48, 10), 12, seed=0)
    found = order_of(plan)
    blocks = [{block for block, _ in found[rank::4]} for rank in range(4)]
    assert sum(map(len, blocks)) <= 48 + 3


@pytest.mark.slow
@pytest.mark.parametrize(("streams", "size"), [(24, 64), (8, 64), (48, 16)])
def test_means_of_batches_of_sorted_files_are_as_near_as_the_docstring_says(streams, size):
    """The variance of a batch's mean is at most (1 / n + 1 / S) times that of a row, over batches and seeds."""
    rows, deviations = np.full(480, 20), []
    for seed in range(8):
        plan = StreamPlan(rows, streams, seed)
        values = np.array([block for block, _ in order_of(plan)]) / len(rows)
        means = values[: len(values) // size * size].reshape(-1, size).mean(axis=1)
        deviations.append(np.square(means - 0.5).mean() * 12)  # in variances of a uniform value
    assert np.mean(deviations) < 1.15 * (1 / size + 1 / streams)  # 1.15: eight draws
    assert np.mean(deviations) > 0.5 / size


def test_memory_and_blocks_limit_the_streams():
    assert choose_streams(np.full(1000, 5), np.full(1000, 100), 20_000) == 96
    assert choose_streams(np.full(1000, 5), np.full(1000, 100), 10**9) == 192
    assert choose_streams(np.full(5, 5), np.full(5, 100), 10**9) == 4
    assert choose_streams(np.full(5, 5), np.array([1, 1, 1, 1, 10**6]), 10) == 1
