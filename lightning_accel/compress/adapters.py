"""Low-rank adapters in linear layers, by peft, over float or 4-bit weights. Shapes: O outputs, I inputs, R rank."""

import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_accel.compress.uncompiled import uncompiled
from lightning_accel.data.digest import digest_of
from lightning_accel.nn.features import require_width
from lightning_accel.ops.bounds import if_set, require_above, require_integers, require_share
from lightning_accel.ops.extras import import_on_use, require_module
from lightning_accel.ops.names import (
    HEADS_AND_GATES,
    Exclusion,
    clean_name,
    find_excluded,
    require_one_of,
)
from lightning_accel.strategies.checkpoints.reading import read_checkpoint

peft, lora = import_on_use("peft"), import_on_use("peft.tuners.lora")
bnb = import_on_use("bitsandbytes")

BaseForm: TypeAlias = Literal["float", "nf4"]
ADAPTERS = "adapters"  # key of the options in the state of a callback

_NAME = "default"  # peft's name of the only adapter of a layer
_PRUNED = 0.01  # share of zeros from which a weight counts as pruned; trained ones have next to none
_BLOCK = 64  # values of NF4 with one scale; bitsandbytes 0.50 reads none right that go on in a next row with AVX-512
_READ_NO_WEIGHT = True, False, "gaussian", "orthogonal"  # init_lora_weights of peft that make A and B alone
_CONVOLUTIONS = nn.Conv1d, nn.Conv2d


