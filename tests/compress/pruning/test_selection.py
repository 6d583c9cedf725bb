import pytest
import torch

from lightning_accel.compress.pruning.selection import Part, choose_lowest
from tests.ranks import run_ranks


def lowest_by_sorting(scores, count):
    chosen = torch.zeros(len(scores), dtype=torch.bool)
    chosen[scores.argsort(stable=True)[:count]] = True
    return chosen


def random_scores(trial):
    """Many equal ones, of both signs, zeros of both signs among them; in every other trial any numbers."""
    lengths = torch.randint(1, 40, (3,)).tolist()
    scores = [torch.randint(-3, 4, (length,)) * torch.tensor(-0.5) for length in lengths]
    if trial % 2:
        scores = [torch.randn(len(one)) * 10 ** torch.randint(-40, 38, (len(one),)).float() for one in scores]
    return scores


@pytest.mark.parametrize("trial", range(40))
def test_the_lowest_are_those_of_a_stable_sort(trial):
    torch.manual_seed(trial)
    scores = random_scores(trial)
    joined = torch.cat(scores)
    count = int(torch.randint(0, len(joined) + 1, ()))
    (chosen,) = choose_lowest([[Part(one, len(one)) for one in scores]], [count])
    assert torch.cat(chosen).equal(lowest_by_sorting(joined, count))
    counts = [int(torch.randint(0, len(one) + 1, ())) for one in scores]
    for (mask,), one, number in zip(
        choose_lowest([[Part(one, len(one))] for one in scores], counts), scores, counts, strict=True
    ):
        assert mask.equal(lowest_by_sorting(one, number))


def check_parts(rank):
    """Rows are dealt in blocks of unequal length; the second tensor is held by both, the third by the second alone."""

    def reduce(value):
        torch.distributed.all_reduce(value)
        return value

    for trial in range(20):
        torch.manual_seed(trial)
        scores = random_scores(trial)
        start, end = ((0, 1), (1, len(scores[0])))[rank]
        parts = [
            Part(scores[0][start:end], len(scores[0]), lambda at, start=start: at + start),
            Part(scores[1], len(scores[1]), counts=rank == 0),
            Part(scores[2] if rank else None, len(scores[2])),
        ]
        joined = torch.cat(scores)
        count = int(torch.randint(0, len(joined) + 1, ()))
        ((first, second, third),) = choose_lowest([parts], [count], reduce, "cpu")
        expected = lowest_by_sorting(joined, count).split([len(one) for one in scores])
        assert first.equal(expected[0][start:end]), trial
        assert second.equal(expected[1]), trial
        assert third.equal(expected[2]) if rank else third is None, trial


def test_parts_of_processes_are_chosen_from_as_one():
    run_ranks(check_parts)
