"""Recurrent models as programs of ``torch.export``. Shapes: B samples, T steps, H hidden."""

from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_accel.strategies import write_atomically


class _Step(nn.Module):
    """Run one step, with the states as plain tensors in and out."""

    def __init__(self, model: nn.Module, spec: Any) -> None:
        super().__init__()
        self.model = model
        self.spec = spec

    def forward(self, x: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        scores, state = self.model.step(x, tree_unflatten(states, self.spec))  # type: ignore[operator]
        return scores, tree_flatten(state)[0]


class _FullSequence(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        scores: Tensor = self.model(x, lengths).scores
        return scores


@torch.no_grad()
def export_step(model: nn.Module, x: Tensor, path: str | PathLike[str]) -> torch.export.ExportedProgram:
    """Save ``model.step`` as a program for any number of samples, each of the shape of those in ``x`` (B, ...).

    The program takes ``x`` and a list of states, (1, B, H) each, zeros at first, and returns scores and new states.
    """
    state = model.step(x).state  # type: ignore[operator]
    states, spec = tree_flatten(state)
    rows = Dim("rows", min=1)
    zeros = [torch.zeros_like(one) for one in states]
    shapes = {"x": {0: rows}, "states": [{1: rows} for _ in states]}
    return _save(_Step(model, spec), (x, zeros), shapes, path)


@torch.no_grad()
def export_sequence(model: nn.Module, x: Tensor, path: str | PathLike[str]) -> torch.export.ExportedProgram:
    """Save ``model.forward`` for any number of samples and steps: from ``x`` (B, T, ...) and lengths (B,) to scores."""
    rows, steps = Dim("rows", min=1), Dim("steps", min=1)
    lengths = torch.full((len(x),), x.shape[1], device=x.device)
    return _save(_FullSequence(model), (x, lengths), {"x": {0: rows, 1: steps}, "lengths": {0: rows}}, path)


def _save(
    module: nn.Module, arguments: tuple[Any, ...], shapes: dict[str, Any], path: str | PathLike[str]
) -> torch.export.ExportedProgram:
    program = torch.export.export(module, arguments, dynamic_shapes=shapes)
    with write_atomically(path) as partial, partial.open("wb") as file:  # a path would need a certain suffix
        torch.export.save(program, file)
    return program
