"""Draw the load of the experts of a classifier of digits over training, by three ways to balance it."""

import logging
import warnings
from functools import partial

import lightning as L
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.image import AxesImage
from style import save

from lightning_accel import DigitsDataModule, MoEClassifier, TopKGate
from lightning_accel.callbacks import ExpertLoadMonitor
from lightning_accel.models import Experts

SUBJECTS = {
    "no balancing": (0.0, TopKGate),
    "balance loss, weight 0.1": (0.1, TopKGate),
    "bias, rate 0.01 (no loss)": (0.0, partial(TopKGate, score="sigmoid", bias_update_rate=0.01)),
}


def train(balance_weight: float, gate: object, folder: str) -> tuple[list[int], torch.Tensor]:
    """Return the steps at which the load was read, and the load of each expert in equal shares, (steps, experts)."""
    L.seed_everything(0, verbose=False)
    monitor = ExpertLoadMonitor()
    model = MoEClassifier(experts=Experts(balance_weight=balance_weight), gate=gate, optimizer=make_optimizer)
    trainer = L.Trainer(
        max_epochs=30, log_every_n_steps=5, callbacks=[monitor], accelerator="cpu", default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(model, DigitsDataModule(batch_size=64))
    loads = torch.stack([load[0] for load in monitor.loads])
    return monitor.steps, loads * loads.shape[1]


def make_optimizer(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3)


def draw(axes: Axes, title: str, steps: list[int], loads: torch.Tensor) -> AxesImage:
    number = loads.shape[1]
    extent = (steps[0], steps[-1], number - 0.5, -0.5)
    image = axes.imshow(loads.T, aspect="auto", cmap="cividis", vmin=0, vmax=3, extent=extent, interpolation="nearest")
    busiest = float(loads[-10:].mean(0).max())
    axes.set_title(f"{title}\nbusiest at the end: {busiest:.2f}", fontsize=11)
    axes.set_xlabel("optimizer step")
    axes.grid(visible=False)
    print(title, busiest, float(loads[-10:].mean(0).min()))
    return image


def main(folder: str = "/tmp/expert_load") -> plt.Figure:
    figure, panels = plt.subplots(1, 3, figsize=(9, 3.3), sharey=True, layout="constrained")
    for axes, (title, (weight, gate)) in zip(panels, SUBJECTS.items(), strict=True):
        image = draw(axes, title, *train(weight, gate, folder))
    panels[0].set_ylabel("expert")
    figure.colorbar(image, ax=panels, label="load, in equal shares", ticks=[0, 1, 2, 3])
    return figure


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    save(main(), "expert_load")
