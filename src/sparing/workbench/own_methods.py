"""Methods that are defined outside sparing: known to worker processes, and told apart in kept results."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from contextlib import suppress
from importlib import import_module
from typing import NamedTuple

from sparing.contract import Method, list_methods, register_method
from sparing.store import Cell

_MAIN = "__main__"  # the module of a script or a notebook, which a worker cannot import


class Definitions(NamedTuple):
    """What a worker needs to know the same methods. joblib pickles the classes of a script with their code."""

    modules: tuple[str, ...]
    path: tuple[str, ...]  #: `sys.path` of the process that started the worker
    classes: tuple[type[Method], ...]  #: of a script or a notebook


def definitions() -> Definitions:
    """Return what defines the methods that are known here."""
    own = _own().values()
    names = {method.__module__ for method in own} - {_MAIN}
    classes = tuple(method for method in own if method.__module__ == _MAIN)
    return Definitions(tuple(sorted(names)), tuple(sys.path), classes)


def learn(given: Definitions) -> None:
    """Make methods known in a worker.

    A module that cannot be imported is left out: `sparing.method` names the methods that are missing.
    """
    if any(name not in sys.modules for name in given.modules):
        sys.path += [folder for folder in given.path if folder not in sys.path]
    for name in given.modules:
        with suppress(ImportError):
            import_module(name)
    for method in given.classes:
        register_method(method)


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
    """Return a checksum of the module that defines a method, or of its compiled code where there is no source."""
    try:
        source = inspect.getsource(sys.modules[method.__module__]).encode()
    except (KeyError, OSError, TypeError):
        try:
            from joblib.externals import cloudpickle
        except ModuleNotFoundError:
            return None
        source = cloudpickle.dumps(method)
    return hashlib.sha256(source).hexdigest()[:16]
