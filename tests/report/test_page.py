"""The HTML report, as text: whole, escaped, and whole again where numbers are missing."""

import builtins
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from sparing.report.page import _inside_script, page
from sparing.report.page_charts import front, trade
from sparing.report.page_table import full_table
from sparing.report.printable import printable
from sparing.workbench.comparison.judgement import FASTER, ORACLE, REFUSED, SLOWER, UNSAFE
from sparing.workbench.comparison.seconds import Seconds
from sparing.workbench.comparison.verdict import Comparison, Row
from sparing.workbench.estimate import Estimate
from sparing.workbench.timing import Interval
from tests.support.comparisons import BAD, FAST, REASON, SLOW, example, measured

HOSTILE = "</script><script>window.stolen = 1</script><img src=x onerror='window.stolen = 2'>\u2028&amp;"


class Outline(HTMLParser):
    """Tags with their attributes, and the text of each element that has an id or is a title, heading or script."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self._open = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag in ("title", "h1", "h2", "script", "style", "code"):
            self._open.append((tag, len(self.texts)))
            self.texts.append((tag, ""))

    def handle_endtag(self, tag):
        if self._open and self._open[-1][0] == tag:
            self._open.pop()

    def handle_data(self, data):
        for tag, place in self._open:
            self.texts[place] = (tag, self.texts[place][1] + data)

    def all(self, tag):
        return [text for name, text in self.texts if name == tag]

    def data(self):
        return json.loads(self.all("script")[0], parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def loads_from_elsewhere(text):
    """What a browser would fetch for the page's own markup and styles."""
    found = Outline(text)
    names = ("src", "href", "srcset", "data", "action", "poster", "background", "ping", "manifest")
    given = [held[name] for _, held in found.tags for name in names if held.get(name)]
    style = " ".join(found.all("style"))
    return [link for link in given if not link.startswith(("data:", "#"))] + re.findall(r"@import|url\(", style)


def handlers(text):
    """Scripts in attributes."""
    return [name for _, held in Outline(text).tags for name in held if name.startswith("on")]


