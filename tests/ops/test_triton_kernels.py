"""The kernels in Triton compile for GPUs of several generations, which needs none of them."""

import os
from inspect import signature

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from lightning_accel.ops import grouped_triton, row_sums_triton  # noqa: E402
from lightning_accel.ops.scan import triton as scan  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted"),
]

FLOAT32 = triton.language.float32
SHARED_KIB = {80: 163, 90: 227, 100: 227}  # of a block, by the programming guide of CUDA
OF_DTYPE = {"x", "weight", "bias", "out", "left", "right", "rows", "gate", "value", "grad", "state"}
POINTERS = {
    **dict.fromkeys(OF_DTYPE | {"d_gate", "d_value", "d_state"}, ""),
    **dict.fromkeys(["weights", "dots", "products", "growths"], "*fp32"),
    **dict.fromkeys(["ends", "source", "order", "bounds"], "*i64"),
    "starts": "*i1",
}
GROUPED = {"PRECISION": "tf32", "GROUPS": 16}
SUMS = {"WIDE": FLOAT32, "TILE": row_sums_triton._TILE, "ROWS": 8}
SCAN = {"WIDE": FLOAT32, "REVERSE": True}
OF_CHUNKS = ["products", "ends", "growths"]
KERNELS = {  # constants, configurations, and the tensors that may be missing
    "rows": (
        grouped_triton._rows_kernel,
        GROUPED,
        grouped_triton._configs(grouped_triton._ROW_TILES),
        ["bias", "source"],
    ),
    "groups": (
        grouped_triton._groups_kernel,
        GROUPED,
        grouped_triton._configs(grouped_triton._GROUP_TILES),
        ["source"],
    ),
    "sums": (row_sums_triton._sum_kernel, SUMS, [triton.Config({})], ["weights", "order"]),
    "spread": (row_sums_triton._spread_kernel, SUMS, [triton.Config({})], ["weights", "rows"]),
    "scan, chunks": (scan._chunks_kernel, SCAN, scan._measured_chunks_kernel.configs, ["starts"]),
    "scan": (scan._forward_kernel, SCAN, scan._measured_forward_kernel.configs, ["starts", "state", *OF_CHUNKS]),
    "scan backward": (
        scan._backward_kernel,
        SCAN,
        scan._measured_backward_kernel.configs,
        ["starts", "state", *OF_CHUNKS],
    ),
}


def compile_for(kernel, constants, config, dtype, capability, missing=()):
    constants = constants | config.kwargs | dict.fromkeys(missing)
    types, attributes = {}, {}
    for number, argument in enumerate(signature(kernel.fn).parameters):
        if argument.endswith(("_in", "_column")) and argument != "num_in":
            constants[argument] = 1  # features are adjacent
        if argument in constants:
            types[argument] = "constexpr"
            continue
        pointer = "*fp32" if argument == "ends" and "TILE_STEPS" in constants else POINTERS.get(argument)
        types[argument] = "i32" if pointer is None else pointer or f"*{dtype}"
        attributes[(number,)] = [["tt.divisibility", 16]]
    constants = {name: value for name, value in constants.items() if name in types}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    source = ASTSource(kernel, types, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_for(name, dtype, capability):
    kernel, constants, configs, optional = KERNELS[name]
    compiled = [compile_for(kernel, constants, config, dtype, capability) for config in configs]
    compiled.append(compile_for(kernel, constants, configs[0], dtype, capability, optional))
    assert all(one.asm["cubin"] for one in compiled)
    assert min(one.metadata.shared for one in compiled[:-1]) <= SHARED_KIB[capability] << 10  # one at least runs


@pytest.mark.parametrize("name", ["rows", "groups"])
@pytest.mark.parametrize(("capability", "instruction"), [(80, "mma.sync"), (90, "wgmma.mma"), (100, "tcgen05.mma")])
def test_products_run_on_tensor_cores_and_load_ahead(name, capability, instruction):
    kernel, constants, configs, _ = KERNELS[name]
    for config in configs:
        text = compile_for(kernel, constants, config, "bf16", capability).asm["ptx"]
        assert instruction in text
        assert "cp.async" in text
