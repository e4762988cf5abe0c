"""A model with sampled values on long documents: what it answers, and the work of its value layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparing.methods.monte_carlo.method import MonteCarlo
from sparing.models import Subject
from sparing.transformers.find import find
from sparing.transformers.watch import approximate_prompts
from sparing.workbench.metrics import scores
from sparing.workbench.outputs import Digest, digest, end_of, nearest
from sparing_lab.studies._mca import ProjectionWork
from sparing_lab.studies.rows import Row


@torch.no_grad()
def run(
    subject: Subject, rows: Sequence[Tensor], method: MonteCarlo, *, visible: bool, seed: int
) -> tuple[list[Digest], dict[str, ProjectionWork]]:
    """Run each document alone and return the answers, and the work of all values and of the "local" ones.

    visible: the n of eq. 9 is the number of keys that a token sees, not the document's length. The theorem holds for
    both: a row sums over no more keys than it sees. local: all but the values that only the global token reads.
    """
    found, total = [], None
    for number, ids in enumerate(rows):
        seen = visible_keys(subject, len(ids))
        alpha = method.alpha * len(ids) / seen if visible else method.alpha
        with approximate_prompts(subject.model, replace(method, alpha=alpha), seed=seed * len(rows) + number) as handle:
            found.append(digest(subject, ids, subject.run(ids)))
            work = _work(subject, handle.statistics().total, len(ids))
        total = work if total is None else {name: total[name] + work[name] for name in work}
    assert total is not None
    return found, total


def visible_keys(subject: Subject, length: int) -> int:
    """Return the keys that a token in the middle sees: its window, itself and the first token."""
    window = _window(subject)
    return length if window is None else min(length, window + 2)


def _window(subject: Subject) -> int | None:
    """Return the width of the attention window, the widest if layers differ; None for full attention."""
    found = getattr(subject.model.config, "attention_window", None)
    return max(found) if isinstance(found, list | tuple) else found


def _work(subject: Subject, total: Any, length: int) -> dict[str, ProjectionWork]:
    """Return the work of all layers; in Longformer each has a second value projection, read only by global tokens."""
    tally, layers, window = total.tally, len(find(subject.model)), _window(subject)
    sides = 1 if window is None else 2
    slots = tally.positions / (layers * sides)
    rows = range(length)
    reach = length if window is None else window // 2
    # A token sees its window, and the first token where that is not in it; the first token sees all.
    pairs = sum(min(length, i + reach + 1) - max(0, i - reach) + (i > reach) for i in rows[1:])
    widest = slots if window is None else min(slots, window + 2)
    extra = layers if total.method.estimator == "mean" and tally.rate < tally.tokens else 0

    def of(rate: float, tokens: float, sides: int) -> ProjectionWork:
        return ProjectionWork(
            rate=rate + sides * extra, tokens=tokens, slots=layers * sides * slots,
            pairs=float(layers * (pairs + (sides > 1 or window is None) * length)),
            padded_pairs=layers * (slots * widest + (sides > 1) * slots), features=subject.model.config.hidden_size,
        )  # fmt: skip

    local = tally.rate - tally.global_rate, float(tally.tokens - tally.global_tokens)
    return {"all": of(tally.rate, float(tally.tokens), sides), "local": of(*local, 1)}


def compare(kind: str, exact: Sequence[Digest], found: Sequence[Digest], labels: Sequence[Any] | None) -> Row:
    """Compare the outputs of two models: scores of a classifier, else the similarity of embeddings."""
    ends = [end_of(kind, [a], [b]) for a, b in zip(exact, found, strict=True)]
    for number, near in enumerate(nearest(list(zip(exact, found, strict=True)))):
        ends[number] |= near
    row: Row = {"change": sum(end["change"] for end in ends) / len(ends)}
    if "neighbour" in ends[0]:
        row["neighbours"] = sum(end["neighbour"] == end["exact_neighbour"] for end in ends) / len(ends)
    if kind == "classifier" and labels is not None:
        if isinstance(labels[0], tuple):
            return {**row, "scores": {f"{which}f1": micro_f1(side, labels) for which, side in
                                      (("exact_", exact), ("", found))}}  # fmt: skip
        for end, label in zip(ends, labels, strict=True):
            end["label"] = float(label)
        row["scores"] = scores(kind, ends)
    return row


def micro_f1(found: Sequence[Digest], labels: Sequence[tuple[int, ...]]) -> float:
    """Return the F1 of documents with several classes, over all pairs of a document and a class."""
    pairs = [
        (logit > 0, bool(mark)) for one, marks in zip(found, labels, strict=True)
        for logit, mark in zip(one["logits"], marks, strict=True)
    ]  # fmt: skip
    hits, both = sum(a and b for a, b in pairs), sum(a + b for a, b in pairs)
    return 2 * hits / both if both else 0.0
