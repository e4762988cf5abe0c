"""Work in pieces: what is finished stays finished, and everybody finds the same."""

import json
import math

import pytest

from sparing.store import Store, StoreWarning, add_checksum, verify_checksum
from sparing.workbench.cells import measured
from sparing.workbench.comparison.compare import compare
from sparing.workbench.comparison.seconds import Seconds
from sparing.workbench.estimate import estimate, student
from sparing.workbench.planning.plan import plan
from sparing.workbench.timing import Interval

CELLS = [{"what": "square", "number": i} for i in range(6)]


def square(cell):
    return {"value": cell["number"] ** 2, "root": cell["number"] ** 0.5, "pair": (1, 2)}


def test_results_come_in_order_and_are_kept(tmp_path):
    calls = []

    def work(cell):
        calls.append(cell["number"])
        return square(cell)

    found = measured(CELLS, work, Store(tmp_path / "new" / "folder"))
    assert [x["value"] for x in found] == [0, 1, 4, 9, 16, 25]
    told = []
    again = measured(CELLS[::-1], work, Store(tmp_path / "new" / "folder"), done=lambda cell, known: told.append(known))
    assert again == found[::-1], "also what JSON changes, such as pairs, is the same from the store"
    assert calls == list(range(6))
    assert told == [True] * 6
    assert len(measured(CELLS, work, Store(None))) == 6
    assert len(calls) == 12, "without a folder nothing is kept"


def test_a_run_that_was_stopped_resumes(tmp_path):
    calls = []

    def work(cell):
        calls.append(cell["number"])
        if cell["number"] == 3 and calls.count(3) == 1:
            raise KeyboardInterrupt
        return square(cell)

    with pytest.raises(KeyboardInterrupt):
        measured(CELLS, work, Store(tmp_path))
    assert measured(CELLS, work, Store(tmp_path)) == measured(CELLS, square, Store(None))
    assert calls == [0, 1, 2, 3, 3, 4, 5]


def test_two_workers_find_the_same(tmp_path):
    """Threads here; processes and a cluster, which take long to start, in test_cluster.py."""
    alone = measured(CELLS, square, Store(None))
    assert measured(CELLS, square, Store(tmp_path), jobs=2, backend="threading") == alone
    assert len(list(tmp_path.iterdir())) == 6


def test_students_quantiles():
    from scipy.stats import t

    for freedom in (1, 2, 3, 4, 7, 10, 31, 200):
        for probability in (0.6, 0.9, 0.975, 0.999):
            assert student(probability, freedom) == pytest.approx(t.ppf(probability, freedom), rel=1e-9)


def test_an_interval_covers_the_mean_as_often_as_it_says():
    """5000 intervals of 4 normal numbers cover in 95 %: outside 0.94 to 0.96 once in 800 runs; the seed is fixed."""
    from random import Random

    random = Random(0)
    found = [estimate([random.gauss(1, 2) for _ in range(4)]) for _ in range(5000)]
    assert 0.94 < sum(x.low <= 1 <= x.high for x in found) / 5000 < 0.96


def test_what_has_no_interval():
    assert estimate([2.0]) == type(estimate([2.0]))(2.0, None, None, 1)
    assert estimate([1.0, math.nan]).high is None
    assert estimate([3.0, 3.0]).high == 3.0
    with pytest.raises(ValueError, match="values is empty; pass at least one number"):
        estimate([])


@pytest.mark.parametrize(
    "other",
    [
        {"layers": []},
        {"refused": 3},
        [1, 2],
        "text",
        {"ratios": {"window(size=4)": [1.0]}, "seconds": 0.1},
        {"ratios": {}, "seconds": "long"},
        [{"layer": "a"}],
        {"embedding": 3},
    ],
)
@pytest.mark.parametrize("command", ["compare", "plan"])
def test_a_kept_result_of_another_shape_is_measured_again(command, other, tmp_path, monkeypatch):
    """The checksums are right: an older version, or a person, wrote the content."""
    from sparing.workbench.comparison import sweep
    from sparing.workbench.planning import clock
    from tests.support.small_models import TEXTS, subject

    same = Interval(1.5, 1.5, 1.5)
    monkeypatch.setattr(sweep, "seconds", lambda *args, **options: Seconds(same, same, 1.0, 2, 3))
    monkeypatch.setattr(sweep, "race_at", lambda seen, specs, length: (dict.fromkeys(specs, same), 9.0, ""))
    monkeypatch.setattr(clock, "call_gains", lambda subject, ids, specs, objective: dict.fromkeys(specs, same))
    monkeypatch.setattr(clock, "model_gain", lambda *args: same)

    def run(cache):
        if command == "compare":
            return compare(
                subject(), TEXTS[:3], methods=["window(size=4)"], length=30, jobs=1, cache=cache, batch_size=1
            )
        options = {"tolerance": 0.5, "coverage": 0.3, "confidence": 0.5, "length": 30, "jobs": 1}
        return plan(subject(), TEXTS, methods=["window(size=4)"], cache=cache, **options)

    whole = run(tmp_path)
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    kinds = {json.loads(text)["cell"]["what"] for text in kept.values()}
    assert kinds == ({"quality", "seconds", "race", "map"} if command == "compare" else {"calls", "gain", "output"})
    for path, text in kept.items():
        held = verify_checksum(json.loads(text))
        path.write_text(json.dumps(add_checksum({**held, "result": other})))
    with pytest.warns(StoreWarning, match="such results are measured again"):
        assert run(tmp_path) == whole
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == kept
