import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks


def check_sum(rank, start):
    total = torch.tensor(start + rank)
    dist.all_reduce(total)
    return os.getpid(), int(total)


def check_fails_on_rank_1(rank):
    if rank == 1:
        raise ValueError("planted")
    dist.barrier()


def check_dies_on_rank_0(rank):
    if rank == 0:
        os.write(2, b"planted")
        os.abort()


def check_hangs_on_rank_0(rank):
    if rank == 0:
        time.sleep(600)


class SlowToArrive:
    """As a check whose module takes long to import."""

    def __reduce__(self):
        return time.sleep, (11,)


def check_arrived(rank, slow):
    return rank


def test_ranks_talk_and_processes_are_reused():
    first, second = run_ranks(check_sum, 1), run_ranks(check_sum, 10)
    assert [total for _, total in first + second] == [3, 3, 21, 21]
    assert [pid for pid, _ in first] == [pid for pid, _ in second]
    assert len({os.getpid(), *(pid for pid, _ in first)}) == 3


def test_tests_that_start_ranks_are_one_group_and_the_rest_of_a_file_another(request):
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("needs pytest -n")
    items = [item for item in request.session.items if item.path == request.path]
    groups = {item.originalname: item.nodeid.rpartition("@")[2] for item in items}
    assert groups["test_ranks_talk_and_processes_are_reused"] == "ranks"
    assert groups[request.node.originalname] == "tests/test_ranks.py"


@pytest.mark.slow
def test_world_size_is_free():
    assert [total for _, total in run_ranks(check_sum, 0, world_size=4)] == [6, 6, 6, 6]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "said"),
    [
        (check_fails_on_rank_1, r"rank 1: .*planted"),
        (
            check_dies_on_rank_0,
            r"rank 0: the process died, exit code -6\nplantedFatal Python error: Aborted.*check_dies",
        ),
    ],
)
def test_failure_is_reported_and_the_next_call_works(check, said):
    with pytest.raises(AssertionError, match=f"(?s){said}"):
        run_ranks(check)
    assert [total for _, total in run_ranks(check_sum, 1)] == [3, 3]


@pytest.mark.weekly
@pytest.mark.slow
def test_a_hanging_rank_is_named():
    with pytest.raises(AssertionError, match="rank 0: no answer in 10 s"):
        run_ranks(check_hangs_on_rank_0, timeout_s=10)


@pytest.mark.slow
@pytest.mark.weekly
def test_the_time_limit_is_not_for_starting_and_importing():
    assert run_ranks(check_arrived, SlowToArrive(), timeout_s=10) == [0, 1]
