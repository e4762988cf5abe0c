"""What a terminal is sent: text from outside is shown, and never obeyed."""

import io
import json
import re
import sys
from dataclasses import replace

import pytest

from sparing.cli.main import main
from sparing.report.page import page
from sparing.report.printable import printable
from sparing.report.terminal import Terminal, progress
from sparing.workbench.comparison.judgement import FASTER, REFUSED
from sparing.workbench.comparison.verdict import Row
from tests.fuzz.parsers import unsafe
from tests.support.comparisons import FAST, example, measured

#: Colour, a C1 control, an OSC hyperlink, a carriage return, a bell, bidirectional overrides, a separator, a surrogate.
CONTROLS = (
    "\x1b[31m", "\x9b2J", "\x1b]8;;http://evil.example\x1b\\here", "\rover", "\x07", "\u202e", "\u2066", "\u2028", "\ud800",
)  # fmt: skip
MARKUP = "[red]red[/red] [link=http://evil.example]here[/link] [/] :smiley:"
HOSTILE = f"{''.join(CONTROLS)}{MARKUP}"


def flat(text):
    """Without the line breaks of the layout."""
    return re.sub(r"\s+", "", text)


@pytest.fixture
def hostile():
    rows = (
        replace(measured(FAST, FASTER, 0.002, 1.25), method=HOSTILE),
        Row(HOSTILE, REFUSED, HOSTILE),
    )
    layers = tuple(replace(layer, layer=HOSTILE) for layer in rows[0].layers)
    return example(
        **dict.fromkeys(("model", "kind", "data", "metric", "summary"), HOSTILE),
        rows=(replace(rows[0], layers=layers), rows[1]), machine=dict.fromkeys(("cpu", "threads"), HOSTILE), maps=(),
    )  # fmt: skip


def test_a_report_shows_hostile_text_as_text(hostile, tmp_path, capsys):
    path = tmp_path / "found.json"
    path.write_text(hostile.to_json())
    assert main(["show", str(path), "--layers"]) == 0
    out = capsys.readouterr().out
    assert unsafe(out) == set()
    assert flat(out).count(flat(MARKUP)) >= 9, "summary, model, kind, data, machine, metric, methods and the refusal"
    assert r"\x1b[31m" in out


def test_a_recipe_shows_hostile_text_as_text(tmp_path, capsys):
    path = tmp_path / f"x{CONTROLS[0]}.json"
    recipe = {
        "version": 1, "architecture": HOSTILE, "layers": {HOSTILE: "window(size=8)"},
        "about": {HOSTILE: HOSTILE, "nested": {"list": [HOSTILE]}},
    }  # fmt: skip
    path.write_text(json.dumps(recipe))
    assert main(["show", str(path)]) == 0
    out = capsys.readouterr().out
    assert unsafe(out) == set()
    assert flat(out).count("[/red]") >= 4, "title and about; the name of the layer is broken between columns"


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "{0}.json"], ["show", "good.json", "--html", "/no/{0}"], ["compare", "/{0}"],
        ["compare", "--data", "{0}.txt"], ["plan", "--data", "{0}.txt"], ["train", "--config", "{0}"], ["study", "{0}"],
        ["bench", "--methods", "{0}"], ["bench", "--lengths", "{0}"],
    ],
)  # fmt: skip
def test_errors_show_hostile_names_as_text_on_one_line(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.json").write_text(example().to_json())
    hostile = "\x1b[31m\n\r\u202e\x9bx"
    assert main([each.format(hostile) for each in arguments]) == 2
    err = capsys.readouterr().err
    assert unsafe(err) == set()
    assert err.count("\n") == 1
    assert r"\x1b[31m" in err


def test_words_that_are_not_understood_are_shown_as_text(capsys):
    with pytest.raises(SystemExit):
        main(["show", "a.json", "--b\x1b[31m.json"])
    err = capsys.readouterr().err
    assert unsafe(err) == set()
    assert r"b\x1b[31m.json" in err


def test_progress_shows_text():
    written = io.StringIO()
    with progress(Terminal(file=written, force_terminal=True, width=300), "loading") as tell:
        tell(f"{CONTROLS[2]}{MARKUP}", 1, 2)
    assert MARKUP in written.getvalue()
    assert r"\x1b]8;;http://evil.example" in written.getvalue()
    assert "\x1b]8" not in written.getvalue()


def test_columns_are_as_wide_as_what_is_shown(capsys):
    from rich.table import Table

    table = Table("one", "two")
    table.add_row("\x1b" * 9, "right")
    table.add_row("plain", "right")
    Terminal(width=100).print(table)
    lines = [line for line in capsys.readouterr().out.splitlines() if "right" in line]
    assert len({line.index("right") for line in lines}) == 1


@pytest.mark.parametrize(
    "text",
    ["naïve café", "中文 (日本)", "עברית", "العربية", "क्\u200dष", "\U0001f469\u200d\U0001f4bb", "a\u00a0b\nc\td"],
)
def test_text_of_every_script_stays(text):
    assert printable(text) == text


def test_every_character_is_safe_or_escaped():
    for number in range(sys.maxunicode + 1):
        char = chr(number)
        shown = printable(char)
        assert shown == char or (shown.isascii() and shown.isprintable())
        assert not unsafe(shown)


def test_a_page_shows_hostile_text_as_text(hostile):
    text = page(hostile)
    text.encode("utf-8")  # a lone surrogate has no bytes
    own = page(example())
    assert unsafe(text) <= unsafe(own), "beside what the drawing library's source holds"
    assert r"\x1b[31m" in text
    assert "\\u" not in re.search(r'id="data">(.*?)</script>', own, re.S)[1], "control: nothing of it in a plain page"
