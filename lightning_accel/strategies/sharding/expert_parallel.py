"""Expert parallelism. Shapes: N tokens, D features, E experts, S slots, W processes, R received tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_accel._private.torch import all_to_all, parameters_of
from lightning_accel.ops.extras import runs_triton
from lightning_accel.ops.grouped_products import gather_rows, sort_by_source, sum_rows


def find_experts(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of ``module`` that hold experts, by name.

    A layer holds experts if it has an attribute ``expert_parameters``: the names of its parameters whose first
    dimension counts experts, (E, ...). Its ``forward(tokens, token_of_slot, weight_of_slot, counts)`` maps ``tokens``
    (N, D) to (N, D): the sum, over the slots of each token, of the output of the slot's expert times the slot's weight.
    A slot is the assignment of a token to an expert; slots (S,) are sorted by expert, and ``counts`` (E,) int64 holds
    the number of slots of each expert; slots past ``counts.sum()`` are not computed.

    Args:
        module: module to search.

    Example:
        >>> from lightning_accel import MixtureOfExperts
        >>> list(find_experts(nn.Sequential(nn.Linear(4, 8), MixtureOfExperts(8, 16, num_experts=4))))
        ['1.experts']
    """
    return {name: one for name, one in module.named_modules() if hasattr(one, "expert_parameters")}


def expert_parameters(experts: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters, by name, of a layer with experts whose first dimension counts experts."""
    named = dict(experts.named_parameters(recurse=False))
    return {name: named[name] for name in experts.expert_parameters if name in named}  # type: ignore[union-attr]


def distribute_experts(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Keep E / W experts of a layer on each process of ``mesh`` (W,), and send tokens to where their experts are.

    No token is dropped. Gradients are the mean, over processes, of those from the tokens of each process, as in
    DistributedDataParallel. Every process must run the layer equally often, forward and backward.
    """
    for name, parameter in expert_parameters(experts).items():
        local = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()  # a view would keep all in memory
        part = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        experts.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    experts.forward = partial(_forward, experts, experts.forward, mesh.get_group())


def _forward(
    experts: nn.Module,
    run: Any,
    group: ProcessGroup,
    tokens: Tensor,
    token_of_slot: Tensor,
    weight_of_slot: Tensor,
    counts: Tensor,
) -> Tensor:
    num_ranks = dist.get_world_size(group)
    arriving = torch.empty_like(counts)  # (W * E / W,): tokens from each process for each local expert
    dist.all_to_all_single(arriving, counts.contiguous(), group=group)
    # the only wait for the device: the sizes of the exchange must be known on the host
    sent, received = torch.stack([counts, arriving]).view(2, num_ranks, -1).sum(dim=2).tolist()
    taken, weights = token_of_slot[: sum(sent)], weight_of_slot[: sum(sent)]
    tokens = _to_autocast_dtype(tokens)
    slots = sort_by_source(taken, len(taken), len(tokens)) if runs_triton(tokens) else None
    rows = tokens.index_select(0, taken) if slots is None else gather_rows(tokens, slots)
    arrived = all_to_all(rows, received, sent, group)  # (R, D), sorted by process, then by expert
    by_source = arriving.view(num_ranks, -1)
    expert_of_row = torch.arange(by_source.shape[1], device=tokens.device).repeat(num_ranks)
    expert_of_row = expert_of_row.repeat_interleave(arriving, output_size=sum(received))
    ones = torch.ones(sum(received), device=tokens.device)
    with _local_parameters(experts, num_ranks):
        made = run(arrived, expert_of_row.argsort(stable=True), ones, by_source.sum(dim=0))  # (R, D)
    made = all_to_all(made.contiguous(), sent, received, group)  # (S, D)
    if slots is not None:
        return sum_rows(made, weights, slots)
    wide = torch.promote_types(made.dtype, torch.float32)
    weighted = made.to(wide) * weights.to(wide).unsqueeze(1)
    out = torch.zeros(tokens.shape, dtype=wide, device=tokens.device)
    return out.index_add(0, taken, weighted).to(made.dtype)


def _to_autocast_dtype(tokens: Tensor) -> Tensor:
    device_type = tokens.device.type
    if not torch.is_autocast_enabled(device_type) or tokens.dtype == torch.float64:
        return tokens
    return tokens.to(torch.get_autocast_dtype(device_type))  # half the bytes to send


@contextmanager
def _local_parameters(experts: nn.Module, num_ranks: int) -> Iterator[None]:
    """Temporarily replace the layer's parameters by their local shards, whose gradients are means over processes."""
    whole = expert_parameters(experts)
    try:
        for name, parameter in whole.items():
            local = parameter.to_local()  # type: ignore[attr-defined]
            if local.requires_grad:
                local.register_hook(lambda grad: grad / num_ranks)
            parameters_of(experts)[name] = local
        yield
    finally:
        parameters_of(experts).update(whole)
