"""What several commands need."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparing.measure.verdict import Comparison
    from sparing.report.terminal import Terminal
    from sparing.tasks.documents import Documents


def add_subject(parser: argparse.ArgumentParser) -> None:
    """Declare what every measurement of a model takes: the model, documents, methods, and where results are kept."""
    parser.add_argument(
        "model", nargs="?", default="minilm",
        help="a folder, a name on the hub, or a preset: minilm (default) or smollm2",
    )  # fmt: skip
    parser.add_argument(
        "--data", nargs="+", metavar="FILE",
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
    from sparing.tasks import documents

    if options.data:
        label, pair = getattr(options, "label", None), getattr(options, "pair", None)
        return documents.read(options.data, column=options.column, label=label, pair=pair, whole=options.whole)
    for name in ("column", "label", "pair", "whole"):
        if getattr(options, name, None):
            raise ValueError(f"--{name} belongs to files: name one with --data")
    return None


def targets_of(options: argparse.Namespace, names: Sequence[str]) -> dict[str, Path]:
    """The files that options of these names ask for; an error now is better than one after the work."""
    given = {name: getattr(options, name) for name in names}
    found = {name: _target(f"--{name}", path) for name, path in given.items() if path is not None}
    if len({target.resolve() for target in found.values()}) < len(found):
        raise ValueError(f"{' and '.join(f'--{name}' for name in found)} name the same file")
    return found


def _target(option: str, path: str) -> Path:
    target = Path(path)
    folder = target.resolve().parent
    if not folder.is_dir():
        raise ValueError(f"{option}={path}: there is no folder {folder}")
    if (target.exists() and not target.is_file()) or not os.access(folder, os.W_OK):
        raise ValueError(f"{option}={path} cannot be written")
    return target


def write_files(found: Comparison, targets: dict[str, Path]) -> None:
    """A comparison as JSON or as a page, whole or not at all; says what was written."""
    from sparing.measure.cells import write_whole

    for name, target in targets.items():
        if name == "html":
            from sparing.report.page import page

            write_whole(target.resolve(), page(found))  # what a link leads to, not the link
        else:
            write_whole(target.resolve(), found.to_json())
        console_of(stderr=True).print(f"wrote {target}", soft_wrap=True)


def cache_of(options: argparse.Namespace) -> Path | None:
    """Where measurements are kept: as the user says, or in the user's cache."""
    if options.no_cache:
        return None
    home = os.environ.get("XDG_CACHE_HOME")
    return Path(options.cache) if options.cache else (Path(home) if home else Path.home() / ".cache") / "sparing"
