"""How fast, small and good is a language model whose weights have 8 or 4 bits, beside what is made by hand?

python benchmarks/bench_weight_only.py [--quick] [--seeds 0 1 2] [--steps 1500] [--width 1024 --layers 12]
    [--forms int4 "int4 by hand"] [--json FILE] [--choice]

A small Llama of transformers, trained on the bytes that Python carries, gives the perplexity, per byte of 1,024 windows
of the test text; 64 training windows calibrate. A Llama of random weights (width, layers), gives the speed: tokens a
second of a prompt of 128, and of single tokens after it, with a cache, batch 1, one thread, by the median call, in
blocks that take turns; and the memory of a process that has nothing but the file. By hand: ONNX Runtime's own
MatMulNBitsQuantizer with its defaults but for accuracy_level=4, without which nothing is gained, and torchao's
Int8WeightOnlyConfig, compiled, in bfloat16. With --choice the package makes, measures and picks among all forms itself.
"""

import argparse
import copy
import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from bench_one_shot import NUM_TEST, calls_of, train, windows_of_text
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from onnxruntime.quantization.onnx_model import ONNXModel
from torch import Tensor, nn

from lightning_accel import TextDataModule
from lightning_accel.callbacks.deployment.memory import memory_of
from lightning_accel.compress import CachedDecoder, measure_latency
from lightning_accel.compress.calls import Inputs, Run
from lightning_accel.compress.quantization.decoding import quantize_decoder
from lightning_accel.compress.quantization.form import Form, export
from lightning_accel.compress.quantization.layers import Layers, find_layers
from lightning_accel.compress.quantization.onnx import OnnxCall, onnx_float, write_float_files
from lightning_accel.compress.quantization.onnx_blockwise import onnx_int4, onnx_int8
from lightning_accel.compress.quantization.quantized import judge
from lightning_accel.compress.quantization.trial import Limit
from lightning_accel.compress.quiet import suppress_output
from lightning_accel.compress.report.perplexity import Perplexity
from lightning_accel.compress.report.progress import Progress
from lightning_accel.compress.report.report import saved_bytes

PROMPT = 128


def fold_transposes(graph: onnx.GraphProto) -> None:
    """Store weights as their products take them: the optimizer has not seen those that are in a file of their own."""
    weights = {one.name: one for one in graph.initializer}
    for node in [node for node in graph.node if node.op_type == "Transpose" and node.input[0] in weights]:
        weight = weights[node.input[0]]
        turned = np.ascontiguousarray(onnx.numpy_helper.to_array(weight).T)
        weight.CopyFrom(onnx.numpy_helper.from_array(turned, node.output[0]))
        graph.node.remove(node)


def by_hand(module: nn.Module, inputs: list[Inputs], layers: Layers, bits: int) -> Form:
    """Make a form of the file that ONNX Runtime's quantizer makes."""
    with tempfile.TemporaryDirectory() as folder, suppress_output():
        files = write_float_files(module, inputs, Path(folder))
        graph = ONNXModel(onnx.load(files.ready))
    fold_transposes(graph.model.graph)
    graph.replace_gemm_with_matmul()
    quantizer = MatMulNBitsQuantizer(graph.model, bits=bits, accuracy_level=4)
    quantizer.process()
    content = quantizer.model.model.SerializeToString()
    name = f"int{bits} by hand, ONNX Runtime"
    return Form(name, OnnxCall(content, files.structure, files.dtypes), onnx=content, file_bytes=len(content))


MAKERS = {
    "int8 by hand": partial(by_hand, bits=8),
    "int4 by hand": partial(by_hand, bits=4),
    "int8": onnx_int8,
    "int4": onnx_int4,
    "fp32": onnx_float,
}
TORCHAO = "int8 torchao"


def forms(module: nn.Module, inputs: list[Inputs], wanted: Sequence[str] = tuple(MAKERS)) -> list[Form]:
    layers = find_layers(module)
    made = [Form("fp32 eager", module, file_bytes=saved_bytes(module))]
    for make in (make for name, make in MAKERS.items() if name in wanted):
        start = time.perf_counter()
        made.append(make(module, inputs, layers))
        print(f"{made[-1].name}: made in {time.perf_counter() - start:.0f} s", flush=True)
    return made


def torchao_by_hand(decoder: nn.Module) -> Run:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    copied = copy.deepcopy(decoder).bfloat16()
    quantize_(copied, Int8WeightOnlyConfig())
    compiled = torch.compile(copied, dynamic=False)

    def run(*args: Tensor) -> Any:
        return compiled(*(one.bfloat16() if one.is_floating_point() else one for one in args))

    return run


