"""Two-layer perceptrons in networks of others: how they are found, and what they compute.

Shapes: D features, H hidden features.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from lightning_accel.nn.feed_forward import FeedForward
from lightning_accel.ops.expert_mlp import ACTIVATIONS, Activation

_GATES = "gate_proj", "wi_0", "w1"  # names of layers whose outputs go through the activation, beside one more
# in layers of which a perceptron is a part: the names of its first and second linear layer
_PAIRS = ("fc1", "fc2"), ("linear1", "linear2"), ("lin1", "lin2"), ("pwconv1", "pwconv2")


@dataclass(frozen=True)
class Perceptron:
    """Hold the weights of a two-layer perceptron.

    Attributes:
        up: (H, D), or (2 * H, D) where it is gated, with the rows of the gate first.
        down: (D, H).
        up_bias: (H,) or (2 * H,), if there is one.
        down_bias: (D,), if there is one.
        activation: a name of :data:`lightning_accel.ops.expert_mlp.ACTIVATIONS`.
    """

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    activation: Activation

    @property
    def is_gated(self) -> bool:
        return len(self.up) == 2 * self.down.shape[1]

    @property
    def keeps_width(self) -> bool:
        """Return whether it maps features to as many, unlike the heads of networks."""
        return len(self.down) == self.up.shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        """Map ``x`` (..., D) to the same shape."""
        act, hidden_dim = ACTIVATIONS[self.activation].function, self.down.shape[1]
        hidden = nn.functional.linear(x, self.up, self.up_bias)
        first = act(hidden[..., :hidden_dim])
        first = first * hidden[..., hidden_dim:] if self.is_gated else first
        return nn.functional.linear(first, self.down, self.down_bias)

    def with_halves_swapped(self) -> "Perceptron":
        """Return a gated one whose gate is the other half of the first layer."""
        bias = None if self.up_bias is None else torch.cat(self.up_bias.chunk(2)[::-1])
        return replace(self, up=torch.cat(self.up.chunk(2)[::-1]), up_bias=bias)


@dataclass(frozen=True)
class Place:
    """Hold where a perceptron is in a network.

    Attributes:
        name: of the module that is, or has, the perceptron.
        perceptron: what it computes.
        run: computes it by the modules of the network.
        target: name of the module in whose place a mixture can be.
        emptied: names of modules that compute nothing then.
        module: the one in whose place a mixture can be, which may be at several places.
    """

    name: str
    perceptron: Perceptron
    run: Callable[[Tensor], Tensor]
    target: str
    emptied: tuple[str, ...]
    module: nn.Module


def read_perceptron(mlp: nn.Module) -> Perceptron:
    """Return what a module computes whose only linear layers are those of a perceptron.

    Raises:
        TypeError: if it is none, or has an activation that mixtures do not have.
    """
    if isinstance(mlp, FeedForward):
        return Perceptron(mlp.up.weight, mlp.down.weight, mlp.up.bias, mlp.down.bias, mlp.activation)
    linear = [(name, child) for name, child in mlp.named_children() if _is_linear(child)]
    others = [
        child for _, child in mlp.named_children() if not _is_linear(child) and any(True for _ in child.parameters())
    ]
    if others or len(linear) not in (2, 3) or len(list(mlp.parameters(recurse=False))):
        raise TypeError(f"need a module with two linear layers, or three of which one is a gate; got {_brief(mlp)}")
    *first, last = _in_order(linear)
    return _joined(first, last, _activation_of(mlp, linear))


def find_perceptrons(module: nn.Module) -> tuple[list[Place], dict[str, str]]:
    """Return the perceptrons inside a network in order, and by the names of others why mixtures do not replace them.

    Found are modules that are perceptrons, whatever their class; pairs of ``intermediate`` and ``output``, as in BERT;
    and pairs of layers beside others, as in Whisper and ConvNeXt. Each was run on random features: it computes what its
    weights say.
    """
    found: list[Place] = []
    reasons: dict[str, str] = {}
    seen: set[str] = set()
    for name, layer in module.named_modules(remove_duplicate=False):
        if not name or any(name.startswith(f"{one}.") for one in seen):
            continue
        if type(layer).__name__ in ("MixtureOfExperts", "Experts"):
            seen.add(name)
            continue
        for one in _places_at(name, layer):
            place = _verified(one) if isinstance(one, Place) else None
            if place is not None:
                found.append(place)
                seen.update({place.target, *place.emptied})
            else:
                other = "it computes something else than a perceptron of these weights"
                reasons[name] = one if isinstance(one, str) else other
    return found, reasons


def _places_at(name: str, layer: nn.Module) -> Iterator[Place | str]:
    """Yield the perceptron that a module is or has, or why it is not replaced."""
    try:
        perceptron = read_perceptron(layer)
    except _UnknownActivationError as error:
        if error.keeps_width:
            yield str(error)
    except TypeError:
        yield from _parts_of(name, layer)
    else:
        if perceptron.keeps_width:
            yield Place(name, perceptron, layer, name, (), layer)


def _parts_of(name: str, layer: nn.Module) -> Iterator[Place | str]:
    inner, outer = getattr(layer, "intermediate", None), getattr(layer, "output", None)
    last = getattr(outer, "dense", None)
    try:
        if isinstance(inner, nn.Module) and _is_linear(getattr(inner, "dense", None)) and _is_linear(last):
            assert last is not None
            perceptron = _joined([inner.dense], last, _activation_of(inner, []))  # type: ignore[list-item]
            target = f"{name}.intermediate"
            yield Place(name, perceptron, lambda x: last(inner(x)), target, (f"{name}.output.dense",), inner)
            return
        for first_name, last_name in _PAIRS:
            pair: list[Any] = [getattr(layer, one, None) for one in (first_name, last_name)]
            if not all(map(_is_linear, pair)) or _weight(pair[0]).shape != _weight(pair[1]).shape[::-1]:
                continue
            if isinstance(layer, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                yield "torch's own transformer layers read the weights of their perceptrons"
                continue
            if other := _between(layer, first_name, last_name):
                yield f"{other} stands between its layers"
                continue
            act_name = next((one for one, _ in layer.named_children() if one.startswith("act")), None)
            if act_name is None:
                yield "its activation is no module, in whose place nothing could be"
                continue
            act = layer.get_submodule(act_name)
            perceptron = _joined([pair[0]], pair[1], act)
            emptied = f"{name}.{act_name}", f"{name}.{last_name}"
            run = _chain(pair[0], act, pair[1])
            yield Place(name, perceptron, run, f"{name}.{first_name}", emptied, pair[0])
    except _UnknownActivationError as error:
        yield str(error)


def _between(layer: nn.Module, first: str, last: str) -> str | None:
    """Return the name of a child with parameters that stands between two others, in the order of their definition."""
    names = [name for name, _ in layer.named_children()]
    inner = names[names.index(first) + 1 : names.index(last)]
    return next((name for name in inner if any(True for _ in layer.get_submodule(name).parameters())), None)


def _chain(*modules: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        for module in modules:
            x = module(x)
        return x

    return run


def _verified(place: Place) -> Place | None:
    """Return the place with what its modules compute, None if that is something else."""
    perceptron = place.perceptron
    if perceptron.up.is_meta:
        return place
    with torch.no_grad(), torch.random.fork_rng([]), _evaluating(place.module):
        torch.manual_seed(0)
        x = torch.randn(1, 3, perceptron.up.shape[1]).to(perceptron.up)
        try:
            expected = place.run(x)
        except Exception:  # it takes other arguments
            return None
        tries = [perceptron, perceptron.with_halves_swapped()] if perceptron.is_gated else [perceptron]
        tolerance = 1e-4 if x.dtype in (torch.float32, torch.float64) else 5e-2
        for one in tries:
            found = one(x)
            if found.shape == expected.shape and (found - expected).abs().max() <= tolerance * expected.abs().max():
                return replace(place, perceptron=one)
    return None


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    training = [one for one in module.modules() if one.training]
    module.eval()
    try:
        yield
    finally:
        for one in training:
            one.training = True


class _UnknownActivationError(TypeError):
    keeps_width = False


def _is_linear(module: object) -> bool:
    """Return whether a module is a linear layer, of torch or as GPT-2 of transformers has it."""
    return isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


def _weight(linear: nn.Module) -> Tensor:
    """Return the weight of a linear layer, (outputs, inputs)."""
    weight: Tensor = linear.weight  # type: ignore[assignment]
    return weight if isinstance(linear, nn.Linear) else weight.T


def _in_order(linear: Sequence[tuple[str, nn.Module]]) -> list[nn.Module]:
    """Return the gate first, if there is one, and the second layer last."""
    shapes = [tuple(_weight(layer).shape) for _, layer in linear]
    if len(linear) == 2:
        return [layer for _, layer in linear]
    last = next((place for place, shape in enumerate(shapes) if shapes.count(shape) == 1), 2)
    gate = next((place for place, (name, _) in enumerate(linear) if name in _GATES and place != last), None)
    first = sorted({0, 1, 2} - {last}, key=lambda place: place != gate)
    return [linear[place][1] for place in (*first, last)]


def _joined(first: Sequence[nn.Module], last: nn.Module, act: object) -> Perceptron:
    """Return the perceptron of linear layers.

    Raises:
        TypeError: if their sizes do not go together.
    """
    ups, down = [_weight(layer) for layer in first], _weight(last)
    # gate and first layer may be one, as in Phi-3 and ModernBERT
    allowed = (down.shape[1], 2 * down.shape[1]) if len(ups) == 1 else (down.shape[1],)
    if any(up.shape != ups[0].shape or len(up) not in allowed for up in ups):
        raise TypeError(f"linear layers of sizes {[tuple(one.shape) for one in (*ups, down)]} are no perceptron")
    biases = [layer.bias for layer in first]
    if len({bias is None for bias in biases}) > 1:
        raise TypeError("all linear layers of the first of two layers must have a bias, or none")
    bias = None if biases[0] is None else torch.cat(biases)  # type: ignore[arg-type]
    down_bias: Tensor | None = last.bias  # type: ignore[assignment]
    try:
        activation = _read_activation(act)
    except _UnknownActivationError as error:
        error.keeps_width = len(down) == ups[0].shape[1]
        raise
    return Perceptron(torch.cat(ups), down, bias, down_bias, activation)


def _activation_of(mlp: nn.Module, linear: Sequence[tuple[str, nn.Module]]) -> object:
    """Return the only child or attribute that is called and has no parameters, but for dropouts."""
    modules = [child for child in mlp.children() if not isinstance(child, nn.Dropout | nn.Identity)]
    functions = [child for child in modules if child not in [layer for _, layer in linear] and not _is_linear(child)]
    functions += [value for name, value in vars(mlp).items() if callable(value) and "act" in name]
    return functions[0] if len(functions) == 1 else None


def _read_activation(act: object) -> Activation:
    probe = torch.linspace(-3, 3, 7, device="cpu")
    for name in get_args(Activation):
        # transformers has formulas of its own for some; tanh's approximation of gelu is 1e-4 off
        if callable(act) and torch.allclose(act(probe), ACTIVATIONS[name].function(probe), rtol=1e-5, atol=1e-6):
            return name
    raise _UnknownActivationError(f"the activation must be one of {', '.join(ACTIVATIONS)}; got {act}")


def _brief(module: nn.Module) -> str:
    children = ", ".join(f"{name}: {type(child).__name__}" for name, child in module.named_children())
    return f"{type(module).__name__}({children})"
