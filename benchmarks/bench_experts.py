"""How much worse does a mixture become without some of its experts, and which of them should go?

python benchmarks/bench_experts.py [--quick] [--seeds 0 1 2] [--steps 500] [--json FILE]

A MoELanguageModel with eight experts in each of four layers trains on the bytes that Python carries, and loses experts
without further training. Perplexity is per byte, of 1,024 windows of the test text; 64 training windows calibrate.
Experts go by the package's scores, or by the number of their tokens; or they are merged, as M-SMoE does (Li et al.
2023, https://arxiv.org/abs/2310.01334), into the one of those that stay with the most similar outputs: hidden units
matched by the Hungarian method, weights averaged by the number of tokens.
"""

import argparse
import copy
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from bench_one_shot import calls_of, perplexity, train, windows_of_text
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from lightning_accel import MixtureOfExperts, TextDataModule
from lightning_accel.compress import apply_plan_, plan_without_experts, score_experts
from lightning_accel.compress.channels import experts as removal
from lightning_accel.nn.moe.layer import Experts

SHARES = 0.25, 0.5
Scores = dict[str, Tensor]


@torch.no_grad()
def count_tokens(model: nn.Module, calls: Sequence[Any]) -> Scores:
    counts: Scores = {}

    def add(name: str) -> Callable[..., None]:
        def hook(mixture: nn.Module, args: Any, output: Any) -> None:
            counts[name] = counts.get(name, 0) + output.report.expert_counts.double()

        return hook

    mixtures = {f"{name}.experts": one for name, one in model.named_modules() if isinstance(one, MixtureOfExperts)}
    handles = [one.register_forward_hook(add(name)) for name, one in mixtures.items()]
    for args, kwargs in calls:
        model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    return counts


def remove(model: nn.Module, calls: Sequence[Any], scores: Scores, share: float) -> None:
    with patch.object(removal, "score_experts", lambda *_: scores):
        plan, _ = plan_without_experts(model, calls, share)
    apply_plan_(model, plan)


@torch.no_grad()
def similarities(model: nn.Module, calls: Sequence[Any], names: Sequence[str]) -> Scores:
    """Return the mean cosine of the outputs of two experts on every 16th token, (E, E) by name."""
    found: dict[str, list[Tensor]] = {name: [] for name in names}

    def add(name: str) -> Callable[..., None]:
        def hook(experts: Experts, args: Any) -> None:
            tokens = args[0][::16]
            slots, number = torch.arange(len(tokens)), len(experts.up_weight)
            outputs = [
                experts.forward(tokens, slots, torch.ones(len(tokens)), len(tokens) * F.one_hot(one, number))
                for one in torch.arange(number)
            ]
            found[name].append(torch.stack(outputs))

        return hook

    handles = [model.get_submodule(name).register_forward_pre_hook(add(name)) for name in names]
    for args, kwargs in calls:
        model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    outputs = {name: torch.cat(own, 1) for name, own in found.items()}
    return {name: F.cosine_similarity(own[:, None], own, dim=-1).mean(-1) for name, own in outputs.items()}


def units(experts: Experts, number: int) -> Tensor:
    """Return what each hidden unit reads and writes, (H, ...)."""
    hidden = experts.down_weight.shape[2]
    return torch.cat([*experts.up_weight[number].split(hidden), experts.down_weight[number].t()], 1)


@torch.no_grad()
def merge(model: nn.Module, calls: Sequence[Any], scores: Scores, counts: Scores, share: float) -> None:
    """Merge the experts that :func:`remove` would remove into those that stay, and remove them."""
    alike = similarities(model, calls, [*scores])
    for name, own in scores.items():
        experts = model.get_submodule(name)
        assert isinstance(experts, Experts)
        assert experts.up_bias is None
        order = own.argsort(stable=True).tolist()
        gone, stay = order[: round(share * len(own))], order[round(share * len(own)) :]
        nearest = {one: stay[int(alike[name][one, stay].argmax())] for one in gone}
        before = copy.deepcopy(experts)
        for target in stay:
            group = [target, *(one for one in gone if nearest[one] == target)]
            weights = counts[name][group] / counts[name][group].sum().clamp(min=1)
            sums = [torch.zeros_like(one[target]) for one in (experts.up_weight, experts.down_weight)]
            for one, weight in zip(group, weights.float(), strict=True):
                _, matched = linear_sum_assignment(units(before, target) @ units(before, one).t(), maximize=True)
                parts = before.up_weight[one].split(len(matched))
                sums[0] += weight * torch.cat([part[matched] for part in parts])
                sums[1] += weight * before.down_weight[one][:, matched]
            experts.up_weight[target], experts.down_weight[target] = sums
    remove(model, calls, scores, share)


def measure(model: Any, data: TextDataModule) -> dict[str, float]:
    calls = calls_of(data, model.device)
    scores, counts = score_experts(model, calls), count_tokens(model, calls)
    found = {"all experts": perplexity(model, data)}
    for share in SHARES:
        ways: dict[str, Callable[[nn.Module], None]] = {
            "by their scores": lambda one, share=share: remove(one, calls, scores, share),
            "by their tokens": lambda one, share=share: remove(one, calls, counts, share),
            "merged": lambda one, share=share: merge(one, calls, scores, counts, share),
        }
        for name, change in ways.items():
            smaller = copy.deepcopy(model)
            change(smaller)
            found[f"{share:.0%} of the experts fewer, {name}"] = perplexity(smaller, data)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 steps of one seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seeds, steps = ([0], 20) if options.quick else (options.seeds, options.steps)
    data = windows_of_text()
    results: dict[str, list[float]] = {}
    for seed in seeds:
        for name, value in measure(train("MoELanguageModel", seed, steps, "cpu", data), data).items():
            results.setdefault(name, []).append(value)
            print(f"seed {seed}, {name}: {value:.4f}", flush=True)
    print("\n| experts | perplexity, mean | of each seed |\n|---|---:|---|")
    for name, values in results.items():
        print(f"| {name} | {statistics.mean(values):.3f} | {', '.join(f'{one:.3f}' for one in values)} |")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
