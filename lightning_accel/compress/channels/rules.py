"""Rules that follow channels through operations that compute; :data:`RULES` has all known operations."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_accel._private.torch import tree_leaves
from lightning_accel.compress.channels.trace import KERNEL, ChannelTrace, Dims, Given, Labels, Rule, operation_name
from lightning_accel.compress.channels.views import VIEWS

_POINTWISE = {
    "where", "masked_fill", "hardswish", "_prelu_kernel", "native_dropout", "dropout", "rsub", "copy", "threshold",
    "nan_to_num", "clamp", "clamp_min", "clamp_max", "hardsigmoid", "_to_copy", "clone", "alias", "detach",
    "lift_fresh", "contiguous", "zeros_like", "ones_like", "full_like", "empty_like", "fill", "zero", "rrelu",
    "log_sigmoid_forward", "mish", "relu6", "hardtanh", "fake_quantize_per_tensor_affine", "rand_like", "randn_like",
    "bernoulli",
}  # fmt: skip


def _tensors(given: Given) -> list[Tensor]:
    return [one for one in tree_leaves(given) if isinstance(one, Tensor)]


def _pointwise(trace: ChannelTrace, given: Given, out: Any) -> list[Dims | None]:
    result = out[0] if isinstance(out, (tuple, list)) else out
    inputs = [(one, trace.of(one)) for one in _tensors(given)]
    reason = f"{trace.where()} joins it with a tensor of fixed size"
    made: Dims = []
    for dim in range(result.ndim):
        from_right = result.ndim - dim
        sides: Dims = []
        for tensor, dims in inputs:
            if tensor.ndim < from_right:
                continue
            if tensor.shape[-from_right] == result.shape[dim]:
                sides.append(dims[-from_right])
            else:
                trace.pin_dims([dims[-from_right]], f"{trace.where()} broadcasts it")
        label = sides[0] if sides else None
        for other in sides[1:]:
            label = trace.unite(label, other, reason)
        made.append(label)
    number = len(out) if isinstance(out, (tuple, list)) else 1
    return [made] * number


def _constant(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    """Follow a constant tensor: the code that makes it will ask for a smaller size once channels are removed."""
    return [[trace.nodes.make(size) for size in out.shape]]


def _mm(first: str, second: str) -> "Rule":
    def rule(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
        one, other = trace.of(given[first]), trace.of(given[second])
        trace.contract(given[first], one[-1], given[second], other[-2])
        made: Dims = [*one[:-1], other[-1]]
        if len(one) == 3:
            made[0] = trace.unite(one[0], other[0], "it is multiplied with a tensor of fixed size")
        if "self" in given and first != "self":  # a bias
            made = _join(trace, given["self"], out, made)
        return [made]

    return rule


def _grouped_mm(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    """Follow a product of the rows of each group with a matrix of its own: (T, I) and (G, I, O), as in experts."""
    rows, matrices = trace.of(given["self"]), trace.of(given["mat2"])
    reason = "its groups have a fixed number, and rows of fixed numbers"
    if given["self"].ndim != 2 or given["mat2"].ndim != 3:
        trace.pin([given["self"], given["mat2"]], f"{trace.where()} has a grouped product of another form")
        return [None]
    trace.pin_dims([rows[0], matrices[0]], reason)
    trace.contract(given["self"], rows[1], given["mat2"], matrices[1])
    trace.grouped.extend(nodes for nodes in matrices[1:] if nodes is not None)
    return [[None, matrices[2]]]


def _mv(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    one, other = trace.of(given["self"]), trace.of(given["vec"])
    trace.contract(given["self"], one[-1], given["vec"], other[0])
    return [one[:-1]]


def _whole_reduction(trace: ChannelTrace, given: Given, out: Any) -> list[Dims | None]:
    """Follow a reduction over a whole tensor, on which code branches; fewer channels are assumed to branch alike."""
    return _reduce(trace, given, out) if given.get("dim") is not None else [None, None]


def _join(trace: ChannelTrace, added: Tensor, out: Tensor, made: Dims) -> Dims:
    for back, nodes in enumerate(reversed(trace.of(added)), start=1):
        if added.shape[-back] == out.shape[-back]:
            made[-back] = trace.unite(made[-back], nodes, "a tensor of fixed size is added to it")
        else:
            trace.pin_dims([nodes], f"{trace.where()} broadcasts it")
    return made


def _convolution(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    x, weight, groups = trace.of(given["input"]), trace.of(given["weight"]), given["groups"]
    one, two = weight[0], weight[1]
    assert one is not None
    assert two is not None
    into, of = (one, two) if given["transposed"] else (two, one)  # input channels, output channels
    trace.pin_dims(weight[2:], KERNEL)
    channels = given["input"].shape[1]
    spread = len(of) * groups if given["transposed"] else len(of)
    result: Labels = np.tile(of, groups) if given["transposed"] else of
    if groups == 1:
        trace.contract(given["input"], x[1], given["weight"], into)
    elif groups == channels and x[1] is not None:  # depthwise: each input channel has outputs of its own
        makers = np.repeat(x[1], spread // groups)
        trace.nodes.pin(two, KERNEL)
        if given["transposed"]:
            trace.nodes.unite(one, x[1])
            result = makers
        else:
            trace.nodes.unite(one, makers)
        name = trace.running[-1][0]
        trace.splits.append((name, "groups", x[1]))
    elif x[1] is None:
        trace.pin_dims(weight, "what it is multiplied with has a fixed size")
    else:  # all groups must keep equally many channels
        within = x[1].reshape(groups, -1)
        trace.nodes.unite(within[:1], within)
        if given["transposed"]:
            trace.nodes.unite(one.reshape(groups, -1), within)
            trace.contract(given["weight"], one, given["weight"], one)
        else:
            trace.nodes.unite(of.reshape(groups, -1)[:1], of.reshape(groups, -1))
            trace.contract(given["weight"], into, given["weight"], into)
            trace.nodes.unite(within[0], into)
    if given.get("bias") is not None:
        trace.unite(result, trace.of(given["bias"])[0], "")
    return [[None, result, *[None] * (out.ndim - 2)]]


def _batch_norm(trace: ChannelTrace, given: Given, out: Any) -> list[Dims | None]:
    dims = trace.of(given["input"])
    for name in ("weight", "bias", "running_mean", "running_var"):
        if given.get(name) is not None:
            trace.unite(dims[1], trace.of(given[name])[0], "a batch norm of inputs")
    return [list(dims)]


def _group_norm(trace: ChannelTrace, given: Given, out: Any) -> list[Dims | None]:
    dims = list(trace.of(given["input"]))
    if dims[1] is not None:
        rows = dims[1].reshape(given["group"], -1)
        trace.nodes.unite(rows[:, :1], rows)
        trace.splits.append((trace.running[-1][0], "num_groups", rows[:, 0]))
    trace.pin_dims(dims[2:], "normalised over")
    for name in ("weight", "bias"):
        if given.get(name) is not None:
            trace.unite(dims[1], trace.of(given[name])[0], "a group norm of inputs")
    return [dims]


def _layer_norm(trace: ChannelTrace, given: Given, out: Any) -> list[Dims | None]:
    dims, over = list(trace.of(given["input"])), len(given["normalized_shape"])
    reason = f"{trace.where()} normalises over it, so that the rest would change"
    if not trace.exact and over == 1 and dims[-1] is not None:
        trace.normalized.append(dims[-1])
        for one in (given.get("weight"), given.get("bias")):
            if one is not None:
                trace.unite(dims[-1], trace.of(one)[0], reason)
        return [dims]
    trace.pin_dims(dims[-over:], reason)
    trace.pin([given.get("weight"), given.get("bias")], reason)
    return [dims]


def _mean(trace: ChannelTrace, given: Given, out: Any) -> list[Dims | None]:
    """Follow a mean, which RMSNorm takes over the last dimension, that of torch and those written by hand."""
    tensor, dims = given["self"], trace.of(given["self"])
    is_last = [one % tensor.ndim for one in given.get("dim") or ()] == [tensor.ndim - 1]
    if not trace.exact and is_last and given.get("keepdim") and dims[-1] is not None:
        trace.normalized.append(dims[-1])
        return [[*dims[:-1], None]]
    return _reduce(trace, given, out)


def _reduce(trace: ChannelTrace, given: Given, out: Any) -> list[Dims | None]:
    tensor, dims = given["self"], trace.of(given["self"])
    asked = given.get("dim")
    asked = [asked] if isinstance(asked, int) else asked
    over = {one % tensor.ndim for one in asked} if asked else set(range(tensor.ndim))
    trace.pin_dims([dims[one] for one in over], f"{trace.where()} sums it up or compares it")
    kept = [None if number in over else nodes for number, nodes in enumerate(dims)]
    if not given.get("keepdim"):
        kept = [nodes for number, nodes in enumerate(dims) if number not in over]
    results = out if isinstance(out, (tuple, list)) else [out]
    return [list(kept) if one.ndim == len(kept) else None for one in results]


def _normalization(trace: ChannelTrace, given: Given, out: Any) -> list[Dims | None]:
    """Follow an operation along a dimension that keeps the shape of its input, such as softmax."""
    dims, asked = list(trace.of(given["self"])), given["dim"] if "dim" in given else given["dims"]
    for dim in [asked] if isinstance(asked, int) else asked:
        trace.pin_dims([dims[dim]], f"{trace.where()} normalises over it, so that the rest would change")
    return [dims, dims]


def _resize(trace: ChannelTrace, given: Given, out: Any) -> list[Dims | None]:
    """Follow pooling and resizing; dimensions whose size changes, or could, have no channels."""
    tensor = given["self"] if "self" in given else given["input"]
    dims, channel = trace.of(tensor), 1
    if out is None:
        return [None]
    result = out[0] if isinstance(out, (tuple, list)) else out
    changed = [dim for dim in range(result.ndim) if tensor.shape[dim] != result.shape[dim]]
    if result.ndim == tensor.ndim == 3 and min(changed, default=1) < 2:  # (C, H, W)
        channel = 0
    kept = [nodes if number <= channel and number not in changed else None for number, nodes in enumerate(dims)]
    trace.pin_dims([nodes for nodes, still in zip(dims, kept, strict=True) if still is None], "height or width")
    return [kept] * (len(out) if isinstance(out, (tuple, list)) else 1)


def _embedding(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    rows, features = trace.of(given["weight"])
    trace.pin_dims([rows], "rows that are looked up")
    return [[*[None] * given["indices"].ndim, features]]


def _share_heads(trace: ChannelTrace, query: Labels | None, key: Labels | None) -> Labels | None:
    """Unite each head of keys and values with the heads of queries that share it, which follow each other."""
    if query is None or key is None or len(query) % len(key):
        trace.pin_dims([query, key], f"{trace.where()} shares heads among queries")
        return query
    trace.nodes.unite(key[:, None], query.reshape(len(key), -1))
    return query


def _attention(trace: ChannelTrace, given: Given, out: Any) -> list[Dims | None]:
    query, key, value = (trace.of(given[name]) for name in ("query", "key", "value"))
    made = list(value)
    for dim in range(len(made) - 2):
        if given["query"].shape[dim] != given["value"].shape[dim]:
            made[dim] = _share_heads(trace, query[dim], trace.unite(key[dim], value[dim], "heads of fixed number"))
            continue
        tied = trace.unite(query[dim], key[dim], "heads of fixed number")
        made[dim] = trace.unite(tied, value[dim], "heads of fixed number")
    reason = f"{trace.where()} scales by its size"
    trace.pin_dims([query[-1], key[-1], query[-2], key[-2], value[-2]], reason)
    made[-2] = query[-2]
    for name in ("attn_mask", "attn_bias"):
        trace.pin(given.get(name), "a mask of attention")
    results = out if isinstance(out, (tuple, list)) else [out]
    return [made, *[None] * (len(results) - 1)]


RULES: dict[str, Rule] = {
    **VIEWS,
    **dict.fromkeys(("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty"), _constant),
    "mm": _mm("self", "mat2"),
    "bmm": _mm("self", "mat2"),
    "addmm": _mm("mat1", "mat2"),
    "baddbmm": _mm("batch1", "batch2"),
    "mv": _mv,
    "_grouped_mm": _grouped_mm,
    "convolution": _convolution,
    **dict.fromkeys(("all", "any", "aminmax"), _whole_reduction),
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit_no_training", "_native_batch_norm_legit", "cudnn_batch_norm"),
        _batch_norm,
    ),
    "native_group_norm": _group_norm,
    "native_layer_norm": _layer_norm,
    "_fused_rms_norm": _layer_norm,
    "mean": _mean,
    **dict.fromkeys(
        ("sum", "amax", "amin", "max", "min", "argmax", "argmin", "logsumexp", "prod", "var", "std", "var_mean",
         "linalg_vector_norm", "norm", "median"),
        _reduce,
    ),
    **dict.fromkeys(("_softmax", "_log_softmax", "cumsum", "cumprod", "sort", "flip", "roll"), _normalization),
    **dict.fromkeys(
        ("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool1d", "avg_pool2d", "avg_pool3d",
         "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d",
         "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_bilinear2d", "upsample_linear1d",
         "upsample_bicubic2d", "upsample_trilinear3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
         "_upsample_nearest_exact3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
        _resize,
    ),
    "embedding": _embedding,
    **dict.fromkeys(  # all but the first where TorchScript or an exported program calls them
        ("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu",
         "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
         "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_cudnn_attention"),
        _attention,
    ),
}  # fmt: skip


def find_rule(func: Any) -> Rule | None:
    """Return the rule of an operation of torch's dispatcher: one of :data:`RULES`, the pointwise one, or None."""
    name = operation_name(func).removeprefix("aten::")
    if (rule := RULES.get(name)) is not None:
        return rule
    if torch.Tag.pointwise in func.tags or name.rstrip("_") in _POINTWISE:
        return _pointwise
    return RULES.get(name[:-1]) if name.endswith("_") else None
