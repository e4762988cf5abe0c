"""`sparing.compare`: measure methods in a model on documents, and judge which of them is safe and faster."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sparing.contract import method as _method
from sparing.documents import Documents
from sparing.models import Subject
from sparing.store import Store
from sparing.transformers.find import find
from sparing.workbench.comparison.generation import generations, refuse_contexts
from sparing.workbench.comparison.ladder import ladder
from sparing.workbench.comparison.sweep import Sweep
from sparing.workbench.comparison.verdict import Comparison, row_of, summary
from sparing.workbench.machine import machine
from sparing.workbench.metrics import metric_of, refuse_metric
from sparing.workbench.prepare import documents_of, evaluating, prepare


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
    metric: str | None = None,
    rounds: int = 5,
    batch_size: int | None = None,
    lengths: bool = True,
    contexts: Sequence[int] = (),
    head: tuple[int, int] | None = None,
    extend_positions: bool = False,
    cache: str | Path | Store | None = None,
    jobs: int | None = None,
    backend: str | None = None,
    threads: int | None = None,
    progress: Callable[[str, int, int], None] = lambda text, done, steps: None,
) -> Comparison:
    """Measure methods in all layers of a Hugging Face model, on texts, on this machine.

    model: a preset ("minilm", "smollm2"), a folder, a name on the hub, or a model object with its `tokenizer`.
    texts: documents; None: Python's help topics.
    length: cut documents to this many tokens; None: 512, or 1024 for a language model, or the model's positions.
    documents: number of documents to use, the first ones; None: 8.
    methods: specs; None: every training-free method that fits, with a few budgets, and the oracles.
    tolerance: largest change at the end of the model that is safe; the upper end of its 95 % interval must be below.
    metric: how the change is measured: "cosine", "neighbours" or, with labels, "accuracy" for an encoder; "perplexity"
        or "agreement" for a language model; "probability", "agreement", "accuracy", "f1", "matthews",
        "pearson" or "spearman" for a classifier. None: the first.
    rounds: number of timed rounds. seeds: number of random seeds for stochastic methods.
    batch_size: documents in a padded batch that is timed, too; None: 4, or 1 (no batch) for a language model.
    lengths: time attention calls at growing lengths, for the length from which a method is faster on this machine.
    contexts: numbers of tokens at which generation of a language model is measured, on `documents` passages (None: 1).
    head: a layer and a head to draw beside the most fragile ones.
    extend_positions: repeat learned positions of a copy of the model if it has fewer than `length`.
    cache: a folder (or a `Store`) that keeps each measurement, so that a stopped run resumes; None keeps nothing.
    jobs, backend: as in joblib, for the errors; None is one process per core. Each works with one thread, so that the
        numbers do not depend on them. Times are measured afterwards, alone, with `threads` (None: as torch has it).

    >>> found = sparing.compare("minilm", methods=["window(size=8)"], length=64, documents=3, jobs=1, lengths=False)
    >>> found.rows[0].verdict
    'not safe'
    """
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance={tolerance} must be above 0 and below 1: a share, such as 0.01")
    workers = jobs if jobs is not None else os.cpu_count() or 1
    positive = {"seeds": seeds, "rounds": rounds, "jobs": workers, "batch_size": batch_size, "threads": threads}
    for name, number in positive.items():
        if number is not None and number < 1:
            raise ValueError(f"{name}={number} must be at least 1")
    if isinstance(methods, str):
        raise ValueError(f"methods={methods[:40]!r} must be a list, not one string")
    given = prepare(
        model, texts, tokenizer=tokenizer, length=length, documents=8 if documents is None else documents,
        extend=extend_positions,
    )  # fmt: skip
    subject, causal = given.subject, given.subject.kind == "language model"
    chosen = metric_of(subject.kind, metric)
    asked = methods if methods is not None else ladder(given.tokens, causal=causal)
    specs = list(dict.fromkeys(str(_method(spec)) for spec in asked))
    if not specs:
        raise ValueError("methods is empty; name at least one, such as 'key_clusters(keys=76)'")
    refuse_metric(chosen, given)
    if head is not None:
        _refuse_head(head, subject)
    refuse_contexts(subject, contexts)
    together = min((1 if causal else 4) if batch_size is None else batch_size, len(given.rows))
    if subject.kind == "classifier" and subject.model.config.pad_token_id is None:
        together = 1  # it could not tell padding from text
    store, here = Store.of(cache), {**machine(), **({} if threads is None else {"threads": threads})}
    store.prepare()
    sweep = Sweep(given, specs, store, here, seeds=seeds, rounds=rounds, batch=together, progress=progress)
    with evaluating(subject.model):
        found = sweep.qualities(workers, backend)
        times = sweep.seconds()
        points = sweep.points() if lengths else {}
        drawn = sweep.maps(found, head)
        generated = generations(
            subject, documents_of(texts).texts if contexts else (), specs, store, here, contexts=contexts,
            count=documents or 1, seeds=seeds, progress=progress,
        )  # fmt: skip
    table = tuple(
        row_of(spec, found[spec], times[spec], subject.kind, tolerance, chosen, given.labels, points.get(spec, ()))
        for spec in specs
    )
    return Comparison(
        subject.name, subject.kind, given.data, len(given.rows), given.tokens, given.longer, given.skipped,
        chosen.words, tolerance, seeds, here, together, sweep.padding, table,
        summary(table, len(given.rows), given.tokens, tolerance, chosen.words), drawn, generated,
    )  # fmt: skip


def _refuse_head(head: tuple[int, int], subject: Subject) -> None:
    layers, heads = len(find(subject.model)), getattr(subject.model.config, "num_attention_heads", None)
    if not 0 <= head[0] < layers or head[1] < 0 or (heads is not None and head[1] >= heads):
        most = "" if heads is None else f" and heads 0 to {heads - 1}"
        raise ValueError(f"head={head[0]}.{head[1]}: the model has layers 0 to {layers - 1}{most}")
