"""What is killed and damaged: four commands on small models, and what a run of each must leave."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparing.store import verify_checksum
from sparing_lab.training import checkpoint

TIMES = ("seconds", "times", "machine")  #: entries that differ between runs
KEPT = "kept"  #: the folder of results


def prepare(folder: Path) -> Path:
    """A folder with models and documents."""
    from tests.support.small_models import saved

    saved(folder / "encoder")
    saved(folder / "decoder", "llama", num_hidden_layers=4)
    draw = random.Random(1)
    texts = ["".join(draw.choice("abcdefgh ijkl") for _ in range(draw.randint(40, 70))) for _ in range(14)]
    (folder / "texts.txt").write_text("\n".join(texts), encoding="utf-8")
    return folder


@dataclass(frozen=True)
class Scenario:
    """A command, and what it leaves behind."""

    name: str
    arguments: tuple[str, ...]
    outputs: tuple[str, ...]  #: files that it writes when it is done
    found: Callable[[Path], Any]  #: what two runs must agree on, from a run's folder
    progress: Callable[[Path], dict[str, Any]]  #: what was kept so far: name -> content, each checked


def _kept(folder: Path) -> dict[str, Any]:
    found = {}
    for path in (folder / KEPT).glob("*.json"):
        verify_checksum(json.loads(path.read_bytes()))
        found[path.name] = path.read_bytes()
    return found


def _timeless(path: Path) -> dict[str, Any]:
    return {name: value for name, value in json.loads(path.read_bytes()).items() if name not in TIMES}


def _study(folder: Path) -> Any:
    return _timeless(folder / "out/value-aware-example.json"), (folder / "out/value-aware-example.png").read_bytes()


def _log(folder: Path) -> list[dict[str, str]]:
    rows = csv.DictReader((folder / "run/log.csv").read_text(encoding="utf-8").splitlines())
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def _trained(folder: Path) -> Any:
    weights = checkpoint.load(folder / "run/best.pt")["model"]
    files = {name: (folder / "run" / name).read_bytes() for name in ("config.json", "curve.png")}
    return _timeless(folder / "run/result.json"), _log(folder), {k: v.tolist() for k, v in weights.items()}, files


def _checkpoints(folder: Path) -> dict[str, Any]:
    """The losses of all steps that a checkpoint has: a later one has these and more."""
    found: dict[str, Any] = {}
    for name in ("best", "last"):
        if (path := folder / f"run/{name}.pt").exists():
            held = checkpoint.load(path)
            if name == "last":
                found |= {f"step {step}": loss for step, loss in enumerate(held["losses"])}
    if (folder / "run/log.csv").exists():
        found |= {f"log {row['step']}": row["loss"] for row in _log(folder)}
    if (folder / "run/config.json").exists():
        verify_checksum(json.loads((folder / "run/config.json").read_bytes()))
    return found


def _bytes(*names: str) -> Callable[[Path], Any]:
    return lambda folder: [(folder / name).read_bytes() for name in names]


METHODS = "window(size=8),key_clusters(clusters=4,keys=4,window=4),random_features(features=8),top_keys(keys=8)"
SCENARIOS = (
    Scenario(
        "compare",
        ("compare", "encoder", "--data", "texts.txt", "--methods", METHODS, "--documents", "4", "--jobs", "1",
         "--cache", KEPT, "--json", "found.json", "--html", "found.html"),
        ("found.json", "found.html"), _bytes("found.json", "found.html"), _kept,
    ),
    Scenario(
        "plan",
        ("plan", "decoder", "--data", "texts.txt", "--methods", "window(size=2),window(size=16)", "--tolerance", "0.3",
         "--coverage", "0.8", "--confidence", "0.8", "--jobs", "1", "--cache", KEPT, "--out", "planned"),
        ("planned/recipe.json", "planned/plan.json"), _bytes("planned/recipe.json"), _kept,
    ),
    Scenario(
        "study", ("study", "value-aware-example", "--cache", KEPT, "--out", "out"),
        ("out/value-aware-example.json", "out/value-aware-example.png"), _study, _kept,
    ),
    Scenario(
        "train",
        ("train", "masked", "--max-length", "32", "--hidden-size", "16", "--intermediate-size", "16", "--num-layers",
         "1", "--batch-size", "4", "--eval-steps", "3", "--max-steps", "18", "--method", "yoso(hashes=4)", "--dropout",
         "0.1", "--out", "run"),
        ("run/result.json", "run/log.csv", "run/curve.png"), _trained, _checkpoints,
    ),
)  # fmt: skip


def warm_up(folder: Path) -> None:
    """Run each command once in this process, so that what it imports is there."""
    import contextlib
    import os

    from sparing.cli.main import main

    prepare(folder)
    before = Path.cwd()
    os.chdir(folder)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        for scenario in SCENARIOS:
            assert main(list(scenario.arguments)) == 0, scenario.name
    os.chdir(before)
    torch.manual_seed(0)
