"""What a search has measured so far, in a file that it goes on from when it was killed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_accel.strategies.checkpoints.atomic import write_atomically


class Journal:
    """Keep results by name in a file of JSON lines, each written before the next is measured.

    Args:
        path: the file; read if it exists.
        identity: what is measured, where, as plain values.

    Raises:
        ValueError: if the file is about something else.
    """

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self._path = path
        self._results: dict[str, Any] = {}
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # the last line may be incomplete
        entries = [json.loads(line) for line in whole.splitlines()]
        if entries and entries[0] != {"identity": identity}:
            raise ValueError(
                f"{path.parent} holds measurements of another run, or of this one on another machine or with other "
                "versions: remove the folder, or choose another one by --output"
            )
        for entry in entries[1:]:
            self._results[entry["name"]] = entry["result"]
        if whole != text:
            with write_atomically(path) as part:
                part.write_text(whole)
        if not entries:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write({"identity": identity}, mode="w")

    def __contains__(self, name: str) -> bool:
        return name in self._results

    def seconds(self) -> float:
        """Return the time that all results have taken."""
        return sum(result.get("seconds", 0.0) for result in self._results.values())

    def result(self, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of a name; measure and write it if there is none."""
        if name not in self._results:
            result = measure()
            self._write({"name": name, "result": result}, mode="a")
            self._results[name] = result
        return self._results[name]

    def _write(self, entry: dict[str, Any], mode: str) -> None:
        with open(self._path, mode) as file:
            file.write(json.dumps(entry) + "\n")
