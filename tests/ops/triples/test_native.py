"""The C++ kernels of find_triples against the formula in torch."""

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_accel.ops import find_triples, triangle_sum
from lightning_accel.ops.native import KERNELS
from lightning_accel.ops.triples import find as triples_module

pytestmark = pytest.mark.usefixtures("native")


def random_graph(num_nodes, num_entries):
    return torch.randint(num_nodes, (2, num_entries))


def graph_with_hubs(num_nodes=3000, num_entries=20_000):
    """Some nodes with thousands of neighbours, first, last and in the middle of the numbers."""
    ends = (torch.rand(2, num_entries, dtype=torch.float64).pow(4) * num_nodes).long()
    ends[:, ::3] = num_nodes - 1 - ends[:, ::3]
    ends[0, ::7] = num_nodes // 2
    return ends


def both(edge_index, num_nodes, triangle_index=None):
    with KERNELS.switched_off():
        expected = find_triples(edge_index, num_nodes, triangle_index)
    return find_triples(edge_index, num_nodes, triangle_index), expected


def assert_same(actual, expected):
    for name, found, wanted in zip(actual._fields, actual, expected, strict=True):
        assert found.dtype == wanted.dtype, name
        assert torch.equal(found, wanted), name


@pytest.mark.parametrize(
    ("num_nodes", "num_entries"), [(0, 0), (1, 3), (5, 0), (40, 300), (300, 9000), (5000, 40_000)], ids=str
)
def test_kernels_list_what_the_formula_does(num_nodes, num_entries):
    edge_index = random_graph(max(num_nodes, 1), num_entries)
    triples, expected = both(edge_index, num_nodes)
    assert_same(triples, expected)
    shuffled = triples.triangle[:, torch.randperm(triples.triangle.shape[1])]
    assert_same(*both(edge_index, num_nodes, shuffled))


def test_hubs_are_searched_not_gone_through():
    triples, expected = both(graph_with_hubs(), 3000)
    assert triples.rowptr.diff().max() > 1000
    assert_same(triples, expected)


def test_edges_may_have_any_strides():
    edge_index = random_graph(30, 200)
    assert_same(find_triples(edge_index.T.contiguous().T, 30), find_triples(edge_index, 30))
    assert_same(find_triples(edge_index[:, ::2], 30), find_triples(edge_index[:, ::2].contiguous(), 30))


def test_any_number_of_threads_gives_the_same():
    edge_index = graph_with_hubs()
    expected = find_triples(edge_index, 3000)
    for threads in (2, 3, 5):
        torch.set_num_threads(threads)
        try:
            assert_same(find_triples(edge_index, 3000), expected)
        finally:
            torch.set_num_threads(1)


