"""What decoding from an index costs, in seconds and in perplexity: `python -m sparing.workbench.decode smollm2`.

Each text is read once as an exact prompt. Its continuation, the true next tokens one by one, then runs twice beside
each other: by the stock model with its own cache, and by the method. Times are medians over the tokens that both ran.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparing.contract import Method
from sparing.contract import method as _method
from sparing.models import smollm2
from sparing.sample_text import python_topics
from sparing.spec import split_specs
from sparing.transformers import approximate
from sparing.transformers.cache import indexed_layer
from sparing.transformers.runtime.prefill import index_prompt
from sparing.transformers.state import state_of
from sparing.workbench.swap import cut, texts_of

METHODS = (
    "multipole(clusters=32, keys=300, window=0, sinks=4, cap=8.0, steps=6, tolerance=0.0036)",
    "window(size=400, sinks=4)",
)
_STOCK = "sdpa"
_TIMED = 16  # tokens that the stock model runs again, for the time, where its losses are known


class Decoding(NamedTuple):
    """One method on one text."""

    method: Method
    exact_attention: float  #: seconds per token in attention, all layers: stock model
    attention: float
    exact_token: float  #: seconds per token, everything
    token: float
    exact_loss: float  #: mean negative log-likelihood of the continuation
    loss: float
    read: float | None  #: share of the keys that were read


class _Clock:
    """An attention function that sums what its calls take, and keeps the queries that it is asked to."""

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
def _clocked(name: str, *, keep: bool = False) -> Iterator[_Clock]:
    """A clock around what transformers calls under that name."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = ALL_ATTENTION_FUNCTIONS[name]
    clock = _Clock(before, keep)
    ALL_ATTENTION_FUNCTIONS[name] = clock
    try:
        yield clock
    finally:
        ALL_ATTENTION_FUNCTIONS[name] = before


class Prompt(NamedTuple):
    """A text that the stock model has read."""

    cache: Any
    queries: list[Tensor]  #: of each layer
    following: Tensor  #: the tokens of the continuation, after the last of the prompt
    losses: list[float]  #: of the stock model on the continuation; empty until it ran


@torch.no_grad()
def read(model: Any, ids: Tensor, tokens: int) -> Prompt:
    """ids [n]: all but the last `tokens` + 1 are the prompt."""
    with _clocked(_STOCK, keep=True) as clock:
        cache = model(input_ids=ids[None, : -tokens - 1], use_cache=True, logits_to_keep=1).past_key_values
    assert clock.queries is not None
    return Prompt(cache, clock.queries, ids[-tokens - 1 :], [])


class _Run:
    """One continuation: its cache, and what its tokens took and were worth."""

    def __init__(self, model: Any, cache: Any, implementation: str) -> None:
        self.model, self.cache, self.implementation = model, cache, implementation
        self.attention: list[float] = []
        self.whole: list[float] = []
        self.loss: list[float] = []

    def step(self, token: Tensor, following: Tensor) -> None:
        self.model.config._attn_implementation_internal = self.implementation
        with _clocked(self.implementation) as clock:
            start = time.perf_counter()
            logits = self.model(input_ids=token.view(1, 1), past_key_values=self.cache, use_cache=True).logits[0, -1]
            self.whole.append(time.perf_counter() - start)
        self.attention.append(clock.seconds)
        self.loss.append(float(torch.nn.functional.cross_entropy(logits.double(), following)))


@torch.no_grad()
def decode(model: Any, prompt: Prompt, spec: str | Method, *, seed: int = 0) -> Decoding:
    """The continuation of a prompt, token by token, by the method and by the stock model."""
    from transformers import DynamicCache

    caches = [DynamicCache(), DynamicCache()]
    for cache in caches:
        for number, held in enumerate(prompt.cache.layers):
            cache.update(held.keys, held.values, number)
    with approximate(model, spec, seed=seed, when="decode") as handle:
        for module in model.modules():
            state = state_of(module)
            if state is not None and state.settings is not None:
                attention: Any = module
                layer: Any = indexed_layer(caches[0], attention.layer_idx)
                index_prompt(state.settings, layer, prompt.queries[attention.layer_idx], attention.scaling)
        ours = model.config._attn_implementation
        fast, slow = _Run(model, caches[0], ours), _Run(model, caches[1], _STOCK)
        for number, (token, following) in enumerate(pairwise(prompt.following)):
            fast.step(token, following)
            if not prompt.losses or number < _TIMED:
                slow.step(token, following)
        model.config._attn_implementation_internal = ours
        share = handle.statistics().total.share_read
    if not prompt.losses:
        prompt.losses.extend(slow.loss)
    both = len(slow.loss)
    seconds = [statistics.median(x) for x in (slow.attention, fast.attention[:both], slow.whole, fast.whole[:both])]
    return Decoding(_method(spec), *seconds, statistics.fmean(prompt.losses), statistics.fmean(fast.loss), share)  # type: ignore[call-arg]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table to standard output, a row as soon as it is measured."""
    parser = argparse.ArgumentParser(prog="python -m sparing.workbench.decode", description=__doc__)
    parser.add_argument("model", choices=("smollm2",))
    parser.add_argument("--methods", help="comma-separated specs; default: multipole and a window")
    parser.add_argument("--context", type=int, default=8192, help="tokens with the continuation")
    parser.add_argument("--tokens", type=int, default=128, help="of the continuation")
    parser.add_argument("--documents", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--text",
        nargs="+",
        help="a text file with one document per line, or several files; default: Python help topics, joined",
    )
    options = parser.parse_args(arguments)

    model, tokenizer = smollm2.load()
    texts = texts_of(options.text) if options.text else ["\n".join(python_topics()[i::3]) for i in range(3)]
    ids = cut(texts, lambda text: tokenizer(text)["input_ids"], options.context, options.documents)
    head = "| method | text | seed | attention | token | perplexity | exact | change | keys read |"
    sys.stdout.write(f"{head}\n|{'---|' * (head.count('|') - 1)}\n")
    specs = split_specs(options.methods) if options.methods else METHODS
    for number, text in enumerate(ids):
        prompt = read(model, text, options.tokens)
        for spec in specs:
            for seed in range(options.seeds if _method(spec).supports.stochastic else 1):
                row = decode(model, prompt, spec, seed=seed)
                before, after = math.exp(row.exact_loss), math.exp(row.loss)
                share = "-" if row.read is None else f"{row.read * options.context:.0f}"
                sys.stdout.write(
                    f"| `{row.method}` | {number} | {seed} | {row.exact_attention / row.attention:.1f}x "
                    f"| {row.exact_token / row.token:.2f}x | {after:.3f} | {before:.3f} | {after / before - 1:+.2%} "
                    f"| {share} |\n"
                )
                sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
