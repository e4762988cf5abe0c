"""Measure generation with a method: the time of a token, and the loss on a true continuation.

Each passage is read once as an exact prompt. Its continuation, the true next tokens one by one, then runs twice in
turn: by the stock model with its own cache, and by the method. Times are medians over the tokens that both ran.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparing.contract import Method, Unsupported
from sparing.contract import method as _method
from sparing.from_json import build
from sparing.models import Subject
from sparing.store import Cell, Store
from sparing.transformers import approximate
from sparing.transformers.cache import indexed_layer
from sparing.transformers.runtime.prefill import index_prompt
from sparing.transformers.state import state_of
from sparing.workbench.cells import is_refusal, measured
from sparing.workbench.prepare import fingerprint
from sparing.workbench.timing import threads

TOKENS = 128  #: of a continuation, or half of the context if that is less
_SHORTEST = 8  # context
_STOCK = "sdpa"
_TIMED = 16  # tokens that the stock model runs again, for the time, where its losses are known


@dataclass(frozen=True)
class TokenCosts:
    """Medians of seconds per token, and mean negative log-likelihoods of the continuation."""

    exact_attention: float  #: seconds in attention, all layers, of the stock model
    attention: float
    exact_token: float  #: seconds of everything
    token: float
    exact_loss: float
    loss: float
    keys_read: float | None  #: share of the keys

    @property
    def attention_speed(self) -> float:
        """Time of the stock model's attention / time with the method."""
        return self.exact_attention / self.attention if self.attention else math.nan

    @property
    def token_speed(self) -> float:
        """Time of a token of the stock model / time with the method."""
        return self.exact_token / self.token if self.token else math.nan

    @property
    def change(self) -> float:
        """Perplexity / exact perplexity - 1."""
        difference = self.loss - self.exact_loss
        return math.expm1(difference) if difference < 700 else math.inf


@dataclass(frozen=True)
class GenerationRow:
    """One method with one seed on one passage."""

    method: str
    context: int  #: tokens of the prompt and the continuation
    passage: int  #: its number, from 0
    seed: int
    costs: TokenCosts | None = None
    refused: str | None = None  #: why it cannot generate; there are no costs then


