"""Choose the examples of each batch by the seed and the step alone, and pad them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor


class Batches:
    """Batches of example numbers, epoch after epoch; each epoch has every example once, but for an incomplete batch.

    A batch depends on the seed and its step alone, so that a stopped training run resumes with the next one, and
    processes that share a batch need not communicate.

    lengths: those of the examples, or None if they are not known or all the same. Examples of similar length are
    batched together to reduce padding: the examples of each `window` batches are sorted, then batches are shuffled.
    """

    def __init__(
        self, count: int, size: int, *, seed: int = 0, lengths: Sequence[int] | None = None, window: int = 32
    ) -> None:
        if not 1 <= size <= count:
            raise ValueError(f"size={size} must be between 1 and the number of examples, {count}")
        if lengths is not None and len(lengths) != count:
            raise ValueError(f"lengths has {len(lengths)} entries for {count} examples")
        if window < 1:
            raise ValueError(f"window={window} must be at least 1")
        self.count, self.size, self.seed, self.lengths, self.window = count, size, seed, lengths, window
        self._epoch = functools.lru_cache(maxsize=2)(self._shuffled)

    @property
    def in_epoch(self) -> int:
        """Return the number of batches in an epoch."""
        return self.count // self.size

    def batch(self, step: int) -> list[int]:
        """Return the examples of a step; steps count from 0 over all epochs."""
        if step < 0:
            raise ValueError(f"step={step} must not be negative")
        epoch, number = divmod(step, self.in_epoch)
        return self._epoch(epoch)[number]

    def part(self, step: int, rank: int, ranks: int) -> list[int]:
        """Return the examples of a step that one of several processes trains on: every `ranks`-th one."""
        if self.size % ranks:
            raise ValueError(f"size={self.size} cannot be divided among {ranks} processes; take a multiple of {ranks}")
        return self.batch(step)[rank::ranks]

    def _shuffled(self, epoch: int) -> list[list[int]]:
        random = Random(f"batches {self.seed} {epoch}")
        order = list(range(self.count))
        random.shuffle(order)
        order = order[: self.in_epoch * self.size]
        if self.lengths is not None:
            lengths, run = self.lengths, self.size * self.window
            order = [
                number
                for start in range(0, len(order), run)
                for number in sorted(order[start : start + run], key=lambda number: lengths[number])
            ]
        found = [order[start : start + self.size] for start in range(0, len(order), self.size)]
        random.shuffle(found)
        return found


def padded(rows: Sequence[Tensor], *, padding: int = 0, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """Return tokens [B, n] and a mask that is True at them; n is the longest length, rounded up to a multiple.

    >>> padded([torch.tensor([5, 6, 7]), torch.tensor([8])])
    (tensor([[5, 6, 7],
            [8, 0, 0]]), tensor([[ True,  True,  True],
            [ True, False, False]]))
    """
    longest = max(len(row) for row in rows)
    longest += -longest % multiple
    tokens = torch.full((len(rows), longest), padding)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = row
        mask[number, : len(row)] = True
    return tokens, mask
