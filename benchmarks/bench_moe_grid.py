"""Does a mixture of experts choose the fastest way to compute its experts, from one token to 65,536?

python benchmarks/bench_moe_grid.py [--quick] [--tokens 1 16 ...] [--dtypes float32 bfloat16] [--json FILE]

CPU, one thread, the process's CPU time; layers of width 256 with 8 or 64 experts of 512 hidden features, 2 a token, and
256 of 128, 8 a token; forward passes without gradients, and forward and backward. ``ours`` chooses its backend by
:func:`lightning_accel.ops.expert_mlp.choose_backend`; the others are its backends, and transformers' Mixtral block with
the same weights by each of its implementations. All take the same tokens, in turns of random order; the median is
quoted, in ms for ours, and for the others as a multiple of it: below 1 they are faster. The last column is the least.
"""

import argparse
import json
import os
import random
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from bench_moe import mixtral
from torch import Tensor, nn

from lightning_accel import MixtureOfExperts

DIM = 256
TOKENS = 1, 16, 128, 512, 4096, 65536
MIXTURES = (8, 2, 512), (64, 2, 512), (256, 8, 128)  # experts, experts per token, hidden width of an expert
BACKENDS = "blocks", "loop", "grouped_mm"
IMPLEMENTATIONS = "grouped_mm", "eager", "batched_mm"
MOST_BATCHED = 512  # slots: batched_mm copies the weights of each
SECONDS, FEWEST, MOST = 1.5, 3, 100  # of all turns of one subject, and how many
CALLS, LONG = 3, 0.5  # of a turn; one of subjects that take longer
SLOW = 8  # subjects that take this many times as long as the fastest are left out


def subjects(mixture: MixtureOfExperts, k: int, num_slots: int) -> dict[str, nn.Module]:
    layers: dict[str, nn.Module] = {"ours": mixture}
    for backend in BACKENDS:
        layer = MixtureOfExperts(*sizes_of(mixture), k, activation="silu", gated=True, bias=False)
        layer.load_state_dict(mixture.state_dict())
        layer.experts.backend = backend
        layers[backend] = layer.to(mixture.experts.up_weight.dtype)
    for implementation in IMPLEMENTATIONS:
        if implementation != "batched_mm" or num_slots <= MOST_BATCHED:
            block = mixtral(mixture, implementation, k)
            assert block is not None, "transformers is needed"
            layers[f"transformers {implementation}"] = block
    return layers


def sizes_of(mixture: MixtureOfExperts) -> tuple[int, int, int]:
    num_experts, dim, hidden_dim = mixture.experts.down_weight.shape
    return dim, hidden_dim, num_experts


def features(out: object) -> Tensor:
    found = out if isinstance(out, Tensor) else getattr(out, "features", None)
    assert found is not None
    return found


def calls(layers: dict[str, nn.Module], x: Tensor, trains: bool) -> dict[str, Callable[[], object]]:
    grad = torch.randn_like(x)
    for layer in layers.values():
        layer.train(trains)

    def run(layer: nn.Module) -> object:
        if not trains:
            with torch.no_grad():
                return layer(x)
        return torch.autograd.grad(features(layer(x)), [x, *layer.parameters()], grad, allow_unused=True)

    return {name: lambda layer=layer: run(layer) for name, layer in layers.items()}


def check(layers: dict[str, nn.Module], x: Tensor) -> None:
    """A wrong answer has no speed; transformers' gate scores in bfloat16, in which experts tie."""
    with torch.no_grad():
        expected = features(layers["ours"](x)).float()
        for name, layer in layers.items():
            wrong = (features(layer(x)).float() - expected).abs().amax(-1) > 0.02 * expected.abs().max()
            assert wrong.float().mean() <= (0.05 if x.dtype == torch.bfloat16 else 0), name


def medians(by_name: dict[str, Callable[[], object]]) -> dict[str, float]:
    first: dict[str, float] = {}
    for name, call in by_name.items():
        call()
        before = time.process_time()
        call()
        first[name] = time.process_time() - before
    by_name = {name: call for name, call in by_name.items() if first[name] < SLOW * min(first.values())}
    seconds: dict[str, list[float]] = {name: [] for name in by_name}
    start, turns = time.process_time(), 0
    while turns < FEWEST or (time.process_time() - start < SECONDS * len(by_name) and turns < MOST):
        order = list(by_name)
        random.shuffle(order)
        for name in order:
            is_long = first[name] > LONG
            if not is_long:
                by_name[name]()  # pays for the memory and the caches that the subject before it left
            for _ in range(1 if is_long else CALLS):
                before = time.process_time()
                by_name[name]()
                seconds[name].append(time.process_time() - before)
        turns += 1
    return {name: statistics.median(each) for name, each in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one mixture and two numbers of tokens")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    all_tokens, mixtures = ((1, 64), MIXTURES[:1]) if arguments.quick else (arguments.tokens, MIXTURES)
    names = [*BACKENDS, *(f"transformers {one}" for one in IMPLEMENTATIONS)]
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}\n")
    print("| dtype | pass | T | E | k | H | ours, ms |", *(f"{name} |" for name in names), "least |")
    print("| --- | --- |", "---: |" * (len(names) + 6))
    rows = []
    for dtype in (getattr(torch, name) for name in arguments.dtypes):
        for num_tokens in all_tokens:
            for num_experts, k, hidden_dim in mixtures:
                torch.manual_seed(0)
                mixture = MixtureOfExperts(
                    DIM, hidden_dim, num_experts, k, activation="silu", gated=True, bias=False
                ).to(dtype)
                layers = subjects(mixture, k, num_tokens * k)
                x = torch.randn(1, num_tokens, DIM).to(dtype)
                check(layers, x)
                for trains in (False, True):
                    found = medians(calls(layers, x.requires_grad_(trains), trains))
                    ours = found.pop("ours")
                    ratios = {name: seconds / ours for name, seconds in found.items()}
                    case = str(dtype).removeprefix("torch."), "backward" if trains else "forward", num_tokens
                    cells = [f"{ratios[name]:.2f}" if name in ratios else "" for name in names]
                    print(
                        "|", " | ".join(map(str, (*case, num_experts, k, hidden_dim))),
                        f"| {ours * 1e3:.3g} |", " | ".join(cells), f"| {min(ratios.values()):.2f} |", flush=True,
                    )  # fmt: skip
                    rows.append({"case": [*case, num_experts, k, hidden_dim], "ours": ours, "ratios": ratios})
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
