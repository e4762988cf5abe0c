import pytest

from sparing.store import Store
from sparing_lab.studies import study
from sparing_lab.studies.run import run
from sparing_lab.studies.study import Settings
from tests.support.verdicts import changed, shown, verdict

NAME = "value-aware-example"


@pytest.fixture(scope="module")
def rows():
    return run(study(NAME), Settings(), Store(None)).rows


def test_the_worked_example(rows):
    assert verdict(NAME, "example", rows) == "reproduces"
    assert verdict(NAME, "norms", rows) == "reproduces"
    assert verdict(NAME, "unbounded", rows) == "reproduces"
    assert verdict(NAME, "skew", rows) == "reproduces"


def test_other_distances_are_not_the_example(rows):
    def example(row):
        return row["what"] == "example"

    assert verdict(NAME, "example", changed(rows, example, distances=[2.6, 3.2, 3.8])) == "same shape"
    assert verdict(NAME, "example", changed(rows, example, by_distance=[2, 1, 0])) == "does not"
    assert verdict(NAME, "norms", changed(rows, example, by_norm=[0, 1, 2])) == "does not"


def test_an_error_that_stops_growing_is_bounded(rows):
    def long(row):
        return row["what"] == "growing" and row["length"] > 1000

    assert verdict(NAME, "unbounded", changed(rows, long, oblivious=100.0)) == "does not"


def test_a_ranking_that_does_not_change_with_the_degree_refutes_the_argument(rows):
    def high(row):
        return row["what"] == "kernel" and row["degree"] > 10

    assert verdict(NAME, "skew", changed(rows, high, agree=0.1)) == "does not"
    assert verdict(NAME, "skew", changed(rows, high, skew=0.3)) == "same shape"


def test_kernels_that_are_equally_skewed_are_not_ranked(rows):
    def soft(row):
        return row["what"] == "exp"

    assert verdict(NAME, "exponential", changed(rows, soft, skew=0.9, agree=0.9)) == "reproduces"
    assert verdict(NAME, "exponential", changed(rows, soft, skew=0.01)) == "does not"


def test_tables_and_figure_take_all_rows(rows):
    tables, figure = shown(NAME, rows)
    assert all(table.rows for table in tables)
    assert all(axes.get_xlabel() and axes.get_title() for axes in figure.axes)
