"""Lines that tell what a long phase is at."""

import time
from collections.abc import Callable

PAUSE = 2.0  # seconds between lines that are told only where work is slow


class Progress:
    """Tell what is being done, with the seconds since this was made.

    Args:
        tell: takes each line; None tells nobody.
        title: stands before each.
    """

    def __init__(self, tell: Callable[[str], None] | None, title: str = "") -> None:
        self.tell = tell
        self.title = title
        self.start = self.last = time.perf_counter()

    def __call__(self, text: str, if_slow: bool = False) -> None:
        """Tell ``text``, or, ``if_slow``, only where no line was told for a while."""
        now = time.perf_counter()
        if self.tell is None or (if_slow and now - self.last < PAUSE):
            return
        self.last = now
        before = f"{self.title}: " if self.title else ""
        self.tell(f"{before}{text} ({now - self.start:.0f} s)")
