"""How much worse do language models become when half of their weights go at once, and by which method?

python benchmarks/bench_one_shot.py [--quick] [--device cpu|cuda] [--seeds 0 1 2] [--steps 1500] [--models Llama]
    [--json FILE]

A Llama of transformers and a MoELanguageModel train on the bytes that Python carries, and are pruned without further
training. Perplexity is per byte, of 1,024 windows of the test text; the calibration data are 64 training windows.
"""

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_accel import MoELanguageModel, TextDataModule
from lightning_accel.compress import prune_, prune_on_data_
from lightning_accel.models import Experts

STRUCTURES = {"50 %": {"sparsity": 0.5}, "70 %": {"sparsity": 0.7}, "2:4": {"structure": "2:4"}}
NUM_CALIBRATION, NUM_TEST = 64, 1024


class Llama(L.LightningModule):
    """Train a small LlamaForCausalLM as its users do."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=257, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
            num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True, use_cache=False,
        )  # fmt: skip
        self.steps, self.model = steps, LlamaForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens).logits
        return logits

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).transpose(1, 2), batch[:, 1:])

    configure_optimizers = lambda self: one_cycle(self, self.steps)  # noqa: E731


class Mixture(MoELanguageModel):
    steps: int
    configure_optimizers = lambda self: one_cycle(self, self.steps)  # noqa: E731


def one_cycle(module: nn.Module, steps: int) -> Any:
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def make(subject: str, steps: int) -> L.LightningModule:
    if subject == "Llama":
        return Llama(steps)
    model = Mixture(vocab_size=257, dim=128, num_layers=4, attention={"num_heads": 4}, experts=Experts(hidden_dim=192))
    model.steps = steps
    return model


def windows_of_text() -> TextDataModule:
    data = TextDataModule(context_length=128, batch_size=16)
    data.prepare_data()
    data.setup()
    return data


def train(subject: str, seed: int, steps: int, device: str, data: TextDataModule) -> L.LightningModule:
    L.seed_everything(seed, verbose=False)
    model = make(subject, steps)
    trainer = L.Trainer(
        accelerator=device, devices=1, max_steps=steps, limit_val_batches=0.0, gradient_clip_val=1.0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, data)
    return model.to(device).eval()


@torch.no_grad()
def perplexity(model: nn.Module, data: TextDataModule) -> float:
    device = next(model.parameters()).device
    losses = []
    for batch in islice(data.test_dataloader(), NUM_TEST // data.batch_size):
        tokens = batch.to(device)
        out = model(tokens[:, :-1])
        logits = out[0] if isinstance(out, tuple) else out
        losses.append(F.cross_entropy(logits.float().transpose(1, 2), tokens[:, 1:], reduction="none").mean(1))
    return math.exp(float(torch.cat(losses).mean()))


def calls_of(data: TextDataModule, device: torch.device) -> list[Any]:
    batches = iter(data.train_dataloader())
    return [((next(batches)[:, :-1].to(device),), {}) for _ in range(NUM_CALIBRATION // data.batch_size)]


def methods(calls: list[Any]) -> dict[str, Callable[..., Any]]:
    return {
        "magnitude": lambda model, **how: prune_(model, scope="layer", **how),
        "Wanda": lambda model, **how: prune_on_data_(model, calls, method="wanda", **how),
        "SparseGPT": lambda model, **how: prune_on_data_(model, calls, method="sparsegpt", **how),
    }


def measure(model: L.LightningModule, data: TextDataModule) -> dict[str, Any]:
    rows: dict[str, Any] = {"dense": {"perplexity": perplexity(model, data)}}
    for kind, how in STRUCTURES.items():
        for name, prune in methods(calls_of(data, model.device)).items():
            pruned = copy.deepcopy(model)
            start = time.perf_counter()
            kept = prune(pruned, **how)
            seconds = time.perf_counter() - start
            share = sum(int(mask.sum()) for mask in kept.values()) / sum(mask.numel() for mask in kept.values())
            rows[f"{kind}, {name}"] = {"perplexity": perplexity(pruned, data), "seconds": seconds, "kept": share}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 steps of one seed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--models", nargs="+", default=["Llama", "MoELanguageModel"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seeds, steps = ([0], 20) if options.quick else (options.seeds, options.steps)
    data = windows_of_text()
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    for subject in options.models:
        for seed in seeds:
            for name, row in measure(train(subject, seed, steps, options.device, data), data).items():
                results.setdefault(subject, {}).setdefault(name, []).append(row)
        print(f"\n{subject}, {len(seeds)} seeds: perplexity per byte (standard deviation), seconds to prune")
        for name, rows in results[subject].items():
            values = [row["perplexity"] for row in rows]
            spread = statistics.stdev(values) if len(values) > 1 else math.nan
            seconds = statistics.mean(row.get("seconds", 0.0) for row in rows)
            print(f"{name:18s} {statistics.mean(values):7.3f} ({spread:.3f})  {seconds:6.1f}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