class Found(torch.utils.data.Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return find_triples(graph_with_hubs(), 3000).triangle.sum()


def test_workers_find_them_after_threads_ran_in_the_parent():
    torch.set_num_threads(3)
    try:
        find_triples(graph_with_hubs(), 3000)
        loader = DataLoader(Found(), batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=600)
        assert all(int(number) > 0 for number in loader)
    finally:
        torch.set_num_threads(1)


@pytest.mark.slow
def test_ops_are_registered_right():
    kernels = torch.ops.lightning_accel_native
    edge_index = random_graph(12, 60)
    triples = find_triples(edge_index, 12)
    torch.library.opcheck(kernels.simple_graph.default, (edge_index, 12))
    torch.library.opcheck(kernels.find_triangles.default, (triples.edge, 12))
    torch.library.opcheck(kernels.group_triangles.default, (triples.triangle, triples.side, 12, triples.edge.shape[1]))
    for dtype in (torch.float32, torch.float64):
        x, y = torch.randn(2, 12, 5, dtype=dtype)
        for other in (y, None):
            torch.library.opcheck(kernels.triangle_products.default, (x, other, triples.triangle))


def test_ops_refuse_what_is_no_graph():
    kernels = torch.ops.lightning_accel_native
    edge, triangle = torch.tensor([[0, 0, 1], [1, 2, 2]]), torch.tensor([[0], [1], [2]])
    x = torch.ones(2, 3)
    for call, message in [
        (lambda: kernels.simple_graph(edge, 2), "nodes from 0 to num_nodes - 1"),
        (lambda: kernels.simple_graph(edge[0], 3), r"edge_index must be \(2, M\) int64"),
        (lambda: kernels.simple_graph(edge.int(), 3), r"edge_index must be \(2, M\) int64"),
        (lambda: kernels.find_triangles(edge.flip(0), 3), "edge must list nodes u < v"),
        (lambda: kernels.find_triangles(edge.flip(1), 3), "lexicographic order"),
        (lambda: kernels.group_triangles(triangle, triangle, 2, 3), "of nodes and edges of the graph"),
        (lambda: kernels.group_triangles(triangle, triangle, 3, 2), "of nodes and edges of the graph"),
        (lambda: kernels.triangle_products(x, None, triangle), "triangle must be of nodes of the graph"),
        (lambda: kernels.triangle_products(x, None, triangle - 1), "triangle must be of nodes of the graph"),
        (
            lambda: kernels.triangle_products(x, x.double(), triangle - 1),
            r"x and y must be \(N, R\) float32 or float64",
        ),
        (lambda: kernels.triangle_products(x, x[:, :1], triangle - 1), r"x and y must be \(N, R\) float32 or float64"),
        (lambda: kernels.triangle_products(x.half(), None, triangle), r"x and y must be \(N, R\) float32 or float64"),
        (lambda: kernels.triangle_products(x, None, triangle[:2]), r"triangle must be \(3, T\) int64"),
        (lambda: kernels.simple_graph(edge[:, :0], -1), "num_nodes must be 0 or more"),
        (lambda: kernels.find_triangles(edge[:, :0], -1), "num_nodes must be 0 or more"),
        (lambda: kernels.group_triangles(triangle[:, :0], triangle[:, :0], -1, 3), "num_nodes must be 0 or more"),
        (lambda: kernels.group_triangles(triangle[:, :0], triangle[:, :0], 3, -1), "num_edges must be 0 or more"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            call()


def test_tensors_of_several_devices_are_refused():
    triangle = torch.tensor([[0], [1], [2]])
    with pytest.raises(ValueError, match="one device; got triangle on cpu, side on meta"):
        torch.ops.lightning_accel_native.group_triangles(triangle, triangle.to("meta"), 3, 3)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("channels", [1, 19, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_over_triangles_and_their_gradients_are_the_formulas(dtype, channels, threads):
    """With columns that do not fill the last slab of a thread, and tensors of any strides."""
    triples = find_triples(random_graph(60, 900), 60)
    wide = torch.randn(2, channels, 60, dtype=torch.float64)
    x, y = (one.to(dtype).T.requires_grad_() for one in wide)
    tolerance = {"rtol": 1e-4, "atol": 1e-3} if dtype == torch.float32 else {}
    torch.set_num_threads(threads)
    try:
        for other in (y, None):
            given = [x] if other is None else [x, other]
            out = triangle_sum(x, other, triples)
            grads = torch.autograd.grad(out.square().sum(), given, create_graph=True)
            seconds = torch.autograd.grad(grads[0].sum(), given)
            exact = [one.detach().double().requires_grad_() for one in given]
            with KERNELS.switched_off():
                wanted = triangle_sum(exact[0], None if other is None else exact[1], triples)
                first = torch.autograd.grad(wanted.square().sum(), exact, create_graph=True)
                second = torch.autograd.grad(first[0].sum(), exact)
            scale = [float(one.detach().abs().max()) for one in (wanted, first[0], second[0])]
            for found, expected, size in zip((out, grads, seconds), (wanted, first, second), scale, strict=True):
                pairs = [(found, expected)] if isinstance(found, torch.Tensor) else zip(found, expected, strict=True)
                for a, b in pairs:
                    assert a.dtype == dtype
                    torch.testing.assert_close(a.double() / size, b / size, **tolerance)
    finally:
        torch.set_num_threads(1)


def test_sums_over_triangles_are_taken_by_the_kernel(monkeypatch):
    """In place of the formula, and not within transforms, which kernels do not know."""
    triples = find_triples(random_graph(20, 150), 20)
    x = torch.randn(20, 4, dtype=torch.float64)
    by_formula = []
    formula = triples_module.triangle_product
    monkeypatch.setattr(triples_module, "triangle_product", lambda *given: by_formula.append(1) or formula(*given))
    plain = triangle_sum(x, None, triples)
    assert not by_formula
    each = torch.func.vmap(lambda one: triangle_sum(one, None, triples))(torch.stack([x, 2 * x]))
    assert by_formula
    torch.testing.assert_close(each, torch.stack([plain, 4 * plain]))


def test_gradients_of_many_outputs_at_once():
    triples = find_triples(random_graph(20, 150), 20)
    x, y = torch.randn(2, 20, 4, dtype=torch.float64).requires_grad_()
    out = triangle_sum(x, y, triples)
    many = torch.randn(3, 20, 4, dtype=torch.float64)
    grads = torch.autograd.grad(out, (x, y), many, retain_graph=True, is_grads_batched=True)
    each = [torch.autograd.grad(out, (x, y), one, retain_graph=True) for one in many]
    for found, expected in zip(grads, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(expected))
