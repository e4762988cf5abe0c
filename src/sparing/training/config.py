"""What a training run is made of: a file, or options of the command."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from sparing.method import method as _method
from sparing.tasks import arena, language
from sparing.tasks.trainable import Task

PRECISIONS = ("no", "bf16", "fp16")


@dataclass(frozen=True)
class Config:
    """A run. Two runs with equal settings take the same steps."""

    task: str
    method: str = "exact"
    length: int = 0  #: tokens; 0: the task's usual length
    width: int = 64
    heads: int = 2
    layers: int = 2
    hidden: int = 128
    norm: str = "pre"
    dropout: float = 0.0
    batch: int = 32  #: examples of a step, over all processes
    accumulate: int = 1  #: parts of a batch that are run one after the other
    steps: int = 1000
    rate: float = 1e-3  #: the highest learning rate
    warmup: float = 0.05  #: share of the steps in which the rate rises; then it falls in a line to zero
    decay: float = 0.01  #: of weights
    clip: float = 1.0  #: of the gradient's norm
    evaluate: int = 0  #: steps between evaluations; 0: ten in all
    precision: str = "no"
    data: str | None = None  #: a file or a folder; None: what is always there
    seed: int = 0

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task={self.task!r} is not one of {', '.join(TASKS)}")
        _method(self.method)
        for name in ("width", "heads", "layers", "hidden", "batch", "accumulate", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("length", "evaluate", "decay", "warmup", "dropout"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        for name in ("rate", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if self.batch % self.accumulate:
            raise ValueError(f"batch={self.batch} must be a multiple of accumulate={self.accumulate}")
        if self.warmup >= 1:
            raise ValueError(f"warmup={self.warmup} is a share of the steps, and must be below 1")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision={self.precision!r} is not one of {', '.join(map(repr, PRECISIONS))}")

    @property
    def every(self) -> int:
        """Steps between evaluations."""
        return self.evaluate or max(self.steps // 10, 1)

    @property
    def fingerprint(self) -> str:
        """The same for runs that take the same steps; when they are evaluated changes nothing."""
        held = {name: value for name, value in asdict(self).items() if name != "evaluate"}
        return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()[:16]

    def load(self) -> Task:
        """The task's examples."""
        usual, make = TASKS[self.task]
        return make(self.length or usual, self.seed, None if self.data is None else Path(self.data))

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, which counts from 0."""
        rising = max(round(self.warmup * self.steps), 1)
        if step < rising:
            return self.rate * (step + 1) / rising
        return self.rate * (self.steps - step) / max(self.steps - rising, 1)


def _language(make: Callable[..., Task]) -> Callable[[int, int, Path | None], Task]:
    return lambda length, seed, data: make(length, seed, None if data is None else _texts(data))


def _texts(data: Path) -> list[Path]:
    if not data.is_dir():
        return [data]
    found = sorted(path for path in data.iterdir() if path.name.split(".", 1)[-1] in ("txt", "txt.xz", "txt.gz"))
    if not found:
        raise ValueError(f"data: there is no .txt file in {data}")
    return found


def _generated(make: Callable[..., Task]) -> Callable[[int, int, Path | None], Task]:
    def load(length: int, seed: int, data: Path | None) -> Task:
        if data is not None:
            raise ValueError(f"data: {make.__name__.removesuffix('_task')} makes its own examples; leave it out")
        return make(length, seed)

    return load


#: name -> usual length, loader of length, seed and data
TASKS: dict[str, tuple[int, Callable[[int, int, Path | None], Task]]] = {
    "listops": (256, _generated(arena.listops_task)),
    "pathfinder": (1024, _generated(arena.pathfinder_task)),
    "bytes": (512, arena.bytes_task),
    "pixels": (64, arena.pixels_task),
    "retrieval": (256, arena.retrieval_task),
    "causal": (256, _language(language.causal_task)),
    "masked": (256, _language(language.masked_task)),
    "order": (256, _language(language.order_task)),
}


def read(path: Path) -> dict[str, Any]:
    """The settings of a JSON file."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"config: there is no file {path}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"config: {path} is not JSON: {error}") from None
    if not isinstance(held, dict):
        raise ValueError(f"config: {path} must be an object, with names of settings")
    return held


def made(settings: Mapping[str, Any]) -> Config:
    """A run with these settings; others keep their defaults."""
    kinds = {each.name: each.type for each in fields(Config)}
    for name, value in settings.items():
        if name not in kinds:
            raise ValueError(f"config: there is no setting {name!r}; there are {', '.join(kinds)}")
        wanted = {"int": (int,), "float": (int, float), "str": (str,), "str | None": (str, type(None))}[
            str(kinds[name])
        ]
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise ValueError(f"config: {name}={value!r} must be of type {kinds[name]}")
    if "task" not in settings:
        raise ValueError(f"config: no task is named; there are {', '.join(TASKS)}")
    return replace(Config(str(settings["task"])), **settings)
