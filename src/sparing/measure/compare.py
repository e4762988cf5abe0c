"""The whole question: my model, my documents, my machine; which approximation, how wrong, how fast, is it safe?"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparing.measure.cells import Cell, Store, measured
from sparing.measure.ladder import ladder
from sparing.measure.machine import machine
from sparing.measure.quality import quality
from sparing.measure.seconds import seconds
from sparing.measure.verdict import METRICS, Comparison, row_of, summary
from sparing.method import Unsupported
from sparing.method import method as _method
from sparing.tasks.documents import Documents, default
from sparing.tasks.subject import Subject, load
from sparing.transformers.watch import is_approximated

#: Oracles take long, and are yardsticks: the first documents do.
ORACLE_DOCUMENTS = 2


def compare(
    model: Any,
    texts: Documents | Sequence[str] | None = None,
    *,
    tokenizer: Any = None,
    methods: Sequence[str] | None = None,
    length: int | None = None,
    documents: int | None = None,
    seeds: int = 2,
    tolerance: float = 0.01,
    rounds: int = 5,
    cache: str | Path | None = None,
    jobs: int | None = None,
    backend: str | None = None,
    threads: int | None = None,
    progress: Callable[[str, int, int], None] = lambda text, done, steps: None,
) -> Comparison:
    """Measure methods in all layers of a Hugging Face model, on texts, on this machine.

    model: a preset ("minilm", "smollm2"), a folder, a name on the hub, or a model object with its `tokenizer`.
    texts: documents; None: Python's help topics. length: tokens of a document at most; None: 512, or 1024 for a
        language model, or what the model has positions for. documents: how many to use, the first ones; None: 8.
    methods: specs; None: every training-free method that fits, with a few budgets, and the oracles.
    tolerance: of the change at the end of the model, for the verdict; the upper end of its 95 % interval must be below.
    rounds: of the timings. seeds: of methods that draw random numbers.
    cache: a folder for what was measured, so that a run that was stopped goes on; None keeps nothing.
    jobs, backend: of joblib, for the errors: None is one process for each core. Each works with one thread, so that the
        numbers are the same whoever works. Times are taken afterwards, alone, with `threads` (None: as torch has it).

    >>> found = sparing.compare("minilm", methods=["window(size=8)"], length=64, documents=3, rounds=1, jobs=1)
    >>> found.rows[0].verdict
    'not safe'
    """
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance={tolerance} must be above 0 and below 1: a share, such as 0.01")
    workers = jobs if jobs is not None else os.cpu_count() or 1
    for name, number in (("seeds", seeds), ("rounds", rounds), ("jobs", workers)):
        if number < 1:
            raise ValueError(f"{name}={number} must be at least 1")
    for name, wrong in (("texts", texts), ("methods", methods)):
        if isinstance(wrong, str):
            raise ValueError(f"{name}={wrong[:40]!r} must be a list, not one string")
    if threads is not None and threads < 1:
        raise ValueError(f"threads={threads} must be at least 1")
    subject = _subject(model, tokenizer)
    if is_approximated(subject.model):
        raise ValueError("model: it is approximated already, and would be compared with itself; restore it first")
    given = default() if texts is None else texts if isinstance(texts, Documents) else Documents("texts", tuple(texts))
    rows, longer, short = _rows(subject, given, length, documents)
    longest = max(len(ids) for ids in rows)
    causal = subject.kind == "language model"
    asked = methods if methods is not None else ladder(longest, causal=causal)
    specs = list(dict.fromkeys(str(_method(spec)) for spec in asked))
    if not specs:
        raise ValueError("methods is empty; name at least one, such as 'multipole(keys=76)'")
    store, here = Store(cache), {**machine(), **({} if threads is None else {"threads": threads})}
    store.prepare()
    of = {
        "model": subject.fingerprint, "tokens": _fingerprint(rows), "versions": [here["torch"], here["sparing"]],
    }  # fmt: skip
    cells: list[Cell] = [
        {
            "what": "quality",
            **of,
            "method": spec,
            "seed": seed,
            "documents": min(len(rows), ORACLE_DOCUMENTS) if _method(spec).oracle else len(rows),
        }
        for spec in specs
        for seed in range(seeds if _method(spec).supports.stochastic else 1)
    ]
    timed: list[Cell] = [
        {"what": "seconds", **of, "method": spec, "rounds": rounds, "machine": here, "threads": threads}
        for spec in specs
    ]
    steps, finished = len(cells) + len(timed), 0

    def tell(cell: Cell, again: bool) -> None:
        nonlocal finished
        finished += 1
        progress(f"{cell['method']}: {cell['what']}", finished, steps)

    # Other processes load a model by its name, where it has one.
    elsewhere = isinstance(model, str) and (workers > 1 or backend is not None)
    source = (str(model), subject.fingerprint) if elsewhere else subject
    typical = sorted(rows, key=len)[len(rows) // 2]
    with _evaluating(subject.model):
        found = measured(
            cells, functools.partial(_quality, source, rows), store, jobs=workers, backend=backend, done=tell
        )
        times = measured(timed, functools.partial(_seconds, subject, typical, threads), store, done=tell)
    by_spec: dict[str, list[Any]] = {spec: [] for spec in specs}
    for cell, part in zip(cells, found, strict=True):
        by_spec[cell["method"]].append(part)
    table = tuple(
        row_of(spec, by_spec[spec], time, subject.kind, tolerance) for spec, time in zip(specs, times, strict=True)
    )
    metric = METRICS[subject.kind]
    return Comparison(
        subject.name, subject.kind, given.name, len(rows), longest, longer, short + given.empty, metric, tolerance,
        seeds, here, table,
        summary(table, len(rows), longest, tolerance, metric),
    )  # fmt: skip


def _subject(model: Any, tokenizer: Any) -> Subject:
    if isinstance(model, Subject):
        return model
    if isinstance(model, str | Path):
        return load(str(model))
    if tokenizer is None:
        raise ValueError(f"tokenizer: {type(model).__name__} came without one; pass tokenizer=")
    found = Subject(type(model).__name__, model, tokenizer)
    # A head that is neither a language model's nor a classifier's: the encoder below it is measured.
    return found if found.kind != "encoder" else Subject(found.name, model.base_model, tokenizer)


@functools.lru_cache(maxsize=1)
def _loaded(name: str, fingerprint: str) -> Subject:
    """For a process that may be used again after the files have changed."""
    found = load(name)
    if found.fingerprint != fingerprint:
        raise ValueError(f"model: {name} has changed while it was measured")
    return found


def _rows(
    subject: Subject, given: Documents, length: int | None, documents: int | None
) -> tuple[list[Tensor], int, int]:
    wanted = 1024 if subject.kind == "language model" else 512
    limit = subject.positions
    if length is not None and length < 2:
        raise ValueError(f"length={length} must be at least 2")
    if length is not None and limit is not None and length > limit:
        raise ValueError(
            f"length={length} is more than the {limit} positions of the model; see sparing.extend_positions"
        )
    if documents is not None and documents < 1:
        raise ValueError(f"documents={documents} must be at least 1")
    rows, longer = subject.encode(given.texts[: documents or 8], length or min(wanted, limit or wanted))
    usable = [ids for ids in rows if len(ids) > 1]
    if not usable:
        raise ValueError("texts: none has two tokens")
    return usable, longer, len(rows) - len(usable)


def _fingerprint(rows: Sequence[Tensor]) -> str:
    return hashlib.sha256(json.dumps([ids.tolist() for ids in rows]).encode()).hexdigest()[:16]


def _quality(source: tuple[str, str] | Subject, rows: Sequence[Tensor], cell: Cell) -> Any:
    subject = source if isinstance(source, Subject) else _loaded(*source)
    with _threads(1):
        try:
            return asdict(quality(subject, rows[: cell["documents"]], cell["method"], seed=cell["seed"]))
        except Unsupported as error:
            return {"refused": str(error)}


def _seconds(subject: Subject, ids: Tensor, threads: int | None, cell: Cell) -> Any:
    with _threads(threads or torch.get_num_threads()):
        try:
            return asdict(seconds(subject, ids, cell["method"], rounds=cell["rounds"]))
        except Unsupported as error:
            return {"refused": str(error)}


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