@torch.no_grad()
def perplexity(run: Callable[[Tensor], Any], data: TextDataModule) -> float:
    found = Perplexity()
    for tokens in islice(data.test_dataloader(), NUM_TEST // data.batch_size):
        logits = run(tokens[:, :-1])
        found.add(F.cross_entropy(logits.float().transpose(1, 2), tokens[:, 1:], reduction="none").flatten())
    assert found.value is not None
    return found.value


def quality(seeds: list[int], steps: int) -> dict[str, list[float]]:
    data = windows_of_text()
    found: dict[str, list[float]] = {}
    for seed in seeds:
        model = train("Llama", seed, steps, "cpu", data)
        for form in forms(model, calls_of(data, model.device)):
            found.setdefault(form.name, []).append(perplexity(form.run, data))
    return found


def random_llama(width: int, layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32_000, hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=max(1, width // 256), max_position_embeddings=2 * PROMPT,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def memory(decoder: nn.Module, form: Form, calls: list[Inputs]) -> int | None:
    """Return the bytes that a process needs for a form's file, None if there is no file or the process fails."""
    if form.program is None and form.onnx is None:
        return None
    try:
        return memory_of(decoder, form, calls, 600)
    except (RuntimeError, TimeoutError) as error:
        print(f"memory of {form.name}: {error}", flush=True)
        return None


@torch.no_grad()
def speed(width: int, layers: int, seconds: float, wanted: Sequence[str]) -> dict[str, dict[str, float | None]]:
    decoder = CachedDecoder(random_llama(width, layers), 2 * PROMPT).eval()
    calls = decoder.calls(torch.randint(0, 32_000, (1, PROMPT)))
    others = [Form("int8 by hand, torchao, bf16", torchao_by_hand(decoder))] if TORCHAO in wanted else []
    made = [*forms(decoder, calls, wanted), *others]
    prompt, following = (
        measure_latency({form.name: partial(form.run, *args) for form in made}, seconds) for args, _ in calls
    )
    made[0].program = export(decoder, calls)
    found = {}
    for form in made:
        rates = {"prompt": 1e3 * PROMPT / prompt[form.name].p50_ms, "next": 1e3 / following[form.name].p50_ms}
        print(f"{form.name}: {rates['prompt']:.1f} tokens/s of a prompt, {rates['next']:.2f} next", flush=True)
        found[form.name] = rates | {"bytes": form.file_bytes}
    return {form.name: found[form.name] | {"memory": memory(decoder, form, calls)} for form in made}


def choice(width: int, layers: int, seconds: float) -> None:
    """Let the package pick a form of the decoder, as Quantization does beside Export(max_length=...)."""
    model = random_llama(width, layers)
    texts = list(torch.randint(0, 32_000, (2, 1, PROMPT)))

    @torch.no_grad()
    def evaluate(run: Run) -> dict[str, float]:
        found = Perplexity()
        for text in texts:
            logits = run(text).logits[:, :-1]
            found.add(F.cross_entropy(logits.float().transpose(1, 2), text[:, 1:], reduction="none").flatten())
        assert found.value is not None
        return {"perplexity": found.value}

    progress = Progress(partial(print, flush=True), "choice")
    limit = Limit(evaluate, "perplexity", 1e6, higher_is_better=False)  # weights are random
    judged = judge(model, [((text,), {}) for text in texts], "weight_only", limit=limit, progress=progress)
    decoder = CachedDecoder(model, 2 * PROMPT).eval()
    found = quantize_decoder(
        decoder, texts, judged, seconds=seconds, memory=partial(memory_of, decoder), progress=progress
    )
    assert found.report is not None
    found.report.print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 steps of one seed, and a small model's speed")
    parser.add_argument(
        "--seeds", type=int, nargs="*", default=[0, 1, 2], help="of the perplexities; none: speed alone"
    )
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument(
        "--forms", nargs="+", choices=[*MAKERS, TORCHAO], default=[*MAKERS, TORCHAO], help="of the speed"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--choice", action="store_true", help="the package's own choice of a form, after the speed")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("onnxruntime").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    seeds, steps, size = options.seeds, options.steps, (options.width, options.layers)
    if options.quick:
        seeds, steps, size = [0], 20, (256, 2)
    perplexities = quality(seeds, steps) if seeds else {}
    print("\n| form | perplexity, mean | of each seed |\n|---|---:|---|")
    for name, values in perplexities.items():
        print(f"| {name} | {statistics.mean(values):.4f} | {', '.join(f'{one:.4f}' for one in values)} |", flush=True)
    speeds = speed(*size, 0.5 if options.quick else 20, options.forms)
    print(f"\nLlama of width {size[0]}, {size[1]} layers")
    print("| form | tokens/s, prompt | tokens/s, next | file, MB | memory, MB |\n|---|---:|---:|---:|---:|")
    for name, row in speeds.items():
        sizes = ("" if row[key] is None else f"{row[key] / 1e6:.0f}" for key in ("bytes", "memory"))
        print(f"| {name} | {row['prompt']:.0f} | {row['next']:.1f} | {' | '.join(sizes)} |")
    if options.choice:
        choice(*size, 0.5 if options.quick else 10)
    if options.json:
        options.json.write_text(json.dumps({"perplexity": perplexities, "speed": speeds}, indent=1))


if __name__ == "__main__":
    main()
