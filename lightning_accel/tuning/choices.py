"""Words that options of ``tune`` take, which its help lists without importing torch."""

from typing import Literal, get_args

Goal = Literal["speed", "memory", "latency"]
GOALS = get_args(Goal)
ALLOWABLE = ("batch_size", "length_bucketed", "packed", "float8", "2:4")
