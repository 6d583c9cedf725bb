"""What submodules are called with and give while a step runs."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn


class Call(NamedTuple):
    """One call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any  # with its graph


Calls = dict[str, list[Call]]


class CallRecorder:
    """Keeps the calls of submodules, but only in ``recording()``, and of each thread for itself."""

    def __init__(self) -> None:
        self._here = threading.local()
        self._hooks: dict[str, tuple[nn.Module, Any]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "CallRecorder":
        return CallRecorder()  # of a copied module's hooks: nobody records with it

    def watch(self, module: nn.Module, names: Iterable[str]) -> None:
        """Follow these submodules of ``module``, and no others; those that another took the place of, too."""
        wanted = {name: module.get_submodule(name) for name in names}
        for name, (watched, handle) in list(self._hooks.items()):
            if wanted.get(name) is not watched:
                handle.remove()
                del self._hooks[name]
        for name, one in wanted.items():
            if name not in self._hooks:
                compiled = one._compiled_call_impl is not None
                hook = _Hook(name, self)
                handle = _Around(one, hook) if compiled else one.register_forward_hook(hook, with_kwargs=True)
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

    def keep(self, name: str, call: Call) -> None:
        calls = getattr(self._here, "calls", None)
        if calls is not None:
            calls.setdefault(name, []).append(call)


class _Hook:
    def __init__(self, name: str, recorder: CallRecorder) -> None:
        self.name = name
        self.recorder = recorder

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.recorder.keep(self.name, Call(args, kwargs, output))


class _Around:
    """A hook outside of what ``module.compile()`` compiles, which one inside would break up; copies do not have it."""

    def __init__(self, module: Any, hook: _Hook) -> None:
        self.module, self.hook = module, hook
        self.compiled = module._compiled_call_impl
        module._compiled_call_impl = self.call

    def call(self, *args: Any, **kwargs: Any) -> Any:
        output = self.compiled(*args, **kwargs)
        self.hook(self.module, args, kwargs, output)
        return output

    def remove(self) -> None:
        if self.module._compiled_call_impl == self.call:
            self.module._compiled_call_impl = self.compiled


def callable_parts(module: nn.Module) -> list[str]:
    """Names of ``module`` ("") and its submodules with parameters, without what is inside of compiled ones."""
    names: list[str] = []
    closed: list[str] = []
    for name, one in module.named_modules():
        if any(name.startswith(f"{outer}.") for outer in closed) or not any(True for _ in one.parameters()):
            continue
        names.append(name)
        if name and (one._compiled_call_impl is not None or hasattr(one, "_orig_mod")):
            closed.append(name)
    return names


def outermost(calls: Calls, module: nn.Module) -> str | None:
    """Which of those called holds the most parameters; of equals, the one that holds the others."""
    sizes = {name: sum(one.numel() for one in module.get_submodule(name).parameters()) for name in calls}
    return max(sizes, key=lambda name: (sizes[name], -len(name)), default=None)
