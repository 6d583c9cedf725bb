"""The kernels of notebooks/custom_ops.ipynb, taken from it."""

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "custom_ops.ipynb"
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu(kernels=True))]


@pytest.fixture(autouse=True)
def kernels(compiler, monkeypatch):
    """That they cannot be built is an error, where anything can be."""
    monkeypatch.setenv("LIGHTNING_ACCEL_NATIVE", "1")


@cache
def tutorial() -> SimpleNamespace:
    """What the cells up to the one that builds define; under names of its own, as each library is registered once."""
    names: dict[str, object] = {"__name__": "__main__"}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code" and "LIBRARY" not in names:
            source = "".join(cell["source"]).replace("tutorial_add", "tutorial_add_tested")
            exec(compile(source, cell["id"], "exec"), names)
    return SimpleNamespace(**names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (5, 3), (300, 1001)])
@pytest.mark.parametrize("device", DEVICES)
def test_is_the_sum_to_the_last_bit(device, shape, dtype):
    a, b = torch.randn(2, *shape, dtype=dtype, device=device)
    assert tutorial().LIBRARY.serves(a.device)
    for pair in ((a, b), (a.T, b.T)) if len(shape) == 2 else ((a, b),):
        assert torch.equal(torch.ops.tutorial_add_tested.add(*pair), pair[0] + pair[1])
        assert torch.equal(tutorial().add(*pair), pair[0] + pair[1])


@pytest.mark.parametrize("device", DEVICES)
def test_derivatives_and_registrations(device):
    pair = [torch.randn(4, 3, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2)]
    assert tutorial().LIBRARY.serves(pair[0].device)
    assert gradcheck(tutorial().add, pair)
    assert gradgradcheck(tutorial().add, pair)
    torch.library.opcheck(torch.ops.tutorial_add_tested.add.default, pair)


@pytest.mark.parametrize("device", DEVICES)
def test_what_the_kernel_does_not_take_is_left_to_torch(device):
    add = tutorial().add
    a, b = torch.randn(2, 4, 3, device=device)
    assert torch.equal(add(a, b[:1]), a + b[:1])
    assert torch.equal(add(a, b.double()), a + b.double())
    assert torch.equal(add(a.half(), b.half()), a.half() + b.half())


@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_refuses_what_it_cannot_read(device):
    a, b = torch.randn(2, 4, 3, device=device)
    assert tutorial().LIBRARY.serves(a.device)
    for pair in ((a, b[:1]), (a, b.double())):
        with pytest.raises(RuntimeError, match="a and b must be alike"):
            torch.ops.tutorial_add_tested.add(*pair)
    with pytest.raises(RuntimeError, match="must be float32 or float64"):
        torch.ops.tutorial_add_tested.add(a.half(), b.half())


@pytest.mark.gpu(2, kernels=True)
def test_runs_where_the_tensors_are():
    with torch.cuda.device(0):
        a, b = torch.randn(2, 4, 3, device="cuda:1")
        assert torch.equal(tutorial().add(a, b), a + b)


@pytest.mark.gpu(kernels=True)
def test_runs_on_the_current_stream():
    a = torch.zeros(1 << 20, device="cuda")
    assert tutorial().LIBRARY.serves(a.device)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        a.add_(1)
        out = tutorial().add(a, a)
    stream.synchronize()
    assert torch.equal(out, torch.full_like(a, 2))
