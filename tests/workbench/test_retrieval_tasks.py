"""Contexts with facts, and questions about them."""

from __future__ import annotations

import re

import pytest

from sparing.workbench.retrieval.tasks import HAYSTACKS, TASKS, make_context


def count_words(text):
    return len(text.split())


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("haystack", HAYSTACKS)
def test_a_context_has_every_answer_once_and_keeps_to_its_length(task, haystack):
    found = make_context(task, haystack, 900, 3, count_words)
    assert count_words(found.text) <= 900
    assert count_words(found.text) > 700, "and it is filled"
    assert found.questions
    for question in found.questions:
        answer = question.answer.strip()
        assert re.fullmatch(r"\d{5}", answer)
        assert len(re.findall(rf"\b{answer}\b", found.text)) == 1
        assert answer not in question.text
        assert 0 <= question.depth <= 1
        place = found.text.index(answer) / len(found.text)
        assert abs(place - question.depth) < 0.15


def test_questions_about_one_context_differ_in_name_and_answer():
    found = make_context("keys", "prose", 900, 0, count_words)
    assert len(found.questions) == 8
    assert len({q.answer for q in found.questions}) == len({q.text for q in found.questions}) == 8
    depths = sorted(q.depth for q in found.questions)
    assert all(i / 8 <= depth <= (i + 1) / 8 for i, depth in enumerate(depths)), "spread over the whole context"


def test_a_seed_gives_the_same_context_and_another_gives_another():
    one, same, other = (make_context("keys", "prose", 600, seed, count_words) for seed in (1, 1, 2))
    assert one == same
    assert one.text != other.text
    assert {q.answer for q in one.questions}.isdisjoint(q.answer for q in other.questions)


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_needle_lies_where_it_is_asked_for(depth):
    found = make_context("needle", "repeated", 800, 0, count_words, depth=depth)
    place = found.text.index(found.questions[0].answer.strip()) / len(found.text)
    assert abs(place - depth) < 0.05


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"task": "riddle"}, r"task='riddle' is not known; tasks: needle, keys"),
        ({"haystack": "hay"}, r"haystack='hay' is not known; haystacks: prose"),
        ({"length": 20}, r"length=20 is too short for the facts of task 'keys', which take \d+ tokens"),
        ({"depth": 1.5}, r"depth=1.5 must be from 0 to 1"),
    ],
)
def test_bad_arguments_are_named(change, words):
    given = {"task": "keys", "haystack": "prose", "length": 500, "seed": 0, "count_tokens": count_words, **change}
    with pytest.raises(ValueError, match=words):
        make_context(**given)
