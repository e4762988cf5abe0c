"""How wrong a method makes a model on some documents: layer by layer, head by head, and at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparing.attention import attention, inspect
from sparing.measure.error import rank_correlation
from sparing.method import Method
from sparing.method import method as _method
from sparing.tasks.subject import Subject
from sparing.transformers.watch import Seen, rehearse, swapped


@dataclass(frozen=True)
class LayerError:
    """Of one layer, fed with exact inputs: relative L2 errors of its output, means over documents."""

    layer: str
    substitution: float  #: the method's own target against softmax attention
    approximation: float  #: the estimate against the method's own target
    total: float
    heads: tuple[float, ...]  #: total error of each
    bar: float | None = None  #: how well the method's own prediction ranks the rows' true errors: rank correlation


@dataclass(frozen=True)
class Quality:
    """One method with one seed in all layers."""

    layers: tuple[LayerError, ...]
    errors: tuple[float, ...]  #: total error of each document, mean over layers
    keys_read: float | None  #: by a query, on average
    flops: float  #: share of exact attention's
    ends: tuple[dict[str, float], ...]  #: what happened to the model's output, for each document; see `END_OF`
    neighbours: float | None = None  #: encoders: documents whose nearest other document is the same


@torch.no_grad()
def quality(subject: Subject, rows: Sequence[Tensor], what: str | Method, *, seed: int = 0) -> Quality:
    """Run each document [n] twice, alone and unpadded: exactly, looking at every layer, and with the method.

    The first run is the exact model's, so it also gives what the second one's output is compared with.
    """
    method = _method(what)
    watch = _Watch(method)
    ends: list[dict[str, float]] = []
    outputs: list[tuple[Tensor, Tensor]] = []
    read: list[float] = []
    work = [0.0, 0.0]
    for ids in rows:
        with rehearse(subject.model, method, watch, seed=seed):
            exact = subject.run(ids)
        watch.next()
        with swapped(subject.model, method, seed=seed) as handle:
            found = subject.run(ids)
            total = handle.statistics().total
        end = END_OF[subject.kind]
        ends.append(end(exact, found, _Context(ids, getattr(subject.model.config, "problem_type", None))))
        if subject.kind == "encoder":
            outputs.append((_embedding(exact), _embedding(found)))
        read += [] if total.keys_read is None else [total.keys_read]
        work = [work[0] + total.tally.flops, work[1] + total.tally.exact_flops]
    return Quality(
        layers=watch.layers(), errors=watch.documents(), keys_read=sum(read) / len(read) if read else None,
        flops=work[0] / work[1] if work[1] else 1.0, ends=tuple(ends), neighbours=_same_neighbours(outputs),
    )  # fmt: skip


class _Context(NamedTuple):
    """Of a document's run."""

    ids: Tensor
    problem: str | None  #: what a classifier is for


class _Watch:
    """Compares a method with exact attention at every call of every layer."""

    def __init__(self, method: Method) -> None:
        self.method, self.target = method, method.exact_target()
        self.found: dict[str, list[tuple[float, ...]]] = {}  # by layer, the documents' errors and those of the heads
        self.bars: dict[str, list[float]] = {}
        self.now: list[float] = []
        self.totals: list[float] = []

    def __call__(self, seen: Seen) -> None:
        def run(method: str | Method, value: Any) -> Tensor:
            return attention(seen.query, seen.key, value, **{**seen.call, "method": method}).double()

        exact = run("exact", seen.projected)
        value = seen.value if self.method.supports.projection else seen.projected
        noted = inspect(seen.query, seen.key, value, brief=True, **{**seen.call, "method": self.method})
        found = noted.output.double()
        own = found if self.target is None else run(self.target, seen.projected)
        scale = max(float(exact.norm()), 1e-300)
        split = [float((a - b).norm()) / scale for a, b in ((own, exact), (found, own), (found, exact))]
        wrong, whole = (torch.linalg.vector_norm(x, dim=(0, 2, 3)) for x in (found - exact, exact))
        heads = wrong / whole.clamp_min(1e-300)
        self.found.setdefault(seen.layer, []).append((*split, *heads.tolist()))
        if "error" in noted.statistics:
            rank = rank_correlation(noted.statistics["error"].flatten(), (found - exact).norm(dim=-1).flatten())
            if not math.isnan(rank):  # all rows predict the same, such as none
                self.bars.setdefault(seen.layer, []).append(rank)
        self.now.append(split[2])

    def next(self) -> None:
        """The document is over."""
        self.totals.append(sum(self.now) / len(self.now) if self.now else 0.0)
        self.now = []

    def layers(self) -> tuple[LayerError, ...]:
        means = {name: [sum(x) / len(x) for x in zip(*calls, strict=True)] for name, calls in self.found.items()}
        bars = {name: sum(found) / len(found) for name, found in self.bars.items()}
        return tuple(
            LayerError(name, *mean[:3], heads=tuple(mean[3:]), bar=bars.get(name))  # type: ignore[misc]
            for name, mean in means.items()
        )

    def documents(self) -> tuple[float, ...]:
        return tuple(self.totals)


def _embedding(output: Any) -> Tensor:
    found: Tensor = output.last_hidden_state[0].double().mean(0)
    return found


def _of_encoder(exact: Any, found: Any, given: _Context) -> dict[str, float]:
    cosine = torch.nn.functional.cosine_similarity(_embedding(exact), _embedding(found), dim=0)
    return {"cosine": float(cosine), "change": 1 - float(cosine)}


def _of_language_model(exact: Any, found: Any, given: _Context) -> dict[str, float]:
    """Losses in nats per token; `change`: of the perplexity."""
    a, b, wanted = exact.logits[0, :-1], found.logits[0, :-1], given.ids[1:].to(exact.logits.device)
    losses = [float(torch.nn.functional.cross_entropy(x.float(), wanted)) for x in (a, b)]
    agree = float((a.argmax(-1) == b.argmax(-1)).double().mean())
    change = float(torch.tensor(losses[1] - losses[0]).double().expm1())
    return {"exact_loss": losses[0], "loss": losses[1], "agreement": agree, "change": change}


def _of_classifier(exact: Any, found: Any, given: _Context) -> dict[str, float]:
    """`change`: the largest difference of a class's probability, or of the score, if there is one only."""
    a, b = exact.logits[0].double(), found.logits[0].double()
    if len(a) == 1:
        return {"exact_score": float(a), "score": float(b), "change": abs(float(a - b))}
    likely = torch.sigmoid if given.problem == "multi_label_classification" else lambda x: x.softmax(-1)
    change = float((likely(a) - likely(b)).abs().max())
    same = float(a.argmax() == b.argmax())
    return {"exact_class": float(a.argmax()), "class": float(b.argmax()), "agreement": same, "change": change}


#: What is said about a document, by kind of model; `change` is 0 where nothing happened.
END_OF = {"encoder": _of_encoder, "language model": _of_language_model, "classifier": _of_classifier}


def _same_neighbours(outputs: list[tuple[Tensor, Tensor]]) -> float | None:
    """The share of documents whose nearest other document, by the cosine, is the one that it was."""
    if len(outputs) < 3:
        return None
    nearest = []
    for side in zip(*outputs, strict=True):
        rows = torch.nn.functional.normalize(torch.stack(side), dim=-1)
        nearest.append((rows @ rows.mT).fill_diagonal_(-torch.inf).argmax(-1))
    return float((nearest[0] == nearest[1]).double().mean())
