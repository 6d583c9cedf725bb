"""Follow channels through the operations of a module while it runs.

Each dimension of a tensor has an array of nodes, one for each of its indices, or None where none can be removed.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_accel.compress.channel_labels import Labels, Nodes

Dims = list[Labels | None]
Given = dict[str, Any]  # arguments of an operation, by name
KERNEL = "size of a kernel"
_HEADS = ("num_heads", "n_heads", "n_head", "heads", "nhead", "num_attention_heads", "num_key_value_heads")


class ChannelTrace(TorchDispatchMode):
    """What was seen of a module that ran under :meth:`watch`.

    An operation that is not known keeps the dimensions of its inputs as they are, and so does one that depends on
    their size, such as a normalisation over them.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.nodes = Nodes()
        self.own: dict[tuple[str, int], Labels] = {}  # nodes of parameters and buffers, by name and dimension
        self.contracted: list[Labels] = []  # nodes over which a product sums
        self.taken: list[Labels] = []  # of them, those of parameters: what a layer takes rather than makes
        self.splits: list[tuple[str, str, Labels]] = []  # module, attribute that counts them, a node for each
        self._dims = WeakTensorKeyDictionary()
        self._places = {one.untyped_storage().data_ptr() for one in module.parameters()}
        self._module = module
        self._running: list[tuple[str, nn.Module]] = [("", module)]
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.ndim:
                self._dims[tensor] = [self.nodes.make(size) for size in tensor.shape]
                self.own.update({(name, dim): nodes for dim, nodes in enumerate(self._dims[tensor])})

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Follow what runs inside, in evaluation mode and by plain operations in place of fused ones."""
        fast = torch.backends.mha.get_fastpath_enabled()
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of a flag of another device as it sets this one
                stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
            torch.backends.mha.set_fastpath_enabled(False)
            stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
            for name, part in self._module.named_modules():
                stack.callback(part.register_forward_pre_hook(_Enter(self._running, name), prepend=True).remove)
                stack.callback(part.register_forward_hook(_Leave(self._running), always_call=True).remove)
            stack.enter_context(self)
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {one.name: one.default_value for one in func._schema.arguments if one.has_default_value()}
        given.update(zip([one.name for one in func._schema.arguments], args, strict=False))
        given.update(kwargs)
        out = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        made = self._follow(name, func, given, out)
        if made is not None:
            results = out if isinstance(out, (tuple, list)) else [out]
            for result, dims in zip(results, made, strict=False):
                if isinstance(result, Tensor) and dims is not None:
                    assert len(dims) == result.ndim, name
                    self._dims[result] = dims
        return out

    def of(self, tensor: Tensor) -> Dims:
        found: Dims | None = self._dims.get(tensor)
        return [None] * tensor.ndim if found is None else found

    def pin(self, tensor: Any, reason: str) -> None:
        """Keep all dimensions of the tensors in ``tensor``."""
        for one in tree_leaves(tensor):
            if isinstance(one, Tensor):
                self.pin_dims(self.of(one), reason)

    def pin_dims(self, dims: Dims, reason: str) -> None:
        for nodes in dims:
            if nodes is not None:
                self.nodes.pin(nodes, reason)

    def unite(self, first: Labels | None, second: Labels | None, reason: str) -> Labels | None:
        """Tie two dimensions of one size; where one cannot be removed, neither can the other."""
        if first is None or second is None or len(first) != len(second):
            self.pin_dims([first, second], reason)
            return first if second is None else second
        self.nodes.unite(first, second)
        return first

    def contract(self, one: Tensor, first: Labels | None, other: Tensor, second: Labels | None) -> None:
        """A product of two tensors sums over these dimensions: what is zero in one adds nothing."""
        self.unite(first, second, "what it is multiplied with has a fixed size")
        for tensor, nodes in ((one, first), (other, second)):
            if nodes is not None:
                self.contracted.append(nodes)
                if tensor.untyped_storage().data_ptr() in self._places:
                    self.taken.append(nodes)

    def where(self) -> str:
        return self._running[-1][0] or type(self._module).__name__

    def split(self, flat: Labels, shape: tuple[int, ...]) -> Dims:
        """Labels of each of the dimensions ``shape`` that ``flat`` is viewed as; one of them can have any."""
        full = flat.reshape(shape)
        roots = self.nodes.roots(full)
        long = [dim for dim, size in enumerate(shape) if size > 1]
        for dim in long:
            if (roots == np.take(roots, [0], axis=dim)).all() and len(long) > 1:
                continue
            rows = np.moveaxis(roots, dim, 0).reshape(shape[dim], -1)
            if (rows == rows[:, :1]).all():
                return self._only(dim, full)
        if not long:
            return [flat if dim == 0 else None for dim in range(len(shape))]
        dim, attribute = self._dim_to_keep(shape, long)
        rows = np.moveaxis(full, dim, 0).reshape(shape[dim], -1)
        self.nodes.unite(rows[:, :1], rows)
        if attribute is not None:
            self.splits.append((*attribute, rows[:, 0]))
        return self._only(dim, full)

    def _only(self, dim: int, full: Labels) -> Dims:
        labels = np.moveaxis(full, dim, 0).reshape(full.shape[dim], -1)[:, 0]
        return [labels if other == dim else None for other in range(full.ndim)]

    def _dim_to_keep(self, shape: tuple[int, ...], long: list[int]) -> tuple[int, tuple[str, str] | None]:
        """Heads of an attention, if the module that runs has a number of them; else what is outermost."""
        for name, part in reversed(self._running):
            for attribute in _HEADS:
                count = vars(part).get(attribute)
                for dim in long:
                    if count == shape[dim]:
                        return dim, (name, attribute)
        return long[0], None

    def _follow(self, name: str, func: Any, given: Given, out: Any) -> list[Dims | None] | None:
        rule = RULES.get(name)
        if rule is None and (torch.Tag.pointwise in func.tags or name.rstrip("_") in _POINTWISE):
            rule = _pointwise
        if rule is None and name.endswith("_"):
            rule = RULES.get(name[:-1])
        if rule is not None:
            return rule(self, given, out)
        if name not in _SAY_NOTHING:
            self.pin(given, f"{self.where()} runs {func._schema.name}, through which channels are not followed")
        if any(one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments):
            for one in tree_leaves(out):  # what it held before counts no longer
                if isinstance(one, Tensor):
                    self._dims[one] = [None] * one.ndim
        return None


class _Enter:
    def __init__(self, running: list[tuple[str, nn.Module]], name: str) -> None:
        self.running, self.name = running, name

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.running.append((self.name, module))


class _Leave:
    def __init__(self, running: list[tuple[str, nn.Module]]) -> None:
        self.running = running

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.running.pop()


_POINTWISE = {
    "where", "masked_fill", "hardswish", "_prelu_kernel", "native_dropout", "dropout", "rsub", "copy", "threshold",
    "nan_to_num", "clamp", "clamp_min", "clamp_max", "hardsigmoid", "_to_copy", "clone", "alias", "detach",
    "lift_fresh", "contiguous", "zeros_like", "ones_like", "full_like", "empty_like", "fill", "zero", "rrelu",
    "log_sigmoid_forward", "mish", "relu6", "hardtanh", "fake_quantize_per_tensor_affine", "rand_like", "randn_like",
    "bernoulli",
}  # fmt: skip
_SAY_NOTHING = {"_local_scalar_dense", "equal", "promote_types", "is_same_size", "sym_size", "prim::device"}


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


def _fresh(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    """Filled with one number, of a size that the code asks for: it will ask for less where channels go."""
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
    into, of = (one, two) if given["transposed"] else (two, one)  # what it sums over, what it makes
    trace.pin_dims(weight[2:], KERNEL)
    channels = given["input"].shape[1]
    spread = len(of) * groups if given["transposed"] else len(of)
    result: Labels = np.tile(of, groups) if given["transposed"] else of
    if groups == 1:
        trace.contract(given["input"], x[1], given["weight"], into)
    elif groups == channels and x[1] is not None:  # depthwise: each makes its own
        makers = np.repeat(x[1], spread // groups)
        trace.nodes.pin(two, KERNEL)
        if given["transposed"]:
            trace.nodes.unite(one, x[1])
            result = makers
        else:
            trace.nodes.unite(one, makers)
        name = trace._running[-1][0]
        trace.splits.append((name, "groups", x[1]))
    elif x[1] is None:
        trace.pin_dims(weight, "what it is multiplied with has a fixed size")
    else:  # all groups stay equally wide
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
        trace.splits.append((trace._running[-1][0], "num_groups", rows[:, 0]))
    trace.pin_dims(dims[2:], "normalised over")
    for name in ("weight", "bias"):
        if given.get(name) is not None:
            trace.unite(dims[1], trace.of(given[name])[0], "a group norm of inputs")
    return [dims]


def _layer_norm(trace: ChannelTrace, given: Given, out: Any) -> list[Dims | None]:
    dims, over = list(trace.of(given["input"])), len(given["normalized_shape"])
    reason = f"{trace.where()} normalises over it, so that the rest would change"
    trace.pin_dims(dims[-over:], reason)
    trace.pin([given.get("weight"), given.get("bias")], reason)
    return [dims]


def _view(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    before, dims = given["self"].shape, trace.of(given["self"])
    if out.numel() == 0:
        trace.pin_dims(dims, "empty")
        return [None]
    made: Dims = []
    for start, stop, first, last in _blocks(before, out.shape):
        made += _view_block(trace, before[start:stop], dims[start:stop], tuple(out.shape[first:last]))
    return [made]


def _view_block(trace: ChannelTrace, before: Any, dims: Dims, after: tuple[int, ...]) -> Dims:
    known = [number for number, nodes in enumerate(dims) if nodes is not None and before[number] > 1]
    if not known:
        trace.pin_dims(dims, "a single channel")
        return [None] * len(after)
    if len(known) > 1:
        trace.pin_dims(dims, f"{trace.where()} folds it into another dimension")
        return [None] * len(after)
    (number,) = known
    nodes = dims[number]
    assert nodes is not None
    shape = [1] * len(before)
    shape[number] = before[number]
    flat = np.broadcast_to(nodes.reshape(shape), before).reshape(-1)
    return trace.split(flat, after) if len(after) > 1 else [flat]


def _blocks(before: Any, after: Any) -> Iterator[tuple[int, int, int, int]]:
    """Parts of two shapes of one size, as small as they go, that hold the same number."""
    i = j = 0
    while i < len(before) or j < len(after):
        start, first = i, j
        one = before[i] if i < len(before) else 1
        other = after[j] if j < len(after) else 1
        i, j = min(i + 1, len(before)), min(j + 1, len(after))
        while one != other:
            if one < other:
                one, i = one * before[i], i + 1
            else:
                other, j = other * after[j], j + 1
        yield start, i, first, j


def _permute(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    dims = trace.of(given["self"])
    return [[dims[one] for one in given["dims"]]]


def _transpose(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    dims = list(trace.of(given["self"]))
    if len(dims) > 1:
        one, other = given.get("dim0", 0), given.get("dim1", 1)
        dims[one], dims[other] = dims[other], dims[one]
    return [dims]


def _unsqueeze(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    dims = list(trace.of(given["self"]))
    dims.insert(given["dim"] % out.ndim, None)
    return [dims]


def _squeeze(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    tensor = given["self"]
    dims, asked = trace.of(tensor), given.get("dim")
    asked = range(tensor.ndim) if asked is None else [asked] if isinstance(asked, int) else asked
    gone = {one % tensor.ndim for one in asked if tensor.ndim and tensor.shape[one] == 1}
    trace.pin_dims([dims[one] for one in gone], "squeezed")
    return [[nodes for number, nodes in enumerate(dims) if number not in gone]]


def _expand(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    tensor, dims = given["self"], trace.of(given["self"])
    made: Dims = []
    for back in range(out.ndim, 0, -1):
        if back <= tensor.ndim and tensor.shape[-back] == out.shape[-back]:
            made.append(dims[-back])
        else:  # the same number again and again, as many as are asked for
            if back <= tensor.ndim:
                trace.pin_dims([dims[-back]], f"{trace.where()} broadcasts it")
            made.append(trace.nodes.make(out.shape[-back]))
    return [made]


def _cat(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    tensors = [one for one in given["tensors"] if one.numel()]
    if not tensors:
        return [None]
    dim = given["dim"] % out.ndim
    made = _tie_all(trace, [trace.of(one) for one in tensors], skip=dim)
    parts = [trace.of(one)[dim] for one in tensors]
    if any(part is not None for part in parts):
        filled = []
        for part, tensor in zip(parts, tensors, strict=True):
            if part is None:
                part = trace.nodes.make(tensor.shape[dim])
                trace.nodes.pin(part, "an input of the module")
            filled.append(part)
        made[dim] = np.concatenate(filled)
    return [made]


def _stack(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    made = _tie_all(trace, [trace.of(one) for one in given["tensors"]])
    made.insert(given["dim"] % out.ndim, None)
    return [made]


def _tie_all(trace: ChannelTrace, all_dims: list[Dims], skip: int | None = None) -> Dims:
    made = list(all_dims[0])
    for dim in range(len(made)):
        for dims in all_dims[1:]:
            if dim != skip:
                made[dim] = trace.unite(made[dim], dims[dim], "joined with a tensor of fixed size")
    if skip is not None:
        made[skip] = None
    return made


def _split(trace: ChannelTrace, given: Given, out: Any) -> list[Dims | None]:
    dims, dim = trace.of(given["self"]), given["dim"] % given["self"].ndim
    nodes = dims[dim]
    sizes = [one.shape[dim] for one in out]
    parts: list[Labels | None] = [None] * len(out)
    if nodes is not None:
        ends = np.cumsum([0, *sizes])
        cut = [nodes[start:stop] for start, stop in pairwise(ends)]
        if len(out) == 1:
            parts = [nodes]
        elif len(set(sizes)) == 1:
            for part in cut[1:]:
                trace.nodes.unite(cut[0], part)
            parts = [*cut]
        else:
            trace.nodes.pin(nodes, f"{trace.where()} cuts it at fixed places")
    return [[*dims[:dim], part, *dims[dim + 1 :]] for part in parts]


def _slice(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    dims, dim = list(trace.of(given["self"])), given["dim"] % out.ndim
    nodes, size, length = dims[dim], given["self"].shape[dim], out.shape[dim]
    start = int(given["start"] or 0)
    start = min(max(start + size if start < 0 else start, 0), size)
    if nodes is None or size == length:
        return [dims]
    if length and given["step"] == 1 and start % length == size % length == 0:  # one of equal parts, as of a gate
        rows = nodes.reshape(-1, length)
        trace.nodes.unite(rows[:1], rows)
        dims[dim] = nodes[start : start + length]
    else:
        trace.pin_dims([nodes], f"{trace.where()} cuts it at fixed places")
        dims[dim] = None
    return [dims]


def _select(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    dims, dim = list(trace.of(given["self"])), given["dim"] % given["self"].ndim
    trace.pin_dims([dims.pop(dim)], f"{trace.where()} takes one of it by its number")
    return [dims]


def _unbind(trace: ChannelTrace, given: Given, out: Any) -> list[Dims | None]:
    dims, dim = list(trace.of(given["self"])), given["dim"] % given["self"].ndim
    trace.pin_dims([dims.pop(dim)], f"{trace.where()} takes it apart")
    return [dims] * len(out)


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


def _along(trace: ChannelTrace, given: Given, out: Any) -> list[Dims | None]:
    """As :func:`_reduce`, but of the shape of the input."""
    dims, asked = list(trace.of(given["self"])), given["dim"] if "dim" in given else given["dims"]
    for dim in [asked] if isinstance(asked, int) else asked:
        trace.pin_dims([dims[dim]], f"{trace.where()} normalises over it, so that the rest would change")
    return [dims, dims]


def _spatial(trace: ChannelTrace, given: Given, out: Any) -> list[Dims | None]:
    """Pooling, scaling, padding: what has another size afterwards, or could, has no channels."""
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


def _pad(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    dims = list(trace.of(given["self"]))
    for dim, (before, after) in enumerate(zip(given["self"].shape, out.shape, strict=True)):
        if before != after:
            trace.pin_dims([dims[dim]], f"{trace.where()} pads it")
            dims[dim] = None
    return [dims]


def _pixel_shuffle(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    dims = list(trace.of(given["self"]))
    nodes = dims[-3]
    if nodes is None:
        return [None]
    rows = nodes.reshape(out.shape[-3], -1)
    trace.nodes.unite(rows[:, :1], rows)
    return [[*dims[:-3], rows[:, 0], None, None]]


def _glu(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    dims, dim = list(trace.of(given["self"])), given["dim"] % out.ndim
    nodes = dims[dim]
    if nodes is not None:
        first, second = np.split(nodes, 2)
        trace.nodes.unite(first, second)
        dims[dim] = first
    return [dims]


def _embedding(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    rows, features = trace.of(given["weight"])
    trace.pin_dims([rows], "rows that are looked up")
    return [[*[None] * given["indices"].ndim, features]]


def _index(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    """Rows, by their numbers; the dimensions after those stay."""
    dims, indices = trace.of(given["self"]), given["indices"]
    reason = f"{trace.where()} takes parts of it by their numbers"
    trace.pin([one for one in indices if one is not None], reason)
    if None in indices:
        trace.pin_dims(dims, reason)
        return [None]
    trace.pin_dims(dims[: len(indices)], reason)
    rest = dims[len(indices) :]
    return [[*[None] * (out.ndim - len(rest)), *rest]]


def _index_select(trace: ChannelTrace, given: Given, out: Tensor) -> list[Dims | None]:
    dims, dim = list(trace.of(given["self"])), given["dim"] % out.ndim
    trace.pin_dims([dims[dim]], f"{trace.where()} takes parts of it by their numbers")
    dims[dim] = None
    return [dims]


def _attention(trace: ChannelTrace, given: Given, out: Any) -> list[Dims | None]:
    query, key, value = (trace.of(given[name]) for name in ("query", "key", "value"))
    made = list(value)
    for dim in range(len(made) - 2):
        tied = trace.unite(query[dim], key[dim], "heads of fixed number")
        made[dim] = trace.unite(tied, value[dim], "heads of fixed number")
    reason = f"{trace.where()} scales by its size"
    trace.pin_dims([query[-1], key[-1], query[-2], key[-2], value[-2]], reason)
    made[-2] = query[-2]
    for name in ("attn_mask", "attn_bias"):
        trace.pin(given.get(name), "a mask of attention")
    results = out if isinstance(out, (tuple, list)) else [out]
    return [made, *[None] * (len(results) - 1)]


Rule = Callable[[ChannelTrace, Given, Any], list[Dims | None]]
RULES: dict[str, Rule] = {
    **dict.fromkeys(("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty"), _fresh),
    "mm": _mm("self", "mat2"),
    "bmm": _mm("self", "mat2"),
    "addmm": _mm("mat1", "mat2"),
    "baddbmm": _mm("batch1", "batch2"),
    "convolution": _convolution,
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit_no_training", "_native_batch_norm_legit", "cudnn_batch_norm"),
        _batch_norm,
    ),
    "native_group_norm": _group_norm,
    "native_layer_norm": _layer_norm,
    "_fused_rms_norm": _layer_norm,
    **dict.fromkeys(("view", "_unsafe_view", "_reshape_alias", "_reshape_copy"), _view),
    "permute": _permute,
    "t": _transpose,
    "transpose": _transpose,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "cat": _cat,
    "stack": _stack,
    **dict.fromkeys(("split", "unsafe_split", "split_with_sizes", "unsafe_split_with_sizes"), _split),
    "slice": _slice,
    "select": _select,
    "unbind": _unbind,
    **dict.fromkeys(
        ("mean", "sum", "amax", "amin", "max", "min", "argmax", "argmin", "logsumexp", "prod", "var", "std", "var_mean",
         "linalg_vector_norm", "norm", "any", "all", "median"),
        _reduce,
    ),
    **dict.fromkeys(("_softmax", "_log_softmax", "cumsum", "cumprod", "sort", "flip", "roll"), _along),
    **dict.fromkeys(
        ("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool1d", "avg_pool2d", "avg_pool3d",
         "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d",
         "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_bilinear2d", "upsample_linear1d",
         "upsample_bicubic2d", "upsample_trilinear3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
         "_upsample_nearest_exact3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
        _spatial,
    ),
    **dict.fromkeys(
        ("constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d",
         "replication_pad2d", "replication_pad3d"),
        _pad,
    ),
    "pixel_shuffle": _pixel_shuffle,
    "glu": _glu,
    "embedding": _embedding,
    "index": _index,
    "index_select": _index_select,
    **dict.fromkeys(
        ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
         "_scaled_dot_product_efficient_attention", "_scaled_dot_product_fused_attention_overrideable",
         "_scaled_dot_product_cudnn_attention"),
        _attention,
    ),
}  # fmt: skip
