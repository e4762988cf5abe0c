"""No command writes over what it reads, whatever the file is called; no locale and no missing cache stops one."""

import argparse
import io
import json
import os
import subprocess
import sys

import pytest

import sparing
from sparing.cli.main import main, parser
from sparing.workbench.comparison.verdict import Comparison
from sparing_lab.training.config import Config
from sparing_lab.training.loop import Training
from tests.support.comparisons import example
from tests.support.small_models import TEXTS, saved

QUICK = [
    "--methods", "window(size=8)", "--documents", "3", "--rounds", "1", "--jobs", "1", "--no-lengths",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("small") / "model")


@pytest.fixture
def here(tmp_path, monkeypatch, model):
    """A folder with documents, a comparison, a recipe and a model, each also by another name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("\n".join(TEXTS))
    (tmp_path / "found.json").write_text(example().to_json())
    sparing.Recipe({"*": "window(size=8)"}).save(tmp_path / "recipe.json")
    (tmp_path / "m").mkdir()
    for path in model.iterdir():
        (tmp_path / "m" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "sub").mkdir()
    (tmp_path / "soft").symlink_to("mine.txt")
    (tmp_path / "loop").symlink_to(".")
    os.link("mine.txt", "hard")
    os.link("m/config.json", "hard.json")
    (tmp_path / "weights").symlink_to("m/model.safetensors")
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "config.json").write_text("{}")
    (tmp_path / "run" / "log.csv").write_text("a,b\n")
    (tmp_path / "run" / "config.json").write_text('{"task": "causal"}')
    return tmp_path


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def environment(**more):
    """For other processes: what is imported here is imported there."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **more}


DATA = ["compare", "./m", "--data", "mine.txt"]


@pytest.mark.parametrize(
    ("arguments", "output", "read", "option"),
    [
        ([*DATA, "--json", "mine.txt"], "--json=mine.txt", "mine.txt", "--data"),
        ([*DATA, "--html", "sub/../mine.txt"], "--html=sub/../mine.txt", "mine.txt", "--data"),
        ([*DATA, "--json", "soft"], "--json=soft", "mine.txt", "--data"),
        ([*DATA, "--json", "hard"], "--json=hard", "mine.txt", "--data"),
        ([*DATA, "--json", "loop/loop/mine.txt"], "--json=loop/loop/mine.txt", "mine.txt", "--data"),
        (["compare", "--data", "found.json", "soft", "--json", "hard"], "--json=hard", "soft", "--data"),
        (["compare", "m", "--json", "m/config.json"], "--json=m/config.json", "m/config.json", "model"),
        (["compare", "./loop/m", "--html", "weights"], "--html=weights", "loop/m/model.safetensors", "model"),
        (["plan", "--data", "recipe.json", "--out", "loop"], "--out=loop/recipe.json", "recipe.json", "--data"),
        (["show", "found.json", "--html", "./found.json"], "--html=found.json", "found.json", "file"),
        (["train", "--config", "found.json", "--out", "run", "--data", "run/log.csv"], "--out=run/log.csv", "run/log.csv", "--data"),
        (["train", "causal", "--data", "run/config.json", "--out", "run"], "--out=run/config.json", "run/config.json", "--data"),
        (["train", "causal", "--config", "run/log.csv", "--out", "run"], "--out=run/log.csv", "run/log.csv", "--config"),
        (["train", "glue", "--pretrained", "run/model", "--out", "run"], "--out=run/model/config.json", "run/model/config.json", "--pretrained"),
        (["study", "--all", "--model", "m", "--write-docs", "m/config.json"], "--write-docs=m/config.json", "m/config.json", "--model"),
    ],
)  # fmt: skip
def test_no_output_is_an_input(here, arguments, output, read, option, capsys):
    before = contents(here)
    assert main(arguments) == 2
    said = f"{output} would overwrite {read}, which {option} reads; name another file for {output.partition('=')[0]}"
    assert capsys.readouterr() == ("", f"sparing {arguments[0]}: {said}\n")
    assert contents(here) == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*DATA, "--json", "new", "--html", "sub/../new"], "--html=sub/../new and --json=new"),
        ([*DATA, "--json", "found.json", "--html", "loop/found.json"], "--html=loop/found.json and --json=found.json"),
        (
            ["study", "--all", "--out", "sub", "--write-docs", "sub/yoso-error.png"],
            "--write-docs=sub/yoso-error.png and --out=sub/yoso-error.png",
        ),
    ],
)
def test_two_outputs_are_two_files(here, arguments, said, capsys):
    before = contents(here)
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert f"{said} would write the same file; name another for one of them" in err
    assert err.count("\n") == 1
    assert contents(here) == before


