"""Search for the contrastive-divergence samplers of a module, which are no submodules that torch would list."""

from collections.abc import Iterator

from torch import nn

from lightning_accel.nn import ContrastiveDivergence


def find_contrastive_divergences(module: nn.Module) -> list[ContrastiveDivergence]:
    """Return the samplers among the attributes of ``module`` itself, also within lists, tuples and dicts."""
    return [one for value in vars(module).values() for one in _search(value)]


def _search(value: object) -> Iterator[ContrastiveDivergence]:
    if isinstance(value, ContrastiveDivergence):
        yield value
    elif isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _search(part)
