"""`sparing show` opens every JSON that sparing writes, and refuses every other in one line."""

import copy
import json
from importlib.metadata import EntryPoint

import pytest

import sparing
from sparing.cli import main as command
from sparing.cli import show
from sparing.cli.main import main
from sparing.report.bench_files import to_json
from sparing.store import Store
from sparing.workbench.benchmark.gate import Gate
from sparing.workbench.benchmark.results import SDPA, Bench, BenchSettings, Fact, PeerStatus, Ratio, Timing
from sparing.workbench.planning.promise import Promise
from sparing.workbench.planning.result import Candidate, Plan
from sparing.workbench.planning.search import StepFigures
from sparing.workbench.timing import Interval
from sparing_lab.studies import run as studies
from sparing_lab.studies import study
from sparing_lab.studies.study import Settings as StudySettings
from tests.fuzz.parsers import unsafe
from tests.support.comparisons import example
from tests.support.entry_points import declared

ONE = Interval(1.5, 1.25, 2.0)
LAYERS = {"encoder.layer.0.attention": "window(size=8)", "encoder.layer.1.attention": "exact"}


@pytest.fixture(autouse=True)
def _declared(monkeypatch):
    monkeypatch.setattr(show, "entry_points", declared)


def plan():
    figures = StepFigures(1, 30, 0, 0.1, 0.002, 0.004)
    return Plan(
        recipe=sparing.Recipe({"encoder.layer.0.attention": "window(size=8)"}), reason="1 of 2 layers runs a window.",
        model="minilm", model_fingerprint="a", kind="encoder", data="mine.txt", data_fingerprint="b", documents=70,
        tokens=64, truncated=1, skipped=0, metric="cosine", words="1 - cosine of the embedding", objective="time",
        promise=Promise(0.01), machine={"cpu": "x", "threads": 2}, candidates=(Candidate("window(size=8)", ONE, True),),
        layers=LAYERS, damages={"encoder.layer.0.attention": {"window(size=8)": 0.002}}, steps=3, step=1,
        calibration=figures, checks=(figures,), ceiling=ONE, gain=ONE,
    )  # fmt: skip


def bench():
    spec = "window(size=8)"
    timing = Timing(side=spec, length=64, part="forward", seconds=ONE, rounds=3, memory=4096)
    return Bench(
        settings=BenchSettings(methods=(spec,), lengths=(64,), backward=False, peers=True), machine={"cpu": "x", "threads": 2},
        inputs="normal numbers", gates=[Gate(method=spec, passed=True, length=64, excess=0.5, detail="")],
        timings=[timing, Timing(side=SDPA, length=64, part="forward", why="too long")],
        ratios=[Ratio(method=spec, against=SDPA, length=64, part="forward", speed=ONE)],
        peers=[PeerStatus(peer="-", method=spec, version=None)], facts=[Fact(name="a fact", value=ONE, at_least=1.0)],
        duration=12.5,
    )  # fmt: skip


def study_result():
    return studies.run(study("value-aware-example"), StudySettings(), Store(None)).to_json()


def training_result():
    records = [{"step": 2.0, "loss": 2.5, "valid_loss": 2.4, "accuracy": 0.5}]
    return json.dumps({
        "format": 1, "config": {"task": "listops", "method": "window(size=8)"}, "data": "generated", "metric": "accuracy",
        "value": 0.5, "chance": 0.1, "beats_chance": True, "best": records[0], "seconds": 3.0, "records": records,
        "times": [1.5], "losses": [2.6, 2.5], "machine": {"cpu": "x"},
    })  # fmt: skip


FILES = {
    "comparison": (lambda: example(maps=()).to_json(), "window(size=64, sinks=1)"),
    "plan": (lambda: plan().to_json(), "1 of 2 layers runs a window."),
    "recipe": (lambda: json.dumps(sparing.Recipe(LAYERS, about={"data": "mine"}).to_dict()), "data: mine"),
    "benchmark": (lambda: to_json(bench()), "not measured: SDPA float32, forward, 64 tokens: too long"),
    "study": (study_result, "value-aware-example: "),
    "training run": (training_result, "best accuracy 0.5 at step 2, better than 0.1"),
    "training run's settings": (
        lambda: json.dumps({"task": "causal", "steps": 7}),
        "settings of a training run: causal",
    ),
}


