"""Selection of the parameters of a module that can be pruned, with reasons for the others, and of excluded ones."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from lightning_accel.ops.names import list_of_names

Exclusion = str | type[nn.Module]

_EMBEDDINGS = nn.Embedding, nn.EmbeddingBag
_NORMS = nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm
_TRANSPOSED = nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d


class Prunable(NamedTuple):
    """Describe a weight that a layer multiplies with its input."""

    name: str  # of the parameter, without the prefixes of torch.compile
    weight: nn.Parameter
    input_dim: int  # the dimension of the weight that is contracted with the input
    module: nn.Module  # the owner of the parameter


def find_prunable(module: nn.Module, exclude: Sequence[Exclusion] = ()) -> tuple[list[Prunable], dict[str, str]]:
    """Find the weights that can be pruned, and the reason for each other parameter.

    Weights are parameters of at least two dimensions whose name contains ``weight``: ``weight`` of linear layers and
    convolutions, ``weight_ih_l0`` and the like of recurrent ones, ``in_proj_weight`` of attention; and the stacked
    weights of experts, whatever their name. Embeddings, normalizations, gates and routers, vectors, and frozen
    parameters are not. The last layer is treated like the others.

    Args:
        module: module, whose parameters may be on the meta device.
        exclude: names of parameters or submodules, or patterns of them (``"head"``, ``"blocks.*.out"``,
            ``"*.weight_hh_l*"``), names of classes (``"Conv2d"``), or classes; all parameters of such a module are
            excluded.

    Returns:
        The weights in the order of ``module.named_parameters()``, and reasons by names of the other parameters.

    Raises:
        ValueError: if an entry of ``exclude`` matches nothing.

    >>> found, left_out = find_prunable(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3)))
    >>> [one.name for one in found], left_out
    (['1.weight'], {'0.weight': 'an embedding', '1.bias': 'a bias'})
    """
    exclude = list_of_names(exclude)
    modules = {clean_name(name): one for name, one in module.named_modules()}
    excluded, unused = _excluded(modules, exclude)
    owners: dict[int, list[tuple[str, str, nn.Module]]] = {}
    for path, one in modules.items():
        for own, parameter in one.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((path, own, one))
    found: list[Prunable] = []
    left_out: dict[str, str] = {}
    for raw_name, parameter in module.named_parameters():
        name = clean_name(raw_name)
        named = [entry for entry in exclude if _is_pattern_of(entry, name)]
        unused -= set(named)
        reasons = [f"excluded by {named[0]!r}"] if named else []
        for path, own, owner in owners[id(parameter)]:
            reason = _reason_of_ancestors(path, excluded) or _reason_not_prunable(own, owner, parameter)
            reasons += [reason] if reason else []
        if reasons:
            left_out[name] = reasons[0]
        else:
            _, _, owner = owners[id(parameter)][0]
            found.append(Prunable(name, parameter, _input_dim(owner, parameter), owner))
    if unused:
        raise _unmatched(next(iter(unused)), module, modules)
    return found, left_out


def excluded_parameters(module: nn.Module, exclude: Sequence[Exclusion]) -> set[str]:
    """Return the names of the parameters and buffers that ``exclude`` matches.

    Args:
        module: module with the parameters.
        exclude: names or globs of parameters or submodules (``"network.6"``, ``"*.head"``), classes of modules, or
            names of classes; a submodule stands for all its parameters and buffers.

    Raises:
        ValueError: if an entry matches nothing in ``module``.

    >>> sorted(excluded_parameters(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), ["Linear"]))
    ['0.bias', '0.weight']
    """
    modules = dict(module.named_modules())
    tensors = [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]
    found: set[str] = set()
    for entry in list_of_names(exclude):
        inside = [name for name, part in modules.items() if _is_class_of(entry, part) or _is_pattern_of(entry, name)]
        named = [name for name in tensors if _is_pattern_of(entry, name)]
        if not inside and not named:
            raise _unmatched(entry, module, modules)
        found.update(named)
        found.update(name for name in tensors if any(not one or name.startswith(f"{one}.") for one in inside))
    return found


def clean_name(name: str) -> str:
    """Remove the prefixes of ``torch.compile`` from a name."""
    return name.replace("_orig_mod.", "").removesuffix("._orig_mod").removesuffix("_orig_mod")


def _excluded(modules: dict[str, nn.Module], exclude: Sequence[Exclusion]) -> tuple[dict[str, str], set[Exclusion]]:
    """Return reasons by the names of excluded modules, and the entries that match no module."""
    excluded: dict[str, str] = {}
    unused = set(exclude)
    for entry in exclude:
        for path, one in modules.items():
            if _is_class_of(entry, one) or (path and _is_pattern_of(entry, path)):
                shown = entry.__name__ if isinstance(entry, type) else entry
                excluded.setdefault(path, f"excluded by {shown!r}")
                unused.discard(entry)
    return excluded, unused


def _reason_of_ancestors(path: str, excluded: dict[str, str]) -> str | None:
    parts = path.split(".") if path else []
    above = [".".join(parts[:count]) for count in range(len(parts) + 1)]
    return next((excluded[one] for one in above if one in excluded), None)


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
    is_convolution = isinstance(owner, nn.modules.conv._ConvNd)
    return 1 if is_convolution or weight.ndim == 2 else weight.ndim - 1


def _is_class_of(entry: Exclusion, part: nn.Module) -> bool:
    if isinstance(entry, type):
        return isinstance(part, entry)
    return entry in {kind.__name__ for kind in type(part).__mro__}


def _is_pattern_of(entry: Exclusion, name: str) -> bool:
    return isinstance(entry, str) and fnmatchcase(name, entry)


def _unmatched(entry: Exclusion, module: nn.Module, names: Iterable[str]) -> ValueError:
    shown = entry if isinstance(entry, str) else entry.__name__
    return ValueError(
        f"exclude has {shown!r}, which is no parameter, submodule or class in {type(module).__name__}, nor a pattern "
        f"of one; there are {', '.join([*names][1:9])}"
    )
