"""Files that are there whole or not at all."""

import hashlib
import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


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


def kept_json(folder: str | Path, made_of: object, make: Callable[[], Any]) -> Any:
    """Return what ``make`` returns, as JSON holds it, from a file in ``folder`` if it was made of the same before."""
    digest = hashlib.sha256(repr(made_of).encode()).hexdigest()[:32]
    kept = Path(folder).expanduser() / f"{digest}.json"
    if not kept.exists():
        with whole_file(kept) as partial:
            partial.write_text(json.dumps(make()))
    return json.loads(kept.read_text())
