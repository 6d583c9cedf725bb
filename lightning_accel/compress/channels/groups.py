"""Groups of channels of a module that can be removed together."""

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_accel._private.torch import tree_leaves, tree_map_only
from lightning_accel.compress.calls import first_line
from lightning_accel.compress.channels.plan import ChannelPlan, apply_plan_, make_channel_plan
from lightning_accel.compress.channels.rules import find_rule
from lightning_accel.compress.channels.trace import KERNEL, MULTIPLE, ChannelTrace, Labels
from lightning_accel.compress.uncompiled import uncompile_, uncompiled
from lightning_accel.nn import RBM
from lightning_accel.ops.names import find_excluded

_STATES = ("state", "states")
_CLOSE = 1e-3  # relative to the largest output; mistaking a channel for another changes far more


@dataclass(frozen=True)
class ChannelLayer:
    """Describe G channels that can be removed one by one: those of a layer, or of layers whose outputs are added.

    Row i of each of ``slices``, (G, n), has the indices of channel i in a dimension of a parameter or buffer.
    """

    name: str  # of the first module that outputs these channels
    slices: dict[tuple[str, int], Labels]  # by name of a parameter or buffer, and dimension
    made_by: tuple[str, ...]  # parameters that output the channels, in contrast to those that take them as input
    multiple: int = 1  # of which the number of channels that are left must be one
    exact: bool = True  # whether removal changes nothing else than setting the channels to zero does

    def __len__(self) -> int:
        return len(next(iter(self.slices.values())))


@dataclass(frozen=True)
class ChannelGroups:
    """Hold the result of :func:`find_channel_groups`."""

    layers: list[ChannelLayer]
    left_out: dict[str, str]  # the reason why output channels cannot be removed, by name of the parameter
    counters: list[tuple[str, str, str, Labels]] = field(default_factory=list)  # module, attribute, layer, channels

    def __getitem__(self, name: str) -> ChannelLayer:
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(f"no layer {name!r} among {', '.join(one.name for one in self.layers)}")

    def prefixed(self, prefix: str) -> "ChannelGroups":
        """Return the groups for a parent module, in which this module is the submodule ``prefix``."""
        if not prefix:
            return self
        layers = [
            replace(
                layer,
                name=f"{prefix}.{layer.name}",
                slices={(f"{prefix}.{name}", dim): rows for (name, dim), rows in layer.slices.items()},
                made_by=tuple(f"{prefix}.{name}" for name in layer.made_by),
            )
            for layer in self.layers
        ]
        left_out = {f"{prefix}.{name}": reason for name, reason in self.left_out.items()}
        counters = [
            (f"{prefix}.{module}" if module else prefix, name, f"{prefix}.{layer}", channels)
            for module, name, layer, channels in self.counters
        ]
        return ChannelGroups(layers, left_out, counters)

    def plan(self, module: nn.Module, removed: Mapping[str, Sequence[int]]) -> ChannelPlan:
        """Make a plan that removes the channels ``removed``, indices by layer name, from ``module``.

        Raises:
            KeyError: if there is no such layer.
            ValueError: if no channel of a layer would remain.
        """
        gone: dict[tuple[str, int], list[int]] = {}
        attributes: dict[tuple[str, str], int] = {}
        with uncompiled(module) as plain:
            for name, numbers in removed.items():
                layer = self[name]
                if len(set(numbers)) >= len(layer):
                    raise ValueError(f"all {len(layer)} channels of {name} are to be removed; leave one or more")
                for place, rows in layer.slices.items():
                    gone.setdefault(place, []).extend(rows[list(numbers)].ravel().tolist())
                for owner, attribute, of_layer, channels in self.counters:
                    if of_layer == name:
                        before = attributes.get((owner, attribute), getattr(plain.get_submodule(owner), attribute))
                        attributes[owner, attribute] = before - int(np.isin(channels, list(numbers)).sum())
            return make_channel_plan(plain, gone, attributes)


