"""Check of the options of programs that pass all others on to ``fit``."""

import argparse
from collections.abc import Sequence
from difflib import get_close_matches

_SIMILAR = 0.8  # no option of fit is as similar to one of these programs


def reject_misspelt(parser: argparse.ArgumentParser, own: argparse.Namespace, of_fit: Sequence[str]) -> None:
    """End the program if an option for ``fit`` is a misspelt one of ``own``, as ``--second`` is."""
    for word in of_fit:
        name = word.partition("=")[0]
        near = get_close_matches(name, [f"--{known}" for known in vars(own)], n=1, cutoff=_SIMILAR)
        if near and name.startswith("--"):
            parser.error(f"no option {name}; did you mean {near[0]}?")
