"""Rows, curves and tables."""

import pytest

from sparing_lab.papers import numbers
from sparing_lab.studies.rows import curve, curves, distinct, grouped, mean, means, pick, power, span, the
from sparing_lab.studies.tables import listing, pivot, shown

ROWS = [
    {"side": "a", "n": 4, "y": 2.0},
    {"side": "a", "n": 2, "y": 1.0},
    {"side": "b", "n": 2, "y": 5.0},
    {"side": "a", "n": 2, "y": 3.0},
]


def test_rows_are_found_by_their_entries():
    assert pick(ROWS, side="b") == [ROWS[2]]
    assert the(ROWS, n=4) == ROWS[0]
    with pytest.raises(LookupError, match="3 rows"):
        the(ROWS, n=2)


def test_rows_are_grouped_in_the_order_of_their_appearance():
    assert list(grouped(ROWS, "side")) == distinct(ROWS, "side") == ["a", "b"]
    assert list(grouped(ROWS, "side", "n")) == [("a", 4), ("a", 2), ("b", 2)]
    assert grouped(ROWS, lambda row: row["n"] > 2)[True] == [ROWS[0]]


def test_curves_are_means_in_the_order_of_x():
    assert list(curve(pick(ROWS, side="a"), "n", "y").items()) == [(2, 2.0), (4, 2.0)]
    assert curves(ROWS, "n", "y", "side") == {"a": {2: 2.0, 4: 2.0}, "b": {2: 5.0}}
    assert means(ROWS, lambda row: -row["y"], "side") == {"a": -2.0, "b": -5.0}
    assert mean(ROWS, "y") == 2.75


def test_the_power_of_a_curve():
    assert power({1: 3.0, 2: 12.0, 4: 48.0}) == pytest.approx(2.0)


def test_a_span_is_one_number_where_both_ends_read_the_same():
    assert span([0.501, 0.499]) == "0.50"
    assert span([1, 3, 2], ".0f") == "1 to 3"


def test_tables_have_a_line_for_each_row_or_an_entry_for_each_pair():
    found = listing("t", ROWS[:1], {"side": "{side}", "twice": lambda row: f"{2 * row['y']:g}", "y": "{y:.2f}"})
    assert (found.columns, found.rows) == (["side", "twice", "y"], [["a", "4", "2.00"]])
    found = pivot(
        "t", ["side", "upper"], ["a", "b"], [1, 2], lambda side, n: side * n, lambda side: [side, side.upper()]
    )
    assert (found.columns, found.rows) == (["side", "upper", "1", "2"], [["a", "A", "a", "aa"], ["b", "B", "b", "bb"]])
    assert pivot("t", "x", ["a"], {"one": 1}, lambda line, n: f"{line}{n}").rows == [["a", "a1"]]
    assert [shown(None), shown(None, missing="-"), shown(0.5, ".0%")] == ["", "-", "50%"]


def test_the_papers_numbers_have_whole_numbers_for_keys():
    assert numbers("yoso", "table 4")["YOSO-32"][4096]["forward"] == 6.31
    assert numbers("mca", "tables 1 and 2")["BERT"]["SST-2"]["flops"] == [5.58, 6.71, 8.13, 12.34]
    assert numbers("value-aware", "table 2")["poly"]["top_keys"][65] == 310.2
    assert numbers("skyformer", "accuracy")["Skyformer"]["Image"] == 40.77
