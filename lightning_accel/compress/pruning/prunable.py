"""Selection of the parameters of a module that can be pruned, with reasons for the others."""

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from lightning_accel._private.torch import ConvBase, NormBase
from lightning_accel.ops.names import Exclusion, clean_name, find_excluded

_EMBEDDINGS = nn.Embedding, nn.EmbeddingBag
_NORMS = NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm
_TRANSPOSED = nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d


class Prunable(NamedTuple):
    """Describe a weight that a layer multiplies with its input."""

    name: str  # of the parameter, without the prefixes of torch.compile
    weight: nn.Parameter
    input_dim: int  # the dimension of the weight that is contracted with the input
    module: nn.Module  # the owner of the parameter


def find_prunable(module: nn.Module, exclude: Iterable[Exclusion] = ()) -> tuple[list[Prunable], dict[str, str]]:
    """Find the weights that can be pruned, and the reason for each other parameter.

    Weights are parameters of at least two dimensions whose name contains ``weight``: ``weight`` of linear layers and
    convolutions, ``weight_ih_l0`` and the like of recurrent ones, ``in_proj_weight`` of attention; and the stacked
    weights of experts, whatever their name. Embeddings, normalizations, gates and routers, vectors, and frozen
    parameters are not. The last layer is treated like the others.

    Args:
        module: module, whose parameters may be on the meta device.
        exclude: see :func:`~lightning_accel.ops.names.find_excluded`.

    Returns:
        The weights in the order of ``module.named_parameters()``, and reasons by names of the other parameters.

    Raises:
        ValueError: if an entry of ``exclude`` matches nothing.

    >>> found, left_out = find_prunable(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3)))
    >>> [one.name for one in found], left_out
    (['1.weight'], {'0.weight': 'an embedding', '1.bias': 'a bias'})
    """
    excluded = find_excluded(module, exclude)
    owners: dict[int, list[tuple[str, str, nn.Module]]] = {}
    for path, one in module.named_modules(remove_duplicate=False):
        for own, parameter in one.named_parameters(recurse=False):
            name = clean_name(f"{path}.{own}" if path else own)
            owners.setdefault(id(parameter), []).append((name, own, one))
    found: list[Prunable] = []
    left_out: dict[str, str] = {}
    for raw_name, parameter in module.named_parameters():
        reasons: list[str] = []
        for name, own, owner in owners[id(parameter)]:
            reason = f"excluded by {excluded[name]!r}" if name in excluded else None
            reason = reason or _reason_not_prunable(own, owner, parameter)
            reasons += [reason] if reason else []
        if reasons:
            left_out[clean_name(raw_name)] = reasons[0]
        else:
            _, _, owner = owners[id(parameter)][0]
            found.append(Prunable(clean_name(raw_name), parameter, _input_dim(owner, parameter), owner))
    return found, left_out


def _reason_not_prunable(own: str, owner: nn.Module, parameter: Tensor) -> str | None:
    if "bias" in own:
        return "a bias"
    if parameter.ndim < 2:
        return "a vector" if parameter.ndim else "a number"
    if isinstance(owner, _EMBEDDINGS):
        return "an embedding"
    if isinstance(owner, _NORMS):
        return "a normalisation"
    if isinstance(owner, ParametrizationList):
        return "computed by a parametrization"
    if getattr(owner, "keep_float32", False) or type(owner).__name__.endswith(("Gate", "Router")):
        return "a gate, which says where rows go"
    if "weight" not in own and not is_stacked(owner, parameter):
        return f"a parameter of {type(owner).__name__} that is not called a weight"
    return None if parameter.requires_grad else "frozen"


def is_stacked(owner: nn.Module, parameter: Tensor) -> bool:
    """Return whether a parameter holds one matrix for each expert of ``owner``, as fused experts of transformers do.

    >>> import torch
    >>> layer = nn.Module()
    >>> layer.num_experts = 3
    >>> is_stacked(layer, torch.zeros(3, 5, 2)), is_stacked(layer, torch.zeros(3, 5))
    (True, False)
    """
    return parameter.ndim == 3 and (
        hasattr(owner, "expert_parameters") or getattr(owner, "num_experts", None) == parameter.shape[0]
    )


def _input_dim(owner: nn.Module, weight: Tensor) -> int:
    if isinstance(owner, _TRANSPOSED):
        return 0
    if is_stacked(owner, weight) and getattr(owner, "is_transposed", False):  # experts that multiply from the right
        return 1
    if type(owner).__name__ == "Conv1D":  # a linear layer of transformers
        return 0
    is_convolution = isinstance(owner, ConvBase)
    return 1 if is_convolution or weight.ndim == 2 else weight.ndim - 1
