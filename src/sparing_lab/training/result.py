"""The result of a training run, and whether it beats chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparing.workbench.estimate import proportion
from sparing_lab.tasks.trainable import Task
from sparing_lab.training.config import Config

Record = dict[str, float]  #: metrics of an evaluation, by name


@dataclass(frozen=True)
class Trained:
    """The result of a run."""

    config: Config
    task: Task
    records: tuple[Record, ...]
    best: Record
    losses: tuple[float, ...]  #: training loss of every step
    model: Any  #: as it is after the last step; `loop.load` gives the best
    times: tuple[float, ...]  #: seconds of training up to each record, without evaluations

    @property
    def seconds(self) -> float:
        """The seconds of training, without evaluations."""
        return self.times[-1]

    @property
    def metric(self) -> float:
        """The metric of the best evaluation."""
        return self.best[self.task.metric]

    @property
    def beats_chance(self) -> bool:
        """Whether the metric on held-out examples is better than chance, at a confidence of 95 %.

        The best of several accuracies has a share of the 5 % (Bonferroni). With two metrics, both must be better.
        """
        name, chance, count = self.task.metric, self.task.chance(), len(self.task.valid)
        level = 1 - 0.05 / len(self.records)

        def above(accuracy: float, chance: float) -> bool:
            low = proportion(accuracy * count, count, level=level).low
            return low is not None and low > chance

        if name == "perplexity":
            order = self.task.objective != "order" or above(self.best["order_accuracy"], self.task.commonest())
            return self.metric < chance and order
        if name == "accuracy":
            return above(self.metric, chance)
        return self.metric > 2 / math.sqrt(count)  # correlations


def best_of(records: Sequence[Record], metric: str) -> Record:
    """Return the record with the best value of the metric: the lowest perplexity, or the highest of any other."""
    sign = -1 if metric == "perplexity" else 1
    return max(records, key=lambda record: -math.inf if math.isnan(record[metric]) else sign * record[metric])