@pytest.mark.parametrize("option", ["--html", "--out"])
def test_a_page_is_not_written_to_standard_output(here, option, capsys):
    before = contents(here)
    assert main([*DATA, option, "-"]) == 2
    assert f"{option}=-: it cannot be written to standard output; name a file or a folder" in capsys.readouterr().err
    assert contents(here) == before


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["study", "value-aware-example", "--data", ".", "--out", "sub/.."], "--data"),
        (["train", "causal", "--data", "loop", "--out", "."], "--data"),
        (["plan", "m", "--out", "loop/m"], "model"),
        (["train", "glue", "--pretrained", "loop/m", "--out", "m"], "--pretrained"),
    ],
)
def test_a_folder_that_is_read_is_not_written_to(here, arguments, option, capsys):
    out = arguments[-1]
    assert main(arguments) == 2
    said = f"--out={out} is the folder that {option} reads; name another folder for --out"
    assert capsys.readouterr().err == f"sparing {arguments[0]}: {said}\n"


def test_standard_input_and_output_are_files_too(here):
    def run(arguments, **streams):
        command = [sys.executable, "-m", "sparing", *arguments]
        return subprocess.run(
            command, stderr=subprocess.PIPE, text=True, check=False, env=environment(), **streams
        ).stderr

    with open("mine.txt") as given, open("hard", "a") as out:
        found = run(["compare", "m", "--data", "-", "--json", "soft"], stdin=given, stdout=subprocess.DEVNULL)
        assert "--json=soft would overwrite the file on standard input, which --data reads" in found
        found = run(["show", "found.json", "--html", "mine.txt"], stdout=out)
        assert "standard output and --html=mine.txt would write the same file" in found


def test_a_new_file_beside_an_input_is_welcome(here, capsys):
    assert main([*DATA, *QUICK, "--no-cache", "--json", "m/new.json", "--html", "mine.html"]) == 0
    assert json.loads((here / "m" / "new.json").read_text())["data"] == "mine.txt"
    assert main([*DATA, *QUICK, "--no-cache", "--json", "m/new.json"]) == 2, "the folder of the model is read"
    assert main(["show", "found.json", "--html", "mine.html"]) == 0


def test_every_option_that_names_a_file_is_declared():
    """So that no command forgets to look: what is called FILE or FOLDER, or is known to name one, is read or written."""
    (commands,) = (each for each in parser()._actions if isinstance(each, argparse._SubParsersAction))
    others = {"model", "padded", "file", "pretrained", "data", "out"}
    for name, command in commands.choices.items():
        declared = {dest for _, dest in command.get_default("inputs") or ()}
        declared |= {output.dest for output in command.get_default("outputs") or ()}
        named = {
            action.dest for action in command._actions if action.metavar in ("FILE", "FOLDER") or action.dest in others
        }
        assert named - {"cache"} == declared, f"{name}: kept results have checksums, and are measured again"


def test_a_run_leaves_the_settings_that_it_reads(here, capsys):
    """A run's own config.json is what makes it resume; as an input, it is never written."""
    small = {
        "task": "causal", "max_length": 32, "hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "batch_size": 4,
        "max_steps": 2,
    }  # fmt: skip
    text = json.dumps(small)
    (here / "run" / "config.json").write_text(text)
    for _ in range(2):
        assert main(["train", "--config", "loop/run/config.json", "--out", "run"]) == 0
        assert (here / "run" / "config.json").read_text() == text
    assert "resumes from step 2" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"folder=run/last\.pt would overwrite run/last\.pt, which data reads"):
        Training(Config(**{**small, "data": "run/last.pt"}), "run")
    for name in ("result.json", "log.csv", "curve.png", "config.json"):  # data that only a config names
        (here / "other").mkdir(exist_ok=True)
        (here / "other" / name).symlink_to(here / "mine.txt")
        with pytest.raises(ValueError, match=rf"folder=other/{name} would overwrite"):
            Training(Config(**{**small, "data": "mine.txt"}), "other")
        (here / "other" / name).unlink()


# Locales


ASCII = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0"}


