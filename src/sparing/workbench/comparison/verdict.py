"""The result of a comparison: a row with a verdict for each method and budget, and a summary in one sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sparing.contract import method as _method
from sparing.from_json import build, parse
from sparing.notebook import block, table
from sparing.store import add_checksum, verify_checksum, write_files
from sparing.workbench.comparison.facts import FactCount
from sparing.workbench.comparison.generation_row import GenerationRow
from sparing.workbench.comparison.headline import fastest, headline, recommended
from sparing.workbench.comparison.judgement import (
    KEPT,
    ORACLE,
    REFUSED,
    SLOWER,
    UNKNOWN,
    UNSAFE,
    UNTIMED,
    VERDICTS,
    keeps,
    timed_verdict,
    within,
)
from sparing.workbench.comparison.maps import HeadMap
from sparing.workbench.comparison.quality import LayerError
from sparing.workbench.comparison.races import RacePoint
from sparing.workbench.comparison.seconds import Seconds
from sparing.workbench.crossover import crossover
from sparing.workbench.estimate import Estimate, estimate
from sparing.workbench.metrics import End, Metric, scores
from sparing.workbench.pages import page_of
from sparing.workbench.timing import MARGIN, Interval

FORMAT = 2  #: 1 had the FLOPs as a share of exact attention's


@dataclass(frozen=True)
class Row:
    """A method with one setting: its verdict, and the figures behind it."""

    method: str
    verdict: str
    refused: str | None = None  #: why it cannot run in this model; nothing else is known then
    change: Estimate | None = None  #: of the model's output, over documents; see `Comparison.metric`
    error: Estimate | None = None  #: relative L2 error of the attention output, mean over layers, over documents
    substitution: float | None = None  #: of which the method's own target against softmax attention
    approximation: float | None = None  #: and the estimate against that target
    layers: tuple[LayerError, ...] = ()
    end: dict[str, float] | None = None  #: means over documents: cosine, perplexity, agreement, neighbours, ...
    keys_read: float | None = None
    flops_reduction: float | None = None  #: FLOPs of exact attention / those of the method: 4.0 is a quarter of them
    time: Seconds | None = None
    points: tuple[RacePoint, ...] = ()  #: speed of the attention call over the length
    crossover: int | None = None  #: tokens from which on the call is faster; None: at none of the lengths of `points`
    facts: FactCount | None = None  #: of prompts that the method reads, if the verdict needed them
    reason: str = ""  #: which facts were lost, or what cannot be told

    when = "prefill"  #: as in `GenerationRow`: documents and prompts are read by the method
    context = 0

    @property
    def speed(self) -> Interval | None:
        """Time of the exact model / that with the method."""
        return None if self.time is None else self.time.model

    @property
    def disturbed(self) -> str:
        """By what its times were disturbed, so that they say nothing."""
        return "" if self.time is None else self.time.disturbed

    @property
    def memory_reduction(self) -> float | None:
        """Peak memory of the exact model / that with the method; None: it was not measured."""
        if self.time is None or self.time.bytes is None or self.time.exact_bytes is None:
            return None
        return self.time.exact_bytes / self.time.bytes if self.time.bytes else math.inf


@dataclass(frozen=True, repr=False)
class Comparison:
    """The result of `sparing.compare`."""

    model: str
    kind: str
    data: str
    documents: int
    tokens: int  #: of the longest
    truncated: int  #: documents that were longer than that
    skipped: int  #: documents without text, or of one token, which were left out
    metric: str  #: what `change` measures
    tolerance: float
    seeds: int
    machine: dict[str, Any]
    batch: int  #: documents in the batches whose time was taken; 1: none
    padding: float  #: share of padding in them
    rows: tuple[Row, ...]
    summary: str
    maps: tuple[HeadMap, ...] = ()  #: where the most fragile heads look
    generation: tuple[GenerationRow, ...] = ()  #: of a language model, at each context
    dtype: str = "float32"  #: of the model's weights
    needs_facts: bool = False  #: whether what is safe must also keep facts of its context
    notes: tuple[str, ...] = ()  #: about the documents

    @property
    def headline(self) -> str:
        """What to do, in six words at most; `summary` has the evidence."""
        return headline(self.generation, self.rows, self.kind)

    @property
    def recommended(self) -> Row | GenerationRow | None:
        """The row that `headline` turns on; None: keep exact attention, or one cannot tell."""
        return recommended(self.generation, self.rows)

    @property
    def cases(self) -> str:
        """What was measured, in words: documents, or passages where there is generation only."""
        if self.generation and not self.rows:
            count = {row.context: 0 for row in self.generation}
            for row in self.generation:
                count[row.context] = max(count[row.context], row.passages)
            return ", ".join(f"{n or 'no'} passage{'s' * (n != 1)} of {context} tokens" for context, n in count.items())
        cut = f", {self.truncated} of them cut" if self.truncated else ""
        cut += f", {self.skipped} more left out for having no text or one token" if self.skipped else ""
        return f"{self.documents} document{'s' * (self.documents != 1)} of up to {self.tokens} tokens{cut}"

    def __repr__(self) -> str:
        count = len({row.method for row in self.rows} | {row.method for row in self.generation})
        settings = f"{count} setting{'s' * (count != 1)}"
        return f"<Comparison of {settings} in {self.model} on {self.data}: {self.headline}>"

    def _repr_html_(self) -> str:
        """Return what notebooks show: the headline, its evidence, and the rows in short."""
        prompts = [
            [row.method, row.verdict, _share(row.change), _times(row)]
            for row in sorted(self.rows, key=lambda row: VERDICTS.index(row.verdict))
        ]
        tokens = [
            [row.method, row.when, str(row.context), row.verdict, _share(row.change), _times(row)]
            for row in self.generation
        ]
        return (
            block(self.headline, self.summary)
            + table(["method", "verdict", "change", "speed"], prompts)
            + table(["method", "when", "context", "verdict", "change", "speed"], tokens)
        )

    def to_html(self, path: str | Path) -> None:
        """Write a page to read, which needs no network; needs plotly and jinja2."""
        write_files({Path(path): page_of(self)})

    def records(self) -> list[dict[str, Any]]:
        """Return a flat dictionary for each row, as `pandas.DataFrame` takes them."""
        return [_flat(row) for row in self.rows]

    def to_json(self) -> str:
        """Return everything as JSON; `from_json` reads it back, and so does `sparing show`."""
        return json.dumps(
            add_checksum(finite({"format": FORMAT, "headline": self.headline, **asdict(self)})),
            indent=1,
            allow_nan=False,
        )

    @classmethod
    def from_json(cls, text: str) -> Comparison:
        """Read what `to_json` wrote; a ValueError names the part that is wrong."""
        try:
            held = parse(text)
        except ValueError as error:
            raise ValueError(f"a comparison is JSON, and this is not: {error}") from None
        return cls.from_dict(held)

    @classmethod
    def from_dict(cls, held: Any) -> Comparison:
        """Read the parsed JSON of `to_json`; a ValueError names the part that is wrong."""
        if not isinstance(held, dict) or "format" not in held:
            raise ValueError("a comparison is a JSON object with 'format' and 'rows'")
        held = verify_checksum(held)
        if held.pop("format") != FORMAT:
            raise ValueError(f"this format of a comparison is not known; this sparing reads {FORMAT}: compare again")
        held.pop("headline", None)  # follows from the rows
        try:
            found = build(cls, held)
            found._check()
        except ValueError as error:
            raise ValueError(f"this is not a comparison as sparing writes it: {error}") from None
        return found

    def _check(self) -> None:
        """Raise for what the types allow but reports cannot show."""
        if not math.isfinite(self.tolerance):
            raise ValueError("tolerance must be a number, not None")
        for number, row in enumerate(self.rows):
            if row.verdict not in VERDICTS:
                raise ValueError(f"rows[{number}].verdict={row.verdict!r} is not known")
            if (row.refused is None) == (row.verdict == REFUSED):
                raise ValueError(f"rows[{number}].refused says why the verdict is {REFUSED!r}, and nothing else")
            if row.refused is None and (row.error is None or (row.change is None and row.verdict != ORACLE)):
                raise ValueError(f"rows[{number}] has no change or no error")
            if any(not layer.heads for layer in row.layers):
                raise ValueError(f"rows[{number}].layers: a layer has no heads")
        for number, each in enumerate(self.generation):
            if each.verdict not in VERDICTS:
                raise ValueError(f"generation[{number}].verdict={each.verdict!r} is not known")
            if (each.times is None or each.change is None or each.differing is None) == (each.refused is None):
                raise ValueError(f"generation[{number}] must have figures, or say why it is refused")
        for number, picture in enumerate(self.maps):
            if not picture.is_whole():
                raise ValueError(f"maps[{number}].pixels must be base64 of side x side bytes, side={picture.side}")


_ROUNDING = 1e-6  # an error of attention that is rounding in float32
_PARTS = ("substitution", "approximation")
_NOT_MEANS = (  # of documents
    "change", "label", "class", "exact_class", "classes", "neighbour", "exact_neighbour", "neighbour_label",
    "exact_neighbour_label",
)  # fmt: skip
_RATIOS = ("attention", "model", "batched")


def row_of(
    spec: str,
    parts: Sequence[dict[str, Any]],
    time: dict[str, Any],
    kind: str,
    tolerance: float,
    metric: Metric,
    labels: Sequence[float] | None = None,
    points: tuple[RacePoint, ...] = (),
) -> Row:
    """Make a row of what was measured: a `Quality` of each seed, and `Seconds`, as dictionaries."""
    if (refused := next((part["refused"] for part in parts if "refused" in part), None)) is not None:
        return Row(spec, REFUSED, refused)
    by_seed = [labelled(part["ends"], labels) for part in parts]
    errors = [_mean(seeds) for seeds in zip(*(part["errors"] for part in parts), strict=True)]
    layers = tuple(_layer(same) for same in zip(*(part["layers"] for part in parts), strict=True))
    end = _ends(kind, by_seed)
    taken = _seconds(time)
    # An oracle runs on few documents, which may not be enough to have a neighbour.
    change = metric.change(by_seed) if all(map(metric.fits, by_seed)) else None
    identical = max(errors) <= _ROUNDING
    if identical and change is not None:
        change = Estimate(0.0, 0.0, 0.0, change.count)  # of any document, however few were measured
    said, reason = verdict(spec, change, taken, tolerance)
    substitution, approximation = (
        _mean([getattr(layer, part) for layer in layers]) if layers else None for part in _PARTS
    )
    return Row(
        spec, said, change=change, error=estimate(errors), substitution=substitution,
        approximation=approximation, layers=layers, end=end, keys_read=parts[0]["keys_read"], reason=reason,
        flops_reduction=_inverse(_mean([part["flops"] for part in parts])), time=taken, points=points,
        crossover=crossover([(each.length, each.ratio.median) for each in points], margin=MARGIN).tokens,
    )  # fmt: skip


def labelled(ends: Sequence[End], labels: Sequence[float] | None) -> list[End]:
    """Add to each document its label and, if that is a class, the label of its nearest document."""
    if labels is None:
        return list(ends)
    found = [{**end, "label": label} for end, label in zip(ends, labels, strict=False)]
    for end in found:
        for which in ("exact_", ""):
            if f"{which}neighbour" in end and "score" not in end:  # labels of pairs say how similar they are
                end[f"{which}neighbour_label"] = labels[int(end[f"{which}neighbour"])]
    return found


def _ends(kind: str, by_seed: Sequence[list[End]]) -> End:
    """Return means over documents and seeds, and scores against the labels."""
    ends = [end for some in by_seed for end in some]
    found = {name: _mean([end[name] for end in ends]) for name in ends[0] if name not in _NOT_MEANS}
    if "neighbour" in ends[0]:
        found["neighbours"] = _mean([float(end["exact_neighbour"] == end["neighbour"]) for end in ends])
    against = [scores(kind, some) for some in by_seed]
    return found | {name: _mean([one[name] for one in against]) for name in against[0]}


def verdict(spec: str, change: Estimate | None, time: Seconds, tolerance: float) -> tuple[str, str]:
    """Judge a row, and say what cannot be told. Faster: the whole model is, in three rounds of four."""
    if _method(spec).oracle:
        return ORACLE, ""
    if change is None:
        return UNKNOWN, "no document shows a change"
    holds, reason = within(change, tolerance, "change", "document")
    if holds is not True:
        return (UNSAFE, "") if holds is False else (UNKNOWN, reason)
    return timed_verdict(_faster(spec, time), time.disturbed)


def _faster(spec: str, time: Seconds | None) -> bool:
    return (
        time is not None
        and time.model is not None
        and not time.disturbed
        and time.model.low > MARGIN
        and _method(spec).name != "exact"
    )


def with_facts(row: Row, facts: FactCount | None, tolerance: float | None) -> Row:
    """Return a row of a language model with what its prompts keep of facts, and the verdict that follows.

    tolerance: share of the facts that may be lost, if facts alone decide; None: they are needed beside the change.
    """
    holds, reason = keeps(facts, KEPT if tolerance is None else 1 - tolerance)
    change = row.change
    if tolerance is not None and facts is not None:
        change = facts.lost
        disturbed = "" if row.time is None else row.time.disturbed
        word, said = timed_verdict(_faster(row.method, row.time), disturbed)
        row = replace(row, verdict=word, reason=said)
    if holds is not True:
        row = replace(row, verdict=UNKNOWN if holds is None else UNSAFE, reason=reason)
    return replace(row, change=change, facts=facts)


def summary(rows: Sequence[Row], documents: int, tokens: int, tolerance: float, metric: str) -> str:
    """Return what to do, in one sentence."""
    on = f"On {documents} document{'s' * (documents != 1)} of up to {tokens} tokens"
    within = f"within {percentage(tolerance)} ({metric})"
    best = fastest(rows)
    if best is not None:
        assert best.change is not None
        assert best.speed is not None
        return (
            f"{on}, {best.method} is {best.speed.median:.2f}x as fast as the exact model here, and {within}: "
            f"{best.change.mean:.2%} on average."
        )
    judged = (SLOWER, UNTIMED, UNKNOWN, UNSAFE)
    tried = [row for row in rows if row.verdict in judged and _method(row.method).name != "exact"]
    safe = [row for row in tried if row.verdict == SLOWER]
    if not tried:
        return f"{on} keep exact attention: nothing that could replace it was measured."
    unknown = [row for row in tried if row.verdict == UNKNOWN]
    untimed = [row for row in tried if row.verdict == UNTIMED]
    if untimed:
        return (
            f"{on} {len(untimed) + len(safe)} of {len(tried)} settings stay {within}, but this machine is too busy to "
            f"time them: {untimed[0].disturbed}. Measure again when it is idle."
        )
    if safe:
        return (
            f"{on} keep exact attention: {len(safe)} of {len(tried)} settings stay {within}, but none is faster here."
            + _open([row for row in unknown if _faster(row.method, row.time)])
            + _later(safe, tokens)
        )
    if unknown:
        return f"{on} keep exact attention: no setting is known to stay {within}.{_open(unknown)}"
    kept = " and keeps the facts of its context" if any(row.facts is not None for row in tried) else ""
    return f"{on} keep exact attention: no setting stays {within}{kept}."


def _open(unknown: Sequence[Row]) -> str:
    """Say which setting may be safe, the fastest if any is faster, and what cannot be told."""
    if not unknown:
        return ""
    best = max(unknown, key=lambda row: (_faster(row.method, row.time), -abs(row.change.mean) if row.change else 0))
    if best.speed is not None and _faster(best.method, best.time):
        return f" {best.method} ({best.speed.median:.2f}x as fast) may pay, but one cannot tell: {best.reason}."
    return f" {best.method} may be safe, but one cannot tell: {best.reason}."


def _later(safe: Sequence[Row], tokens: int) -> str:
    """Say at which length to measure again, if attention alone of a safe setting is faster from there on.

    How much it changes so long a document is not known: errors grow with the length.
    """
    pays = [row for row in safe if row.crossover is not None and row.crossover > tokens]
    if not pays:
        return ""
    best = min(pays, key=lambda row: row.crossover or 0)
    assert best.crossover is not None
    return (
        f" Longer documents may pay: the attention of {best.method} is faster from about {rounded(best.crossover)} "
        "tokens on, and what it changes there was not measured (--length)."
    )


def percentage(share: float) -> str:
    """Format a tolerance, which is never 0.

    >>> percentage(0.01), percentage(2e-6)
    ('1.00%', '0.0002%')
    """
    return f"{share:.2%}" if share >= 1e-4 else f"{100 * share:.2g}%"


def rounded(tokens: int) -> str:
    """Format a crossover with two digits: it is no more precise.

    >>> rounded(2874)
    '2,900'
    """
    digits = max(len(str(tokens)) - 2, 0)
    return f"{round(tokens, -digits):,}"


def _layer(same: Sequence[dict[str, Any]]) -> LayerError:
    bars = [each["bar"] for each in same if each["bar"] is not None]
    numbers = {name: _mean([each[name] for each in same]) for name in (*_PARTS, "total")}
    heads = tuple(_mean(head) for head in zip(*(each["heads"] for each in same), strict=True))
    return LayerError(same[0]["layer"], **numbers, heads=heads, bar=_mean(bars) if bars else None)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _inverse(share: float) -> float:
    return 1 / share if share else math.inf


def _seconds(held: dict[str, Any]) -> Seconds:
    ratios = {name: None if held[name] is None else Interval(*held[name]) for name in _RATIOS}
    return Seconds(**{**held, **ratios})


def _share(value: Estimate | None) -> str:
    return "" if value is None else f"{value.mean:.2%}"


def _times(row: Row | GenerationRow) -> str:
    return "" if row.speed is None else "?" if row.disturbed else f"{row.speed.median:.2f}x"


def finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flat(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = {"method": row.method, "verdict": row.verdict, "refused": row.refused, "reason": row.reason}
    for name in ("change", "error"):
        value: Estimate | None = getattr(row, name)
        found |= {name: value and value.mean, f"{name}_low": value and value.low, f"{name}_high": value and value.high}
    for name in (*_PARTS, "keys_read", "flops_reduction", "memory_reduction"):
        found[name] = getattr(row, name)
    found |= row.end or {}
    for name in _RATIOS:
        ratio: Interval | None = None if row.disturbed else getattr(row.time, name, None)
        found[f"{name}_speed"] = ratio and ratio.median
    found["bytes"], found["exact_bytes"] = getattr(row.time, "bytes", None), getattr(row.time, "exact_bytes", None)
    found["crossover"] = row.crossover
    return found
