"""`sparing show`: print any JSON file that sparing wrote."""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from sparing.cli.files import reads, writes
from sparing.cli.options import add_import, console_of, show_comparison
from sparing.from_json import parse, read_text
from sparing.report.printable import one_line

if TYPE_CHECKING:
    from sparing.report.kinds import Kind

#: Entry points of this group name a `sparing.report.kinds.Kind`, a kind of JSON that another package writes.
GROUP = "sparing.shown"


def add(commands: Any) -> None:
    """Declare the options."""
    parser = commands.add_parser(
        "show", help="print a JSON file that any of the other commands wrote",
        description="Print JSON files that the other commands wrote. Of several files the answers come first.",
    )  # fmt: skip
    parser.set_defaults(run=run)
    reads(parser, "file", nargs="+", metavar="FILE", help="comparison, plan, recipe, benchmark, study or training run")
    parser.add_argument("--layers", action="store_true", help="comparison: also print the errors of each layer")
    parser.add_argument(
        "--targets", action="store_true", help="benchmark: also print the speeds that developers aim at"
    )
    add_import(parser)
    writes(parser, "--html", metavar="FILE", help="comparison: also write a page that needs no network")


def run(options: argparse.Namespace) -> int:
    """Recognise each file by its content, check it, and print it."""
    console = console_of()
    from sparing.report import bench
    from sparing.workbench.benchmark.results import Bench
    from sparing.workbench.comparison.verdict import Comparison

    if options.html and len(options.file) > 1:
        raise ValueError(f"--html is for one file, and there are {len(options.file)}")
    shown = [_read(path, options) for path in options.file]
    for kind, found in shown if len(shown) > 1 else ():
        if answer := getattr(found, "headline", getattr(found, "reason", None)):
            console.print(f"{kind.name} of {found.model}: {answer}", style="bold")
    for path, (kind, found) in zip(options.file, shown, strict=True):
        if len(shown) > 1:
            console.print(f"\n{path}")
        try:
            if isinstance(found, Comparison):
                show_comparison(found, options, console=console)
            elif isinstance(found, Bench):
                bench.show(found, console=console, targets=options.targets)
            else:
                kind.show(found, console)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from None
    return 0


def _read(path: str, options: argparse.Namespace) -> tuple[Kind, Any]:
    """Return the content of a file, and its kind."""
    try:
        held = parse(read_text(path, "file", "as the commands of sparing write it"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    try:
        kind = _kind_of(held)
        for option, wanted in (("layers", "comparison"), ("html", "comparison"), ("targets", "benchmark")):
            if getattr(options, option) and kind.name != wanted:
                raise ValueError(f"--{option} is for {wanted}s, and this is a {kind.name}")
        return kind, kind.read(held)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None


def _kind_of(held: Any) -> Kind:
    """Return the kind of a parsed JSON file."""
    from sparing.report.kinds import KINDS

    if not isinstance(held, dict):
        raise ValueError("the files that sparing show opens hold a JSON object, and this is something else")
    known = [*KINDS, *_others()]
    for kind in known:
        if all(entry in held for entry in kind.entries):
            return kind
    names = ", ".join(kind.name for kind in known)
    raise ValueError(f"this JSON is not of a kind that sparing show opens: {names}")


def _others() -> list[Kind]:
    """Return the kinds of other packages. One that cannot be loaded stops no other."""
    found = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            found.append(entry.load())
        except Exception as error:  # code of another package
            said = f"sparing: files of {entry.name!r} ({entry.value}) cannot be shown: {type(error).__name__}: {error}"
            sys.stderr.write(one_line(said) + "\n")
    return found
