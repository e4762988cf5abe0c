"""Make the tables of the page: the text of each cell, and the value that it is sorted by."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from sparing.report.numbers import error, finite, megabytes, milliseconds, percent, ratio, seconds
from sparing.workbench.comparison.facts import DepthCount, FactCount
from sparing.workbench.comparison.generation_row import GenerationRow
from sparing.workbench.comparison.judgement import FASTER, ORACLE, VERDICTS
from sparing.workbench.comparison.summary import rounded
from sparing.workbench.comparison.verdict import Comparison, Row
from sparing.workbench.estimate import Estimate
from sparing.workbench.timing import Interval

BASELINE = "the model's own"  #: the name of the row of the model as it is, with which all others are compared
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
    """Return titles and rows, by verdict, the exact model among them. Empty columns are left out."""
    rows = by_verdict(found.rows)
    columns = {title: [cell(row) for row in rows] for title, cell in _COLUMNS.items()}
    used = {title: cells for title, cells in columns.items() if any(cell.text for cell in cells)}
    table = [list(row) for row in zip(*used.values(), strict=True)]
    if any(row.time is not None for row in rows):
        exact = _exact_cells(found)
        table.insert(sum(row.verdict == FASTER for row in rows), [exact.get(title, Cell()) for title in used])
    return list(used), table


def by_verdict(rows: Iterable[Row]) -> list[Row]:
    """Return the rows in the order of use: by verdict, and the fastest first."""
    return sorted(rows, key=lambda row: (VERDICTS.index(row.verdict), -(finite(row.speed and row.speed.median) or 0)))


def _exact_cells(found: Comparison) -> dict[str, Cell]:
    """Return the cells of the exact model by title; it stands below what is faster."""
    ends = _exact_ends(found)
    scores = {name: score for name in SCORES if (score := finite(ends.get(f"exact_{name}"))) is not None}
    ratios = ("FLOPs saved", "attention speed", "model speed", "batched speed", "memory saved")
    return {
        "method": Cell(BASELINE, BASELINE), "verdict": Cell("baseline", 0.5), "change": Cell("0%", 0.0),
        "at most": Cell("0%", 0.0), "error": Cell("0", 0.0), "substitution": Cell("0", 0.0),
        **{name: Cell("1x", 1.0) for name in ratios},
        **{name: Cell(f"{score:.4f}", score) for name, score in scores.items()},
    }  # fmt: skip


def _exact_ends(found: Comparison) -> dict[str, float]:
    """Return the figures that hold the scores of the exact model; oracles see fewer documents."""
    return next((row.end for row in found.rows if row.end and row.verdict != ORACLE), {})


def heat_map(found: Comparison) -> tuple[list[str], list[tuple[Row, list[Heat]]]]:
    """Return the names of the layers, and each row that has layers with its errors in them."""
    rows = [row for row in found.rows if row.layers]
    names = list(dict.fromkeys(layer.layer for row in rows for layer in row.layers))
    return names, [(row, [_heat(row, name, i) for i, name in enumerate(names)]) for row in rows]


def generation_tables(found: Comparison) -> list[tuple[str, list[str], list[list[Cell]]]]:
    """Return the tables of generation: a name, titles and rows of each. Refused methods are left out."""
    rows = [row for row in found.generation if row.times is not None]
    if not rows:
        return []
    effects = [[cell(row) for cell in EFFECTS.values()] for row in rows]
    costs = []
    for context in dict.fromkeys(row.context for row in rows):
        there = [row for row in rows if row.context == context]
        costs += [exact_costs(there), *([cell(row) for cell in COSTS.values()] for row in there)]
    return [("What it does", list(EFFECTS), effects), ("What it costs", list(COSTS), costs)]


class DepthPicture(NamedTuple):
    """Facts kept by one method: a line for each context, a cell for each part of it."""

    method: str
    when: str
    lines: list[tuple[int, list[Heat]]]


def depth_map(found: Comparison) -> list[DepthPicture]:
    """Return which facts are kept, by method, length of the context, and depth."""
    rows = [row for row in found.generation if row.facts is not None]
    pictures = []
    for method, when in dict.fromkeys((row.method, row.when) for row in rows):
        lines = [
            (row.context, [_depth(each, number, row.facts) for number, each in enumerate(row.facts.depths)])
            for row in rows
            if (row.method, row.when) == (method, when) and row.facts is not None
        ]
        pictures.append(DepthPicture(method, when, lines))
    return pictures


def _depth(count: DepthCount, number: int, facts: FactCount) -> Heat:
    parts = len(facts.depths)
    where = f"from {number / parts:.0%} to {(number + 1) / parts:.0%} of the context"
    if not count.solved:
        return Heat("-", None, f"{where}: exact attention finds no fact")
    lost = 1 - count.kept / count.solved
    return Heat(f"{count.kept}/{count.solved}", lost**0.5, f"{where}: {count.kept} of {count.solved} facts kept")


def exact_costs(rows: Sequence[GenerationRow]) -> list[Cell]:
    """Return the cells of exact attention, in the order of `COSTS`: medians over what was timed beside each method."""
    times = [row.times for row in rows if row.times is not None]
    quiet = [each for each in times if not each.disturbed]

    def middle(name: str) -> float:
        return statistics.median(getattr(each, name) for each in times)

    def spent(name: str, text: Callable[[float], str]) -> Cell:
        if not quiet:
            return Cell("?", None, times[0].disturbed)
        return _number(statistics.median(getattr(each, name) for each in quiet), text)

    cache = statistics.mode(each.exact_cache for each in times)
    return [
        Cell(f"exact, {cache} cache"), Cell(), Cell(str(rows[0].context), rows[0].context),
        spent("exact_token", milliseconds), Cell("1x", 1.0), spent("exact_attention", milliseconds),
        Cell("1x", 1.0), spent("exact_prompt", seconds), spent("exact_prompt_attention", seconds),
        _number(middle("cache_bytes"), lambda value: megabytes(round(value))), Cell(),
        _number(rows[0].context, "{:.0f}".format), Cell(),
    ]  # fmt: skip


def _kept(facts: FactCount) -> Cell:
    """Return how many of the facts that exact attention finds are kept."""
    kept = facts.kept
    if not kept.solved:
        return Cell("none found", None, f"exact attention finds none of {facts.asked} facts")
    more = f"{kept.low:.0%} to {kept.high:.0%}; exact attention finds {kept.solved} of {facts.asked} facts"
    return Cell(f"{kept.kept} of {kept.solved}", kept.share, f"{more} in {facts.contexts} contexts")


def _at_least(facts: FactCount) -> Cell:
    return Cell(f"{facts.kept.low:.0%}", facts.kept.low) if facts.kept.solved else Cell()


def _timed(name: str, text: Callable[[float], str]) -> Callable[[GenerationRow], Cell]:
    def cell(row: GenerationRow) -> Cell:
        if row.times is None:
            return Cell()
        busy = row.disturbed and not name.endswith("bytes")
        return Cell("?", None, row.disturbed) if busy else _number(getattr(row.times, name), text)

    return cell


def _token_speed(row: GenerationRow) -> Cell:
    if row.times is None:
        return Cell()
    if row.disturbed:
        return Cell("?", None, row.disturbed)
    speed = row.times.token_speed
    return Cell(ratio(speed.median), finite(speed.median), f"quartiles: {ratio(speed.low)} and {ratio(speed.high)}")


#: Columns of generation: what happens to the text and to facts of the context.
EFFECTS: dict[str, Callable[[GenerationRow], Cell]] = {
    "method": lambda row: Cell(row.method, row.method),
    "when": lambda row: Cell(row.when, row.when),
    "context": lambda row: Cell(str(row.context), row.context),
    "perplexity": lambda row: _number(row.perplexity, "{:.3f}".format),
    "exact": lambda row: _number(row.exact_perplexity, "{:.3f}".format),
    "change": lambda row: _mean(row.change),
    "at most": lambda row: _at_most(row.change),
    "same token": lambda row: Cell() if row.differing is None else _number(1 - row.differing.mean, percent),
    "facts kept": lambda row: Cell() if row.facts is None else _kept(row.facts),
    "at least": lambda row: Cell() if row.facts is None else _at_least(row.facts),
    "verdict": lambda row: Cell(row.verdict, VERDICTS.index(row.verdict), row.reason),
}
#: Columns of generation: time and memory.
COSTS: dict[str, Callable[[GenerationRow], Cell]] = {
    "method": EFFECTS["method"],
    "when": EFFECTS["when"],
    "context": EFFECTS["context"],
    "token": _timed("token", milliseconds),
    "speed": _token_speed,
    "attention": _timed("attention", milliseconds),
    "its speed": _timed("attention_speed", ratio),
    "prompt": _timed("prompt", seconds),
    "attention of it": _timed("prompt_attention", seconds),
    "cache": _timed("cache_bytes", lambda value: megabytes(round(value))),
    "index": _timed("index_bytes", lambda value: megabytes(round(value))),
    "keys read": lambda row: _number(row.keys_read, "{:.0f}".format),
    "faster from": lambda row: _crossover(row),
}


def exact_scores(found: Comparison) -> list[str]:
    """Return the scores of the exact model against the labels, not from oracles, which see fewer documents."""
    ends = _exact_ends(found)
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
    if row.disturbed:
        return Cell("?", None, row.disturbed)
    return Cell(ratio(value.median), finite(value.median), f"quartiles: {ratio(value.low)} and {ratio(value.high)}")


def _memory(row: Row) -> Cell:
    saved = row.memory_reduction
    if saved is None or row.time is None or row.time.bytes is None or row.time.exact_bytes is None:
        return Cell()
    return Cell(ratio(saved), finite(saved), f"{megabytes(row.time.bytes)}, exact: {megabytes(row.time.exact_bytes)}")


def _crossover(row: Row | GenerationRow) -> Cell:
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


_COLUMNS: dict[str, Callable[[Row], Cell]] = {
    "method": lambda row: Cell(row.method, row.method),
    "verdict": lambda row: Cell(row.verdict, VERDICTS.index(row.verdict), row.reason),
    "change": lambda row: _mean(row.change),
    "at most": lambda row: _at_most(row.change),
    **{name: partial(_score, name=name) for name in SCORES},
    "facts kept": lambda row: Cell() if row.facts is None else _kept(row.facts),
    "error": lambda row: Cell() if row.error is None else _number(row.error.mean, error),
    "substitution": lambda row: _number(row.substitution, error),
    "keys read": lambda row: _number(row.keys_read, "{:.0f}".format),
    "FLOPs saved": lambda row: _number(row.flops_reduction, ratio),
    "attention speed": lambda row: _speed(row, "attention"),
    "model speed": lambda row: _speed(row, "model"),
    "batched speed": lambda row: _speed(row, "batched"),
    "memory saved": _memory,
    "crossover": _crossover,
    "why refused": lambda row: Cell() if row.refused is None else Cell(row.refused, row.refused),
}
