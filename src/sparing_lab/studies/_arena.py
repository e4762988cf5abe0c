"""The Long Range Arena as the Skyformer paper ran it: its tasks, its methods, and one protocol for all of them."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from sparing import documents
from sparing.call import Call
from sparing.documents import Documents
from sparing.maths import dense
from sparing.methods.exact import Exact
from sparing.nn import Classifier, Encoder
from sparing.sample_text import python_modules, python_sources
from sparing.workbench import memory
from sparing.workbench.timing import interval
from sparing_lab.studies._trained import row_of, trained
from sparing_lab.studies._yoso_race import timed
from sparing_lab.studies.rows import Cell, Row, Rows, pick
from sparing_lab.studies.study import Settings
from sparing_lab.tasks import arena
from sparing_lab.tasks.batches import Batches
from sparing_lab.tasks.trainable import Task
from sparing_lab.training.config import Config

EXACT, KERNELIZED, SKYFORMER, NYSTROM = "Self-Attention", "Kernelized", "Skyformer", "Nystromformer"
LINFORMER, PERFORMER, REFORMER, BIGBIRD = "Linformer", "Performer", "Reformer", "BigBird"
SIDES = (EXACT, KERNELIZED, SKYFORMER, NYSTROM, LINFORMER, PERFORMER, REFORMER, BIGBIRD)
MATRIX = "Self-Attention (matrix)"  #: as `EXACT`, but with the n x n matrix in memory
#: The paper's name of each task, in its order, and the name that this library gives it.
TASKS = {
    "Text": "bytes", "ListOps": "listops", "Retrieval": "retrieval", "Pathfinder": "pathfinder", "Image": "pixels",
}  # fmt: skip
PADDED = {"Text": 4096, "ListOps": 2048, "Retrieval": 4096, "Pathfinder": 1024, "Image": 1024}  #: the paper's lengths
FEATURES = 128  #: the paper's number of features, for all methods but BigBird
STEPS = 50_000  #: the paper's number of training steps
NARROW = {"hidden_size": 32, "intermediate_size": 64, "dropout": 0.0}  #: the models at small scale
FILES = {
    "Text": ("imdb", "train*.jsonl*", "film reviews (IMDb, ai.stanford.edu/~amaas/data/sentiment): imdb/train*.jsonl "
             "and imdb/test*.jsonl, an object with 'text' and 'label' on each line"),
    "Retrieval": ("aan", "*.tsv*", "pairs of papers (ACL Anthology Network, of the Long Range Arena's release): "
                  "aan/*.tsv with a label, a text and a text in each row"),
    "Image": ("cifar10", "*.npz", "grey pictures (CIFAR-10, cs.toronto.edu/~kriz/cifar.html): cifar10/*.npz with "
              "x_train, y_train, x_test, y_test"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Matrix(Exact):
    """Exact attention as it was written before fused kernels: the whole matrix of weights is in memory."""

    name = "_matrix"

    def fast(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return dense.logits(q, k, call).softmax(-1) @ v


@dataclass(frozen=True)
class Setup:
    """The length, optimizer settings and number of examples that a task is run with."""

    length: int
    batch: int
    rate: float
    steps: int
    warmup: float  #: share of the training steps
    features: int = FEATURES
    examples: tuple[int, int] | None = None  #: training and held-out, if the task generates them


#: The paper's settings (from its text and its code; the batch of Text is 16 in one and 32 in the other).
PAPER_SETUPS = {
    "Text": Setup(4000, 16, 1e-4, STEPS, 80 / STEPS),
    "ListOps": Setup(2000, 32, 1e-4, STEPS, 1000 / STEPS, examples=(96_000, 2_000)),
    "Retrieval": Setup(4000, 16, 2e-4, STEPS, 800 / STEPS),
    "Pathfinder": Setup(1024, 128, 2e-4, STEPS, 312 / STEPS, examples=(160_000, 20_000)),
    "Image": Setup(1024, 256, 1e-4, STEPS, 175 / STEPS),
}  # fmt: skip


def spec_of(side: str, features: int) -> str:
    """Return the method with that many features; chunks and blocks are half as large, like 64 and 128 in the paper.

    BigBird has its window of three blocks and its two global blocks; the random blocks are left out.
    """
    return {
        EXACT: "exact",
        MATRIX: Matrix.name,
        KERNELIZED: "kernel(kind='gaussian', normalize='none')",
        SKYFORMER: f"skyformer(landmarks={features})",
        NYSTROM: f"nystrom(landmarks={features})",
        LINFORMER: f"linformer(rank={features})",
        PERFORMER: f"random_features(features={features})",
        REFORMER: f"lsh(rounds=2, chunk={features // 2}, combine='sum', align='rank')",
        BIGBIRD: f"window(size={features + features // 2}, global_tokens={features})",
    }[side]


def config_of(task: str, side: str, setup: Setup, *, seed: int, data: Path | None, **more: Any) -> Config:
    """Return a run of the paper's model (2 layers of width 64, 2 heads), but for what `more` sets."""
    held: dict[str, Any] = {
        "hidden_size": 64, "num_heads": 2, "num_layers": 2, "intermediate_size": 128, "dropout": 0.1,
        "weight_decay": 0.0, "max_length": setup.length,
        "batch_size": setup.batch, "learning_rate": setup.rate, "max_steps": setup.steps, "warmup_ratio": setup.warmup,
    }  # fmt: skip
    given = None if data is None else str(data)
    return Config(
        **{"task": TASKS[task], "method": spec_of(side, setup.features), "seed": seed, "data": given, **held, **more}
    )


