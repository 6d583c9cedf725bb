"""The contrastive divergences that a module trains with; they are no modules, so torch does not list them."""

from collections.abc import Iterator

from torch import nn

from lightning_accel.nn import ContrastiveDivergence


def samplings_of(module: nn.Module) -> list[ContrastiveDivergence]:
    """Find those that are attributes of ``module`` itself, or in lists, tuples and dicts that are."""
    return [one for value in vars(module).values() for one in _found_in(value)]


def _found_in(value: object) -> Iterator[ContrastiveDivergence]:
    if isinstance(value, ContrastiveDivergence):
        yield value
    elif isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _found_in(part)
