"""Full checkpoints of a module whose stages lie on several processes."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_accel.strategies.pipeline_engine import Pipeline
from lightning_accel.strategies.pipeline_stage import to_cpu


class FullState:
    """Gather on rank 0 what the stages hold, in the names and the order of the full module.

    Args:
        module: holds the parameters of its own stages, and all others on the meta device.
        pipeline: the stages.
    """

    def __init__(self, module: nn.Module, pipeline: Pipeline) -> None:
        self.module = module
        self.pipeline = pipeline

    def module_state(self) -> dict[str, Any]:
        """Return the module's state dict; empty on ranks other than the first of the pipeline.

        What no layer of the chain holds, such as a counter, comes from the last stage, which alone runs the full step.
        """
        state = self.module.state_dict()
        owner = self._owner_ranks()
        last_rank = self.pipeline.last % self.pipeline.ranks.size
        own = {
            name: to_cpu(value)
            for name, value in state.items()
            if owner.get(name, last_rank) == self.pipeline.ranks.rank
        }
        parts = self._gather(own)
        if not parts:
            return {}
        state.update({name: parts[owner.get(name, last_rank)][name] for name in state})
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state dict; empty on ranks other than the first of the pipeline."""
        state = optimizer.state_dict()
        own = {
            number: to_cpu(state["state"][number]) for number in _held_numbers(optimizer) if number in state["state"]
        }
        parts = self._gather(own)
        if not parts:
            return {}
        merged = {number: value for part in reversed(parts) for number, value in part.items()}
        return {**state, "state": dict(sorted(merged.items()))}

    def load_module(self, state: Mapping[str, Any], strict: bool) -> None:
        """Load the entries of a full state dict that this process holds."""
        elsewhere = {name for name, value in self.module.state_dict().items() if value.is_meta}
        self.module.load_state_dict(
            {name: value.to("meta") if name in elsewhere else value for name, value in state.items()}, strict=strict
        )

    def load_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load the state of the parameters that this process holds from a full optimizer state dict."""
        held = set(_held_numbers(optimizer))
        own = {number: value for number, value in state["state"].items() if number in held}
        optimizer.load_state_dict({**state, "state": own})

    def _owner_ranks(self) -> dict[str, int]:
        """Return the pipeline rank that holds each entry of the state dict, for entries that belong to a layer."""
        chain = self.pipeline.chain
        stage_of = {id(layer): stage for layer, stage in zip(chain.layers, chain.stage_of, strict=True)}
        owner: dict[str, int] = {}
        for prefix, module in self.module.named_modules(remove_duplicate=False):
            if (stage := stage_of.get(id(module))) is not None:
                names = module.state_dict(prefix=f"{prefix}.", keep_vars=True)
                owner |= dict.fromkeys(names, stage % self.pipeline.ranks.size)
        return owner

    def _gather(self, value: Any) -> list[Any]:
        ranks = self.pipeline.ranks
        parts: list[Any] | None = [None] * ranks.size if ranks.rank == 0 else None
        dist.gather_object(value, parts, dst=ranks.world_rank(0), group=ranks.objects)
        return parts or []


def _held_numbers(optimizer: Optimizer) -> list[int]:
    """Return the numbers of the parameters that are not on the meta device, as in the optimizer's state dict."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [number for number, parameter in enumerate(parameters) if not parameter.is_meta]
