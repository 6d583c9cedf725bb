"""Is a language model that is made half as wide and taught by the whole one better than one of its size from scratch?

python benchmarks/bench_width_distillation.py [--quick] [--seeds 0 1 2] [--steps 1500] [--short 500] [--json FILE]

A Llama of transformers trains on the bytes that Python carries. Its copy, half as wide, then trains on as many tokens
as a network of the same shapes with new weights, with the learning rate that is best on validation text, for each way
and seed. Perplexity is per byte, of 1,024 windows of the test text.
"""

import argparse
import copy
import json
import math
import statistics
from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_accel import Distillation, TextDataModule
from lightning_accel.callbacks import OneShotPruning

NUM_TEST = 1024
RATES = 2e-3, 4e-3, 8e-3


class Llama(L.LightningModule):
    """Train a small LlamaForCausalLM as its users do."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=257, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
            num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True, use_cache=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)
        self.steps, self.rate = 0, 0.0

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens).logits
        return logits

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).transpose(1, 2), batch[:, 1:])

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.rate, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.rate, total_steps=self.steps, pct_start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fit(model: Llama, data: TextDataModule, steps: int, rate: float, callbacks: list[L.Callback]) -> Llama:
    model.steps, model.rate = steps, rate
    trainer = L.Trainer(
        accelerator="cpu", max_steps=steps, gradient_clip_val=1.0, callbacks=callbacks, limit_val_batches=1,
        num_sanity_val_steps=0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, data)
    return model.eval()


@torch.no_grad()
def perplexity(model: nn.Module, loader: Any) -> float:
    losses = []
    for tokens in islice(loader, NUM_TEST // 16):
        losses.append(F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none").mean(1))
    return math.exp(float(torch.cat(losses).mean()))


def with_new_weights(model: Llama) -> Llama:
    """Return a network of the same shapes whose weights are drawn as transformers draws them."""
    made = copy.deepcopy(model)
    for one in made.parameters():
        nn.init.normal_(one, std=0.02) if one.ndim > 1 else nn.init.ones_(one)
    return made


def narrow() -> OneShotPruning:
    return OneShotPruning(0.5, structure="width")


WAYS = {
    "from scratch": list,
    "half as wide": lambda: [narrow()],
    "half as wide, distilled": lambda: [narrow(), Distillation("dense", weight=1.0, temperature=1.0)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 steps of one seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--short", type=int, default=500, help="steps of the small network")
    parser.add_argument("--ways", nargs="+", default=[*WAYS])
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seeds, steps, short = ([0], 20, 20) if options.quick else (options.seeds, options.steps, options.short)
    data = TextDataModule(context_length=128, batch_size=16)
    data.prepare_data()
    data.setup()
    found: dict[str, list[float]] = {}
    for seed in seeds:
        L.seed_everything(seed, verbose=False)
        whole = fit(Llama(), data, steps, 3e-3, [])
        found.setdefault("whole", []).append(perplexity(whole, data.test_dataloader()))
        print(seed, "whole", found["whole"][-1], flush=True)
        small = with_new_weights(fit(copy.deepcopy(whole), data, 20, 1e-9, [narrow()]))
        for way in options.ways:
            tried = {}
            for rate in options.rates:
                L.seed_everything(seed, verbose=False)
                start = small if way == "from scratch" else whole
                model = fit(copy.deepcopy(start), data, short, rate, WAYS[way]())
                tried[perplexity(model, data.val_dataloader())] = rate, perplexity(model, data.test_dataloader())
            rate, value = tried[min(tried)]
            print(seed, way, f"{value:.4f} at {rate}", {r: round(v, 4) for v, (r, _) in tried.items()}, flush=True)
            found.setdefault(way, []).append(value)
    for way, values in found.items():
        print(f"{way:32}", *(f"{value:.3f}" for value in values), f"mean {statistics.mean(values):.3f}")
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
