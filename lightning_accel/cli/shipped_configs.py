"""Configs that come with the package, found by their names from any folder."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def shipped_configs() -> dict[str, Path]:
    """Return the configs of the installed package, or of the copy of the repository that it is imported from."""
    folders = (_PACKAGE / "configs", _PACKAGE.parent / "configs")
    return {path.name: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def find_shipped_configs(arguments: Sequence[str]) -> list[str]:
    """Replace ``--config moe_digits.yaml``, where that is no file, by the path of the package's config.

    ``--config configs/moe_digits.yaml``, which is its path in the repository, is replaced as well; each replacement is
    reported on stderr.
    """
    return [*_found(iter(arguments))]


def _found(arguments: Iterator[str]) -> Iterator[str]:
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if option not in ("--config", "-c"):
            yield argument
            continue
        if not equals:
            yield option
            value = next(arguments, "")
            if not value:
                return
        path = Path(value)
        if path.parent in (Path(), Path("configs")) and not path.exists() and path.name in (own := shipped_configs()):
            print(f"--config {value}: {own[path.name]}", file=sys.stderr)
            value = str(own[path.name])
        yield f"{option}={value}" if equals else value
