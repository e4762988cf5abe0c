"""The race of training steps."""

import re

import pytest

from sparing_lab.training.step import main, step_ratios


def test_every_side_takes_the_same_step():
    exact, (same,) = step_ratios(["exact"], 64, rounds=2, width=64, layers=1)
    assert 0 < exact.low <= exact.median <= exact.high
    assert same.median > 0


def test_the_table_has_a_row_for_each_length(capsys):
    assert (
        main(["--methods", "yoso(hashes=2), window(size=8)", "--lengths", "32", "64", "--rounds", "1", "--width", "64"])
        == 0
    )
    head, line, *rows = capsys.readouterr().out.splitlines()
    assert head.count("|") == line.count("|") == 5
    assert [row.split()[1] for row in rows] == ["32", "64"]
    assert all(re.search(r"\d\.\d\dx \(\d", row) for row in rows)


def test_a_method_that_cannot_train_is_named():
    with pytest.raises(ValueError, match="no gradient"):
        step_ratios(["top_keys(keys=4)"], 32)
