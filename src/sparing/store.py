"""Atomic writes, and a store of results between runs.

Everything that sparing writes goes through `write_files`. What it reads back carries a checksum, so that a file that
was damaged on the disk is refused or measured again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparing.from_json import parse

Cell = Mapping[str, Any]  #: the key of a measurement: a JSON object with everything that its result depends on
Check = Callable[[Cell, Any], object]  #: raises ValueError if a kept result does not belong to this cell
FORMAT = 2  #: version of the files of kept results; those of format 1 had no checksum and are measured again
CHECKSUM = "sha256"  #: the entry of a JSON object that holds the checksum of all others
_SEAL = b"\nsparing sha256 "  # before the checksum at the end of a file that is not JSON
_STALE = 3600  # seconds after which a temporary file was left behind by a process that was killed


class Damaged(ValueError):
    """Raised for content that differs from what was written."""


class StoreWarning(UserWarning):
    """Warns that results are not kept, or that they are measured again."""


def write_files(contents: Mapping[Path, str | bytes], *, durable: bool = True) -> None:
    """Write all files or none, atomically: under temporary names, which are renamed when all files are complete.

    contents: path -> text, which is written as UTF-8, or bytes. A path that is a symbolic link is followed.
    durable: wait until the content is on the disk, and remove temporary files that killed processes left. Without it,
        a power failure may leave an empty file.
    """
    written: list[tuple[str, Path]] = []
    path = Path()
    try:
        for path, content in contents.items():
            target = path.resolve()
            if durable:
                _remove_stale(target.parent, re.escape(target.name))
            handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
            written.append((name, target))
            with os.fdopen(handle, "wb") as file:
                # A lone surrogate, as a file name that is not UTF-8 has, becomes "?".
                file.write(content.encode(errors="replace") if isinstance(content, str) else content)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.chmod(name, 0o666 & ~_umask())
        for name, path in written:
            os.replace(name, path)
    except BaseException as error:
        for name, _ in written:
            with suppress(OSError):
                os.unlink(name)
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def _remove_stale(folder: Path, names: str) -> None:
    """Remove old temporary files, which killed processes left; a recent one may be in use.

    names: a pattern for the names of the files that they were written for. Other files are not touched.
    """
    pattern = re.compile(rf"\.{names}\.\w+\.part")
    with suppress(OSError):
        for entry in os.scandir(folder):
            if pattern.fullmatch(entry.name):
                with suppress(OSError):
                    if time.time() - entry.stat().st_mtime > _STALE:
                        os.unlink(entry.path)


def readable(name: str) -> str:
    """Return the name of a file as text, also where the locale could not decode it."""
    return os.fsencode(name).decode("utf-8", "replace")


def _umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now


def without_nan(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {name: without_nan(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def add_checksum(held: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with a checksum of its entries.

    The checksum stands first, before an entry that every reader needs, such as the format. So lost bytes cannot remove
    the checksum and part of the content and leave what looks like a file that was written by hand.
    """
    return {CHECKSUM: _digest(held), **held}


