"""What a callback asks of the metrics that a run logs."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def require_logged(asker: str, missing: Sequence[str], logged: Iterable[str], hint: str = "") -> None:
    """Refuse names that nothing logs.

    Args:
        asker: the callback that monitors them.
        missing: of the names, those that are not logged.
        logged: names of what was logged so far.
        hint: what else may be the cause.

    Raises:
        ValueError: if there are any.
    """
    if not missing:
        return
    known = sorted(logged)
    near = get_close_matches(missing[0], known, n=1)
    raise ValueError(
        f"{asker} monitors {missing[0]!r}, which is not logged"
        + (f"; did you mean {near[0]!r}? " if near else ". ")
        + f"Logged so far: {', '.join(known) or 'nothing'}.{hint}"
    )
