"""How long does a step of a mixture-of-experts language model take, in float32 and in bfloat16, and beside its peer?

python benchmarks/bench_moe_lm_step.py [--quick] [--json FILE]

CPU, one thread, the process's CPU time. MoELanguageModel and a Mixtral of transformers with as many parameters (28
million: 2 layers of width 512, 8 heads, 8 experts of 1024, 2 a token, 1024 words) train on 8 rows of 256 tokens by
Lightning's Trainer and fused AdamW. Subjects run in turns of random order, each turn with a new Trainer whose first
step is not counted; the median step is quoted, with quartiles, and how many times as fast it is as transformers in
float32.
``speedups`` are the options of Speedups that pay on the CPU at hand, for either model. ``products`` is the time of the
matrix products of a step in its dtype, by torch's profiler: what no other kernel can shorten.
"""

import argparse
import json
import logging
import os
import random
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader
from transformers import MixtralConfig, MixtralForCausalLM

from lightning_accel import MoELanguageModel
from lightning_accel.callbacks import Speedups
from lightning_accel.models import Experts
from lightning_accel.ops.matmul import onednn_outruns_mkl
from lightning_accel.precision import AmpPrecision, Bfloat16Precision

VOCABULARY, DIM, LAYERS, HEADS, EXPERTS, HIDDEN, K = 1024, 512, 2, 8, 8, 1024, 2
ROWS, LENGTH, STEPS = 8, 256, 3
PRODUCTS = "aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm"


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


class Mixtral(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = MixtralConfig(
            vocab_size=VOCABULARY, hidden_size=DIM, intermediate_size=HIDDEN, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=HEADS, num_local_experts=EXPERTS, num_experts_per_tok=K,
            output_router_logits=True, pad_token_id=0, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        config._experts_implementation = "grouped_mm"
        self.model = MixtralForCausalLM(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        out = self.model(batch[:, :-1], use_cache=False)
        return F.cross_entropy(out.logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.parameters())


def ours() -> L.LightningModule:
    experts = Experts(EXPERTS, K, HIDDEN)
    sizes = {"dim": DIM, "num_layers": LAYERS, "attention": {"num_heads": HEADS}}
    return MoELanguageModel(VOCABULARY, **sizes, experts=experts, optimizer=adamw)


def speedups() -> Speedups:
    return Speedups(attention="native", onednn_matmul=onednn_outruns_mkl() or None, keep_freed_memory=True)


# model, precision plugins, callbacks
SUBJECTS: dict[str, tuple[Callable[[], L.LightningModule], Callable[[], list[Any]], Callable[[], list[Any]]]] = {
    "transformers, float32": (Mixtral, list, list),
    "ours, float32": (ours, list, list),
    "ours, float32, speedups": (ours, list, lambda: [speedups()]),
    "transformers, bf16-mixed": (Mixtral, lambda: [AmpPrecision("bf16")], list),
    "ours, bf16-mixed": (ours, lambda: [AmpPrecision("bf16")], list),
    "transformers, bf16-mixed, speedups": (Mixtral, lambda: [AmpPrecision("bf16")], lambda: [speedups()]),
    "ours, bf16-mixed, speedups": (ours, lambda: [AmpPrecision("bf16")], lambda: [speedups()]),
    "ours, bf16 with float32 masters": (ours, lambda: [Bfloat16Precision()], list),
    "ours, bf16 with float32 masters, speedups": (ours, lambda: [Bfloat16Precision()], lambda: [speedups()]),
}


class Clock(L.Callback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.start = time.process_time()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.process_time() - self.start)


def run(subject: str, module: L.LightningModule) -> list[float]:
    """CPU seconds of each counted step."""
    _, plugins, callbacks = SUBJECTS[subject]
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, plugins=plugins(), callbacks=[*callbacks(), clock], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(torch.randint(VOCABULARY, (ROWS * STEPS, LENGTH + 1)), ROWS))
    return clock.seconds[1:]


def products(subject: str, module: L.LightningModule) -> float:
    """Seconds of the matrix products of a step."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        run(subject, module)
    return sum(one.self_cpu_time_total for one in found.key_averages() if one.key in PRODUCTS) / 1e6 / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    modules = {name: make() for name, (make, _, _) in SUBJECTS.items()}
    sizes = {sum(p.numel() for p in module.parameters()) for module in modules.values()}
    assert len(sizes) == 1, sizes
    seconds: dict[str, list[float]] = {name: [] for name in SUBJECTS}
    for _ in range(1 if arguments.quick else arguments.turns):
        for name in random.sample(list(SUBJECTS), len(SUBJECTS)):
            seconds[name] += run(name, modules[name])
    of_products = {name: products(name, module) for name, module in modules.items()}
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {sizes.pop():,} parameters\n")
    print("| subject | ms a step | quartiles | times as fast | products, ms |\n| --- | ---: | --- | ---: | ---: |")
    slowest = statistics.median(next(iter(seconds.values())))
    for name, each in seconds.items():
        low, middle, high = (1e3 * x for x in statistics.quantiles(each, n=4, method="inclusive"))
        print(
            f"| {name} | {middle:.0f} | {low:.0f} to {high:.0f} | {1e3 * slowest / middle:.2f} "
            f"| {1e3 * of_products[name]:.0f} |"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"seconds": seconds, "products": of_products}, indent=1))


if __name__ == "__main__":
    main()
