import numpy as np
import pytest
import torch

from lightning_accel.data.graphs.sampler import BudgetPlan, GraphBudgetBatchSampler
from lightning_accel.data.samplers import Resumable

NODES = np.random.default_rng(0).lognormal(3, 1, 300).astype(int) + 1
EDGES = NODES * np.random.default_rng(1).integers(1, 9, 300)


def batches_of(sampler, epoch=0):
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_nodes": 700},
        {"max_edges": 2500},
        {"max_nodes": 700, "max_edges": 2500, "batch_size": 9},  # edges fill the budget first
        {"max_nodes": 450, "max_edges": 3500},  # nodes do
    ],
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_graph_comes_once_and_no_batch_is_beyond_the_budget(limits, shuffle):
    sampler = GraphBudgetBatchSampler(NODES, EDGES, **limits, shuffle=shuffle)
    for epoch in range(4):
        found = batches_of(sampler, epoch)
        assert sorted(row for rows in found for row in rows) == list(range(300))
        assert len(found) == len(sampler)
        assert max(NODES[rows].sum() for rows in found) <= limits.get("max_nodes", np.inf)
        assert max(EDGES[rows].sum() for rows in found) <= limits.get("max_edges", np.inf)
        assert max(map(len, found)) <= limits.get("batch_size", 300)
    assert (batches_of(sampler, 0) == batches_of(sampler, 1)) is not shuffle
    assert batches_of(sampler, 2) == batches_of(GraphBudgetBatchSampler(NODES, EDGES, **limits, shuffle=shuffle), 2)


def test_a_budget_is_used():
    """A batch has at most the largest graph's room left, as a bound on the number of batches."""
    for budget in (500, 1000, 5000):
        sampler = GraphBudgetBatchSampler(NODES, max_nodes=budget)
        fewest = NODES.sum() / budget
        assert len(sampler) <= fewest * budget / (budget - NODES.max()) + 1
    skewed = np.r_[np.full(400, 10), 990]
    assert len(GraphBudgetBatchSampler(skewed, max_nodes=1000)) <= 6  # not 401, nor 100: the large one comes alone


@pytest.mark.slow
def test_graphs_of_one_size_meet_by_lot_alone():
    """As often as in batches drawn uniformly: of 12 graphs in batches of 4, two meet in 3 of 11 epochs."""
    sampler = GraphBudgetBatchSampler([7] * 12, max_nodes=28)
    met = np.zeros((12, 12))
    for epoch in range(2000):
        for rows in batches_of(sampler, epoch):
            met[np.ix_(rows, rows)] += 1
    share = met[~np.eye(12, dtype=bool)] / 2000
    assert abs(share - 3 / 11).max() < 0.05  # five deviations
    assert [len(rows) for rows in sampler] == [4, 4, 4]


def test_graphs_of_unlike_sizes_meet_others_in_each_epoch():
    sampler = GraphBudgetBatchSampler(np.arange(1, 41), max_nodes=300)
    met = {frozenset(rows) for epoch in range(20) for rows in batches_of(sampler, epoch)}
    assert len(met) == 20 * len(sampler)


def test_large_and_small_graphs_are_dealt_to_and_fro():
    nodes = np.array([1, 8, 3, 6, 2, 7, 4, 5])
    parts = [batches_of(GraphBudgetBatchSampler(nodes, max_nodes=36, num_replicas=2, rank=rank)) for rank in (0, 1)]
    assert [[nodes[rows].tolist() for rows in part] for part in parts] == [[[8, 5, 4, 1]], [[7, 6, 3, 2]]]


