"""Compilation of a graph whose weights are constants, with inductor's own templates of matrix products or without."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_accel._private.torch import compile_graph, has_amx
from lightning_accel.compress.quantization.inputs import noise_share
from lightning_accel.compress.quiet import suppress_output
from lightning_accel.compress.report.latency import measure_latency, speedup
from lightning_accel.ops.matmul import keep_matmul_precision, onednn_outruns_mkl

Compilation = Callable[..., Any]

MIN_MS = 0.2  # of a call; what is faster is mostly overhead, which templates do not change
MAX_NOISE = 1e-2  # rounding to int8 multiplies differences in the order of sums


def compile_frozen(graph: torch.fx.GraphModule, inputs: Sequence[Tensor], max_autotune: bool = False) -> Compilation:
    """Compile a graph, its weights as constants, for inputs of these sizes.

    Float32 products are oneDNN's where it is faster than MKL, which inductor would take for known sizes.

    Args:
        graph: an exported program's.
        inputs: arguments of a call.
        max_autotune: take inductor's own templates of matrix products where they are faster.
    """
    with keep_matmul_precision():
        if onednn_outruns_mkl():  # inductor takes it where products may be rounded; the setting when they run decides
            torch.set_float32_matmul_precision("medium")
        return compile_graph(graph, inputs, {"freezing": True, "max_autotune": max_autotune})


def autotuned(
    graph: torch.fx.GraphModule, tensors: Sequence[Tensor], plain: Compilation, tune: Callable[[], Compilation]
) -> Compilation:
    """Return the faster of two compilations of ``graph`` for a call with ``tensors``.

    On CPUs, int8 products of few rows are up to three times as fast by the C++ templates of ``max_autotune`` as by
    oneDNN's kernels; those of many rows are not always, and in some graphs templates fail. Float products have gained
    nothing but on CPUs with AMX, so others are not compiled twice.

    Args:
        graph: that was compiled.
        tensors: arguments of the call.
        plain: ``graph`` compiled without ``max_autotune``; takes tensors, returns tensors.
        tune: compiles ``graph`` with ``max_autotune``.
    """

    def calls(compilation: Compilation) -> Callable[[], Any]:
        def call() -> Any:
            with torch.inference_mode(False), torch.no_grad():  # inference mode would need a further compilation
                return compilation(*tensors)

        return call

    if not _has_templates(graph, tensors):
        return plain
    if measure_latency({"plain": calls(plain)}, seconds=0.02)["plain"].p50_ms < MIN_MS:
        return plain
    try:
        with suppress_output():
            tuned = tune()
            outputs = calls(tuned)()
    except Exception:  # inductor's templates raise KeyError, compilers' errors and others
        return plain
    if not noise_share(calls(plain)(), outputs) < MAX_NOISE:
        return plain
    latencies = measure_latency({"plain": calls(plain), "tuned": calls(tuned)}, seconds=0.2)
    return tuned if speedup(latencies["tuned"], latencies["plain"]).is_faster else plain


def _has_templates(graph: torch.fx.GraphModule, tensors: Sequence[Tensor]) -> bool:
    """Return whether ``graph`` runs on a CPU and has integers of 8 bits, or bfloat16 where the CPU has AMX."""
    dtypes = {one.dtype for one in (*graph.parameters(), *graph.buffers())}
    values = (node.meta.get("val") for node in graph.graph.nodes if node.op != "placeholder")
    dtypes |= {one.dtype for one in values if isinstance(one, Tensor)}
    wanted = {torch.int8, torch.uint8} | ({torch.bfloat16} if has_amx() else set())
    return bool(dtypes & wanted) and all(one.device.type == "cpu" for one in tensors)
