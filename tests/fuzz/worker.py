"""One process of the fuzzer: it draws and checks cases until its time is over, and leaves files for its parent."""

from __future__ import annotations

import json
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from tests.fuzz import cases

MEMORY = 8 * 2**30  #: bytes of address space: a case that takes more fails by itself instead of with the machine
KEPT = 2  #: findings of one kind that are written; more are counted


def work(folder: Path, corpus: Path, names: list[str], stream: str, seconds: float) -> None:
    """Check cases of all fuzzers, each for an equal share of the time.

    The case at hand is in `case.json`, so that it survives the process; what fails is shrunk and written to the corpus.
    """
    rng, end = random.Random(stream), time.monotonic() + seconds
    fuzzers = {name: cases.load(name) for name in names}
    counts = {name: Counter(cases=0, calls=0, refusals=0) for name in names}
    spent, kinds = dict.fromkeys(names, 0.0), Counter[str]()
    while time.monotonic() < end:
        name = min(spent, key=spent.__getitem__)
        fuzzer, start = fuzzers[name], time.monotonic()
        case = fuzzer.draw(rng)
        _replace(folder / "case.json", [name, case])
        message = None
        try:
            message = cases.failure(fuzzer, case)
        except cases.Refused:
            counts[name]["refusals"] += 1
        counts[name].update(cases=1, calls=fuzzer.calls(case))
        if message is not None:
            kind = cases.signature(message)
            kinds[kind] += 1
            if kinds[kind] <= KEPT:
                case, message = cases.shrunk(fuzzer, case, message)
                path = cases.write(corpus, name, case, message)
                with (folder / "findings.jsonl").open("a") as file:
                    file.write(json.dumps([name, str(path), message]) + "\n")
        spent[name] += time.monotonic() - start
        _replace(folder / "counts.json", counts)


def dies(room: Path, name: str, case: cases.Case, limit: float) -> str | None:
    """Return how a process that checks this case is killed, or None if it is not."""
    path = cases.write(room, name, case, "")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.fuzz", "--replay", str(path)], timeout=limit, capture_output=True, check=False
        )
    except subprocess.TimeoutExpired:
        return "did not return"
    finally:
        path.unlink()
    return None if done.returncode in (0, 1) else f"killed by {way(done.returncode)}"


def way(status: int) -> str:
    """Return the name of the signal that ended a process, or its exit code."""
    return signal.Signals(-status).name if status < 0 else f"exit code {status}"


def _replace(path: Path, content: object) -> None:
    rough = path.with_suffix(".new")
    rough.write_text(json.dumps(content))
    rough.replace(path)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    if "libasan" not in Path("/proc/self/maps").read_text():  # whose shadow memory is larger than any limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    to, corpus, names, stream, seconds = sys.argv[1:]
    work(Path(to), Path(corpus), names.split(","), stream, float(seconds))
