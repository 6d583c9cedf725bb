"""Files that are there whole or not at all."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give the path of a file to write, which takes the place of ``path`` at the end; a killed run leaves no half.

    Its folder is made. Several processes may write the same file.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise type(error)(f"{path.parent} cannot be made: {error}; name another folder as cache_dir") from error
    partial = path.with_name(f"{path.stem}.{uuid.uuid4().hex}{path.suffix}")  # several machines may share the folder
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
