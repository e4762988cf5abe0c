"""The tasks of GLUE (Wang et al. 2018), from the files of its site: DIR/glue/TASK/dev.tsv or DIR/TASK/dev.tsv."""

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
    """What a task's file holds, and what its score is."""

    name: str
    text: str  #: the column of the text
    pair: str | None  #: that of a second one
    label: str
    metrics: tuple[str, ...]  #: names of `measure.metrics`, the first being the one that is quoted
    classes: tuple[str, ...] = ("0", "1")  #: the labels, in the order of their classes; none: the label is a score
    header: tuple[str, ...] | None = None  #: of a file that has none
    folder: str = ""  #: where it is not the name
    dev: str = "dev.tsv"

    def path(self, data: Path, split: str = "dev") -> Path:
        """Its file in a folder with datasets, whether it is there or not."""
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
    """The tasks whose development sets are in the folder."""
    return [task for task in TASKS.values() if task.path(data).is_file()]


def read(task: Task, data: Path | None, split: str = "dev", *, most: int | None = None) -> Documents:
    """The documents of a task, the first `most`; labels are words, or scores where a task has no classes."""
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
            raise ValueError(f"data: {path}, line {number}: {task.label!r} is {label!r}, none of {known}")
        return label
    try:
        score = float(label)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise ValueError(f"data: {path}, line {number}: {task.label!r} is {label!r}, which is no number")
    return score


def classes_of(task: Task, config: Any) -> dict[str, float]:
    """The class of each label, by the names that a model's config gives its classes.

    A config that does not name them (LABEL_0, ...) is taken to have them in the order of `Task.classes`.
    """
    known = {str(name).lower(): float(number) for name, number in (getattr(config, "label2id", None) or {}).items()}
    if all(word in known for word in task.classes):
        return {word: known[word] for word in task.classes}
    return {word: float(number) for number, word in enumerate(task.classes)}


def task_of(name: str, config: Any, tasks: Sequence[Task]) -> Task:
    """Which of the tasks a classifier was made for: by its config's `finetuning_task`, by its name, or by its classes.

    name: of the model or its folder, which may end as textattack's do: bert-base-uncased-SST-2.
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
