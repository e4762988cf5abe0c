"""Scores of a model on a task, from the rows of `yoso-glue`."""

from __future__ import annotations

import math
from typing import Any

from sparing_lab.studies.rows import Rows, grouped, pick
from sparing_lab.tasks.trainable import Split

ERRORS = 2.0  #: standard errors that count as noise


def first(split: Split, count: int | None) -> Split:
    """Return the first examples; None: all."""
    count = len(split) if count is None else min(count, len(split))
    return Split(count, split.example, None if split.lengths is None else split.lengths[:count])


class TunedModel:
    """All rows about a model on a task, and the scores in them."""

    def __init__(self, rows: Rows, task: str, model: str) -> None:
        self.rows, self.task, self.model = rows, task, model
        one = pick(rows, what="tuned")[0]
        self.metric, self.chance, self.held = one["metric"], one["chance"], one["held"]

    def score(self, what: str, **wanted: Any) -> float:
        """Return the best score of several runs, as the paper does; the last of a curve."""
        found = pick(self.rows, what=what, **wanted)
        trained = what in ("tuned", "further")
        return max((row["curve"][-1] if trained else row["record"])[self.metric] for row in found)

    def tuned(self, name: str) -> float:
        """Return the score of the model fine-tuned with a method."""
        return self.score("tuned", name=name)

    def expected(self, name: str) -> float:
        """Return the score of that model with the expectation in place of its hashes."""
        return self.score("expectation", name=name)

    def zero(self, name: str) -> float:
        """Return the score of the softmax model with a method swapped in."""
        return self.score("zero", swap=name)

    def further(self, name: str) -> float:
        """Return the score of that model after further fine-tuning."""
        return self.score("further", swap=name)

    @property
    def swaps(self) -> list[str]:
        return list(grouped(pick(self.rows, what="further"), "swap"))

    @property
    def noise(self) -> float:
        """Return ERRORS standard errors of a share of the held-out examples."""
        share = self.tuned("softmax")
        return ERRORS * math.sqrt(share * (1 - share) / self.held)

    def learned(self, score: float) -> bool:
        """Return whether a score is above chance by more than noise."""
        return score > self.chance + self.noise

    def kept(self, score: float) -> float:
        """Return the distance of a score from chance, as a share of that of softmax."""
        return (score - self.chance) / (self.tuned("softmax") - self.chance)


def tuned_models(rows: Rows) -> list[TunedModel]:
    """Return the rows grouped by task and model."""
    return [TunedModel(some, *key) for key, some in grouped(rows, "task", "model").items()]