def test_batches_hold_large_and_small_graphs_alike():
    sampler = GraphBudgetBatchSampler(NODES, max_nodes=1500)
    means = np.array([NODES[rows].mean() for rows in batches_of(sampler)])
    assert means.std() < 0.15 * means.mean()
    assert {len(rows) for rows in sampler} <= {300 // len(sampler), 300 // len(sampler) + 1}
    firsts = [batches_of(sampler, epoch)[0] for epoch in range(300)]
    counts = np.bincount(np.concatenate(firsts), minlength=300)
    assert counts.min() > 0  # every graph comes first some time
    assert abs(counts[NODES > 60].mean() / counts.mean() - 1) < 0.2


@pytest.mark.parametrize("replicas", [2, 3])
def test_processes_share_each_batch(replicas):
    whole = batches_of(GraphBudgetBatchSampler(NODES, EDGES, max_nodes=1500), 3)
    parts = [
        batches_of(GraphBudgetBatchSampler(NODES, EDGES, max_nodes=1500, num_replicas=replicas, rank=rank), 3)
        for rank in range(replicas)
    ]
    for number, batch in enumerate(whole):
        mine = [part[number] for part in parts]
        assert sorted(row for rows in mine for row in rows) == sorted(batch)
        assert max(map(len, mine)) - min(map(len, mine)) <= 1
        nodes = [NODES[rows].sum() for rows in mine]
        assert max(nodes) - min(nodes) <= NODES[batch].max()
    assert {len(part) for part in parts} == {len(whole)}


def test_a_stopped_epoch_goes_on_on_another_number_of_processes():
    saved = GraphBudgetBatchSampler(NODES, EDGES, 8, num_replicas=2, rank=1).state_after(5, 3)
    assert isinstance(GraphBudgetBatchSampler(NODES, max_nodes=500), Resumable)
    whole = batches_of(GraphBudgetBatchSampler(NODES, EDGES, 8), 5)
    for replicas in (1, 2, 4):
        rest = []
        for rank in range(replicas):
            sampler = GraphBudgetBatchSampler(NODES, EDGES, 8, num_replicas=replicas, rank=rank)
            sampler.load_state_dict(saved)
            sampler.set_epoch(5)
            assert sampler.first_batch == 3
            rest.append(list(sampler))
            assert len(batches_of(sampler, 6)) == len(whole)  # the next epoch is whole
        assert [sorted(row for part in parts for row in part) for parts in zip(*rest, strict=True)] == [
            sorted(rows) for rows in whole[3:]
        ]
    for change, said in (
        ({"seed": 1}, "seed=0 there, 1 here"),
        ({"batch_size": 9}, "batch_size=8 there, 9 here"),
        ({"nodes": NODES + 1}, "other sizes of the graphs"),
        ({"nodes": NODES[1:], "edges": EDGES[1:]}, "graphs=300 there, 299 here"),
    ):
        other = GraphBudgetBatchSampler(**{"nodes": NODES, "edges": EDGES, "batch_size": 8, **change})
        with pytest.raises(ValueError, match=said):
            other.load_state_dict(saved)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"nodes": [3, 9, 2], "max_nodes": 8}, "max_nodes=8 holds no graph of 9 nodes, as graph 1"),
        ({"nodes": [3, 9], "edges": [1, 7], "max_edges": 6}, "max_edges=6 holds no graph of 7 edges"),
        ({"nodes": [], "batch_size": 1}, "a batch needs graphs"),
        ({"nodes": [1, -1], "batch_size": 1}, "with -1"),
        ({"nodes": [1.5], "batch_size": 1}, "got float64"),
    ],
)
def test_what_cannot_be_is_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        GraphBudgetBatchSampler(**arguments)


def test_too_few_graphs_for_the_processes_are_refused_before_training():
    sampler = GraphBudgetBatchSampler([5, 5, 5], max_nodes=9, num_replicas=2, rank=0)
    for use in (len, lambda it: next(iter(it))):
        with pytest.raises(ValueError, match="each of 2 processes needs a graph of every batch, but one has 1"):
            use(sampler)
    sampler = GraphBudgetBatchSampler([5, 5, 5, 5], batch_size=4)
    sampler.deal_to(2, 1)
    assert len(next(iter(sampler))) == 2
    with pytest.raises(ValueError, match="made with num_replicas=2 and rank=1"):
        sampler.deal_to(4, 1)


def test_empty_graphs_cost_nothing():
    assert len(GraphBudgetBatchSampler(torch.zeros(5, dtype=torch.int64), max_nodes=3)) == 1
    assert len(BudgetPlan(np.zeros(5), 2)) == 3
