"""The records of a task: examples by number, their splits, and what is predicted."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

#: What is predicted. "class": the class of a text; "score": a number; "pair": the class of two texts that are encoded
#: separately; "next": the next token; "masked": hidden tokens; "order": hidden tokens, and the order of two parts.
Objective = Literal["class", "score", "pair", "next", "masked", "order"]


class Example(NamedTuple):
    """One text as tokens, with its label."""

    tokens: Tensor  #: [n]
    label: float = 0  #: a class, or a score
    other: Tensor | None = None  #: a second text
    segments: Tensor | None = None  #: [n]


@dataclass(frozen=True)
class Split:
    """Examples that are made or read on demand; the same number gives the same example."""

    count: int
    example: Callable[[int], Example]
    lengths: Sequence[int] | None = None  #: those of the examples, if known

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Example:
        if not 0 <= number < self.count:
            raise IndexError(f"number={number} is not one of the {self.count} examples")
        return self.example(number)


@dataclass(frozen=True)
class Task:
    """Training and held-out examples, and how predictions on them are scored."""

    name: str
    data: str  #: where the examples come from
    objective: Objective
    vocabulary: int
    length: int  #: that of the longest example
    train: Split
    valid: Split
    classes: int = 2
    mask: int | None = None  #: the token that hides others, for "masked" and "order"
    special: tuple[int, ...] = (0,)  #: tokens that are never hidden or predicted: padding and separators
    padding: int = 0  #: the token that pads shorter examples
    judged: str = ""  #: a metric of `sparing.workbench.metrics`, if not the default of the objective
    part: str = ""  #: the task of GLUE
    labels: tuple[str, ...] = ()  #: names of the classes

    @property
    def metric(self) -> str:
        """Return the name of the metric that scores a trained model."""
        return self.judged or ("accuracy" if self.objective in ("class", "pair") else "perplexity")

    @property
    def causal(self) -> bool:
        return self.objective == "next"

    def chance(self) -> float:
        """Return the metric of a model that knows only how frequent each answer is in the held-out examples."""
        if self.metric == "perplexity":
            counts = torch.zeros(self.vocabulary, dtype=torch.float64)
            for number in range(len(self.valid)):
                counts += self.valid[number].tokens.bincount(minlength=self.vocabulary)
            counts[list(self.special)] = 0
            shares = counts / counts.sum()
            return float(torch.special.entr(shares).sum().exp())
        if self.metric != "accuracy":
            return 0.0  # correlations
        return self.commonest()

    def fingerprint(self) -> str:
        """Return a hash of the number of examples and of some of them; other files give another one."""
        read = hashlib.sha256(repr((self.vocabulary, self.classes, self.length)).encode())
        for split in (self.train, self.valid):
            read.update(str(len(split)).encode())
            for number in range(0, len(split), max(len(split) // 16, 1)):
                example = split[number]
                other = None if example.other is None else example.other.tolist()
                read.update(repr((example.tokens.tolist(), example.label, other)).encode())
        return read.hexdigest()[:16]

    def commonest(self) -> float:
        """Return the share of the most frequent held-out label."""
        labels = [self.valid[number].label for number in range(len(self.valid))]
        return max(labels.count(label) for label in set(labels)) / len(labels)
