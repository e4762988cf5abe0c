"""Processes of the `sparing` command that start at once and can be killed: forked from one that has imported everything.

    python -m tests.faults.server

reads requests from standard input, a JSON object on each line, and answers on standard output. Times are those of a
clock that always tells the same, so that two runs can be compared to the last bit.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]


class Ended(NamedTuple):
    """A process that is over."""

    status: int  #: of the command; -9 where it was killed
    out: str
    err: str
    seconds: float


class Server:
    """The process that forks, as others see it."""

    def __init__(self) -> None:
        paths = [ROOT, *filter(None, sys.path)]
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1",
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self._answer() == "ready"

    def run(self, arguments: list[str], folder: Path, **options: Any) -> Ended:
        """Run the command in a folder.

        kill: seconds after which it is killed. die: [n, stage], where it kills itself at the n-th file that it writes,
        at one of `STAGES`. limit: the most bytes that a file may have. environment: more variables.
        """
        self._ask({"arguments": arguments, "folder": str(folder), **options})
        return Ended(*self._answer())

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def _ask(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


STAGES = ("opened", "half", "written", "renamed")


def fixed_clock() -> None:
    """Replace what takes times by what returns the same times for every run."""
    from sparing.workbench.comparison import sweep
    from sparing.workbench.comparison.seconds import PaddingSeconds, Seconds
    from sparing.workbench.planning import clock
    from sparing.workbench.timing import Interval

    same = Interval(2.0, 2.0, 2.0)
    sweep.seconds = lambda *args, **options: Seconds(same, same, 0.05, 1000, 2000, same)
    sweep.padding_seconds = lambda *args, **options: PaddingSeconds(same)
    sweep.race_at = lambda seen, racers, length: ({spec: list(same) for spec in racers}, 0.01, "")
    clock.call_gains = lambda subject, ids, specs, objective: dict.fromkeys(specs, same)
    clock.model_gain = lambda *args: same


def die_at(number: int, stage: str) -> None:
    """Kill this process at a stage of the n-th file that it writes."""
    fdopen, replace, count = os.fdopen, os.replace, 0

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def opened(handle: int, mode: str = "r", *args: Any, **options: Any) -> Any:
        nonlocal count
        file = fdopen(handle, mode, *args, **options)
        if mode != "wb":
            return file
        count += 1
        if count == number and stage == "opened":
            die()
        if count == number and stage == "half":
            return Half(file, die)
        return file

    def renamed(source: Any, target: Any) -> None:
        if count >= number and stage == "written":
            die()
        replace(source, target)
        if count >= number and stage == "renamed":
            die()

    os.fdopen, os.replace = opened, renamed


class Half:
    """A file of which half is written."""

    def __init__(self, file: Any, then: Any) -> None:
        self.file, self.then = file, then

    def __enter__(self) -> Half:
        return self

    def __exit__(self, *args: Any) -> None:
        self.file.close()

    def write(self, content: bytes) -> None:
        self.file.write(content[: len(content) // 2])
        self.file.flush()
        self.then()


def _child(request: dict[str, Any], streams: list[int]) -> None:
    from sparing.cli.main import main

    os.chdir(request["folder"])
    for number, stream in enumerate(streams, 1):
        os.dup2(stream, number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8") for number in (1, 2))
    os.environ.update(request.get("environment", {}))
    if (limit := request.get("limit")) is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if (die := request.get("die")) is not None:
        die_at(*die)
    status = main(request["arguments"])
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _serve(request: dict[str, Any]) -> Ended:
    pipes = [os.pipe(), os.pipe()]  # which have room for all that a command prints
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            _child(request, [written for _, written in pipes])
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
        os._exit(70)
    if (kill := request.get("kill")) is not None:
        while time.monotonic() < start + kill:
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                break
            time.sleep(0.001)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    seconds, texts = time.monotonic() - start, []
    for read, written in pipes:
        os.close(written)
        with os.fdopen(read, encoding="utf-8", errors="replace") as file:
            texts.append(file.read())
    return Ended(code, texts[0], texts[1], seconds)


def serve() -> None:
    """Answer requests until there are no more."""
    import tempfile

    import torch

    torch.set_num_threads(1)  # a thread would not be there after a fork
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from tests.faults.scenarios import warm_up

    fixed_clock()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        warm_up(Path(folder))
        answers.write('"ready"\n')
        answers.flush()
        for line in sys.stdin:
            answers.write(json.dumps(_serve(json.loads(line))) + "\n")
            answers.flush()


if __name__ == "__main__":
    serve()
