"""Times of training steps, beside exact attention."""

import re

import pytest

from sparing.cli.main import main
from sparing_lab.training.config import Config
from sparing_lab.training.race import time_steps

SMALL = Config("masked", max_length=64, batch_size=1, num_layers=1)


def test_every_method_takes_the_same_step():
    exact, (same,) = time_steps(SMALL, ["exact"], rounds=2)
    assert 0 < exact.low <= exact.median <= exact.high
    assert same.median > 0


def race(*options):
    return main(["train", "masked", "--race", "yoso(hashes=2), window(size=8)", "--batch-size", "1", *options])


def test_the_table_has_a_row_for_each_length(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert race("--lengths", "32", "64", "--rounds", "1") == 0
    head, line, *rows = capsys.readouterr().out.splitlines()
    assert head.count("|") == line.count("|") == 5
    assert [row.split()[1] for row in rows] == ["32", "64"]
    assert all(re.search(r"\d\.\d\dx \(\d", row) for row in rows)
    assert race("--max-length", "32", "--rounds", "1") == 0
    assert capsys.readouterr().out.splitlines()[2].startswith("| 32 |")
    assert not list(tmp_path.iterdir())


def test_a_method_that_cannot_train_is_named():
    with pytest.raises(ValueError, match="no gradient"):
        time_steps(SMALL, ["top_keys(keys=4)"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--rounds", "0"), "rounds=0 must be at least 1"),
        (("--out", "run"), "--out=run has no meaning with --race"),
        (("--method", "exact"), "--method=exact has no meaning with --race"),
    ],
)
def test_options_that_a_race_cannot_use_are_refused(options, said, capsys):
    assert race(*options) == 2
    assert said in capsys.readouterr().err


def test_options_of_a_race_are_refused_without_it(capsys):
    assert main(["train", "masked", "--lengths", "32"]) == 2
    assert "--lengths and --rounds belong to --race" in capsys.readouterr().err
