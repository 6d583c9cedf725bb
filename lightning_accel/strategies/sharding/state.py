"""States of sharded modules and optimizers: gathering, sharding, and folders with a shard from each process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_accel._private.torch import tree_map_only
from lightning_accel.strategies.sharding.metadata import REST


def gather_full_state(state: Any, keep: bool) -> Any:
    """Gather every sharded tensor of ``state`` on the CPU; without ``keep``, take part but return None for tensors.

    Every process of the mesh must call it.
    """

    def gather(tensor: Tensor) -> Tensor | None:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return whole.detach().cpu() if keep else None  # one tensor at a time: a device never holds the full model

    return tree_map_only(Tensor, gather, state)


def shard_like(whole: Tensor, part: Tensor) -> Tensor:
    """Shard ``whole``, which all processes have, as ``part`` is sharded, without communication."""
    if not isinstance(part, DTensor):
        return whole
    whole = whole.to(part.device)
    return distribute_tensor(whole, part.device_mesh, part.placements, src_data_rank=None)


def load_full_model(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Load the ``state`` of an unsharded module into a sharded one."""
    own = module.state_dict()
    split = {name: shard_like(value, own[name]) if name in own else value for name, value in state.items()}
    module.load_state_dict(split, strict=strict)


def load_full_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load an optimizer ``state`` of unsharded parameters into an optimizer of sharded ones in the same order."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    if len(numbers) != len(parameters):
        raise ValueError(
            f"the checkpoint holds the optimizer states of {len(numbers)} parameters, but the optimizer has "
            f"{len(parameters)}; resume with the model and the optimizer of the run that wrote it"
        )
    part_of = dict(zip(numbers, parameters, strict=True))

    def split(number: int, value: Any) -> Any:
        part = part_of[number]
        return shard_like(value, part) if isinstance(value, Tensor) and value.shape == part.shape else value

    states = {
        number: {key: split(number, value) for key, value in one.items()} for number, one in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": states})


def local_state(module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
    """Return weights and optimizer states by parameter name, with the shards of this process."""
    state: dict[str, Any] = {"state_dict": get_model_state_dict(module)}
    return state | {f"optimizer_{i}": get_optimizer_state_dict(module, one) for i, one in enumerate(optimizers)}


def is_sharded_checkpoint(path: str | Path) -> bool:
    """Return whether ``path`` is a folder of shards, of ours or of Lightning's ModelParallelStrategy."""
    return (Path(path) / REST).is_file()


def load_model_shards(folder: Path, module: nn.Module, strict: bool) -> None:
    """Load the weights in ``folder`` into ``module``, however either is sharded."""
    state = {"state_dict": get_model_state_dict(module)}
    planner = DefaultLoadPlanner(allow_partial_load=not strict)
    load(state, checkpoint_id=folder, planner=planner)
    module.load_state_dict(state["state_dict"], strict=strict)


def load_optimizer_shards(folder: Path, module: nn.Module, optimizers: list[Optimizer]) -> None:
    """Load the optimizer states in ``folder``."""
    for number, optimizer in enumerate(optimizers):
        state = {f"optimizer_{number}": get_optimizer_state_dict(module, optimizer)}
        load(state, checkpoint_id=folder)
        set_optimizer_state_dict(module, optimizer, state[f"optimizer_{number}"])
