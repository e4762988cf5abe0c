"""What happens to a case: it is tried, shrunk if it fails, and written down as a test."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

CORPUS = Path(__file__).parent / "corpus"
FUZZERS = ("door", "kernels", "index", "parsers")  #: modules of this package

Case = dict[str, Any]


class Refused(Exception):
    """The library refused the case with an error that names the argument, as it should."""


class Fuzzer(Protocol):
    """A module that draws and checks cases."""

    NAME: str

    def draw(self, rng: Any) -> Case: ...
    def check(self, case: Case) -> None: ...
    def shrink(self, case: Case) -> Iterator[Case]: ...
    def calls(self, case: Case) -> int: ...


def available() -> list[str]:
    """Return the names of the fuzzers whose modules exist."""
    return [name for name in FUZZERS if (Path(__file__).parent / f"{name}.py").exists()]


def load(name: str) -> Fuzzer:
    """Return the fuzzer of that name."""
    module: Any = importlib.import_module(f"tests.fuzz.{name}")
    assert name == module.NAME
    return module


def failure(fuzzer: Fuzzer, case: Case) -> str | None:
    """Return in one line what is wrong with a case, or None. `Refused` passes through."""
    try:
        fuzzer.check(case)
    except AssertionError as error:
        return " ".join(str(error).split()) or "AssertionError"
    except (Refused, KeyboardInterrupt):
        raise
    except BaseException as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
    return None


def fails(fuzzer: Fuzzer, case: Case) -> str | None:
    """`failure`, where a refused case does not fail."""
    try:
        return failure(fuzzer, case)
    except Refused:
        return None


def signature(message: str) -> str:
    """Return a message without its numbers and settings: findings that share it are taken for one."""
    message = re.sub(r"\([^()]*\)", "()", message)
    return re.sub(r"-?\d[\d.e+-]*|\b(nan|inf)\b", "#", message)[:160]


def shrunk(
    fuzzer: Fuzzer, case: Case, message: str, *, seconds: float = 20.0, test: Callable[[Case], str | None] | None = None
) -> tuple[Case, str]:
    """Return a simpler case that fails in the same way, and its message.

    test: how a case is tried; in this process unless given.
    """
    test = test or (lambda other: fails(fuzzer, other))
    end, kind, found = time.monotonic() + seconds, signature(message), True
    while found:
        found = False
        for other in fuzzer.shrink(case):
            if time.monotonic() > end:
                return case, message
            now = test(other) if other != case else None
            if now is not None and signature(now) == kind:
                case, message, found = other, now, True
                break
    return case, message


def write(folder: Path, name: str, case: Case, message: str) -> Path:
    """Write a finding; pytest replays it from then on."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(json.dumps([name, case], sort_keys=True).encode()).hexdigest()[:8]
    path = folder / f"{name}-{digest}.json"
    text = json.dumps({"fuzzer": name, "case": case, "found": message}, indent=1)
    rough = path.with_suffix(f".{os.getpid()}")
    rough.write_text(text + "\n", encoding="utf-8")
    rough.replace(path)
    return path


def read(path: Path) -> tuple[Fuzzer, Case, str]:
    """Return the fuzzer, the case and the message of a finding."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    return load(kept["fuzzer"]), kept["case"], kept["found"]
