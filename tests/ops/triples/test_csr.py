import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from lightning_accel.ops import csr_sum, find_triples, neighbour_sum, triangle_sum
from lightning_accel.ops.triples.csr import csr_sum_reference


def triangle_sum_reference(x, y, triples):
    """By products (E, R) of the ends of edges."""
    u, v = triples.edge
    product = x[u] * x[v] if y is None else x[u] * y[v] + x[v] * y[u]
    # each corner of a triangle gets the product of the opposite side
    return torch.zeros_like(x).index_add(0, triples.triangle.flatten(), product[triples.side.flatten()])


def matrix(num_rows=4, num_columns=6, share=0.4):
    """A 0/1 matrix with an empty row and an empty column, and both its forms."""
    dense = (torch.rand(num_rows, num_columns) < share).double()
    dense[1], dense[:, 2] = 0, 0
    return dense, *csr(dense), *csr(dense.T)


def csr(dense):
    return torch.cat([torch.zeros(1, dtype=torch.long), dense.sum(1).long().cumsum(0)]), dense.nonzero()[:, 1]


@pytest.mark.parametrize("share", [0, 0.4, 1])
@pytest.mark.parametrize("num_channels", [0, 1, 5])
def test_is_the_product_with_a_matrix(share, num_channels):
    dense, rowptr, col, transposed_rowptr, transposed_col = matrix(share=share)
    x = torch.randn(6, num_channels, dtype=torch.float64)
    out = csr_sum(rowptr, col, x, transposed_rowptr, transposed_col)
    torch.testing.assert_close(out, dense @ x)
    torch.testing.assert_close(csr_sum_reference(rowptr, col, x), dense @ x)


def test_no_rows_and_no_columns():
    none, start = torch.zeros(0, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    assert csr_sum(start, none, torch.zeros(2, 3), torch.zeros(3, dtype=torch.long), none).shape == (0, 3)
    assert csr_sum(torch.zeros(3, dtype=torch.long), none, torch.zeros(0, 3), start, none).tolist() == [[0] * 3] * 2


def test_takes_rows_that_lie_apart_in_memory():
    dense, *graph = matrix()
    x = torch.randn(3, 6, dtype=torch.float64).T
    torch.testing.assert_close(csr_sum(*graph[:2], x, *graph[2:]), dense @ x)


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_derivatives(check):
    _, rowptr, col, *transposed = matrix()
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    assert check(lambda x: csr_sum(rowptr, col, x, *transposed), x)


def graph(num_nodes=40, num_entries=400):
    return find_triples(torch.randint(num_nodes, (2, num_entries)), num_nodes)


def factors(num_nodes, num_channels, dtype=torch.float32):
    return [torch.randn(num_nodes, num_channels).to(dtype).requires_grad_() for _ in range(2)]


def sums(x, y, triples):
    return neighbour_sum(x, triples), triangle_sum(x, y, triples), triangle_sum(x, None, triples)


def test_float32_matches_the_twins_over_several_blocks(monkeypatch):
    triples = graph()
    monkeypatch.setattr("lightning_accel.ops.triples.products._BLOCK_BYTES", {"cpu": 0, "other": 0})  # 64 edges
    x, y = factors(40, 5)
    references = (
        csr_sum_reference(triples.rowptr, triples.col, x),
        triangle_sum_reference(x, y, triples),
        triangle_sum_reference(x, None, triples),
    )
    probe = torch.randn(40, 5)
    for out, expected in zip(sums(x, y, triples), references, strict=True):
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        found, wanted = (torch.autograd.grad((o * probe).sum(), (x, y), allow_unused=True) for o in (out, expected))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_factors_are_summed_in_float32(dtype):
    triples = graph()
    x, y = factors(40, 5, dtype)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = sums(x, y, triples)
        narrow[1].sum().backward()
    assert x.grad.dtype == dtype
    for out, exact in zip(narrow, sums(x.double(), y.double(), triples), strict=True):
        assert out.dtype == torch.float32
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-4)


def test_the_wider_dtype_holds():
    triples, (x, y) = graph(), factors(40, 5)
    torch.testing.assert_close(triangle_sum(x, y.double(), triples), triangle_sum(x.double(), y.double(), triples))
    assert triangle_sum(x.bfloat16(), y.double(), triples).dtype == torch.float64


@pytest.mark.parametrize("num_threads", [1, 2])
def test_bits_are_the_same_each_time(num_threads):
    triples, before = graph(300, 6_000), torch.get_num_threads()
    x, y = torch.randn(2, 300, 32)
    torch.set_num_threads(num_threads)
    try:
        first = sums(x, y, triples)
        assert all(torch.equal(a, b) for _ in range(5) for a, b in zip(first, sums(x, y, triples), strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_are_sound_operations():
    triples = graph(8, 30)
    x, y = factors(8, 3, torch.float64)
    csr_arguments = triples.rowptr, triples.col, x, triples.rowptr, triples.col
    torch.library.opcheck(torch.ops.lightning_accel.csr_sum.default, csr_arguments)
    structure = triples.edge, triples.triangle_edge, triples.third_rowptr, triples.third
    for arguments in ((x, y, *structure), (x, None, *structure)):
        torch.library.opcheck(torch.ops.lightning_accel.triangle_product.default, arguments)


@pytest.mark.slow
def test_compiles_whole_for_graphs_of_any_size():
    compiled = torch.compile(sums, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_nodes in (30, 50, 71):
        triples = graph(num_nodes, 300)
        x, y = factors(num_nodes, 3, torch.float64)  # compiled it takes the formula, whose order is another
        found, wanted = compiled(x, y, triples), sums(x, y, triples)
        torch.testing.assert_close(found, wanted)
        grads = [torch.autograd.grad(sum(o.square().sum() for o in out), (x, y)) for out in (found, wanted)]
        torch.testing.assert_close(*grads)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_cuda_matches_cpu(dtype):
    triples = graph(500, 20_000)
    on_device = find_triples(triples.edge.cuda(), 500)
    for here, there in zip(triples, on_device, strict=True):
        assert torch.equal(here, there.cpu())
    x, y = factors(500, 32, dtype)
    results = []
    for device, structure in (("cpu", triples), ("cuda", on_device)):
        pair = [factor.detach().to(device).requires_grad_() for factor in (x, y)]
        out = sums(*pair, structure)
        results.append([t.cpu() for t in (*out, *torch.autograd.grad(sum(o.sum() for o in out), pair))])
    torch.testing.assert_close(*results, rtol=0.02, atol=0.02)


@pytest.mark.gpu
def test_cuda_repeats_its_bits_where_that_is_asked_for():
    triples = find_triples(graph(500, 20_000).edge.cuda(), 500)
    x, y = torch.randn(2, 500, 32, device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        first = sums(x, y, triples)
        assert all(torch.equal(a, b) for _ in range(5) for a, b in zip(first, sums(x, y, triples), strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
