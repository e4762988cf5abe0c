"""Declare the files that a command reads and writes, and check them before it runs.

`reads` declares an option that names a file to read, `writes` one that names a file or a folder to write. No file that
is written may be one that is read, or be written twice, whatever its name.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from sparing.store import Place, refuse_overwriting

STANDARD_OUTPUT = "-"  #: as the name of a file that is written

Names = Callable[[argparse.Namespace], Iterable[str]]


class _Output(NamedTuple):
    flag: str
    dest: str
    names: Names | None  #: of the files in it, where the option names a folder
    piped: bool


def reads(parser: argparse.ArgumentParser, *flags: str, **options: object) -> None:
    """Declare an option that names files or folders to read; "-" is standard input."""
    action = parser.add_argument(*flags, **options)  # type: ignore[arg-type]
    before = parser.get_default("inputs") or ()
    parser.set_defaults(inputs=(*before, (flags[-1], action.dest)))


def writes(
    parser: argparse.ArgumentParser, *flags: str, names: Names | None = None, piped: bool = False, **options: object
) -> None:
    """Declare an option that names a file to write.

    names: of the files, where it names a folder for them. piped: whether "-" is standard output, and not a file.
    """
    action = parser.add_argument(*flags, **options)  # type: ignore[arg-type]
    before = parser.get_default("outputs") or ()
    parser.set_defaults(outputs=(*before, _Output(flags[-1], action.dest, names, piped)))


def check_files(options: argparse.Namespace) -> None:
    """Raise if an output cannot be written, or would overwrite an input."""
    if getattr(options, "list", False):
        return
    written: list[tuple[str, Place]] = []
    folders: list[tuple[str, Path]] = []
    for output in getattr(options, "outputs", ()):
        given = getattr(options, output.dest)
        if given is None or (output.piped and given == STANDARD_OUTPUT):
            continue
        if given == STANDARD_OUTPUT:
            raise ValueError(f"{output.flag}=-: it cannot be written to standard output; name a file or a folder")
        if output.names is None:
            _check_file(output.flag, given)
            written.append((output.flag, Path(given)))
        else:
            _check_folder(output.flag, Path(given))
            folders.append((output.flag, Path(given)))
            written += [(output.flag, Path(given) / name) for name in output.names(options)]
    if written:
        refuse_overwriting(_read(options), [*written, ("standard output", 1)], folders)


def _read(options: argparse.Namespace) -> Iterator[tuple[str, Place]]:
    for flag, dest in getattr(options, "inputs", ()):
        given = getattr(options, dest)
        for path in [given] if isinstance(given, str) else given or ():
            yield flag, 0 if path == "-" else Path(path).expanduser()


def _check_file(flag: str, path: str) -> None:
    target = Path(path)
    folder = target.resolve().parent
    if not folder.is_dir():
        raise ValueError(f"{flag}={path}: there is no folder {folder}")
    if (target.exists() and not target.is_file()) or not os.access(folder, os.W_OK):
        raise ValueError(f"{flag}={path} cannot be written")


def _check_folder(flag: str, folder: Path) -> None:
    """Raise if a folder cannot be written to; leave nothing behind."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{flag}={folder} is a file; name a folder")
    parent = next((p for p in (folder, *folder.absolute().parents) if p.exists()), folder)
    try:
        with TemporaryDirectory(dir=parent):
            pass
    except OSError as error:
        raise ValueError(f"{flag}={folder} cannot be written to ({error.strerror}); name another folder") from None
