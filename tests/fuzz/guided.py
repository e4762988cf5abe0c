"""The parsers under a coverage-guided fuzzer: `python -m tests.fuzz.guided --target specs --seconds 60`.

Needs atheris (`pip install atheris`), which makes bytes and keeps those that reach new lines of sparing. They become
the text of a case, or the random choices by which one is drawn; `parsers.check` judges. What fails is made simpler and
written to the corpus, which `make test` replays.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path


class Choices(random.Random):
    """Random choices that are read from bytes; zeros when these have ended."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        super().__init__(0)

    def getrandbits(self, k: int) -> int:
        size = (k + 7) // 8
        found = int.from_bytes(self._data[self._at : self._at + size], "little")
        self._at += size
        return found >> (8 * size - k) if self._at <= len(self._data) else found % (1 << k)

    def random(self) -> float:
        return self.getrandbits(16) / 2**16


def case_of(target: str, data: bytes, parsers) -> dict:
    """The case that bytes stand for: of the first, the lowest bit says how the others are read."""
    if not data or data[0] % 2:
        return parsers.draw_of(target, Choices(data[1:]))
    if target == "documents":
        names = list(parsers.FILES)
        options = parsers.OPTIONS[data[0] // 2 % len(parsers.OPTIONS)]
        return {
            "target": target, "name": names[(data[1] if len(data) > 1 else 0) % len(names)], "options": options,
            "text": data[2:].decode("latin-1"),
        }  # fmt: skip
    return {"target": target, "text": data[1:].decode("utf-8", "replace")}


def seeds(target: str, folder: Path, parsers) -> None:
    """Write good inputs, from which the fuzzer starts."""
    if target == "specs":
        good = [b"\x00" + spec.encode() for spec in parsers.SPECS]
    elif target == "documents":
        good = [bytes([0, number]) + parsers._good_file(name) for number, name in enumerate(parsers.FILES)]
    else:
        good = [b"\x00" + json.dumps(parsers._good_json(target)).encode()]
    rng = random.Random(0)
    for number, data in enumerate([*good, *(b"\x01" + rng.randbytes(200) for _ in range(8))]):
        (folder / str(number)).write_bytes(data)


def main() -> None:
    """Fuzz one target; ends at the first finding."""
    asked = argparse.ArgumentParser(prog="python -m tests.fuzz.guided", description=__doc__)
    asked.add_argument("--target", required=True)
    asked.add_argument("--seconds", type=int, default=60)
    asked.add_argument("--inputs", type=Path, help="folder in which inputs that reach new lines are kept")
    options = asked.parse_args()
    try:
        import atheris
    except ModuleNotFoundError:
        raise SystemExit("atheris is missing; run: pip install atheris") from None
    import torch  # noqa: F401  # before sparing, so that sparing alone is instrumented
    import transformers  # noqa: F401

    with atheris.instrument_imports(include=["sparing"]):
        from tests.fuzz import cases, parsers

    if options.target not in parsers.TARGETS:
        raise SystemExit(f"--target={options.target!r} is not one of {', '.join(parsers.TARGETS)}")
    count, start = 0, time.monotonic()

    def one(data: bytes) -> None:
        nonlocal count
        count += 1
        case = case_of(options.target, data, parsers)
        message = cases.fails(parsers, case)
        if message is not None:
            path = cases.write(cases.CORPUS, parsers.NAME, *cases.shrunk(parsers, case, message))
            sys.stderr.write(f"{path.name}: {message}\n")
            raise AssertionError(message)
        if time.monotonic() - start > options.seconds:
            sys.stderr.write(f"{options.target}: {count:,} inputs in {options.seconds} s, no finding\n")
            sys.stderr.flush()
            os._exit(0)  # libFuzzer has no other way out before its own limit

    with tempfile.TemporaryDirectory() as folder:
        inputs = options.inputs or Path(folder)
        inputs.mkdir(parents=True, exist_ok=True)
        seeds(options.target, inputs, parsers)
        atheris.Setup(
            [
                sys.argv[0],
                str(inputs),
                "-max_len=20000",
                "-len_control=0",
                "-rss_limit_mb=8000",
                "-timeout=60",
                f"-artifact_prefix={inputs}/",
            ],
            one,
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
