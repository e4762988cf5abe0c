"""A trained language model with other methods in its layers, and how skewed the weights of its kernel are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparing.call import Call
from sparing.contract import Method, Supports
from sparing.oracles.kernels import weights_of
from sparing_lab.studies._trained import Tried, running, tried
from sparing_lab.studies.rows import Cell, Row
from sparing_lab.tasks.trainable import Task

CONTEXT = 0.5  #: share of a piece that is context only, and not scored


def trial(model: Any, task: Task, examples: int) -> Callable[[Method], Tried]:
    """Return a function that tries a method on held-out pieces, in the half that has most context before it."""
    many, all_ = min(examples, len(task.valid)), len(task.valid)
    numbers = [number * all_ // many for number in range(many)]

    def run(method: Method) -> Tried:
        with running(model, method):
            return tried(model, task, numbers, context=round(CONTEXT * task.length))

    return run


@dataclass(frozen=True, kw_only=True)
class SeenKernel(Method):
    """A kernel that passes its weights to a callback."""

    name = "_seen"
    target = "kernel"
    supports = Supports(causal=True, attn_mask="boolean", gradient=False)

    kernel: Method
    see: Callable[[Tensor], None]

    def reference(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        weights = weights_of(self.kernel, q, k, call)
        self.see(weights)
        return (weights @ v.double()).to(v.dtype)


def skew(kernel: Method, run: Callable[[Method], Tried], cell: Cell) -> Row:
    """Measure a query's largest weight, and how much the width + 1 largest hold, on average."""
    first, few = round(CONTEXT * cell["max_length"]), head(cell) + 1
    sums = torch.zeros(3, dtype=torch.float64)

    def see(weights: Tensor) -> None:
        rows = weights[:, :, first:].flatten(0, 2)
        top = rows.topk(min(few, rows.shape[-1])).values
        sums.add_(torch.stack([top[:, 0].sum(), top.sum(), torch.tensor(float(len(rows)))]))

    run(SeenKernel(kernel=kernel, see=see))
    return {"largest": float(sums[0] / sums[2]), "held": float(sums[1] / sums[2])}


def head(cell: Cell) -> int:
    """Return the width of a head's values."""
    return int(cell["hidden_size"] // cell["num_heads"])