class _Clock:
    """An attention function that sums the time of its calls, and keeps their queries if asked to."""

    def __init__(self, function: Callable[..., Any], keep: bool) -> None:
        self.function, self.seconds = function, 0.0
        self.queries: list[Tensor] | None = [] if keep else None

    def __call__(self, module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.queries is not None:
            self.queries.append(query)
        start = time.perf_counter()
        found = self.function(module, query, *args, **kwargs)
        self.seconds += time.perf_counter() - start
        return found


@contextmanager
def _clocked(model: Any, name: str, *, keep: bool = False) -> Iterator[_Clock]:
    """Run the model with the attention of this name in transformers' registry, with a clock around it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before, function = model.config._attn_implementation, ALL_ATTENTION_FUNCTIONS[name]
    clock = _Clock(function, keep)
    ALL_ATTENTION_FUNCTIONS[name] = clock
    model.config._attn_implementation_internal = name
    try:
        yield clock
    finally:
        ALL_ATTENTION_FUNCTIONS[name] = function
        model.config._attn_implementation_internal = before


class Prompt(NamedTuple):
    """A prompt that the stock model has read."""

    cache: Any
    queries: list[Tensor]  #: of each layer
    following: Tensor  #: the tokens of the continuation, after the last of the prompt
    losses: list[float]  #: of the stock model on the continuation; empty until it ran


@torch.no_grad()
def read_prompt(model: Any, ids: Tensor, tokens: int) -> Prompt:
    """Read a passage [n] but for its last `tokens` + 1 tokens."""
    ids = ids.to(model.device)
    with _clocked(model, _STOCK, keep=True) as clock:
        cache = model(input_ids=ids[None, : -tokens - 1], use_cache=True, logits_to_keep=1).past_key_values
    assert clock.queries is not None
    return Prompt(cache, clock.queries, ids[-tokens - 1 :], [])


class _Run:
    """One continuation: its cache, and the seconds and losses of its tokens."""

    def __init__(self, model: Any, cache: Any, implementation: str) -> None:
        self.model, self.cache, self.implementation = model, cache, implementation
        self.attention: list[float] = []
        self.whole: list[float] = []
        self.loss: list[float] = []

    def step(self, token: Tensor, following: Tensor) -> None:
        with _clocked(self.model, self.implementation) as clock:
            start = time.perf_counter()
            logits = self.model(input_ids=token.view(1, 1), past_key_values=self.cache, use_cache=True).logits[0, -1]
            self.whole.append(time.perf_counter() - start)
        self.attention.append(clock.seconds)
        self.loss.append(float(torch.nn.functional.cross_entropy(logits.double(), following)))


@torch.no_grad()
def continue_prompt(model: Any, prompt: Prompt, what: str | Method, *, seed: int = 0) -> TokenCosts:
    """Run the continuation of a prompt token by token, with the method and with the stock model."""
    from transformers import DynamicCache

    caches = [DynamicCache(), DynamicCache()]
    for cache in caches:
        for number, held in enumerate(prompt.cache.layers):
            cache.update(held.keys, held.values, number)
    with approximate(model, what, seed=seed, when="decode") as handle:
        for module in model.modules():
            state = state_of(module)
            if state is not None and state.settings is not None:
                attention: Any = module
                layer: Any = indexed_layer(caches[0], attention.layer_idx)
                index_prompt(state.settings, layer, prompt.queries[attention.layer_idx], attention.scaling)
        fast, slow = _Run(model, caches[0], model.config._attn_implementation), _Run(model, caches[1], _STOCK)
        for number, (token, following) in enumerate(pairwise(prompt.following)):
            fast.step(token, following)
            if not prompt.losses or number < _TIMED:
                slow.step(token, following)
        share = handle.statistics().total.share_read
    if not prompt.losses:
        prompt.losses.extend(slow.loss)
    both = len(slow.loss)
    return TokenCosts(
        statistics.median(slow.attention), statistics.median(fast.attention[:both]), statistics.median(slow.whole),
        statistics.median(fast.whole[:both]), statistics.fmean(prompt.losses), statistics.fmean(fast.loss), share,
    )  # fmt: skip


def passages(subject: Subject, texts: Sequence[str], context: int, count: int) -> list[Tensor]:
    """Return token ids [context] of up to `count` passages: documents in their order, joined until they fill one."""
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
        raise ValueError(f"contexts={context}: the documents have {tokens} tokens in all; give longer ones")
    return found


def refuse_contexts(subject: Subject, contexts: Sequence[int]) -> None:
    """Raise where generation cannot be measured."""
    if contexts and subject.kind != "language model":
        raise ValueError(f"contexts: only language models generate, and {subject.name} is not one ({subject.kind})")
    for context in contexts:
        if context < _SHORTEST:
            raise ValueError(f"contexts={context} must be at least {_SHORTEST} tokens")
        if subject.positions is not None and context > subject.positions:
            raise ValueError(f"contexts={context} is more than the {subject.positions} positions of the model")


def generations(
    subject: Subject,
    texts: Sequence[str],
    specs: Sequence[str],
    store: Store,
    here: dict[str, Any],
    *,
    contexts: Sequence[int],
    count: int,
    seeds: int,
    progress: Callable[[str, int, int], None],
) -> tuple[GenerationRow, ...]:
    """Measure every method at every context on `count` passages. Oracles and exact attention are left out."""
    methods = [method for spec in specs if not (method := _method(spec)).oracle and method.name != "exact"]
    runs = [(str(each), seed) for each in methods for seed in range(seeds if each.supports.stochastic else 1)]
    taken = {context: passages(subject, texts, context, count) for context in dict.fromkeys(contexts)}
    steps, done = len(runs) * sum(map(len, taken.values())), 0

    def tell(cell: Cell, again: bool) -> None:
        nonlocal done
        done += 1
        progress(f"{cell['method']}: generation at {cell['context']}", done, steps)

    rows: list[GenerationRow] = []
    for context, found in taken.items():
        for number, ids in enumerate(found):
            tokens = min(TOKENS, context // 2)
            of = {
                "what": "generation", "model": subject.fingerprint, "passage": fingerprint([ids]), "context": context,
                "tokens": tokens, "machine": here,
            }  # fmt: skip
            cells: list[Cell] = [{**of, "method": spec, "seed": seed} for spec, seed in runs]
            prompt: list[Prompt] = []  # read when it is first needed
            work = functools.partial(_measure, subject, ids, prompt, here["threads"])
            for cell, part in zip(cells, measured(cells, work, store, check=_check, done=tell), strict=True):
                refused = part["refused"] if is_refusal(part) else None
                costs = None if refused is not None else build(TokenCosts, part)
                rows.append(GenerationRow(cell["method"], context, number, cell["seed"], costs, refused))
    return tuple(rows)


def _measure(subject: Subject, ids: Tensor, prompt: list[Prompt], count: int, cell: Cell) -> dict[str, Any]:
    with threads(count):
        if not prompt:
            prompt.append(read_prompt(subject.model, ids, cell["tokens"]))
        try:
            return asdict(continue_prompt(subject.model, prompt[0], cell["method"], seed=cell["seed"]))
        except Unsupported as error:
            return {"refused": str(error)}


def _check(cell: Cell, result: Any) -> None:
    if not is_refusal(result):
        build(TokenCosts, result)
