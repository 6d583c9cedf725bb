"""Products of float32 matrices by oneDNN in torch's place: against float64, and what is left to torch."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch.backends import mkldnn

from lightning_accel.measure.flops import precision_of_products
from lightning_accel.ops import matmul
from lightning_accel.ops.matmul import (
    keep_matmul_precision,
    multiplies_by_onednn,
    replace_matmul,
    restore_matmul,
    takes_onednn,
    why_no_onednn_matmul,
)

M, K, N, B = 130, 121, 99, 3  # 1.56 million multiplications, on one thread enough


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def replaced(native, one_thread):
    if reason := why_no_onednn_matmul():
        pytest.skip(reason)
    replace_matmul()
    yield
    restore_matmul()


@pytest.fixture
def products(capfd):
    """Return a function that returns how many products oneDNN computed in a call, and what it returned."""

    def count(call):
        capfd.readouterr()
        with mkldnn.verbose(mkldnn.VERBOSE_ON):
            result = call()
        return capfd.readouterr().out.count("exec,cpu,matmul"), result

    return count


def drawn(*sizes):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def error(found, expected):
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


def close(found, expected):
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert error(found, expected) < 1e-6


A, W, A3, W3 = drawn(M, K), drawn(K, N), drawn(B, M, K), drawn(B, K, N)
ROW, BIAS, BIAS3 = drawn(N), drawn(M, N), drawn(B, M, N)
NAN = torch.full((M, N), torch.nan)
SERVED = {
    "mm": (torch.mm, (A, W), {}),
    "transposed": (torch.mm, (A.t().contiguous().t(), W.t().contiguous().t()), {}),
    "sliced": (torch.mm, (drawn(M, 2 * K)[:, K:], drawn(2 * K, N)[::2]), {}),
    "expanded": (torch.mm, (drawn(1, K).expand(M, K), W), {}),
    "mm.out": (torch.mm, (A, W), {"out": torch.empty(M, N)}),
    "addmm": (torch.addmm, (ROW, A, W), {}),
    "a sum without its first term": (torch.addmm, (NAN, A, W), {"beta": 0}),
    "a factor that is a boolean": (torch.addmm, (BIAS, A, W), {"beta": True}),
    "addmm.out": (torch.addmm, (BIAS, A, W), {"out": torch.empty(M, N)}),
    "addmm_": (lambda x, a, w: x.clone().addmm_(a, w), (BIAS, A, W), {}),
    "bmm": (torch.bmm, (A3, W3), {}),
    "transposed batches": (torch.bmm, (A3.mT.contiguous().mT, W3.mT.contiguous().mT), {}),
    "an expanded batch": (torch.bmm, (A3, W.expand(B, K, N)), {}),
    "bmm.out": (torch.bmm, (A3, W3), {"out": torch.empty(B, M, N)}),
    "baddbmm": (torch.baddbmm, (ROW, A3, W3), {}),
    "baddbmm.out": (torch.baddbmm, (BIAS3, A3, W3), {"out": torch.empty(B, M, N)}),
    "baddbmm_": (lambda x, a, w: x.clone().baddbmm_(a, w), (BIAS3, A3, W3), {}),
    "linear": (F.linear, (A3, W.t().contiguous(), ROW), {}),
    "einsum": (torch.einsum, ("bmk,bkn->bnm", A3, W3), {}),
}


@pytest.mark.parametrize("name", SERVED)
def test_onednn_multiplies(replaced, products, name):
    operation, arguments, options = SERVED[name]
    in_float64 = [x.double() if isinstance(x, torch.Tensor) else x for x in arguments]
    expected = operation(*in_float64, **{key: value for key, value in options.items() if key != "out"})
    count, found = products(lambda: operation(*arguments, **options))
    assert count == 1
    if operation in (torch.mm, torch.bmm, torch.addmm, torch.baddbmm):
        assert takes_onednn(*(one.shape for one in arguments[-2:]))
    close(found, expected)
    if "out" in options:
        assert found is options["out"]


def within(a, w):
    a = a.clone()
    return torch.mm(a[:200], w, out=a[200:])


LEFT = {
    "few terms": (torch.mm, (drawn(M, 100), drawn(100, N))),
    "narrow matrices": (torch.mm, (drawn(9000, 70), drawn(70, 4))),
    "short sums": (torch.mm, (drawn(900, 7), drawn(7, 900))),
    "vectors": (torch.mv, (drawn(3000, 3000), drawn(3000))),
    "float64": (torch.mm, (A.double(), W.double())),
    "another factor": (lambda x, a, w: torch.addmm(x, a, w, alpha=2.0), (BIAS, A, W)),
    "a share of the first term": (lambda x, a, w: torch.addmm(x, a, w, beta=0.5), (BIAS, A, W)),
    "another order of the result": (lambda a, w: torch.mm(a, w, out=a.new_empty(N, M).t()), (A, W)),
    "a result without a size": (lambda a, w: torch.mm(a, w, out=a.new_empty(0)), (A, W)),
    "a result in the memory of a matrix": (within, (drawn(400, 150), drawn(150, 150))),
}


@pytest.mark.parametrize("name", LEFT)
def test_torch_multiplies(replaced, products, name):
    operation, arguments = LEFT[name]
    expected = operation(*(x.double() for x in arguments))
    count, found = products(lambda: operation(*arguments))
    assert count == 0
    if name in ("few terms", "narrow matrices", "short sums"):
        assert not takes_onednn(*(one.shape for one in arguments))
    assert error(found, expected) < 1e-6


def test_matrices_of_a_batch_count_together(replaced, products):
    for sizes in ((90, 90), (B, 90, 90)):
        x = drawn(*sizes)
        assert takes_onednn(sizes, sizes) == (len(sizes) == 3)
        assert products(lambda x=x: x @ x)[0] == (len(sizes) == 3)


def test_threads_share_the_terms(replaced, products):
    torch.set_num_threads(2)
    assert products(lambda: A @ W)[0] == 0
    assert products(lambda: torch.cat([A, A]) @ W)[0] == 1


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_torch_can_switch_onednn_off(replaced, products):
    with mkldnn.flags(enabled=False):
        assert products(lambda: A @ W)[0] == 0


def test_gradients_are_products_of_onednn(replaced, products):
    x, w, bias = (one.clone().requires_grad_() for one in (A, W.t().contiguous(), ROW))
    grad = drawn(M, N)
    count, found = products(lambda: torch.autograd.grad(F.linear(x, w, bias), (x, w, bias), grad))
    assert count == 3
    inputs = [one.detach().double().requires_grad_() for one in (x, w, bias)]
    for one, expected in zip(found, torch.autograd.grad(F.linear(*inputs), inputs, grad.double()), strict=True):
        close(one, expected)


def test_errors_are_torchs(replaced):
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        A @ W.t()
    with pytest.raises(RuntimeError, match="Expected size for first two dimensions of batch2"):
        torch.bmm(A3, W3[:2])
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.mm(A, W, out=torch.empty(1, N).expand(M, N))
    with pytest.raises(RuntimeError, match="same dtype"):
        A @ W.double()
    with pytest.raises(RuntimeError, match=r"must match|not match"):
        torch.addmm(drawn(N - 1), A, W)


def test_torchs_kernels_are_back_when_all_have_restored_them(replaced, products):
    replace_matmul()
    restore_matmul()
    assert products(lambda: A @ W)[0] == 1
    restore_matmul()
    assert products(lambda: A @ W)[0] == 0
    replace_matmul()
    assert products(lambda: A @ W)[0] == 1


def test_threads_replace_and_multiply_at_once(replaced):
    """Each writes to the same tables, if they are written to."""

    def turns(call):
        return [call() for _ in range(200)]

    with ThreadPoolExecutor(4) as pool:
        toggled = [pool.submit(turns, lambda: (replace_matmul(), restore_matmul())) for _ in range(2)]
        found = [pool.submit(turns, lambda: A @ W) for _ in range(2)]
        assert len([one.result() for one in toggled]) == 2
        for one in found:
            assert all(error(product, A.double() @ W.double()) < 1e-6 for product in one.result()[::40])
    assert matmul.multiplies_by_onednn()


@pytest.mark.parametrize(
    ("vendor", "has_mkl", "multiplies", "outruns"),
    [
        ("AuthenticAMD", True, True, True),
        ("GenuineIntel", True, True, False),
        ("AuthenticAMD", True, False, False),
        ("AuthenticAMD", False, True, False),
        (None, True, True, True),
    ],
)
def test_onednn_outruns_mkl_on_amds_processors(tmp_path, monkeypatch, vendor, has_mkl, multiplies, outruns):
    monkeypatch.setattr(matmul, "_CPUINFO", tmp_path / "cpuinfo")
    if vendor:
        matmul._CPUINFO.write_text(f"processor : 0\nvendor_id\t: {vendor}\nflags\t: avx2 avx512f\n")
    monkeypatch.setattr(matmul.platform, "processor", lambda: "AMD64 Family 26, AuthenticAMD")
    monkeypatch.setattr(matmul, "onednn_multiplies_float32", lambda: multiplies)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: has_mkl)
    assert matmul.onednn_outruns_mkl() == outruns


@pytest.mark.slow
def test_compiled_layers_call_it(replaced, products):
    torch.compiler.reset()
    layer = torch.nn.Linear(K, N)
    compiled = torch.compile(layer)
    compiled(A)
    count, found = products(lambda: compiled(A))
    assert count == 1
    close(found, layer.double()(A.double()))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("onednn_multiplies_float32", False, "oneDNN has no AVX-512 here"),
        ("missing_kernel", "no compiler", "no compiler"),
    ],
)
def test_it_says_why_not(native, one_thread, products, monkeypatch, name, value, reason):
    monkeypatch.setattr(matmul, "onednn_multiplies_float32", lambda: True)
    monkeypatch.setattr(matmul, name, lambda: value)
    if not torch.backends.mkl.is_available():
        pytest.skip("torch without MKL has this as its reason")
    with pytest.raises(RuntimeError, match=f"in place of MKL: {reason}.*Leave onednn_matmul off"):
        replace_matmul()
    assert products(lambda: A @ W)[0] == 0


@pytest.mark.parametrize("setting", [None, "high", "cuda", "mkldnn"])
def test_precision_is_kept_whichever_of_torchs_settings_it_was_set_by(setting):
    def current():
        try:
            return torch.get_float32_matmul_precision(), *(backend.fp32_precision for backend in backends.values())
        except RuntimeError:  # the older setting cannot say what the newer one has changed
            return "mixed", *(backend.fp32_precision for backend in backends.values())

    backends = {name: getattr(torch.backends, name).matmul for name in ("cuda", "mkldnn")}
    with keep_matmul_precision():
        if setting in backends:
            backends[setting].fp32_precision = "bf16" if setting == "mkldnn" else "tf32"
        elif setting:
            torch.set_float32_matmul_precision(setting)
        before = current()
        assert multiplies_by_onednn() == (setting == "mkldnn")
        is_tf32 = setting in ("high", "cuda")
        assert precision_of_products("32-true", torch.device("cuda")) == ("tf32" if is_tf32 else "fp32")
        with keep_matmul_precision():
            torch.set_float32_matmul_precision("medium")
            assert multiplies_by_onednn()
        assert current() == before
    assert current()[0] == "highest"
