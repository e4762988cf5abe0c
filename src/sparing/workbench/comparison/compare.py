"""The whole question: my model, my documents, my machine; which approximation, how wrong, how fast, is it safe?"""

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
from sparing.workbench.comparison.ladder import ladder
from sparing.workbench.comparison.sweep import Sweep
from sparing.workbench.comparison.verdict import Comparison, row_of, summary
from sparing.workbench.machine import machine
from sparing.workbench.metrics import metric_of, refuse_metric
from sparing.workbench.prepare import evaluating, prepare


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
    texts: documents; None: Python's help topics. length: tokens of a document at most; None: 512, or 1024 for a
        language model, or what the model has positions for. documents: how many to use, the first ones; None: 8.
    methods: specs; None: every training-free method that fits, with a few budgets, and the oracles.
    tolerance: of the change at the end of the model, for the verdict; the upper end of its 95 % interval must be below.
    metric: what the change is: "cosine", "neighbours" or, with labels, "accuracy" for an encoder; "perplexity" or
        "agreement" for a language model; "probability", "agreement", "accuracy", "f1", "matthews",
        "pearson" or "spearman" for a classifier. None: the first.
    rounds: of the timings. seeds: of methods that draw random numbers.
    batch_size: documents in a padded batch whose time is taken, too; None: 4, or 1 (no batch) for a language model.
    lengths: race the attention calls at growing lengths, for the crossover on this machine.
    head: a layer and a head to draw beside the most fragile ones.
    extend_positions: repeat learned positions where `length` is more than the model has (of a copy of the model).
    cache: a folder (or a `Store`) for what was measured, so that a stopped run resumes; None keeps nothing.
    jobs, backend: of joblib, for the errors: None is one process for each core. Each works with one thread, so that the
        numbers are the same whoever works. Times are taken afterwards, alone, with `threads` (None: as torch has it).

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
        raise ValueError("methods is empty; name at least one, such as 'multipole(keys=76)'")
    refuse_metric(chosen, given)
    if head is not None:
        _refuse_head(head, subject)
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
    table = tuple(
        row_of(spec, found[spec], times[spec], subject.kind, tolerance, chosen, given.labels, points.get(spec, ()))
        for spec in specs
    )
    return Comparison(
        subject.name, subject.kind, given.data, len(given.rows), given.tokens, given.longer, given.skipped,
        chosen.words, tolerance, seeds, here, together, sweep.padding, table,
        summary(table, len(given.rows), given.tokens, tolerance, chosen.words), drawn,
    )  # fmt: skip


def _refuse_head(head: tuple[int, int], subject: Subject) -> None:
    layers, heads = len(find(subject.model)), getattr(subject.model.config, "num_attention_heads", None)
    if not 0 <= head[0] < layers or head[1] < 0 or (heads is not None and head[1] >= heads):
        most = "" if heads is None else f" and heads 0 to {heads - 1}"
        raise ValueError(f"head={head[0]}.{head[1]}: the model has layers 0 to {layers - 1}{most}")
