"""Measure and judge generation with methods: what it does to text and to facts of the context, and what it costs."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from sparing.contract import Unsupported
from sparing.contract import method as _method
from sparing.from_json import build
from sparing.models import Subject
from sparing.store import Cell, Store
from sparing.workbench.cells import is_refusal, measured
from sparing.workbench.comparison.facts import FactCount, FactRuns, contexts_of
from sparing.workbench.comparison.generation_row import GenerationRow, GenerationTimes, judge
from sparing.workbench.comparison.judgement import REFUSED
from sparing.workbench.comparison.races import RacePoint
from sparing.workbench.comparison.tokens import (
    PassageCosts,
    Prompt,
    TokenSpeed,
    continue_prompt,
    read_prompt,
    token_speed,
)
from sparing.workbench.crossover import crossover
from sparing.workbench.estimate import Estimate, estimate
from sparing.workbench.prepare import fingerprint
from sparing.workbench.timing import MARGIN, Interval, threads

CONTEXTS = (2000, 8000)  #: tokens, by default
PASSAGES, FACTS = 3, 20  #: passages, and contexts with facts, at each number of tokens, by default
TOKENS = 64  #: of a continuation, or half of the context if that is less
BLOCK = 16  #: tokens of a continuation that count as one measurement of the loss
MODES = ("decode", "always")  #: of `sparing.approximate`, for generation
_SHORTEST = 8  # context
_RACES = (256, 512, 1024, 2048, 4096)  # contexts of the crossover, below those that were asked for


def passages(
    subject: Subject, texts: Sequence[str], context: int, count: int, *, name: str = "contexts"
) -> list[Tensor]:
    """Return token ids [context] of up to `count` passages: documents in their order, joined until they fill one.

    name: of the argument that holds the context, for errors.
    """
    found: list[Tensor] = []
    parts: list[str] = []
    tokens = 0
    for text in texts:
        parts.append(text)
        tokens += len(subject.encode([text], context)[0][0])
        if tokens >= context and len(ids := subject.encode(["\n\n".join(parts)], context)[0][0]) == context:
            found.append(ids)
            parts, tokens = [], 0
            if len(found) == count:
                break
    if not found:
        raise ValueError(f"{name}={context}: the documents have {tokens} tokens in all; give longer ones")
    return found


def contexts_for(
    subject: Subject, texts: Sequence[str], asked: Sequence[int] | None, *, name: str = "contexts"
) -> list[int]:
    """Return the contexts to measure; None: those of `CONTEXTS` that the model and the documents allow.

    Raise where generation cannot be measured at a context that was asked for; name: of the argument, for errors.
    """
    if asked is None:
        if subject.kind != "language model":
            return []
        most = subject.positions or max(CONTEXTS)
        return [context for context in CONTEXTS if context <= most and _fills(subject, texts, context)]
    if asked and subject.kind != "language model":
        raise ValueError(f"{name}: only language models generate, and {subject.name} is not one ({subject.kind})")
    for context in asked:
        if context < _SHORTEST:
            raise ValueError(f"{name}={context} must be at least {_SHORTEST} tokens")
        if subject.positions is not None and context > subject.positions:
            raise ValueError(f"{name}={context} is more than the {subject.positions} positions of the model")
    return sorted(set(asked))


def _fills(subject: Subject, texts: Sequence[str], context: int) -> bool:
    try:
        return bool(passages(subject, texts, context, 1))
    except ValueError:
        return False


def continuing(specs: Sequence[str]) -> list[str]:
    """Return the specs without oracles and exact attention, which generation does not measure."""
    return [spec for spec in specs if not (method := _method(spec)).oracle and method.name != "exact"]


class Generations:
    """The measurements of generation of `compare()`."""

    def __init__(
        self,
        subject: Subject,
        store: Store,
        here: dict[str, Any],
        *,
        when: Sequence[str],
        metric: str | None,
        tolerance: float,
        seeds: int,
        progress: Callable[[str, int, int], None],
    ) -> None:
        self.subject, self.store, self.here = subject, store, here
        self.when, self.metric, self.tolerance, self.seeds, self.progress = when, metric, tolerance, seeds, progress
        self.facts = FactRuns(subject, store, here, self._tell)
        self.done, self.steps = 0, 0
        self.points: dict[str, list[RacePoint]] = {}

    def rows(
        self, texts: Sequence[str], specs: Sequence[str], contexts: Sequence[int], count: int, facts: int
    ) -> tuple[GenerationRow, ...]:
        """Measure every method at every context, on `count` passages and `facts` contexts with facts."""
        methods = [_method(spec) for spec in specs]
        runs = [(str(method), when) for method in methods for when in self.when]
        made = {context: contexts_of(self.subject, context, facts) for context in contexts}
        if self.metric == "needle" and (short := [context for context in contexts if not made[context]]):
            raise ValueError(f"metric='needle': no task fits into contexts={short[0]} tokens; use a longer context")
        taken = {context: passages(self.subject, texts, context, count) for context in contexts}
        cells = sum(self.seeds if method.supports.stochastic else 1 for method in methods) * len(self.when)
        self.steps = cells * sum(map(len, taken.values())) + len(runs) * (facts * len(contexts) + 1)
        parts: dict[tuple[int, str, str], list[PassageCosts] | str] = {}
        for context, found in taken.items():
            last = context == max(contexts)
            for number, ids in enumerate(found):
                self._passage(context, ids, runs, parts, race=last and number == 0)
        rows = []
        for context in contexts:
            able = [(spec, when) for spec, when in runs if not isinstance(parts[context, spec, when], str)]
            kept = self.facts.count(made[context], able) if made[context] else {}
            for spec, when in runs:
                held = parts[context, spec, when]
                counted = kept.get((spec, when))
                if isinstance(held, str):
                    rows.append(GenerationRow(spec, when, context, REFUSED, refused=held))
                else:
                    rows.append(
                        self._row(spec, when, context, held, counted if isinstance(counted, FactCount) else None)
                    )
        return tuple(self._crossed(row, rows) for row in rows)

    def _passage(
        self, context: int, ids: Tensor, runs: Sequence[tuple[str, str]],
        parts: dict[tuple[int, str, str], list[PassageCosts] | str], *, race: bool,
    ) -> None:  # fmt: skip
        of = {
            "what": "generation", "model": self.subject.fingerprint, "passage": fingerprint([ids]), "context": context,
            "tokens": min(TOKENS, context // 2), "machine": self.here,
        }  # fmt: skip
        cells: list[Cell] = [
            {**of, "method": spec, "when": when, "seed": seed}
            for spec, when in runs
            for seed in range(self.seeds if _method(spec).supports.stochastic else 1)
        ]
        prompt: list[Prompt] = []  # read when it is first needed
        work = functools.partial(self._costs, ids, prompt)
        for cell, part in zip(
            cells, measured(cells, work, self.store, check=_check, keep=_is_kept, done=self._done), strict=True
        ):
            key = (context, cell["method"], cell["when"])
            if is_refusal(part):
                parts[key] = part["refused"]
            elif not isinstance(held := parts.setdefault(key, []), str):
                held.append(build(PassageCosts, part))
        for spec in dict.fromkeys(spec for spec, when in runs if not isinstance(parts[context, spec, when], str)):
            if not race:
                continue
            lengths = [length for length in _RACES if length <= context // 2]
            cell = {**of, "what": "token race", "method": spec, "lengths": lengths}
            race_work = functools.partial(self._race, ids, prompt)
            (part,) = measured([cell], race_work, self.store, check=_check_race, keep=_is_race_kept, done=self._done)
            speeds = {n: build(TokenSpeed, each) for n, each in zip(lengths, part, strict=True)}
            self.points[spec] = [RacePoint(n, each.ratio) for n, each in speeds.items() if not each.disturbed]

    def _read(self, ids: Tensor, prompt: list[Prompt], cell: Cell) -> Prompt:
        if not prompt:
            prompt.append(read_prompt(self.subject.model, ids, cell["tokens"]))
        return prompt[0]

    def _costs(self, ids: Tensor, prompt: list[Prompt], cell: Cell) -> dict[str, Any]:
        with threads(self.here["threads"]):
            read = self._read(ids, prompt, cell)
            try:
                return asdict(
                    continue_prompt(self.subject.model, read, cell["method"], when=cell["when"], seed=cell["seed"])
                )
            except Unsupported as error:
                return {"refused": str(error)}

    def _race(self, ids: Tensor, prompt: list[Prompt], cell: Cell) -> list[TokenSpeed]:
        with threads(self.here["threads"]):
            read = self._read(ids, prompt, cell)
            return [token_speed(self.subject.model, read, cell["method"], length) for length in cell["lengths"]]

    def _row(
        self, spec: str, when: str, context: int, costs: Sequence[PassageCosts], facts: FactCount | None
    ) -> GenerationRow:
        losses = [loss for each in costs for loss in each.losses]
        exact = [loss for each in costs for loss in each.exact_losses]
        change, differing = _change(costs), estimate(_blocks(costs, lambda each: [not same for same in each.same]))
        times = _times(costs)
        read = [each.keys_read for each in costs if each.keys_read is not None]
        verdict, reason = judge(change, differing, facts, times, metric=self.metric, tolerance=self.tolerance)
        return GenerationRow(
            spec, when, context, verdict, reason, passages=len(costs), tokens=len(losses),
            exact_perplexity=_perplexity(exact), perplexity=_perplexity(losses), change=change, differing=differing,
            keys_read=statistics.fmean(read) * context if read else None, facts=facts, times=times,
        )  # fmt: skip

    def _crossed(self, row: GenerationRow, rows: Sequence[GenerationRow]) -> GenerationRow:
        """Return the row with the speeds of a token at all contexts."""
        if row.times is None:
            return row
        own = [
            RacePoint(each.context, each.times.token_speed)
            for each in rows
            if (each.method, each.when) == (row.method, row.when)
            and each.times is not None
            and not each.times.disturbed
        ]
        shorter = [each for each in self.points.get(row.method, ()) if each.length not in {one.length for one in own}]
        points = tuple(sorted([*shorter, *own], key=lambda each: each.length))
        found = crossover([(each.length, each.ratio.median) for each in points], margin=MARGIN).tokens
        return GenerationRow(**{**vars(row), "points": points, "crossover": found})

    def _done(self, cell: Cell, again: bool) -> None:
        self._tell(f"{cell['method']}: {cell['what']} at {cell['context']}")

    def _tell(self, text: str) -> None:
        self.done += 1
        self.progress(text, self.done, max(self.steps, self.done))


def _blocks(costs: Sequence[PassageCosts], values: Callable[[PassageCosts], Sequence[float]]) -> list[float]:
    """Return means over blocks of neighbouring tokens, which are likelier to be alike than others."""
    return [
        statistics.fmean(found[start : start + BLOCK])
        for each in costs
        for found in [values(each)]
        for start in range(0, len(found), BLOCK)
    ]


def _change(costs: Sequence[PassageCosts]) -> Estimate:
    """Return perplexity / exact perplexity - 1, with the interval of the mean difference of the losses."""
    found = estimate(_blocks(costs, lambda each: [b - a for a, b in zip(each.exact_losses, each.losses, strict=True)]))
    low, high = (None if end is None else _expm1(end) for end in (found.low, found.high))
    return Estimate(_expm1(found.mean), low, high, found.count)


def _expm1(x: float) -> float:
    return math.expm1(x) if x < 700 else math.inf


def _perplexity(losses: Sequence[float]) -> float:
    return 1 + _expm1(statistics.fmean(losses))


def _times(costs: Sequence[PassageCosts]) -> GenerationTimes:
    def middle(name: str) -> float:
        return statistics.median(getattr(each, name) for each in costs)

    speed = Interval(*(statistics.median(each.token_speed[i] for each in costs) for i in range(3)))
    names = (
        "exact_token", "token", "exact_attention", "attention", "exact_prompt", "prompt", "exact_prompt_attention",
        "prompt_attention",
    )  # fmt: skip
    return GenerationTimes(
        exact_cache=statistics.mode(each.exact_cache for each in costs), token_speed=speed,
        cache_bytes=round(middle("cache_bytes")), index_bytes=round(middle("index_bytes")),
        disturbed=next((each.disturbed for each in costs if each.disturbed), ""),
        **{name: middle(name) for name in names},
    )  # fmt: skip


def _check(cell: Cell, result: Any) -> None:
    if not is_refusal(result):
        found = build(PassageCosts, result)
        if not len(found.losses) == len(found.exact_losses) == len(found.same) == cell["tokens"]:
            raise ValueError(f"losses must be of {cell['tokens']} tokens")


def _check_race(cell: Cell, result: Any) -> None:
    if not isinstance(result, list) or len(result) != len(cell["lengths"]):
        raise ValueError("a race has a ratio for each length")
    for each in result:
        build(TokenSpeed, each)


def _is_kept(result: Any) -> bool:
    return not result.get("disturbed")


def _is_race_kept(result: Any) -> bool:
    return not any(each.disturbed for each in result)
