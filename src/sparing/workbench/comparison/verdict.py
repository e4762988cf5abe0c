"""The result of a comparison: a row with a verdict for each method and budget."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparing.from_json import build, parse
from sparing.notebook import block, table
from sparing.store import add_checksum, verify_checksum, without_nan, write_files
from sparing.workbench.comparison.facts import FactCount
from sparing.workbench.comparison.generation_row import GenerationRow
from sparing.workbench.comparison.headline import headline, recommended
from sparing.workbench.comparison.judgement import (
    ORACLE,
    REFUSED,
    VERDICTS,
)
from sparing.workbench.comparison.maps import HeadMap
from sparing.workbench.comparison.quality import LayerError
from sparing.workbench.comparison.races import RacePoint
from sparing.workbench.comparison.seconds import PaddingSeconds, Seconds
from sparing.workbench.estimate import Estimate
from sparing.workbench.pages import page_of
from sparing.workbench.timing import Interval

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
    notes: tuple[str, ...] = ()  #: about the model and the documents
    unpadded: PaddingSeconds | None = None  #: what the padding of the batch costs an encoder

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
            add_checksum(without_nan({"format": FORMAT, "headline": self.headline, **asdict(self)})),
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


PARTS = ("substitution", "approximation")  #: of an error
SPEEDS = ("attention", "model", "batched")  #: ratios of `Seconds`


def _share(value: Estimate | None) -> str:
    return "" if value is None else f"{value.mean:.2%}"


def _times(row: Row | GenerationRow) -> str:
    return "" if row.speed is None else "?" if row.disturbed else f"{row.speed.median:.2f}x"


def _flat(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = {"method": row.method, "verdict": row.verdict, "refused": row.refused, "reason": row.reason}
    for name in ("change", "error"):
        value: Estimate | None = getattr(row, name)
        found |= {name: value and value.mean, f"{name}_low": value and value.low, f"{name}_high": value and value.high}
    for name in (*PARTS, "keys_read", "flops_reduction", "memory_reduction"):
        found[name] = getattr(row, name)
    found |= row.end or {}
    for name in SPEEDS:
        ratio: Interval | None = None if row.disturbed else getattr(row.time, name, None)
        found[f"{name}_speed"] = ratio and ratio.median
    found["bytes"], found["exact_bytes"] = getattr(row.time, "bytes", None), getattr(row.time, "exact_bytes", None)
    found["crossover"] = row.crossover
    return found
