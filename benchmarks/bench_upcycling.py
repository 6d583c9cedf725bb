"""Is a trained GPT-2 whose perceptrons become mixtures better than one that trains on, at equal cost?

python benchmarks/bench_upcycling.py [--quick] [--device cpu|cuda] [--width 768 --layers 12] [--seeds 0 1 2]
    [--steps 3000] [--batch 16] [--k 2] [--granularity 1] [--json FILE]

A GPT-2 of transformers learns the bytes of Python's library. From its weights, one copy trains on; in the other, every
second perceptron becomes a mixture of 8 copies, each of as many experts as the granularity says, k of them a token
(``replace_mlps_``, ``ExpertLosses``), and it trains until the floating-point operations are as many. Learning rates of
both are chosen by the validation loss of the first seed, and the figures are those of the test files. On a GPU, blocks
are compiled, and batches come from its memory.
"""

import argparse
import hashlib
import json
import logging
import statistics
import sysconfig
import time
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_accel.callbacks import ExpertLosses, Speedups
from lightning_accel.nn import MixtureOfExperts, replace_mlps_
from lightning_accel.ops.matmul import why_no_onednn_matmul

LENGTH, COPIES = 128, 8
RATES = (5e-4, 1e-3, 2e-3)
SUBJECTS = ("dense", "upcycled")


