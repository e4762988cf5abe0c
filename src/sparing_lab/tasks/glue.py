"""Read the tasks of GLUE (Wang et al. 2018) from its files: FOLDER/glue/TASK/dev.tsv or FOLDER/TASK/dev.tsv."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparing.documents import Documents, decoded

SITE = "https://gluebenchmark.com/tasks"
_ENTAILS = ("entailment", "not_entailment")


@dataclass(frozen=True)
class Task:
    """A task of GLUE: the columns of its file, its classes and its metrics."""

    name: str
    text: str  #: the column of the text
    pair: str | None  #: the column of the second text
    label: str
    metrics: tuple[str, ...]  #: names in `sparing.workbench.metrics`, the one that is reported first
    classes: tuple[str, ...] = ("0", "1")  #: the labels in the order of their classes; empty if the label is a score
    header: tuple[str, ...] | None = None  #: the columns of a file without a header
    folder: str = ""  #: the folder, if it is not called like the task
    dev: str = "dev.tsv"

    def path(self, data: Path, split: str = "dev") -> Path:
        """Return the path of its file in a folder of datasets, whether or not it exists."""
        name = self.dev if split == "dev" else f"{split}.tsv"
        folders = [top / (self.folder or self.name) for top in (data / "glue", data)]
        places = [folder / f"{name}{end}" for folder in folders for end in ("", ".xz", ".gz")]
        return next((place for place in places if place.is_file()), places[0])


WANTED = "glue/TASK/dev.tsv or TASK/dev.tsv, the files of the GLUE benchmark as they are (may be .xz or .gz)"
#: In the order of the paper's tables.
TASKS = {
    task.name: task
    for task in (
        Task("CoLA", "sentence", None, "label", ("matthews",), header=("source", "label", "mark", "sentence")),
        Task("SST-2", "sentence", None, "label", ("accuracy",)),
        Task("MRPC", "#1 String", "#2 String", "Quality", ("accuracy", "f1")),
        Task("STS-B", "sentence1", "sentence2", "score", ("pearson", "spearman"), ()),
        Task("QQP", "question1", "question2", "is_duplicate", ("accuracy", "f1")),
        Task(
            "MNLI", "sentence1", "sentence2", "gold_label", ("accuracy",), ("entailment", "neutral", "contradiction"),
            dev="dev_matched.tsv",
        ),
        Task(
            "MNLI-mm", "sentence1", "sentence2", "gold_label", ("accuracy",),
            ("entailment", "neutral", "contradiction"), folder="MNLI", dev="dev_mismatched.tsv",
        ),
        Task("QNLI", "question", "sentence", "label", ("accuracy",), _ENTAILS),
        Task("RTE", "sentence1", "sentence2", "label", ("accuracy",), _ENTAILS),
        Task("WNLI", "sentence1", "sentence2", "label", ("accuracy",)),
    )
}  # fmt: skip


def given(data: Path) -> list[Task]:
    """Return the tasks whose development sets are in the folder."""
    return [task for task in TASKS.values() if task.path(data).is_file()]


def read(task: Task, data: Path | None, split: str = "dev", *, most: int | None = None) -> Documents:
    """Return the first `most` documents of a task; labels are words, or scores if the task has no classes."""
    path = task.path(Path("DATA") if data is None else data, split)
    named = [name for name in (task.text, task.pair, task.label) if name is not None]
    form = "no header, columns " + ", ".join(task.header) if task.header else "columns " + ", ".join(map(repr, named))
    if data is None or not path.is_file():
        raise ValueError(
            f"data: {task.name} needs {path} (GLUE's tab-separated file: {form}); --data names the folder that holds "
            f"glue/. The paper had it from the GLUE benchmark, {SITE}"
        )
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(decoded(path).split("\n"), 1)]
    lines = [(number, line) for number, line in lines if line]
    if not lines:
        raise ValueError(f"data: {path} is empty")
    names: Sequence[str] = task.header or lines.pop(0)[1].split("\t")
    for name in named:
        if name not in names:
            raise ValueError(f"data: {path} has no column {name!r}; it has {', '.join(map(repr, names))}")
    texts, pairs, labels = [], [], []
    for number, line in lines[:most]:
        cells = line.split("\t")
        if len(cells) != len(names):
            raise ValueError(f"data: {path}, line {number} has {len(cells)} cells, not {len(names)}: is it truncated?")
        row = dict(zip(names, cells, strict=True))
        texts.append(_text(row, task.text, path, number))
        if task.pair is not None:
            pairs.append(_text(row, task.pair, path, number))
        labels.append(_label(row[task.label], task, path, number))
    if not texts:
        raise ValueError(f"data: {path} holds a header and no rows")
    return Documents(f"{task.name} {split}", tuple(texts), tuple(labels), 0, tuple(pairs) if task.pair else None)


def _text(row: Mapping[str, str], column: str, path: Path, number: int) -> str:
    if not row[column].strip():
        raise ValueError(f"data: {path}, line {number}: {column!r} is empty")
    return row[column]


def _label(label: str, task: Task, path: Path, number: int) -> Any:
    if task.classes:
        if label not in task.classes:
            known = ", ".join(map(repr, task.classes))
            raise ValueError(f"data: {path}, line {number}: {task.label!r} is {label!r}; it must be one of {known}")
        return label
    try:
        score = float(label)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise ValueError(f"data: {path}, line {number}: {task.label!r} is {label!r}, which is not a finite number")
    return score


def classes_of(task: Task, config: Any) -> dict[str, float]:
    """Return the class of each label, by the names of the classes in a model's config.

    A config without such names (LABEL_0, ...) is assumed to have the order of `Task.classes`.
    """
    known = {str(name).lower(): float(number) for name, number in (getattr(config, "label2id", None) or {}).items()}
    if all(word in known for word in task.classes):
        return {word: known[word] for word in task.classes}
    return {word: float(number) for number, word in enumerate(task.classes)}


def task_of(name: str, config: Any, tasks: Sequence[Task]) -> Task:
    """Return the task that a classifier is for, by `finetuning_task` in its config, its name or its classes.

    name: that of the model or its folder, which may end with the task: bert-base-uncased-SST-2.
    """
    told = str(getattr(config, "finetuning_task", None) or "")
    for word in (told, name):
        plain = _plain(word)
        found = [task for task in tasks if plain.endswith(_plain(task.name))]
        if found:
            return max(found, key=lambda task: len(task.name))
    size = config.num_labels
    fits = [task for task in tasks if (len(task.classes) or 1) == size]
    if len(fits) == 1:
        return fits[0]
    have = ", ".join(task.name for task in tasks) or "none"
    raise ValueError(
        f"model: {name} has {size} classes and does not say which task it is for (given: {have}); let its folder's "
        "name end with the task, such as bert-SST-2, or set finetuning_task in its config.json"
    )


def _plain(word: str) -> str:
    return "".join(letter for letter in word.lower() if letter.isalnum())
