"""The kernels in Triton compile for GPUs of several generations, which needs none of them."""

import os
from inspect import signature

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from lightning_accel.ops import grouped_triton  # noqa: E402
from lightning_accel.ops.scan import triton as scan  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted"),
]

INDICES = {"ends", "groups", "last_tiles"}
GROUPED = {"TILE_ROWS": 64, "TILE_OUT": 64, "TILE_IN": 32}
KERNELS = {
    "rows": (grouped_triton._rows_kernel, {"x", "weight", "out"}, GROUPED),
    "groups": (grouped_triton._groups_kernel, {"left", "right", "out"}, GROUPED),
    "scan": (scan._forward_kernel, {"gate", "value", "state", "out"}, {}),
    "scan backward": (
        scan._backward_kernel,
        {"grad", "gate", "out", "state", "d_gate", "d_value", "d_state"},
        {},
    ),
}


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_for(name, dtype, capability):
    kernel, tensors, constants = KERNELS[name]
    constants = dict(constants)
    if name.startswith("scan"):
        constants |= {"WIDE": triton.language.float32, "TILE_STEPS": scan._TILE_STEPS}
        constants |= {"TILE_CHANNELS": scan._TILE_CHANNELS}
    else:
        constants["PRECISION"] = "ieee" if dtype == "fp32" else "tf32"
    types = {}
    for argument in signature(kernel.fn).parameters:
        if argument in constants:
            types[argument] = "constexpr"
        elif argument in tensors:
            types[argument] = f"*{dtype}"
        elif argument in INDICES:
            types[argument] = "*i64"
        else:
            types[argument] = "*i1" if argument == "starts" else "i32"
    compiled = triton.compile(ASTSource(kernel, types, constants), target=GPUTarget("cuda", capability, 32))
    assert compiled.asm["cubin"]
