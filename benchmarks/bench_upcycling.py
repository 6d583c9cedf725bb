"""Is a trained GPT-2 whose perceptrons become mixtures better than one that trains on, at equal cost?

python benchmarks/bench_upcycling.py [--quick] [--width 768 --layers 12] [--seeds 0 1 2] [--steps 3000] [--json FILE]

A GPT-2 of transformers learns the bytes of Python's library. From its weights, one copy trains on; in the other, every
second perceptron becomes a mixture of 8 experts, 2 a token (``replace_mlps_``, ``ExpertLosses``), and it trains until
the floating-point operations are as many. Learning rates of both are chosen by the validation loss of the first seed,
and the figures are those of the test files.
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

LENGTH, BATCH, EXPERTS, K = 128, 16, 8, 2
RATES = (5e-4, 1e-3, 2e-3)
SUBJECTS = ("dense", "upcycled")


class Windows(Dataset[Tensor]):
    """Give windows of a text that start anywhere, as many as asked for."""

    def __init__(self, text: bytes, count: int, seed: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        generator = torch.Generator().manual_seed(seed)
        self.starts = torch.randint(0, len(self.text) - LENGTH, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        start = int(self.starts[index])
        return self.text[start : start + LENGTH + 1].long()


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


def flops(model: GPT2LMHeadModel) -> int:
    """Return the floating-point operations of a token forward: those of layers in use, of attention and of the head."""
    config = model.config
    in_mixtures = {
        id(p) for one in model.modules() if isinstance(one, MixtureOfExperts) for p in one.experts.parameters()
    }
    named = model.transformer.h.named_parameters()
    weights = sum(p.numel() * (K / EXPERTS if id(p) in in_mixtures else 1) for _, p in named if p.ndim > 1)
    return int(2 * (weights + config.vocab_size * config.n_embd) + 4 * LENGTH * config.n_embd * config.n_layer)


def train(
    model: GPT2LMHeadModel, text: bytes, steps: int, rate: float, seed: int, precision: str, keep_rate: bool = False
) -> float:
    """Train ``model`` in place, and return the seconds that it took."""
    is_mixture = any(isinstance(one, MixtureOfExperts) for one in model.modules())
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=steps, gradient_clip_val=1.0, precision=precision, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Speedups(onednn_matmul=not why_no_onednn_matmul()), *[ExpertLosses()] * is_mixture],
    )  # fmt: skip
    start = time.perf_counter()
    trainer.fit(Bytes(model, rate, keep_rate), DataLoader(Windows(text, steps * BATCH, seed), BATCH))
    return time.perf_counter() - start


@torch.no_grad()
def bits_per_byte(model: GPT2LMHeadModel, text: bytes, windows: int) -> float:
    module = Bytes(model.eval(), 0.0, keep_rate=True)
    losses = [module.loss(batch) for batch in DataLoader(Windows(text, windows, seed=0), 64)]
    model.train()
    return float(torch.stack(losses).mean()) / 0.6931471805599453


def start_of(subject: str, dense: GPT2LMHeadModel, seed: int) -> GPT2LMHeadModel:
    model = deepcopy(dense)
    if subject == "upcycled":
        L.seed_everything(seed, verbose=False)
        replace_mlps_(model, EXPERTS, K, layers=range(1, model.config.n_layer, 2))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 steps of one seed and rate")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3000, help="of the dense model that trains on")
    parser.add_argument("--start-steps", type=int, help="of the dense model before; as many without it")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rates", type=float, nargs="+", default=[*RATES])
    parser.add_argument("--precision", default="32-true", help="that of the Trainer")
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    steps, seeds, rates, windows = arguments.steps, arguments.seeds, arguments.rates, 1000
    precision = arguments.precision
    if arguments.quick:
        steps, seeds, rates, windows = 20, [0], rates[:1], 10
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    texts = library()
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
        took = train(dense, texts["train"], start_steps, rates[-1], seed, precision, keep_rate=True)
        row = {"seed": seed, "subject": "start", "steps": start_steps, "seconds": took}
        rows.append(row | {"test": bits_per_byte(dense, texts["test"], windows)})
        print(rows[-1], flush=True)
        for subject in SUBJECTS:
            for rate in [chosen[subject]] if subject in chosen else rates:
                model = start_of(subject, dense, seed)
                own_steps = round(steps * flops(dense) / flops(model))
                row = {"seed": seed, "subject": subject, "rate": rate, "steps": own_steps}
                row["parameters"] = sum(p.numel() for p in model.parameters())
                row["test_before"] = bits_per_byte(model, texts["test"], windows)
                row["seconds"] = train(model, texts["train"], own_steps, rate, seed + 1000, precision)
                row["val"] = bits_per_byte(model, texts["val"], windows)
                row["test"] = bits_per_byte(model, texts["test"], windows)
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
