"""Findings of the fuzzers, replayed; and fuzzers that find what is broken."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sparing
from sparing import native
from sparing.contract import _REGISTRY
from tests.fuzz import cases, door, kernels
from tests.support.broken_methods import Broken, calls, gradients, masks, numbers
from tests.support.kernel_checks import needs_kernels

FOUND = sorted(cases.CORPUS.glob("*.json"))


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_a_finding_stays_mended(path):
    fuzzer, case, found = cases.read(path)
    assert cases.fails(fuzzer, case) is None, f"as when it was found: {found}"


@pytest.mark.parametrize("name", cases.available())
def test_new_cases_hold(name):
    fuzzer, rng = cases.load(name), random.Random(f"new cases of {name}")
    for _ in range(10):
        case = fuzzer.draw(rng)
        assert json.loads(json.dumps(case)) == case
        assert fuzzer.calls(case) > 0
        message = cases.fails(fuzzer, case)
        assert message is None, f"{message}: {json.dumps(case)}"


def find(fuzzer, most, seed=0):
    """The first case that fails, and how."""
    rng = random.Random(seed)
    for _ in range(most):
        case = fuzzer.draw(rng)
        message = cases.fails(fuzzer, case)
        if message is not None:
            return case, message
    return None


@pytest.fixture
def moderate(monkeypatch):
    """Calls of usual sizes only: a broken method is found by what it breaks."""
    monkeypatch.setattr(door.door_invalid, "draw", door.door_draw.draw)
    monkeypatch.setattr(door.door_draw, "_size", lambda rng: 1.0)
    monkeypatch.setattr(door.door_draw, "_scale", lambda rng, case: rng.choice((None, 0.7)))
    monkeypatch.setattr(door.door_draw, "_lengthen", lambda rng, case, method: None)
    monkeypatch.setattr(door.door_draw, "LENGTHS", (1, 3, 9, 17, 20))
    monkeypatch.setattr(door.door_draw, "WIDTHS", (1, 3, 8))


class ScaleDropped(Broken):
    name = "_scale_dropped"

    def reference(self, q, k, v, call):
        return super().reference(q / call.scale, k, v, call)


CONTROLS = [
    (masks.MaskDropped, "exact|float64|hidden"),
    (ScaleDropped, "exact|float64"),
    (numbers.LastTokensDropped, "exact|float64"),
    (masks.FutureThroughLandmarks, "future"),
    (masks.ZeroKeyInsteadOfZeroFeature, "tokens alone"),
    (numbers.SixteenBitsInside, "exact|float64"),
    (gradients.DetachedKeys, "gradient of key|gradient of query"),
    (numbers.NanRows, "nothing to see|disagree"),
    (calls.GlobalGenerator, "exact|float64|same seed|generator"),
    (calls.BatchWideClamp, "exact|float64|batch-mates"),
    (masks.PaddedQueriesInMaximum, "exact|float64|hidden keys|masked queries"),
    (masks.WrongLse, "log-sum-exp"),
]


def only(method, monkeypatch):
    monkeypatch.setitem(_REGISTRY, method.name, method)
    monkeypatch.setattr(sparing, "list_methods", lambda: {method.name: method})


@pytest.mark.parametrize(("method", "words"), CONTROLS, ids=lambda x: getattr(x, "name", ""))
def test_a_broken_method_is_found_within_some_hundred_cases(method, words, moderate, monkeypatch):
    only(method, monkeypatch)
    with native.switched_off():
        found = find(door, 400)
    assert found is not None
    assert any(word in found[1] for word in words.split("|")), found[1]


def test_the_unbroken_method_is_not(moderate, monkeypatch):
    only(Broken, monkeypatch)
    with native.switched_off():
        assert find(door, 60) is None


def test_a_finding_is_shrunk_and_keeps_its_kind(moderate, monkeypatch):
    only(numbers.LastTokensDropped, monkeypatch)
    with native.switched_off():
        case, message = find(door, 400)
        small, still = cases.shrunk(door, case, message)
    assert cases.signature(still) == cases.signature(message)
    assert small["batch"] == small["heads"] == small["e"] == 1
    assert small["mask"] is None
    assert small["n_k"] <= 33


def test_signatures_leave_out_numbers():
    a = "window(size=8): error 2.81e-05 > 1e-06"
    assert cases.signature(a) == cases.signature("window(size=3, sinks=1): error 7 > nan")
    assert cases.signature(a) != cases.signature("window(size=8): not finite")


@needs_kernels
def test_every_op_is_reached_by_the_fuzzer_of_kernels():
    rng, seen = random.Random(0), set()
    defined = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("sparing::")}
    wanted = defined - {"sparing::attention", "sparing::attention_backward"}  # the door under torch.compile
    for _ in range(400):
        seen.update(op.name() for op, _ in kernels.record(kernels.draw(rng)))
        if seen == wanted:
            return
    raise AssertionError(f"never called: {wanted - seen}")


PLANTED = """
import json, os, random, signal
NAME = "door"
def draw(rng): return {"n": rng.randrange(1000)}
def calls(case): return 3
def shrink(case):
    if case["n"] > 50: yield {"n": case["n"] - 1 if case["n"] < 60 else 50 + case["n"] % 50}
def check(case):
    if case["n"] % 7 == 0: WHAT
"""


def run_with(tmp_path, what, *options):
    """The command with a fuzzer that fails as told, in place of the door's."""
    package = tmp_path / "tests" / "fuzz"
    package.mkdir(parents=True)
    package.parent.joinpath("__init__.py").touch()
    for file in Path(cases.__file__).parent.glob("*.py"):
        package.joinpath(file.name).write_text(file.read_text())
    package.joinpath("door.py").write_text(PLANTED.replace("WHAT", what))
    command = [
        sys.executable,
        "-m",
        "tests.fuzz",
        "--fuzzers",
        "door",
        "--processes",
        "1",
        "--seed",
        "3",
        "--seconds",
        "1",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    corpus = tmp_path / "corpus"
    done = subprocess.run(
        [*command, "--corpus", corpus, *options], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    kept = [json.loads(path.read_text()) for path in corpus.glob("*.json")] if corpus.exists() else []
    return done, kept


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("assert case['n'] == -1, f'off by {case[\"n\"]}'", "off by"),
        ("raise KeyError('missing')", "KeyError: 'missing'"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
    ],
    ids=["assertion", "exception", "crash"],
)
def test_the_command_writes_shrinks_and_reports_what_fails(tmp_path, what, found):
    done, kept = run_with(tmp_path, what)
    assert done.returncode == 1, done.stderr
    assert kept
    assert f"{kept[0]['fuzzer']}-" in done.stdout
    assert found in done.stdout
    assert all(found in finding["found"] for finding in kept)
    assert any(finding["case"]["n"] < 60 for finding in kept)
    counts = done.stdout.splitlines()[-1].split()
    assert counts[0] == "door"
    assert int(counts[-1].replace(",", "")) >= 1


def test_the_command_counts_and_ends_well_where_nothing_fails(tmp_path):
    done, kept = run_with(tmp_path, "pass")
    assert done.returncode == 0, done.stderr
    assert not kept
    assert "--seed 3" in done.stdout
    name, drawn, calls, refusals, findings = done.stdout.splitlines()[-1].replace(",", "").split()
    assert (name, refusals, findings) == ("door", "0", "0")
    assert int(calls) == 3 * int(drawn) > 0


def test_an_unknown_fuzzer_is_refused(tmp_path):
    done, _ = run_with(tmp_path, "pass", "--fuzzers", "windows")
    assert done.returncode != 0
    assert "'windows' is not one of" in done.stderr
