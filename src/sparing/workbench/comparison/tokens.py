"""Measure the tokens that continue a passage: their losses, their time and memory, with a method and without.

Each passage is read once as an exact prompt. The true next tokens then run one by one with the method, and in one call
by the stock model, which gives the same losses. Times are taken afterwards: tokens with the method and of the stock
model in turn, the latter with the faster of transformers' dynamic and static cache, and without any hook of sparing's.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from sparing.contract import Method, Unsupported, list_methods
from sparing.contract import method as _method
from sparing.transformers import approximate
from sparing.transformers.cache import IndexedLayer, indexed_layer
from sparing.transformers.runtime.prefill import new_index
from sparing.transformers.state import state_of
from sparing.workbench.memory import tensor_bytes
from sparing.workbench.retrieval.measure import copied
from sparing.workbench.timing import Interval, interval, undisturbed

CACHES = ("dynamic", "static")  #: of transformers, for exact attention
_STOCK = "sdpa"
_TIMED = 12  # tokens that are timed in turn; the first of them warms up
_RACED = 6  # tokens of each exact cache, and of each length of a crossover


@dataclass(frozen=True)
class PassageCosts:
    """One passage with one method and seed. Times are medians of seconds."""

    exact_losses: tuple[float, ...]  #: negative log-likelihoods of the true tokens, by the stock model
    losses: tuple[float, ...]
    same: tuple[bool, ...]  #: whether the most likely next token is the stock model's
    keys_read: float | None  #: share of the keys
    exact_cache: str  #: one of `CACHES`, the faster
    exact_token: float
    token: float
    token_speed: Interval  #: time of the stock model / time with the method, token by token
    exact_attention: float  #: of a token, all layers
    attention: float
    exact_prompt: float
    prompt: float
    exact_prompt_attention: float
    prompt_attention: float
    cache_bytes: int  #: keys and values
    index_bytes: int  #: what the method keeps beside them
    disturbed: str = ""  #: by what, if the times say nothing


class _Clock:
    """An attention function that sums the time of its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        found = self.function(*args, **kwargs)
        self.seconds += time.perf_counter() - start
        return found


