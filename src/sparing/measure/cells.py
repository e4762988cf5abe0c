"""Long work in pieces: what was measured is kept, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

Cell = Mapping[str, Any]  #: what tells a measurement from all others; JSON


class Store:
    """Results in a folder, a file for each cell. None: nothing is kept."""

    def __init__(self, folder: str | Path | None) -> None:
        self.folder = None if folder is None else Path(folder).expanduser()

    def get(self, cell: Cell) -> Any:
        """What was measured; None if nothing was, or if the file cannot be read."""
        if self.folder is None:
            return None
        try:
            held = json.loads(self._path(cell).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return held["result"] if isinstance(held, dict) and held.get("cell") == json.loads(_plain(cell)) else None

    def prepare(self) -> None:
        """Make the folder; an error now is better than one after the first result."""
        if self.folder is None:
            return
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"cache: {self.folder} is not a folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        if not os.access(self.folder, os.W_OK):
            raise ValueError(f"cache: {self.folder} cannot be written to")

    def put(self, cell: Cell, result: Any) -> None:
        """Keep a result: under a temporary name first, so that no half of it is ever found."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._path(cell), json.dumps({"cell": cell, "result": result}, indent=1))

    def _path(self, cell: Cell) -> Path:
        assert self.folder is not None
        return self.folder / f"{hashlib.sha256(_plain(cell).encode()).hexdigest()[:32]}.json"


def _plain(cell: Cell) -> str:
    return json.dumps(cell, sort_keys=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file all at once, or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(name)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def _umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now


def measured(
    cells: Sequence[Cell],
    work: Callable[[Cell], Any],
    store: Store,
    *,
    jobs: int = 1,
    backend: str | None = None,
    done: Callable[[Cell, bool], None] = lambda cell, again: None,
) -> list[Any]:
    """The results of all cells, in their order; each is kept as soon as it is there.

    jobs, backend: of joblib. Where `backend` names a cluster that joblib knows ("dask", "ray"), its workers do the
    work. done: is told of every cell that is finished, and whether it was known from before.
    """
    found = {number: store.get(cell) for number, cell in enumerate(cells)}
    for number, cell in enumerate(cells):
        if found[number] is not None:
            done(cell, True)
    missing = [number for number in range(len(cells)) if found[number] is None]
    for number, result in _results(missing, [cells[i] for i in missing], work, jobs, backend):
        store.put(cells[number], result)
        found[number] = result
        done(cells[number], False)
    return [json.loads(json.dumps(found[number])) for number in range(len(cells))]


def _results(
    numbers: Sequence[int], cells: Sequence[Cell], work: Callable[[Cell], Any], jobs: int, backend: str | None
) -> Iterator[tuple[int, Any]]:
    if not cells or (jobs == 1 and backend is None):
        for number, cell in zip(numbers, cells, strict=True):
            yield number, work(cell)
        return
    from joblib import Parallel, delayed, parallel_config

    # A cluster has as many workers as it has.
    with parallel_config(backend=backend or "loky", n_jobs=-1 if backend in ("dask", "ray") else jobs):
        yield from Parallel(return_as="generator_unordered")(
            delayed(_numbered)(number, work, cell) for number, cell in zip(numbers, cells, strict=True)
        )


def _numbered(number: int, work: Callable[[Cell], Any], cell: Cell) -> tuple[int, Any]:
    return number, work(cell)