def test_the_page_is_whole():
    text = page(example())
    found = Outline(text)
    assert loads_from_elsewhere(text) == []
    policy = next(held["content"] for tag, held in found.tags if held.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "http" not in policy
    assert found.all("h1") == [example().headline] == ["Turn on window: 1.25x"]
    assert example().summary in text
    assert found.all("h2") == [
        "Turn it on", "How wrong against how fast", "Where it goes wrong", "From which length on it pays",
        "Where a head looks", "All numbers", "What the words mean",
    ]  # fmt: skip
    for words in (
        "minilm",
        "Python help topics",
        "4 documents of up to 512 tokens, 3 of them cut",
        "AMD EPYC, 2 threads",
    ):
        assert words in text
    assert f'sparing.approximate(model, "{FAST}")' in found.all("code")[0]
    assert REASON in text
    assert len(found.all("script")) == 3


@pytest.mark.parametrize("broken", ['<img src="https://example.org/x.png">', "<style>@import 'x.css'</style>"])
def test_a_page_that_is_not_whole_is_caught(broken):
    assert loads_from_elsewhere(page(example()).replace("</main>", f"{broken}</main>"))


def test_every_text_stays_text():
    rows = (
        replace(measured(FAST, FASTER, 0.002, 1.25), method=HOSTILE),
        Row("refused", REFUSED, HOSTILE),
    )
    names = ("model", "kind", "data", "metric", "summary")
    layers = tuple(replace(layer, layer=HOSTILE) for layer in rows[0].layers[:1])
    pictures = tuple(replace(each, method=HOSTILE, layer=HOSTILE) for each in example().maps[:1])
    found = example(
        **dict.fromkeys(names, HOSTILE), rows=(replace(rows[0], layers=layers), rows[1]), maps=pictures,
        machine=dict.fromkeys(("cpu", "threads", "torch", "sparing"), HOSTILE),
    )  # fmt: skip
    text = page(found)
    plain, hostile = Outline(page(example())), Outline(text)
    assert len(hostile.all("script")) == len(plain.all("script")) == 3
    assert handlers(text) == []
    assert loads_from_elsewhere(text) == []
    assert hostile.all("h1") == [f"Turn on {printable(HOSTILE)}: 1.25x"]
    assert hostile.data()["trade"]["points"][0]["method"] == printable(HOSTILE)
    raw = re.search(r'id="data">(.*?)</script>', text, re.S)[1]
    assert not re.search("[<>&\u2028\u2029]", raw)
    unescaped = text.replace("</h1>", f"{HOSTILE}</h1>")
    assert handlers(unescaped) == ["onerror"], "control"
    assert len(Outline(unescaped).all("script")) == 4, "control"


def rows_without_numbers():
    whole = measured(FAST, SLOWER, 0.002, 1.25)
    nothing = Estimate(math.nan, None, None, 1)
    endless = Interval(math.inf, 0.0, math.inf)
    return {
        "none": (),
        "refused": (Row("nystrom", REFUSED, REASON),),
        "one document": (replace(whole, verdict=UNSAFE, change=Estimate(0.1, None, None, 1)),),
        "not a number": (replace(whole, verdict=UNSAFE, change=nothing, error=nothing, substitution=math.nan),),
        "infinite": (
            replace(whole, change=Estimate(math.inf, None, None, 4), flops_reduction=math.inf, keys_read=math.nan),
        ),
        "no time": (replace(whole, time=None, points=(), crossover=None),),
        "endless time": (replace(whole, time=Seconds(endless, endless, 0.0, None, None)),),
        "no layers": (replace(whole, layers=()),),
        "oracle": (replace(whole, verdict=ORACLE, time=None, points=()),),
    }


@pytest.mark.parametrize("case", rows_without_numbers())
def test_what_is_missing_breaks_nothing(case):
    found = example(rows=rows_without_numbers()[case], maps=(), machine={})
    text = page(found)
    held = Outline(text).data()
    assert held["heads"] == []
    assert "Where a head looks" not in text
    assert page(Comparison.from_json(found.to_json())), "and from a file"
    if case in ("none", "refused", "not a number", "infinite", "no time", "endless time"):
        assert "How wrong against how fast" not in text
    if case in ("none", "refused", "oracle", "no time"):
        assert "From which length on it pays" not in text


def test_exact_attention_may_be_the_answer():
    slow, bad = measured(SLOW, SLOWER, 0.0005, 0.75), measured(BAD, UNSAFE, 0.12, 1.6)
    text = page(example(rows=(replace(slow, method="exact"), slow, bad)))
    assert Outline(text).all("h1") == ["Keep exact attention"]
    assert "Turn it on" not in Outline(text).all("h2")
    assert "is safe, but slower here" in text
    assert f"sparing.approximate(model, &#34;{SLOW}&#34;)" in text
    text = page(example(rows=(bad,)))
    assert Outline(text).all("h1") == ["Keep exact attention"]
    assert "sparing.approximate" not in text


def test_exact_attention_by_sparing_is_a_row_of_its_own_and_may_win():
    exact = replace(measured("exact", FASTER, 0.0, 1.3), change=Estimate(0.0, 0.0, 0.0, 4))
    slow = measured(SLOW, SLOWER, 0.0005, 0.75)
    found = example(rows=(slow, exact))
    assert Outline(page(found)).all("h1") == ["Turn on exact: 1.30x"]
    assert "sparing.approximate(model, &#34;exact&#34;)" in page(found)
    _, rows = full_table(found)
    assert [row[0].text for row in rows] == ["exact", "the model's own", SLOW]
    approximation = measured(FAST, FASTER, 0.002, 1.32)
    assert example(rows=(approximation, exact)).recommended == exact, (
        "what changes more must be faster by more than noise"
    )
    approximation = measured(FAST, FASTER, 0.002, 1.4)
    assert example(rows=(exact, approximation)).recommended == approximation


def test_the_fastest_of_the_safe_wins():
    rows = (measured(FAST, FASTER, 0.002, 1.25), measured(SLOW, FASTER, 0.001, 1.5), measured(BAD, UNSAFE, 0.2, 3.0))
    assert f"sparing.approximate(model, &#34;{SLOW}&#34;)" in page(example(rows=rows))


def test_the_table_holds_what_was_found():
    titles, rows = full_table(example())
    first = dict(zip(titles, rows[0], strict=True))
    assert {title: cell.text for title, cell in first.items()} == {
        "method": FAST, "verdict": FASTER, "change": "0.20%", "at most": "0.30%", "error": "0.0100",
        "substitution": "0", "keys read": "66", "FLOPs saved": "4.00x", "attention speed": "1.88x", "model speed": "1.25x",
        "batched speed": "1.25x", "memory saved": "1.13x", "crossover": "820", "why refused": "",
    }  # fmt: skip
    assert first["model speed"].value == 1.25
    by_method = {row[0].text: dict(zip(titles, row, strict=True)) for row in rows}
    assert by_method[BAD]["crossover"].text == ">2048"
    always = measured(FAST, FASTER, 0.002, 9.0, crossover=256)
    assert [cell.text for cell in full_table(example(rows=(always,)))[1][0]][-1] == "<256"
    assert by_method["nystrom(landmarks=64)"]["why refused"].text == REASON
    shown = {title: cell.text for title, cell in by_method["the model's own"].items() if cell.text}
    assert shown == {
        "method": "the model's own", "verdict": "baseline", "change": "0%", "at most": "0%", "error": "0", "substitution": "0",
        "FLOPs saved": "1x", "attention speed": "1x", "model speed": "1x", "batched speed": "1x", "memory saved": "1x",
    }  # fmt: skip
    alone = full_table(example(rows=(Row("nystrom", REFUSED, REASON),)))
    assert alone[0] == ["method", "verdict", "why refused"], "no empty columns"


def test_the_table_is_sorted_by_verdict_and_speed_with_the_exact_model_below_what_is_faster():
    quick = measured("lsh(rounds=2)", FASTER, 0.002, 1.5)
    _, rows = full_table(example(rows=(*reversed(example().rows), quick)))
    assert [row[0].text for row in rows] == [
        "lsh(rounds=2)", FAST, "the model's own", SLOW, "random_features(features=64)", BAD, "top_keys(keys=64)",
        "nystrom(landmarks=64)",
    ]  # fmt: skip


def test_a_chart_has_no_room_for_changes_that_cannot_be():
    reaches = Estimate(0.001, -0.002, 0.004, 4)
    rows = (measured(FAST, FASTER, 0.002, 1.25, change=reaches),)
    found = trade(example(rows=rows))
    assert (found["signed"], found["points"][0]["change"]) == (False, [0.001, 0.0, 0.004]), (
        "1 - cosine is never below 0"
    )
    for metric in ("change of the perplexity", "a metric that is not known"):
        found = trade(example(rows=rows, kind="language model", metric=metric))
        assert (found["signed"], found["points"][0]["change"]) == (True, [0.001, -0.002, 0.004])


def test_scores_against_labels_are_shown():
    row = measured(FAST, FASTER, 0.002, 1.25, end={"exact_f1": 0.75, "f1": 0.5, "score": 1.0, "exact_score": 1.0})
    found = example(rows=(row,))
    titles, rows = full_table(found)
    assert [cell.text for title, cell in zip(titles, rows[0], strict=True) if title == "f1"] == ["0.5000"]
    assert "0.7500" in [cell.text for cell in rows[1]], "of the exact model"
    assert not {"score", "accuracy"} & set(titles)
    assert "Against the labels, the exact model: f1 0.7500." in page(found)
    assert "Against the labels" not in page(example())


def test_the_chart_has_speeds_and_a_front():
    found = trade(example())
    points = {point["method"]: point for point in found["points"]}
    assert list(points) == [FAST, SLOW, BAD], "neither refused nor without a number"
    assert points[FAST]["speed"] == pytest.approx([1.25, 1.125, 1.375]), "right of 1 is faster"
    assert points[FAST]["label"] == "window"
    assert [point["front"] for point in found["points"]] == [True, False, True]
    assert [point["method"] for point in found["oracles"]] == ["top_keys(keys=64)"]
    assert front([1.0, 1.1], [0.0, 0.0]) == [False, True]


def test_without_plotly_the_way_out_is_named(monkeypatch):
    real = builtins.__import__

    def missing(name, *rest, **options):
        if name.startswith("plotly"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ModuleNotFoundError, match=r"plotly is missing; run: pip install 'sparing\[cli\]'"):
        page(example())


def test_code_cannot_end_its_script():
    text = "a = '</script>', b = '</SCRIPT>', c = '<!--', d = '</div>'"
    assert _inside_script(text) == r"a = '<\/script>', b = '<\/SCRIPT>', c = '<\!--', d = '</div>'"