@contextmanager
def _clocked(model: Any, name: str) -> Iterator[_Clock]:
    """Run the model with the attention of this name in transformers' registry, with a clock around it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before, function = model.config._attn_implementation, ALL_ATTENTION_FUNCTIONS[name]
    clock = _Clock(function)
    ALL_ATTENTION_FUNCTIONS[name] = clock
    model.config._attn_implementation_internal = name
    try:
        yield clock
    finally:
        ALL_ATTENTION_FUNCTIONS[name] = function
        model.config._attn_implementation_internal = before


class _Spent(NamedTuple):
    """Seconds of a call of the model, and of its attention."""

    whole: float
    attention: float


def _run(model: Any, ids: Tensor, cache: Any, implementation: str, keep: int) -> tuple[Any, _Spent]:
    """Run tokens [n] after a cache; keep: number of logits."""
    with _clocked(model, implementation) as clock:
        start = time.perf_counter()
        out = model(input_ids=ids[None], past_key_values=cache, use_cache=True, logits_to_keep=keep)
        return out, _Spent(time.perf_counter() - start, clock.seconds)


class Prompt(NamedTuple):
    """A passage that the stock model has read, but for its last tokens."""

    ids: Tensor  #: all of the passage
    cache: Any
    spent: _Spent
    following: Tensor  #: the last token of the prompt, which is not in the cache, and those after it
    losses: tuple[float, ...]  #: of the stock model, for the tokens after that
    next: tuple[int, ...]  #: what it finds most likely in their places
    exact_cache: str  #: one of `CACHES`, the faster
    disturbed: str  #: by what, if the time that was spent says nothing

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return len(self.ids) - len(self.following)


@torch.no_grad()
def read_prompt(model: Any, ids: Tensor, tokens: int, *, exact_cache: str | None = None) -> Prompt:
    """Read a passage [n] but for its last `tokens` + 1 tokens, and run these in one call.

    exact_cache: one of `CACHES`; None finds the faster.
    """
    ids = ids.to(model.device)
    first, following = ids[: -tokens - 1], ids[-tokens - 1 :]
    (out, spent), disturbed = undisturbed(lambda: _run(model, first, None, _STOCK, 1), tries=1)
    cache = out.past_key_values
    out, _ = _run(model, following[:-1], copied(model, cache, len(first)), _STOCK, tokens)
    logits = out.logits[0].double()
    losses = tuple(cross_entropy(logits, following[1:], reduction="none").tolist())
    better = _faster_cache(model, cache, following) if exact_cache is None else exact_cache
    return Prompt(ids, cache, spent, following, losses, tuple(logits.argmax(-1).tolist()), better, disturbed)


def _faster_cache(model: Any, cache: Any, following: Tensor) -> str:
    length = cache.get_seq_length()
    spans: dict[str, list[float]] = {kind: [] for kind in CACHES}
    caches = {kind: copied(model, cache, length, kind, room=_RACED + 1) for kind in CACHES}
    for token in following[:-1][:_RACED]:
        for kind in CACHES:
            _, taken = _run(model, token.view(1), caches[kind], _STOCK, 1)
            spans[kind].append(taken.whole)
    return min(CACHES, key=lambda kind: statistics.median(spans[kind][1:] or spans[kind]))


class TokenSpeed(NamedTuple):
    """How much faster a token is with a method."""

    ratio: Interval  #: time of the stock model / time with the method
    disturbed: str  #: by what, if that says nothing


class Continuation(NamedTuple):
    """The true tokens after a prompt, with a method."""

    cache: Any
    spent: _Spent  #: by the prompt
    losses: tuple[float, ...]
    same: tuple[bool, ...]  #: whether the most likely next token is the stock model's
    keys_read: float | None  #: share of the keys
    disturbed: str  #: by what, if the time that was spent says nothing


@torch.no_grad()
def run_continuation(
    model: Any, prompt: Prompt, what: str | Method, *, when: str = "decode", seed: int = 0
) -> Continuation:
    """Run the continuation of a prompt token by token with the method."""
    n, first = prompt.length, prompt.ids[: prompt.length]
    method = _method(what)
    if not method.supports.decode:  # with when="always" its tokens would run exact attention
        able = ", ".join(name for name, cls in list_methods().items() if cls.supports.decode and not cls.oracle)
        raise Unsupported(f"{method} cannot continue a cache; methods that can: {able}")
    with _quiet(), approximate(model, method, seed=seed, when=when) as handle:
        name = model.config._attn_implementation
        if when == "decode" and method.supports.adopt:
            cache = copied(model, prompt.cache, n)
            built = _index(model, cache)
            spent, disturbed = _Spent(prompt.spent.whole + built, prompt.spent.attention + built), prompt.disturbed
        else:
            (out, spent), disturbed = undisturbed(lambda: _run(model, first, None, name, 1), tries=1)
            cache = out.past_key_values
            handle.statistics(reset=True)
        losses, found = [], []
        for token, following in pairwise(prompt.following):
            out, _ = _run(model, token.view(1), cache, name, 1)
            losses.append(float(cross_entropy(out.logits[0, -1].double(), following)))
            found.append(int(out.logits[0, -1].argmax()))
        counted = handle.statistics()
        if reasons := sorted({reason for layer in counted.layers for reason in layer.exact_reasons}):
            raise Unsupported(f"{method} leaves tokens exact: {'; '.join(reasons)}")
    same = tuple(a == b for a, b in zip(prompt.next, found, strict=True))
    return Continuation(cache, spent, tuple(losses), same, counted.total.share_read, disturbed)


@torch.no_grad()
def continue_prompt(
    model: Any, prompt: Prompt, what: str | Method, *, when: str = "decode", seed: int = 0
) -> PassageCosts:
    """Run the continuation of a prompt with the method; then time its tokens and those of the stock model in turn."""
    found = run_continuation(model, prompt, what, when=when, seed=seed)
    cache, spent, n = found.cache, found.spent, prompt.length
    held = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    beside = sum(tensor_bytes(layer.index) for layer in cache.layers if isinstance(layer, IndexedLayer))
    (slow, fast), disturbed = _timed(model, prompt, n, cache, _method(what), seed, min(_TIMED, len(found.losses)))
    return PassageCosts(
        prompt.losses, found.losses, found.same, found.keys_read, prompt.exact_cache,
        statistics.median(x.whole for x in slow), statistics.median(x.whole for x in fast), _ratios(slow, fast),
        statistics.median(x.attention for x in slow), statistics.median(x.attention for x in fast),
        prompt.spent.whole, spent.whole, prompt.spent.attention, spent.attention, held, beside,
        disturbed or prompt.disturbed or found.disturbed,
    )  # fmt: skip


@torch.no_grad()
def token_speed(model: Any, prompt: Prompt, what: str | Method, length: int, *, seed: int = 0) -> TokenSpeed:
    """Return the time of a token of the stock model / with the method, after the first tokens of a prompt."""
    cache = copied(model, prompt.cache, length)
    with approximate(model, what, seed=seed, when="decode"):
        if _method(what).supports.adopt:
            _index(model, cache)
        else:
            out, _ = _run(model, prompt.ids[:length], None, model.config._attn_implementation, 1)
            cache = out.past_key_values
    spent, disturbed = _timed(model, prompt, length, cache, _method(what), seed, _RACED)
    return TokenSpeed(_ratios(*spent), disturbed)


@contextmanager
def _quiet() -> Iterator[None]:
    """Ignore warnings of tokens that stay exact: they are refused instead."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tokens that continue a cache run exact attention")
        yield


