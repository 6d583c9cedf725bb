"""Checks of the metric names that callbacks monitor."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def require_logged(caller: str, missing: Sequence[str], logged: Iterable[str], hint: str = "") -> None:
    """Reject monitored names that nothing logs.

    Args:
        caller: the callback that monitors them.
        missing: the monitored names that are not logged.
        logged: names of all metrics logged so far.
        hint: another possible cause, for the message.

    Raises:
        ValueError: if ``missing`` is not empty.
    """
    if not missing:
        return
    known = sorted(logged)
    near = get_close_matches(missing[0], known, n=1)
    raise ValueError(
        f"{caller} monitors {missing[0]!r}, which is not logged"
        + (f"; did you mean {near[0]!r}? " if near else ". ")
        + f"Logged so far: {', '.join(known) or 'nothing'}.{hint}"
    )
