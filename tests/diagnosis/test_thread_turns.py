import pytest
import torch

from lightning_accel.diagnosis.thread_turns import BATCHES, ThreadTurns
from lightning_accel.measure import Segment, Step


def step(ms, part="forward"):
    return Step((Segment(part, part, 0, round(1e6 * ms)),))


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def run(ms, batches):
    """Return turns of three threads and one, and steps that take ``ms(batch, threads)``."""
    turns, steps = ThreadTurns(3, 1), []
    for batch in range(batches):
        steps.append(step(ms(batch, torch.get_num_threads())))
        turns.end_batch()
    return turns, steps


def test_turns_see_a_difference_through_a_load_that_grows():
    turns, steps = run(lambda batch, threads: 100 + batch + 5 * threads, 8 * BATCHES)
    # 10 ms, and the growth from turn to turn counts as often for more as for fewer threads, but for one
    assert turns.saved_ms(steps) == pytest.approx(10 - BATCHES)
    turns, steps = run(lambda batch, threads: 100 + batch + 5 * threads, 9 * BATCHES)
    assert turns.saved_ms(steps) == pytest.approx(10)


def test_seldom_long_steps_count_and_the_first_of_a_turn_does_not():
    def ms(batch, threads):
        return 1000 if batch % BATCHES == 0 else 40 if batch % BATCHES == 2 and threads == 3 else 10

    turns, steps = run(ms, 4 * BATCHES)
    assert turns.saved_ms(steps) == pytest.approx(30 / (BATCHES - 1))


def test_unchanged_batches_have_all_threads_and_are_not_the_first_of_a_turn():
    turns, steps = run(lambda batch, threads: threads, 3 * BATCHES)
    unchanged = [each for each, counts in zip(steps, turns.unchanged(), strict=True) if counts]
    assert [each.wall_ns for each in unchanged] == 2 * (BATCHES - 1) * [3_000_000]


def test_validation_does_not_count_and_one_turn_tells_nothing():
    turns, steps = run(lambda batch, threads: 10 * threads, 2 * BATCHES)
    steps[2] = step(5000, "validation")
    assert turns.saved_ms(steps) == pytest.approx(20)
    assert turns.saved_ms(steps[:BATCHES]) is None