def verify_checksum(held: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object without its checksum, or raise `Damaged`. An object that has none is returned as it is."""
    rest = {name: value for name, value in held.items() if name != CHECKSUM}
    if CHECKSUM in held and held[CHECKSUM] != _digest(rest):
        raise Damaged(
            f"the checksum does not match: the content was damaged or edited; restore it, or remove the entry "
            f"{CHECKSUM!r} to take it as it is"
        )
    return rest


def _digest(held: Any) -> str:
    """Return a checksum of what JSON makes of an object: it does not depend on white space or the order of names."""
    plain = json.loads(json.dumps(held))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def seal(content: bytes) -> bytes:
    """Return bytes with their checksum at the end."""
    return content + _SEAL + hashlib.sha256(content).hexdigest().encode() + b"\n"


def unseal(content: bytes) -> bytes:
    """Return sealed bytes without their checksum, or raise `Damaged`. Bytes without one are returned as they are."""
    rest, mark, checksum = content.rpartition(_SEAL)
    if not mark or len(checksum) > 65:
        return content
    if checksum != hashlib.sha256(rest).hexdigest().encode() + b"\n":
        raise Damaged("the checksum does not match")
    return rest


class Store:
    """Keep results in a folder: a file with a checksum for each cell. Without a folder nothing is kept.

    optional: warn instead of raising where the folder cannot be written to. A result that cannot be kept later, as on a
        full disk, is always a warning, since the result itself is good. Each warning is given once.
    again: returns whether a cell is measured again, though its result is kept from an earlier run.
    """

    def __init__(
        self,
        folder: str | Path | None,
        *,
        optional: bool = False,
        again: Callable[[Cell], bool] = lambda cell: False,
    ) -> None:
        self.folder = None if folder is None else Path(folder).expanduser()
        self.optional, self.again = optional, again
        self._told: set[str] = set()
        self._new: set[Path] = set()  # of this run

    @classmethod
    def of(cls, cache: str | Path | Store | None) -> Store:
        """Return a store as it is, or make one from a folder."""
        return cache if isinstance(cache, Store) else cls(cache)

    def prepare(self) -> None:
        """Create the folder and try to write to it, so that an error comes before the first measurement."""
        if self.folder is None:
            return
        try:
            if self.folder.exists() and not self.folder.is_dir():
                raise ValueError(f"cache: {self.folder} is not a folder")
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder) as file:
                file.write(bytes(4096))
        except (OSError, ValueError) as error:
            why = str(error) if isinstance(error, ValueError) else f"cache: {self._cannot(error)}"
            if not self.optional:
                raise ValueError(f"{why}; name another folder") from None
            self._tell("keep", f"results are not kept: {why.removeprefix('cache: ')}; name a folder with --cache")
            self.folder = self.folder if self.folder.is_dir() else None
        else:
            _remove_stale(self.folder, r"[0-9a-f]{32}\.json")

    def get(self, cell: Cell, check: Check = lambda cell, result: None) -> Any:
        """Return the kept result of a cell, or None if there is none, or if it is damaged or fails the check."""
        if self.folder is None:
            return None
        path = self._path(cell)
        if path not in self._new and self.again(cell):
            return None
        try:
            held = parse(path.read_bytes().decode())
            if not isinstance(held, dict) or held.get("format") != FORMAT or CHECKSUM not in held:
                raise Damaged
            held = verify_checksum(held)
            if held.get("cell") != json.loads(_plain(cell)) or "result" not in held:
                raise Damaged
            check(cell, held["result"])
            return held["result"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            with suppress(OSError):
                path.rmdir()  # an empty folder is in the way of the new result; one that is not empty stays
            if path.is_dir():
                self._tell_folder(path)
            else:
                self._tell("damaged", f"{path} is damaged or of an older version; such results are measured again")
            return None

    def put(self, cell: Cell, result: Any) -> None:
        """Keep a result."""
        if self.folder is None:
            return
        path = self._path(cell)
        self._new.add(path)
        held = add_checksum({"format": FORMAT, "cell": cell, "result": result})
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_files({path: json.dumps(held, indent=1)}, durable=False)
        except OSError as error:
            if path.is_dir():
                self._tell_folder(path)
            else:
                self._tell("keep", f"results are not kept: {self._cannot(error)}")

    def _path(self, cell: Cell) -> Path:
        assert self.folder is not None
        return self.folder / f"{hashlib.sha256(_plain(cell).encode()).hexdigest()[:32]}.json"

    def _cannot(self, error: OSError) -> str:
        return f"{self.folder} cannot be written to ({error.strerror})"

    def _tell_folder(self, path: Path) -> None:
        self._tell(
            str(path),
            f"{path} is a folder where a kept result must be a file, so that this result is measured at each run; move "
            "or delete the folder",
        )

    def _tell(self, what: str, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            warnings.warn(text, StoreWarning, stacklevel=3)


def _plain(cell: Cell) -> str:
    return json.dumps(cell, sort_keys=True)


Place = Path | int  #: a file, a folder with everything in it, or a file descriptor
_Key = tuple[int, int]  # device and inode, which all names of a file share


def refuse_overwriting(
    inputs: Iterable[tuple[str, Place]],
    outputs: Iterable[tuple[str, Place]],
    folders: Iterable[tuple[str, Path]] = (),
) -> None:
    """Raise where an output is also an input, or where two outputs are the same file; links are followed.

    inputs, outputs: pairs of an argument's name and its place. Everything in a folder of `outputs` is replaced.
    folders: where outputs are written. Such a folder may be inside one that is read, as runs inside their data, but it
        may not be the same folder.
    """
    written: dict[_Key | Path, tuple[str, Path | None]] = {}
    for name, place in outputs:
        found: dict[_Key | Path, Path | None] = {key: path for path, key in _files(place)}
        if not found and isinstance(place, Path):
            found = {place.resolve(): place}
        for key, path in found.items():
            if key in written:
                other, as_path = written[key]
                raise ValueError(
                    f"{name}{_given(path)} and {other}{_given(as_path)} would write the same file; name another for "
                    "one of them"
                )
            written[key] = (name, path)
    ours = {_key(folder): (name, folder) for name, folder in folders if folder.is_dir()}
    exists = any(isinstance(key, tuple) for key in written)
    for name, place in inputs:
        if (same := ours.get(_key(place))) is not None:
            other, as_path = same
            raise ValueError(f"{other}={as_path} is the folder that {name} reads; name another folder for {other}")
        for path, key in _files(place, without=ours) if exists else ():
            if key in written:
                other, as_path = written[key]
                read = "the file on standard input" if path is None else path
                raise ValueError(
                    f"{other}{_given(as_path)} would overwrite {read}, which {name} reads; name another file for "
                    f"{other}"
                )


def _given(path: Path | None) -> str:
    return "" if path is None else f"={path}"


def _key(place: Place) -> _Key | None:
    try:
        found = os.stat(place)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def _files(place: Place, without: Container[_Key | None] = ()) -> Iterator[tuple[Path | None, _Key]]:
    """Yield each existing file of a place with its key; without: keys of folders to skip."""
    key = _key(place)
    if key is None:
        return
    if isinstance(place, int):
        if os.path.isfile(place):
            yield None, key
    elif not place.is_dir():
        yield place, key
    else:
        seen = set()
        for folder, folders, names in os.walk(place, followlinks=True):
            key = _key(Path(folder))
            if key in seen or key in without:  # a link to a folder above
                folders.clear()
                continue
            seen.add(key)
            for name in names:
                if (key := _key(path := Path(folder) / name)) is not None:
                    yield path, key
