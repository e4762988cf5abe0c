"""Documents through the model under one recipe after the other; no run is done twice, and each is kept."""

from __future__ import annotations

import functools
import json
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparing.contract import Unsupported
from sparing.contract import method as _method
from sparing.models import Subject
from sparing.store import Cell, Store
from sparing.transformers.handle import approximate
from sparing.transformers.recipe import Recipe
from sparing.workbench.cells import is_refusal, measured
from sparing.workbench.metrics import Metric
from sparing.workbench.outputs import END_OF, Digest, check_digest, digest
from sparing.workbench.prepare import Prepared, Source, fetched, fingerprint
from sparing.workbench.timing import threads

Where = Source | Path  #: a model for other processes: its name, itself, or a file of it


class Runs:
    """What recipes change at the end of a model, document by document."""

    def __init__(
        self,
        given: Prepared,
        metric: Metric,
        store: Store,
        where: Where,
        jobs: int,
        blank: Recipe,
        *,
        of: Mapping[str, Any],
        tell: Callable[[], None],
    ) -> None:
        self.given, self.metric, self.store, self.where, self.jobs = given, metric, store, where, jobs
        self.blank, self.of, self.tell = blank, dict(of), tell
        self.rows = {fingerprint([ids]): ids for ids in given.rows}
        self.known: dict[str, Any] = {}

    def changes(self, asked: Sequence[Mapping[str, str]], documents: Sequence[str]) -> list[list[float]]:
        """For each of these layers, the change of each document, by its key in `rows`; NaN where they cannot run."""
        cells = [self._cell(layers, key) for layers in ({}, *asked) for key in documents]
        self._run(cells)
        exact, *found = (
            [self.known[_key(cell)] for cell in cells[start : start + len(documents)]]
            for start in range(0, len(cells), len(documents))
        )
        return [[self._change(a, b) for a, b in zip(exact, each, strict=True)] for each in found]

    def _change(self, exact: Digest, found: Digest) -> float:
        if "refused" in found:
            return float("nan")
        assert self.metric.each is not None
        return abs(self.metric.each(END_OF[self.given.subject.kind](exact, found)))

    def _run(self, cells: Sequence[Cell]) -> None:
        missing = {_key(cell): cell for cell in cells if _key(cell) not in self.known}
        work = functools.partial(_output, self.where, self.rows, self.blank)
        found = measured(
            list(missing.values()), work, self.store, check=self._check, jobs=self.jobs,
            done=lambda cell, again: self.tell(),
        )  # fmt: skip
        self.known.update(zip(missing, found, strict=True))

    def _check(self, cell: Cell, result: Any) -> None:
        if not is_refusal(result):
            check_digest(self.given.subject.kind, result)

    def _cell(self, layers: Mapping[str, str], document: str) -> Cell:
        draws = any(_method(spec).supports.stochastic for spec in layers.values())
        seed = self.blank.seed if draws else 0
        return {"what": "output", **self.of, "document": document, "layers": dict(layers), "seed": seed}


def _key(cell: Cell) -> str:
    return json.dumps(cell, sort_keys=True)


@torch.no_grad()
def _output(where: Where, rows: Mapping[str, Tensor], blank: Recipe, cell: Cell) -> Digest:
    subject = _unpacked(where) if isinstance(where, Path) else fetched(where)
    ids = rows[cell["document"]]
    with threads(1):
        try:
            with running(subject.model, replace(blank, layers=cell["layers"])):
                return digest(subject, ids, subject.run(ids))
        except Unsupported as error:
            return {"refused": str(error)}


@contextmanager
def running(model: nn.Module, recipe: Recipe) -> Iterator[None]:
    """The model with a recipe, and without the warning that a method wants training: it is measured, not trusted."""
    if not recipe.layers:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*needs further training")
        handle = approximate(model, recipe)
    with handle:
        yield


@contextmanager
def packed(given: Prepared, jobs: int) -> Iterator[Where]:
    """How processes get at the model: by its name, or from a file, which each reads once and not for each document."""
    if jobs == 1:
        yield given.subject
    elif not isinstance(given.source, Subject):
        yield given.source
    else:
        with tempfile.TemporaryDirectory(prefix="sparing-") as folder:
            path = Path(folder) / "model"
            path.write_bytes(_cloudpickle().dumps(given.subject))
            yield path


def _cloudpickle() -> Any:
    """What joblib sends objects with, also classes of a notebook; old versions bring their own."""
    try:
        return import_module("cloudpickle")
    except ModuleNotFoundError:
        return import_module("joblib.externals.cloudpickle")


@functools.lru_cache(maxsize=1)
def _unpacked(path: Path) -> Subject:
    found: Subject = pickle.loads(path.read_bytes())
    return found
