"""What disturbs a measurement of time is noticed, said and not kept."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

import sparing
from sparing.report.bench import show as show_bench
from sparing.report.table import show
from sparing.report.terminal import Terminal
from sparing.store import Store
from sparing.workbench import timing
from sparing.workbench.benchmark.bench import bench
from sparing.workbench.benchmark.results import BenchSettings
from sparing.workbench.cells import is_time
from sparing.workbench.comparison.generation_row import generation_summary, judge
from sparing.workbench.comparison.judgement import FASTER, UNKNOWN, UNTIMED
from sparing.workbench.timing import undisturbed
from tests.support.generations import NO_CHANGE, facts_of, row_of, times_of
from tests.support.small_models import TEXTS, subject

LINUX = pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="only Linux says what other programs take")


@pytest.fixture
def limits(monkeypatch):
    """The limits that users have."""
    monkeypatch.setattr(timing, "OTHER_WORK", 0.1)
    monkeypatch.setattr(timing, "SPREAD", 1.25)
    monkeypatch.setattr(timing, "_LEAST", 0.25)


@pytest.fixture
def others(monkeypatch):
    """Other programs that take all processors."""
    start, cores = time.perf_counter(), os.cpu_count() or 1
    monkeypatch.setattr(timing, "_others", lambda: cores * (time.perf_counter() - start))


@LINUX
def test_other_programs_are_noticed(limits):
    spin = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        time.sleep(0.3)
        _, said = undisturbed(lambda: time.sleep(0.5))
    finally:
        for each in spin:
            each.kill()
            each.wait()
    assert said.startswith("other programs take ")


def test_our_own_work_is_not_that_of_others(monkeypatch, tmp_path):
    ticks = os.sysconf("SC_CLK_TCK")
    mine = f"cpu1 {3 * ticks} 0 {ticks} {99 * ticks} {99 * ticks} 0 0 {ticks} 0 0"
    (tmp_path / "stat").write_text(f"cpu {9 * ticks}\ncpu0 {6 * ticks} 0 0 0 0 0 0 0 0 0\n{mine}\nctxt 5\n")
    monkeypatch.setattr(timing, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(timing, "_processors", lambda: {1})
    monkeypatch.setattr(time, "process_time", lambda: 3.5)
    assert timing._others() == 1.5, "user, system and stolen time, less ours; not idle, not waiting, not elsewhere"


def test_a_disturbed_measurement_is_repeated_and_says_what_it_was(limits, monkeypatch):
    monkeypatch.setattr(timing, "_others", lambda: None)
    runs = []

    def measure():
        runs.append([1.0, 1.0, 1.0, 1.0] if len(runs) == 1 else [1.0, 2.0, 1.0, 2.0])
        return runs[-1]

    assert undisturbed(measure, lambda times: times) == ([1.0, 1.0, 1.0, 1.0], "")
    assert undisturbed(measure, lambda times: times)[1] == "exact attention takes 1 to 2 s from one time to the next"
    assert len(runs) == 4


def test_a_busy_machine_times_nothing_and_keeps_nothing(limits, others, tmp_path):
    given = {"methods": ["window(size=500)"], "length": 40, "rounds": 1, "jobs": 1, "documents": 3}
    found = sparing.compare(subject(), TEXTS, **given, cache=tmp_path)
    (row,) = found.rows
    assert row.verdict == UNTIMED
    assert row.reason.startswith("this machine is too busy to time it: other programs take ")
    assert found.records()[0]["model_speed"] is None
    assert found.headline == "Cannot tell: this machine is busy"
    assert found.summary.startswith(
        "On 3 documents of up to 40 tokens 1 of 1 setting stays within 1.00% (1 - cosine of the embedding), but this "
        "machine is too busy to time them: other programs take "
    )
    assert found.summary.endswith(" of the processors. Measure again when it is idle.")
    console = Terminal()
    with console.capture() as told:
        show(found, console=console)
    (line,) = [line for line in told.get().splitlines() if line.lstrip().startswith("window(size=500)  ")]
    assert line.split()[-4:] == ["?", "?", "safe,", "untimed"]
    assert "x as fast" not in found.summary
    assert row.points == ()
    kept = [cell for cell in cells(tmp_path) if "machine" in cell]
    assert kept == []
    assert cells(tmp_path), "errors do not depend on the load"


def test_disturbed_tokens_are_not_called_faster():
    given = {"metric": None, "tolerance": 0.01}
    times = times_of(2.0)
    assert judge(NO_CHANGE, NO_CHANGE, facts_of(80, 79), times, **given)[0] == FASTER
    word, reason = judge(NO_CHANGE, NO_CHANGE, facts_of(80, 79), replace(times, disturbed="noise"), **given)
    assert (word, reason) == (UNTIMED, "this machine is too busy to time it: noise")
    row = row_of(word, 900, 2.0, reason=reason, times=replace(times, disturbed="noise"))
    assert generation_summary([row]) == (
        "Generation after 900 tokens: multipole is safe, but this machine is too busy to time it: noise. Measure again "
        "when it is idle."
    )
    open_ = replace(row, verdict=UNKNOWN, reason="few cases")
    assert generation_summary([open_]).endswith("is safe (few cases). Nor was it timed: noise.")


def test_a_busy_machine_makes_no_plan(limits, others, tmp_path):
    texts = [f"{i} {text}" for i in range(20) for text in TEXTS]
    given = {"methods": ["window(size=4)"], "length": 40, "rounds": 1, "jobs": 1, "tolerance": 0.5}
    with pytest.raises(OSError, match=r"too busy to time a plan: other programs take .*; run it again when it is idle"):
        sparing.plan(subject(), texts, **given, cache=tmp_path)
    assert not [cell for cell in cells(tmp_path) if "machine" in cell]


def test_times_alone_are_measured_again(tmp_path):
    given = {"methods": ["window(size=4)"], "length": 40, "rounds": 1, "jobs": 1, "documents": 3, "lengths": False}
    sparing.compare(subject(), TEXTS, **given, cache=tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.json")}
    sparing.compare(subject(), TEXTS, **given, cache=Store(tmp_path, again=is_time))
    changed = [path for path in before if path.read_bytes() != before[path]]
    assert len(changed) == 1
    assert before.keys() == set(tmp_path.glob("*.json"))


def cells(folder):
    return [json.loads(path.read_text())["cell"] for path in folder.glob("*.json")]


def test_a_busy_bench_says_so_first(limits, others, capsys):
    found = bench(BenchSettings(methods=("window(size=4)",), lengths=(16,), heads=1, width=8, backward=False))
    assert found.disturbed.startswith("other programs take ")
    show_bench(found)
    assert "This machine was busy: other programs take " in capsys.readouterr().out
