"""Progress in scripts and notebooks, and in log files."""

import io
import sys
import types

import pytest

from sparing.progress import ProgressLine, ProgressLines, TimeLeft, reporting


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_log_lines_come_at_most_once_in_ten_seconds_with_the_time_left():
    clock, written = Clock(), io.StringIO()
    tell = ProgressLines(written, clock=clock)
    for done in range(61):
        tell(f"cell {done}", done, 120)
        clock.now += 1
    left = {10: "2 min", 20: "2 min", 30: "2 min", 40: "80 s", 50: "70 s", 60: "60 s"}
    assert written.getvalue().splitlines() == [f"{n} of 120: cell {n}, about {each} left" for n, each in left.items()]


def test_short_work_writes_no_log_line():
    clock, written = Clock(), io.StringIO()
    tell = ProgressLines(written, clock=clock)
    for done in range(10):
        clock.now += 0.9
        tell("cell", done, 10)
    assert written.getvalue() == ""


def test_time_left_starts_anew_with_another_count():
    clock = Clock()
    left = TimeLeft(clock)
    assert left.seconds(3, 10) is None, "nothing was timed yet"
    clock.now += 4
    assert left.seconds(5, 10) == 10, "2 s a step, 5 steps"
    assert left.seconds(0, 100) is None
    clock.now += 1
    assert left.seconds(1, 100) == 99


def test_one_line_is_rewritten_and_removed():
    clock, written = Clock(), Screen()
    tell = ProgressLine(written, clock=clock)
    tell("a long text", 1, 2)
    tell("too soon to be seen", 1, 2)
    clock.now += 1
    tell("\x1b[31mshort\n", 2, 2)
    tell.close()
    first, second, gone, rest = written.getvalue().split("\r")[1:]
    assert first == "1 of 2: a long text"
    assert second.rstrip() == "2 of 2: ?[31mshort?, a few seconds left"
    assert gone.strip() == rest == ""
    assert len(gone) >= len(second.rstrip())


def test_progress_is_a_line_nothing_or_a_function(monkeypatch):
    screen, log, calls = Screen(), io.StringIO(), []
    monkeypatch.setattr(sys, "stderr", screen)
    with reporting(True) as tell:
        tell("step", 1, 2)
        assert "1 of 2: step" in screen.getvalue()
    assert screen.getvalue().endswith("\r"), "the line is gone"
    before = screen.getvalue()
    for silent in (False, None):
        with reporting(silent) as tell:
            tell("step", 1, 2)
    with reporting(lambda *given: calls.append(given)) as tell:
        tell("step", 1, 2)
    assert calls == [("step", 1, 2)]
    assert screen.getvalue() == before
    monkeypatch.setattr(sys, "stderr", log)
    with reporting(True) as tell:
        assert isinstance(tell, ProgressLines), "a file has log lines"


def test_a_notebook_shows_the_line(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    with reporting(True) as tell:
        assert isinstance(tell, ProgressLine)


def test_the_line_is_removed_after_an_error(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Screen())

    def stopped():
        with reporting(True) as tell:
            tell("step", 1, 2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert sys.stderr.getvalue().endswith("\r")
