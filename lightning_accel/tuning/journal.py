"""What a search has measured so far, in a file that it goes on from when it was killed."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_accel.strategies.checkpoints.atomic import explain_disk_errors
from lightning_accel.tuning.identity import require_same


class Journal:
    """Keep results by name in a file of JSON lines, each written before the next is measured.

    Args:
        path: the file; read if it exists.
        identity: what is measured, where, as plain values.
        budget: seconds for everything; what less than these cut short is measured again.

    Attributes:
        seconds: time that all results of the file have taken when it was read.
        num_cut: results that a smaller budget or a full disk cut short.

    Raises:
        NotWrittenError: if the disk is full, or may not be written.
        ValueError: if the file is about something else, or damaged.
    """

    def __init__(self, path: Path, identity: dict[str, Any], budget: float) -> None:
        self._path = path
        self._results: dict[str, Any] = {}
        self.seconds = 0.0
        text = path.read_bytes() if path.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]  # the last line may be incomplete
        entries = _entries_of(whole, path)
        if len(entries) > 1:
            require_same(entries[0]["identity"], identity, path.parent)
        elif entries and entries[0]["identity"] != identity:  # of a run that has measured nothing
            entries, whole = [], b""
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
            with explain_disk_errors(path):
                os.truncate(path, len(whole))  # which a full disk allows
        if not entries:
            self._write({"identity": identity})

    def __contains__(self, name: str) -> bool:
        return name in self._results

    def __len__(self) -> int:
        return len(self._results)

    def result(self, name: str, measure: Callable[[], tuple[dict[str, Any], float | None]]) -> dict[str, Any]:
        """Return the result of a name; measure and write it if there is none.

        Args:
            name: what is measured.
            measure: returns the result and the budget that cut it short: None for none, 0 if a full disk did.
        """
        if name not in self._results:
            result, cut_at = measure()
            self._write({"name": name, "cut_at": cut_at, "result": result})
            self._results[name] = result
        return self._results[name]

    def _write(self, entry: dict[str, Any]) -> None:
        with explain_disk_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "a") as file:
                file.write(json.dumps(entry) + "\n")


def _entries_of(text: bytes, path: Path) -> list[dict[str, Any]]:
    """Return the identity and the results of a journal's whole lines.

    Raises:
        ValueError: if a line is none of a journal.
    """
    entries: list[dict[str, Any]] = []
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict) or entry.keys() != ({"name", "cut_at", "result"} if entries else {"identity"}):
            raise ValueError(
                f"{path} is damaged in line {len(entries) + 1}, or no journal of tune; remove it to measure everything "
                "again, or choose another folder by --output"
            )
        entries.append(entry)
    return entries
