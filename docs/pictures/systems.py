"""Draw a small picture of each system, for the cards of the page of systems."""

from collections.abc import Callable

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Circle, Polygon, Rectangle
from style import BLUE, GREEN, GREY, ORANGE, RED, save

Point = tuple[float, float]


def line(axes: Axes, start: Point, end: Point, colour: str = GREY, width: float = 1.5) -> None:
    axes.plot(*zip(start, end, strict=True), color=colour, linewidth=width, zorder=1)


def node(axes: Axes, place: Point, colour: str, radius: float = 0.22) -> None:
    axes.add_patch(Circle(place, radius, facecolor=colour, edgecolor="white", linewidth=1.5, zorder=2))


def draw_experts(axes: Axes) -> None:
    token, gate, end = (0.6, 1.0), (2.0, 1.0), (6.4, 1.0)
    experts = [(4.2, 0.1 + 0.6 * number) for number in range(4)]
    line(axes, token, gate, BLUE, 2.5)
    for number, place in enumerate(experts):
        is_chosen = number in (1, 3)
        for edge in ((gate, place), (place, end)):
            line(axes, *edge, BLUE if is_chosen else "#DDDDDD", 2.5 if is_chosen else 1.5)
    for x, y in experts:
        axes.add_patch(Rectangle((x - 0.45, y - 0.2), 0.9, 0.4, facecolor=ORANGE, zorder=2))
    node(axes, gate, GREY, 0.28)
    node(axes, token, BLUE)
    node(axes, end, BLUE)


def draw_sequences(axes: Axes) -> None:
    for batch, lengths in enumerate(((3.0, 2.9, 2.7, 2.5), (1.6, 1.5, 1.4, 1.4), (0.7, 0.6, 0.6, 0.5))):
        x = (0.4, 3.7, 5.6)[batch]
        axes.add_patch(Rectangle((x, -0.1), lengths[0], 2.2, facecolor="#E4E4E4"))
        for number, length in enumerate(lengths):
            axes.add_patch(Rectangle((x, 1.66 - 0.56 * number), length, 0.4, facecolor=(BLUE, GREEN, ORANGE)[batch]))


def draw_machine(axes: Axes) -> None:
    visible = [(0.9 + 1.3 * number, 0.1) for number in range(5)]
    hidden = [(1.55 + 1.3 * number, 1.9) for number in range(4)]
    for one in visible:
        for other in hidden:
            line(axes, one, other, "#CCCCCC", 1.2)
    for place in visible:
        node(axes, place, BLUE, 0.26)
    for place in hidden:
        node(axes, place, ORANGE, 0.26)


def draw_graph(axes: Axes) -> None:
    places = [(1.0, 0.3), (2.3, 1.8), (3.4, 0.3), (4.7, 1.7), (5.9, 0.4), (0.9, 1.9)]
    edges = [(0, 1), (1, 2), (0, 2), (2, 3), (3, 4), (5, 1)]
    axes.add_patch(Polygon([places[number] for number in (0, 1, 2)], facecolor=RED, alpha=0.25, zorder=0))
    for first, second in edges:
        is_triangle = {first, second} <= {0, 1, 2}
        line(axes, places[first], places[second], RED if is_triangle else GREY, 2.5 if is_triangle else 1.5)
    for number, place in enumerate(places):
        node(axes, place, RED if number < 3 else BLUE, 0.25)


DRAWINGS: dict[str, Callable[[Axes], None]] = {
    "card_experts": draw_experts,
    "card_sequences": draw_sequences,
    "card_belief": draw_machine,
    "card_relational": draw_graph,
}


def draw(name: str) -> plt.Figure:
    figure, axes = plt.subplots(figsize=(5, 1.6), layout="constrained")
    axes.set(xlim=(0, 7), ylim=(-0.25, 2.25), aspect="equal")
    axes.axis("off")
    DRAWINGS[name](axes)
    return figure


if __name__ == "__main__":
    for name in DRAWINGS:
        save(draw(name), name)
