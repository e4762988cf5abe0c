"""What a training run is made of: a file, or options of the command."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from sparing.contract import method as _method
from sparing.from_json import parse, read_text
from sparing.store import Damaged, verify_checksum
from sparing_lab.tasks.kinds import KINDS
from sparing_lab.tasks.trainable import Task

PRECISIONS = ("no", "bf16", "fp16")


def _of(default: Any, words: str) -> Any:
    return field(default=default, metadata={"words": words})


@dataclass(frozen=True)
class Config:
    """A run. Two runs with equal settings take the same steps."""

    task: str
    method: str = _of("exact", "of attention, such as 'yoso(hashes=32)'")
    length: int = _of(0, "tokens of an example at most; 0: the task's usual length")
    width: int = _of(64, "of the states of the model")
    heads: int = _of(2, "of attention")
    layers: int = _of(2, "of attention and feed-forward parts")
    hidden: int = _of(128, "width of the feed-forward parts")
    norm: str = _of("pre", "where states are normalised: pre or post")
    dropout: float = _of(0.0, "share of what each part adds that is left out")
    batch: int = _of(32, "examples of a step, over all processes")
    accumulate: int = _of(1, "parts of a batch that run one after the other")
    steps: int = _of(1000, "of the optimizer")
    epochs: float = _of(0.0, "passes over the examples, in place of --steps")
    rate: float = _of(0.0, "the highest learning rate; 0: 0.001, or 0.00005 for a pretrained model")
    warmup: float = _of(0.05, "share of the steps in which the rate rises; then it falls in a line to zero")
    decay: float = _of(0.01, "of weights")
    clip: float = _of(1.0, "the largest norm of a gradient")
    evaluate: int = _of(0, "steps between evaluations; 0: ten in all")
    precision: str = _of("no", "mixed precision: no, bf16 or fp16")
    data: str | None = _of(None, "a file, a folder, or hub:NAME; default: what is always there")
    part: str | None = _of(None, "which of the tasks or sets that --data holds, such as SST-2")
    pretrained: str | None = _of(None, "for glue: a folder, a name on the hub, or minilm (default)")
    frozen: str | None = _of(None, "parts of the model that stay as they are, by words in their names: embeddings")
    seed: int = _of(0, "of weights, examples and their order")

    def __post_init__(self) -> None:
        if self.task not in KINDS:
            raise ValueError(f"task={self.task!r} is not one of {', '.join(KINDS)}")
        _method(self.method)
        for name in ("width", "heads", "layers", "hidden", "batch", "accumulate", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("length", "evaluate", "decay", "warmup", "dropout", "rate", "epochs"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be a number, and not negative")
        if not self.clip > 0:
            raise ValueError(f"clip={self.clip} must be above 0")
        if self.dropout >= 1:
            raise ValueError(f"dropout={self.dropout} is a share, and must be below 1")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} must be from 0 to below 2^63")
        if self.width % self.heads:
            raise ValueError(f"width={self.width} must be a multiple of heads={self.heads}")
        if self.batch % self.accumulate:
            raise ValueError(f"batch={self.batch} must be a multiple of accumulate={self.accumulate}")
        if self.warmup >= 1:
            raise ValueError(f"warmup={self.warmup} is a share of the steps, and must be below 1")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision={self.precision!r} is not one of {', '.join(map(repr, PRECISIONS))}")
        if self.tuned:
            self._refuse(("width", "heads", "layers", "hidden", "norm"), "is the pretrained model's own; leave it out")
        else:
            self._refuse(("pretrained",), f"belongs to glue; {self.task} trains a model of its own")

        for each in fields(self):
            if isinstance(value := getattr(self, each.name), int) and value >= 2**63:
                raise ValueError(f"{each.name}={value} must be below 2^63")

    def _refuse(self, names: tuple[str, ...], why: str) -> None:
        usual = {each.name: each.default for each in fields(self)}
        for name in names:
            if getattr(self, name) != usual[name]:
                raise ValueError(f"{name}={getattr(self, name)!r} {why}")

    @property
    def tuned(self) -> bool:
        """Whether a pretrained model is trained on."""
        return KINDS[self.task].tuned

    @property
    def highest(self) -> float:
        """The highest learning rate."""
        return self.rate or (5e-5 if self.tuned else 1e-3)

    @property
    def every(self) -> int:
        """Steps between evaluations."""
        return self.evaluate or max(self.steps // 10, 1)

    @property
    def fingerprint(self) -> str:
        """The same for runs that take the same steps; when they are evaluated changes nothing."""
        return hashlib.sha256(json.dumps(self.steps_taken(), sort_keys=True).encode()).hexdigest()[:16]

    def steps_taken(self) -> dict[str, Any]:
        """Return the settings that change which steps are taken."""
        return {name: value for name, value in asdict(self).items() if name != "evaluate"}

    def load(self) -> Task:
        """The task's examples."""
        kind = KINDS[self.task]
        return kind.load(
            length=self.length or kind.length, seed=self.seed, data=self.data, part=self.part,
            pretrained=self.pretrained,
        )  # fmt: skip

    def settled(self, task: Task) -> Config:
        """With the steps that its epochs have."""
        if not self.epochs:
            return self
        return replace(self, steps=max(round(self.epochs * (len(task.train) // self.batch)), 1))

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, which counts from 0."""
        rising = max(round(self.warmup * self.steps), 1)
        if step < rising:
            return self.highest * (step + 1) / rising
        return self.highest * (self.steps - step) / max(self.steps - rising, 1)


def read(path: Path) -> dict[str, Any]:
    """Return the settings of a JSON file."""
    try:
        held = parse(read_text(path, "config", "such as the config.json of a run"))
    except OSError as error:
        raise ValueError(str(error)) from None
    except ValueError as error:
        raise ValueError(f"config: {path} is not JSON: {error}") from None
    if not isinstance(held, dict):
        raise ValueError(f"config: {path} must be an object, with names of settings")
    try:
        held = verify_checksum(held)
    except Damaged as error:
        raise ValueError(f"config: {path}: {error}") from None
    _refuse_unknown(held, f"config: {path}")
    return held


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the settings whose values differ, each with both values; empty where none does."""
    return "; ".join(f"{n}={before.get(n)!r}, now {v!r}" for n, v in now.items() if before.get(n) != v)


_TYPES = {"int": (int,), "float": (int, float), "str": (str,), "str | None": (str, type(None))}


def made(settings: Mapping[str, Any]) -> Config:
    """Return a run with these settings; others keep their defaults."""
    _refuse_unknown(settings, "config")
    if "task" not in settings:
        raise ValueError(f"config: no task is named; there are {', '.join(KINDS)}")
    return Config(**settings)


def _refuse_unknown(settings: Mapping[str, Any], label: str) -> None:
    """Raise where a setting is not known, or is of another type."""
    kinds = {each.name: str(each.type) for each in fields(Config)}
    for name, value in settings.items():
        if name not in kinds:
            raise ValueError(f"{label}: there is no setting {name!r}; there are {', '.join(kinds)}")
        if not isinstance(value, _TYPES[kinds[name]]) or isinstance(value, bool):
            raise ValueError(f"{label}: {name}={value!r} must be of type {kinds[name]}")