@pytest.mark.parametrize("more", [{"PYTHONIOENCODING": "ascii"}, {"PYTHONCOERCECLOCALE": "0"}], ids=["strict", "C"])
def test_a_locale_that_is_not_utf8_loses_nothing(here, more):
    """Texts, a name of a file and the terminal's own limits, through compare, show and methods."""
    (here / "Büro 東京.txt").write_text("\n".join(f"{text} ü 東" for text in TEXTS * 3), encoding="utf-8")
    sparing.Recipe({"*": "window(size=8)"}, about={"who": "Zoë 東"}).save(here / "recipe.json")
    commands = [
        ["compare", "m", "--data", "Büro 東京.txt", *QUICK, "--json", "Zoë.json", "--html", "Zoë.html", "--no-cache"],
        ["show", "Zoë.json"], ["show", "recipe.json"], ["methods"],
    ]  # fmt: skip
    script = (
        "import json, os, sys\nfrom sparing.cli.main import main\n"
        "for command in json.loads(sys.argv[1]):\n"
        "    assert main([os.fsdecode(word.encode()) for word in command]) == 0, command\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script, json.dumps(commands)], capture_output=True, check=False,
        env=environment(**ASCII, **more),
    )  # fmt: skip
    assert found.returncode == 0, found.stderr.decode()
    assert b"Traceback" not in found.stderr
    shown = found.stdout.decode("ascii")
    assert "window(size=8)" in shown
    assert "who: Zo? ?" in shown
    held = Comparison.from_json((here / "Zoë.json").read_text(encoding="utf-8"))
    assert held.data == "Büro 東京.txt", "a name is stored as what it is, whatever the locale"
    assert "Büro 東京.txt" in (here / "Zoë.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(("encoding", "shown"), [("latin-1", "Zoë ?"), ("utf-8", "Zoë 東"), ("ascii", "Zo? ?")])
def test_what_a_terminal_cannot_show_is_replaced(here, encoding, shown, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    sparing.Recipe({"*": "window(size=8)"}, about={"who": "Zoë 東"}).save("recipe.json")
    assert main(["show", "recipe.json"]) == 0
    out.flush()
    assert f"who: {shown}" in out.buffer.getvalue().decode(encoding)
    assert out.errors == "strict", "as it was"


# The cache


def compare(*arguments):
    return main([*DATA, *QUICK, "--json", "out.json", *arguments])


@pytest.mark.parametrize("case", ["file", "no home", "full", "below a file", "read-only"])
def test_a_comparison_runs_without_the_usual_cache_and_says_so_once(here, case, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    if case == "file":
        (here / "cache").mkdir()
        (here / "cache" / "sparing").write_text("mine")
        why = f"{here}/cache/sparing is not a folder"
    elif case == "below a file":
        (here / "cache").write_text("mine")
        why = f"{here}/cache/sparing cannot be written to (Not a directory)"
    elif case == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
        why = "there is no home folder"
    elif case == "full":
        monkeypatch.setattr("sparing.store.tempfile.TemporaryFile", lambda **options: _full())
        why = f"{here}/cache/sparing cannot be written to (No space left on device)"
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/self")
        why = "/proc/self/sparing cannot be written to (No such file or directory)"
    assert compare() == 0
    found = capsys.readouterr()
    said = [line for line in found.err.splitlines() if not line.startswith("wrote")]
    assert said == [f"sparing compare: results are not kept: {why}; name a folder with --cache"]
    assert json.loads((here / "out.json").read_text())["rows"]


def _full():
    raise OSError(28, "No space left on device")


def test_a_cache_that_was_named_must_be_usable(here, capsys, monkeypatch):
    monkeypatch.setattr("sparing.workbench.comparison.sweep.quality", None)  # nothing is measured
    assert compare("--cache", "/proc/self/none") == 2
    err = (
        "sparing compare: cache: /proc/self/none cannot be written to (No such file or directory); name another folder"
    )
    assert capsys.readouterr().err == f"{err}\n"


def test_damaged_results_are_told_to_the_user(here, capsys):
    assert compare("--cache", "kept") == 0
    before = json.loads((here / "out.json").read_text())
    capsys.readouterr()
    for path in (here / "kept").iterdir():
        held = json.loads(path.read_text())
        if held["cell"]["what"] == "quality":
            del held["result"]["ends"]
            path.write_text(json.dumps(held))
    assert compare("--cache", "kept") == 0
    err = capsys.readouterr().err
    assert err.count("is damaged or of an older version; such results are measured again\n") == 1
    assert json.loads((here / "out.json").read_text()) == before