def find_channel_groups(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    exclude: Sequence[str | type[nn.Module]] = (),
    exact: bool = True,
) -> ChannelGroups:
    """Find the channels of ``module`` that can be removed, each with the slices of all parameters that belong to it.

    A copy of the module is run on the CPU, once, and each operation is followed. After the removal of channels, the
    module computes what the whole one computes with their slices set to zero. Channels of the inputs and outputs, those
    that are normalized over (layer norm), and those of unknown operations cannot be removed;
    :attr:`ChannelGroups.left_out` has the reasons. Some channels of a copy are removed as a trial; layers whose removal
    changes the output otherwise are left out, too. Fields ``state`` and ``states`` of an output that is a named tuple
    or a mapping are taken for recurrent states, which become smaller with the module.

    Args:
        module: module on any device and in any mode; neither it nor a random generator is changed.
        args: positional arguments of a call; one or two samples suffice.
        kwargs: keyword arguments of the call.
        exclude: names or globs of parameters or modules, or classes of modules or their names, whose output channels
            are kept.
        exact: whether to leave out channels that are normalized over, such as those of a transformer's residual
            stream. Their removal changes the statistics of the norms, and so the outputs; train the module afterwards.

    Raises:
        TypeError: if the module cannot be copied or run on the CPU, or outputs no tensor.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small, args, kwargs = _copy(module, args, kwargs or {})
        trace = ChannelTrace(small, find_rule, exact)
        try:
            with trace.watch():
                output = small(*args, **kwargs)
        except Exception as error:
            raise TypeError(
                f"{type(module).__name__} could not be run on the CPU to find its channels ({error}). Give the "
                "arguments that its forward takes, or name a submodule of it that can be run"
            ) from error
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(output)):
            raise TypeError(
                f"the output of {type(module).__name__} has no tensor that could be found in it ({type(output)}); "
                "let forward return a tensor, or a tuple, list or dict of tensors"
            )
        trace.pin(_without_states(output), "the module's output")
        _pin_visible_units(trace, small)
        found = _collect(trace, small, exclude)
        return _drop_failures(small, found, args, kwargs) if found.layers else found


def _pin_visible_units(trace: ChannelTrace, module: nn.Module) -> None:
    """Exclude visible units of machines from removal, where the call does not show that their biases belong to them."""
    nodes = trace.nodes
    for name, rbm in module.named_modules():
        if isinstance(rbm, RBM):
            prefix = f"{name}." if name else ""
            units, biases = trace.own[f"{prefix}weight", 1], trace.own[f"{prefix}visible_bias", 0]
            if (nodes.roots(units) != nodes.roots(biases)).any():
                nodes.pin(
                    units,
                    f"its units are the visible units of {name or 'the RBM'}, whose size is fixed: hidden units of the "
                    "top RBM alone can be removed; make the lower ones narrower by hidden_dims, or take "
                    "structure='unstructured'",
                )


def _without_states(output: Any) -> Any:
    """Return ``output`` without recurrent states."""
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return [
            _without_states(value) for name, value in zip(output._fields, output, strict=True) if name not in _STATES
        ]
    if isinstance(output, Mapping):
        return [_without_states(value) for name, value in output.items() if name not in _STATES]
    return output


def _copy(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[nn.Module, Any, Any]:
    tensors = [*module.parameters(), *module.buffers()]
    if any(one.is_meta for one in tensors) or any(type(one).__name__ == "DTensor" for one in tensors):
        raise TypeError(
            f"parameters of {type(module).__name__} are not here whole (sharded, or on the meta device); find channels "
            "before they are laid out, or in a whole copy"
        )
    try:
        made = uncompile_(copy.deepcopy(module)).cpu().float().eval()
    except Exception as error:
        raise TypeError(
            f"{type(module).__name__} cannot be copied ({error}); make copy.deepcopy work for it"
        ) from error
    args, kwargs = tree_map_only(Tensor, _to_cpu_float, (tuple(args), dict(kwargs)))
    return made, args, kwargs


def _to_cpu_float(value: Tensor) -> Tensor:
    value = value.detach().cpu()
    return value.float() if value.is_floating_point() else value


def _collect(trace: ChannelTrace, module: nn.Module, exclude: Sequence[str | type[nn.Module]]) -> ChannelGroups:
    nodes, reasons = trace.nodes, trace.nodes.pinned()
    nothing = np.zeros(0, dtype=np.int64)
    contracted, taken = (np.unique(np.concatenate([*one, nothing])) for one in (trace.contracted, trace.taken))
    consumed = set(np.unique(nodes.roots(contracted)).tolist())
    roots = {place: nodes.roots(own) for place, own in trace.own.items()}
    excluded = _excluded_roots(trace, module, exclude, taken)
    multiples, normalized = (
        set(nodes.roots(np.concatenate([*one, nothing])).tolist()) for one in (trace.grouped, trace.normalized)
    )
    places: dict[int, dict[tuple[str, int], list[int]]] = {}
    for place, of_place in roots.items():
        for index, root in enumerate(of_place.tolist()):
            if root in consumed and root not in reasons and root not in excluded:
                places.setdefault(root, {}).setdefault(place, []).append(index)
    families: dict[tuple[tuple[tuple[str, int], int], ...], list[int]] = {}
    for root, slices in places.items():
        families.setdefault(tuple((place, len(indices)) for place, indices in slices.items()), []).append(root)
    makes = {place: ~np.isin(own, taken) for place, own in trace.own.items()}
    layers: list[ChannelLayer] = []
    layer_of: dict[int, tuple[str, int]] = {}
    for key, members in families.items():
        made_by = tuple(name for (name, dim), _ in key if makes[name, dim].any())
        if not made_by or len(members) < 2:
            for root in members:
                reasons[root] = "a single channel" if made_by else "nothing makes it"
            continue
        name = _unique_name(made_by[0].rpartition(".")[0], layers)
        rows = {place: np.array([places[root][place] for root in members]) for place, _ in key}
        multiple = MULTIPLE if multiples.intersection(members) else 1
        layers.append(ChannelLayer(name, rows, made_by, multiple, exact=not normalized.intersection(members)))
        layer_of.update({root: (name, number) for number, root in enumerate(members)})
    reasons |= dict.fromkeys(excluded, "excluded")
    return ChannelGroups(layers, _left_out(module, roots, makes, layers, reasons), _counters(trace, layer_of))


def _excluded_roots(
    trace: ChannelTrace, module: nn.Module, exclude: Sequence[str | type[nn.Module]], taken: Labels
) -> set[int]:
    """Return the roots of the output channels of excluded modules; their input channels may be removed."""
    found: set[int] = set()
    names = find_excluded(module, exclude)
    for (name, _), own in trace.own.items():
        if name in names:
            found.update(trace.nodes.roots(own[~np.isin(own, taken)]).tolist())
    return found


def _unique_name(name: str, layers: list[ChannelLayer]) -> str:
    taken = {layer.name for layer in layers}
    number, free = 1, name
    while free in taken:
        number, free = number + 1, f"{name}#{number + 1}"
    return free


def _left_out(
    module: nn.Module,
    roots: dict[tuple[str, int], Labels],
    makes: dict[tuple[str, int], Any],
    layers: list[ChannelLayer],
    reasons: dict[int, str],
) -> dict[str, str]:
    made = {name for layer in layers for name in layer.made_by}
    left: dict[str, str] = {}
    for name, parameter in module.named_parameters():
        if parameter.ndim < 2 or name in made:
            continue
        places = [place for place in roots if place[0] == name and makes[place].any()]
        told = [reasons[root] for place in places for root in roots[place].tolist() if root in reasons]
        left[name] = next((one for one in told if one != KERNEL), "no product takes what it makes")
    return left


def _counters(trace: ChannelTrace, layer_of: dict[int, tuple[str, int]]) -> list[tuple[str, str, str, Labels]]:
    found: dict[tuple[str, str, str], Labels] = {}
    for module, attribute, nodes in trace.splits:
        roots = trace.nodes.roots(np.unique(nodes)).tolist()  # each node counts, even if several belong to one channel
        known = [layer_of[root] for root in roots if root in layer_of]
        for name in dict.fromkeys(name for name, _ in known):
            found[module, attribute, name] = np.array([number for of_layer, number in known if of_layer == name])
    return [(*key, numbers) for key, numbers in found.items()]


def _drop_failures(module: nn.Module, found: ChannelGroups, args: Any, kwargs: Any) -> ChannelGroups:
    """Return ``found`` without the layers for which a trial removal of channels fails."""
    trial = _Trial(module, args, kwargs)
    exact = [layer for layer in found.layers if layer.exact]
    if trial.failure(found, found.layers) is None and (exact == found.layers or trial.failure(found, exact) is None):
        return found
    failures = {layer.name: trial.failure(found, [layer]) for layer in found.layers}
    left = [layer for layer in found.layers if failures[layer.name] is None]
    reasons = {
        parameter: failures[layer.name] or ""
        for layer in found.layers
        if failures[layer.name] is not None
        for parameter in layer.made_by
        if module.get_parameter(parameter).ndim > 1
        or not any(module.get_parameter(other).ndim > 1 for other in layer.made_by)
    }
    remaining = ChannelGroups(left, found.left_out | reasons, found.counters)
    if left and (failure := trial.failure(remaining, left)) is not None:
        return ChannelGroups([], remaining.left_out | {one: failure for layer in left for one in layer.made_by}, [])
    return remaining


class _Trial:
    """Remove channels from a copy and compare outputs; noise on its weights gives every channel an effect."""

    def __init__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.module = copy.deepcopy(module)
        self.args, self.kwargs = args, kwargs
        with torch.no_grad():
            for parameter in self.module.parameters():
                if parameter.is_floating_point():
                    parameter.add_(torch.randn_like(parameter) * (parameter.abs().mean() + 0.1), alpha=0.1)

    def failure(self, groups: ChannelGroups, layers: Sequence[ChannelLayer]) -> str | None:
        removed = {layer.name: _sample_channels(layer, number) for number, layer in enumerate(layers)}
        whole, small = copy.deepcopy(self.module), copy.deepcopy(self.module)
        zero_channels_(whole, groups, removed)
        try:
            apply_plan_(small, groups.plan(small, removed))
            outputs = self._run(small)
        except Exception as error:
            return f"forward of the smaller module fails: {first_line(error)}"
        for expected, output in zip(self._run(whole), outputs, strict=True):
            if expected.shape != output.shape:
                return f"the output of the smaller module is {list(output.shape)}, not {list(expected.shape)}"
            if not all(layer.exact for layer in layers):
                continue
            wide = expected.double()
            largest = wide[wide.isfinite()].abs().max() if wide.isfinite().any() else wide.new_zeros(())
            if not torch.allclose(output.double(), wide, rtol=_CLOSE, atol=_CLOSE * float(largest), equal_nan=True):
                return "the smaller module computes something else than the whole one with these channels at zero"
        return None

    def _run(self, module: nn.Module) -> list[Tensor]:
        torch.manual_seed(0)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = _without_states(module(*self.args, **self.kwargs))
        return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _sample_channels(layer: ChannelLayer, number: int) -> list[int]:
    """Draw about half of the channels, with a share that varies by layer."""
    share, count = (0.5, 0.3, 0.7)[number % 3], len(layer)
    gone = max(1, min(count - 1, round(count * share)))
    gone -= (gone - count) % layer.multiple
    return sorted(torch.randperm(count, generator=torch.Generator().manual_seed(number))[:gone].tolist())


@torch.no_grad()
def zero_channels_(module: nn.Module, groups: ChannelGroups, removed: Mapping[str, Sequence[int]]) -> None:
    """Set the parameters of the channels ``removed``, indices by layer name, to zero; buffers are kept."""
    with uncompiled(module) as plain:
        parameters = dict(plain.named_parameters(remove_duplicate=False))
    for name, numbers in removed.items():
        for (parameter, dim), rows in groups[name].slices.items():
            if parameter in parameters and len(numbers):
                index = torch.from_numpy(rows[list(numbers)].ravel()).to(parameters[parameter].device)
                parameters[parameter].index_fill_(dim, index, 0)
