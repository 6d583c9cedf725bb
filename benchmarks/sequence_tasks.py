"""Generated tasks that distinguish recurrent cells, for bench_sequence_tasks.py. Shapes: R sequences.

Each depends on its arguments and ``seed`` alone and is the same on every machine. ``lengths`` is the minimum and the
maximum number of steps of a sequence, both inclusive; lengths are uniformly distributed.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_accel import SequenceDataModule
from lightning_accel.data.sequences.batch import IGNORED
from lightning_accel.data.sequences.dataset import SequenceDataset
from lightning_accel.data.sequences.splits import SequenceSplits

MARK = 15  # token of selective copying that asks for a symbol
REMEMBERED = 16  # symbols of a sequence of selective copying
ROWS_AT_ONCE = 512  # sequences whose random numbers are in memory at a time


@dataclass
class Task:
    """Lengths of the training and test sequences, and what their targets are."""

    lengths: tuple[int, int]
    test_lengths: tuple[int, int]
    kind: str
    class_names: list[str]
    vocab_size: int


TASKS = {
    "parity": Task((3, 40), (40, 256), "classification", ["even", "odd"], 2),
    "parity_steps": Task((3, 40), (40, 256), "labelling", ["even", "odd"], 2),
    "counting": Task((1, 50), (1, 256), "labelling", ["a or b", "b", "end"], 2),
    "selective_copying": Task((64, 64), (64, 64), "labelling", [str(i) for i in range(1, MARK)], MARK + 1),
}


class TaskDataModule(SequenceDataModule):
    """SequenceDataModule of one of TASKS, with as many sequences of each split as for its own generated task."""

    def __init__(self, task: str, **options: Any) -> None:
        super().__init__(task="adding", **options)
        self.name = task

    def _read(self) -> SequenceSplits:
        task = TASKS[self.name]
        held_out = [round(share * self.num_sequences) for share in self.shares]
        counts = self.num_sequences - sum(held_out), *held_out
        lengths = task.lengths, task.lengths, task.test_lengths
        parts = [
            generate(self.name, count, between, 3 * self.seed + number)
            for number, (count, between) in enumerate(zip(counts, lengths, strict=True))
        ]
        if self.name == "counting":
            parts[2] = counting(torch.arange(task.test_lengths[0], task.test_lengths[1] + 1))  # each number once
        parts[1:] = [part.select(part.lengths.argsort(stable=True)) for part in parts[1:]]
        ids = [str(row) for row in range(len(parts[2]))]
        return SequenceSplits(*parts, task.kind, task.class_names, task.vocab_size, test_ids=ids)


def generate(task: str, count: int, lengths: tuple[int, int], seed: int) -> SequenceDataset:
    if task == "selective_copying":
        return selective_copying(count, lengths[1], seed)
    if task == "counting":
        generator = torch.Generator().manual_seed(seed)
        return counting(torch.randint(lengths[0], lengths[1] + 1, (count,), generator=generator))
    return parity(count, lengths, seed, each_step=task == "parity_steps")


def parity(num_sequences: int, lengths: tuple[int, int], seed: int, *, each_step: bool = False) -> SequenceDataset:
    """Bits labelled by the parity of their ones, at the end or after ``each_step``.

    With a label for each step, the task can be learned from far fewer sequences.
    """
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(lengths[0], lengths[1] + 1, (num_sequences,), generator=generator)
    ends = steps.cumsum(0)
    bits = torch.randint(2, (int(ends[-1]),), generator=generator)
    ones = bits.cumsum(0)
    before = torch.cat([ones.new_zeros(1), ones[ends - 1]])[:-1]  # ones in all previous sequences
    if each_step:
        return SequenceDataset(
            bits.byte(), steps, labels=((ones - before.repeat_interleave(steps)) % 2).to(torch.int16)
        )
    return SequenceDataset(bits.byte(), steps, target=(ones[ends - 1] - before) % 2)


def selective_copying(num_sequences: int, context: int, seed: int) -> SequenceDataset:
    """Recall, in order, sixteen symbols at random positions among blanks.

    A sequence has ``context + 16`` steps: blanks 0 with sixteen symbols 1 to 14 among them, then sixteen marks 15. The
    marks have labels, 0 to 13 for the symbols 1 to 14; other steps have none.

    Source: Gu & Dao 2023, https://arxiv.org/abs/2312.00752, sec. 4.1.1, with a context of 4096; also Feng et al. 2024,
    https://arxiv.org/abs/2410.01201, sec. 4.1.
    """
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(1, MARK, (num_sequences, REMEMBERED), generator=generator)
    tokens = torch.zeros(num_sequences, context + REMEMBERED, dtype=torch.int16)
    for rows in torch.arange(num_sequences).split(ROWS_AT_ONCE):
        places = torch.rand(len(rows), context, generator=generator).topk(REMEMBERED, dim=1).indices
        tokens[rows[:, None], places.sort(dim=1).values] = data[rows].to(torch.int16)
    tokens[:, context:] = MARK
    labels = torch.full(tokens.shape, IGNORED, dtype=torch.int16)
    labels[:, context:] = data - 1
    lengths = torch.full((num_sequences,), tokens.shape[1])
    return SequenceDataset(tokens.flatten(), lengths, labels=labels.flatten())


def counting(counts: Tensor) -> SequenceDataset:
    """Sequences a^n b^n, 0 for a and 1 for b, n from ``counts`` (R,), labelled by what may follow each prefix.

    The labels are 0 for a or b, 1 for b only, 2 for the end, where the prefix is in the language. A network accepts a
    sequence if it predicts all labels.

    Source: Gers & Schmidhuber 2001, https://doi.org/10.1109/72.963769, sec. III; Weiss et al. 2018,
    https://arxiv.org/abs/1805.04908, compare cells by it.
    """
    halves = torch.stack([counts, counts], dim=1).flatten()
    letters = torch.tensor([0, 1]).repeat(len(counts)).repeat_interleave(halves)
    labels = letters.to(torch.int16)
    labels[halves.cumsum(0)[1::2] - 1] = 2
    return SequenceDataset(letters.byte(), 2 * counts, labels=labels)
