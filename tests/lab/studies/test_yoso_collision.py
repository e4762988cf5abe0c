import math

import pytest
import torch

from sparing_lab.studies.rows import pick
from sparing_lab.studies.study import Settings
from sparing_lab.studies.yoso_collision import COSINES, HASHES, PAIRS, STUDY, curves, rates, vectors
from tests.support.verdicts import changed, shown, verdict

NAME = "yoso-collision"


@pytest.fixture(scope="module")
def rows():
    """The curves as they are, and hashes that obey the law."""
    laws = {x: (1 - math.acos(x) / math.pi) ** 8 for x in COSINES}
    hashes = [
        {"what": "hash", "hash": name, "x": x, "law": law, "rate": law, "low": 0.98 * law, "high": 1.02 * law}
        for name in HASHES
        for x, law in laws.items()
    ]
    return [{"what": "curves", "bits": 8, **curves(8)}, *hashes]


def is_curves(row):
    return row["what"] == "curves"


def test_the_curves_are_those_of_the_formulas(rows):
    found = rows[0]
    for place in (3, 150, 399 - 4):
        x, p = found["at"][place], 1 - math.acos(found["at"][place]) / math.pi
        assert found["collision"][place] == pytest.approx(p**8)
        assert found["collision first"][place] == pytest.approx(8 * p**7 / (math.pi * math.sqrt(1 - x * x)))
        assert found["exponential second"][place] == pytest.approx(64 * math.exp(8 * (x - 1)))
        assert found["bound"][place] == pytest.approx(4 * p**8)
    assert found["collision at the ends"] == [0.0, 1.0]


def test_vectors_have_the_cosines():
    found = vectors(3, 20, 0)
    assert found.shape == (3, 1 + len(COSINES), PAIRS, 20)
    assert torch.allclose(found.norm(dim=-1), torch.ones(1, dtype=torch.float64))
    wanted = torch.tensor(COSINES, dtype=torch.float64).view(-1, 1).expand(3, -1, PAIRS)
    assert torch.allclose((found[:, :1] * found[:, 1:]).sum(-1), wanted)


def test_the_hash_of_the_library_has_the_law_and_consecutive_coordinates_have_not():
    """Narrow vectors show it soonest: at width 32 and cosine 0.5 such codes collide a sixth too rarely."""
    shares = {}
    for name in ("hadamard", "contiguous"):
        at = pick(rates(name, 250, 8, 32), x=0.5)[0]
        shares[name] = (at["low"] / at["law"], at["high"] / at["law"])
    assert shares["hadamard"][0] < 1 < shares["hadamard"][1] < 1.1
    assert 0.7 < shares["contiguous"][0] < shares["contiguous"][1] < 0.95


def test_what_the_paper_says_of_the_curves(rows):
    assert verdict(NAME, "positive", rows) == "same shape"
    assert verdict(NAME, "positive", changed(rows, is_curves, **{"collision at the ends": [0.1, 1.0]})) == "reproduces"
    assert verdict(NAME, "infinite", rows) == "reproduces"
    assert verdict(NAME, "bound", rows) == "reproduces"
    assert verdict(NAME, "aligned", rows) == "same shape"
    assert verdict(NAME, "aligned", changed(rows, is_curves, collision=rows[0]["exponential"])) == "reproduces"


def test_other_curves_fail(rows):
    falls = [-value for value in rows[0]["collision first"]]
    assert verdict(NAME, "positive", changed(rows, is_curves, **{"collision first": falls})) == "does not"
    assert verdict(NAME, "infinite", changed(rows, is_curves, **{"collision first": [5.0] * 399})) == "does not"
    assert verdict(NAME, "bound", changed(rows, is_curves, bound=[2 * x for x in rows[0]["bound"]])) == "does not"
    assert verdict(NAME, "aligned", changed(rows, is_curves, collision=rows[0]["collision"][::-1])) == "does not"


@pytest.mark.parametrize(("key", "name"), [("law", "hadamard"), ("law", "gaussian"), ("contiguous", "contiguous")])
def test_a_hash_that_collides_too_rarely_fails(rows, key, name):
    def one(row):
        return row.get("hash") == name and row["x"] == 0.5

    law = pick(rows, what="hash", x=0.5)[0]["law"]
    assert verdict(NAME, key, rows) == "reproduces"
    near = changed(rows, one, rate=0.95 * law, low=0.94 * law, high=0.96 * law)
    assert verdict(NAME, key, near) == "same shape"
    assert verdict(NAME, key, changed(rows, one, rate=0.8 * law, low=0.7 * law, high=0.9 * law)) == "does not"


def test_more_seeds_are_more_draws():
    counts = [{cell["draws"] for cell in STUDY.cells(Settings(seeds=k)) if "draws" in cell} for k in (1, 3)]
    assert counts == [{2000}, {6000}]
    assert {cell["draws"] for cell in STUDY.cells(Settings("paper")) if "draws" in cell} == {20000}


def test_tables_and_figure_take_all_rows(rows):
    tables, figure = shown(NAME, rows)
    assert all(table.rows for table in tables)
    assert all(axes.get_xlabel() and axes.get_title() for axes in figure.axes)
