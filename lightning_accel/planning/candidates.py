"""Strategies that a run is planned with."""

from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.strategies import Strategy

from lightning_accel.planning.hardware import Cluster
from lightning_accel.strategies import (
    AccelDDPStrategy,
    AtomicModelParallelStrategy,
    FullyShardedStrategy,
    PipelineStrategy,
)

_CLASSES: dict[str, type[Strategy]] = {
    "AccelDDPStrategy": AccelDDPStrategy,
    "AtomicModelParallelStrategy": AtomicModelParallelStrategy,
    "FullyShardedStrategy": FullyShardedStrategy,
    "PipelineStrategy": PipelineStrategy,
}


@dataclass(frozen=True, eq=False)
class Candidate:
    """Hold a strategy to plan.

    Attributes:
        name: as tables show it.
        strategy: class of :mod:`lightning_accel.strategies`, a short name of Lightning's, or None for what the run has.
        arguments: of the class.
        base: the same one without recomputed activations.
    """

    name: str
    strategy: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    base: "Candidate | None" = None

    def config(self) -> dict[str, Any]:
        """Return the arguments of the Trainer as a config has them."""
        if self.strategy in _CLASSES:
            path = f"lightning_accel.strategies.{self.strategy}"
            return {"strategy": {"class_path": path, "init_args": dict(self.arguments)}}
        return {} if self.strategy is None else {"strategy": self.strategy}

    def trainer_options(self) -> dict[str, Any]:
        """Return the arguments of the Trainer."""
        if self.strategy in _CLASSES:
            return {"strategy": _CLASSES[self.strategy](**self.arguments)}
        return self.config()


AS_CONFIGURED = Candidate("as configured")
_AGAIN = {"activation_checkpointing": True}
SMALLEST = Candidate("fsdp2, checkpointing", "FullyShardedStrategy", _AGAIN)


def candidates_for(cluster: Cluster, num_experts: int, has_tensor_plan: bool) -> list[Candidate]:
    """Return the strategies to compare on a cluster, beside what the run has.

    Args:
        cluster: several devices.
        num_experts: the experts of the layer that has fewest; 0 without any.
        has_tensor_plan: whether the module says by ``tensor_parallel_plan`` how it splits its weights.
    """
    sharded = "FullyShardedStrategy"
    found = [Candidate("ddp", "ddp"), Candidate("fsdp2", sharded)]
    if cluster.machines > 1 and cluster.per_machine > 1:
        size = cluster.per_machine
        found.append(Candidate(f"fsdp2, shards of {size}", sharded, {"shard_size": size}))
    for size in dict.fromkeys((cluster.per_machine, cluster.size)):
        if num_experts and size > 1 and num_experts % size == 0:
            name = f"fsdp2, experts on {size}"
            found.append(Candidate(name, sharded, {"expert_parallel_size": size}))
    if cluster.per_machine > 1:
        name, arguments = f"pipeline of {cluster.per_machine}", {"data_parallel_size": cluster.machines}
        found.append(Candidate(name, "PipelineStrategy", arguments))
    if has_tensor_plan and cluster.machines == 1:  # its collectives are on the way of each layer
        sizes = {"data_parallel_size": 1, "tensor_parallel_size": cluster.per_machine}
        found.append(Candidate(f"tensors split in {cluster.per_machine}", "AtomicModelParallelStrategy", sizes))
    return found + [
        Candidate(f"{one.name}, checkpointing", sharded, one.arguments | _AGAIN, base=one)
        for one in found
        if one.strategy == sharded
    ]
