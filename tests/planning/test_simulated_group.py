"""Collectives of a process that is alone."""

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh

from lightning_accel.planning.simulated_group import simulated_world
from lightning_accel.planning.simulated_peers import Peers, Unanswered
from tests.ranks import run_ranks

# torch 2.13 renames what torch 2.11 has under its old name alone
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")


@pytest.fixture
def recorded():
    found = []

    def record(name, size, ranks, tensors):
        found.append((name, size, list(ranks)))

    with simulated_world(6, record):
        yield found
    assert not dist.is_initialized()


def test_collectives_are_answered_as_if_all_held_the_same(recorded):
    mine = torch.tensor([4, 5])
    everywhere = torch.empty(6, 2, dtype=torch.long)
    dist.all_gather_into_tensor(everywhere.view(-1), mine)
    assert everywhere.tolist() == [[4, 5]] * 6
    parts = [torch.zeros(2, dtype=torch.long) for _ in range(6)]
    dist.all_gather(parts, mine)
    assert [part.tolist() for part in parts] == [[4, 5]] * 6
    arriving = torch.empty(6, dtype=torch.long)
    dist.all_to_all_single(arriving, torch.arange(6) + 7)  # the others send to this one what it sends to itself
    assert arriving.tolist() == [7] * 6
    objects = [None] * 6
    dist.all_gather_object(objects, {"a": 1})
    assert objects == [{"a": 1}] * 6
    assert [(name, size) for name, size, _ in recorded[:3]] == [
        ("all_gather", 96),
        ("all_gather", 96),
        ("all_to_all", 48),
    ]


def test_one_process_gathers_and_scatters(recorded):
    mine = torch.tensor([4, 5])
    parts = [torch.zeros(2, dtype=torch.long) for _ in range(6)]
    dist.gather(mine, parts)
    assert [part.tolist() for part in parts] == [[4, 5]] * 6
    objects, taken = [None] * 6, [None]
    dist.gather_object("a", objects)
    assert objects == ["a"] * 6
    dist.scatter(mine, [torch.tensor([rank, 1]) for rank in range(6)])
    assert mine.tolist() == [0, 1]
    dist.scatter_object_list(taken, [*range(6)])
    assert taken == [0]
    dist.gather(mine, dst=3)  # which does not exist
    dist.scatter(mine, src=3)


def test_groups_have_their_own_members(recorded):
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("outer", "inner"))
    dist.all_reduce(torch.ones(4), group=mesh.get_group("inner"))
    dist.reduce_scatter_tensor(torch.ones(2), torch.ones(4), group=mesh.get_group("outer"))
    dist.barrier(dist.new_group([0, 5], backend="gloo"))
    assert recorded[-3:] == [("all_reduce", 16, [0, 1, 2]), ("reduce_scatter", 16, [0, 3]), ("barrier", 0, [0, 5])]


def test_functional_collectives_come_here(recorded):
    assert all_reduce(torch.ones(3), "sum", dist.group.WORLD).tolist() == [1.0, 1.0, 1.0]
    assert recorded[-1] == ("all_reduce", 12, list(range(6)))


def test_integers_are_added_up(recorded):
    count = torch.tensor([2, 3])
    dist.all_reduce(count)
    assert count.tolist() == [12, 18]
    dist.all_reduce(count, dist.ReduceOp.MAX)
    assert count.tolist() == [12, 18]


def test_processes_that_are_simulated_one_after_another():
    peers, said = Peers(), []
    peers.count = 2

    def simulate(rank):
        peers.begin(rank, lambda tensor: True)
        with simulated_world(6, lambda *called: None, peers):
            assert dist.get_rank() == rank
            pair = dist.new_group([0, 1])
            objects, sums = [None] * 2, torch.tensor(10 + rank)
            dist.all_gather_object(objects, rank, pair)
            dist.all_reduce(sums, group=pair)
            gradient, vote = torch.zeros(3), torch.zeros(1, dtype=torch.int32)
            if rank == 0:
                dist.send(torch.tensor([1.0, 2.0]), 1)
                dist.send(torch.tensor(3.0), 1)
                dist.send(torch.empty(0), 1)
                dist.recv(gradient, 1)
                dist.send(torch.tensor([5], dtype=torch.int32), 1)
                dist.recv(vote, 1)
                assert vote.tolist() == [5]
            else:
                arrived = torch.zeros(2)
                dist.recv(arrived, 0)
                assert arrived.tolist() == [1.0, 2.0]
                dist.recv(number := torch.zeros(()), 0)
                assert number == 3.0
                dist.recv(torch.empty(0), 0)
                dist.send(gradient, 0)
                dist.recv(vote, 0)
                dist.send(vote, 0)
            last = [rank]
            dist.broadcast_object_list(last, 1, pair)
            said.append((objects, int(sums), last))

    with pytest.raises(Unanswered):
        simulate(0)
    for rank in (1, 0, 1):
        simulate(rank)
    assert said[1:] == [([0, 1], 21, [1])] * 2


def plan_within_a_group(rank):
    with pytest.raises(RuntimeError, match="in a process group already"), simulated_world(2, lambda *called: None):
        pass
    L.seed_everything(1)


def test_a_process_of_a_real_group_is_refused():
    run_ranks(plan_within_a_group)
