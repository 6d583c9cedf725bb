"""Is a mixture-of-experts language model better than a dense one of equal cost, and which balancing keeps it busy?

python benchmarks/bench_moe_lm.py [--quick] [--device cpu|cuda] [--seeds 0 1 2] [--steps 1500] [--json FILE]

All subjects train on the same bytes in the same order for as many steps, with the same active parameters; the test loss
is that of the last step. Max violation is how far the busiest expert of any layer is above an equal share of the whole
validation text.
"""

import argparse
import json
import logging
import statistics
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lightning_accel import MoELanguageModel, TextDataModule, TopKGate
from lightning_accel.models import Experts

SUBJECTS: dict[str, dict[str, Any]] = {
    "dense": {"moe_every": 0, "gate": TopKGate},
    "MoE, loss-free balance": {
        "gate": partial(TopKGate, score="sigmoid", bias_update_rate=0.001),
        "experts": Experts(hidden_dim=192, balance_weight=0.0),
    },
    "MoE, softmax gate, balance loss": {"gate": TopKGate},
}


class Scheduled(MoELanguageModel):
    """With the learning rate of configs/moe_lm.yaml."""

    steps: int

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=self.steps, pct_start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(subject: str, seed: int, steps: int, device: str) -> dict[str, float]:
    L.seed_everything(seed, verbose=False)
    model = Scheduled(
        dim=128, num_layers=4, attention={"num_heads": 4}, **{"experts": Experts(hidden_dim=192), **SUBJECTS[subject]}
    )
    model.steps = steps
    trainer = L.Trainer(
        accelerator=device,
        devices=1,
        max_steps=steps,
        limit_val_batches=0.0,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TextDataModule(context_length=128, batch_size=16)
    trainer.fit(model, data)
    measured = L.Trainer(accelerator=device, devices=1, logger=False, enable_progress_bar=False)
    (figures,) = measured.validate(model, data, verbose=False)
    figures |= measured.test(model, data, verbose=False)[0]
    active = sum(p.numel() for name, p in model.named_parameters() if "experts" not in name and "embedding" not in name)
    active += sum(p.numel() for name, p in model.named_parameters() if "experts" in name) * 2 // 8
    result = {"bits_per_byte": figures["test/bits_per_byte"], "active_parameters": active}
    if "val/max_violation" in figures:
        result["max_violation"] = figures["val/max_violation"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="30 steps of one seed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--subjects", nargs="+", default=[*SUBJECTS], choices=[*SUBJECTS])
    parser.add_argument("--json", type=Path, help="file for the rows")
    arguments = parser.parse_args()
    seeds, steps = ([0], 30) if arguments.quick else (arguments.seeds, arguments.steps)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rows = []
    for seed in seeds:
        for subject in arguments.subjects:
            figures = train(subject, seed, steps, arguments.device)
            case = f"{steps} steps, seed {seed}"
            rows += [{"case": case, "subject": subject, "metric": name, "value": x} for name, x in figures.items()]
            print(f"seed {seed}, {subject}: {figures}", flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(rows, indent=1))
    print(f"\n{steps} steps of 2048 bytes, seeds {seeds}; torch {torch.__version__}, {arguments.device}, ", end="")
    print(
        f"{torch.get_num_threads()} threads\n\n| subject | metric | mean | of each seed |\n| --- | --- | ---: | --- |"
    )
    for subject in arguments.subjects:
        for metric in ("bits_per_byte", "max_violation", "active_parameters"):
            values = [row["value"] for row in rows if (row["subject"], row["metric"]) == (subject, metric)]
            if values:
                each = ", ".join(f"{value:.4g}" for value in values)
                print(f"| {subject} | {metric} | {statistics.mean(values):.4g} | {each} |")


if __name__ == "__main__":
    main()