def data_of(settings: Settings, tasks: Sequence[str]) -> dict[str, Path | None]:
    """Return for each task the folder with its files, or None for data that are installed or generated."""
    found: dict[str, Path | None] = {}
    for task in tasks:
        folder, pattern, _ = FILES.get(task, ("", "", ""))
        there = settings.data is not None and bool(folder) and any((settings.data / folder).glob(pattern))
        found[task] = settings.data if there else None
    missing = [task for task in tasks if task in FILES and found[task] is None]
    if not settings.small and missing:
        raise ValueError("data: name a folder with --data that holds " + "; ".join(FILES[task][2] for task in missing))
    if len(missing) == sum(task in FILES for task in tasks):
        settings.refuse_unused(", or ".join(FILES[task][2] for task in missing))
    return found


def fingerprint(task: str, data: Path | None) -> str:
    """Return the fingerprint of what a task's examples are made of; empty where a seed determines them."""
    if data is not None:
        folder, pattern, _ = FILES[task]
        read = hashlib.sha256()
        for path in sorted((data / folder).glob(pattern.replace("train", ""))):
            read.update(path.name.encode() + path.read_bytes())
        return read.hexdigest()[:16]
    return _installed(task)


@functools.cache
def _installed(task: str) -> str:
    texts = {
        "Text": lambda: (*documents.default().texts, *python_sources()),
        "Retrieval": lambda: (*documents.default().texts, *python_modules()),
    }
    return Documents(task, tuple(texts[task]())).fingerprint if task in texts else ""


def training_cell(
    settings: Settings, task: str, side: str, setup: Setup, *, seed: int, data: Path | None, **more: Any
) -> Cell:
    """Return the cell of one model to train: the paper's, or a narrow one at small scale; more: settings of its run."""
    config = config_of(task, side, setup, seed=seed, data=data, **{**(NARROW if settings.small else {}), **more})
    made = {} if setup.examples is None else {"examples": list(setup.examples)}
    return {
        "what": "train", "task": task, "side": side, "seed": seed, "of": fingerprint(task, data),
        "config": asdict(config), **made,
    }  # fmt: skip


def examples_of(config: Config, count: Sequence[int] = ()) -> Task:
    """Return the task with all examples of the run made: making pictures takes longer than a step.

    count: numbers of training and of held-out examples, if the task generates them.
    """
    task = _examples(config.task, config.max_length, config.seed, config.data, *count)
    batches = Batches(len(task.train), config.batch_size, seed=config.seed, lengths=task.train.lengths)
    for number in {number for step in range(config.max_steps) for number in batches.batch(step)}:
        task.train[number]
    return task


@functools.lru_cache(maxsize=1)
def _examples(name: str, length: int, seed: int, data: str | None, *count: int) -> Task:
    if count:
        return {"listops": arena.listops_task, "pathfinder": arena.pathfinder_task}[name](length, seed, *count)
    return Config(task=name, max_length=length, seed=seed, data=data).load()


def train_one(cell: Cell) -> Row:
    """Train a model and return its curve, the number of held-out examples and the best accuracy on them."""
    config = Config(**cell["config"])
    _, found = trained(config, examples_of(config, cell.get("examples", ())))
    held = len(found.task.valid)
    return {**row_of(found), "held": held, "accuracy": found.metric}


def error(accuracy: float, held: int) -> float:
    """Return the standard error of a share that was measured on that many examples."""
    return math.sqrt(max(accuracy * (1 - accuracy), 1 / held) / held)


def learned(rows: Rows, task: str) -> bool:
    """Return whether at least one model of the task is above chance by three standard errors."""
    mine = pick(rows, what="train", task=task)
    return any(row["accuracy"] > row["chance"] + 3 * error(row["chance"], row["held"]) for row in mine)


def step_of(spec: str, *, length: int, batch: int) -> Callable[[], object]:
    """Return a training step of the paper's model on random tokens: forward, backward, optimizer."""
    torch.manual_seed(0)
    method = Matrix() if spec == Matrix.name else spec
    model = Classifier(Encoder(257, length=length, width=64, heads=2, layers=2, hidden=128, method=method), 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens, wanted = torch.randint(1, 257, (batch, length)), torch.randint(2, (batch,))

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(tokens), wanted).backward()
        optimizer.step()

    return step


def cost_at(cell: Cell) -> list[Row]:
    """Measure seconds and peak memory of a training step of every side, in one run, round by round.

    Memory is the peak of a step beyond the model, its gradients and the optimizer's state.
    """
    steps = {side: step_of(spec, length=cell["length"], batch=cell["batch"]) for side, spec in cell["specs"].items()}
    peaks = {}
    for side, step in steps.items():
        step()
        peaks[side] = memory.peak_extra_bytes(step)
    taken = dict(zip(steps, timed(list(steps.values()), cell["seconds"]), strict=True))
    return [
        {
            "side": side, "spec": cell["specs"][side], "seconds": interval(mine).median, "peak": peaks[side],
            "rounds": len(mine),
            "gain": {
                rival: interval([a / b for a, b in zip(taken[rival], mine, strict=False)])  # only rounds that both ran
                for rival in (EXACT, MATRIX) if rival in taken
            },
        }
        for side, mine in taken.items()
    ]  # fmt: skip
