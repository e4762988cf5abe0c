"""Long measurements in cells: each result is kept, so that a run that was stopped resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sparing.store import Cell, Check, Store
from sparing.workbench import own_methods


def measured(
    cells: Sequence[Cell],
    work: Callable[[Cell], Any],
    store: Store,
    *,
    check: Check = lambda cell, result: None,
    keep: Callable[[Any], bool] = lambda result: True,
    jobs: int = 1,
    backend: str | None = None,
    done: Callable[[Cell, bool], None] = lambda cell, again: None,
) -> list[Any]:
    """Return the results of all cells, in their order. Each is kept as soon as it is measured.

    keep: returns False for a result that should be measured again in the next run, such as a disturbed time.
    check: raises ValueError for a kept result that `work` would not return; its cell is measured again.
    jobs, backend: as in joblib. The workers of a cluster do the work where `backend` names one ("dask", "ray").
    done: is called for each finished cell, and told whether its result was kept from an earlier run.
    """
    keys = [own_methods.with_code(cell) for cell in cells]
    found = {number: store.get(key, check) for number, key in enumerate(keys)}
    for number, cell in enumerate(cells):
        if found[number] is not None:
            done(cell, True)
    missing = [number for number in range(len(cells)) if found[number] is None]
    for number, result in _results(missing, [cells[i] for i in missing], work, jobs, backend):
        if keep(result):
            store.put(keys[number], result)
        found[number] = result
        done(cells[number], False)
    return [json.loads(json.dumps(found[number])) for number in range(len(cells))]


def is_time(cell: Cell) -> bool:
    """Return whether the result of a cell holds times, which depend on the machine."""
    return "machine" in cell


def is_refusal(result: Any) -> bool:
    """Return whether the result of a cell says that its method is refused, and why."""
    return isinstance(result, dict) and result.keys() == {"refused"} and isinstance(result["refused"], str)


def _results(
    numbers: Sequence[int], cells: Sequence[Cell], work: Callable[[Cell], Any], jobs: int, backend: str | None
) -> Iterator[tuple[int, Any]]:
    if not cells or (jobs == 1 and backend is None):
        for number, cell in zip(numbers, cells, strict=True):
            yield number, work(cell)
        return
    from joblib import Parallel, delayed, parallel_config

    # The number of a cluster's workers is not ours to set.
    count = -1 if backend in ("dask", "ray") else jobs
    with parallel_config(backend=backend or "loky", n_jobs=count), _safe_path():
        yield from Parallel(return_as="generator_unordered")(
            delayed(_numbered)(number, work, cell, own_methods.definitions())
            for number, cell in zip(numbers, cells, strict=True)
        )


@contextmanager
def _safe_path() -> Iterator[None]:
    """Keep Python from looking for modules in the current folder first when a worker starts.

    There a file of the user such as `json.py` would take the place of Python's. Workers get our path afterwards.
    """
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def _numbered(number: int, work: Callable[[Cell], Any], cell: Cell, own: own_methods.Definitions) -> tuple[int, Any]:
    own_methods.learn(own)
    return number, work(cell)