class Windows(Dataset[Tensor]):
    """Give windows of a text that start anywhere, as many as asked for."""

    def __init__(self, text: bytes, count: int, seed: int, device: str) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
        generator = torch.Generator().manual_seed(seed)
        self.starts = torch.randint(0, len(self.text) - LENGTH, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> Tensor:
        places = self.starts[indices, None] + torch.arange(LENGTH + 1)
        return self.text[places.to(self.text.device)].long()


def as_batch(windows: Tensor) -> Tensor:
    """Return what a DataLoader got for all indices of a batch at once."""
    return windows


class Bytes(L.LightningModule):
    """Train a language model of transformers on bytes."""

    def __init__(self, model: GPT2LMHeadModel, rate: float, keep_rate: bool) -> None:
        super().__init__()
        self.model, self.rate, self.keep_rate = model, rate, keep_rate

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, use_cache=False).logits

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.loss(batch), batch_size=len(batch))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        # Lightning refuses this for fused optimizers in mixed precision, though it is wrong under loss scaling alone
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.rate, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
        total = int(self.trainer.max_steps)
        rise = max(1, total // 20)

        def factor(step: int) -> float:
            left = 1.0 if self.keep_rate else 1 - max(0, step - rise) / (total - rise)
            return min((step + 1) / rise, left)

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def library() -> dict[str, bytes]:
    """Return the text of Python's library, its files split by their names into those to train, validate and test on."""
    root = Path(sysconfig.get_path("stdlib"))
    texts: dict[str, list[bytes]] = {"train": [], "val": [], "test": []}
    for path in sorted(root.rglob("*.py")):
        if not {"site-packages", "test", "tests", "idlelib", "encodings"} & set(path.relative_to(root).parts):
            place = hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()[0]
            texts["val" if place < 20 else "test" if place < 40 else "train"].append(path.read_bytes())
    return {name: b"".join(files) for name, files in texts.items()}


def flops(model: GPT2LMHeadModel, k: int, num_experts: int) -> int:
    """Return the floating-point operations of a token forward: those of layers in use, of attention and of the head."""
    config = model.config
    in_mixtures = {
        id(p) for one in model.modules() if isinstance(one, MixtureOfExperts) for p in one.experts.parameters()
    }
    named = model.transformer.h.named_parameters()
    weights = sum(p.numel() * (k / num_experts if id(p) in in_mixtures else 1) for _, p in named if p.ndim > 1)
    return int(2 * (weights + config.vocab_size * config.n_embd) + 4 * LENGTH * config.n_embd * config.n_layer)


def train(
    model: GPT2LMHeadModel, windows: Windows, steps: int, rate: float, options: Any, keep_rate: bool = False
) -> float:
    """Train ``model`` in place, and return the seconds that it took."""
    is_mixture = any(isinstance(one, MixtureOfExperts) for one in model.modules())
    if options.device == "cuda":
        speedups = Speedups(compile="blocks")
    else:
        speedups = Speedups(onednn_matmul=not why_no_onednn_matmul())
    trainer = L.Trainer(
        accelerator=options.device, devices=1, max_steps=steps, precision=options.precision,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[speedups, *[ExpertLosses()] * is_mixture],
    )  # fmt: skip
    start = time.perf_counter()
    trainer.fit(Bytes(model, rate, keep_rate), DataLoader(windows, options.batch, collate_fn=as_batch))
    return time.perf_counter() - start


@torch.no_grad()
def bits_per_byte(model: GPT2LMHeadModel, windows: Windows) -> float:
    module = Bytes(model.eval(), 0.0, keep_rate=True).to(windows.text.device)
    losses = [module.loss(batch) for batch in DataLoader(windows, 64, collate_fn=as_batch)]
    model.train()
    return float(torch.stack(losses).mean()) / 0.6931471805599453


def start_of(subject: str, dense: GPT2LMHeadModel, seed: int, k: int, granularity: int) -> GPT2LMHeadModel:
    model = deepcopy(dense)
    if subject == "upcycled":
        L.seed_everything(seed, verbose=False)
        layers = range(1, model.config.n_layer, 2)
        replace_mlps_(model, COPIES * granularity, k, layers=layers, granularity=granularity)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 steps of one seed and rate")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3000, help="of the dense model that trains on")
    parser.add_argument("--start-steps", type=int, help="of the dense model before; as many without it")
    parser.add_argument("--batch", type=int, default=16, help="windows of 128 bytes of a step")
    parser.add_argument("--k", type=int, default=2, help="experts of a token")
    parser.add_argument("--granularity", type=int, default=1, help="experts of a copy; as k, a token costs no more")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rates", type=float, nargs="+", default=[*RATES])
    parser.add_argument("--start-rate", type=float, help="of the dense model before; the last of the rates without it")
    parser.add_argument("--precision", default="32-true", help="that of the Trainer")
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    steps, seeds, rates, windows = arguments.steps, arguments.seeds, arguments.rates, 1000
    device, k, granularity = arguments.device, arguments.k, arguments.granularity
    if arguments.quick:
        steps, seeds, rates, windows = 20, [0], rates[:1], 10
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    texts = library()
    held_out = {name: Windows(texts[name], windows, 0, device) for name in ("val", "test")}
    rows: list[dict[str, Any]] = []
    chosen: dict[str, float] = {}
    for seed in seeds:
        L.seed_everything(seed, verbose=False)
        heads = max(1, arguments.width // 64) if arguments.width > 256 else 4
        dense = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=256, n_positions=LENGTH, n_embd=arguments.width, n_layer=arguments.layers, n_head=heads,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            )
        )  # fmt: skip
        start_steps = arguments.start_steps or steps
        seen = Windows(texts["train"], start_steps * arguments.batch, seed, device)
        took = train(dense, seen, start_steps, arguments.start_rate or rates[-1], arguments, keep_rate=True)
        row = {"seed": seed, "subject": "start", "steps": start_steps, "seconds": took}
        rows.append(row | {"test": bits_per_byte(dense, held_out["test"])})
        print(rows[-1], flush=True)
        for subject in SUBJECTS:
            for rate in [chosen[subject]] if subject in chosen else rates:
                model = start_of(subject, dense, seed, k, granularity)
                costs = [flops(one, k, COPIES * granularity) for one in (dense, model)]
                own_steps = round(steps * costs[0] / costs[1])
                row = {"seed": seed, "subject": subject, "rate": rate, "steps": own_steps}
                row["parameters"] = sum(p.numel() for p in model.parameters())
                row["test_before"] = bits_per_byte(model, held_out["test"])
                seen = Windows(texts["train"], own_steps * arguments.batch, seed + 1000, device)
                row["seconds"] = train(model, seen, own_steps, rate, arguments)
                row |= {name: bits_per_byte(model, each) for name, each in held_out.items()}
                rows.append(row)
                print(row, flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps(rows, indent=1))
            tried = [row for row in rows if row["subject"] == subject and row["seed"] == seeds[0]]
            chosen[subject] = min(tried, key=lambda row: row["val"])["rate"]
    print("\n| subject | learning rate | steps | parameters | bits per byte of test files, mean | of each seed |")
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    for subject in SUBJECTS:
        own = [row for row in rows if row["subject"] == subject and row["rate"] == chosen[subject]]
        each = ", ".join(f"{row['test']:.3f}" for row in own)
        print(
            f"| {subject} | {chosen[subject]:g} | {own[0]['steps']} | {own[0]['parameters']:,} | "
            f"{statistics.mean(row['test'] for row in own):.3f} | {each} |"
        )


if __name__ == "__main__":
    main()
