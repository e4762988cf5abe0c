"""Work in pieces: what is finished stays finished, and everybody finds the same."""

import math

import pytest

from sparing.store import Store
from sparing.workbench.cells import measured
from sparing.workbench.estimate import estimate, student

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


def test_a_run_that_was_stopped_goes_on(tmp_path):
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
    with pytest.raises(ValueError, match="no mean of nothing"):
        estimate([])
