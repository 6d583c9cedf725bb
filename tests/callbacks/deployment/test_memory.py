"""Memory of a form in a process of its own, against the bytes of its weights."""

import pytest
import torch
from torch import nn

from lightning_accel.callbacks.deployment import memory
from lightning_accel.callbacks.deployment.memory import memory_of
from lightning_accel.compress.quantization.form import CannotConvertError, Form, export
from lightning_accel.compress.quantization.layers import find_layers
from lightning_accel.compress.quantization.onnx import onnx_float
from lightning_accel.compress.quantization.pt2e import torchao_weight_only


def small_form():
    module, call = nn.Linear(3, 2).eval(), ((torch.ones(4, 3),), {})
    return module, Form("fp32 eager", module, export(module, [call])), [call]


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["fp32 eager", *(pytest.param(kind, marks=pytest.mark.weekly) for kind in ("fp32 compiled", "fp32 ONNX Runtime"))],
)
def test_memory_holds_the_weights_and_little_else(kind):
    module = nn.Sequential(*(nn.Linear(2000, 2000) for _ in range(4))).eval()
    calls = [((torch.randn(size, 2000),), {}) for size in (6, 3)]
    weights = sum(4 * one.numel() for one in module.parameters())
    if kind == "fp32 ONNX Runtime":
        pytest.importorskip("onnxruntime")
        form = onnx_float(module, calls, find_layers(module))
    else:
        form = Form(kind, module if kind == "fp32 eager" else module.forward, export(module, calls))
    assert weights < memory_of(module, form, calls, 500) < 3 * weights


@pytest.mark.slow
@pytest.mark.weekly
def test_quantized_programs_are_loaded_and_run():
    pytest.importorskip("torchao")
    module = nn.Sequential(*(nn.Linear(2000, 2000) for _ in range(4))).eval()
    calls = [((torch.randn(size, 2000),), {}) for size in (6, 3)]
    weights = sum(4 * one.numel() for one in module.parameters())
    form = torchao_weight_only(module, calls, find_layers(module))
    assert weights / 4 < memory_of(module, form, calls, 500) < 4 * weights  # the compilation holds floats


def test_processes_that_fail_or_take_too_long_say_so(monkeypatch):
    module, form, calls = small_form()
    with pytest.raises(TimeoutError, match="a process takes longer than 0 s to load its file and run it"):
        memory_of(module, form, calls, seconds=0.01)
    monkeypatch.setattr(memory, "_COMMAND", "raise OSError('planted')")
    with pytest.raises(RuntimeError, match="cannot load its file and run it: OSError: planted"):
        memory_of(module, form, calls)
    with pytest.raises(CannotConvertError, match="it has no file: planted"):
        memory_of(module, Form("int8", module, no_file="planted"), calls)
