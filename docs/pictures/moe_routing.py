"""Draw how a gate sends each token to two of four experts."""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from style import BLUE, GREEN, GREY, ORANGE, RED, save

TOKENS = {"the": (0, 2), "cat": (1, 2), "sat": (0, 3)}
WEIGHTS = {"the": (0.7, 0.3), "cat": (0.6, 0.4), "sat": (0.8, 0.2)}
COLOURS = dict(zip(TOKENS, (BLUE, RED, GREEN), strict=True))
EXPERTS = 4
HEIGHT = 4.2


def box(axes: Axes, x: float, y: float, text: str, colour: str, width: float = 1.1) -> None:
    style = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": colour, "linewidth": 1.8}
    axes.add_patch(plt.matplotlib.patches.FancyBboxPatch((x - width / 2, y - 0.2), width, 0.4, **style))
    axes.text(x, y, text, ha="center", va="center", fontsize=11)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.5})


def main() -> plt.Figure:
    figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
    token_y = {token: HEIGHT - 0.7 - 1.4 * i for i, token in enumerate(TOKENS)}
    expert_y = [HEIGHT - 0.35 - 1.15 * e for e in range(EXPERTS)]
    gate_y = token_y["cat"]
    for token, y in token_y.items():
        box(axes, 0, y, token, COLOURS[token], 0.9)
        arrow(axes, (0.62, y), (1.75, gate_y + 0.25 * (y - gate_y)), COLOURS[token])
        box(axes, 10.3, y, f"{token}'", COLOURS[token], 0.9)
    box(axes, 2.4, gate_y, "gate", GREY)
    for e, y in enumerate(expert_y):
        box(axes, 6.0, y, f"expert {e}", ORANGE, 1.5)
    visits = [sum(e in chosen for chosen in TOKENS.values()) for e in range(EXPERTS)]
    done = [0] * EXPERTS
    for token, chosen in TOKENS.items():
        for rank, (e, weight) in enumerate(zip(chosen, WEIGHTS[token], strict=True)):
            shift = 0.11 * (visits[e] - 1 - 2 * done[e])
            done[e] += 1
            arrow(axes, (3.05, gate_y), (5.13, expert_y[e] + shift), COLOURS[token])
            end = (9.73, token_y[token] + 0.16 * (1 - 2 * rank))
            arrow(axes, (6.87, expert_y[e] + shift), end, COLOURS[token])
            label_x, t = 7.45, (7.45 - 6.87) / (9.73 - 6.87)
            label_y = expert_y[e] + shift + t * (end[1] - expert_y[e] - shift)
            paper = {"facecolor": "white", "edgecolor": "none", "pad": 1}
            axes.text(
                label_x, label_y, f"{weight}", color=COLOURS[token], ha="center", va="center", fontsize=9, bbox=paper
            )
    for x, text in ((0, "tokens $x$"), (2.4, "top-2 of 4"), (6.0, "perceptrons $f_e$"), (10.3, r"$\sum_e w_e f_e(x)$")):
        axes.text(x, HEIGHT + 0.42, text, ha="center", fontsize=11, color="#555555")
    axes.set(xlim=(-0.7, 11.1), ylim=(-0.1, HEIGHT + 0.8))
    axes.axis("off")
    return figure


if __name__ == "__main__":
    save(main(), "moe_routing")
