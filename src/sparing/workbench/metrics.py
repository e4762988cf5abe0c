"""Metrics of how an approximation changes a model's output: of single documents, or of a score over all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparing.workbench.estimate import Estimate, estimate, jackknife, proportion

if TYPE_CHECKING:
    from sparing.workbench.prepare import Prepared

End = dict[str, float]  #: figures of one document: those of `outputs.END_OF`, and its `label`


@dataclass(frozen=True)
class Metric:
    """A measure of how far an approximated model is from the exact one; 0 where nothing changed."""

    name: str
    kinds: tuple[str, ...]  #: kinds of models that have the metric
    words: str
    each: Callable[[End], float] | None = None  #: the change of one document; neither: contexts are made for it
    score: Callable[[Sequence[End], str], float] | None = (
        None  #: or a score of all; takes the prefix of names: "exact_" or ""
    )
    needs: tuple[str, ...] = ("change",)  #: figures that each document must have
    counts: bool = False  #: whether the change of a document is 0 or 1

    @property
    def signed(self) -> bool:
        """Whether a change can be below 0: a perplexity that falls, a score that rises."""
        return self.score is not None or self.name == "perplexity"

    def fits(self, ends: Sequence[End]) -> bool:
        """Return whether the documents have all figures that the metric needs."""
        return all(name in end for end in ends for name in self.needs)

    def change(self, by_seed: Sequence[Sequence[End]]) -> Estimate:
        """Return the mean change over documents with its 95 % interval; each document counts by its mean over seeds."""
        documents = list(zip(*by_seed, strict=True))
        if self.each is None:
            return self._loss(documents)
        values = [sum(map(self.each, seeds)) / len(seeds) for seeds in documents]
        return proportion(sum(values), len(values)) if self.counts else estimate(values)

    def _loss(self, documents: Sequence[tuple[End, ...]]) -> Estimate:
        """Return the score of the exact model minus that of the approximated one."""
        score = self.score
        assert score is not None

        def loss(some: Sequence[tuple[End, ...]]) -> float:
            seeds = [score(ends, "exact_") - score(ends, "") for ends in zip(*some, strict=True)]
            return sum(seeds) / len(seeds)

        found = jackknife(loss, documents)
        if found.low != found.high or found.low is None:
            return found
        most = proportion(0, found.count).high  # nothing changed, as far as so few documents can show
        assert most is not None
        return Estimate(found.mean, found.mean - most, found.mean + most, found.count)


def accuracy(ends: Sequence[End], which: str) -> float:
    """Return the share of documents whose class is their label."""
    return sum(end[f"{which}class"] == end["label"] for end in ends) / len(ends)


def f1(ends: Sequence[End], which: str) -> float:
    """Return F1 of class 1 for two classes, else macro F1 over the labels; NaN where nothing is of class 1."""
    found, wanted = [end[f"{which}class"] for end in ends], [end["label"] for end in ends]
    scores = []
    for one in [1.0] if ends[0]["classes"] == 2 else sorted(set(wanted)):
        hits = sum(a == b == one for a, b in zip(found, wanted, strict=True))
        both = found.count(one) + wanted.count(one)
        scores.append(2 * hits / both if both else math.nan)
    return sum(scores) / len(scores)


def spearman(ends: Sequence[End], which: str) -> float:
    """Return the rank correlation of the model's scores with the labels; NaN where all are equal."""
    return rank_correlation(
        *(torch.tensor([end[name] for end in ends], dtype=torch.float64) for name in (f"{which}score", "label"))
    )


def pearson(ends: Sequence[End], which: str) -> float:
    """Return Pearson's correlation of the model's scores with the labels; NaN where all are equal."""
    pairs = torch.tensor([[end[f"{which}score"], end["label"]] for end in ends], dtype=torch.float64)
    return float(pairs.mT.corrcoef()[0, 1])


def matthews(ends: Sequence[End], which: str) -> float:
    """Return Matthews correlation of classes with labels (Gorodkin's beyond two); 0 where one of them is constant."""
    found, wanted = [end[f"{which}class"] for end in ends], [end["label"] for end in ends]
    hits, count = sum(a == b for a, b in zip(found, wanted, strict=True)), len(ends)
    kinds = {*found, *wanted}
    both = sum(found.count(one) * wanted.count(one) for one in kinds)
    spread = [count**2 - sum(side.count(one) ** 2 for one in kinds) for side in (found, wanted)]
    return (hits * count - both) / math.sqrt(spread[0] * spread[1]) if all(spread) else 0.0


