"""The repeated blocks of a module, such as the layers of a transformer."""

from collections.abc import Iterator, Sequence

from torch import nn

from lightning_accel.ops.names import list_of_names


def find_blocks(module: nn.Module, class_names: Sequence[str] | None = None) -> list[nn.Module]:
    """Return the repeated blocks of ``module``, in order, none inside another.

    Blocks are the submodules of the named classes; without names, what the module's own method ``repeated_blocks()``
    returns, if it has one; else, found by structure, children of one class with parameters that occur at least twice in
    an ``nn.ModuleList``, ``nn.Sequential`` or ``nn.ModuleDict``. Blocks that share a parameter with the rest of the
    module are left out.

    Args:
        module: module to search.
        class_names: names of the classes of the blocks, such as ``TransformerBlock``; by default as above.

    Raises:
        ValueError: if a class name matches no submodule.
        TypeError: if ``repeated_blocks()`` returns something other than submodules.

    >>> model = nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3)), nn.Linear(3, 1))
    >>> find_blocks(model)
    [Linear(in_features=2, out_features=3, bias=True), Linear(in_features=3, out_features=3, bias=True)]
    """
    if class_names is not None:
        blocks = _of_classes(module, list_of_names(class_names))
    elif callable(declared := getattr(module, "repeated_blocks", None)):
        blocks = list(declared())
        if strangers := [block for block in blocks if not any(block is one for one in module.modules())]:
            raise TypeError(
                f"{type(module).__name__}.repeated_blocks() must return submodules of the module; got "
                f"{', '.join(type(one).__name__ for one in strangers)}"
            )
    else:
        blocks = list(_repeated(module))
    return [block for block in _outermost(blocks) if not _shares_parameters(block, module)]


def _outermost(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return each block once, however many names it has, without those inside another."""
    inside = {id(inner) for block in blocks for inner in block.modules() if inner is not block}
    return list({id(block): block for block in blocks if id(block) not in inside}.values())


def _of_classes(module: nn.Module, class_names: Sequence[str]) -> list[nn.Module]:
    present = {type(one).__name__ for one in module.modules()}
    if unknown := sorted(set(class_names) - present):
        raise ValueError(
            f"no submodule of {type(module).__name__} is a {', '.join(unknown)}; its classes are "
            f"{', '.join(sorted(present - {type(module).__name__}))}"
        )
    found: list[nn.Module] = []

    def descend(parent: nn.Module) -> None:
        for child in parent.children():
            if type(child).__name__ in class_names:
                found.append(child)
            else:
                descend(child)

    descend(module)
    return found


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        siblings = [type(one) for one in module.children() if any(True for _ in one.parameters())]
        is_list = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        if is_list and siblings.count(type(child)) > 1 and any(True for _ in child.parameters()):
            yield child
        else:
            yield from _repeated(child)


def _shares_parameters(block: nn.Module, module: nn.Module) -> bool:
    inside = {id(one) for one in block.modules()}
    own = {id(parameter) for parameter in block.parameters()}
    return any(
        id(parameter) in own
        for one in module.modules()
        if id(one) not in inside
        for parameter in one.parameters(recurse=False)
    )
