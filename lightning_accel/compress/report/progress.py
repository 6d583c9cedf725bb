"""Progress messages of long computations."""

import time
from collections.abc import Callable

PAUSE = 2.0  # seconds without a message after which one with if_slow is reported


class Progress:
    """Report what is being done, with the seconds since the start.

    Args:
        tell: function that takes each message; None for no messages.
        title: prefix of each message.
    """

    def __init__(self, tell: Callable[[str], None] | None, title: str = "") -> None:
        self.tell = tell
        self.title = title
        self.start = self.last = time.perf_counter()

    def __call__(self, text: str, if_slow: bool = False) -> None:
        """Report ``text``; if ``if_slow``, only if nothing was reported for a while."""
        now = time.perf_counter()
        if self.tell is None or (if_slow and now - self.last < PAUSE):
            return
        self.last = now
        before = f"{self.title}: " if self.title else ""
        self.tell(f"{before}{text} (after {now - self.start:.0f} s)")
