"""Measure how many facts of its context a language model still finds with a method in place of exact attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparing.contract import Method
from sparing.contract import method as _method
from sparing.transformers import approximate
from sparing.workbench.retrieval.tasks import Context

_Z = 1.959964  # of an interval of 95 %
_CORRELATION = 0.1  # least correlation that is assumed between the questions of one context

Answers = tuple[bool, ...]  #: whether each question of a context was answered right


@dataclass(frozen=True)
class Survival:
    """Of the facts that exact attention finds, how many a method finds, with an interval of 95 %."""

    solved: int  #: questions that exact attention answers
    kept: int  #: of these, questions that the method answers
    contexts: int  #: that these questions are about
    low: float
    high: float

    @property
    def share(self) -> float:
        """kept / solved; NaN if nothing was solved."""
        return self.kept / self.solved if self.solved else math.nan


@torch.no_grad()
def answer_questions(
    model: Any,
    tokenizer: Any,
    context: Context,
    method: str | Method = "exact",
    *,
    when: str = "always",
    seed: int = 0,
    cache: Any = None,
    asked: Answers | None = None,
) -> Answers:
    """Return which questions about a context a model answers by greedy decoding, all from one cache of the context.

    The question is a prompt that continues the cache; the answer is decoded token by token. An answer counts if all of
    its tokens are right. when: as in `sparing.approximate`.

    cache: one that `read_context` filled, for when="decode", which reads the context exactly; it is copied.
    asked: which questions to ask; the others count as wrong. None: all.
    """
    _check_positions(model, tokenizer, context)
    wanted = (True,) * len(context.questions) if asked is None else asked
    with approximate(model, method, when=when, seed=seed):
        cache = _read(model, tokenizer, context) if cache is None else copied(model, cache, cache.get_seq_length())
        # Exact attention gives the same tokens in one call, which is faster than one by one.
        at_once = when == "prefill" or _method(method).name == "exact"
        return tuple(
            ask and _is_answered(model, tokenizer, cache, q.text, q.answer, at_once)
            for q, ask in zip(context.questions, wanted, strict=True)
        )


@torch.no_grad()
def read_context(model: Any, tokenizer: Any, context: Context) -> Any:
    """Return the cache of a context that exact attention has read."""
    _check_positions(model, tokenizer, context)
    return _read(model, tokenizer, context)


def copied(model: Any, cache: Any, length: int, kind: str = "dynamic", *, room: int = 0) -> Any:
    """Return a new cache with the first `length` positions; room: positions that a static one has beyond them."""
    from transformers import DynamicCache, StaticCache

    made = DynamicCache() if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=length + room)
    for number, held in enumerate(cache.layers):
        made.update(held.keys[:, :, :length], held.values[:, :, :length], number)
    return made


def _read(model: Any, tokenizer: Any, context: Context) -> Any:
    text = _tokens(tokenizer, context.text, model)
    return model(input_ids=text, use_cache=True, logits_to_keep=1).past_key_values


def _check_positions(model: Any, tokenizer: Any, context: Context) -> None:
    text = _tokens(tokenizer, context.text, model)
    longest = max(_tokens(tokenizer, q.text + q.answer, model).shape[1] for q in context.questions)
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and text.shape[1] + longest > limit:
        raise ValueError(
            f"context: {text.shape[1]} tokens and questions of up to {longest} exceed the {limit} positions of the "
            "model; make a shorter context"
        )


def _is_answered(model: Any, tokenizer: Any, cache: Any, text: str, answer: str, at_once: bool) -> bool:
    known = cache.get_seq_length()
    asked = _tokens(tokenizer, text, model)
    wanted = _tokens(tokenizer, text + answer, model)[0, asked.shape[1] :]
    calls = [torch.cat([asked[0], wanted[:-1]])] if at_once else [asked[0], *wanted[:-1].split(1)]
    expected = [wanted] if at_once else list(wanted.split(1))
    right = True
    for ids, following in zip(calls, expected, strict=True):
        logits = model(input_ids=ids[None], past_key_values=cache, logits_to_keep=len(following)).logits
        right = bool((logits[0].argmax(-1) == following).all())
        if not right:
            break
    cache.crop(known - cache.get_seq_length())
    return right


def _tokens(tokenizer: Any, text: str, model: Any) -> Tensor:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return torch.tensor([ids], device=model.device)


def survival(answers: Sequence[tuple[Answers, Answers]]) -> Survival:
    """Return how many of the facts that exact attention found, first of each pair, the method found, second.

    Questions about one context fail together, so the interval (Wilson's) counts fewer questions than there are: their
    number divided by the ratio of the variance between contexts to that of independent questions. That ratio is at
    least what a correlation of 0.1 gives, also where no question fails and contexts tell nothing about it.
    """
    pairs = [(sum(exact), sum(a and b for a, b in zip(exact, found, strict=True))) for exact, found in answers]
    pairs = [(solved, kept) for solved, kept in pairs if solved]
    solved, kept, count = sum(n for n, _ in pairs), sum(k for _, k in pairs), len(pairs)
    if not solved:
        return Survival(0, 0, 0, 0.0, 1.0)
    share = kept / solved
    effect = 1 + _CORRELATION * (sum(n * n for n, _ in pairs) / solved - 1)
    if count > 1 and 0 < share < 1:
        between = count / (count - 1) * sum((k - share * n) ** 2 for n, k in pairs)
        effect = max(effect, between / (solved * share * (1 - share)))
    n = solved / effect
    middle, shrink = share + _Z**2 / (2 * n), 1 + _Z**2 / n
    half = _Z * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n * n))
    return Survival(solved, kept, count, max((middle - half) / shrink, 0.0), min((middle + half) / shrink, 1.0))
