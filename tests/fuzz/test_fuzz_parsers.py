"""The parsers' fuzzer: a short run with fixed seeds, and proof that it sees what it is meant to see."""

import random

import pytest

from sparing.transformers.recipe import Recipe
from tests.fuzz import parsers
from tests.fuzz.guided import Choices, case_of

CASES = {"specs": 300, "recipes": 40, "configs": 40, "documents": 150, "results": 12, "kept": 60}


@pytest.mark.parametrize("target", parsers.TARGETS)
def test_parsers_refuse_or_read_what_is_drawn(target):
    rng = random.Random(f"pytest {target}")
    for _ in range(CASES[target]):
        parsers.check(parsers.draw_of(target, rng))


@pytest.mark.parametrize("target", parsers.TARGETS)
def test_good_input_is_read(target, monkeypatch):
    """The control of the cases: what damage is done to is whole."""
    refusals = []
    monkeypatch.setattr(parsers, "_refused", lambda error, names: refusals.append(str(error)))
    for number, name in enumerate(parsers.FILES) if target == "documents" else [(0, None)]:
        good = {
            "specs": b"window(size=8)", "documents": b"" if name is None else parsers._good_file(name),
        }.get(target) or parsers.json.dumps(parsers._good_json(target)).encode()  # fmt: skip
        start = bytes([0, number]) if target == "documents" else b"\0"
        parsers.check(case_of(target, start + good, parsers))
    assert [said for said in refusals if "a.json is JSON" not in said] == []


@pytest.mark.parametrize("error", [KeyError("x"), RecursionError("x"), ValueError(""), ValueError("something is wrong"), ValueError("recipe.json: two\nlines")], ids=repr)  # fmt: skip
def test_a_parser_that_fails_otherwise_is_caught(error, monkeypatch):
    def broken(found):
        raise error

    case = {"target": "recipes", "text": parsers.json.dumps(parsers.RECIPE)}
    parsers.check(case)
    monkeypatch.setattr(Recipe, "load", broken)
    with pytest.raises(AssertionError):
        parsers.check(case)


def test_escapes_that_reach_the_terminal_are_caught(monkeypatch):
    recipe = {"version": 1, "layers": {}, "about": {"a": "\x1b[31m"}}
    case = {"target": "recipes", "text": parsers.json.dumps(recipe)}
    parsers.check(case)
    monkeypatch.setattr("sparing.report.terminal.printable", lambda text: text)
    with pytest.raises(AssertionError, match="printed"):
        parsers.check(case)


def test_cases_are_the_same_for_the_same_seed_or_bytes():
    for target in parsers.TARGETS:
        one, other = (parsers.draw_of(target, random.Random(3)) for _ in range(2))
        assert one == other
        data = b"\1" + random.Random(5).randbytes(300)
        assert case_of(target, data, parsers) == case_of(target, data, parsers)
    assert Choices(b"\xff" * 8).randrange(10) == 9 or Choices(b"").randrange(10) == 0


def test_shrinking_makes_cases_shorter():
    case = {"target": "specs", "text": "window(size=8)"}
    shorter = list(parsers.shrink(case))
    assert shorter
    assert all(len(other["text"]) < len(case["text"]) for other in shorter)
