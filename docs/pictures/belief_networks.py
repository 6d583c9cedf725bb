"""Draw what an RBM and a deep belief network are, and what an RBM trained here on scikit-learn's digits has learned."""

import math

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from sklearn.datasets import load_digits
from style import BLUE, GREEN, GREY, ORANGE, save
from torch import Tensor

from lightning_accel import RBM
from lightning_accel.nn import ContrastiveDivergence


def draw_layers(axes: Axes, sizes: list[int], names: list[str], colours: list[str], arrows: list[bool]) -> None:
    """Draw layers from below; between two of them arrows downwards, or lines without a direction."""
    places = [[(x - (size - 1) / 2, 1.5 * level) for x in range(size)] for level, size in enumerate(sizes)]
    for level, is_arrow in enumerate(arrows):
        for end in places[level]:
            for start in places[level + 1]:
                style = "-|>" if is_arrow else "-"
                properties = {"arrowstyle": style, "color": GREY, "lw": 0.7, "shrinkA": 9, "shrinkB": 9, "alpha": 0.7}
                axes.annotate("", end, start, arrowprops=properties)
    for level, colour in enumerate(colours):
        axes.scatter(*zip(*places[level], strict=True), s=260, color=colour, zorder=3, edgecolors="white")
        axes.text(3.0, 1.5 * level, names[level], va="center")
    axes.set(xlim=(-3, 6.2), ylim=(-0.5, 1.5 * len(sizes) - 0.6))
    axes.axis("off")


def draw_models() -> None:
    figure, (one, stack) = plt.subplots(1, 2, figsize=(10, 3.6))
    draw_layers(one, [5, 4], ["visible units $v$", "hidden units $h$"], [BLUE, ORANGE], [False])
    one.set_ylim(-1.25, 3.15)
    one.set_title("Restricted Boltzmann machine", loc="left")
    names = ["visible units $v$", "hidden units $s_1$", "hidden units $s_2$"]
    draw_layers(stack, [5, 4, 3], names, [BLUE, ORANGE, GREEN], [True, False])
    stack.text(3.0, 2.25, "an RBM", va="center", style="italic", color="#555555")
    stack.text(3.0, 0.75, "generates downwards", va="center", style="italic", color="#555555")
    stack.set_title("Deep belief network of two machines", loc="left")
    save(figure, "belief_networks_models")


def train(pixels: Tensor, epochs: int = 100, lr: float = 0.8) -> RBM:
    rbm = RBM(64, 128, initial_std=math.sqrt(8 / (64 + 128)))
    rbm.start_at_(pixels.mean(dim=0), len(pixels))
    sampling = ContrastiveDivergence("pcd", num_chains=100)
    optimizer = torch.optim.SGD(rbm.parameters(), lr, weight_decay=1e-3)
    for epoch in range(epochs):
        optimizer.param_groups[0]["lr"] = lr * (1 - epoch / epochs)
        sampling.train_(rbm, pixels[torch.randperm(len(pixels))], 10, optimizer)
    return rbm


def show(axes: Axes, pixels: Tensor) -> None:
    axes.imshow(1 - pixels.detach().view(8, 8), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(visible=True, color=GREY)


@torch.no_grad()
def draw_digits() -> None:
    torch.manual_seed(0)
    pixels = torch.tensor(load_digits().data > 8).float()
    pixels = pixels[torch.randperm(len(pixels))]
    training, held_out = pixels[:1400], pixels[1400:1410]
    rbm = train(training)
    samples = rbm.sample(10, steps=2000)
    given = held_out.clone()
    given[:, 32:] = torch.nan
    chains = torch.stack([rbm.reconstruct(rbm.sample(10, steps=200, clamp=given)) for _ in range(50)])
    filled = torch.where(given.isnan(), chains.mean(dim=0), given)
    strongest = rbm.weight[rbm.weight.square().sum(dim=1).argsort(descending=True)[:10]]
    weights = 0.5 + 0.5 * strongest / strongest.abs().amax(dim=1, keepdim=True)
    rows = {
        "held-out digits": held_out,
        "upper half given": torch.where(given.isnan(), 0.25, given),
        "lower half expected": filled,
        "samples": samples,
        "weights of 10 hidden units": weights,
    }
    figure, grid = plt.subplots(len(rows), 10, figsize=(9.5, 4.6))
    for places, (name, images) in zip(grid, rows.items(), strict=True):
        for axes, image in zip(places, images, strict=True):
            show(axes, image)
        places[0].set_ylabel(name, rotation=0, ha="right", va="center")
    save(figure, "belief_networks_digits")


if __name__ == "__main__":
    draw_models()
    draw_digits()