def parts(held, path=()):
    """Yield the path of every value, of lists the first."""
    yield path
    if isinstance(held, dict):
        for key, each in held.items():
            yield from parts(each, (*path, key))
    elif isinstance(held, list):
        for each in held[:1]:
            yield from parts(each, (*path, 0))


def replaced(held, path, value):
    """Return a copy with another value at a path."""
    held = copy.deepcopy(held)
    inside = held
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return held


@pytest.mark.parametrize("kind", FILES)
def test_every_kind_is_recognised_by_its_content(kind, tmp_path, capsys):
    make, words = FILES[kind]
    path = tmp_path / "a file.of any name"
    path.write_text(make())
    assert main(["show", str(path)]) == 0
    assert words in capsys.readouterr().out
    if kind != "comparison":
        for option in (["--layers"], ["--html", str(tmp_path / "page.html")]):
            assert main(["show", str(path), *option]) == 2
            assert f"{option[0]} is for comparisons, and this is a {kind}" in capsys.readouterr().err
        assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_the_answers_of_several_files_come_before_their_tables(tmp_path, capsys):
    paths = [tmp_path / f"{name}.json" for name in ("encoder", "generation")]
    first, second = example(), example(model="smollm2", rows=())
    for path, found in zip(paths, (first, second), strict=True):
        path.write_text(found.to_json())
    assert main(["show", *map(str, paths)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "comparison of minilm: Turn on window: 1.25x", "comparison of smollm2: Keep exact attention",
    ]  # fmt: skip
    assert str(paths[1]) in lines
    assert main(["show", *map(str, paths), "--html", str(tmp_path / "page.html")]) == 2
    assert "--html is for one file, and there are 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "kind", [kind for kind in FILES if kind != "comparison"]
)  # comparisons: tests/core/test_from_json.py
def test_whatever_stands_in_one_place_is_shown_or_refused_in_one_line(kind, tmp_path, capsys):
    held = json.loads(FILES[kind][0]())
    held.pop("sha256", None)  # as if written by hand
    path = tmp_path / "found.json"
    for where in parts(held):
        for value in (None, 10**400, "\x1b[31mx", {}) if where else ():
            path.write_text(json.dumps(replaced(held, where, value)))
            status = main(["show", str(path)])
            out, err = capsys.readouterr()
            assert unsafe(out + err) == set()
            refused = status == 2 and err.count("\n") == 1 and "--debug" not in err and "found.json" in err
            assert status == 0 or refused, (where, value, err)


def test_an_unknown_file_names_what_can_be_opened(tmp_path, capsys):
    path = tmp_path / "x.json"
    path.write_text('{"a": 1}')
    assert main(["show", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"sparing show: {path}: this JSON is not of a kind that sparing show opens: ")
    for kind in FILES:
        assert kind in err


def test_a_kind_that_cannot_be_loaded_stops_no_other(tmp_path, capsys, monkeypatch):
    broken = EntryPoint("broken", "no_such_module:KIND", show.GROUP)
    monkeypatch.setattr(show, "entry_points", lambda group: [broken, *declared(group=group)])
    path = tmp_path / "x.json"
    path.write_text(FILES["training run"][0]())
    assert main(["show", str(path)]) == 0
    assert (
        "sparing: files of 'broken' (no_such_module:KIND) cannot be shown: ModuleNotFoundError"
        in capsys.readouterr().err
    )


def test_report_is_an_old_name(capsys):
    assert main(["report", "found.json", "--html", "page.html"]) == 2
    assert capsys.readouterr().err == "sparing report: this command is now: sparing show found.json --html page.html\n"


@pytest.mark.parametrize("group", [command.GROUP, show.GROUP])
def test_declared_entry_points_can_be_loaded(group):
    found = declared(group=group)
    assert found
    for entry in found:
        entry.load()
