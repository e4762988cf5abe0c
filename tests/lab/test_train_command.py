"""`sparing train`: what it prints and writes, what it refuses, in one process or two."""

import csv
import json
import os
import subprocess
import sys

import pytest

from sparing.cli.main import main
from sparing_lab.tasks.kinds import KINDS
from sparing_lab.training.config import RENAMED

SMALL = [
    "--max-length",
    "32",
    "--hidden-size",
    "16",
    "--intermediate-size",
    "16",
    "--num-layers",
    "1",
    "--batch-size",
    "4",
    "--eval-steps",
    "2",
]


def command(*arguments):
    return [sys.executable, "-m", "sparing", "train", *arguments]


def said(capsys, *arguments):
    assert main(["train", *map(str, arguments)]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.count("\n") == 1
    return found.err


def test_tasks_are_listed(capsys):
    assert main(["train", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(f" {name} " in out for name in KINDS)
    assert max(map(len, out.splitlines())) <= 100


def test_a_run_writes_its_log_result_curve_and_checkpoints(capsys, tmp_path):
    assert main(["train", "causal", *SMALL, "--max-steps", "5", "--out", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "256 held-out examples of up to 32 tokens" in out
    assert "best perplexity" in out
    folder = tmp_path / "run"
    assert sorted(path.name for path in folder.iterdir()) == [
        "best.pt", "config.json", "curve.png", "last.pt", "log.csv", "result.json",
    ]  # fmt: skip
    rows = list(csv.DictReader((folder / "log.csv").read_text().splitlines()))
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert [bool(row["valid_loss"]) for row in rows] == [False, True, False, True, True]
    result = json.loads((folder / "result.json").read_text())
    assert [float(row["loss"]) for row in rows] == result["losses"]
    assert result["value"] == min(record["perplexity"] for record in result["records"])
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")

    # The folder's settings make the same run, which is over; options go before them.
    assert main(["train", "--config", str(folder / "config.json"), "--out", str(folder)]) == 0
    assert "resumes from step 5" in capsys.readouterr().out
    assert json.loads((folder / "result.json").read_text())["losses"] == result["losses"]
    assert "last.pt belongs to another run (max_steps=5, now 6); name another folder with --out" in said(
        capsys, "causal", *SMALL, "--max-steps", 6, "--out", folder
    )


@pytest.mark.parametrize(
    ("options", "differ"),
    [
        (("--max-steps", 2), "(max_steps=1000, now 2; epochs=0.5, now 0.0)"),
        (("--eval-steps", 1), "(eval_steps=2, now 1)"),
        (("masked", "--seed", 3), "(task='causal', now 'masked'; seed=0, now 3)"),
    ],
)
def test_options_that_differ_from_the_settings_of_the_folder_are_refused(options, differ, capsys, tmp_path):
    """config.json would tell of another run than the one in its folder."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"task": "causal", "epochs": 0.5, "eval_steps": 2}))
    told = said(capsys, "--config", path, "--out", tmp_path, *options)
    assert f"--config={path} holds the settings of the run in --out={tmp_path}" in told
    assert f"these options make another run {differ}; name another folder with --out, or edit the file" in told
    assert list(tmp_path.iterdir()) == [path]


def test_options_that_repeat_the_settings_of_the_folder_change_nothing(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text := json.dumps({"task": "causal", "max_length": 32, "max_steps": 1, "batch_size": 4}))
    assert (
        main(["train", "causal", "--config", str(path), "--out", str(tmp_path), "--max-steps", "1", "--num-heads", "2"])
        == 0
    )
    assert path.read_text() == text
    assert json.loads((tmp_path / "result.json").read_text())["config"]["max_steps"] == 1


def test_without_a_folder_runs_do_not_meet(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for method in ("exact", "window(size=8)"):
        assert main(["train", "causal", *SMALL, "--max-steps", "1", "--method", method]) == 0
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_what_was_not_learned_is_not_called_better(capsys, tmp_path):
    assert main(["train", "listops", *SMALL, "--max-steps", "1", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "NOT shown to be better on 400 examples" in " ".join(out.split())


def test_bad_input_is_one_line_before_the_first_step(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "last.pt").write_bytes(b"no checkpoint")
    out = ("--out", tmp_path / "new")
    assert "no task is named; choose one of listops" in said(capsys, *out)
    assert "task='chess' is not one of listops" in said(capsys, "chess", *out)
    assert "unknown name 'magic'" in said(capsys, "causal", "--method", "magic", *out)
    assert "skyformer" in (told := said(capsys, "causal", "--method", "skyformer", *out))
    assert "cannot be causal" in told
    assert "has no gradient for queries and keys" in said(capsys, "masked", "--method", "top_keys(keys=4)", *out)
    assert "max_steps=0 must be at least 1" in said(capsys, "causal", "--max-steps", 0, *out)
    assert "is a file; name a folder" in said(capsys, "causal", "--out", tmp_path / "file")
    assert "last.pt is damaged" in said(capsys, "causal", *SMALL, "--out", tmp_path / "broken")
    assert "none.txt': there is no such file" in said(capsys, "causal", "--data", tmp_path / "none.txt", *out)
    assert "data='': there is no such file" in said(capsys, "causal", "--data", "", *out)
    assert "max_steps=7 and epochs=2: set one" in said(capsys, "causal", "--max-steps", 7, "--epochs", 2, *out)
    assert "max_length=3 is too short" in said(capsys, "causal", "--max-length", 3, *out)
    assert "there is no file" in said(capsys, "--config", tmp_path / "none.json", *out)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_option_of_an_earlier_version_is_refused_with_its_present_name(old, new, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["train", "causal", f"--{old}", "3"])
    assert f"--{old} is now --{new.replace('_', '-')}" in capsys.readouterr().err


def test_help_shows_present_names_alone(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    words = capsys.readouterr().out.split()
    assert "--intermediate-size" in words
    assert not {f"--{old}" for old in RENAMED} & set(words)


METHODS = ("exact", "yoso(hashes=4)")
SCRIPT = """
import atexit, json, pathlib, sys

def report_threads():
    for name in pathlib.Path("/proc/self/task").glob("*/comm"):
        if "gloo" in name.read_text():
            print("a thread is left:", name.read_text())

atexit.register(report_threads)  # first, so that it runs after all others
from sparing.cli.main import main
for arguments in json.loads(sys.argv[1]):
    assert main(arguments) == 0
"""


def test_two_processes_learn_as_one_does(tmp_path):
    """Losses differ by the order of additions alone: by 1e-4 of them at most; those of another seed by far more.

    The launcher's flag says GPU, and starts processes on a machine without one.
    """

    def runs(name, *options):
        arguments = ["train", "masked", *SMALL, "--max-steps", "10", *options]
        return [[*arguments, "--method", spec, "--out", str(tmp_path / f"{name} {spec}")] for spec in METHODS]

    (tmp_path / "run.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
              "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]  # fmt: skip
    found = subprocess.run(
        [*launch, str(tmp_path / "run.py"), json.dumps(runs("two"))],
        capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "a thread is left" not in found.stdout  # it aborts its process if it asks for Python's lock too late
    assert found.stdout.count("2 processes") == found.stdout.count("best perplexity") == len(METHODS)
    for arguments in runs("one") + runs("other", "--seed", "1"):
        assert main(arguments) == 0
    for spec in METHODS:
        two, one, other = (
            json.loads((tmp_path / f"{name} {spec}" / "result.json").read_text()) for name in ("two", "one", "other")
        )
        assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)
        assert two["value"] == pytest.approx(one["value"], rel=1e-3)
        assert other["losses"] != pytest.approx(one["losses"], rel=1e-2)


def test_settings_with_epochs_make_the_same_run_again(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = [each for each in SMALL if each not in ("--eval-steps", "2")]
    assert main(["train", "causal", *small, "--epochs", "0.001", "--batch-size", "1"]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert main(["train", "--config", str(folder / "config.json")]) == 0
    assert list((tmp_path / "runs").iterdir()) == [folder]
    assert "resumes from step" in capsys.readouterr().out
    assert main(["train", "--config", str(folder / "config.json"), "--max-steps", "1"]) == 0
    assert len(list((tmp_path / "runs").iterdir())) == 2
