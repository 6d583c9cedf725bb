"""Sizes in the configuration of a transformers model whose parts were removed."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

_HIDDEN = "hidden_size", "n_embd", "d_model", "dim"
_INNER = "intermediate_size", "n_inner", "d_ff", "ffn_dim", "hidden_dim"
_HEADS = "num_attention_heads", "n_head", "num_heads", "n_heads"
_QUERIES = ".q_proj.weight", ".query.weight", ".q_lin.weight", ".q.weight"
_KEYS = ".k_proj.weight", ".key.weight", ".k_lin.weight", ".k.weight"
_OF_ATTENTION = *_HEADS, "num_key_value_heads", "head_dim", "attention_head_size"
_INNER_WEIGHTS = {
    ".down_proj.weight": -1, ".fc2.weight": -1, ".lin2.weight": -1, ".wo.weight": -1, ".intermediate.dense.weight": 0,
}  # fmt: skip  # the dimension of the inner width
_OF_EXPERTS = {
    ("moe_intermediate_size", "intermediate_size"): ".experts.down_proj",
    ("shared_expert_intermediate_size",): ".shared_expert.down_proj.weight",
}


def update_config_(model: nn.Module) -> None:
    """Set the sizes in the configuration of a transformers model to those of its weights.

    Afterwards ``model.save_pretrained(folder)`` writes what ``from_pretrained`` and other tools read. The configuration
    stays as it is if this fails. A head that no longer has the weight of the embedding, as after
    :func:`~lightning_accel.compress.merge_adapters_`, is no longer tied to it there.

    Args:
        model: a model of transformers, from which channels, whole heads, blocks or experts were removed.

    Raises:
        TypeError: if it has no configuration of transformers.
        ValueError: if no configuration of its class has these sizes, as where layers differ.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "save_pretrained"):
        raise TypeError(
            f"{type(model).__name__} is no model of transformers; give the one within it, such as module.model"
        )
    found = {name: list(value.shape) for name, value in model.state_dict().items()}
    sizes = _sizes(model, config, found)
    changed = copy.deepcopy(config)
    for name, value in sizes.items():
        setattr(changed, name, value)
    try:
        with torch.device("meta"):
            made: nn.Module = type(model)(changed)
        needed = {name: list(value.shape) for name, value in made.state_dict().items()}
    except Exception as error:
        raise ValueError(f"no {type(config).__name__} describes what is left, {sizes}: {error}") from error
    needed |= _numbers(made)
    found |= _numbers(model)
    if needed != found:
        name = next(name for name in sorted({**found, **needed}) if found.get(name) != needed.get(name))
        raise ValueError(
            f"no {type(config).__name__} describes what is left: with {sizes}, {name} would be {needed.get(name)}; it "
            f"is {found.get(name)}. {_advice(config, sizes, found.get(name))}"
        )
    for name, value in sizes.items():
        setattr(config, name, value)


def _advice(config: Any, sizes: Mapping[str, Any], found: Any) -> str:
    """Return what else to do where ``found``, a shape or a factor, is none that a configuration leads to."""
    width = next((name for name in _HIDDEN if name in sizes), None)
    is_narrowed = width is not None and sizes[width] != getattr(config, width)
    if isinstance(found, float):
        return "Keep what this factor depends on, such as the width: OneShotPruning(structure='channel')"
    if is_narrowed:
        return (
            "Keep the width: OneShotPruning(structure='channel') or 'block'; lightning_accel.compress.load_pruned "
            "loads this model as it is"
        )
    return "Remove an equal share of every layer: OneShotPruning(structure='width')"


def _numbers(model: nn.Module) -> dict[str, Any]:
    """Return what layers compute with that is no tensor: numbers of heads, and factors, such as those of embeddings."""
    return {
        f"{name}.{key}": value
        for name, one in model.named_modules()
        for key, value in vars(one).items()
        if (isinstance(value, int) and key in _OF_ATTENTION)
        or (isinstance(value, float) and key != "p" and "dropout" not in key)  # which only training has
    }


def _sizes(model: nn.Module, config: Any, shapes: Mapping[str, list[int]]) -> dict[str, int]:
    """Return the sizes by their names in the configuration, as far as layers and names of weights show them."""
    found: dict[tuple[str, ...], int] = {}
    with suppress(AttributeError, NotImplementedError):  # of models that have no tokens
        found[_HIDDEN] = int(model.get_input_embeddings().weight.shape[1])  # type: ignore[operator]
    queries, keys = (_first(shapes, dict.fromkeys(names, 0)) for names in (_QUERIES, _KEYS))
    heads, old_hidden = (_value(config, names) for names in (_HEADS, _HIDDEN))
    dense = {name: shape for name, shape in shapes.items() if ".shared_expert" not in name}
    if (inner := _first(dense, _INNER_WEIGHTS)) is not None:
        found[_INNER] = inner
    for names, ending in _OF_EXPERTS.items():
        if (inner := _first(shapes, {ending: -1})) is not None:
            # GPT-OSS has (experts, inner, hidden), others (experts, hidden, inner)
            found[names] = _first(shapes, {ending: -2}) or inner if inner == found.get(_HIDDEN) else inner
    if hasattr(config, "word_embed_proj_dim"):  # of OPT, whose layers may be wider than its embeddings
        found["word_embed_proj_dim",] = found[_HIDDEN]
        found[_HIDDEN] = _first(shapes, {".q_proj.weight": 1}) or found[_HIDDEN]
    found |= {(name,): len(stack) for name, stack in _stacks(model)}
    if _has_own_head(model, config):
        found["tie_word_embeddings",] = False
    known = [vars(one)[key] for one in model.modules() for key in _HEADS if isinstance(vars(one).get(key), int)]
    size = getattr(config, "head_dim", None) or (old_hidden // heads if heads else 0)
    if known:
        found[_HEADS] = known[0]
    elif queries is not None and size:
        found |= {_HEADS: queries // size, ("head_dim",): size}
    if keys is not None and size:
        found["num_key_value_heads",] = keys // size
    sizes = {
        next(name for name in names if hasattr(config, name)): value
        for names, value in found.items()
        if any(hasattr(config, name) for name in names)
    }
    sizes_of_heads = {vars(one)["head_dim"] for one in model.modules() if isinstance(vars(one).get("head_dim"), int)}
    if not hasattr(config, "head_dim") and len(sizes_of_heads) == 1 and heads:  # of Phi-3, which takes a quotient
        (size,) = sizes_of_heads
        hidden = next((sizes[name] for name in _HIDDEN if name in sizes), old_hidden)
        sizes |= {"head_dim": size} if size * heads != hidden else {}
    return sizes


def _stacks(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    """Yield the blocks of encoder and decoder, as of T5, with the name of their number in the configuration."""
    for side, name in (("encoder", "num_layers"), ("decoder", "num_decoder_layers")):
        stack = getattr(getattr(model, side, None), "block", None)
        if isinstance(stack, nn.ModuleList):
            yield name, stack


def _has_own_head(model: Any, config: Any) -> bool:
    """Return whether the head has a weight of its own where the configuration says that it has the embedding's."""
    if not getattr(config, "tie_word_embeddings", False):
        return False
    with suppress(AttributeError, NotImplementedError):  # of models without tokens, and of heads that are no layer
        return model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    return False


def _first(shapes: Mapping[str, list[int]], dims: Mapping[str, int]) -> int | None:
    found = ((shape, dim) for name, shape in shapes.items() for ending, dim in dims.items() if name.endswith(ending))
    return next((shape[dim] for shape, dim in found), None)


def _value(config: Any, names: tuple[str, ...]) -> int:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), 0)
