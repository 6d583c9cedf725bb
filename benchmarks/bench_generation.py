"""How fast does a mixture-of-experts language model generate, and its layers compute few tokens?

python benchmarks/bench_generation.py [--quick] [--json FILE]

CPU, one thread, the process's CPU time, without gradients; subjects in turns, the best of five is quoted, its ratio to
the fastest peer's in the same run. ``generation``: MoELanguageModel and a Mixtral of transformers of the same sizes (4
layers, width 256, 8 experts of 512, 2 a token) draw the most probable token 64 times after prompts of 16. ``layer``:
MixtureOfExperts and transformers' block with the same weights, each of its implementations that runs.
"""

import argparse
import copy
import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from lightning_accel import MixtureOfExperts, MoELanguageModel
from lightning_accel.models import Experts
from lightning_accel.nn import write_transformers

DIM, HIDDEN, EXPERTS, LAYERS, HEADS, VOCABULARY, NEW = 256, 512, 8, 4, 8, 512, 64
IMPLEMENTATIONS = "eager", "grouped_mm", "batched_mm"
# tokens, experts, experts per token, width, hidden width of an expert
LAYER_CASES = (
    (1, 8, 2, 256, 512),
    (8, 8, 2, 256, 512),
    (16, 64, 2, 256, 512),
    (1, 64, 8, 256, 128),
    (1, 8, 2, 1024, 2048),
)


def in_turns(calls: dict[str, Callable[[], object]], repeats: int, turns: int) -> dict[str, float]:
    """Seconds of a call, the best of all turns."""
    best = dict.fromkeys(calls, float("inf"))
    for turn in range(turns + 1):
        for name, call in calls.items():
            start = time.process_time()
            for _ in range(repeats):
                call()
            if turn:
                best[name] = min(best[name], (time.process_time() - start) / repeats)
    return best


def generation(batch_size: int, turns: int) -> dict[str, float]:
    """Tokens a second."""
    ours = MoELanguageModel(
        VOCABULARY, dim=DIM, num_layers=LAYERS, attention={"num_heads": HEADS},
        experts=Experts(hidden_dim=HIDDEN, num_experts=EXPERTS, k=2),
    ).eval()  # fmt: skip
    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=DIM, intermediate_size=HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, num_local_experts=EXPERTS, num_experts_per_tok=2,
        pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    theirs = MixtralForCausalLM(config).eval()
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    prompts = torch.randint(VOCABULARY, (batch_size, 16))
    calls = {
        "ours": lambda: ours.generate(prompts, NEW, temperature=0.0),
        "transformers": lambda: theirs.generate(prompts, max_new_tokens=NEW, do_sample=False),
    }
    return {name: batch_size * NEW / seconds for name, seconds in in_turns(calls, 1, turns).items()}


@torch.no_grad()
def layer(case: tuple[int, ...], dtype: torch.dtype, turns: int) -> dict[str, float]:
    """Calls a second."""
    num_tokens, num_experts, k, dim, hidden_dim = case
    ours = MixtureOfExperts(dim, hidden_dim, num_experts, k, activation="silu", gated=True, bias=False).eval()
    x = torch.randn(1, num_tokens, dim).to(dtype)
    weights = write_transformers(ours.state_dict(), "stacked")
    subjects: dict[str, nn.Module] = {"ours": copy.deepcopy(ours).to(dtype)}
    for implementation in IMPLEMENTATIONS:
        config = MixtralConfig(
            hidden_size=dim, intermediate_size=hidden_dim, num_local_experts=num_experts, num_experts_per_tok=k
        )
        config._experts_implementation = implementation
        block = MixtralSparseMoeBlock(config).eval()
        block.load_state_dict(weights)
        subjects[f"transformers, {implementation}"] = block.to(dtype)
    expected = ours(x.float()).features
    for subject in subjects.values():
        torch.testing.assert_close(output(subject(x)).float(), expected, rtol=0.05, atol=0.02)
    calls = {name: lambda subject=subject: subject(x) for name, subject in subjects.items()}
    repeats = max(3, 200_000_000 // (num_tokens * k * dim * hidden_dim * 20))
    return {name: 1 / seconds for name, seconds in in_turns(calls, repeats, turns).items()}


def output(found: object) -> torch.Tensor:
    features = getattr(found, "features", found)
    assert isinstance(features, torch.Tensor)
    return features


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one case of each, one turn")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.filterwarnings("ignore")
    turns = 1 if arguments.quick else 5
    results: dict[str, dict[str, float]] = {}
    for batch_size in (1,) if arguments.quick else (1, 8):
        results[f"generation, {batch_size} prompts, tokens/s"] = generation(batch_size, turns)
    for case in LAYER_CASES[: 1 if arguments.quick else None]:
        for dtype in (torch.float32, torch.bfloat16):
            sizes = "{} tokens, {} experts, {} a token, {} x {}".format(*case)
            results[f"layer, {sizes}, {str(dtype).removeprefix('torch.')}, calls/s"] = layer(case, dtype, turns)
    print(
        f"torch {torch.__version__}, 1 thread\n\n| case | ours | fastest peer | ratio | others |\n|---|---|---|---|---|"
    )
    rows = []
    for name, figures in results.items():
        peers = sorted(((value, peer) for peer, value in figures.items() if peer != "ours"), reverse=True)
        best, ours = peers[0], figures["ours"]
        others = ", ".join(f"{peer} {value:.0f}" for value, peer in peers[1:])
        print(f"| {name} | {ours:.0f} | {best[1]} {best[0]:.0f} | {ours / best[0]:.2f} | {others} |")
        rows += [
            {"case": name, "subject": subject, "value": value, "baseline": best[1], "ratio": value / best[0]}
            for subject, value in figures.items()
        ]
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
