"""What the studies of Monte-Carlo attention share: how its work is counted, and how a model is run with it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparing.documents import Documents
from sparing.methods.monte_carlo.method import MonteCarlo
from sparing.models import Subject, load
from sparing.sample_text import python_sentences
from sparing.transformers.find import find
from sparing.transformers.statistics import LayerStatistics
from sparing.transformers.watch import approximate_prompts
from sparing.workbench.metrics import End, scores
from sparing.workbench.outputs import Digest, digest, embedding, end_of
from sparing_lab.studies.study import Settings
from sparing_lab.tasks import glue

ALPHAS = (0.2, 0.4, 0.6, 1.0)  #: the values in the paper's tables
POINT = 0.01  #: one point, the paper's "1 % accuracy loss"
METHODS: dict[str, dict[str, Any]] = {
    "independent": {}, "shared": {"samples": "shared"}, "mean": {"estimator": "mean"}, "drop": {"estimator": "drop"},
}  #: by the names that the tables give them  # fmt: skip
SLOTS = 128  #: the paper pads all texts of GLUE to this many tokens
TOPICS = "help topics"  #: the task that needs no data; its score is agreement with the exact model's own ranking
TUNED = "tuned"  #: the family of the classifiers in the data folder
NO_LABELS = "needs labels: SST-2 (--data), with its classifier or its training set"
_TOGETHER = 8  # documents of equal length that run at once, and share their samples
_TRAIN = 1000  # sentences that a read-out is fitted on
_RIDGE = 1.0


@dataclass(frozen=True)
class ProjectionWork:
    """The work of value projections, summed over documents and layers. All ratios are savings against exact ones."""

    rate: float  #: r / d summed over valid tokens (means over heads): work in projected tokens
    tokens: float  #: valid tokens
    slots: float  #: tokens with padding
    pairs: float  #: valid pairs of a query and a key
    padded_pairs: float
    features: int  #: d, the width of a token

    @property
    def paper(self) -> float:
        """Return the paper's figure: the saving of the projection alone, with padding counted as saved work."""
        return self.slots / self.rate

    @property
    def padding(self) -> float:
        """Return the saving from leaving out the padding alone."""
        return self.slots / self.tokens

    @property
    def real(self) -> float:
        """Return the saving of the projection alone, on valid tokens."""
        return self.tokens / self.rate

    @property
    def weighed(self) -> float:
        """Return the saving of the projection and of A H, a multiply-add for each pair and column, on valid tokens."""
        return (self.tokens * self.features + self.pairs) / (self.rate * self.features + self.pairs)

    @property
    def paper_weighed(self) -> float:
        """Return `weighed` with padding: the paper's figure if A H were counted, too."""
        exact = self.slots * self.features + self.padded_pairs
        return exact / (self.rate * self.features + self.padded_pairs)

    @property
    def layer(self) -> float:
        """Return the saving of a whole encoder layer (12 matrices of d x d and A H) on valid tokens."""
        rest = 11 * self.tokens * self.features + 2 * self.pairs
        return (rest + self.tokens * self.features) / (rest + self.rate * self.features)

    def __add__(self, other: ProjectionWork) -> ProjectionWork:
        sums = {name: getattr(self, name) + getattr(other, name) for name in vars(self) if name != "features"}
        return replace(self, **sums)


