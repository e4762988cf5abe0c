"""What several commands need."""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sparing.cli.files import reads

if TYPE_CHECKING:
    from sparing.documents import Documents
    from sparing.report.terminal import Terminal
    from sparing.store import Store
    from sparing.workbench.comparison.verdict import Comparison


def add_subject(parser: argparse.ArgumentParser) -> None:
    """Declare what every measurement of a model takes: the model, documents, methods, and where results are kept."""
    reads(
        parser, "model", nargs="?", default="minilm",
        help="a folder, a name on the hub, or a preset: minilm (default) or smollm2",
    )  # fmt: skip
    reads(
        parser, "--data", nargs="+", metavar="FILE",
        help="plain text with one document per line, .jsonl, .csv, .tsv (each also as .xz or .gz), .parquet, or - for "
        "standard input; default: Python's help topics",
    )  # fmt: skip
    parser.add_argument("--column", help="of the text, in tables (default: text)")
    parser.add_argument("--whole", action="store_true", help="a plain text file is one document")
    parser.add_argument(
        "--methods",
        help="comma-separated specs, such as 'window(size=64),nystrom'; default: every training-free method",
    )
    parser.add_argument("--length", type=int, help="tokens per document at most; default: 512, language models 1024")
    parser.add_argument(
        "--extend-positions", action="store_true", help="repeat learned positions where --length is more than they are"
    )
    add_cache(parser)


def add_cache(parser: argparse.ArgumentParser) -> None:
    """Declare where results are kept."""
    parser.add_argument(
        "--cache", metavar="FOLDER", help="where results are kept; default: sparing in the user's cache"
    )
    parser.add_argument("--no-cache", action="store_true", help="measure everything anew, and keep nothing")


@contextmanager
def needs_cli() -> Iterator[None]:
    """Around imports that the extra installs."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error.name} is missing; run: pip install 'sparing[cli]'") from None


def console_of(*, stderr: bool = False) -> Terminal:
    """At least 100 columns wide: a number that is cut off is worse than a line that wraps."""
    with needs_cli():
        from sparing.report.terminal import Terminal
    return Terminal(width=max(100, Terminal().width), stderr=stderr)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar with the time left on standard error, where that is a terminal; nothing of transformers beside it."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # processes inherit this
    with needs_cli():
        from rich.progress import TimeElapsedColumn, TimeRemainingColumn
        from transformers.utils import logging

        from sparing.report.terminal import Terminal, progress
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    console = Terminal(stderr=True)
    more = (TimeElapsedColumn(), TimeRemainingColumn())
    with progress(console, "loading the model", *more, disable=not console.is_terminal) as tell:
        yield tell


def documents_of(options: argparse.Namespace) -> Documents | None:
    """What --data names; None for the usual texts."""
    from sparing import documents

    if options.data:
        label, pair = getattr(options, "label", None), getattr(options, "pair", None)
        return documents.read(options.data, column=options.column, label=label, pair=pair, whole=options.whole)
    for name in ("column", "label", "pair", "whole"):
        if getattr(options, name, None):
            raise ValueError(f"--{name} belongs to files: name one with --data")
    return None


def show_comparison(found: Comparison, options: argparse.Namespace, *, console: Terminal) -> None:
    """Print a comparison, and write it where --json and --html say: both files or none."""
    from sparing.report.table import show
    from sparing.store import write_files

    contents: dict[Path, str | bytes] = {}
    if getattr(options, "json", None) is not None:
        contents[Path(options.json)] = found.to_json()
    try:
        if options.html is not None:
            from sparing.report.page import page

            contents[Path(options.html)] = page(found)
        write_files(contents)
    finally:  # a full disk is no reason to hide what was measured
        show(found, layers=options.layers, console=console)
    for target in contents:
        console_of(stderr=True).print(f"wrote {target}", soft_wrap=True)


def cache_of(options: argparse.Namespace) -> Store:
    """Return where results are kept: as the user says, or else in the user's cache, if that can be used."""
    from sparing.store import Store, StoreWarning

    if options.no_cache:
        return Store(None)
    if options.cache:
        return Store(options.cache)
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return Store((Path(home) if home else Path.home() / ".cache") / "sparing", optional=True)
    except RuntimeError:
        warnings.warn("results are not kept: there is no home folder; name a folder with --cache", StoreWarning, 2)
        return Store(None)
