"""Write a benchmark as JSON with a plot, and read it."""

from __future__ import annotations

import json
from pathlib import Path

from sparing.from_json import parse
from sparing.report.bench_plot import plot
from sparing.store import add_checksum, write_files
from sparing.workbench.benchmark.results import Bench


def write(bench: Bench, result: Path, picture: Path) -> tuple[list[Path], str]:
    """Write the figures and a plot, all or none; return the files, and why there is no plot, or ""."""
    contents: dict[Path, str | bytes] = {result: to_json(bench)}
    why = ""
    try:
        contents[picture] = plot(bench, picture.suffix.lstrip("."))
    except ModuleNotFoundError as error:
        why = str(error)
    for path in contents:
        path.parent.mkdir(parents=True, exist_ok=True)
    write_files(contents)
    return list(contents), why


def to_json(bench: Bench) -> str:
    """Return all figures, with settings and machine; `read_json` gives back an equal object."""
    return json.dumps(add_checksum(bench.as_dict()), indent=1, allow_nan=False) + "\n"


def read_json(path: Path) -> Bench:
    """Return the run that a file holds."""
    try:
        return Bench.from_dict(parse(path.read_bytes().decode()))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from None
