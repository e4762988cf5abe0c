"""Methods that are defined outside sparing: known to worker processes, and told apart in kept results."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

from sparing.contract import Method, list_methods
from sparing.store import Cell


def modules() -> tuple[str, ...]:
    """Return the names of the modules that a worker must import to know the same methods."""
    return tuple(sorted({method.__module__ for method in _own().values()} - {"__main__"}))


def import_modules(names: Sequence[str], path: Sequence[str]) -> None:
    """Import modules in a worker; path: `sys.path` of the process that started it.

    A module that cannot be imported is left out: `sparing.method` names the methods that are missing.
    """
    if any(name not in sys.modules for name in names):
        sys.path += [folder for folder in path if folder not in sys.path]
    for name in names:
        with suppress(ImportError):
            import_module(name)


def with_code(cell: Cell) -> Cell:
    """Return the cell with a checksum of the code of each own method that it names: edited code is measured again."""
    own = _own()
    text = json.dumps(cell) if own else ""
    code = {name: _checksum(method) for name, method in own.items() if name in text}
    return {**cell, "code": code} if code else cell


def _own() -> dict[str, type[Method]]:
    ours = ("sparing", "sparing_lab")
    return {name: method for name, method in list_methods().items() if method.__module__.partition(".")[0] not in ours}


def _checksum(method: type[Method]) -> str | None:
    """Return a checksum of the module that defines a method, or None if there is no source."""
    try:
        source = inspect.getsource(sys.modules[method.__module__])
    except (KeyError, OSError, TypeError):
        return None
    return hashlib.sha256(source.encode()).hexdigest()[:16]