def counted(
    total: LayerStatistics, lengths: Sequence[int], layers: int, features: int, slots: int | None
) -> ProjectionWork:
    """Return the work of documents of these lengths in all layers; total: that of `Handle.statistics()`.

    slots: length that each document would be padded to; None: no padding. Replacing tokens by their mean takes one more
    projection for each document and layer.
    """
    tally, method = total.tally, total.method
    extra = layers * len(lengths) if getattr(method, "estimator", "") == "mean" and tally.rate < tally.tokens else 0
    padded = [slots or length for length in lengths]
    return ProjectionWork(
        rate=tally.rate + extra, tokens=float(layers * sum(lengths)), slots=float(layers * sum(padded)),
        pairs=float(layers * sum(n * n for n in lengths)), padded_pairs=float(layers * sum(n * n for n in padded)),
        features=features,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Problem:
    """A model, the documents that it reads, and the labels that its answers are scored with."""

    subject: Subject
    sides: tuple[tuple[Sequence[Tensor], Sequence[Tensor] | None], ...]  #: token ids and types; two sides to compare
    labels: Sequence[float] | None  #: None: compare with the ranking of the exact model
    names: tuple[str, ...]  #: names of the scores
    readout: Tensor | None = None  #: maps an embedding with a 1 appended to classes

    @functools.cached_property
    def exact(self) -> list[list[Digest]]:
        """Return the exact model's answers for each side."""
        return [self._digests(side, lambda length: None)[0] for side in self.sides]

    def run(
        self, method: MonteCarlo | None, *, padded: bool, seed: int, half: bool = False
    ) -> tuple[dict[str, float], ProjectionWork | None]:
        """Return scores and work with a method (None: the exact model); half: only in layers 0, 2, 4 and so on.

        padded: alpha is meant for inputs padded to 128 tokens, where N is 128; with N tokens alpha N / 128 gives the
        same sample counts.
        """
        if method is None:
            return self._scores(self.exact), None

        def chosen(length: int) -> MonteCarlo:
            return replace(method, alpha=method.alpha * length / SLOTS) if padded else method

        found, total = [], None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for side in self.sides:
                digests, work = self._digests(side, chosen, half=half)
                found.append(digests)
                total = work if total is None or work is None else total + work
        return self._scores(found), total

    def _scores(self, found: list[list[Digest]]) -> dict[str, float]:
        kind = "classifier" if self.readout is not None else self.subject.kind
        ends: list[End] = [
            end_of(kind, [self._read(one) for one in a], [self._read(one) for one in b])
            for a, b in zip(zip(*self.exact, strict=True), zip(*found, strict=True), strict=True)
        ]
        for number, end in enumerate(ends):
            if self.labels is not None:
                end["label"] = self.labels[number]
            elif "exact_score" in end:
                end["label"] = end["exact_score"]
        known = scores(kind, ends)
        if "cosine" in ends[0]:
            known["cosine"] = sum(end["cosine"] for end in ends) / len(ends)
        return {name: known[name] for name in self.names}

    def _read(self, one: Digest) -> Digest:
        if self.readout is None:
            return one
        return {"logits": (_unit([one]) @ self.readout)[0].tolist(), "apart": False}

    @torch.no_grad()
    def _digests(
        self,
        side: tuple[Sequence[Tensor], Sequence[Tensor] | None],
        chosen: Callable[[int], MonteCarlo | None],
        *,
        half: bool = False,
    ) -> tuple[list[Digest], ProjectionWork | None]:
        """Run documents of one length at a time, so that nothing is padded; return the answers and the work."""
        rows, types = side
        layers, features = shape_of(self.subject.model)
        places = range(0, layers, 2 if half else 1)
        found: dict[int, Digest] = {}
        total: ProjectionWork | None = None
        by_length: dict[int, list[int]] = {}
        for number, ids in enumerate(rows):
            by_length.setdefault(len(ids), []).append(number)
        for length, numbers in sorted(by_length.items()):
            method = chosen(length)
            what = dict.fromkeys(places, method) if method is not None else None
            with nullcontext() if what is None else approximate_prompts(self.subject.model, what, seed=None) as handle:
                for start in range(0, len(numbers), _TOGETHER):
                    some = numbers[start : start + _TOGETHER]
                    kinds = None if types is None else [types[number] for number in some]
                    output = self.subject.run_batch([rows[number] for number in some], kinds)
                    for item, number in enumerate(some):
                        found[number] = digest(self.subject, rows[number], output, item=item)
                if handle is not None:
                    work = counted(handle.statistics().total, [length] * len(numbers), len(places), features, SLOTS)
                    total = work if total is None else total + work
        return [found[number] for number in range(len(rows))], total


def shape_of(model: Any) -> tuple[int, int]:
    """Return the number of attention layers, and the width of the tokens that their values are projected from."""
    return len(find(model)), int(getattr(model.config, "hidden_size", 0) or model.config.dim)


def _unit(digests: Sequence[Digest]) -> Tensor:
    """Return the embeddings, each normalised to length 1 and with a 1 appended."""
    rows = torch.nn.functional.normalize(torch.stack([embedding(one) for one in digests]), dim=-1)
    return torch.nn.functional.pad(rows, (0, 1), value=1.0)


@functools.lru_cache(maxsize=2)
def model_of(name: str, rounding: str = "float32") -> Subject:
    """Return a model whose weights were rounded to a dtype and are stored in float32."""
    subject = load(name)
    if rounding == "float32":
        return subject
    model = copy.deepcopy(subject.model)
    for weight in model.parameters():
        weight.data = weight.data.to(getattr(torch, rounding)).to(weight.dtype)
    return Subject(f"{subject.name} in {rounding}", model, subject.tokenizer)


@functools.lru_cache(maxsize=16)
def documents_of(task: str, data: Path | None, most: int | None) -> Documents:
    """Return documents of a GLUE task, evenly spread over its file, or neighbouring sentences of the help topics."""
    if task == TOPICS:
        found = python_sentences()[: 2 * (most or SLOTS)]
        return Documents(TOPICS, tuple(found[0::2]), pairs=tuple(found[1::2]))
    whole = glue.read(glue.TASKS[task], data)
    if most is None or most >= len(whole):
        return whole
    numbers = [number * len(whole) // most for number in range(most)]
    labels, pairs = (
        None if part is None else tuple(part[number] for number in numbers) for part in (whole.labels, whole.pairs)
    )
    return replace(whole, texts=tuple(whole.texts[number] for number in numbers), labels=labels, pairs=pairs)


@functools.lru_cache(maxsize=2)
def problem(
    name: str, task: str, data: Path | None, most: int | None, *, apart: bool = False, rounding: str = "float32"
) -> Problem:
    """Return a classifier on its task, or an encoder on what it can do without being fine-tuned.

    apart: an encoder compares the two texts of each document by the cosine of their embeddings. For SST-2 a
    least-squares read-out of its embedding, fitted on the training set, gives the class. Other tasks have no
    score but the cosine with the exact model's embedding.
    """
    subject, given = model_of(name, rounding), documents_of(task, data, most)
    known = glue.TASKS.get(task)
    sides, names = _sides(subject, given, apart=apart), known.metrics if known else ("spearman",)
    if subject.kind == "classifier":
        assert known is not None
        assert given.labels is not None
        classes = glue.classes_of(known, subject.model.config)
        labels = [classes[label] if known.classes else float(label) for label in given.labels]
        return Problem(subject, sides, labels, names)
    if apart:
        labels = [float(label) for label in given.labels or ()]
        return Problem(subject, sides, labels or None, (*names, "cosine"))
    if given.labels is None or not reads_out(task, data):
        return Problem(subject, sides, None, ("cosine",))
    assert known is not None
    assert data is not None
    labels = [float(known.classes.index(label)) for label in given.labels]
    return Problem(subject, sides, labels, names, _fitted(name, task, data))


def reads_out(task: str, data: Path | None) -> bool:
    """Return whether classes can be read out of an encoder: only for SST-2, if its training set is there.

    It is the one task that asks what a single sentence means; whether a sentence is grammatical (CoLA) does not show
    in an embedding.
    """
    return task == "SST-2" and data is not None and glue.TASKS[task].path(data, "train").is_file()


def _sides(
    subject: Subject, given: Documents, *, apart: bool
) -> tuple[tuple[Sequence[Tensor], Sequence[Tensor] | None], ...]:
    if given.pairs is None:
        return ((subject.encode(given.texts, SLOTS)[0], None),)
    if not apart:
        return (subject.encode_pairs(given.texts, given.pairs, SLOTS)[:2],)
    return tuple((subject.encode(texts, SLOTS)[0], None) for texts in (given.texts, given.pairs))


def train_of(task: str, data: Path) -> Documents:
    """Return the documents that a read-out is fitted on."""
    return glue.read(glue.TASKS[task], data, "train", most=_TRAIN)


def classifier_of(task: glue.Task, data: Path) -> str | None:
    """Return the folder DATA/classifiers/TASK, with a classifier that was tuned on the task; None if there is none."""
    folder = data / "classifiers" / (task.folder or task.name)
    if not (folder / "config.json").is_file():
        return None
    subject, classes = model_of(str(folder)), len(task.classes) or 1
    if subject.kind != "classifier" or subject.model.config.num_labels != classes:
        raise ValueError(
            f"data: {folder} must hold a model of {task.name}, with {classes} outputs: the folder model/ that "
            f"`sparing train glue --part {task.name}` writes"
        )
    return str(folder)


def cell_of(
    settings: Settings, family: str, model: str, task: str, *, most: int | None, apart: bool = False,
    tuned: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Return the cell of a model on a task.

    most: documents at small scale, None for all. tuned: the model is a classifier.
    """
    data = documents_of(task, settings.data, most if settings.small else None)
    found: dict[str, Any] = {"family": family, "model": model, "task": task, "apart": apart}
    found |= {"documents": len(data), "data": data.fingerprint}
    if settings.model is not None or (tuned and settings.small):
        found["weights"] = model_of(model).fingerprint
    if settings.data is not None and not tuned and not apart and reads_out(task, settings.data):
        found["train"] = train_of(task, settings.data).fingerprint
    return found


def own_task(name: str, given: Sequence[glue.Task]) -> str:
    """Return the task that a user's classifier was made for; given: the tasks with data."""
    subject = model_of(name)
    return glue.task_of(subject.name, subject.model.config, given or list(glue.TASKS.values())).name


@functools.lru_cache(maxsize=4)
def _fitted(name: str, task: str, data: Path) -> Tensor:
    """Return a read-out, fitted by ridge regression on one-hot labels to embeddings of the exact model."""
    subject, train = model_of(name), train_of(task, data)
    assert train.labels is not None
    seen = Problem(subject, _sides(subject, train, apart=False), None, ())
    rows = _unit(seen.exact[0])
    wanted = torch.tensor([[float(label == one) for one in glue.TASKS[task].classes] for label in train.labels])
    wanted = wanted.double()
    return torch.linalg.solve(rows.mT @ rows + _RIDGE * torch.eye(rows.shape[1]).double(), rows.mT @ wanted)
