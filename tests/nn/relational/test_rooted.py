"""Features of nodes and their triples by the kernel: against the formulas in torch, which triples one by one check."""

import itertools

import pytest
import torch
from torch.autograd import forward_ad

from lightning_accel.nn.relational import rooted
from lightning_accel.nn.relational.rooted import rooted_features
from lightning_accel.ops.native import KERNELS
from lightning_accel.ops.triples.find import find_triples

SIZES = [(0, 0), (1, 0), (5, 12), (12, 60), (40, 70)]  # of nodes and entries: none, few, dense, sparse


def draw(num_nodes, num_entries, features, rank, weighted, dtype=torch.float64, seed=0):
    random = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(max(1, num_nodes), (2, num_entries), generator=random)
    triples = find_triples(edge_index, num_nodes)
    shapes = [(num_nodes, features), (num_nodes, 2 * rank), (triples.edge.shape[1], rank)][: 3 if weighted else 2]
    tensors = [torch.randn(shape, generator=random).to(dtype).requires_grad_() for shape in shapes]
    return tensors, triples


def run(function, tensors, triples, **options):
    out = function(tensors[0], tensors[1], tensors[2] if len(tensors) > 2 else None, triples)
    grad = torch.randn(out.shape[::-1], generator=torch.Generator().manual_seed(9)).T.to(out.dtype)
    return [out, *torch.autograd.grad(out, tensors, grad, **options)]


@pytest.mark.parametrize("weighted", [False, True])
def test_features_and_gradients_are_those_of_the_formula(weighted, native):
    for (nodes, entries), features, rank in itertools.product(SIZES, (0, 3), (1, 17)):
        tensors, triples = draw(nodes, entries, features, rank, weighted)
        found = run(rooted_features, tensors, triples)
        assert "RootedFeatures" in type(found[0].grad_fn).__name__
        for one, expected in zip(found, run(rooted._formula, tensors, triples), strict=True):
            torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
def test_second_derivatives_and_batched_gradients(weighted, native):
    tensors, triples = draw(5, 12, 2, 3, weighted)
    weight = tensors[2] if weighted else None

    def of(x, maps):
        return rooted_features(x, maps, weight, triples)

    assert torch.autograd.gradgradcheck(of, tensors[:2])
    penalties = [
        torch.autograd.grad(sum((g**2).sum() for g in run(f, tensors, triples, create_graph=True)[1:]), tensors[1:])
        for f in (rooted_features, rooted._formula)
    ]
    for one, expected in zip(*penalties, strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-9)
    out = rooted_features(tensors[0], tensors[1], weight, triples)
    directions = torch.randn(2, *out.shape, dtype=out.dtype)
    batched = torch.autograd.grad(out, tensors, directions, is_grads_batched=True, retain_graph=True)
    for i, direction in enumerate(directions):
        single = torch.autograd.grad(out, tensors, direction, retain_graph=True)
        for one, expected in zip(batched, single, strict=True):
            torch.testing.assert_close(one[i], expected)


def test_equal_results_on_any_number_of_threads(native):
    tensors, triples = draw(1500, 9000, 3, 5, True, torch.float32)
    runs = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            runs.append(run(rooted_features, tensors, triples))
        finally:
            torch.set_num_threads(before)
    assert all(map(torch.equal, *runs))


def test_dense_graphs_are_summed_in_float64(native):
    complete = torch.combinations(torch.arange(60)).T[:, 1:]  # without an edge: sums over wedges nearly cancel
    triples = find_triples(complete, 60)
    random = torch.Generator().manual_seed(0)
    tensors = [(1 + torch.randn(60, width, generator=random)).requires_grad_() for width in (3, 10)]
    exact = [one.detach().double().requires_grad_() for one in tensors]
    found, expected = run(rooted_features, tensors, triples), run(rooted._formula, exact, triples)
    assert found[0].dtype == torch.float32
    for one, other in zip(found, expected, strict=True):
        largest = other.detach().abs().amax(dim=0)
        assert ((one.double() - other).abs() <= 1e-5 * largest + 1e-6).all()


@pytest.mark.parametrize("weighted", [False, True])
def test_transforms_and_forward_mode_agree_with_gradients(weighted, native):
    (x, maps, *weight), triples = draw(12, 60, 3, 5, weighted)
    x, maps, weight = x.detach(), maps.detach(), weight[0].detach() if weighted else None
    jacobian = torch.autograd.functional.jacobian(lambda one: rooted_features(x, one, weight, triples), maps)
    tangent = torch.randn_like(maps)

    def of(one):
        return rooted_features(x, one, weight, triples)

    torch.testing.assert_close(torch.func.jacrev(of)(maps), jacobian)
    along = (jacobian * tangent).sum((2, 3))
    torch.testing.assert_close(torch.func.jvp(of, (maps,), (tangent,))[1], along)
    with forward_ad.dual_level():
        torch.testing.assert_close(forward_ad.unpack_dual(of(forward_ad.make_dual(maps, tangent))).tangent, along)
    torch.testing.assert_close(torch.func.vmap(of)(torch.stack([maps, tangent]))[0], of(maps))


def test_without_kernels_the_formula_takes_over(native):
    tensors, triples = draw(12, 60, 3, 5, True)
    with KERNELS.switched_off():
        assert all(map(torch.equal, *(run(f, tensors, triples) for f in (rooted_features, rooted._formula))))