def add_adapters_(
    module: nn.Module,
    rank: int = 8,
    *,
    alpha: float | None = None,
    dropout: float = 0.0,
    include: Sequence[Exclusion] | None = None,
    exclude: Sequence[Exclusion] = (),
    train: Sequence[Exclusion] = (),
    base: BaseForm = "float",
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Freeze ``module`` and add a trainable product of rank R to its linear layers, in place.

    A layer y = W x becomes y = W x + alpha / R * B A x with A (R, I) and B (O, R), where B is zero at first, so that
    outputs do not change. Layers are peft's, and keep their names; their weights are found as ``base_layer.weight``.

    Weights with zeros, as of pruning, keep them: a layer of which a hundredth or more is zero becomes
    W x + alpha / R * (M * (B A)) x with the mask M of what is not zero in W, so that the merged weight has the same
    zeros and gives the same outputs. Over 4-bit weights, M is that of the 4-bit values.

    Args:
        module: trained network, changed in place.
        rank: R of each product.
        alpha: numerator of the scale; by default twice the rank.
        dropout: of the input of A, in training.
        include: names or patterns of submodules (``"*.q_proj"``), or classes by name, whose linear layers and
            convolutions get adapters; stacked weights of experts, (experts, I, O) or (experts, O, I), are named too
            (``"*.experts.*"``). By default all linear layers but heads and gates, and those whose weights are shared.
        exclude: names, patterns or classes of what gets none.
        train: names, patterns or classes of what trains in full, such as norms or a new head.
        base: ``"nf4"`` stores the frozen ``nn.Linear`` weights that get adapters in 4 bits, by bitsandbytes.
        options: further fields of ``peft.LoraConfig``, such as ``{"use_rslora": True}``.

    Raises:
        ValueError: if an option is out of range, a name matches nothing, there is no layer to adapt or to quantize, or
            ``module`` has adapters already.
        TypeError: if weights are pruned whose adapters cannot keep zeros (convolutions, experts, variants of LoRA).
        ModuleNotFoundError: if peft or bitsandbytes is missing.

    Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685, eq. 3; 4 bits: Dettmers et al. 2023,
    https://arxiv.org/abs/2305.14314; masks: Zimmer et al. 2023, https://arxiv.org/abs/2312.15230, section 3.
    """
    require_rank(rank, alpha, dropout, base)
    require_module("peft")
    if has_adapters(module):
        raise ValueError(f"{type(module).__name__} has adapters already; make it anew, or merge them first")
    found = _find_targets(module, include, exclude)
    trained = find_excluded(module, train, "train") if train else {}
    in_full = [value for name, value in module.named_parameters() if clean_name(name) in trained]
    if twice := sorted({*found.layers, *found.stacked} & {*trained}):
        raise ValueError(f"{', '.join(twice[:5])} would train in full and get adapters; name one in exclude or train")
    pruned = [name for name, layer in found.layers.items() if _is_pruned(layer.weight)]
    _require_maskable(module, found, pruned, options or {})
    if base == "nf4":
        _quantize_(module, found.layers, options or {})
    _inject_(
        module,
        peft.LoraConfig(
            r=rank,
            lora_alpha=2 * rank if alpha is None else alpha,
            lora_dropout=dropout,
            target_modules=r"inner\.(" + "|".join(map(re.escape, found.layers)) + ")" if found.layers else None,
            target_parameters=[f"inner.{name}" for name in found.stacked] or None,
            **options or {},
        ),
    )
    for name in pruned:
        module.get_submodule(name).lora_variant[_NAME] = _masked_variant()  # type: ignore[operator,index]
    for one in module.modules():  # of torch, whose inference reads the weights of these layers and calls none
        if isinstance(one, nn.TransformerEncoderLayer) and has_adapters(one):
            one.activation_relu_or_gelu = 0
        elif isinstance(one, nn.TransformerEncoder) and has_adapters(one):
            one.use_nested_tensor = False
    for value in in_full:
        value.requires_grad_(True)
    return module


def require_rank(rank: int, alpha: float | None, dropout: float, base: str) -> None:
    """Reject, with a ValueError, values that are out of range."""
    require_integers(1, rank=rank)
    require_above(0, **if_set(alpha=alpha))
    require_share(dropout=dropout)
    require_one_of("base", base, get_args(BaseForm))


def has_adapters(module: nn.Module) -> bool:
    """Return whether a layer of ``module`` has an adapter of peft's."""
    return "peft" in sys.modules and any(isinstance(one, lora.LoraLayer) for one in module.modules())


def adapts_stacked_weights(module: nn.Module) -> bool:
    """Return whether stacked weights of experts have adapters."""
    return has_adapters(module) and any(isinstance(one, lora.layer.ParamWrapper) for one in module.modules())


def adapter_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of the adapters by name, without those of the layers that they are added to."""
    return {name: value for name, value in module.named_parameters() if ".lora_" in name}


@torch.no_grad()
def merge_adapters_(module: nn.Module) -> nn.Module:
    """Replace each adapted layer with a plain one of equal outputs, in place: W + alpha / R * B A, with W in floats.

    Layers get the names and classes that they had before. A merged weight that is shared with another layer becomes one
    of its own. All parameters train again.

    Returns:
        ``module``.

    Raises:
        ValueError: if a merged weight is not finite.
    """
    if not has_adapters(module):
        return module
    users = Counter(id(value) for one in module.modules() for value in one.parameters(recurse=False))
    adapted = [(name, one) for name, one in module.named_modules() if isinstance(one, lora.LoraLayer)]
    done: set[int] = set()
    for name, outer in adapted:
        if id(outer) in done:  # adapters of several stacked weights of one module are nested
            continue
        layer: Any = outer
        while isinstance(layer, lora.LoraLayer):
            done.add(id(layer))
            merged = layer.get_base_layer()
            if is_packed(merged.weight) if hasattr(merged, "weight") else False:
                layer.base_layer = merged = _unpacked(merged, layer.lora_A[_NAME].weight.dtype)
            elif isinstance(getattr(merged, "weight", None), nn.Parameter) and users[id(merged.weight)] > 1:
                merged.weight = nn.Parameter(merged.weight.detach().clone())
            layer.merge(safe_merge=True)
            layer = layer.base_layer
        module.set_submodule(name, layer)
    for value in module.parameters():
        if value.is_floating_point():
            value.requires_grad_(True)
    return module


def load_adapted(module: nn.Module, checkpoint: str | Path | Mapping[str, Any]) -> nn.Module:
    """Give ``module``, which has the weights that were adapted, the adapters of a checkpoint, and merge them, in place.

    Args:
        module: network as before the training of the adapters, such as a pretrained one, or from
            :func:`~lightning_accel.compress.load_pruned`.
        checkpoint: a file or its content, of a Trainer with :class:`~lightning_accel.callbacks.LowRankAdapters`.

    Returns:
        ``module``, with plain layers.

    Raises:
        ValueError: if the checkpoint has no adapters, or was trained on other weights than those of ``module``.
    """
    found = checkpoint if isinstance(checkpoint, Mapping) else read_checkpoint(checkpoint)
    states = [state for state in found.get("callbacks", {}).values() if isinstance(state, Mapping)]
    state = next((one for one in states if ADAPTERS in one), None)
    if state is None:
        raise ValueError("the checkpoint was written without LowRankAdapters; load it with load_state_dict")
    with uncompiled(module) as plain:
        add_adapters_(plain, **state[ADAPTERS])
        require_same_base(state["base"], digest_of_base(plain))
        own = trained_state(plain)
        weights = {clean_name(name): value for name, value in found["state_dict"].items()}
        plain.load_state_dict({**own, **{name: value for name, value in weights.items() if name in own}}, strict=False)
        merge_adapters_(plain)
    return module


def trained_state(module: nn.Module) -> dict[str, Any]:
    """Return the entries of ``module.state_dict()`` without those of frozen parameters."""
    frozen = frozen_names(module)
    return {name: value for name, value in module.state_dict().items() if name not in frozen}


def frozen_names(module: nn.Module) -> set[str]:
    """Return the names of the parameters that do not train, each of the names of a shared one."""
    named = module.named_parameters(remove_duplicate=False)
    return {name for name, value in named if not value.requires_grad}


def digest_of_base(module: nn.Module) -> str:
    """Return a digest of the frozen parameters, whole and on the CPU: names, dtypes, shapes and bits."""
    parts: list[Any] = []
    for name, value in module.named_parameters():
        if not value.requires_grad:
            tensors = [value, *_scales(value)]
            parts.append([clean_name(name), *(f"{one.dtype} {tuple(one.shape)}" for one in tensors)])
            parts += [one.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for one in tensors]
    return digest_of(*parts)


def require_same_base(saved: str, now: str) -> None:
    """Reject, with a ValueError, adapters of other frozen weights, by the digests of both."""
    if saved != now:
        raise ValueError(
            "the adapters of the checkpoint were trained on other frozen weights than those of this run: their digest "
            f"is {saved} there, {now} here. Checkpoints hold only what trains, so begin with the same weights: load "
            "them in the module's __init__, or name their file by LowRankAdapters(checkpoint=...)"
        )


def is_packed(value: Any) -> bool:
    """Return whether a parameter holds 4-bit values, beside a ``quant_state`` with their scales."""
    return getattr(value, "quant_state", None) is not None


# ---- what is adapted


class _Targets(NamedTuple):
    layers: dict[str, Any]  # linear layers and convolutions
    stacked: list[str]  # parameters of three dimensions


def _find_targets(
    module: nn.Module, include: Sequence[Exclusion] | None, exclude: Sequence[Exclusion] = ()
) -> _Targets:
    names = Counter(id(one) for _, one in module.named_modules(remove_duplicate=False))
    users = Counter(id(value) for one in module.modules() for value in one.parameters(recurse=False))
    excluded = find_excluded(module, exclude)
    chosen = None if include is None else find_excluded(module, include, "include")

    def is_wanted(name: str, layer: Any) -> bool:
        if clean_name(name) in excluded or names[id(layer)] > 1:
            return False
        if chosen is not None:
            return clean_name(name) in chosen and (_is_linear(layer) or type(layer) in _CONVOLUTIONS)
        is_head = name.rpartition(".")[2] in HEADS_AND_GATES
        return _is_linear(layer) and not is_head and users[id(layer.weight)] == 1

    layers = {name: layer for name, layer in module.named_modules() if name and is_wanted(name, layer)}
    stacked = [
        name
        for name, value in module.named_parameters()
        if chosen is not None and clean_name(name) in chosen and clean_name(name) not in excluded
        and value.ndim == 3 and name.rpartition(".")[0] not in layers
    ]  # fmt: skip
    if not layers and not stacked:
        kinds = ", ".join(sorted({type(one).__name__ for one in module.modules() if one is not module}))
        raise ValueError(
            f"{type(module).__name__} has no linear layer to adapt"
            + (" among those that include names" if include is not None else " beside heads, gates and shared ones")
            + f"; it consists of {kinds}. Name layers in include, or experts by their stacked weights; layers that "
            "setup() of a LightningModule makes come too late: make them in __init__ or configure_model"
        )
    return _Targets(layers, stacked)


def _is_linear(layer: nn.Module) -> bool:
    # subclasses may be used without being called, as the output layer of nn.MultiheadAttention is
    kind = type(layer)
    return kind is nn.Linear or (kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers."))


def _inject_(module: nn.Module, config: Any) -> None:
    holder = nn.ModuleDict({"inner": module})  # peft reads a model's ``config``, which may be anything here
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # it does the right thing
        peft.inject_adapter_in_model(config, holder)


# ---- weights that are zero


def _is_pruned(weight: Tensor) -> bool:
    return int(weight.count_nonzero()) <= (1 - _PRUNED) * weight.numel()


def _require_maskable(module: nn.Module, found: _Targets, pruned: Iterable[str], options: Mapping[str, Any]) -> None:
    wrong = [name for name in pruned if not _is_linear(found.layers[name])]
    wrong += [name for name in found.stacked if _is_pruned(module.get_parameter(name))]
    variants = sorted(name for name in options if name.startswith("use_") and name != "use_rslora" and options[name])
    if variants:
        wrong += pruned
    if wrong:
        raise TypeError(
            f"{', '.join(wrong[:5])} {'is' if len(wrong) == 1 else 'are'} pruned, and adapters would fill the zeros "
            f"when they are merged: those of {'linear layers' if not variants else 'plain LoRA'} keep them. "
            + (f"Leave out {', '.join(variants)}" if variants else "Name them in exclude")
        )


def _masked_variant() -> Any:
    """Return a variant of a linear LoRA layer that adds nothing where the weight is zero."""

    class KeptZeros(lora.layer.LoraVariant):  # type: ignore[misc,name-defined]
        @staticmethod
        def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
            delta = _masked_delta(module, active_adapter)  # as the weight: (O, I), or (I, O) in a Conv1D
            delta = delta.T if module.fan_in_fan_out else delta
            output: Tensor = result + nn.functional.linear(module.lora_dropout[active_adapter](x), delta)
            return output

        @staticmethod
        def merge_safe(module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
            return orig_weight + _masked_delta(module, active_adapter).to(orig_weight.dtype)

    return KeptZeros()


def _masked_delta(layer: Any, adapter: str) -> Tensor:
    base = layer.get_base_layer()
    weight = dequantized(base) if is_packed(base.weight) else base.weight
    delta: Tensor = layer.get_delta_weight(adapter)
    return delta * weight.ne(0)


# ---- 4 bits


def _quantize_(module: nn.Module, layers: Mapping[str, nn.Module], options: Mapping[str, Any]) -> None:
    """Replace the ``nn.Linear`` among ``layers`` with layers that hold their weights in 4 bits, without gradients."""
    require_module("bitsandbytes")
    linear = {name: layer for name, layer in layers.items() if type(layer) is nn.Linear}
    if not linear:
        kinds = ", ".join(sorted({type(one).__name__ for one in layers.values()})) or "stacked weights"
        raise ValueError(f"base='nf4' stores nn.Linear in 4 bits, and adapters go to {kinds}; take base='float'")
    padded = [name for name, layer in linear.items() if _padding(layer)]
    without_weight = {"use_dora": (None, False), "init_lora_weights": (None, *_READ_NO_WEIGHT)}
    reading = [name for name, plain in without_weight.items() if options.get(name) not in plain]
    if padded and reading:
        raise ValueError(
            f"{' and '.join(reading)} of peft cannot read 4-bit weights whose inputs are no multiple of {_BLOCK}, as "
            f"those of {', '.join(padded[:5])}: name them in exclude, leave the option out, or take base='float'"
        )
    for name, layer in linear.items():
        module.set_submodule(name, _packed(layer))


def _packed(layer: nn.Linear) -> nn.Module:
    packed = bnb.nn.Linear4bit(layer.in_features, layer.out_features, bias=False, quant_type="nf4", device="meta")
    weight = F.pad(layer.weight.detach(), (0, _padding(layer)))
    packed.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=packed).to(weight.device)
    packed.weight.module = None  # copies of the layer would refer to this one
    packed.bias = layer.bias
    # another layout for inference on some CPUs, to which a layer would change its weight in validation
    packed.support_avx512bf16_for_cpu = False
    packed.compute_type_is_set = True  # that of inputs, not of the first input
    packed.register_forward_pre_hook(_prepare_input)
    packed.register_state_dict_post_hook(_drop_scales)
    packed.train(layer.training)
    result: nn.Module = packed
    return result


def _padding(layer: Any) -> int:
    """Return how many columns of zeros make the rows of a weight whole blocks."""
    return -int(layer.in_features) % _BLOCK


def _prepare_input(layer: Any, args: tuple[Tensor]) -> tuple[Tensor]:
    """Cast the input as autocast does that of ``nn.Linear``, so that outputs have its dtype, and pad it as rows are."""
    require_width(layer, args[0], "in_features", int(layer.in_features), "x (..., {})")
    x, kind, padding = args[0], args[0].device.type, _padding(layer)
    if torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    return (F.pad(x, (0, padding)) if padding else x,)


def _drop_scales(layer: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Remove the scales from a state dict, which no ``load_state_dict`` takes; the weight stays as it was made."""
    for name in [name for name in state if name.startswith(f"{prefix}weight.")]:
        del state[name]


def _scales(value: Any) -> list[Tensor]:
    if not is_packed(value):
        return []
    outer, inner = value.quant_state, value.quant_state.state2
    return [outer.absmax] if inner is None else [outer.absmax, outer.offset.reshape(1), inner.absmax, inner.code]


def dequantized(layer: Any) -> Tensor:
    """Return the 4-bit weight of a layer as floats (O, I), in the dtype that it was made of."""
    result: Tensor = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return result[:, : layer.in_features].contiguous()


def _unpacked(layer: Any, dtype: torch.dtype) -> nn.Linear:
    """Return a plain layer; ``dtype`` is that of its adapter."""
    made = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    weight = dequantized(layer)
    # peft keeps adapters of 16-bit weights in float32; else a plug-in has cast all but the 4 bits
    made.weight = nn.Parameter(weight.to(dtype) if weight.dtype == torch.float32 else weight)
    if layer.bias is not None:
        made.bias = nn.Parameter(layer.bias.detach().to(made.weight.dtype))
    return made.train(layer.training)
