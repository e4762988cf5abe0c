"""Methods swapped into models: how far each is from exact attention, by the keys that it may use."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparing.contract import method
from sparing.functional import attention, inspect
from sparing.models import Subject
from sparing.transformers.watch import ObservedCall, observe_calls
from sparing_lab.figure import PAPER, line, style
from sparing_lab.papers import numbers
from sparing_lab.studies.judges import Criterion, Judge, at_least, each
from sparing_lab.studies.rows import Row, Rows, grouped, means, pick
from sparing_lab.studies.study import Settings

WIDTHS = {"minilm": 32, "smollm2": 64}  #: width of a head's values; 64 in all other models
NAMES = {
    "top_keys": "largest weights (OVO)", "value_aware": "best values (OVA)", "window": "window", "lsh": "LSH",
    "random_features": "random features", "key_clusters": "key_clusters (ours)",
}  # fmt: skip
TABLE_1 = numbers("value-aware", "table 1")
WRONG = "hidden tokens predicted wrongly (%)"


def family(spec: str) -> str:
    """Return the name of a method, without its settings."""
    return spec.partition("(")[0]


def budget(spec: str) -> int:
    """Return r, as the paper counts: keys, or those of a round, or features."""
    found: Any = method(spec)
    name = {"lsh": "chunk", "random_features": "features", "window": "size"}.get(found.name, "keys")
    return int(getattr(found, name)) * (2 if found.name == "lsh" else 1)


def buckets(length: int) -> tuple[str, str]:
    """Return LSH in the paper's two settings: n/64 keys in each of 4 rounds, n/8 in each of 16."""
    few, many = (f"lsh(rounds={rounds}, chunk={length // (2 * share)}" for rounds, share in ((4, 64), (16, 8)))
    return f"{few}, combine=sum, align=rank)", f"{many}, combine=sum, align=rank)"


def books(settings: Settings, name: str) -> list[Path]:
    """Return the files of DIR/books; none: the study takes the help topics. name: that of the study."""
    folder = "FOLDER/books" if settings.data is None else settings.data / "books"
    return settings.files(
        "books/*.txt", "books/*.txt.xz", wanted="books/*.txt, a book in each (may be .txt.xz)",
        paper=f"{name} wants long texts, {folder}/*.txt (or .txt.xz), a book in each; the paper's were of Wikipedia, "
        "BookCorpus, ArXiv, PubMed and PG19 (Gutenberg's books, as plain text)",
    )  # fmt: skip


class Group:
    """The swaps into one model at one length: losses against exact attention, by method."""

    def __init__(self, rows: Rows) -> None:
        self.model, self.kind, self.length = rows[0]["model"], rows[0]["kind"], rows[0]["length"]
        self.rows = rows
        self.values: dict[str, float] = means(rows, "value", "spec")  # means over seeds
        self.read = {row["spec"]: row["read"] for row in rows}
        self.width = rows[0].get("head") or WIDTHS.get(self.model, 64)

    @property
    def name(self) -> str:
        return f"{self.model} {self.length}"

    def loss(self, spec: str) -> float:
        """Return the distance from exact attention: in the unit of the value, or in nats per token."""
        exact, found = self.values["exact"], self.values[spec]
        return math.log(found / exact) if self.kind == "language model" else found - exact

    def share(self, spec: str) -> float:
        """Return the share of the way from exact attention to the single key of largest weight."""
        return self.loss(spec) / self.loss("top_keys(keys=1)")

    def curve(self, name: str) -> dict[int, float]:
        """Return the losses by r."""
        found = {budget(spec): self.loss(spec) for spec in self.values if family(spec) == name}
        return dict(sorted(found.items()))

    def show(self, spec: str) -> str:
        found = self.values[spec]
        return f"{abs(found):.3f}" if self.kind == "encoder" else f"{found:.1f}"


def groups(rows: Rows) -> list[Group]:
    """Return the groups in the order they were measured."""
    return [Group(some) for some in grouped(pick(rows, what="swap"), "model", "length").values()]


def between(curve: dict[int, float], r: float) -> float | None:
    """Return a curve at r, interpolated linearly between logarithms; None outside of its points."""
    points = sorted(curve.items())
    for (left, low), (right, high) in pairwise(points):
        if left <= r <= right and min(low, high) > 0:
            part = math.log(r / left) / math.log(right / left)
            return math.exp((1 - part) * math.log(low) + part * math.log(high))
    return None


class Pair(NamedTuple):
    """The losses of two methods at the same r."""

    group: Group
    r: int
    losses: tuple[float, float]
    names: tuple[str, str]
    noise: float  #: two standard errors of their difference

    @property
    def less(self) -> bool:
        """Return whether the second loses less, by more than the noise."""
        return self.losses[0] - self.losses[1] > self.noise

    def __str__(self) -> str:
        return " / ".join(self.group.show(spec_of(name, self.r)) for name in self.names)


def spec_of(name: str, r: int) -> str:
    """Return the method of that name, at r keys."""
    return f"{name}({'size' if name == 'window' else 'keys'}={r})"


def pairs(first: str, second: str, noise: Callable[..., float] = lambda group, *specs: 0.0) -> Any:
    """Return the function that gives both methods wherever both were measured; noise: by group and specs."""

    def figures(rows: Rows) -> list[Pair]:
        found = []
        for group in groups(rows):
            a, b = group.curve(first), group.curve(second)
            found += [Pair(group, r, (a[r], b[r]), (first, second), noise(group, spec_of(first, r), spec_of(second, r)))
                      for r in a if r in b]  # fmt: skip
        return found

    return figures


