"""Options and output that several commands share."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparing.cli.files import STANDARD_OUTPUT, reads

if TYPE_CHECKING:
    from sparing.documents import Documents
    from sparing.report.terminal import Terminal
    from sparing.store import Store
    from sparing.workbench.comparison.verdict import Comparison

COMPARE_FILES = ("compare.json", "compare.html")  #: in the folder that --out names
_OUTPUTS = ("out", "json", "html")


def add_subject(parser: argparse.ArgumentParser) -> None:
    """Declare the options of every measurement of a model: the model, its documents, methods, and the cache."""
    reads(
        parser, "model", nargs="?", default="minilm",
        help="local folder, name on the Hugging Face hub, or preset: minilm (default), smollm2",
    )  # fmt: skip
    reads(
        parser, "--data", nargs="+", metavar="FILE",
        help="documents: plain text with one per line, .jsonl, .csv, .tsv (each also as .xz or .gz), .parquet, or - "
        "for standard input (default: Python's help topics)",
    )  # fmt: skip
    parser.add_argument("--column", metavar="NAME", help="column of a table that holds the text (default: text)")
    parser.add_argument("--whole", action="store_true", help="read each plain text file as one document")
    add_methods(parser, "every training-free method, with a few budgets")
    parser.add_argument(
        "--length", type=int, metavar="N", help="cut documents to N tokens (default: 512; language models: 1024)"
    )
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto",
        help="type of the model's weights (default: auto, that of its checkpoint)",
    )  # fmt: skip
    parser.add_argument(
        "--extend-positions", action="store_true",
        help="repeat learned position embeddings if the model has fewer than --length",
    )  # fmt: skip
    add_cache(parser)


def add_methods(parser: argparse.ArgumentParser, default: str) -> None:
    """Declare the options that name methods, the user's own among them."""
    parser.add_argument(
        "--methods", metavar="SPECS",
        help=f"comma-separated methods with settings, such as 'window(size=64),nystrom' (default: {default})",
    )  # fmt: skip
    add_import(parser)


def add_import(parser: argparse.ArgumentParser) -> None:
    """Declare the option that imports methods of the user's own."""
    parser.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="MODULE",
        help="import a Python file or module that defines methods, from the current folder or Python's path; "
        "repeatable",
    )  # fmt: skip


def import_modules(options: argparse.Namespace) -> None:
    """Import what --import names; an error names the option and the module."""
    names = getattr(options, "imports", ())
    if names and not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    for name in names:
        module = name
        if name.endswith(".py"):
            file = Path(name)
            if not file.is_file():
                raise ValueError(f"--import {name}: there is no such file")
            module = file.stem
            known = getattr(sys.modules.get(module), "__file__", None)
            if module in sys.modules and (known is None or Path(known).resolve() != file.resolve()):
                raise ValueError(f"--import {name}: another module is named {module}; rename the file")
            sys.path.insert(0, str(file.resolve().parent))
        try:
            import_module(module)
        except Exception as error:  # code of the user's
            missing = isinstance(error, ModuleNotFoundError) and error.name == module
            why = (
                "there is no such module in the current folder or on Python's path"
                if missing
                else f"{type(error).__name__}: {error}"
            )
            raise ValueError(f"--import {name}: {why}") from error


