import gc
import threading
import weakref

import pytest
import torch

from lightning_accel.ops import find_triples, triangle_sum, triples_of


def edges():
    return torch.tensor([[0, 1, 2, 2], [1, 2, 0, 3]])


@pytest.fixture
def searches(monkeypatch):
    """How often triples have been looked for."""
    calls = []

    def counted(*arguments):
        calls.append(arguments[1])
        return find_triples(*arguments)

    monkeypatch.setattr("lightning_accel.ops.triples.cache.find_triples", counted)
    return calls


@pytest.mark.parametrize("inference", [False, True])
def test_looks_once_until_something_changes(searches, inference):
    with torch.inference_mode(inference):
        edge_index = edges()
        first = triples_of(edge_index, 4)
        assert triples_of(edge_index, 4) is first
        assert triples_of(edge_index.clone(), 4) is not first  # the same values in another tensor
        assert triples_of(edge_index, 5).num_nodes == 5
        edge_index[:, 3] = torch.tensor([1, 3])
        assert triples_of(edge_index, 5).edge.T.tolist() == [[0, 1], [0, 2], [1, 2], [1, 3]]
    assert searches == [4, 4, 5, 5]


@pytest.mark.parametrize("inference", [False, True])
def test_known_triangles_belong_to_what_is_remembered(searches, inference):
    with torch.inference_mode(inference):
        edge_index, known = edges(), torch.tensor([[0], [1], [2]])
        first = triples_of(edge_index, 4, known)
        assert triples_of(edge_index, 4, known) is first
        assert triples_of(edge_index, 4, known.clone()) is not first
        assert triples_of(edge_index, 4).triangle.shape == (3, 1)
        assert triples_of(edge_index, 4, known[:, :0]).triangle.shape == (3, 0)
    assert len(searches) == 4


@pytest.mark.slow
def test_keeps_nothing_alive():
    edge_index = edges()
    triples = triples_of(edge_index, 4)
    alive = weakref.ref(edge_index), weakref.ref(triples.col)
    del edge_index, triples
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


@pytest.mark.parametrize("made_there", [False, True])
def test_what_is_found_in_inference_mode_serves_training(made_there):
    with torch.inference_mode(made_there):
        edge_index = edges()
    with torch.inference_mode():
        triples_of(edge_index, 4)
    x = torch.ones(4, 1, requires_grad=True)
    triangle_sum(x, None, triples_of(edge_index, 4)).sum().backward()
    assert x.grad.flatten().tolist() == [2, 2, 2, 0]


def test_threads_share_it():
    graphs, results = [edges() + i for i in range(8)], []

    def run():
        results.extend((i, triples_of(graph, 16)) for i, graph in enumerate(graphs) for _ in range(20))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 640
    for i, triples in results:
        assert triples.triangle.T.tolist() == [[i, i + 1, i + 2]]


def test_compiled_it_is_remembered_all_the_same(searches):
    compiled = torch.compile(lambda e: triples_of(e, 4).triangle + 1, backend="eager")
    edge_index = edges()
    for _ in range(2):
        assert compiled(edge_index).T.tolist() == [[1, 2, 3]]
    assert searches == [4]
