"""Whole pages of results. `sparing.report` draws them, and registers how, since it imports the results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[[Any], str])

_DRAWN: dict[type, Callable[[Any], str]] = {}


def draws(kind: type) -> Callable[[F], F]:
    """Register a function that returns the page of a result."""

    def register(function: F) -> F:
        _DRAWN[kind] = function
        return function

    return register


def page_of(result: object) -> str:
    """Return the page of a result."""
    if type(result) not in _DRAWN:
        name = type(result).__name__
        raise RuntimeError(
            f"nothing draws a {name} yet; get the class from sparing.{name}, or import sparing.report.page"
        )
    return _DRAWN[type(result)](result)
