"""The tasks of GLUE for fine-tuning a pretrained model, encoded by its own tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from sparing.models import PRESETS, first_line
from sparing.models.minilm import weights_folder
from sparing.sample_text import python_sentences
from sparing_lab.tasks import glue
from sparing_lab.tasks.hub import Hub
from sparing_lab.tasks.trainable import Example, Split, Task

USUAL = "minilm"  #: the default model
OWN = glue.Task("pairs", "one", "two", "label", ("accuracy",), ("apart", "next"))  #: the task without files


@dataclass(frozen=True)
class LabelledTexts:
    """Texts, the second texts of pairs if there are any, and labels."""

    texts: Sequence[str]
    pairs: Sequence[str] | None
    labels: Sequence[float]


def glue_task(*, length: int, seed: int, source: Path | Hub | None, part: str | None, pretrained: str | None) -> Task:
    """Return a task of GLUE by its name; without `source`, whether one sentence of Python's help follows another."""
    if length < 8:
        raise ValueError(f"max_length={length} is too short for sentences; take 8 or more")
    tokenizer = tokenizer_of(pretrained or USUAL)
    about, train, valid = _read(source, part, seed)
    if source is None:
        where = "sentences of Python help"
    else:
        where = f"{about.name} of {source if isinstance(source, Hub) else source.name}"
    return Task(
        "glue", where, "class" if about.classes else "score", len(tokenizer), length,
        _encoded(train, tokenizer, length), _encoded(valid, tokenizer, length), len(about.classes) or 1,
        padding=tokenizer.pad_token_id or 0, judged=about.metrics[0], part=about.name, labels=about.classes,
    )  # fmt: skip


@functools.lru_cache(maxsize=2)
def tokenizer_of(name: str) -> Any:
    """Load the tokenizer of a folder, a name on the hub or the default model."""
    from transformers import AutoTokenizer

    if name == USUAL:
        return AutoTokenizer.from_pretrained(weights_folder())
    if name in PRESETS:
        raise ValueError(f"pretrained={name!r} is not an encoder; pass {USUAL}, a folder or a name on the hub")
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # whatever is wrong with the files
        raise ValueError(f"pretrained={name!r} cannot be loaded: {first_line(error)}") from None


def _read(source: Path | Hub | None, part: str | None, seed: int) -> tuple[glue.Task, LabelledTexts, LabelledTexts]:
    if source is None:
        if part is not None:
            raise ValueError(f"part={part!r} needs files: pass a folder with glue/{part}/train.tsv as data")
        return OWN, *_own(seed)
    if part is None:
        names = ", ".join(task.name for task in glue.TASKS.values())
        raise ValueError(f"part is missing: pass a task of GLUE, one of {names}")
    found = {task.name.lower(): task for task in glue.TASKS.values()}.get(part.lower())
    if found is None:
        raise ValueError(f"part={part!r} is not a task of GLUE; there are {', '.join(glue.TASKS)}")
    if isinstance(source, Hub):
        return found, _of_hub(found, source, "train"), _of_hub(found, source, "dev")
    return found, _of_files(found, source, "train"), _of_files(found, source, "dev")


def _of_files(task: glue.Task, folder: Path, split: str) -> LabelledTexts:
    held = glue.read(task, folder, split)
    assert held.labels is not None
    classes = {word: float(number) for number, word in enumerate(task.classes)}
    labels = [classes[label] if task.classes else float(label) for label in held.labels]
    return LabelledTexts(held.texts, held.pairs, labels)


_FIRST = ("sentence", "sentence1", "question1", "premise", "question")
_SECOND = {"question": "sentence", "question1": "question2", "premise": "hypothesis", "sentence1": "sentence2"}


def _of_hub(task: glue.Task, source: Hub, split: str) -> LabelledTexts:
    """Read GLUE from the hub: a configuration for each task, labels that are numbers, -1 if missing."""
    part = {"mnli-mm": "mnli"}.get(task.name.lower(), task.name.lower().replace("-", ""))
    matched = "validation_mismatched" if task.name == "MNLI-mm" else "validation_matched"
    splits = ("train",) if split == "train" else ("validation", matched)
    first = ("question",) if task.name == "QNLI" else _FIRST  # QNLI's "sentence" is its second text
    second = () if task.pair is None else ([tuple(_SECOND.values())] if task.name != "QNLI" else [("sentence",)])
    rows = [row for row in Hub(source.name, part).rows(splits, [first, *second, ("label",)]) if row[-1] != -1]
    texts, *pairs, labels = zip(*rows, strict=True)
    return LabelledTexts(texts, pairs[0] if pairs else None, [float(label) for label in labels])


def _own(seed: int) -> tuple[LabelledTexts, LabelledTexts]:
    """Return each sentence with the next one (1) or a random one (0); the last sixth is held out."""
    sentences = list(dict.fromkeys(python_sentences()))
    random = Random(f"pairs {seed}")

    def rows(some: Sequence[str]) -> LabelledTexts:
        follows = [random.random() < 0.5 for _ in some[1:]]
        others = [after if yes else random.choice(some) for yes, after in zip(follows, some[1:], strict=True)]
        return LabelledTexts(some[:-1], others, [float(yes) for yes in follows])

    cut = len(sentences) * 5 // 6
    return rows(sentences[:cut]), rows(sentences[cut:])


def _encoded(rows: LabelledTexts, tokenizer: Any, length: int) -> Split:
    given = (list(rows.texts),) if rows.pairs is None else (list(rows.texts), list(rows.pairs))
    found = tokenizer(*given, truncation=True, max_length=length)
    tokens = [torch.tensor(ids) for ids in found["input_ids"]]
    kinds = found.get("token_type_ids")

    def example(number: int) -> Example:
        segments = None if kinds is None else torch.tensor(kinds[number])
        return Example(tokens[number], rows.labels[number], segments=segments)

    return Split(len(tokens), example, [len(row) for row in tokens])
