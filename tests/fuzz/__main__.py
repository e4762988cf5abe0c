"""`python -m tests.fuzz`: draw cases on every core for some time, write down what fails, and count."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.fuzz import cases, worker

LIMIT = 120.0  #: seconds after which a case counts as one that does not return


def main(argv: list[str] | None = None) -> int:
    """Run the command; 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300, help="how long to draw cases (default 300)")
    parser.add_argument("--fuzzers", default=",".join(cases.available()), help="names, separated by commas")
    parser.add_argument("--seed", type=int, default=None, help="of the cases (default: from the clock; printed)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="default: one per core")
    parser.add_argument("--corpus", type=Path, default=cases.CORPUS, help="where findings are written")
    parser.add_argument("--replay", type=Path, nargs="+", help="check these findings again instead")
    asked = parser.parse_args(argv)
    if asked.replay:
        return replay(asked.replay)
    names = asked.fuzzers.split(",")
    for name in names:
        if name not in cases.available():
            parser.error(f"--fuzzers: {name!r} is not one of {', '.join(cases.available())}")
    seed = time.time_ns() % 2**32 if asked.seed is None else asked.seed
    say(f"fuzz: {', '.join(names)} for {asked.seconds:g} s in {asked.processes} processes, --seed {seed}")
    return run(names, asked.seconds, seed, asked.processes, asked.corpus)


def say(line: str) -> None:
    """Print at once."""
    print(line, flush=True)  # noqa: T201


def replay(paths: list[Path]) -> int:
    """Check findings again, one line each."""
    bad = 0
    for path in paths:
        fuzzer, case, _ = cases.read(path)
        message = cases.fails(fuzzer, case)
        bad += message is not None
        say(f"{path.name}: {message or 'passes'}")
    return int(bad > 0)


def run(names: list[str], seconds: float, seed: int, processes: int, corpus: Path) -> int:
    """Keep so many processes busy, and replace those that die."""
    end, totals = time.monotonic() + seconds, {name: Counter[str]() for name in names}
    with tempfile.TemporaryDirectory(prefix="fuzz-") as room:
        slots = [Slot(Path(room), i, names, seed, corpus) for i in range(processes)]
        for slot in slots:
            slot.start(end - time.monotonic())
        while any(slot.process is not None for slot in slots):
            time.sleep(0.2)
            for slot in slots:
                for name, path, message in slot.look(end):
                    totals[name]["findings"] += 1
                    say(f"{path.name}: {message}")
        for slot in slots:
            for name, counts in slot.counts().items():
                totals[name].update(counts)
    say(f"{'fuzzer':10} {'cases':>9} {'calls':>9} {'refusals':>9} {'findings':>9}")
    for name in names:
        of = totals[name]
        say(f"{name:10} {of['cases']:9,} {of['calls']:9,} {of['refusals']:9,} {of['findings']:9,}")
    return int(any(of["findings"] for of in totals.values()))


class Slot:
    """One core: a process that checks cases, and the next one after it died."""

    def __init__(self, room: Path, number: int, names: list[str], seed: int, corpus: Path) -> None:
        self.names, self.seed, self.corpus = names, seed, corpus
        self.room, self.number, self.lives = room, number, 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def folder(self) -> Path:
        """What this life of the process writes: `case.json`, `counts.json`, `findings.jsonl`."""
        return self.room / f"{self.number}-{self.lives}"

    def start(self, seconds: float) -> None:
        """Start a process with a stream of cases of its own."""
        self.lives += 1
        self.folder.mkdir()
        self.told, self.born = 0, time.time()
        command = [
            sys.executable, "-m", "tests.fuzz.worker", str(self.folder), str(self.corpus), ",".join(self.names),
            f"{self.seed}/{self.number}/{self.lives}", str(seconds),
        ]  # fmt: skip
        # One thread each: the processes share the cores.
        self.process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def look(self, end: float) -> list[tuple[str, Path, str]]:
        """Return new findings: (fuzzer, file, message)."""
        if self.process is None:
            return []
        found = self._reported()
        status, case = self.process.poll(), self.folder / "case.json"
        since = case.stat().st_mtime if case.exists() else self.born
        if status is None and time.time() - since > LIMIT:
            self.process.kill()
            self.process.wait()
            found.append(self._died("did not return"))
        elif status is not None:
            found += self._reported()
            if status != 0:
                found.append(self._died(f"killed by {worker.way(status)}"))
        else:
            return found
        self.process = None
        if status != 0 and time.monotonic() < end:
            self.start(end - time.monotonic())
        return found

    def _reported(self) -> list[tuple[str, Path, str]]:
        path = self.folder / "findings.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]
        new, self.told = whole[self.told :], len(whole)
        return [(name, Path(path), message) for name, path, message in map(json.loads, new)]

    def _died(self, message: str) -> tuple[str, Path, str]:
        """Write down the case that ended the process, made simpler as far as that takes no longer than a minute."""
        path = self.folder / "case.json"
        if not path.exists():
            raise RuntimeError(f"a process of the fuzzer {message} before its first case")
        name, case = json.loads(path.read_text())
        fuzzer = cases.load(name)
        if message != "did not return":
            case, _ = cases.shrunk(
                fuzzer, case, message, seconds=60, test=lambda other: worker.dies(self.room, name, other, LIMIT)
            )
        return name, cases.write(self.corpus, name, case, message), message

    def counts(self) -> dict[str, dict[str, int]]:
        """Return what all lives of the process counted."""
        totals: dict[str, Counter[str]] = {}
        for path in self.room.glob(f"{self.number}-*/counts.json"):
            for name, counts in json.loads(path.read_text()).items():
                totals.setdefault(name, Counter()).update(counts)
        return {name: dict(counts) for name, counts in totals.items()}


if __name__ == "__main__":
    sys.exit(main())
