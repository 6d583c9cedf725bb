"""What does a mixture-of-experts layer cost, against the dense perceptron of equal active work, its limit?

python benchmarks/bench_moe.py [--quick] [--device cpu|cuda] [--dtypes float32 bfloat16] [--json FILE]

Forward and backward of one layer, gate included; SwiGLU experts, two a token. On a CPU: 4096 tokens, 256 features, 512
hidden ones, one thread, the process's CPU time. On a GPU: 16384 tokens, 4096 features, 14336 * 8 / E hidden ones, bf16.
Subjects are interleaved in one process; the median round is quoted, as a ratio to the dense layer run eagerly in the
same rounds. "routing changes" gives other tokens at each step, as training does; "skewed" tokens send the busiest
expert six times an equal share. Peak memory is what is allocated at most in a forward and a backward pass, less the
gradients of the parameters.
"""

import argparse
import json
import logging
import os
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lightning_accel.nn import FeedForward, MixtureOfExperts
from lightning_accel.nn.moe.layer import write_transformers

K = 2
os.environ.setdefault("HF_HUB_OFFLINE", "1")


class LoopOverExperts(nn.Module):
    """What is written first: for each expert its tokens, with weights selected from the stack."""

    def __init__(self, mixture: MixtureOfExperts) -> None:
        super().__init__()
        self.mixture = mixture

    def forward(self, rows: Tensor) -> Tensor:
        x = rows[0]
        gate, experts = self.mixture.gate, self.mixture.experts
        probs = F.linear(x.float(), gate.weight.float()).softmax(dim=-1)
        weights, chosen = probs.topk(K, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(x)
        for e in range(gate.num_experts):
            token, slot = (chosen == e).nonzero(as_tuple=True)
            first, second = F.linear(x[token], experts.up_weight[e]).chunk(2, dim=-1)
            visited = F.linear(F.silu(first) * second, experts.down_weight[e])
            out = out.index_add(0, token, visited * weights[token, slot, None].to(x.dtype))
        return out.unsqueeze(0)


def mixtral(mixture: MixtureOfExperts, implementation: str, k: int = K) -> nn.Module | None:
    """The block of transformers with the same weights; None where it is not installed."""
    try:
        from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock
    except ImportError:
        return None
    num_experts, dim, hidden_dim = mixture.experts.down_weight.shape
    config = MixtralConfig(
        hidden_size=dim, intermediate_size=hidden_dim, num_local_experts=num_experts, num_experts_per_tok=k
    )
    config._experts_implementation = implementation
    block = MixtralSparseMoeBlock(config).to(mixture.experts.up_weight)
    block.load_state_dict(write_transformers(mixture.state_dict(), "stacked"))
    return block


def subjects(
    num_experts: int, dtype: torch.dtype, device: torch.device, sizes: tuple[int, int, int]
) -> dict[str, nn.Module]:
    """The layers by name, the dense limit first; all mixtures have the same weights."""
    _, dim, hidden_dim = sizes
    torch.manual_seed(0)
    dense = FeedForward(dim, K * hidden_dim).to(device, dtype)
    mixture = MixtureOfExperts(dim, hidden_dim, num_experts, K, activation="silu", gated=True, bias=False)
    mixture = mixture.to(device, dtype)
    by_loop = MixtureOfExperts(dim, hidden_dim, num_experts, K, activation="silu", gated=True, bias=False)
    by_loop = by_loop.to(device, dtype)
    by_loop.load_state_dict(mixture.state_dict())
    by_loop.experts.backend = "loop"
    named: dict[str, nn.Module | None] = {
        "dense of equal active work": dense,
        "dense, compiled": torch.compile(dense),
        "ours": mixture,
        "ours, compiled": torch.compile(mixture),
        "ours, plain loop": by_loop,
        "transformers Mixtral, grouped_mm": mixtral(mixture, "grouped_mm"),
        "transformers Mixtral, eager": mixtral(mixture, "eager"),
        "loop over experts": LoopOverExperts(mixture),
    }
    if any(layer is None for layer in named.values()):
        print("transformers is not installed; its rows are left out", file=sys.stderr)
    return {name: layer for name, layer in named.items() if layer is not None}


def step(layer: nn.Module, x: Tensor, grad: Tensor) -> Tensor:
    out = layer(x.unsqueeze(0))  # transformers' block wants (B, T, D)
    out = out if isinstance(out, Tensor) else out[0]
    torch.autograd.backward(out, grad.unsqueeze(0))
    return out


def forget(layer: nn.Module, x: Tensor) -> None:
    x.grad = None
    for parameter in layer.parameters():
        parameter.grad = None


def tokens(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()


def skewed_tokens(layer: nn.Module, x: Tensor, ratio: float = 6.0) -> Tensor:
    """``x`` moved along the first expert's direction in the gate until that expert has ``ratio`` equal shares."""
    gate = layer.gate  # type: ignore[union-attr]
    direction = F.normalize(gate.weight[0].detach().float(), dim=0)
    low, high = 0.0, 20.0
    for _ in range(30):
        middle = (low + high) / 2
        counts = gate((x.detach().float() + middle * direction).to(x.dtype)).report.expert_counts
        low, high = (middle, high) if counts.max() / counts.float().mean() < ratio else (low, middle)
    return (x.detach().float() + high * direction).to(x.dtype).requires_grad_()


def check(layers: dict[str, nn.Module], x: Tensor, grad: Tensor) -> None:
    """A wrong answer has no speed: outputs and gradients of all mixtures against the loop over experts.

    In bf16, transformers' gate sends a token in a hundred elsewhere: it scores in that dtype, in which experts tie.
    """
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.05}[x.dtype]
    reference = None
    for name in reversed(layers):
        if name.startswith("dense"):
            continue
        forget(layers[name], x)
        out = step(layers[name], x, grad)
        found = out.detach()[0].float(), x.grad.float()
        reference = reference or found
        for actual, expected in zip(found, reference, strict=True):
            errors = (actual - expected).abs().amax(dim=1) / expected.abs().max()
            error = float(errors.max() if x.dtype == torch.float32 else errors.quantile(0.98))
            assert error < tolerance, f"{name} is off by {error}"
        forget(layers[name], x)


def seconds(layer: nn.Module, x: Tensor, grad: Tensor) -> float:
    forget(layer, x)
    clock = time.process_time if x.device.type == "cpu" else time.perf_counter
    synchronize(x)
    start = clock()
    step(layer, x, grad)
    synchronize(x)
    return clock() - start


def synchronize(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def peak_bytes(layer: nn.Module, x: Tensor, grad: Tensor) -> int:
    forget(layer, x)
    gradients = sum(parameter.nbytes for parameter in layer.parameters())
    if x.is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(layer, x, grad)
        return torch.cuda.max_memory_allocated() - before - gradients
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step(layer, x, grad)
    allocated = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return peak - gradients


def measure(num_experts: int, dtype: torch.dtype, device: torch.device, rounds: int) -> list[dict[str, object]]:
    sizes = (4096, 256, 512) if device.type == "cpu" else (16384, 4096, 14336 * 8 // num_experts)
    with device:  # a CPU would take a minute to draw the weights
        layers = subjects(num_experts, dtype, device, sizes)
    ours = layers["ours"]
    batches = [tokens(sizes[:2], dtype, device, seed) for seed in range(4)]
    skewed = skewed_tokens(ours, batches[0])
    grad = tokens(sizes[:2], dtype, device, 9).detach()
    check(layers, batches[0], grad)
    times: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):
        for name, layer in layers.items():
            if num_experts > 8 and number % 5 and name in ("loop over experts", "transformers Mixtral, eager"):
                continue  # a second each
            inputs = {"same tokens": batches[0]}
            if name != "loop over experts":
                inputs |= {"routing changes": batches[number % 4], "skewed": skewed}
            for case, x in inputs.items():
                elapsed = seconds(layer, x, grad)
                if number:  # the first warms up
                    times.setdefault((case, name), []).append(elapsed)
    rows = []
    label = f"{str(dtype).removeprefix('torch.')}, {num_experts} experts"
    limit = next(iter(layers))
    for (case, name), values in times.items():
        value, base = statistics.median(values), statistics.median(times[case, limit])
        rows.append(row(f"{label}, {case}", name, "time", value * 1e3, "ms", limit, value / base))
    base = peak_bytes(layers[limit], batches[0], grad)
    for name, layer in layers.items():
        value = peak_bytes(layer, batches[0], grad)
        rows.append(row(f"{label}, same tokens", name, "peak memory", value / 2**20, "MiB", limit, value / base))
    return rows


def row(
    case: str, subject: str, metric: str, value: float, unit: str, baseline: str, ratio: float
) -> dict[str, object]:
    names = "case", "subject", "metric", "value", "unit", "baseline", "ratio"
    return dict(zip(names, (case, subject, metric, value, unit, baseline, ratio), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three rounds of one case in place of fifteen of all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], help="by default both, bf16 on a GPU")
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if device.type == "cpu":
        torch.set_num_threads(1)
    dtypes = arguments.dtypes or (["float32", "bfloat16"] if device.type == "cpu" else ["bfloat16"])
    cases = [(getattr(torch, dtype), num_experts) for dtype in dtypes for num_experts in (8, 64)]
    rows = []
    print(f"torch {torch.__version__}, {device.type}, {torch.get_num_threads()} threads\n")
    print("| case | subject | ms | MiB | ratio |\n| --- | --- | ---: | ---: | ---: |", flush=True)
    for dtype, num_experts in cases[:1] if arguments.quick else cases:
        torch._dynamo.reset()
        measured = measure(num_experts, dtype, device, rounds=3 if arguments.quick else 15)
        rows += measured
        for one in measured:
            columns = (f"{one['value']:.1f}", "") if one["unit"] == "ms" else ("", f"{one['value']:.1f}")
            print(f"| {one['case']} | {one['subject']} | {' | '.join(columns)} | {one['ratio']:.2f} |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
