"""Measure how many facts of its context a language model still finds with a method in place of exact attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sparing.contract import Method
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
    model: Any, tokenizer: Any, context: Context, method: str | Method = "exact", *, when: str = "always", seed: int = 0
) -> Answers:
    """Return which questions about a context a model answers by greedy decoding, all from one cache of the context.

    The question is a prompt that continues the cache; the answer is decoded token by token. An answer counts if all of
    its tokens are right. when: as in `sparing.approximate`.
    """
    text = _tokens(tokenizer, context.text, model)
    longest = max(_tokens(tokenizer, q.text + q.answer, model).shape[1] for q in context.questions)
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and text.shape[1] + longest > limit:
        raise ValueError(
            f"context: {text.shape[1]} tokens and questions of up to {longest} exceed the {limit} positions of the "
            "model; make a shorter context"
        )
    with approximate(model, method, when=when, seed=seed):
        cache = model(input_ids=text, use_cache=True, logits_to_keep=1).past_key_values
        return tuple(_is_answered(model, tokenizer, cache, q.text, q.answer) for q in context.questions)


def _is_answered(model: Any, tokenizer: Any, cache: Any, text: str, answer: str) -> bool:
    known = cache.get_seq_length()
    asked = _tokens(tokenizer, text, model)
    wanted = _tokens(tokenizer, text + answer, model)[0, asked.shape[1] :]
    logits = model(input_ids=asked, past_key_values=cache, logits_to_keep=1).logits
    right = bool(logits[0, -1].argmax() == wanted[0])
    for token, following in pairwise(wanted):
        if not right:
            break
        logits = model(input_ids=token.view(1, 1), past_key_values=cache, logits_to_keep=1).logits
        right = bool(logits[0, -1].argmax() == following)
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
