"""Bytes that are flipped, lost or doubled in every kind of file that is read back: no wrong number is believed."""

from __future__ import annotations

import contextlib
import io
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import sparing
from sparing.cli.main import main
from sparing.report.bench_files import read_json, to_json
from sparing.store import Store, add_checksum, write_files
from sparing.workbench.benchmark.results import Bench, BenchSettings
from sparing_lab.training import checkpoint
from sparing_lab.training.config import Config, made, read


def damaged(content: bytes, count: int, seed: str, span: tuple[int, int] | None = None) -> Iterator[tuple[str, bytes]]:
    """Yield so many damaged copies, with what was done; span: the bytes that may be hit."""
    draw, (start, end) = random.Random(seed), span or (0, len(content))
    digits = [at for at in range(start, end) if content[at : at + 1].isdigit()]
    for number in range(count):
        at = draw.randrange(start, end)
        length = draw.randint(1, min(64, end - at))
        part = content[at : at + length]
        kind = number % 8
        if kind == 0:
            name, found = "bit", content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :]
        elif kind == 1:
            name, found = "byte", content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :]
        elif kind == 2 and digits:
            at = draw.choice(digits)
            name, found = "digit", content[:at] + draw.choice("0123456789").encode() + content[at + 1 :]
        elif kind == 3:
            name, found = "cut", content[:at]
        elif kind == 4:
            name, found = "lost", content[:at] + content[at + length :]
        elif kind == 5:
            name, found = "doubled", content[:at] + part + content[at:]
        elif kind == 6:
            name, found = "zeroed", content[:at] + bytes(length) + content[at + length :]
        else:
            other = draw.randrange(start, end - length + 1)
            name, found = "overwritten", content[:at] + content[other : other + length] + content[at + length :]
        if found != content:
            yield f"{name} at {at}", found


@dataclass(frozen=True)
class Kind:
    """A kind of file: how one is made, and how it is read."""

    name: str
    make: Callable[[Path], Path]  #: in an empty folder
    read: Callable[[Path], Any]  #: what is believed; None: measured again; raises where it is refused
    span: Callable[[bytes], tuple[int, int]] | None = None  #: the part of the file that is ours


def _command(*arguments: str) -> str:
    """What the command prints; raises what it says."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(list(arguments))
    if status:
        assert status == 2
        assert err.getvalue().count("\n") == 1, err.getvalue()
        assert "--debug" not in err.getvalue(), err.getvalue()
        raise ValueError(err.getvalue())
    return out.getvalue()


CELL = {"what": "quality", "method": "window(size=8)", "seed": 0, "documents": 4}
RESULT = {"ends": [{"cosine": 0.125 * i, "change": 1e-3 * i} for i in range(4)], "errors": [0.25, 0.5], "flops": 0.3}


def _kept(folder: Path) -> Path:
    Store(folder).put(CELL, RESULT)
    (path,) = folder.iterdir()
    return path


def _recipe(folder: Path) -> Path:
    layers = {f"layers.{i}.self_attn": f"window(size={8 + 2 * i}, sinks=1)" for i in range(4)}
    about = {"reason": "4 of 4 layers", "tolerance": 0.01, "confidence": 0.95, "gain": {"median": 1.64}}
    sparing.Recipe(layers, seed=7, architecture="llama", about=about).save(folder / "recipe.json")
    return folder / "recipe.json"


def _comparison(folder: Path) -> Path:
    from tests.support.comparisons import example

    write_files({folder / "found.json": example(maps=()).to_json()})
    return folder / "found.json"


def _bench(folder: Path) -> Path:
    settings = BenchSettings(methods=("window(size=8)",))
    run = Bench(settings=settings, machine={"cpu": "x", "threads": 2}, inputs="normal numbers", duration=12.5)
    write_files({folder / "bench.json": to_json(run)})
    return folder / "bench.json"


def _checkpoint(folder: Path) -> Path:
    draw = torch.Generator().manual_seed(0)
    held = {
        "config": asdict(Config("causal")), "examples": "e", "step": 6, "task": "causal",
        "records": [{"step": 6.0, "loss": 2.5}], "model": {"weight": torch.randn(64, 16, generator=draw)},
    }  # fmt: skip
    checkpoint.save(folder / "best.pt", held)
    return folder / "best.pt"


def _settings(folder: Path) -> Path:
    held = add_checksum(asdict(Config("causal", max_steps=120, batch_size=16, learning_rate=3e-4)))
    write_files({folder / "config.json": json.dumps(held, indent=1) + "\n"})
    return folder / "config.json"


def _model_config(folder: Path) -> Path:
    from tests.support.model_zoo import build

    model = build("bert")
    with sparing.approximate(model, "window(size=8, sinks=1)", seed=7):
        model.config.save_pretrained(folder)
    return folder / "config.json"


def _recipe_of_config(path: Path) -> Any:
    from transformers import AutoConfig

    found = getattr(AutoConfig.from_pretrained(path.parent), "sparing", None)
    if found is None:
        raise ValueError(f"{path.name}: there is no recipe")
    return sparing.Recipe.of(found)


def _sparing_entry(content: bytes) -> tuple[int, int]:
    start = content.index(b'"sparing"')
    return start, content.index(b"\n  }", start) + 4


def _tensors(path: Path) -> Any:
    found = checkpoint.load(path)
    return {**found, "model": {name: value.tolist() for name, value in found["model"].items()}}


KINDS = (
    Kind("kept result", _kept, lambda path: Store(path.parent).get(CELL)),
    Kind("recipe, through `show`", _recipe, lambda path: _command("show", str(path))),
    Kind("comparison, through `show`", _comparison, lambda path: _command("show", str(path), "--layers")),
    Kind("bench.json", _bench, read_json),
    Kind("checkpoint", _checkpoint, _tensors),
    Kind("config.json of a run", _settings, lambda path: made(read(path))),
    Kind("recipe in a model's config.json", _model_config, _recipe_of_config, _sparing_entry),
)


def _tried(kind: Kind, path: Path) -> tuple[Any, str]:
    """What is believed, and why it was refused."""
    try:
        return kind.read(path), ""
    except (ValueError, TypeError, OSError) as error:
        return None, str(error)


def damage(kind: Kind, folder: Path, count: int, seed: str = "0") -> Counter[str]:
    """Damage a file so many times, and count what became of it; raise where a wrong content is believed."""
    import warnings

    path = kind.make(folder)
    content = path.read_bytes()
    counts: Counter[str] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = kind.read(path)
        assert wanted is not None
        for what, changed in damaged(content, count, f"{kind.name} {seed}", kind.span and kind.span(content)):
            path.write_bytes(changed)
            counts["damaged"] += 1
            found, refused = _tried(kind, path)
            if refused:
                named = path.name in refused or (kind.span is not None and "recipe" in refused)
                assert named, f"{kind.name}, {what}: {refused}"
                counts["refused by name"] += 1
            elif found is None:
                counts["measured again"] += 1
            else:
                assert found == wanted, f"{kind.name}, {what}: believed"
                counts["same content"] += 1
    path.write_bytes(content)
    return counts
