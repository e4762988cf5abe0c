"""The settings of a training run, from a file or from options of the command.

Names follow transformers and accelerate where these have one.
"""

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


#: Former names of settings. Files may still use them; options and Config may not.
RENAMED = {
    "length": "max_length", "width": "hidden_size", "heads": "num_heads", "layers": "num_layers",
    "hidden": "intermediate_size", "batch": "batch_size", "accumulate": "gradient_accumulation_steps",
    "steps": "max_steps", "rate": "learning_rate", "warmup": "warmup_ratio", "decay": "weight_decay",
    "clip": "max_grad_norm", "evaluate": "eval_steps", "precision": "mixed_precision",
}  # fmt: skip


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Config:
    """The settings of a run. Two runs with equal settings take the same steps."""

    task: str
    method: str = _setting("exact", "attention method, such as 'yoso(hashes=32)'")
    max_length: int = _setting(0, "maximum number of tokens in an example; 0 uses the length of the task")
    hidden_size: int = _setting(64, "size of the hidden states")
    num_heads: int = _setting(2, "number of attention heads in a layer")
    num_layers: int = _setting(2, "number of layers")
    intermediate_size: int = _setting(128, "size of the feed-forward layers")
    norm: str = _setting("pre", "layer normalisation before (pre) or after (post) each residual branch")
    dropout: float = _setting(0.0, "dropout probability of each residual branch")
    batch_size: int = _setting(32, "number of examples in a step, over all processes")
    gradient_accumulation_steps: int = _setting(1, "number of parts in which a batch is run, one after the other")
    max_steps: int = _setting(1000, "number of optimizer steps")
    epochs: float = _setting(0.0, "number of passes over the training examples, instead of --max-steps")
    learning_rate: float = _setting(
        0.0, "peak learning rate of AdamW; 0 uses 0.001, or 0.00005 to fine-tune a pretrained model"
    )
    warmup_ratio: float = _setting(
        0.05, "share of the steps in which the learning rate rises linearly; it then falls linearly to zero"
    )
    weight_decay: float = _setting(0.01, "weight decay of AdamW")
    max_grad_norm: float = _setting(1.0, "norm to which gradients are clipped")
    eval_steps: int = _setting(0, "number of steps between evaluations; 0 evaluates ten times")
    mixed_precision: str = _setting("no", "no, bf16 or fp16")
    data: str | None = _setting(None, "file, folder, or hub:NAME (default: generated or installed data)")
    part: str | None = _setting(None, "task or subset of --data, such as SST-2")
    pretrained: str | None = _setting(
        None, "pretrained model to fine-tune on glue: a folder or a name on the hub (default: minilm)"
    )
    frozen: str | None = _setting(
        None, "comma-separated words; parameters whose names contain one are not trained, such as embeddings"
    )
    seed: int = _setting(0, "random seed for weights, examples and their order")

    def __post_init__(self) -> None:
        if self.task not in KINDS:
            raise ValueError(f"task={self.task!r} is not one of {', '.join(KINDS)}")
        _method(self.method)
        for name in (
            "hidden_size", "num_heads", "num_layers", "intermediate_size", "batch_size", "gradient_accumulation_steps",
            "max_steps",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in (
            "max_length", "eval_steps", "weight_decay", "warmup_ratio", "dropout", "learning_rate", "epochs",
        ):  # fmt: skip
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be finite and not negative")
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm={self.max_grad_norm} must be above 0")
        if self.dropout >= 1:
            raise ValueError(f"dropout={self.dropout} is a probability and must be below 1")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} must be from 0 to below 2^63")
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size={self.hidden_size} must be a multiple of num_heads={self.num_heads}")
        if self.batch_size % self.gradient_accumulation_steps:
            raise ValueError(
                f"batch_size={self.batch_size} must be a multiple of "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}"
            )
        if self.warmup_ratio >= 1:
            raise ValueError(f"warmup_ratio={self.warmup_ratio} is a share of the steps and must be below 1")
        if self.mixed_precision not in PRECISIONS:
            raise ValueError(
                f"mixed_precision={self.mixed_precision!r} is not one of {', '.join(map(repr, PRECISIONS))}"
            )
        if self.tuned:
            sizes = ("hidden_size", "num_heads", "num_layers", "intermediate_size", "norm")
            self._refuse(sizes, "cannot be chosen for a pretrained model; leave it out")
        else:
            self._refuse(("pretrained",), f"belongs to glue; {self.task} trains a model from scratch")
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
        """Whether the run fine-tunes a pretrained model."""
        return KINDS[self.task].tuned

    @property
    def peak_learning_rate(self) -> float:
        """The highest learning rate, with the default in place of 0."""
        return self.learning_rate or (5e-5 if self.tuned else 1e-3)

    @property
    def steps_between_evaluations(self) -> int:
        """The number of steps between evaluations, with the default in place of 0."""
        return self.eval_steps or max(self.max_steps // 10, 1)

    @property
    def fingerprint(self) -> str:
        """A hash of the settings that change which steps are taken."""
        return hashlib.sha256(json.dumps(self.steps_taken(), sort_keys=True).encode()).hexdigest()[:16]

    def steps_taken(self) -> dict[str, Any]:
        """Return the settings that change which steps are taken: all but when the model is evaluated."""
        return {name: value for name, value in asdict(self).items() if name != "eval_steps"}

    def load(self) -> Task:
        """Load or generate the examples of the task."""
        kind = KINDS[self.task]
        return kind.load(
            length=self.max_length or kind.length, seed=self.seed, data=self.data, part=self.part,
            pretrained=self.pretrained,
        )  # fmt: skip

    def resolve_epochs(self, task: Task) -> Config:
        """Return the config with max_steps worked out from epochs, if these are set."""
        if not self.epochs:
            return self
        return replace(self, max_steps=max(round(self.epochs * (len(task.train) // self.batch_size)), 1))

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a step; steps count from 0."""
        peak, rising = self.peak_learning_rate, max(round(self.warmup_ratio * self.max_steps), 1)
        if step < rising:
            return peak * (step + 1) / rising
        return peak * (self.max_steps - step) / max(self.max_steps - rising, 1)


def read(path: Path) -> dict[str, Any]:
    """Return the settings in a JSON file, under their present names."""
    try:
        held = parse(read_text(path, "config", "such as the config.json of a run"))
    except OSError as error:
        raise ValueError(str(error)) from None
    except ValueError as error:
        raise ValueError(f"config: {path} is not JSON: {error}") from None
    if not isinstance(held, dict):
        raise ValueError(f"config: {path} must be a JSON object whose keys are settings")
    try:
        held = verify_checksum(held)
    except Damaged as error:
        raise ValueError(f"config: {path}: {error}") from None
    held = renamed(held, f"config: {path}")
    _refuse_unknown(held, f"config: {path}")
    return held


def renamed(settings: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Return settings that an earlier version wrote under their present names."""
    for old, new in RENAMED.items():
        if old in settings and new in settings:
            raise ValueError(f"{label}: {old!r} is the former name of {new!r}; keep one of the two")
    return {RENAMED.get(name, name): value for name, value in settings.items()}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the settings whose values differ, each with both values; empty where none does."""
    return "; ".join(f"{n}={before.get(n)!r}, now {v!r}" for n, v in now.items() if before.get(n) != v)


_TYPES = {"int": (int,), "float": (int, float), "str": (str,), "str | None": (str, type(None))}


def made(settings: Mapping[str, Any]) -> Config:
    """Return the config with these settings and defaults for the others."""
    _refuse_unknown(settings, "config")
    if "task" not in settings:
        raise ValueError(f"config: no task is named; choose one of {', '.join(KINDS)}")
    return Config(**settings)


def _refuse_unknown(settings: Mapping[str, Any], label: str) -> None:
    """Raise if a setting is unknown or has the wrong type."""
    kinds = {each.name: str(each.type) for each in fields(Config)}
    for name, value in settings.items():
        if name in RENAMED:
            raise ValueError(f"{label}: {name!r} is now {RENAMED[name]!r}")
        if name not in kinds:
            raise ValueError(f"{label}: unknown setting {name!r}; choose from {', '.join(kinds)}")
        if not isinstance(value, _TYPES[kinds[name]]) or isinstance(value, bool):
            raise ValueError(f"{label}: {name}={value!r} must be of type {kinds[name]}")
