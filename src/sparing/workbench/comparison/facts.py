"""Measure which facts of its context a language model finds with a method, of those that exact attention finds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sparing.contract import Unsupported
from sparing.contract import method as _method
from sparing.models import Subject
from sparing.store import Cell, Store
from sparing.workbench.cells import is_refusal, measured
from sparing.workbench.estimate import Estimate
from sparing.workbench.retrieval.measure import Answers, Survival, answer_questions, read_context, survival
from sparing.workbench.retrieval.tasks import Context, make_context
from sparing.workbench.timing import threads

DEPTHS = 5  #: equal parts of a context that facts are counted in
ROOM = 64  #: tokens of a context that are left for the longest question and its answer
#: Task and haystack of contexts, in turn. Those of which a small model solves most come more often.
KINDS = (
    ("keys", "prose"), ("code", "code"), ("keys", "code"), ("keys", "repeated"), ("values", "prose"),
    ("code", "prose"), ("keys", "prose"), ("chain", "prose"), ("needle", "prose"), ("table", "code"),
)  # fmt: skip


@dataclass(frozen=True)
class DepthCount:
    """Facts of one part of the contexts."""

    solved: int  #: that exact attention finds
    kept: int  #: of these, that the method finds


@dataclass(frozen=True)
class FactCount:
    """Facts that survive a method, over several contexts of one length."""

    length: int  #: tokens of a context at most
    contexts: int
    asked: int  #: questions about facts
    kept: Survival
    depths: tuple[DepthCount, ...]  #: from the start of a context to its end

    @property
    def lost(self) -> Estimate:
        """The share of facts that are lost."""
        return Estimate(1 - self.kept.share, 1 - self.kept.high, 1 - self.kept.low, self.kept.solved)


def contexts_of(subject: Subject, length: int, count: int, *, first: int = 0) -> list[Context]:
    """Return `count` contexts of at most `length` tokens, with room for a question; first: their first seed.

    Tasks whose facts do not fit are left out, so there may be fewer, or none.
    """

    def tokens(text: str) -> int:
        return len(subject.tokenizer(text, add_special_tokens=False)["input_ids"])

    found = []
    for number in range(count):
        task, haystack = KINDS[number % len(KINDS)]
        try:
            found.append(make_context(task, haystack, length - ROOM, first + number, tokens))
        except ValueError:
            continue
    return found


class FactRuns:
    """Ask about contexts, with one method after the other; answers are kept."""

    def __init__(self, subject: Subject, store: Store, here: dict[str, Any], tell: Callable[[str], None]) -> None:
        self.subject, self.store, self.here, self.tell = subject, store, here, tell
        self.of = {
            "what": "facts", "model": subject.fingerprint,
            "versions": [here["torch"], here["transformers"], here["sparing"]],
        }  # fmt: skip

    def count(
        self, contexts: Sequence[Context], runs: Sequence[tuple[str, str]]
    ) -> dict[tuple[str, str], FactCount | str]:
        """Return what survives for each (method, when), or why the method is refused."""
        pairs: dict[tuple[str, str], list[tuple[Answers, Answers]] | str] = {run: [] for run in runs}
        for context in contexts:
            exact, found = self._answers(context, runs)
            for run, answers in found.items():
                held = pairs[run]
                if isinstance(answers, str):
                    pairs[run] = answers
                elif not isinstance(held, str):
                    held.append((exact, answers))
        return {run: each if isinstance(each, str) else count_facts(contexts, each) for run, each in pairs.items()}

    def _answers(
        self, context: Context, runs: Sequence[tuple[str, str]]
    ) -> tuple[Answers, dict[tuple[str, str], Answers | str]]:
        kept: list[Any] = []  # the cache of an exact prompt, filled when it is first needed
        of = {
            **self.of, "task": context.task, "haystack": context.haystack, "length": context.length,
            "seed": context.seed,
        }  # fmt: skip
        work = functools.partial(self._ask, context, kept, None)
        check = functools.partial(_check, len(context.questions))
        (exact,) = measured([{**of, "method": "exact", "when": "decode"}], work, self.store, check=check)
        cells: list[Cell] = [{**of, "method": spec, "when": when} for spec, when in runs]
        work = functools.partial(self._ask, context, kept, tuple(exact))
        found = measured(cells, work, self.store, check=check, done=self._done)
        return tuple(exact), {
            run: part["refused"] if is_refusal(part) else tuple(part) for run, part in zip(runs, found, strict=True)
        }

    def _done(self, cell: Cell, again: bool) -> None:
        self.tell(f"{cell['method']}: facts in {cell['length']} tokens")

    def _ask(self, context: Context, kept: list[Any], asked: Answers | None, cell: Cell) -> Any:
        model, tokenizer = self.subject.model, self.subject.tokenizer
        method, when = _method(cell["method"]), cell["when"]
        with threads(self.here["threads"]):
            cache = None
            if when == "decode" and (method.name == "exact" or method.supports.adopt):
                if not kept:
                    kept.append(read_context(model, tokenizer, context))
                cache = kept[0]
            try:
                return list(answer_questions(model, tokenizer, context, method, when=when, cache=cache, asked=asked))
            except Unsupported as error:
                return {"refused": str(error)}


def count_facts(contexts: Sequence[Context], pairs: Sequence[tuple[Answers, Answers]]) -> FactCount:
    """Count what survives, in all and by depth. pairs: for each context the answers of exact attention and others."""
    solved, kept = [0] * DEPTHS, [0] * DEPTHS
    for context, (exact, found) in zip(contexts, pairs, strict=True):
        for question, a, b in zip(context.questions, exact, found, strict=True):
            part = min(int(question.depth * DEPTHS), DEPTHS - 1)
            solved[part] += a
            kept[part] += a and b
    return FactCount(
        contexts[0].length + ROOM, len(contexts), sum(len(each.questions) for each in contexts), survival(pairs),
        tuple(map(DepthCount, solved, kept)),
    )  # fmt: skip


def _check(questions: int, cell: Cell, result: Any) -> None:
    if is_refusal(result):
        return
    if not isinstance(result, list) or len(result) != questions or not all(isinstance(each, bool) for each in result):
        raise ValueError(f"answers must be {questions} booleans")