class _Renamed(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, new: str) -> None:
        super().__init__(option_strings, dest, nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        self.new = new

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        parser.error(f"{option} is now {self.new}")


def renamed(parser: argparse.ArgumentParser, *old: str, new: str) -> None:
    """Refuse old names of an option with an error that says the new one."""
    parser.add_argument(*old, action=_Renamed, new=new)


def add_cache(parser: argparse.ArgumentParser) -> None:
    """Declare where measurements are kept."""
    parser.add_argument(
        "--cache", metavar="FOLDER",
        help="keep each measurement in FOLDER, so that a stopped run resumes (default: sparing in the user's cache)",
    )  # fmt: skip
    parser.add_argument("--no-cache", action="store_true", help="measure everything again, and keep nothing")
    parser.add_argument(
        "--again", choices=("times", "all"), help="measure times, or everything, again, and keep the new results"
    )


@contextmanager
def needs_cli() -> Iterator[None]:
    """Name the extra that installs a module which cannot be imported."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error.name} is missing; run: pip install 'sparing[cli]'") from None


def console_of(*, stderr: bool = False) -> Terminal:
    """Return a console as wide as the terminal, of at least 80 columns; of 100 where there is none and no COLUMNS."""
    with needs_cli():
        from sparing.report.terminal import Terminal
    found = Terminal(stderr=stderr)
    known = found.is_terminal or os.environ.get("COLUMNS", "").isdecimal()
    return Terminal(width=max(80, found.width) if known else 100, stderr=stderr)


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Declare the option that leaves only the result."""
    parser.add_argument("--quiet", action="store_true", help="print the result alone: no progress, no names of files")


@contextmanager
def progress_bar(*, quiet: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar on standard error, log lines if that is no terminal; silence the bars of transformers."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # processes inherit this
    with needs_cli():
        from rich.progress import TimeElapsedColumn, TimeRemainingColumn
        from transformers.utils import logging

        from sparing.report.terminal import Terminal, progress
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    console = Terminal(stderr=True)
    more = (TimeElapsedColumn(), TimeRemainingColumn())
    with progress(console, "loading the model", *more, quiet=quiet) as tell:
        yield tell


def documents_of(options: argparse.Namespace) -> Documents | None:
    """Return the documents that --data names, or None for the default ones."""
    from sparing import documents

    if options.data:
        label, pair = getattr(options, "label", None), getattr(options, "pair", None)
        return documents.read(
            options.data, column=options.column, label=label, pair=pair, whole=getattr(options, "whole", False)
        )
    for name in ("column", "label", "pair", "whole"):
        if getattr(options, name, None):
            raise ValueError(f"--{name} is for files: name one with --data")
    return None


def show_comparison(found: Comparison, options: argparse.Namespace, *, console: Terminal) -> None:
    """Print a comparison, and write the files that --out, --json and --html name: all or none.

    `--json -` writes to standard output, in place of the tables.
    """
    from sparing.report.table import show
    from sparing.store import write_files

    out, json, html = (None if (name := getattr(options, each, None)) is None else Path(name) for each in _OUTPUTS)
    is_piped = getattr(options, "json", None) == STANDARD_OUTPUT
    texts = [] if json is None or is_piped else [json]
    pages = [] if html is None else [html]
    if out is not None:
        texts.append(out / COMPARE_FILES[0])
        pages.append(out / COMPARE_FILES[1])
    contents: dict[Path, str | bytes] = dict.fromkeys(texts, found.to_json())
    try:
        if pages:
            from sparing.report.page import page

            contents |= dict.fromkeys(pages, page(found))
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        write_files(contents)
    finally:  # a full disk is no reason to hide what was measured
        if is_piped:
            sys.stdout.write(found.to_json() + "\n")
        else:
            show(found, layers=options.layers, console=console)
    for target in () if getattr(options, "quiet", False) else contents:
        console_of(stderr=True).print(f"wrote {target}", soft_wrap=True)


def cache_of(options: argparse.Namespace) -> Store:
    """Return the store that --cache and --no-cache choose; by default the user's cache, if it can be used."""
    from sparing.store import Store, StoreWarning
    from sparing.workbench.cells import is_time

    anew = {None: lambda cell: False, "times": is_time, "all": lambda cell: True}[options.again]
    if options.no_cache:
        return Store(None)
    if options.cache:
        return Store(options.cache, again=anew)
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return Store((Path(home) if home else Path.home() / ".cache") / "sparing", optional=True, again=anew)
    except RuntimeError:
        warnings.warn("results are not kept: there is no home folder; name a folder with --cache", StoreWarning, 2)
        return Store(None)
