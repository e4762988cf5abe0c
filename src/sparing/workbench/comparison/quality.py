"""Measure the error of a method in a model: by layer, by head, and of the model's output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparing.contract import Method
from sparing.contract import method as _method
from sparing.functional import attention, inspect
from sparing.models import Subject
from sparing.transformers.watch import ObservedCall, approximate_prompts, observe_calls
from sparing.workbench.calls import exact_side
from sparing.workbench.metrics import rank_correlation
from sparing.workbench.outputs import Digest, digest, end_of, nearest


@dataclass(frozen=True)
class LayerError:
    """Relative L2 errors of one layer's attention output for exact inputs, means over documents."""

    layer: str
    substitution: float  #: the method's own target against softmax attention
    approximation: float  #: the estimate against the method's own target
    total: float
    heads: tuple[float, ...]  #: total error of each head
    bar: float | None = None  #: rank correlation of the errors that the method predicts for rows with their true errors


@dataclass(frozen=True)
class Quality:
    """The errors of one method with one seed in all layers."""

    layers: tuple[LayerError, ...]
    errors: tuple[float, ...]  #: total error of each document, mean over layers
    keys_read: float | None  #: keys that a query reads on average
    flops: float  #: share of exact attention's
    ends: tuple[dict[str, float], ...]  #: figures of the model's output for each document; see `outputs.END_OF`


@torch.no_grad()
def quality(
    subject: Subject,
    rows: Sequence[Tensor],
    what: str | Method,
    *,
    seed: int = 0,
    pairs: Sequence[Tensor] | None = None,
    types: Sequence[Tensor] | None = None,
) -> Quality:
    """Run each document [n] twice, unpadded: with the model's own attention, which is observed, and with the method.

    The output of the second run is compared with that of the first.

    pairs: a second text of each document, for an encoder, whose similarity to the first is measured, too.
    types: token types, where a document is two texts that a classifier reads as one.
    """
    method = _method(what)
    observer = ErrorObserver(method)
    ends: list[dict[str, float]] = []
    outputs: list[tuple[Digest, Digest]] = []
    read: list[float] = []
    work = [0.0, 0.0]
    for number, ids in enumerate(rows):
        inputs = [ids] if pairs is None else [ids, pairs[number]]
        kinds = None if types is None else types[number]
        with observe_calls(subject.model, method, observer, seed=seed):
            exact = [digest(subject, each, subject.run(each, kinds)) for each in inputs]
        observer.end_document()
        with approximate_prompts(subject.model, method, seed=seed) as handle:
            found = [digest(subject, each, subject.run(each, kinds)) for each in inputs]
            total = handle.statistics().total
        ends.append(end_of(subject.kind, exact, found))
        outputs.append((exact[0], found[0]))
        read += [] if total.keys_read is None else [total.keys_read]
        work = [work[0] + total.tally.flops, work[1] + total.tally.exact_flops]
    for end, near in zip(ends, nearest(outputs), strict=False):
        end |= near
    return Quality(
        layers=observer.layers(), errors=tuple(observer.totals), keys_read=sum(read) / len(read) if read else None,
        flops=work[0] / work[1] if work[1] else 1.0, ends=tuple(ends),
    )  # fmt: skip


class ErrorObserver:
    """Compare a method with exact attention at every call of every layer that it is shown."""

    def __init__(self, method: Method) -> None:
        self.method, self.target = method, method.exact_target()
        self.found: dict[str, list[tuple[float, ...]]] = {}  # by layer: the split of each call, then its heads
        self.bars: dict[str, list[float]] = {}
        self.now: list[float] = []
        self.totals: list[float] = []

    def __call__(self, seen: ObservedCall) -> None:
        def run(method: str | Method, value: Any) -> Tensor:
            return attention(seen.query, seen.key, value, **seen.with_method(method)).double()

        if self.method.name == "exact":  # which is what `run` takes as exact
            exact = exact_side(seen, with_values=False)().double()
        else:
            exact = run("exact", seen.projected)
        value = seen.value if self.method.supports.projection else seen.projected
        noted = inspect(seen.query, seen.key, value, brief=True, **seen.with_method(self.method))
        found = noted.output.double()
        own = found if self.target is None else run(self.target, seen.projected)
        scale = max(float(exact.norm()), 1e-300)
        split = [float((a - b).norm()) / scale for a, b in ((own, exact), (found, own), (found, exact))]
        wrong, whole = (torch.linalg.vector_norm(x, dim=(0, 2, 3)) for x in (found - exact, exact))
        heads = wrong / whole.clamp_min(1e-300)
        self.found.setdefault(seen.layer, []).append((*split, *heads.tolist()))
        if "error" in noted.statistics:
            rank = rank_correlation(noted.statistics["error"].flatten(), (found - exact).norm(dim=-1).flatten())
            if not math.isnan(rank):  # all rows have the same prediction
                self.bars.setdefault(seen.layer, []).append(rank)
        self.now.append(split[2])

    def end_document(self) -> None:
        """Keep the mean error of the calls since the last document."""
        self.totals.append(sum(self.now) / len(self.now) if self.now else 0.0)
        self.now = []

    def layers(self) -> tuple[LayerError, ...]:
        """Return the means over all calls of each layer."""
        means = {name: [sum(x) / len(x) for x in zip(*calls, strict=True)] for name, calls in self.found.items()}
        bars = {name: sum(found) / len(found) for name, found in self.bars.items()}
        return tuple(
            LayerError(name, *mean[:3], heads=tuple(mean[3:]), bar=bars.get(name))  # type: ignore[misc]
            for name, mean in means.items()
        )