def nearest_accuracy(ends: Sequence[End], which: str) -> float:
    """Return the share of documents whose nearest other document has their label."""
    return sum(end[f"{which}neighbour_label"] == end["label"] for end in ends) / len(ends)


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Return Spearman's correlation of two vectors, or NaN if all numbers of one are equal.

    Equal numbers share the mean of their ranks.
    """

    def ranks(z: Tensor) -> Tensor:
        _, place, count = z.unique(return_inverse=True, return_counts=True)
        return (count.cumsum(0) - (count + 1) / 2)[place].double()

    return float(torch.stack([ranks(x), ranks(y)]).corrcoef()[0, 1])


_ALL = (
    Metric("cosine", ("encoder",), "1 - cosine of the embedding", each=lambda end: end["change"]),
    Metric(
        "neighbours", ("encoder",), "share of documents with another nearest document",
        each=lambda end: float(end["exact_neighbour"] != end["neighbour"]), needs=("neighbour",), counts=True,
    ),
    Metric(
        "accuracy", ("encoder",), "loss of accuracy of the nearest document's label", score=nearest_accuracy,
        needs=("label", "neighbour_label"),
    ),
    Metric("perplexity", ("language model",), "change of the perplexity", each=lambda end: end["change"]),
    Metric(
        "probability", ("classifier",), "change of a class's probability, or of the score",
        each=lambda end: end["change"],
    ),
    Metric(
        "agreement", ("language model",), "share of next tokens that differ",
        each=lambda end: 1 - end["agreement"], needs=("agreement",),
    ),
    Metric("needle", ("language model",), "share of facts of the context that are lost", needs=("facts",)),
    Metric(
        "agreement", ("classifier",), "share of documents with another class",
        each=lambda end: 1 - end["agreement"], needs=("agreement",), counts=True,
    ),
    Metric("accuracy", ("classifier",), "loss of accuracy", score=accuracy, needs=("label", "class")),
    Metric("f1", ("classifier",), "loss of F1", score=f1, needs=("label", "class")),
    Metric("matthews", ("classifier",), "loss of Matthews correlation", score=matthews, needs=("label", "class")),
    Metric(
        "pearson", ("encoder", "classifier"), "loss of correlation with the labels", score=pearson,
        needs=("label", "score"),
    ),
    Metric(
        "spearman", ("encoder", "classifier"), "loss of rank correlation with the labels", score=spearman,
        needs=("label", "score"),
    ),
)  # fmt: skip


def metrics_of(kind: str) -> dict[str, Metric]:
    """Return the metrics of a kind of model by name, the default first."""
    return {metric.name: metric for metric in _ALL if kind in metric.kinds}


def metric_of(kind: str, name: str | None) -> Metric:
    """Return the metric of that name; None: the default for this kind of model."""
    known = metrics_of(kind)
    if name is not None and name not in known:
        raise ValueError(f"metric={name!r} is not one of {', '.join(known)}, which a model of this kind ({kind}) has")
    return known[name] if name is not None else next(iter(known.values()))


def refuse_metric(metric: Metric, given: Prepared) -> None:
    """Raise, before anything is measured, where these documents or this model lack what the metric needs."""
    config, kind = given.subject.model.config, given.subject.kind
    classes = config.num_labels if kind == "classifier" else 0
    lacks = {
        "label": given.labels is None and "labels: name their column with --label",
        "neighbour": len(given.rows) < 3 and "at least three documents",
        "neighbour_label": given.pairs is not None and "single documents, not pairs",
        "class": classes == 1 and "a model with classes, and this one has a score",
        "agreement": classes == 1 and "a model with classes, and this one has a score",
        "score": classes != 1 and given.pairs is None and "a model with a score, or pairs of texts (--pair)",
    }
    for name in metric.needs:
        if why := lacks.get(name):
            raise ValueError(f"metric={metric.name!r} needs {why}")


def scores(kind: str, ends: Sequence[End]) -> dict[str, float]:
    """Return all scores against labels that these documents allow, of the exact and the approximated model."""
    found: End = {}
    for metric in metrics_of(kind).values():
        if metric.score is not None and metric.fits(ends):
            found |= {f"{which}{metric.name}": metric.score(ends, which) for which in ("exact_", "")}
    return found
