"""Tables of figures, formatted for reading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparing_lab.studies.rows import Row, Rows


@dataclass(frozen=True)
class Table:
    """A table of formatted figures."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def listing(title: str, rows: Rows, columns: Mapping[str, str | Callable[[Row], str]]) -> Table:
    """Return a table with a line for each row; columns: by their heads, a format of the row's entries or a function."""
    return Table(
        title, list(columns),
        [[form.format_map(row) if isinstance(form, str) else form(row) for form in columns.values()] for row in rows],
    )  # fmt: skip


def pivot(
    title: str,
    corner: str | Sequence[str],
    lines: Iterable[Any],
    columns: Mapping[str, Any] | Iterable[Any],
    entry: Callable[[Any, Any], str],
    label: Callable[[Any], str | Sequence[str]] = str,
) -> Table:
    """Return a table with an entry for each line and column.

    corner: the heads of what names a line; label: what names it. columns: their heads, or what each head stands for.
    """
    heads = columns if isinstance(columns, Mapping) else {str(column): column for column in columns}
    body = [[*_words(label(line)), *(entry(line, column) for column in heads.values())] for line in lines]
    return Table(title, [*_words(corner), *heads], body)


def shown(value: float | None, form: str = ".2f", missing: str = "") -> str:
    """Return a number in words, or what stands for one that is not there."""
    return missing if value is None else format(value, form)


def _words(found: str | Sequence[str]) -> list[str]:
    return [found] if isinstance(found, str) else list(found)
