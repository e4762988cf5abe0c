"""Methods swapped into models: how far each is from exact attention, by the keys that it may use."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparing.contract import method
from sparing.functional import attention, inspect
from sparing.models import Subject
from sparing.transformers.watch import Seen, rehearse
from sparing_lab.report.figure import PAPER, style
from sparing_lab.studies.rows import Row, Rows, pick
from sparing_lab.studies.study import Settings

WIDTHS = {"minilm": 32, "smollm2": 64}  #: of a head's values; 64 in all others
NAMES = {
    "top_keys": "largest weights (OVO)", "value_aware": "best values (OVA)", "window": "window", "lsh": "LSH",
    "random_features": "random features", "multipole": "multipole (ours)",
}  # fmt: skip
TABLE_1 = {
    "exact": 24.2, "top_keys": {1: 96.6, 65: 43.5}, "value_aware": {1: 88.6, 65: 24.2}, "random_features": {256: 89.79},
    "lsh": {64: 90.39, 512: 26.11},
}  # fmt: skip
WRONG = "hidden tokens predicted wrongly (%)"


def family(spec: str) -> str:
    """The name before the settings."""
    return spec.partition("(")[0]


def budget(spec: str) -> int:
    """r, as the paper counts: keys, or those of a round, or features."""
    found: Any = method(spec)
    name = {"lsh": "chunk", "random_features": "features", "window": "size"}.get(found.name, "keys")
    return int(getattr(found, name)) * (2 if found.name == "lsh" else 1)


def buckets(length: int) -> tuple[str, str]:
    """LSH in the paper's two settings: n/64 keys in each of 4 rounds, n/8 in each of 16, of 4096 there."""
    few, many = (f"lsh(rounds={rounds}, chunk={length // (2 * share)}" for rounds, share in ((4, 64), (16, 8)))
    return f"{few}, combine=sum, align=rank)", f"{many}, combine=sum, align=rank)"


def books(settings: Settings, name: str) -> list[Path]:
    """The files of DIR/books; none: the study is to take the help topics. name: of the study."""
    folder = None if settings.data is None else settings.data / "books"
    found = [] if folder is None else sorted([*folder.glob("*.txt"), *folder.glob("*.txt.xz")])
    if not found and settings.small:
        settings.refuse_unused("books/*.txt, a book in each (may be .txt.xz)")
    elif not found:
        raise ValueError(
            f"data: {name} wants long texts, {folder or 'FOLDER/books'}/*.txt (or .txt.xz), a book in each; the "
            "paper's were of Wikipedia, BookCorpus, ArXiv, PubMed and PG19 (Gutenberg's books, as plain text)"
        )
    return found


class Group:
    """The swaps into one model at one length: losses against exact attention, by method."""

    def __init__(self, rows: Rows) -> None:
        self.model, self.kind, self.length = rows[0]["model"], rows[0]["kind"], rows[0]["length"]
        self.rows = rows
        values: dict[str, list[float]] = {}
        for row in rows:
            values.setdefault(row["spec"], []).append(row["value"])
        self.values = {spec: sum(found) / len(found) for spec, found in values.items()}  # over seeds
        self.read = {row["spec"]: row["read"] for row in rows}
        self.width = rows[0].get("head") or WIDTHS.get(self.model, 64)

    @property
    def name(self) -> str:
        return f"{self.model} {self.length}"

    def loss(self, spec: str) -> float:
        """How far from exact: in the unit of the value, or in nats per token."""
        exact, found = self.values["exact"], self.values[spec]
        return math.log(found / exact) if self.kind == "language model" else found - exact

    def share(self, spec: str) -> float:
        """Of the way from exact attention to the single key of largest weight."""
        return self.loss(spec) / self.loss("top_keys(keys=1)")

    def curve(self, name: str) -> dict[int, float]:
        """The losses by r."""
        found = {budget(spec): self.loss(spec) for spec in self.values if family(spec) == name}
        return dict(sorted(found.items()))

    def both(self, first: str, second: str) -> list[tuple[int, float, float]]:
        """The losses of two methods, where both have them."""
        a, b = self.curve(first), self.curve(second)
        return [(r, a[r], b[r]) for r in a if r in b]

    def show(self, spec: str) -> str:
        found = self.values[spec]
        return f"{abs(found):.3f}" if self.kind == "encoder" else f"{found:.1f}"


def groups(rows: Rows) -> list[Group]:
    """In the order they were measured."""
    swaps = pick(rows, what="swap")
    names = dict.fromkeys((row["model"], row["length"]) for row in swaps)
    return [Group(pick(swaps, model=model, length=length)) for model, length in names]


def between(curve: dict[int, float], r: float) -> float | None:
    """A curve at r, straight between its points in the logarithms; None outside of them."""
    points = sorted(curve.items())
    for (left, low), (right, high) in pairwise(points):
        if left <= r <= right and min(low, high) > 0:
            part = math.log(r / left) / math.log(right / left)
            return math.exp((1 - part) * math.log(low) + part * math.log(high))
    return None


def draw_paper(axes: Any) -> None:
    """The paper's own figures."""
    for number, name in enumerate(NAMES):
        points = TABLE_1.get(name, {})
        if isinstance(points, dict) and points:
            axes.plot(list(points), list(points.values()), linestyle=":", **style(number))
            axes.plot(list(points), list(points.values()), **PAPER)
    axes.plot([], [], label="the paper's Table 1", **PAPER)
    axes.axhline(24.2, color="black", linestyle="--", label="exact attention")
    axes.set(
        xscale="log", ylim=(0, 100), ylabel=WRONG, xlabel="r: keys read by a query (LSH: in a round)",
        title="The paper: its own RoBERTa, 4096 tokens",
    )  # fmt: skip


@torch.no_grad()
def built(found: Subject, ids: Tensor, keys: int, *, rows: int, layers: int) -> Row:
    """Whether so many values with free weights do make the outputs: found one by one, for some queries of some layers.

    In a swapped model `value_aware` takes the output itself from width + 1 keys on, as nothing is lost by that; here
    the values and their weights are looked for.
    """
    errors: list[float] = []
    queries = 0
    most, least, off = 0, math.inf, 0.0
    calls: list[Seen] = []
    with rehearse(found.model, f"value_aware(keys={keys})", calls.append):
        found.run(ids)
    step = max(1, len(calls) // layers)
    random = torch.Generator().manual_seed(0)
    for seen in calls[step - 1 :: step]:
        n = seen.key.shape[2]
        some = torch.randperm(n, generator=random)[:rows].sort().values
        mask = torch.ones(rows, n, dtype=torch.bool)
        if seen.call.get("is_causal"):
            mask = torch.arange(n) <= some[:, None]
        call = {"attn_mask": mask, "scale": seen.call.get("scale"), "enable_gqa": seen.call.get("enable_gqa", False)}
        inputs = (seen.query[:, :, some], seen.key, seen.projected)
        exact = attention(*inputs, **call).double()
        got = inspect(*inputs, **call, method=f"value_aware(keys={keys})", impl="reference")
        queries += got.output[..., 0].numel()
        weights = got.statistics["weights"]
        errors.append(float((got.output.double() - exact).norm() / exact.norm()))
        most = max(most, int((weights > 0).sum(-1).max()))
        least = min(least, float(weights.min()))
        off = max(off, float((weights.sum(-1) - 1).abs().max()))
    return {"error": max(errors), "most": most, "least": least, "off": off, "queries": queries}
