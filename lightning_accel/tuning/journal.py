"""What a search has measured so far, in a file that it goes on from when it was killed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_accel.strategies.checkpoints.atomic import write_atomically
from lightning_accel.tuning.identity import require_same


class Journal:
    """Keep results by name in a file of JSON lines, each written before the next is measured.

    Args:
        path: the file; read if it exists.
        identity: what is measured, where, as plain values.
        budget: seconds for everything; what less than these cut short is measured again.

    Attributes:
        seconds: time that all results of the file have taken when it was read.
        num_cut: results that a smaller budget cut short.

    Raises:
        ValueError: if the file is about something else.
    """

    def __init__(self, path: Path, identity: dict[str, Any], budget: float) -> None:
        self._path = path
        self._budget = budget
        self._results: dict[str, Any] = {}
        self.seconds = 0.0
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # the last line may be incomplete
        entries = [json.loads(line) for line in whole.splitlines()]
        if entries:
            require_same(entries[0]["identity"], identity, path.parent)
        cut = set()
        for entry in entries[1:]:
            name = entry["name"]
            self.seconds += entry["result"].get("seconds", 0.0)
            if entry["cut_at"] is None or entry["cut_at"] >= budget:
                self._results[name] = entry["result"]
                cut.discard(name)
            else:
                cut.add(name)
        self.num_cut = len(cut)
        if whole != text:
            with write_atomically(path) as part:
                part.write_text(whole)
        if not entries:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write({"identity": identity}, mode="w")

    def __contains__(self, name: str) -> bool:
        return name in self._results

    def __len__(self) -> int:
        return len(self._results)

    def result(self, name: str, measure: Callable[[], tuple[dict[str, Any], bool]]) -> dict[str, Any]:
        """Return the result of a name; measure and write it if there is none.

        Args:
            name: what is measured.
            measure: returns the result, and whether the budget cut it short.
        """
        if name not in self._results:
            result, is_cut = measure()
            self._write({"name": name, "cut_at": self._budget if is_cut else None, "result": result}, mode="a")
            self._results[name] = result
        return self._results[name]

    def _write(self, entry: dict[str, Any], mode: str) -> None:
        with open(self._path, mode) as file:
            file.write(json.dumps(entry) + "\n")