def aware(noise: Callable[..., float], shown: tuple[int, ...]) -> Judge:
    """Judge whether the best values lose less than the largest weights; shown: the r whose figures are stated."""
    beyond = " by more than two standard errors" if shown == (4,) else ""
    return Judge(
        pairs("top_keys", "value_aware", noise),
        each(f"nearer to exact attention{beyond}, at every r that both were measured at", lambda pair: pair.less),
        each("at every r from 4 on", lambda pair: pair.less or pair.r < 4), lambda found: "; ".join(
            f"{pair.group.name}, r = {pair.r}: {pair}" for pair in found if pair.r in shown)
        + f" (OVO / OVA); below at {sum(pair.less for pair in found)} of {len(found)} points",
        needs="no model has both",
    )  # fmt: skip


def trails(shown: int) -> Judge:
    """Judge whether windows lose more than the largest weights; shown: the r whose figures are stated."""
    trailing = each("farther from exact attention", lambda pair: pair.less)
    return Judge(
        pairs("window", "top_keys"), trailing, trailing.in_share(0.75, "at three quarters of them"), lambda found: (
            f"at {sum(pair.less for pair in found)} of {len(found)} points; "
            + "; ".join(f"{pair.group.name}, r = {pair.r}: {pair}" for pair in found if pair.r == shown)
            + " (window / OVO)"), of="at every r that both were measured at, in every model", needs="no model has both",
    )  # fmt: skip


def features(spec: Callable[[Group], str]) -> Judge:
    """Judge whether random features are close to useless."""

    def figures(rows: Rows) -> dict[str, float]:
        return {group.name: group.share(spec(group)) for group in groups(rows) if spec(group) in group.values}

    return Judge(
        figures, at_least(0.5), at_least(0.5).once("in one"),
        lambda found: ", ".join(f"{name} {share:.0%}" for name, share in found.items()) + " of the way to OVO-1",
        of="share of the way from exact attention to OVO-1, in every model", needs="no model has them",
    )  # fmt: skip


def _hashed(rows: Rows) -> dict[str, tuple[float, float]]:
    """Return, for each model, the shares of the way to OVO-1 with few keys and rounds, and with many."""
    found = {group.name: (group, buckets(group.length)) for group in groups(rows)}
    return {name: (group.share(few), group.share(many)) for name, (group, (few, many)) in found.items()
            if few in group.values}  # fmt: skip


def lsh(shape: Callable[[dict[str, tuple[float, float]]], bool]) -> Judge:
    """Judge whether LSH needs many rounds and large chunks; shape: the criterion of "same shape"."""
    return Judge(
        _hashed, each("at least half, and at most a tenth of the way to OVO-1",
                      lambda two: two[0] >= 0.5 and two[1] <= 0.1),
        Criterion("the first more than twice the second", shape),
        lambda found: "; ".join(f"{name}: {few:.0%} / {many:.1%}" for name, (few, many) in found.items())
        + " of the way to OVO-1", of="n/64 keys x 4 rounds, and n/8 x 16", needs="no model has them",
    )  # fmt: skip


def draw_groups(axes: list[Any], found: list[Group], *, floor: float = -math.inf, reads: tuple[str, ...] = ()) -> None:
    """Draw each group's values by r, or by the keys that were read; then the paper's own figures."""
    for each_ in axes[len(found) + 1 :]:
        each_.set_visible(False)
    for group, panel in zip(found, axes, strict=False):
        for number, (name, words) in enumerate(NAMES.items()):
            least = floor if group.kind == "encoder" else -math.inf
            points = sorted(
                (group.read[spec] if name in reads else budget(spec), max(value, least))
                for spec, value in group.values.items() if family(spec) == name
            )  # fmt: skip
            dash = "-" if name in ("top_keys", "value_aware", "window") else "none"
            panel.plot(*zip(*points, strict=True), label=words, linestyle=dash, **style(number)) if points else None
        if group.kind != "encoder":
            panel.axhline(group.values["exact"], color="black", linestyle="--")
    _draw_paper(axes[len(found)])


def _draw_paper(axes: Any) -> None:
    for number, name in enumerate(NAMES):
        if points := TABLE_1.get(name):
            line(axes, points, None, number, linestyle=":")
            line(axes, points, **PAPER)
    axes.plot([], [], label="the paper's Table 1", **PAPER)
    axes.axhline(TABLE_1["exact"], color="black", linestyle="--", label="exact attention")
    axes.set(
        xscale="log", ylim=(0, 100), ylabel=WRONG, xlabel="r: keys read by a query (LSH: in a round)",
        title="The paper: its own RoBERTa, 4096 tokens",
    )  # fmt: skip


@torch.no_grad()
def built(found: Subject, ids: Tensor, keys: int, *, rows: int, layers: int) -> Row:
    """Search for values and free weights with the exact outputs, for some queries of some layers, and measure both.

    In a swapped model `value_aware` takes the output itself from width + 1 keys on, as nothing is lost by that; here
    the search for values and weights is run.
    """
    errors: list[float] = []
    queries = 0
    most, least, off = 0, math.inf, 0.0
    calls: list[ObservedCall] = []
    with observe_calls(found.model, f"value_aware(keys={keys})", calls.append):
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
