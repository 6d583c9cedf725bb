"""Messages between processes that are simulated one after another, as the stages of a pipeline are."""

import copy
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Unanswered(BaseException):
    """End the simulation of a process that waits for what no process has said yet."""


class Peers:
    """Hold what processes have sent, for those that are simulated after them, in this round or the next.

    Values go forward alone. Gradients, which a process receives from a later one, have the sizes that it gives and no
    values; integers are those that it sent there last, such as its vote on the schedule, on which all agree.

    Attributes:
        rank: the process that is simulated.
        count: how many are simulated, the first of all; where objects come from others they are those of the one that
            asks.
    """

    def __init__(self) -> None:
        self.rank = 0
        self.count = 1
        self._has_values: Callable[[Tensor], bool] = lambda tensor: True
        self._tensors: dict[tuple[int, int], list[bytes | None]] = defaultdict(list)
        self._received: Counter[int] = Counter()
        self._objects: dict[tuple[int, str, tuple[int, ...]], list[Any]] = defaultdict(list)
        self._said: set[tuple[int, str, tuple[int, ...]]] = set()  # in this round

    def begin(self, rank: int, has_values: Callable[[Tensor], bool]) -> None:
        """Forget what a process said in an earlier round, before it is simulated."""
        self.rank, self._has_values = rank, has_values
        for places in [key for key in self._tensors if key[0] == rank]:
            del self._tensors[places]
        self._said = set()
        self._received = Counter()

    def send(self, tensor: Tensor, to: int) -> None:
        """Keep the values of a tensor, if it has any, for another process."""
        if to > self.rank:
            has_values = self._has_values(tensor)
            values = tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes() if has_values else None
            self._tensors[self.rank, to].append(values)

    def receive(self, tensor: Tensor, source: int) -> None:
        """Fill a tensor with the next that another process has sent, if that has values.

        Raises:
            Unanswered: if it has sent no more.
        """
        is_later = source > self.rank
        if is_later and tensor.is_floating_point():
            return
        sent = self._tensors[(self.rank, source) if is_later else (source, self.rank)]
        number = len(sent) - 1 if is_later else self._received[source]
        if not 0 <= number < len(sent):
            raise Unanswered
        self._received[source] += 1
        if values := sent[number]:  # into the memory, since operations on what has no values compute nothing
            tensor.detach().view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(values, np.uint8)

    def say(self, kind: str, ranks: tuple[int, ...], value: Any) -> int:
        """Keep an object for all processes of a group; return which of its kind there it is."""
        key = self.rank, kind, ranks
        if key not in self._said:
            self._said.add(key)
            self._objects[key] = []
        self._objects[key].append(value)
        return len(self._objects[key]) - 1

    def said_by(self, rank: int, kind: str, ranks: tuple[int, ...], number: int, default: Any = None) -> Any:
        """Return an object of a process, the last one if it has said fewer yet, ``default`` if none.

        Raises:
            Unanswered: if it has said none, and there is no default.
        """
        said = self._objects.get((rank, kind, ranks), [])
        if not said and default is None:
            raise Unanswered
        return default if not said else copy.deepcopy(said[min(number, len(said) - 1)])  # as if it had been sent
