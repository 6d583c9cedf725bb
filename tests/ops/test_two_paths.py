import itertools

import pytest
import torch

from lightning_accel.ops import find_triples, num_two_paths, sample_two_paths, two_paths


def random_triples(num_nodes, num_entries):
    edge_index = torch.randint(max(num_nodes, 1), (2, num_entries if num_nodes else 0))
    return find_triples(edge_index, num_nodes)


def brute_force(triples):
    edges = {tuple(pair) for pair in triples.edge.T.tolist()}
    paths = []
    for centre in range(triples.num_nodes):
        row = triples.col[triples.rowptr[centre] : triples.rowptr[centre + 1]].tolist()
        paths += [(leaf, centre, other, (leaf, other) in edges) for leaf, other in itertools.combinations(row, 2)]
    return paths


def as_list(paths):
    return list(zip(*(tensor.tolist() for tensor in paths), strict=True))


@pytest.mark.parametrize(("num_nodes", "num_entries"), [(0, 0), (1, 3), (5, 0), (9, 14), (12, 40)])
@pytest.mark.parametrize("max_paths", [1, 4, 1000])
def test_every_path_once_in_chunks(num_nodes, num_entries, max_paths):
    triples = random_triples(num_nodes, num_entries)
    chunks = list(two_paths(triples, max_paths))
    expected = brute_force(triples)
    assert [path for chunk in chunks for path in as_list(chunk)] == expected
    assert num_two_paths(triples) == len(expected)
    assert all(len(chunk.leaf) == max_paths for chunk in chunks[:-1])


def test_a_hub_is_split():
    leaves = torch.arange(1, 100_001)
    triples = find_triples(torch.stack([torch.zeros_like(leaves), leaves]), 100_001)
    assert num_two_paths(triples) == 100_000 * 99_999 // 2
    first, second = itertools.islice(two_paths(triples, 99_998), 2)
    assert first.leaf.eq(1).all()
    assert first.other.tolist() == list(range(2, 100_000))
    assert (second.leaf[:2].tolist(), second.other[:2].tolist()) == ([1, 2], [100_000, 3])


def test_no_paths_at_a_time_is_refused():
    with pytest.raises(ValueError, match="max_paths must be at least 1; got 0"):
        next(two_paths(random_triples(4, 9), 0))


def test_samples_are_uniform():
    triples = random_triples(8, 14)
    paths = as_list(sample_two_paths(triples, 200_000, torch.Generator().manual_seed(0)))
    expected = brute_force(triples)
    counts = torch.tensor([paths.count(path) for path in expected])
    assert counts.sum() == 200_000
    share = 200_000 / len(expected)
    assert (counts - share).abs().max() < 5 * share**0.5


def test_samples_of_each_graph():
    edge_index = torch.tensor([[0, 1, 3, 5, 6, 7], [1, 2, 4, 6, 7, 8]])  # paths of 3, 2 and 4 nodes
    batch = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    paths = sample_two_paths(find_triples(edge_index, 9), 1000, torch.Generator().manual_seed(0), batch)
    assert batch[paths.centre].tolist() == [0] * 1000 + [2] * 1000
    counts = paths.centre.bincount(minlength=9)
    assert counts[1] == 1000
    assert (counts[6] - 500).abs() < 80
    assert counts[6] + counts[7] == 1000


@pytest.mark.parametrize("num_nodes", [0, 3])
def test_no_paths_give_no_samples(num_nodes):
    paths = sample_two_paths(random_triples(num_nodes, 0), 5)
    assert as_list(paths) == []
