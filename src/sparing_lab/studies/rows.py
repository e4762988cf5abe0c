"""Rows of measurements: picked by their entries, grouped, and averaged into curves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, TypeVar

from sparing.workbench.estimate import exponent

Number = TypeVar("Number", int, float)
Cell = Mapping[str, Any]  #: identifies a piece of work; JSON
Row = dict[str, Any]  #: a measurement: its cell and its results; JSON
Rows = Sequence[Row]
Entry = str | Callable[[Row], Any]  #: a field's name, or a function of the row
Curve = Mapping[Any, float]  #: y by x, in the order of x


def pick(rows: Rows, **wanted: Any) -> list[Row]:
    """Return the rows with these entries."""
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def the(rows: Rows, **wanted: Any) -> Row:
    """Return the one row with these entries."""
    found = pick(rows, **wanted)
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows have {wanted}")
    return found[0]


def entry(row: Row, of: Entry) -> Any:
    """Return a row's field, or a function of the row."""
    return row[of] if isinstance(of, str) else of(row)


def over(of: str, by: str) -> Callable[[Row], float]:
    """Return the entry that is the ratio of two fields."""
    return lambda row: row[of] / row[by]


def distinct(rows: Rows, of: Entry) -> list[Any]:
    """Return the different entries of the rows, in the order of their first appearance."""
    return list(dict.fromkeys(entry(row, of) for row in rows))


def grouped(rows: Rows, *by: Entry) -> dict[Any, list[Row]]:
    """Return the rows by an entry, or by a tuple of several, in the order of their first appearance."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        key = entry(row, by[0]) if len(by) == 1 else tuple(entry(row, each) for each in by)
        found.setdefault(key, []).append(row)
    return found


def mean(rows: Rows, of: Entry) -> float:
    """Return the mean of an entry."""
    return fmean(entry(row, of) for row in rows)


def means(rows: Rows, of: Entry, *by: Entry) -> dict[Any, float]:
    """Return the mean of an entry in each group."""
    return {key: mean(some, of) for key, some in grouped(rows, *by).items()}


def curve(rows: Rows, x: Entry, y: Entry) -> dict[Any, float]:
    """Return the mean of y at each x, in the order of x."""
    return dict(sorted(means(rows, y, x).items()))


def curves(rows: Rows, x: Entry, y: Entry, *by: Entry) -> dict[Any, dict[Any, float]]:
    """Return the curve of each group."""
    return {key: curve(some, x, y) for key, some in grouped(rows, *by).items()}


def power(curve: Curve) -> float:
    """Return the p of y ~ x^p that fits a curve best."""
    return exponent([float(x) for x in curve], [float(y) for y in curve.values()])


def ends(values: Iterable[Number]) -> tuple[Number, Number]:
    """Return the least and the largest value."""
    known = list(values)
    return min(known), max(known)


def span(values: Iterable[float], form: str = ".2f") -> str:
    """Return the least and the largest value in words; one number where both read the same."""
    low, high = (format(value, form) for value in ends(values))
    return low if low == high else f"{low} to {high}"
