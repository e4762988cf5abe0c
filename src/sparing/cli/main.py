"""The `sparing` command."""

from __future__ import annotations

import argparse
import io
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NoReturn

from sparing.cli import bench, compare, methods, plan, show
from sparing.cli.files import check_files
from sparing.cli.options import import_modules
from sparing.report.printable import one_line
from sparing.store import StoreWarning
from sparing.version import __version__


class _Parser(argparse.ArgumentParser):
    """Escapes the words that argparse repeats in an error: a shell pattern may have put names of files there."""

    def error(self, message: str) -> NoReturn:
        super().error(one_line(message))


#: Entry points of this group add commands: each names a function that takes the sub-parsers of argparse.
GROUP = "sparing.commands"
_OLD_COMMANDS = {"report": "this command is now: sparing show {}"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run one command. An error prints one line and returns status 2."""
    with _replacing(sys.stdout), _replacing(sys.stderr):
        words = sys.argv[1:] if arguments is None else list(arguments)
        if words and words[0] in _OLD_COMMANDS:
            sys.stderr.write(
                one_line(f"sparing {words[0]}: {_OLD_COMMANDS[words[0]].format(' '.join(words[1:]))}") + "\n"
            )
            return 2
        options = parser().parse_args(words)
        with _one_line_warnings(options.command):
            return _run(options)


def _run(options: argparse.Namespace) -> int:
    try:
        check_files(options)
        import_modules(options)
        return options.run(options)
    except Exception as error:
        if options.debug:
            raise
        expected = isinstance(error, ValueError | TypeError | ModuleNotFoundError | OSError | MemoryError)
        said = str(error) if expected else f"{type(error).__name__}: {error} (--debug shows where)"
        sys.stderr.write(f"sparing {options.command}: {one_line(said)}\n")
        return 2
    except KeyboardInterrupt:
        kept = "" if getattr(options, "no_cache", True) else "; what was measured is kept, the same command goes on"
        sys.stderr.write(f"sparing {options.command}: stopped{kept}\n")
        return 130


def parser() -> argparse.ArgumentParser:
    """Return the parser of all sub-commands."""
    found = _Parser(
        prog="sparing", description="Approximate attention, measured on your model, your documents, your machine."
    )
    found.add_argument("--version", action="version", version=f"sparing {__version__}")
    commands = found.add_subparsers(dest="command", required=True)
    for command in (compare, plan, bench, methods, show):
        command.add(commands)
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        _add(entry, commands)
    for each in commands.choices.values():
        each.add_argument("--debug", action="store_true", help="print the traceback of an error")
    return found


def _add(entry: EntryPoint, commands: Any) -> None:
    """Add the command of another package. One that cannot be loaded, or whose name is taken, stops no other."""
    if entry.name in commands.choices:
        reason = "there is one of that name already"
    else:
        try:
            entry.load()(commands)
            return
        except Exception as error:  # code of another package
            reason = f"{type(error).__name__}: {error}"
    sys.stderr.write(one_line(f"sparing: the command {entry.name!r} ({entry.value}) was left out: {reason}") + "\n")


@contextmanager
def _replacing(stream: Any) -> Iterator[None]:
    """Print "?" for a character that a terminal or a pipe cannot show, instead of failing after the work is done."""
    if not isinstance(stream, io.TextIOWrapper):
        yield
        return
    before = stream.errors
    # In the C locale Python's own choice is "surrogateescape", which fails at every letter that is not ASCII.
    stream.reconfigure(errors="replace" if before in ("strict", "surrogateescape") else before)
    try:
        yield
    finally:
        stream.reconfigure(errors=before)


@contextmanager
def _one_line_warnings(command: str) -> Iterator[None]:
    """Print every warning about kept results in one line on standard error."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", StoreWarning)
        usual: Callable[..., None] = warnings.showwarning

        def show(message: Any, category: type[Warning], *where: Any, **options: Any) -> None:
            if issubclass(category, StoreWarning):
                sys.stderr.write(f"sparing {command}: {one_line(str(message))}\n")
            else:
                usual(message, category, *where, **options)

        warnings.showwarning = show
        yield