def _timed(
    model: Any, prompt: Prompt, length: int, cache: Any, method: Method, seed: int, count: int
) -> tuple[tuple[list[_Spent], list[_Spent]], str]:
    """Run `_in_turn`, again if it is disturbed; return what disturbed it last."""

    def measure() -> tuple[list[_Spent], list[_Spent]]:
        if cache.get_seq_length() > length:
            cache.crop(length - cache.get_seq_length())
        return _in_turn(model, prompt, length, cache, method, seed, count)

    return undisturbed(measure, lambda found: [each.whole for each in found[0]])


def _in_turn(
    model: Any, prompt: Prompt, length: int, cache: Any, method: Method, seed: int, count: int
) -> tuple[list[_Spent], list[_Spent]]:
    """Run the tokens after `length` with the stock model and with the method, which continues `cache`, in turn."""
    stock = copied(model, prompt.cache, length, prompt.exact_cache, room=count + 1)
    slow, fast = [], []
    for token in prompt.ids[length : length + count]:
        # The method is removed in between: its hook would replace the layers of the stock model's cache.
        with approximate(model, method, seed=seed, when="decode"):
            fast.append(_run(model, token.view(1), cache, model.config._attn_implementation, 1)[1])
        slow.append(_run(model, token.view(1), stock, _STOCK, 1)[1])
    return slow[1:] or slow, fast[1:] or fast


def _ratios(slow: Sequence[_Spent], fast: Sequence[_Spent]) -> Interval:
    return interval([a.whole / b.whole for a, b in zip(slow, fast, strict=True)])


def _index(model: Any, cache: Any) -> float:
    """Let the approximated layers index a cache that holds a prompt already; return the seconds that it took."""
    start = time.perf_counter()
    for module in model.modules():
        state = state_of(module)
        if state is None or state.settings is None or state.settings.exact or state.window is not None:
            continue
        attention: Any = module
        layer: Any = indexed_layer(cache, attention.layer_idx)
        if isinstance(layer, IndexedLayer):
            index = new_index(state.settings, layer.keys, attention.scaling)  # type: ignore[arg-type]
            index.adopt(layer.keys, layer.values, heads=attention.config.num_attention_heads)  # type: ignore[arg-type]
            layer.set_index(index)
    return time.perf_counter() - start
