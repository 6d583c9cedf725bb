"""Detection of code that the settings of a checkpoint would import or read."""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any


def code_named_in(settings: Any) -> list[str]:
    """Return the import paths, files and URLs in ``settings``, at any depth, that would load new code.

    A config parser takes a string for the path of a class, for YAML that names one, or for the name of a file that
    contains such YAML. Paths within packages that are imported already load nothing new.
    """
    found: dict[str, None] = {}
    for text in _texts(settings):
        found |= dict.fromkeys(path for path in re.findall(r"[^\W\d]\w*(?:\.\w+)+", text) if _would_be_imported(path))
        words = [text, *re.findall(r"[^\s\"'{}\[\],]+", text)]
        found |= dict.fromkeys(word for word in words if "://" in word or os.path.isfile(word))
    return list(found)


def _texts(settings: Any) -> Iterator[str]:
    if isinstance(settings, str):
        yield settings
    elif isinstance(settings, Mapping):
        for pair in settings.items():
            yield from _texts(pair)
    elif isinstance(settings, list | tuple | set | frozenset):
        for one in settings:
            yield from _texts(one)


def _would_be_imported(path: str) -> bool:
    package = path.partition(".")[0]
    return package not in sys.modules and find_spec(package) is not None
