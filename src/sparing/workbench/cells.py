"""Long work in pieces: what was measured is kept, so that a run that was stopped resumes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sparing.store import Cell, Store


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
