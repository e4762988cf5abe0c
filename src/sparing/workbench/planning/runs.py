"""Run documents through the model under one recipe after the other; each run is kept, and none is done twice."""

from __future__ import annotations

import functools
import json
import pickle
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
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
from sparing.store import Cell
from sparing.transformers.handle import approximate
from sparing.transformers.recipe import Recipe
from sparing.workbench.cells import is_refusal, measured
from sparing.workbench.metrics import Metric
from sparing.workbench.outputs import END_OF, Digest, check_digest, digest
from sparing.workbench.planning.context import PlanContext
from sparing.workbench.prepare import ModelSource, Prepared, fetched, fingerprint
from sparing.workbench.timing import threads

Where = ModelSource | Path  #: a model for other processes: its name, itself, or a file of it


class RecipeRuns:
    """Measure how recipes change the output of a model, document by document."""

    def __init__(self, context: PlanContext, metric: Metric, where: Where, jobs: int) -> None:
        self.context, self.metric, self.where, self.jobs = context, metric, where, jobs
        self.kind = context.given.subject.kind
        self.rows = {fingerprint([ids]): ids for ids in context.given.rows}
        self.known: dict[str, Any] = {}

    def changes(self, asked: Sequence[Mapping[str, str]], documents: Sequence[str]) -> list[list[float]]:
        """Return the change of each document under each recipe; NaN where the recipe cannot run.

        asked: the layers of each recipe. documents: keys of `rows`.
        """
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
        return abs(self.metric.each(END_OF[self.kind](exact, found)))

    def _run(self, cells: Sequence[Cell]) -> None:
        missing = {_key(cell): cell for cell in cells if _key(cell) not in self.known}
        work = functools.partial(_output, self.where, self.rows, self.context.blank)
        found = measured(
            list(missing.values()), work, self.context.store, check=self._check, jobs=self.jobs,
            done=lambda cell, again: self.context.tell(),
        )  # fmt: skip
        self.known.update(zip(missing, found, strict=True))

    def _check(self, cell: Cell, result: Any) -> None:
        if not is_refusal(result):
            check_digest(self.kind, result)

    def _cell(self, layers: Mapping[str, str], document: str) -> Cell:
        draws = any(_method(spec).supports.stochastic for spec in layers.values())
        seed = self.context.blank.seed if draws else 0
        return {"what": "output", **self.context.of, "document": document, "layers": dict(layers), "seed": seed}


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
    """Run the model with a recipe, without the warning that a method needs further training: it is measured first."""
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
    """Yield how processes get the model: by its name, or from a file, which each of them reads once."""
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
    """Return the module that joblib pickles with, which covers classes of a notebook; old versions bundle it."""
    try:
        return import_module("cloudpickle")
    except ModuleNotFoundError:
        return import_module("joblib.externals.cloudpickle")


@functools.lru_cache(maxsize=1)
def _unpacked(path: Path) -> Subject:
    found: Subject = pickle.loads(path.read_bytes())
    return found
