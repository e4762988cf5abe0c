"""The fuzzer of the index: a fixed few of its cases pass, and it finds an index that is broken."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

import sparing
from sparing.methods.multipole.past import MultipolePast
from tests.fuzz import index as fuzzer


def cases(count: int, seed: str = "control") -> Iterator[dict[str, Any]]:
    return (fuzzer.draw(random.Random(f"{seed} {i}")) for i in range(count))


def test_a_few_cases_pass():
    for case in cases(6, "a few"):
        fuzzer.check(case)


def crop_that_forgets_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MultipolePast, "crop", lambda self, length: None)


def select_in_the_wrong_order(patch: pytest.MonkeyPatch) -> None:
    right = sparing.Index.select
    patch.setattr(sparing.Index, "select", lambda self, items: right(self, items.flip(0)))


def copies_that_share_their_past(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MultipolePast, "__deepcopy__", lambda self, memo: copy.copy(self), raising=False)


def masks_that_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sparing.Index, "_fresh", lambda self, keep, n_q: None)


def blocks_that_are_never_copied(patch: pytest.MonkeyPatch) -> None:
    """The copy of a block that is complete is left empty."""
    patch.setattr(MultipolePast, "_append", lambda self, *given: None)


def a_copy_that_stays_in_inference_mode(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("sparing.native.tensors.writable", lambda x: x)


BROKEN = {  #: and what a case needs to show it
    crop_that_forgets_nothing: "crop",
    select_in_the_wrong_order: "select",
    copies_that_share_their_past: "copy",
    masks_that_are_forgotten: "attention",
    blocks_that_are_never_copied: "attention",
    a_copy_that_stays_in_inference_mode: "copy",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_index_is_found(broken, monkeypatch):
    """Control: within 200 cases, of which those are checked that use the method and what is broken."""
    for case in cases(200):
        if not case["spec"].startswith("multipole") or all(step["do"] != BROKEN[broken] for step in case["steps"]):
            continue
        with monkeypatch.context() as patch:
            broken(patch)
            found = fails(case)
        if found and not fails(case):
            return
    pytest.fail("200 cases pass")


def test_a_case_shrinks_to_what_matters(monkeypatch):
    """A failing case stays one while steps, tokens and settings go."""
    more = {"do": "attention", "mode": "no_grad", "hide": None, "odd": [], "layout": "room", "mask": "two"}
    steps = [
        {**more, "count": 20, "data": 1}, {**more, "count": 3, "data": 2}, {"do": "back", "mode": "plain"},
        {"do": "select", "mode": "plain", "count": 2, "data": 0}, {**more, "count": 1, "data": 4},
    ]  # fmt: skip
    case = {
        **next(cases(1)), "spec": "multipole(tolerance=0.3, block=16)", "dtype": "float32", "batch": 2,
        "heads": 2, "kv_heads": 1, "streams": None, "d": 4, "content": "topics", "kernels": True, "steps": steps,
    }  # fmt: skip
    assert not fails(case)
    select_in_the_wrong_order(monkeypatch)
    assert fails(case)
    for _ in range(6):
        case = next((other for other in fuzzer.shrink(case) if fails(other)), case)
    assert [step["do"] for step in case["steps"]] == ["attention", "select"]
    assert case["steps"][0].items() >= {"layout": "plain", "mask": "none", "mode": "plain"}.items()


def fails(case: dict[str, Any]) -> bool:
    try:
        fuzzer.check(case)
    except Exception:
        return True
    return False


def test_a_case_is_json():
    for case in cases(50):
        assert json.loads(json.dumps(case)) == case
