"""`sparing.compare`: measure methods in a model on documents, and judge which of them is safe and faster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparing.contract import Method
from sparing.contract import method as _method
from sparing.documents import Documents
from sparing.models import Subject
from sparing.progress import Progress, is_silent, reporting
from sparing.store import Store
from sparing.transformers.find import find
from sparing.transformers.recipe import WHEN
from sparing.workbench.comparison.facts import FactCount, FactRuns, contexts_of
from sparing.workbench.comparison.generation import (
    CONTEXTS,
    FACTS,
    MODES,
    PASSAGES,
    Generations,
    contexts_for,
    continuing,
)
from sparing.workbench.comparison.generation_row import GenerationRow, generation_summary
from sparing.workbench.comparison.judgement import FASTER, KEPT, SLOWER, UNKNOWN, UNSAFE, UNTIMED
from sparing.workbench.comparison.ladder import generation_ladder, ladder
from sparing.workbench.comparison.maps import HeadMap
from sparing.workbench.comparison.rows import row_of, with_facts
from sparing.workbench.comparison.summary import padding_sentence, summary
from sparing.workbench.comparison.sweep import Sweep
from sparing.workbench.comparison.verdict import Comparison, Row
from sparing.workbench.machine import machine
from sparing.workbench.metrics import metric_of, refuse_metric
from sparing.workbench.prepare import documents_of, evaluating, prepare


def compare(
    model: Any,
    texts: Documents | Sequence[str] | None = None,
    *,
    tokenizer: Any = None,
    methods: Sequence[str | Method] | None = None,
    length: int | None = None,
    documents: int | None = None,
    seeds: int = 2,
    tolerance: float | None = None,
    metric: str | None = None,
    rounds: int = 5,
    batch_size: int | None = None,
    lengths: bool = True,
    when: Sequence[str] | None = None,
    contexts: Sequence[int] | None = None,
    facts: int | None = None,
    dtype: str = "auto",
    head: tuple[int, int] | None = None,
    extend_positions: bool = False,
    cache: str | Path | Store | None = None,
    jobs: int | None = None,
    backend: str | None = None,
    threads: int | None = None,
    progress: Progress | bool = True,
) -> Comparison:
    """Measure methods in all layers of a Hugging Face model, on texts, on this machine.

    model: a preset ("minilm", "smollm2"), a folder, a name on the hub, or a model object with its `tokenizer`.
    texts: documents; None: Python's help topics.
    length: cut documents to this many tokens; None: 512, or 1024 for a language model, or the model's positions.
    documents: number of documents to use, the first ones; None: 8, and 3 passages for generation.
    methods: specs or methods; None: every training-free method that fits, with a few budgets, and the oracles.
    tolerance: largest change at the end of the model that is safe; the upper end of its 95 % interval must be below.
        None: 0.01, or 0.1 for the metric "needle".
    metric: how the change is measured: "cosine", "neighbours" or, with labels, "accuracy" for an encoder; "perplexity",
        "agreement" or "needle" for a language model; "probability", "agreement", "accuracy", "f1", "matthews",
        "pearson" or "spearman" for a classifier. None: the first. For a language model that is safe only if it also
        keeps 90 % of the facts of its context that exact attention finds ("needle"); a metric that is named decides
        alone.
    rounds: number of timed rounds. seeds: number of random seeds for stochastic methods.
    batch_size: documents in a padded batch that is timed, too; None: 4, or 1 (no batch) for a language model.
    lengths: time attention calls at growing lengths, for the length from which a method is faster on this machine.
    when: what a language model approximates: "prefill" (prompts; a row per method, as for an encoder), "decode" (tokens
        that continue a prompt) or "always" (both; at `contexts`, as "decode"). None: "prefill" and "decode".
    contexts: numbers of tokens after which generation is measured, on `documents` passages (None: 3). None: 2000 and
        8000, if the model has as many positions and the documents are as long; () none.
    facts: contexts with facts that are made for each length; None: 20.
    dtype: of the model: "auto" (that of its checkpoint), "float32", "bfloat16" or "float16".
    head: a layer and a head to draw beside the most fragile ones.
    extend_positions: repeat learned positions of a copy of the model if it has fewer than `length`.
    cache: a folder (or a `Store`) that keeps each measurement, so that a stopped run resumes; None keeps nothing.
    jobs, backend: as in joblib, for the errors; None is one process per core. Each works with one thread, so that the
        numbers do not depend on them. Times are measured afterwards, alone, with `threads` (None: as torch has it).
    progress: True: a line on standard error with the time left; log lines, at most one in ten seconds, where that is no
        terminal. False: nothing. A function takes what was done, the steps that are done, and all steps.

    >>> found = sparing.compare("minilm", methods=["window(size=8)"], length=64, documents=3, jobs=1, lengths=False)
    >>> found.rows[0].verdict
    'not safe'
    """
    if tolerance is None:
        tolerance = 1 - KEPT if metric == "needle" else 0.01
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance={tolerance} must be above 0 and below 1: a share, such as 0.01")
    workers = jobs if jobs is not None else os.cpu_count() or 1
    cases = FACTS if facts is None else facts
    positive = {
        "seeds": seeds, "rounds": rounds, "jobs": workers, "batch_size": batch_size, "threads": threads, "facts": cases,
    }  # fmt: skip
    for name, number in positive.items():
        if number is not None and number < 1:
            raise ValueError(f"{name}={number} must be at least 1")
    if isinstance(methods, str):
        raise ValueError(f"methods={methods[:40]!r} must be a list, not one string")
    given = prepare(
        model, texts, tokenizer=tokenizer, length=length, documents=8 if documents is None else documents,
        extend=extend_positions, dtype=dtype, quiet=is_silent(progress),
    )  # fmt: skip
    subject, causal = given.subject, given.subject.kind == "language model"
    modes = _modes(subject, when)
    chosen = metric_of(subject.kind, metric)
    asked = methods if methods is not None else ladder(given.tokens, causal=causal)
    specs = list(dict.fromkeys(str(_method(spec)) for spec in asked))
    if not specs:
        raise ValueError("methods is empty; name at least one, such as 'key_clusters(keys=76)'")
    refuse_metric(chosen, given)
    if head is not None:
        _refuse_head(head, subject)
    all_texts = documents_of(texts).texts
    generating = [mode for mode in modes if mode in MODES]
    lengths_of = contexts_for(subject, all_texts, contexts) if generating or contexts else []
    if causal and contexts and not generating:
        raise ValueError(f"contexts={contexts[0]} is for generation: name decode or always in when, or leave it out")
    if facts is not None and not causal:
        raise ValueError(f"facts: only language models find them, and {subject.name} is not one ({subject.kind})")
    named: Sequence[str] = generation_ladder(max(lengths_of, default=0)) if methods is None else continuing(specs)
    if "prefill" not in modes:
        _refuse_nothing(subject, specs, named, lengths_of, contexts)
    together = min((1 if causal else 4) if batch_size is None else batch_size, len(given.rows))
    if subject.kind == "classifier" and subject.model.config.pad_token_id is None:
        together = 1  # it could not tell padding from text
    store, here = Store.of(cache), {**machine(), **({} if threads is None else {"threads": threads})}
    store.prepare()
    table: tuple[Row, ...] = ()
    drawn: tuple[HeadMap, ...] = ()
    generated: tuple[GenerationRow, ...] = ()
    padding, unpadded, words = 0.0, None, []
    with reporting(progress) as tell, evaluating(subject.model):
        if lengths_of and generating and named:
            generated = Generations(
                subject, store, here, when=generating, metric=metric, tolerance=tolerance, seeds=seeds,
                progress=tell,
            ).rows(all_texts, named, lengths_of, documents or PASSAGES, cases)  # fmt: skip
            words.append(generation_summary(generated))
        if "prefill" in modes:
            sweep = Sweep(
                given, specs, store, here, seeds=seeds, rounds=rounds, batch=together, lengths=lengths, progress=tell
            )
            found = sweep.qualities(workers, backend)
            times = sweep.seconds()
            points = sweep.points() if lengths else {}
            drawn = sweep.maps(found, head)
            padding, unpadded = sweep.padding, sweep.padding_seconds()
            table = tuple(
                row_of(
                    spec, found[spec], times[spec], subject.kind, tolerance, chosen, given.labels, points.get(spec, ())
                )
                for spec in specs
            )
            if causal and metric in (None, "needle"):
                share = tolerance if metric == "needle" else None
                table = _with_facts(table, subject, store, here, given.tokens, cases, share, tell)
            words.append(summary(table, len(given.rows), given.tokens, tolerance, chosen.words))
            words.append(padding_sentence(unpadded, together, padding))
    return Comparison(
        subject.name, subject.kind, given.data, len(given.rows), given.tokens, given.longer, given.skipped,
        chosen.words, tolerance, seeds, here, together, padding, table, " ".join(filter(None, words)), drawn, generated,
        subject.dtype, causal and metric is None, given.notes if table else (), unpadded,
    )  # fmt: skip


def _modes(subject: Subject, when: Sequence[str] | None) -> list[str]:
    """Return what is approximated: "prefill", "decode", "always", as far as the model has it."""
    if isinstance(when, str):
        raise ValueError(f"when={when!r} must be a list, not one string")
    if subject.kind != "language model":
        if when is not None:
            raise ValueError(f"when: only language models generate, and {subject.name} is not one ({subject.kind})")
        return ["prefill"]
    modes = list(dict.fromkeys(("prefill", "decode") if when is None else when))
    if not modes:
        raise ValueError("when is empty; name at least one of prefill, decode, always")
    for mode in modes:
        if mode not in WHEN:
            raise ValueError(f"when={mode!r} is not one of prefill, decode, always")
    return modes


def _refuse_nothing(
    subject: Subject, specs: Sequence[str], named: Sequence[str], lengths: Sequence[int], asked: Sequence[int] | None
) -> None:
    """Raise where only generation is asked for, and no method or no context is left to measure."""
    if not named:
        raise ValueError(
            f"methods: {', '.join(specs)} cannot be measured in generation, which leaves out oracles and exact "
            "attention; name others, such as 'multipole', or add prefill to when"
        )
    if not lengths and asked is not None:
        raise ValueError("contexts is empty; pass --contexts N, or add prefill to when")
    if not lengths:
        most = "" if subject.positions is None else f" ({subject.positions} positions)"
        raise ValueError(
            f"no context of {', '.join(map(str, CONTEXTS))} fits {subject.name}{most} and the documents; pass "
            "--contexts N"
        )


def _with_facts(
    table: Sequence[Row], subject: Subject, store: Store, here: dict[str, Any], length: int, count: int,
    tolerance: float | None, tell: Progress,
) -> tuple[Row, ...]:  # fmt: skip
    """Return the rows with the facts that prompts keep, for methods whose verdict needs them.

    tolerance: of the facts lost, if they alone decide.
    """
    contexts = contexts_of(subject, length, count)
    if tolerance is not None and not contexts:
        raise ValueError(f"metric='needle': no task fits into {length} tokens; use longer documents, or metric=None")
    able = (FASTER, SLOWER, UNTIMED) if tolerance is None else (FASTER, SLOWER, UNTIMED, UNKNOWN, UNSAFE)
    asked = [
        row.method for row in table
        if row.verdict in able and (tolerance is not None or _method(row.method).name != "exact")
    ]  # fmt: skip
    steps = iter(range(1, len(contexts) * len(asked) + 1))
    runs = FactRuns(subject, store, here, lambda text: tell(text, next(steps), len(contexts) * len(asked)))
    found = runs.count(contexts, [(spec, "prefill") for spec in asked]) if contexts else {}
    kept = {spec: each if isinstance(each := found.get((spec, "prefill")), FactCount) else None for spec in asked}
    return tuple(with_facts(row, kept[row.method], tolerance) if row.method in kept else row for row in table)


def _refuse_head(head: tuple[int, int], subject: Subject) -> None:
    layers, heads = len(find(subject.model)), getattr(subject.model.config, "num_attention_heads", None)
    if not 0 <= head[0] < layers or head[1] < 0 or (heads is not None and head[1] >= heads):
        most = "" if heads is None else f" and heads 0 to {heads - 1}"
        raise ValueError(f"head={head[0]}.{head[1]}: the model has layers 0 to {layers - 1}{most}")
