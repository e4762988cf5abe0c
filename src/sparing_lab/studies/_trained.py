"""Models that studies train: a run of `sparing_lab.training`, the row kept of it, and other methods in its model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparing.contract import Method
from sparing.contract import method as _method
from sparing.nn import MultiheadAttention
from sparing_lab.studies.rows import Row
from sparing_lab.tasks.trainable import Task
from sparing_lab.training.config import Config
from sparing_lab.training.loop import Training
from sparing_lab.training.objectives import inputs_of, losses
from sparing_lab.training.result import Trained

_AT_ONCE = 16  # examples in a batch


def trained(config: Config, task: Task | None = None) -> tuple[Any, Trained]:
    """Return the model after the last step, and the results of the run; task: its examples, if already made."""
    training = Training(config, task=task)
    found = training.run()
    return training.bare.eval(), found


def row_of(found: Trained) -> Row:
    """Return the row that is kept of a run."""
    return {
        "metric": found.metric, "chance": found.task.chance(), "last": found.records[-1], "seconds": found.seconds,
        "steps": found.config.max_steps,
        "curve": [
            {"seconds": seconds, **record} for record, seconds in zip(found.records, found.times, strict=True)
        ],
    }  # fmt: skip


@contextmanager
def running(model: nn.Module, what: str | Method, *, seed: int = 0) -> Iterator[None]:
    """Run the model with another method in all of its layers; each layer has random numbers of its own."""
    layers = [module for module in model.modules() if isinstance(module, MultiheadAttention)]
    before = [(layer.method, layer.seed) for layer in layers]
    try:
        for number, layer in enumerate(layers):
            layer.method, layer.seed = _method(what), Random(f"layer {seed} {number}").getrandbits(63)
        yield
    finally:
        for layer, (method, own) in zip(layers, before, strict=True):
            layer.method, layer.seed = method, own


class Tried(NamedTuple):
    """Losses and errors of a model on each held-out example."""

    losses: Tensor  #: [examples] nats, summed over the answers of each example
    wrong: Tensor  #: [examples] number of wrong answers
    asked: Tensor  #: [examples] number of answers

    @property
    def loss(self) -> float:
        """Return the mean loss of an answer in nats."""
        return float(self.losses.sum() / self.asked.sum())

    @property
    def error(self) -> float:
        """Return the share of the answers that are wrong."""
        return float(self.wrong.sum() / self.asked.sum())

    def beyond(self, other: Tried, what: str = "losses") -> tuple[float, float]:
        """Return the difference from another model on the same examples, and its standard error."""
        mine, theirs = getattr(self, what), getattr(other, what)
        more = (mine - theirs) / self.asked.mean()
        return float(more.mean()), float(more.std() / len(more) ** 0.5)


@torch.no_grad()
def tried(model: Any, task: Task, numbers: Sequence[int], *, context: int = 0) -> Tried:
    """Evaluate a model on held-out examples; context: number of first positions whose answers do not count."""
    parts = []
    for at in range(0, len(numbers), _AT_ONCE):
        some = numbers[at : at + _AT_ONCE]
        seeds = [Random(f"hide {number}").getrandbits(63) for number in some]
        inputs = inputs_of(task, [task.valid[number] for number in some], seeds)
        inputs.targets[:, :context] = -100
        scores, counts = losses(model, inputs).scores, inputs.targets != -100
        each = F.cross_entropy(scores.mT, inputs.targets, ignore_index=-100, reduction="none")
        wrong = (scores.argmax(-1) != inputs.targets) & counts
        parts.append((each.double().sum(-1), wrong.double().sum(-1), counts.double().sum(-1)))
    return Tried(*(torch.cat(part) for part in zip(*parts, strict=True)))
