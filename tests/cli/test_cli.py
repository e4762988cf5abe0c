"""The command as a user meets it."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import sparing
from sparing.cli.main import main
from tests.support.comparisons import example
from tests.support.generations import row_of
from tests.support.small_models import TEXTS, saved

ROOT = Path(__file__).parents[2]

METHODS = "window(size=8),key_clusters(clusters=8, keys=8, window=4),top_keys(keys=8)"
QUICK = [
    "--methods", METHODS, "--length", "64", "--documents", "3", "--seeds", "1", "--rounds", "1", "--jobs", "1",
    "--no-lengths",
]  # fmt: skip


def test_compare_prints_a_readable_table(capsys, tmp_path):
    out, cache = tmp_path / "found.json", tmp_path / "cache"
    assert main(["compare", *QUICK, "--layers", "--json", str(out), "--cache", str(cache)]) == 0
    text = capsys.readouterr().out
    first, second, *_ = text.splitlines()
    assert first in ("Keep exact attention", "Cannot tell yet"), "which of the two depends on the times"
    assert second.startswith("On 3 documents of up to 64 tokens keep exact attention")
    assert max(map(len, text.splitlines())) <= 100
    for word in (
        "minilm (encoder, float32) on Python help topics",
        "window(size=8)",
        "change",
        "at most",
        "not safe",
        "oracle",
    ):
        assert word in text, f"{word!r} is missing in\n{text}"
    by_layer = text.partition("by layer")[2].splitlines()
    head, ours, bar = (
        next(x.split() for x in by_layer if word in x) for word in ("mean", "key_clusters(", "its error")
    )
    assert head == ["method", *"012345", "mean", "head"]
    numbers = [float(x) for x in ours[-9:-2]]
    assert numbers[-1] == pytest.approx(sum(numbers[:6]) / 6, abs=1e-4)
    assert all(-1 <= float(x) <= 1 for x in bar[-7:])
    held = json.loads(out.read_text())
    assert held["rows"][0]["method"] == "window(size=8)"
    assert len(list(cache.iterdir())) == 10, "three methods: errors and times; maps of three and of exact attention"
    assert main(["show", str(out), "--layers"]) == 0
    assert capsys.readouterr().out == text, "the same from the file"


def test_eighty_columns_are_enough_and_more_show_more(capsys, tmp_path, monkeypatch):
    path = tmp_path / "found.json"
    rows = tuple(replace(row, substitution=0.5) for row in example().rows)
    path.write_text(example(rows=rows, generation=(row_of("safe and faster", 8000, 1.9),)).to_json())
    shown = {}
    for columns in ("80", "100", "150"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["show", str(path), "--layers"]) == 0
        shown[columns] = capsys.readouterr().out
        assert max(map(len, shown[columns].splitlines())) <= int(columns)
        for word in ("Turn on multipole: 1.90x", "safe, faster", "1.25x", "0.30%", "exact"):
            assert word in shown[columns]
        assert "\u2026" not in shown[columns], "every number is whole"
    assert "A wider terminal also shows: keys, error" in " ".join(shown["80"].split())
    assert "A wider terminal" not in shown["150"]


def test_json_goes_to_standard_output_in_place_of_the_tables(capsys, tmp_path):
    written = tmp_path / "found.json"
    given = ["compare", *QUICK, "--cache", str(tmp_path / "cache")]
    assert main([*given, "--json", "-", "--html", str(tmp_path / "page.html")]) == 0
    out, err = capsys.readouterr()
    held = json.loads(out)
    assert held["summary"].startswith("On 3 documents of up to 64 tokens keep exact attention")
    assert err == f"wrote {tmp_path / 'page.html'}\n"
    assert main([*given, "--json", str(written), "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(written.read_text()) == held
    assert out.startswith(held["headline"])
    assert err == ""


def test_compare_reads_files_of_the_user(capsys, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps({"body": f"A text about number {i}, [bold]and[/] more."}) for i in range(3)))
    given = ["compare", "minilm", "--data", str(path), "--column", "body", *QUICK, "--no-cache"]
    assert main(given) == 0
    assert "on mine.jsonl: 3 documents" in capsys.readouterr().out


def test_a_stopped_comparison_says_that_it_goes_on(capsys, monkeypatch):
    def stopped(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("sparing.workbench.comparison.compare.compare", stopped)
    assert main(["compare"]) == 130
    assert "stopped; what was measured is kept, the same command goes on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--methods", "nystrm"], "unknown name 'nystrm'"),
        (["--methods", ","], "methods is empty"),
        (["--methods", "nystrom(landmarks=0)"], "landmarks=0"),
        (["--length", "4096"], "length=4096 is more than the 512 positions"),
        (["--documents", "0"], "documents=0"),
        (["--tolerance", "0"], "tolerance=0.0"),
        (["--data", "none.txt"], "there is no file none.txt"),
        (["--data", __file__, "--column", "body"], "is plain text and has no column 'body'"),
        (["/no/such/model"], "there is no folder /no/such/model"),
        (["--json", "/no/such/folder/x.json"], "there is no folder /no/such/folder"),
        (["--json", "/"], "--json=/ cannot be written"),
    ],
)
def test_mistakes_give_one_line_and_status_2(arguments, words, capsys):
    assert main(["compare", *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_help_names_the_command(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "compare" in capsys.readouterr().out


def test_methods_are_listed(capsys):
    assert main(["methods"]) == 0
    out = capsys.readouterr().out
    for name in sparing.list_methods():
        assert name in out
    assert next(line for line in out.splitlines() if line.strip().startswith("nystrom")).split()[1:3] == [
        "landmarks",
        ".P.XQG.T",
    ]
    assert "top_keys *" in out


def test_a_recipe_is_shown(capsys, tmp_path):
    path = tmp_path / "recipe.json"
    sparing.Recipe(
        {"encoder.layer.[0]": "window(size=8)", "*": "nystrom"}, architecture="bert", about={"data": "x"}
    ).save(path)
    assert main(["show", str(path)]) == 0
    out = capsys.readouterr().out
    for word in ("for bert", "encoder.layer.[0]", "window(size=8)", "nystrom", "always", "data: x"):
        assert word in out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "no file"),
        ("{", "is not JSON"),
        (
            "{}",
            "not of a kind that sparing show opens: comparison, plan, benchmark, benchmark of padded batches, recipe",
        ),
        ("[]", "JSON object"),
        ('{"format": 99, "version": 99, "layers": {}}', "not known"),
        ("[" * 100_000, "nested more than 64 levels deep"),
        ("9" * 10_000, "an integer of thousands of digits"),
    ],
)
def test_files_that_are_none_of_ours_are_named(text, words, capsys, tmp_path):
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    assert main(["show", str(path)]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert "x.json" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["show"], "file: {!r} is a folder; name a JSON file, as the commands of sparing write it"),
        (["train", "--config"], "config: {!r} is a folder; name a JSON file, such as the config.json of a run"),
    ],
)
def test_a_folder_in_place_of_a_json_file_is_named(command, said, capsys, tmp_path):
    assert main([*command, str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"sparing {command[0]}: {said.format(str(tmp_path))}\n"


@pytest.mark.parametrize("command", [["show"], ["train", "--config"]])
def test_a_json_file_that_cannot_be_read_is_named(command, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "x.json"
    assert main([*command, str(path)]) == 2
    assert f"{str(path)!r} cannot be read (Not a directory); name a JSON file, " in capsys.readouterr().err


def test_a_comparison_that_lacks_something_is_named(capsys, tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"format": 2, "summary": "", "rows": [{"method": "window"}]}')
    assert main(["show", str(path)]) == 2
    assert "is not a comparison as sparing writes it: it has no 'model', 'kind'" in capsys.readouterr().err


def test_files_are_what_the_user_named(capsys, tmp_path, monkeypatch):
    """A link is followed, something that is no file is refused, and two results do not share one name."""
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("before")
    link.symlink_to(real)
    assert main(["compare", *QUICK, "--no-cache", "--json", str(link)]) == 0
    assert link.is_symlink()
    assert json.loads(real.read_text())["format"] == 2
    capsys.readouterr()
    for given, message in (
        (
            ["--json", str(real), "--html", str(link)],
            f"--html={link} and --json={real} would write the same file; name another for one of them",
        ),
        (["--json", "/dev/null"], "--json=/dev/null cannot be written"),
        (["--cache", str(real)], f"cache: {real} is not a folder; name another folder"),
    ):
        assert main(["compare", *QUICK, *given]) == 2
        assert capsys.readouterr().err == f"sparing compare: {message}\n"


def test_a_disk_that_is_full_is_named_and_leaves_nothing(capsys, tmp_path, monkeypatch):
    import os

    def full(*args):
        raise OSError(28, "No space left on device")

    target = tmp_path / "found.html"
    monkeypatch.setattr(os, "replace", full)
    assert main(["compare", *QUICK, "--no-cache", "--html", str(target)]) == 2
    assert capsys.readouterr().err == f"sparing compare: [Errno 28] No space left on device: '{target}'\n"
    assert list(tmp_path.iterdir()) == []


def test_what_nobody_expected_is_one_line_too(capsys, monkeypatch, tmp_path):
    def broken(text):
        raise KeyError("a mistake of ours\n")

    (tmp_path / "x.json").write_text("{}")
    monkeypatch.setattr("sparing.cli.show.parse", broken)
    assert main(["show", str(tmp_path / "x.json")]) == 2
    assert capsys.readouterr().err.startswith("sparing show: KeyError: ")
    with pytest.raises(KeyError):
        main(["show", str(tmp_path / "x.json"), "--debug"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "-o", "recipe.json"], "-o is now --out FOLDER, which gets recipe.json"),
        (["plan", "--output", "recipe.json"], "--output is now --out FOLDER"),
        (["compare", "--batch", "4"], "--batch is now --batch-size"),
        (["bench", "--width", "64"], "--width is now --head-dim"),
        (["bench", "--batch", "4"], "--batch is now --batch-size"),
    ],
)
def test_old_options_are_refused_by_their_new_name(arguments, said, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_out_gets_the_json_and_the_page(tmp_path, capsys):
    assert main(["compare", *QUICK, "--no-cache", "--out", str(tmp_path / "new")]) == 0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["compare.html", "compare.json"]
    assert "</html>" in (tmp_path / "new" / "compare.html").read_text()
    capsys.readouterr()
    assert main(["show", str(tmp_path / "new" / "compare.json")]) == 0
    assert "window(size=8)" in capsys.readouterr().out


OWN = """
from dataclasses import dataclass
from typing import ClassVar

