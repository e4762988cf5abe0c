"""Choose a recipe for a tolerance, and check it on held-out documents."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparing.contract import Method
from sparing.contract import method as _method
from sparing.documents import Documents
from sparing.models import Subject
from sparing.progress import Progress, is_silent, reporting
from sparing.store import Store
from sparing.transformers.recipe import WHEN
from sparing.workbench.comparison.generation import CONTEXTS, MODES, contexts_for
from sparing.workbench.comparison.ladder import generation_ladder, ladder
from sparing.workbench.machine import machine
from sparing.workbench.metrics import Metric, metrics_of
from sparing.workbench.planning import clock
from sparing.workbench.planning.context import PlanGoal
from sparing.workbench.planning.generating import FACT_CONFIDENCE, GENERATION_METRICS, GenerationPlanner
from sparing.workbench.planning.promise import Promise
from sparing.workbench.planning.result import Plan
from sparing.workbench.planning.steps import Planner
from sparing.workbench.prepare import Prepared, documents_of, evaluating, fingerprint, prepare, subject_of

#: The default number: 47 are held out, and one of these may be beyond the tolerance. Of 60, none of 40 could be.
DOCUMENTS = 70


def plan(
    model: Any,
    texts: Documents | Sequence[str] | None = None,
    *,
    tolerance: float | None = None,
    tokenizer: Any = None,
    metric: str | None = None,
    objective: str = "time",
    coverage: float = 0.9,
    confidence: float | None = None,
    methods: Sequence[str] | None = None,
    length: int | None = None,
    documents: int | None = None,
    extend_positions: bool = False,
    seed: int = 0,
    rounds: int | None = None,
    when: str | None = None,
    context: int | None = None,
    keep: bool = False,
    dtype: str = "auto",
    cache: str | Path | Store | None = None,
    jobs: int | None = None,
    progress: Progress | bool = True,
) -> Plan:
    """Choose what each attention layer runs, so that with this confidence a share `coverage` of documents like these
    changes by no more than the tolerance, and the model gains on this machine; or say why it should stay exact.

    tolerance, confidence: None: 0.01 and 0.95. The metric "needle" takes neither: its confidence is 0.975.
    model: a preset ("minilm", "smollm2"), a folder, a name on the hub, or a model object with its `tokenizer`.
    texts: documents; None: Python's help topics. documents: how many to draw from them; None: 70, or all there are.
    metric: "cosine" for an encoder, "perplexity" or "agreement" for a language model, "probability" or "agreement" for
        a classifier, which all tell the change of one document; None: the first. "needle" for generation: a share
        `coverage` of the facts of the context that exact attention finds is kept.
    when: "prefill" (None) plans prompts, layer by layer. "decode" and "always" plan the tokens that continue a prompt
        of `context` tokens (None: 2000), with one method for all layers; "needle" means "decode" unless this is given.
    objective: "time", or "memory" for the peak of a run.
    keep: return a recipe that keeps the promise though its gain is not shown, of methods whose calls are faster in
        most rounds at least; by default the model stays exact then.
    methods: specs; None: every training-free method that fits, with a few budgets.
    length, extend_positions, cache, jobs: as for `compare`; of these, generation takes `cache` only.
    seed: of the draw and split of documents, and of methods that draw random numbers; the recipe keeps it.
    rounds: of the timings of the model; None: 7. Generation takes none. progress: as for `compare`.

    >>> found = sparing.plan("minilm", tolerance=1e-6, methods=["window(size=8)"], length=16, rounds=1, jobs=1)
    >>> found.recipe.layers  # none is that close to exact attention
    {}
    """
    when = "decode" if when is None and metric == "needle" else when
    if when not in (None, *WHEN):
        raise ValueError(f"when={when!r} is not one of {', '.join(WHEN)}")
    if when in MODES:
        _refuse_unused(
            when, metric, length=length, extend_positions=extend_positions or None, rounds=rounds, jobs=jobs,
            tolerance=tolerance, confidence=confidence,
        )  # fmt: skip
    elif metric == "needle":
        raise ValueError("metric='needle' is for generation: pass when='decode' or 'always'")
    sure = FACT_CONFIDENCE if metric == "needle" else 0.95
    promise = Promise(0.01 if tolerance is None else tolerance, coverage, sure if confidence is None else confidence)
    rounds = 7 if rounds is None else rounds
    clock.check_objective(objective)
    workers = jobs if jobs is not None else os.cpu_count() or 1
    for name, number in (("rounds", rounds), ("jobs", workers)):
        if number < 1:
            raise ValueError(f"{name}={number} must be at least 1")
    if isinstance(methods, str):
        raise ValueError(f"methods={methods[:40]!r} must be a list, not one string")
    quiet = is_silent(progress)
    named = None if methods is None else _usable(methods)
    data = documents_of(texts)
    if when in MODES:
        return _generating(
            subject_of(model, tokenizer, dtype, quiet=quiet), data, promise, named, metric, when, context, documents,
            seed, objective, keep, cache, progress,
        )  # fmt: skip
    if context is not None:
        raise ValueError(f"context={context} is for generation: pass when='decode' or 'always'")
    drawn = _drawn(data, DOCUMENTS if documents is None else documents, seed)
    promise.refuse_few(len(drawn))
    given = prepare(
        model,
        drawn,
        tokenizer=tokenizer,
        length=length,
        documents=max(len(drawn), 1),
        extend=extend_positions,
        dtype=dtype,
        quiet=quiet,
    )
    given = _distinct(given, data)
    promise.refuse_few(len(given.rows))
    store, here = Store.of(cache), machine()
    store.prepare()
    chosen = _metric(given.subject, metric)
    causal = given.subject.kind == "language model"
    specs = named or [spec for spec in ladder(given.tokens, causal=causal) if _can_be_planned(_method(spec))]
    with reporting(progress) as tell, evaluating(given.subject.model):
        goal = PlanGoal(promise, chosen, objective, seed, rounds, keep)
        return Planner(given, goal, store, here, tell).plan(specs, workers)


def _refuse_unused(when: str, metric: str | None, **options: float | None) -> None:
    """Raise for an option that was given and that generation, or its metric, does not use."""
    for name, value in options.items():
        if value is None:
            continue
        if name not in ("tolerance", "confidence"):
            raise ValueError(f"{name}={value} is for plans of prompts; leave it out with when={when!r}")
        if metric == "needle":
            raise ValueError(
                f"{name}={value} is not used with metric='needle'; leave it out: coverage is the share of facts to be "
                f"kept, with a confidence of {FACT_CONFIDENCE}"
            )


def _generating(
    subject: Subject, data: Documents, promise: Promise, named: list[str] | None, metric: str | None, when: str,
    context: int | None, documents: int | None, seed: int, objective: str, keep: bool,
    cache: str | Path | Store | None, progress: Progress | bool,
) -> Plan:  # fmt: skip
    """Plan the tokens that continue a prompt."""
    chosen = "perplexity" if metric is None else metric
    if chosen not in GENERATION_METRICS:
        raise ValueError(f"metric={metric!r} is not one of {', '.join(GENERATION_METRICS)}, which generation has")
    if objective != "time":
        raise ValueError(f"objective={objective!r}: with when={when!r} a plan saves time; use objective='time'")
    if documents is not None and documents < 3:
        raise ValueError(f"documents={documents} must be at least 3: some calibrate, others are held out")
    if subject.kind != "language model":
        raise ValueError(
            f"when={when!r}: only language models generate, and {subject.name} is not one ({subject.kind})"
        )
    (length,) = contexts_for(subject, data.texts, [CONTEXTS[0] if context is None else context], name="context")
    store, here = Store.of(cache), machine()
    store.prepare()
    with reporting(progress) as tell, evaluating(subject.model):
        planner = GenerationPlanner(
            subject, data, promise, store, here, metric=chosen, when=when, seed=seed, keep=keep, progress=tell
        )
        return planner.plan(named or list(generation_ladder(length)), length, documents, DOCUMENTS)


def _drawn(data: Documents, count: int, seed: int) -> Documents:
    """Draw distinct documents in random order: sorted or repeated ones would bias the split."""
    if count < 1:
        raise ValueError(f"documents={count} must be at least 1")
    if data.pairs is not None:
        raise ValueError("texts: these are pairs; a plan is for single documents")
    texts = list(dict.fromkeys(data.texts))
    random.Random(seed).shuffle(texts)
    return replace(data, texts=tuple(texts[:count]), labels=None)


def _distinct(given: Prepared, data: Documents) -> Prepared:
    """Leave out documents that are equal once truncated; the fingerprint is that of all the data."""
    rows = {fingerprint([ids]): ids for ids in given.rows}
    skipped = given.skipped + len(given.rows) - len(rows)
    return replace(given, rows=tuple(rows.values()), skipped=skipped, data_fingerprint=data.fingerprint)


def _metric(subject: Subject, name: str | None) -> Metric:
    """Return the metric of that name, or the default, among those that measure single documents."""
    known = {
        metric.name: metric for metric in metrics_of(subject.kind).values()
        if metric.each is not None and "neighbour" not in metric.needs
    }  # fmt: skip
    if subject.kind == "classifier" and subject.model.config.num_labels == 1:
        known.pop("agreement", None)  # scores do not agree or disagree
    if name is not None and name not in known:
        raise ValueError(
            f"metric={name!r} is not one of {', '.join(known)}, which measure single documents of this model"
        )
    return known[name] if name is not None else next(iter(known.values()))


def _can_be_planned(method: Method) -> bool:
    return not method.oracle and method.name != "exact"


def _usable(methods: Sequence[str]) -> list[str]:
    """Return the specs without repetitions; raise for oracles, or if nothing is left."""
    asked = [_method(spec) for spec in methods]
    oracles = [str(method) for method in asked if method.oracle]
    if oracles:
        raise ValueError(f"methods: {oracles[0]} is an oracle, which needs the exact result; it cannot be planned")
    specs = list(dict.fromkeys(str(method) for method in asked if _can_be_planned(method)))
    if not specs:
        raise ValueError("methods is empty; name at least one, such as 'window(size=64, sinks=1)'")
    return specs
