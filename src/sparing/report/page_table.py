"""Make the tables of the page: the text of each cell, and the value that it is sorted by."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from sparing.report.numbers import error, finite, megabytes, percent, ratio
from sparing.workbench.comparison.generation import GenerationRow
from sparing.workbench.comparison.verdict import FASTER, ORACLE, REFUSED, SLOWER, UNSAFE, Comparison, Row, rounded
from sparing.workbench.estimate import Estimate
from sparing.workbench.timing import Interval

SCORES = ("accuracy", "f1", "matthews", "pearson", "spearman")  #: against labels; names in `Row.end`


class Cell(NamedTuple):
    """A cell of a table."""

    text: str = ""
    value: float | str | None = None  #: what it is sorted by; None comes last in either order
    more: str = ""  #: its tooltip


class Heat(NamedTuple):
    """A cell of the heat map."""

    text: str
    share: float | None  #: of the darkest colour
    more: str


def full_table(found: Comparison) -> tuple[list[str], list[list[Cell]]]:
    """Return titles and rows. Empty columns are left out."""
    columns = {title: [cell(row) for row in found.rows] for title, cell in _COLUMNS.items()}
    used = {title: cells for title, cells in columns.items() if any(cell.text for cell in cells)}
    return list(used), [list(row) for row in zip(*used.values(), strict=True)]


def heat_map(found: Comparison) -> tuple[list[str], list[tuple[Row, list[Heat]]]]:
    """Return the names of the layers, and each row that has layers with its errors in them."""
    rows = [row for row in found.rows if row.layers]
    names = list(dict.fromkeys(layer.layer for row in rows for layer in row.layers))
    return names, [(row, [_heat(row, name, i) for i, name in enumerate(names)]) for row in rows]


GENERATION = (
    "method", "context", "passage", "seed", "attention speed", "token speed", "perplexity", "exact", "change",
    "keys read",
)  # fmt: skip


def generation_cells(row: GenerationRow) -> list[Cell]:
    """Return the cells of a row of generation, in the order of `GENERATION`."""
    first = [Cell(row.method, row.method), *(Cell(str(x), x) for x in (row.context, row.passage, row.seed))]
    costs = row.costs
    if costs is None:
        return [*first, *[Cell()] * (len(GENERATION) - len(first))]
    read = None if costs.keys_read is None else costs.keys_read * row.context
    return [
        *first, _number(costs.attention_speed, ratio), _number(costs.token_speed, ratio),
        *(_number(_exp(loss), lambda value: f"{value:.3f}") for loss in (costs.loss, costs.exact_loss)),
        _number(costs.change, percent), _number(read, "{:.0f}".format),
    ]  # fmt: skip


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def exact_scores(found: Comparison) -> list[str]:
    """Return the scores of the exact model against the labels, not from oracles, which see fewer documents."""
    ends = next((row.end for row in found.rows if row.end and row.verdict != ORACLE), {})
    scores = {name: finite(ends.get(f"exact_{name}")) for name in SCORES}
    return [f"{name} {score:.4f}" for name, score in scores.items() if score is not None]


def exact_memory(found: Comparison) -> str | None:
    """Return the peak memory of the exact model, the median over rows."""
    taken = [row.time.exact_bytes for row in found.rows if row.time is not None and row.time.exact_bytes is not None]
    return megabytes(round(statistics.median(taken))) if taken else None


def _heat(row: Row, name: str, position: int) -> Heat:
    layer = next((layer for layer in row.layers if layer.layer == name), None)
    if layer is None:
        return Heat("", None, "")
    total = finite(layer.total)
    more = f"{row.method} in layer {position} ({name}): {error(layer.total)}"
    heads = [(each, number) for number, each in enumerate(layer.heads) if math.isfinite(each)]
    if heads:
        wrong, head = max(heads)
        more += f"; worst head {head}: {error(wrong)}"
    # The root shows differences between small errors, too.
    return Heat(
        "?" if total is None else f"{total:.2f}", None if total is None else min(max(total, 0.0), 1.0) ** 0.5, more
    )


def _number(value: float | None, text: Callable[[float], str]) -> Cell:
    return Cell() if value is None else Cell(text(value), finite(value))


def _mean(value: Estimate | None) -> Cell:
    return Cell() if value is None else _number(value.mean, percent)


def _at_most(value: Estimate | None) -> Cell:
    if value is None:
        return Cell()
    if value.most is None:
        return Cell("?", None, "no interval")
    low, high = (math.nan if end is None else end for end in (value.low, value.high))
    return Cell(percent(value.most), finite(value.most), f"from {percent(low)} to {percent(high)}")


def _speed(row: Row, name: str) -> Cell:
    value: Interval | None = None if row.time is None else getattr(row.time, name)
    if value is None:
        return Cell()
    return Cell(ratio(value.median), finite(value.median), f"quartiles: {ratio(value.low)} and {ratio(value.high)}")


def _memory(row: Row) -> Cell:
    return Cell() if row.time is None or row.time.bytes is None else Cell(megabytes(row.time.bytes), row.time.bytes)


def _crossover(row: Row) -> Cell:
    if not row.points:
        return Cell()
    shortest, longest = row.points[0].length, row.points[-1].length
    if row.crossover is None:
        return Cell(f">{longest}", None, f"not faster up to {longest} tokens")
    if row.crossover <= shortest:
        return Cell(f"<{shortest}", row.crossover, "faster at all lengths that were raced")
    return Cell(rounded(row.crossover).replace(",", ""), row.crossover)


def _score(row: Row, name: str) -> Cell:
    """Return the cell of a score against labels, if there are any."""
    value, exact = (finite((row.end or {}).get(key)) for key in (name, f"exact_{name}"))
    return Cell() if value is None or exact is None else Cell(f"{value:.4f}", value, f"exact: {exact:.4f}")


_VERDICTS = (FASTER, SLOWER, UNSAFE, ORACLE, REFUSED)  # in the order of use
_COLUMNS: dict[str, Callable[[Row], Cell]] = {
    "method": lambda row: Cell(row.method, row.method),
    "verdict": lambda row: Cell(row.verdict, _VERDICTS.index(row.verdict)),
    "change": lambda row: _mean(row.change),
    "at most": lambda row: _at_most(row.change),
    **{name: partial(_score, name=name) for name in SCORES},
    "error": lambda row: Cell() if row.error is None else _number(row.error.mean, error),
    "substitution": lambda row: _number(row.substitution, error),
    "keys read": lambda row: _number(row.keys_read, "{:.0f}".format),
    "FLOPs": lambda row: _number(row.flops, ratio),
    "attention speed": lambda row: _speed(row, "attention"),
    "model speed": lambda row: _speed(row, "model"),
    "batched speed": lambda row: _speed(row, "batched"),
    "peak memory": _memory,
    "crossover": _crossover,
    "why refused": lambda row: Cell() if row.refused is None else Cell(row.refused, row.refused),
}
