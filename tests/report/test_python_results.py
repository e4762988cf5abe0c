"""Results in an interpreter and in a notebook: short, and escaped."""

import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

import sparing
from sparing.progress import ProgressLines
from sparing.report.page import page
from sparing.workbench.pages import page_of
from sparing.workbench.timing import Interval
from tests.support.comparisons import FAST, example, measured
from tests.support.generations import row_of
from tests.support.small_models import subject

HOSTILE = "<script>alert(1)</script>\x1b[31m"


def test_a_comparison_is_short_in_an_interpreter_and_a_table_in_a_notebook():
    found = example()
    assert repr(found) == "<Comparison of 6 settings in minilm on Python help topics: Turn on window: 1.25x>"
    shown = found._repr_html_()
    assert shown.startswith("<p><b>Turn on window: 1.25x</b></p><p>On 4 documents")
    assert f"<tr><td>{FAST}</td><td>safe and faster</td><td>0.20%</td><td>1.25x</td></tr>" in shown
    generated = example(rows=(), generation=(row_of("not safe", 2000, 1.9),))._repr_html_()
    assert "<td>multipole</td><td>decode</td><td>2000</td><td>not safe</td><td>0.10%</td><td>1.90x</td>" in generated


def test_a_notebook_shows_hostile_text_as_text():
    row = measured(HOSTILE, "safe and faster", 0.002, 1.25)
    shown = example(rows=(row,), summary=HOSTILE, maps=())._repr_html_()
    assert "<script>" not in shown
    assert "\x1b" not in shown
    assert "&lt;script&gt;alert(1)&lt;/script&gt;?[31m" in shown


def test_a_comparison_writes_its_page(tmp_path):
    path = tmp_path / "page.html"
    example().to_html(path)
    assert path.read_text(encoding="utf-8") == page(example())


def test_a_page_that_nothing_draws_names_the_way_out():
    with pytest.raises(RuntimeError, match=r"nothing draws a int yet; get the class from sparing\.int, or import"):
        page_of(1)


def test_the_public_class_can_write_pages():
    """In a process of its own: this one has imported everything."""
    code = "import sparing; from sparing.workbench import pages; sparing.Comparison; print(len(pages._DRAWN))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "1\n", done.stderr


def test_a_plan_is_one_sentence_in_an_interpreter_and_a_table_in_a_notebook():
    found = sparing.plan(
        subject(), [f"text {n} of many, with some words" for n in range(70)], tolerance=0.5, rounds=1, jobs=1,
        methods=["window(size=4)"], length=60, progress=False,
    )  # fmt: skip
    assert repr(found) == f"<Plan for {found.model} on {found.data}: {found.reason}>"
    shown = found._repr_html_()
    assert shown.startswith("<p><b>Keep exact attention: ")
    assert "confidence" not in shown, "nothing is promised of exact attention"
    recipe = sparing.Recipe({"*": "window(size=4)"})
    shown = replace(found, recipe=recipe, reason="Turn it on.", gain=Interval(1.5, 1.4, 1.6))._repr_html_()
    assert "<p>Promise: with 95% confidence at least 90% of documents like these change by 50% at most" in shown
    assert "<p>Gain: 1.50x (1.40 to 1.60).</p>" in shown
    assert "<tr><td>*</td><td>window(size=4)</td></tr>" in shown


def test_a_handle_shows_what_layers_run_in_a_notebook():
    with sparing.approximate(subject().model, "window(size=4)") as handle:
        shown = handle._repr_html_()
    assert shown.startswith("<p><b>sparing on BertModel: ")
    assert "window(size=4)</p>" in shown


def test_an_inspection_shows_shapes_and_no_numbers():
    q = torch.randn(1, 2, 16, 8)
    found = sparing.inspect(q, q, q, method="window(size=4)")
    assert repr(found).startswith("<Inspection: output [1, 2, 16, 8], lse ")
    assert "tensor" not in repr(found)
    assert "<tr><td>output</td><td>[1, 2, 16, 8]</td></tr>" in found._repr_html_()


def test_progress_can_be_silenced(capsys, monkeypatch):
    monkeypatch.setattr("sparing.progress.ProgressLines", partial(ProgressLines, every=0.0))
    given = {"methods": ["window(size=4)"], "length": 60, "rounds": 1, "jobs": 1, "lengths": False}
    texts = ["some words to read", "other words to read", "a third text"]
    sparing.compare(subject(), texts, **given)
    assert capsys.readouterr().err.splitlines()[0] == "1 of 2: window(size=4): quality", "no lengths are counted"
    sparing.compare(subject(), texts, progress=False, **given)
    assert capsys.readouterr().err == ""
    steps = []
    sparing.compare(subject(), texts, progress=lambda *step: steps.append(step), **given)
    assert steps[0][1] == 1
    assert capsys.readouterr().err == ""
