"""Conversion of expert weights from and to other layouts. Shapes: D features, H hidden features, E experts."""

import re
from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from lightning_accel.nn.feed_forward import FeedForward
from lightning_accel.ops.expert_mlp import ACTIVATIONS, Activation

Naming: TypeAlias = Literal["mixtral", "olmoe", "stacked"]

# names of the block, and of the gate, up and down projections of one expert, in checkpoint files
_NAMES = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "olmoe": ("mlp", "gate_proj", "up_proj", "down_proj"),
}


def read_transformers(state: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Convert the weights of one mixture of SwiGLU experts from the names of transformers.

    Load the result into ``MixtureOfExperts(dim, hidden_dim, num_experts, k, activation="silu", gated=True,
    bias=False)`` with ``strict=False``, as checkpoints lack the buffers of the gate. OLMoE also needs
    ``gate=functools.partial(TopKGate, normalize=False)``.

    Args:
        state: state dict with ``gate.weight`` and, for each expert e, ``experts.e.w1.weight``, ``w3``, ``w2`` (as in
            files of Mixtral) or ``experts.e.gate_proj.weight``, ``up_proj``, ``down_proj`` (as in files of OLMoE), or
            ``experts.gate_up_proj`` and ``experts.down_proj`` (as in modules of transformers 5). Others are ignored.
        prefix: prefix of these names, such as ``model.layers.0.block_sparse_moe.``

    Raises:
        ValueError: if a weight is missing; the message names it.

    Source: https://huggingface.co/docs/transformers/model_doc/mixtral and .../olmoe
    """
    own = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    if "gate.weight" not in own:
        raise ValueError(f"no {prefix}gate.weight among the weights; such as {', '.join([*state][:3])}. Set prefix")
    stacked = {"experts.gate_up_proj", "experts.down_proj"}
    if stacked <= own.keys():
        up, down = own["experts.gate_up_proj"], own["experts.down_proj"]
    else:
        numbers = [int(found[1]) for name in own if (found := re.match(r"experts\.(\d+)\.", name))]
        style = "mixtral" if "experts.0.w1.weight" in own else "olmoe"
        _, *projections = _NAMES[style]
        names = [[f"experts.{e}.{p}.weight" for p in projections] for e in range(max(numbers, default=0) + 1)]
        if missing := [name for expert in names for name in expert if name not in own]:
            raise ValueError(f"no {prefix}{missing[0]} among the weights, nor {prefix}experts.gate_up_proj")
        up = torch.stack([torch.cat([own[gate], own[up]]) for gate, up, _ in names])
        down = torch.stack([own[down] for _, _, down in names])
    return {"gate.weight": own["gate.weight"], "experts.up_weight": up, "experts.down_weight": down}


def write_transformers(state: Mapping[str, Tensor], naming: Naming, prefix: str | None = None) -> dict[str, Tensor]:
    """Convert the weights of one mixture of SwiGLU experts to the names of transformers.

    Args:
        state: state dict of a mixture without biases and without a shared expert.
        naming: ``mixtral`` or ``olmoe``, as in their files; ``stacked``, as in modules of transformers 5.
        prefix: prefix of the names; by default ``block_sparse_moe.``, ``mlp.`` or nothing.

    Raises:
        ValueError: if the mixture has weights that the layout does not support; the message names them.
    """
    up, down = state["experts.up_weight"], state["experts.down_weight"]
    known = {"gate.weight", "gate.expert_slots", "experts.up_weight", "experts.down_weight"}
    if more := sorted(state.keys() - known):
        raise ValueError(f"the layout of {naming} has no place for {', '.join(more)}")
    if up.shape[1] != 2 * down.shape[2]:
        raise ValueError(f"the layout of {naming} is that of gated experts; make the mixture with gated=True")
    if naming == "stacked":
        named = {"gate.weight": state["gate.weight"], "experts.gate_up_proj": up, "experts.down_proj": down}
        return {(prefix or "") + name: tensor for name, tensor in named.items()}
    block, *projections = _NAMES[naming]
    prefix = f"{block}." if prefix is None else prefix
    written = {f"{prefix}gate.weight": state["gate.weight"]}
    for e, (both, last) in enumerate(zip(up, down, strict=True)):
        for name, tensor in zip(projections, (*both.chunk(2), last), strict=True):
            written[f"{prefix}experts.{e}.{name}.weight"] = tensor.clone()  # files store the whole storage of a slice
    return written


def read_dense(mlp: nn.Module) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Activation]:
    """Return a perceptron's weights (H or 2 * H, D) and (D, H), their biases, and its activation.

    Raises:
        TypeError: if :meth:`lightning_accel.nn.MixtureOfExperts.from_dense` does not support the module.
    """
    if isinstance(mlp, FeedForward):
        return mlp.up.weight, mlp.down.weight, mlp.up.bias, mlp.down.bias, mlp.activation
    layers = [layer for layer in mlp if not isinstance(layer, nn.Dropout)] if isinstance(mlp, nn.Sequential) else []
    match layers:
        case [nn.Linear() as first, act, nn.Linear() as second]:
            return first.weight, second.weight, first.bias, second.bias, _read_activation(act)
    match [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")]:
        case [nn.Linear() as gate, nn.Linear() as up, nn.Linear() as down, function]:
            bias = None if gate.bias is None or up.bias is None else torch.cat([gate.bias, up.bias])
            return torch.cat([gate.weight, up.weight]), down.weight, bias, down.bias, _read_activation(function)
    raise TypeError(
        "need a FeedForward, an nn.Sequential of linear layer, activation, linear layer, or a module with gate_proj, "
        f"up_proj, down_proj and act_fn; got {mlp}"
    )


def _read_activation(act: object) -> Activation:
    probe = torch.linspace(-3, 3, 7, device="cpu")
    for name in get_args(Activation):
        if callable(act) and torch.equal(act(probe), ACTIVATIONS[name].function(probe)):
            return name
    raise TypeError(f"the activation must be one of {', '.join(ACTIVATIONS)}, the exact ones; got {act}")
