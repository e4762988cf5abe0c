"""Parse untrusted JSON within limits, and build dataclasses from it by their types.

Every reader of JSON goes through here, so that text that is nested too deeply, has integers of thousands of digits or
holds the wrong types raises a ValueError that says what and where. Nothing is evaluated, and no class is named by the
text.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

DEPTH = 64  #: most levels of nested lists and objects; the files that we write have fewer than ten
_LARGEST = 2**63 - 1  # largest integer

T = TypeVar("T")


def parse(text: str) -> Any:
    """Return the value of a JSON text, or raise a ValueError that says in one line what is wrong.

    >>> parse('{"a": [1, 2.5, null]}')
    {'a': [1, 2.5, None]}
    """
    try:
        held = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if "\n" in text.strip() else f"column {error.colno}"
        raise ValueError(f"{error.msg.removesuffix(' at')} at {where}") from None
    except ValueError:  # raised by int(): Python limits the digits, since reading them takes quadratic time
        raise ValueError("it holds an integer of thousands of digits") from None
    except RecursionError:
        held = None
        deep = True
    else:
        deep = _depth_exceeds(held, DEPTH)
    if deep:
        raise ValueError(f"it is nested more than {DEPTH} levels deep")
    return held


def read_text(path: str | os.PathLike[str], argument: str, form: str) -> str:
    """Return the text of a JSON file; an OSError names the argument, the path and what to pass instead.

    form: how such a file is written, for the error, as in "as sparing.Recipe saves it".
    """
    way_out = f"name a JSON file, {form}"
    if Path(path).is_dir():  # reading a folder raises IsADirectoryError on Linux, and PermissionError on Windows
        raise IsADirectoryError(f"{argument}: {os.fspath(path)!r} is a folder; {way_out}")
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(f"{argument}: there is no file {os.fspath(path)!r}; {way_out}") from None
    except OSError as error:
        raise type(error)(f"{argument}: {os.fspath(path)!r} cannot be read ({error.strerror}); {way_out}") from None


def _depth_exceeds(held: Any, limit: int) -> bool:
    """Return whether lists and objects are nested deeper than the limit, without recursion."""
    level = [held]
    for _ in range(limit + 1):
        parts = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        if not parts:
            return False
        level = [value for part in parts for value in part]
    return True


def has_surrogate(text: str) -> bool:
    r"""Return whether a text has half of a surrogate pair, which JSON can write as "\ud800" and no file can hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def build(cls: type[T], held: Any, name: str = "") -> T:
    """Make a dataclass or named tuple from parsed JSON by the types of its fields.

    name: the path of this part within the whole, for errors. JSON has no NaN: null stands for it where a number is
        needed.
    """
    hints, needed = _fields(cls)  # type: ignore[arg-type]  # classes are hashable
    if isinstance(held, list) and not dataclasses.is_dataclass(cls):  # a named tuple is written as a list
        if len(held) != len(hints):
            raise ValueError(f"{name or 'it'} must have {len(hints)} entries, not {len(held)}")
        held = dict(zip(hints, held, strict=True))
    if not isinstance(held, dict):
        raise ValueError(f"{name or 'it'} must be an object, not {_short(held)}")
    if missing := [field for field in needed if field not in held]:
        raise ValueError(f"{name or 'it'} has no {', '.join(map(repr, missing))}")
    if unknown := [field for field in held if field not in hints]:
        raise ValueError(f"{name or 'it'} has {', '.join(map(_short, unknown))}, which is not known")
    return cls(**{field: _value(hints[field], value, f"{name}.{field}".lstrip(".")) for field, value in held.items()})


@functools.cache
def _fields(cls: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the type of each field, and the fields without a default."""
    if dataclasses.is_dataclass(cls):
        needed = tuple(
            each.name
            for each in dataclasses.fields(cls)
            if each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
        )
        names = [each.name for each in dataclasses.fields(cls)]
    else:
        names = list(cls._fields)
        needed = tuple(names)
    hints = typing.get_type_hints(cls)
    return {name: hints[name] for name in names}, needed


def _value(kind: Any, held: Any, name: str) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if held is None and type(None) in inner:
            return None
        (kind,) = (each for each in inner if each is not type(None))
        return _value(kind, held, name)
    if kind is Any:
        return held
    if kind is float:
        return _number(held, name)
    if kind is bool or origin is typing.Literal:
        allowed = (False, True) if kind is bool else inner
        if not any(held is each or (type(held) is type(each) is str and held == each) for each in allowed):
            raise ValueError(f"{name} must be {' or '.join(map(repr, allowed))}, not {_short(held)}")
        return held
    if kind in (int, str):
        if type(held) is not kind or (kind is int and abs(held) > _LARGEST):
            words = "a text" if kind is str else "an integer below 2^63"
            raise ValueError(f"{name} must be {words}, not {_short(held)}")
        return held
    if origin in (tuple, list):
        if not isinstance(held, list):
            raise ValueError(f"{name} must be a list, not {_short(held)}")
        return origin(_value(inner[0], each, f"{name}[{number}]") for number, each in enumerate(held))
    if origin is dict:
        if not isinstance(held, dict):
            raise ValueError(f"{name} must be an object, not {_short(held)}")
        return {key: _value(inner[1], each, f"{name}[{_short(key)}]") for key, each in held.items()}
    return held if isinstance(held, kind) else build(kind, held, name)


def _number(held: Any, name: str) -> float:
    if held is None:
        return math.nan
    if isinstance(held, bool) or not isinstance(held, int | float):
        raise ValueError(f"{name} must be a number, not {_short(held)}")
    try:
        return float(held)
    except OverflowError:
        raise ValueError(f"{name} is an integer that is larger than any float") from None


def _short(held: Any) -> str:
    """Return the repr of a value, cut off where it is long."""
    text = repr(held)
    return text if len(text) <= 40 else f"{text[:37]}..."
