"""Say how far a long measurement is: a line that is rewritten, or log lines where nobody looks at a screen.

Needs no package: `sparing.compare` and `sparing.plan` show it in scripts and notebooks. The commands draw a bar instead
where they write to a terminal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

Progress = Callable[[str, int, int], None]  #: takes what was done, the steps that are done, and all steps

EVERY = 10.0  #: seconds between two log lines
_REDRAWN = 0.1  #: seconds between two versions of a line


class TimeLeft:
    """Estimate the time left from the steps that were done since the first one, or since another count began."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.start = self.first = self.last = self.steps = 0.0

    def seconds(self, done: int, steps: int) -> float | None:
        """Return the seconds left; None until a step was timed."""
        now = self.clock()
        if steps != self.steps or done < self.last or not self.start:
            self.start, self.first, self.steps = now, done, steps
        self.last = done
        if done <= self.first:
            return None
        return (now - self.start) / (done - self.first) * max(steps - done, 0)


class ProgressLines:
    """Write a log line with the time left, at most one in ten seconds; none for what takes less."""

    def __init__(
        self, stream: IO[str], *, every: float = EVERY, clock: Callable[[], float] = time.monotonic, prefix: str = ""
    ) -> None:
        self.stream, self.every, self.clock, self.prefix = stream, every, clock, prefix
        self.left = TimeLeft(clock)
        self.last = clock()

    def __call__(self, text: str, done: int, steps: int) -> None:
        left = self.left.seconds(done, steps)
        if self.clock() - self.last < self.every:
            return
        self.last = self.clock()
        self.stream.write(f"{self.prefix}{line(text, done, steps, left)}\n")
        self.stream.flush()

    def close(self) -> None:
        """Nothing is left to do: every line is whole."""


class ProgressLine:
    """Rewrite one line; `close` removes it."""

    def __init__(self, stream: IO[str], *, width: int = 79, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream, self.width, self.clock = stream, width, clock
        self.left = TimeLeft(clock)
        self.last: float | None = None
        self.shown = 0

    def __call__(self, text: str, done: int, steps: int) -> None:
        left = self.left.seconds(done, steps)
        if self.last is not None and self.clock() - self.last < _REDRAWN:
            return
        self.last = self.clock()
        said = line(text, done, steps, left)[: self.width]
        self.stream.write(f"\r{said.ljust(self.shown)}")
        self.stream.flush()
        self.shown = len(said)

    def close(self) -> None:
        """Remove the line."""
        if self.shown:
            self.stream.write(f"\r{' ' * self.shown}\r")
            self.stream.flush()


def is_silent(progress: Progress | bool | None) -> bool:
    """Return whether nothing is to be said; raise for what is neither a function nor a bool."""
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        raise ValueError(f"progress={progress!r} must be True, False, or a function of a text and two numbers")
    return not progress


@contextmanager
def reporting(progress: Progress | bool | None) -> Iterator[Progress]:
    """Yield what to call after each step. True: a line on standard error; False or None: nothing; or the user's own."""
    if callable(progress):
        yield progress
        return
    if not progress or sys.stderr is None:
        yield lambda text, done, steps: None
        return
    tell: ProgressLine | ProgressLines
    tell = ProgressLine(sys.stderr) if sys.stderr.isatty() or _in_notebook() else ProgressLines(sys.stderr)
    try:
        yield tell
    finally:
        tell.close()


def line(text: str, done: int, steps: int, left: float | None) -> str:
    """Return one line without control characters.

    >>> line("window: seconds", 3, 12, 95.0), line("loading", 0, 12, None)
    ('3 of 12: window: seconds, about 2 min left', '0 of 12: loading')
    """
    said = "".join(char if char.isprintable() else "?" for char in text)
    return f"{done} of {steps}: {said}" + ("" if left is None else f", {duration(left)} left")


def duration(seconds: float) -> str:
    """Format the time left, roughly: it is an estimate.

    >>> duration(3.2), duration(40), duration(95), duration(7500)
    ('a few seconds', 'about 40 s', 'about 2 min', 'about 2.1 h')
    """
    if seconds < 10:
        return "a few seconds"
    if seconds < 90:
        return f"about {round(seconds, -1):.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    return shell is not None and type(shell.get_ipython()).__name__ == "ZMQInteractiveShell"
