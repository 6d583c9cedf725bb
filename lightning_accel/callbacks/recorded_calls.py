"""Recording of the inputs and outputs of submodules while a step runs."""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from lightning_accel._private.torch import compiled_call, compiled_original, set_compiled_call


class Call(NamedTuple):
    """Hold the arguments and the output of one call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any  # attached to its graph


Calls = dict[str, list[Call]]


class CallRecorder:
    """Record the calls of submodules within ``recording()``, separately for each thread."""

    def __init__(self) -> None:
        self._here = threading.local()
        self._hooks: dict[str, tuple[nn.Module, Any]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "CallRecorder":
        return CallRecorder()  # belongs to the hooks of a copied module, which are not recorded

    def watch(self, module: nn.Module, names: Iterable[str]) -> None:
        """Watch exactly these submodules of ``module``; call it again if submodules have been replaced."""
        wanted = {name: module.get_submodule(name) for name in names}
        for name, (watched, handle) in list(self._hooks.items()):
            if wanted.get(name) is not watched:
                handle.remove()
                del self._hooks[name]
        for name, one in wanted.items():
            if name not in self._hooks:
                compiled = compiled_call(one) is not None
                hook = partial(self._record, name)
                handle = _CompiledCallHook(one, hook) if compiled else one.register_forward_hook(hook, with_kwargs=True)
                self._hooks[name] = one, handle

    def close(self) -> None:
        for _, handle in self._hooks.values():
            handle.remove()
        self._hooks = {}

    @contextmanager
    def recording(self) -> Iterator[Calls]:
        calls: Calls = {}
        self._here.calls = calls
        try:
            yield calls
        finally:
            self._here.calls = None

    def _record(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls = getattr(self._here, "calls", None)
        if calls is not None:
            calls.setdefault(name, []).append(Call(args, kwargs, output))


class _CompiledCallHook:
    """Hook the call from outside of ``module.compile()``, since a hook inside would break the graph; not copied."""

    def __init__(self, module: Any, hook: Callable[..., None]) -> None:
        self.module, self.hook = module, hook
        self.compiled: Any = compiled_call(module)
        set_compiled_call(module, self.call)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        output = self.compiled(*args, **kwargs)
        self.hook(self.module, args, kwargs, output)
        return output

    def remove(self) -> None:
        if compiled_call(self.module) == self.call:
            set_compiled_call(self.module, self.compiled)


def callable_parts(module: nn.Module) -> list[str]:
    """Return the names of ``module`` ("") and its submodules with parameters, except those inside compiled ones."""
    names: list[str] = []
    closed: list[str] = []
    for name, one in module.named_modules():
        if any(name.startswith(f"{outer}.") for outer in closed) or not any(True for _ in one.parameters()):
            continue
        names.append(name)
        if name and (compiled_call(one) is not None or compiled_original(one) is not None):
            closed.append(name)
    return names


def outermost(calls: Collection[str], module: nn.Module) -> str | None:
    """Return the called module with the most parameters; among equals, the outermost."""
    sizes = {name: sum(one.numel() for one in module.get_submodule(name).parameters()) for name in calls}
    return max(sizes, key=lambda name: (sizes[name], -len(name)), default=None)
