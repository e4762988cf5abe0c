"""What a comparison says first, and that every report names the same row."""

import itertools
import json
from dataclasses import replace

import pytest

from sparing.report.page import page
from sparing.report.table import show
from sparing.report.terminal import Terminal
from sparing.workbench.comparison.generation_row import generation_summary
from sparing.workbench.comparison.judgement import FASTER, ORACLE, REFUSED, SLOWER, UNKNOWN, UNSAFE, UNTIMED
from sparing.workbench.comparison.summary import summary
from sparing.workbench.comparison.verdict import Comparison
from tests.support.comparisons import BAD, FAST, SLOW, example, measured
from tests.support.generations import row_of


def prompts(*cases):
    """A comparison of prompts alone; a case: verdict and speed."""
    methods = itertools.cycle((FAST, SLOW, BAD))
    rows = [measured(method, verdict, 0.002, speed) for method, (verdict, speed) in zip(methods, cases, strict=False)]
    return example(rows=tuple(rows), maps=(), summary=summary(rows, 4, 512, 0.01, "m"))


def language_model(generation, rows=()):
    return example(
        kind="language model", rows=rows, maps=(), generation=generation, summary=generation_summary(generation)
    )


@pytest.mark.parametrize(
    ("cases", "words"),
    [
        ([(SLOWER, 0.5), (UNSAFE, 3.0)], "Keep exact attention"),
        ([(FASTER, 1.25), (FASTER, 1.5), (UNSAFE, 3.0)], "Turn on key_clusters: 1.50x"),
        ([(FASTER, 12.3), (UNKNOWN, 20.0)], "Turn on window: 12x"),
        ([(SLOWER, 0.5), (UNKNOWN, 2.0)], "Cannot tell yet"),
        ([(UNKNOWN, 0.5), (UNKNOWN, 1.0)], "Keep exact attention"),
        ([(UNSAFE, 0.5)], "Keep exact attention"),
        ([], "Keep exact attention"),
    ],
)
def test_six_words_say_what_to_do(cases, words):
    found = prompts(*cases)
    assert found.headline == words
    assert len(words.split()) <= 6


def test_exact_attention_alone_on_a_busy_machine_cannot_be_told():
    time = replace(measured(FAST, FASTER, 0.0, 1.3).time, disturbed="noise")
    rows = [measured("exact", UNTIMED, 0.0, 1.3, time=time)]
    found = example(rows=tuple(rows), maps=(), summary=summary(rows, 4, 512, 0.01, "m"))
    assert found.headline == "Cannot tell: this machine is busy"
    assert "too busy to time sparing's exact attention: noise. Measure again" in found.summary


def test_the_headline_says_what_a_language_model_turns_on():
    prompt = measured(FAST, FASTER, 0.002, 3.0)
    found = language_model((row_of(FASTER, 2000, 1.9), row_of(FASTER, 8000, 1.4)), (prompt,))
    assert found.headline == "Turn on multipole for generation: 1.40x", "at the longest context"
    assert language_model((row_of(UNSAFE, 2000, 1.9),), (prompt,)).headline == "Turn on window for prompts: 3.00x"
    assert language_model((row_of(UNKNOWN, 2000, 1.9),)).headline == "Cannot tell yet"
    later = (row_of(UNKNOWN, 2000, 1.9), row_of(SLOWER, 8000, 0.9))
    assert language_model(later).headline == "Keep exact attention", (
        "as the summary, which is about the longest context"
    )
    assert language_model((row_of(UNKNOWN, 2000, 1.0),)).headline == "Keep exact attention"


@pytest.mark.parametrize("verdicts", list(itertools.product((FASTER, SLOWER, UNKNOWN, UNSAFE), repeat=2)))
def test_every_report_names_the_row_of_the_headline(verdicts):
    found = prompts(*zip(verdicts, (1.25, 1.5), strict=True))
    row = found.recommended
    assert found.headline.startswith("Turn on") == (row is not None) == (FASTER in verdicts)
    with (console := Terminal(width=900)).capture() as shown:
        show(found, console=console)
    assert shown.get().startswith(f"{found.headline}\n{found.summary}")
    assert f"<h1>{found.headline}</h1>" in page(found)
    if row is not None:
        assert found.headline.split()[2] == f"{row.method.partition('(')[0]}:"
        assert f"{row.method} is {row.speed.median:.2f}x as fast" in found.summary
        assert f"sparing.approximate(model, &#34;{row.method}&#34;)" in page(found)


def test_what_is_not_safe_at_another_context_is_turned_on_for_its_own_alone():
    found = language_model((row_of(FASTER, 2000, 1.9), row_of(UNSAFE, 8000, 1.4, reason="3 of 20 facts kept")))
    assert found.headline == "Turn on multipole (2,000 tokens): 1.90x"
    assert len(found.headline.split()) <= 6
    assert found.summary.startswith("Generation after 2,000 tokens: turn on multipole.")
    assert found.summary.endswith(" After 8,000: not safe, 3 of 20 facts kept.")


def test_generation_names_the_row_of_the_headline():
    found = language_model((row_of(FASTER, 2000, 1.9), row_of(FASTER, 8000, 1.4), row_of(ORACLE, 9000, 2.0)))
    assert found.recommended.context == 8000
    assert found.summary.startswith("Generation after 8,000 tokens: turn on multipole.")
    assert "sparing.approximate(model, &#34;multipole&#34;, when=&#34;decode&#34;)" in page(found)


def test_json_holds_the_headline_and_reads_it_from_the_rows():
    found = example()
    held = json.loads(found.to_json())
    assert held["headline"] == "Turn on window: 1.25x"
    assert Comparison.from_json(found.to_json()).headline == held["headline"]
    assert Comparison.from_json(example(rows=example().rows[2:]).to_json()).headline == "Keep exact attention"
    assert {row.verdict for row in example().rows[2:]} == {UNSAFE, ORACLE, REFUSED}
