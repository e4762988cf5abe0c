"""Read the user's documents from text, JSON lines, CSV, TSV and Parquet files."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparing.from_json import has_surrogate, parse
from sparing.models import first_line
from sparing.sample_text import python_topics
from sparing.spec import shown
from sparing.store import readable

#: Rows, each with its place for errors: "line 3" (counted from 1, with blank lines), or "row 3" in Parquet files.
_Table = list[tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Documents:
    """Texts with optional labels and second texts."""

    name: str
    texts: tuple[str, ...]
    labels: tuple[Any, ...] | None = None
    empty: int = 0  #: rows of a table, or files, that were left out because they have no text
    pairs: tuple[str, ...] | None = None  #: the second text of each document, where documents are pairs
    lines: bool = False  #: whether each line of a plain text file became a document

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def fingerprint(self) -> str:
        """Hash of the texts, labels and pairs; it does not depend on the files that they were read from."""
        return hashlib.sha256(json.dumps([self.texts, self.labels, self.pairs], default=str).encode()).hexdigest()[:16]


def default() -> Documents:
    """Return the help topics of Python, which every machine has."""
    return Documents("Python help topics", tuple(python_topics()))


def read(
    paths: Sequence[str | Path],
    *,
    column: str | None = None,
    label: str | None = None,
    allowed: Sequence[str] | None = None,
    pair: str | None = None,
    whole: bool = False,
) -> Documents:
    """Read documents from `.jsonl`, `.csv`, `.tsv` or `.parquet` files, or from plain text with one document per line.

    paths: several files are one collection. All but Parquet may be compressed (`.jsonl.xz`, `.txt.gz`). "-" is
        standard input, as plain text.
    column: the column that holds the text. None takes "text", or the only column.
    label: the column that holds the labels. allowed: the labels that are accepted, as text.
    pair: the column that holds a second text, which the first is compared with.
    whole: read a plain text file as one document.
    """
    if not paths:
        raise ValueError("data: no file was given")
    texts: list[str] = []
    labels: list[Any] = []
    pairs: list[str] = []
    empty = 0
    for path in paths:
        for place, text, mark, second in _rows(path, column, label, pair, whole):
            if not text.strip() or (pair is not None and not second.strip()):
                empty += 1
                continue
            if allowed is not None and str(mark) not in allowed:
                raise ValueError(
                    f"data: {path}, {place}: {label!r} is {shown(mark)}; it must be {' or '.join(allowed)}"
                )
            texts.append(text)
            labels.append(mark)
            pairs.append(second)
    named = ["standard input" if str(path) == "-" else readable(Path(path).name) for path in paths]
    names = ", ".join(named if len(named) <= 4 else [*named[:2], f"... ({len(named)} files)"])
    if not texts:
        raise ValueError(f"data: {names} holds no text")
    marks = None if label is None else tuple(labels)
    lines = not whole and any(_suffix(path) not in _TABLES for path in paths)
    return Documents(names, tuple(texts), marks, empty, None if pair is None else tuple(pairs), lines)


def _rows(
    path: str | Path, column: str | None, label: str | None, pair: str | None, whole: bool
) -> Iterable[tuple[str, str, Any, str]]:
    suffix = _suffix(path)
    if suffix in _TABLES:
        if whole:
            raise ValueError(f"data: {path} is a table; --whole is for plain text")
        return _columns(str(path), _TABLES[suffix](path), column, label, pair)
    if suffix == ".json":
        raise ValueError(f"data: {path} is JSON; write one object per line and name the file .jsonl")
    wanted = {"column": column, "label column": label, "second column": pair}
    if asked := next((f"{what} {name!r}" for what, name in wanted.items() if name is not None), None):
        raise ValueError(f"data: {path} is plain text and has no {asked}; use .jsonl, .csv, .tsv or .parquet")
    text = decoded(path)
    if whole:
        return [("", text, None, "")]
    return [("", line.strip(), None, "") for line in text.splitlines() if line.strip()]


def _columns(
    path: str, table: _Table, column: str | None, label: str | None, pair: str | None
) -> Iterable[tuple[str, str, Any, str]]:
    names = list(dict.fromkeys(name for _, row in table for name in row))
    found = column or ("text" if "text" in names or len(names) != 1 else names[0])
    for what, name in (("column", found), ("label column", label), ("column", pair)):
        if name is not None and table and name not in names:
            raise ValueError(f"data: {path} has no {what} {shown(name)}; it has {_some(names)}")
    for place, row in table:
        for name in (found, pair):
            text = None if name is None else row.get(name)
            if text is not None and not isinstance(text, str):
                raise ValueError(f"data: {path}, {place}: {name!r} is {type(text).__name__}, not a text")
        if label is not None and row.get(label) is None:
            raise ValueError(f"data: {path}, {place} has no {label!r}")
        yield place, row.get(found) or "", row.get(label) if label is not None else None, row.get(pair or "") or ""


def _some(names: Sequence[str]) -> str:
    return ", ".join([*map(shown, names[:20]), *(["..."] if len(names) > 20 else [])]) or "no columns"


def _suffix(path: str | Path) -> str:
    """Return the suffix that names the format, without that of the compression."""
    if str(path) == "-":
        return ""
    last = Path(path).suffix.lower()
    return Path(Path(path).stem).suffix.lower() if last in _UNPACK else last


def _unxz(raw: bytes) -> bytes:
    import lzma  # not every Python was built with it

    try:
        with lzma.LZMAFile(io.BytesIO(raw)) as file:
            return file.read(UNPACKED + 1)
    except (EOFError, lzma.LZMAError) as error:
        raise ValueError(error) from None


def _ungzip(raw: bytes) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
            return file.read(UNPACKED + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(error) from None


UNPACKED = 2**31  #: most bytes that are unpacked, since a small file can be made to expand to any size
_UNPACK: dict[str, Callable[[bytes], bytes]] = {".xz": _unxz, ".gz": _ungzip}


def decoded(path: str | Path) -> str:
    """Return the text of a file, unpacked where its name says so, or raise a ValueError of one line."""
    try:
        raw = sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes()
    except FileNotFoundError:
        raise ValueError(f"data: there is no file {path}") from None
    except IsADirectoryError:
        raise ValueError(f"data: {path} is a folder; name the files in it") from None
    except OSError as error:
        raise ValueError(f"data: {path} cannot be read: {error.strerror}") from None
    unpack = None if str(path) == "-" else _UNPACK.get(Path(path).suffix.lower())
    if unpack is not None:
        try:
            raw = unpack(raw)
        except ValueError as error:
            raise ValueError(f"data: {path} cannot be unpacked: {error}") from None
        if len(raw) > UNPACKED:
            raise ValueError(f"data: {path} holds more than {UNPACKED} bytes; unpack it first")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"data: {path} is not UTF-8 (byte {error.start}); convert it first") from None


def _json_lines(path: str | Path) -> _Table:
    table: _Table = []
    for number, line in enumerate(decoded(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = parse(line)
        except ValueError as error:
            raise ValueError(f"data: {path}, line {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"data: {path}, line {number} is {type(row).__name__}; each line must be an object")
        if bad := next((name for name, text in row.items() if isinstance(text, str) and has_surrogate(text)), None):
            raise ValueError(
                f"data: {path}, line {number}: {shown(bad)} has half of a surrogate pair, such as \\ud800, which is "
                "not a character; leave it out"
            )
        table.append((f"line {number}", row))
    return table


def _separated(delimiter: str) -> Callable[[str | Path], _Table]:
    def rows(path: str | Path) -> _Table:
        # A quotation mark in a TSV file is part of the text.
        quoting: Any = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
        lines = csv.DictReader(io.StringIO(decoded(path)), delimiter=delimiter, quoting=quoting, strict=True)
        table: _Table = []
        usual = csv.field_size_limit(2**31 - 1)  # long documents
        try:
            for row in lines:
                if None in row:
                    raise ValueError(
                        f"data: {path}, line {lines.line_num} has more cells than the header has names; quote a text "
                        "that holds the separator"
                    )
                table.append((f"line {lines.line_num}", row))
            return table
        except csv.Error as error:
            raise ValueError(f"data: {path}, line {lines.line_num}: {error}") from None
        finally:
            csv.field_size_limit(usual)

    return rows


def _parquet(path: str | Path) -> _Table:
    if Path(path).suffix.lower() in _UNPACK:
        raise ValueError(f"data: {path} is Parquet in an archive; unpack it first")
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError:
        raise ModuleNotFoundError("Parquet files need pyarrow; run: pip install pyarrow") from None
    try:
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except FileNotFoundError:
        raise ValueError(f"data: there is no file {path}") from None
    except (OSError, ArrowException, ValueError, OverflowError) as error:
        raise ValueError(f"data: {path} cannot be read as Parquet: {first_line(error)}") from None
    return [(f"row {number}", row) for number, row in enumerate(rows, 1)]


_TABLES: dict[str, Callable[[str | Path], _Table]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".csv": _separated(","),
    ".tsv": _separated("\t"),
    ".parquet": _parquet,
}
