"""Printed summaries of pruned and omitted layers."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.utilities import rank_zero_info


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """Format a table of layers with their remaining weights, one per line."""
    width = max([len(row["name"]) for row in rows] + [5])
    lines = [f"{'layer':<{width}}  {'weights':>12}  {'not zero':>12}  {'sparsity':>8}"]
    total = {"name": "total", "parameters": 0, "nonzero": 0}
    for row in rows:
        total["parameters"] += row["parameters"]
        total["nonzero"] += row["nonzero"]
    for row in [*rows, total]:
        sparsity = 1 - row["nonzero"] / max(row["parameters"], 1)
        lines.append(f"{row['name']:<{width}}  {row['parameters']:>12,}  {row['nonzero']:>12,}  {sparsity:>8.4f}")
    return "\n".join(lines)


def log_left_out(left_out: dict[str, str]) -> None:
    by_reason: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        by_reason.setdefault(reason, []).append(name)
    described = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items())
    rank_zero_info(f"Pruning leaves out {described}" if described else "Pruning leaves out no parameter")