import sparing


@dataclass(frozen=True, kw_only=True)
class Uniform(sparing.Method):
    \"\"\"Weigh all keys the same.\"\"\"

    name: ClassVar[str] = "uniform_test"
    target: ClassVar[str] = "softmax"
    supports: ClassVar[sparing.Supports] = sparing.Supports(training_free=True)
    times: int = 1

    def reference(self, q, k, v, call):
        return (self.times * v.mean(-2, keepdim=True)).expand(*q.shape[:-1], v.shape[-1])

    def cost(self, shape, statistics=None):
        return sparing.Cost(1.0, 1.0, 1.0)
"""


def test_a_method_of_the_users_own_is_named_on_the_command_line(tmp_path):
    """In a process of its own, since the method stays registered; two workers parse the spec again."""
    (tmp_path / "my_methods.py").write_text(OWN)
    given = [
        "compare", "minilm", "--import", "my_methods", "--methods", "uniform_test(times=2),uniform_test(times=3)",
        "--length", "32", "--documents", "3", "--rounds", "1", "--no-lengths", "--jobs", "2", "--cache", "kept",
    ]  # fmt: skip
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)

    def run(*more):
        command = [sys.executable, "-c", "import sys; from sparing.cli.main import main; sys.exit(main(sys.argv[1:]))"]
        return subprocess.run(
            [*command, *given, *more], cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True,
            text=True, check=False,
        )  # fmt: skip

    found = run("--json", "first.json")
    assert found.returncode == 0, found.stderr
    first, second = json.loads((tmp_path / "first.json").read_text())["rows"]
    assert (first["method"], second["method"]) == ("uniform_test(times=2)", "uniform_test(times=3)")
    assert 0 < first["change"]["mean"] != second["change"]["mean"]
    (tmp_path / "my_methods.py").write_text(OWN.replace("self.times * v", "5 * v"))
    assert run("--json", "again.json").returncode == 0
    edited, _ = json.loads((tmp_path / "again.json").read_text())["rows"]
    assert edited["change"]["mean"] != first["change"]["mean"], "what was kept is of the code before"


def test_the_example_of_contributing_is_pasted_whole(tmp_path):
    """As a file that --import names, and as a script, whose class workers get with its code."""
    example = re.search(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)[1]
    folder = saved(tmp_path / "model", "bert")
    (tmp_path / "my_methods.py").write_text(example)
    (tmp_path / "script.py").write_text(
        f"{example}\nimport sys, sparing\nif __name__ == '__main__':\n"
        "    options = dict(length=32, rounds=1, jobs=2, lengths=False, progress=False)\n"
        f"    found = sparing.compare({str(folder)!r}, {TEXTS!r}, methods=[Mean(), 'window(size=4)'], **options)\n"
        "    print([row.method for row in found.rows], [row.refused for row in found.rows])\n"
    )
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
    options = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": paths}, "capture_output": True, "text": True}
    script = subprocess.run([sys.executable, "script.py"], check=False, **options)
    assert script.returncode == 0, script.stderr
    assert script.stdout.splitlines()[-1] == "['mean', 'window(size=4)'] [None, None]"
    assert script.stderr == "", "progress=False silences the bars of loading, in workers too"
    given = [
        "compare",
        str(folder),
        "--import",
        "my_methods.py",
        "--methods",
        "mean",
        "--length",
        "32",
        "--rounds",
        "1",
    ]
    command = subprocess.run(
        [sys.executable, "-m", "sparing", *given, "--no-lengths", "--no-cache", "--jobs", "2"], check=False, **options
    )
    assert command.returncode == 0, command.stderr
    assert "mean " in command.stdout


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no safe path")
def test_a_file_of_the_user_does_not_replace_a_module_of_python_in_workers(tmp_path):
    folder = saved(tmp_path / "model", "bert")
    (tmp_path / "json.py").write_text("raise ImportError('this is not the json of Python')")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sparing").write_text("import sys\nfrom sparing.cli.main import main\nsys.exit(main())\n")
    given = ["--methods", "window(size=4)", "--length", "32", "--rounds", "1", "--no-lengths", "--no-cache"]
    done = subprocess.run(
        [sys.executable, "bin/sparing", "compare", str(folder), *given, "--jobs", "2"], cwd=tmp_path, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path if path)},
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_module_that_cannot_be_imported_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "broken_module_of_mine.py").write_text("import no_such_package")
    (tmp_path / "json.py").write_text("")
    for name, said in (
        ("no_such_module", "there is no such module in the current folder or on Python's path"),
        ("no_such_file.py", "there is no such file"),
        ("json.py", "another module is named json; rename the file"),
        ("broken_module_of_mine", "ModuleNotFoundError: No module named 'no_such_package'"),
    ):
        assert main(["compare", "--import", name]) == 2
        assert capsys.readouterr().err == f"sparing compare: --import {name}: {said}\n"


def test_old_names_say_the_new_ones():
    for name in ("measure", "planning", "presets", "split_specs", "training"):
        with pytest.raises(AttributeError, match=rf"no attribute '{name}' any more; use sparing"):
            getattr(sparing, name)
    with pytest.raises(TypeError, match=r"sparing\.list_methods\(\) lists them"):
        sparing.methods()
    assert sparing.method("yoso(hashes=4)").hashes == 4
