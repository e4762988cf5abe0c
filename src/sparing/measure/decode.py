"""What decoding from an index costs, in seconds and in perplexity: `python -m sparing.measure.decode smollm2`.

Each text is read once as an exact prompt. Its continuation, the true next tokens one by one, then runs twice beside
each other: by the stock model with its own cache, and by the method.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparing.measure.swap import cut, texts_of
from sparing.method import Method
from sparing.method import method as _method
from sparing.spec import split_specs

METHODS = ("multipole(clusters=48, keys=96, window=0, sinks=4, order=1, cap=8.0)", "window(size=600, sinks=4)")


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
    """Sums what the calls of an attention function take."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        found = self.function(*args, **kwargs)
        self.seconds += time.perf_counter() - start
        return found


@contextmanager
def _timed(name: str) -> Iterator[_Clock]:
    """A clock around what transformers calls under that name."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = ALL_ATTENTION_FUNCTIONS[name]
    clock = _Clock(before)
    ALL_ATTENTION_FUNCTIONS[name] = clock
    try:
        yield clock
    finally:
        ALL_ATTENTION_FUNCTIONS[name] = before


class _Run:
    """One continuation: its cache, and what its tokens took and were worth."""

    def __init__(self, model: Any, cache: Any, implementation: str) -> None:
        self.model, self.cache, self.implementation = model, cache, implementation
        self.attention: list[float] = []
        self.whole: list[float] = []
        self.loss: list[float] = []

    def step(self, token: Tensor, following: Tensor) -> None:
        with _timed(self.implementation) as clock:
            start = time.perf_counter()
            logits = self.model(input_ids=token.view(1, 1), past_key_values=self.cache, use_cache=True).logits[0, -1]
            self.whole.append(time.perf_counter() - start)
        self.attention.append(clock.seconds)
        self.loss.append(float(torch.nn.functional.cross_entropy(logits.double(), following)))


@torch.no_grad()
def decode(model: Any, ids: Tensor, spec: str | Method, *, tokens: int, seed: int = 0) -> Decoding:
    """ids [n]: all but the last `tokens` + 1 are the prompt."""
    from transformers import DynamicCache

    from sparing.transformers import approximate

    prompt = ids[: -tokens - 1]
    with approximate(model, spec, seed=seed, when="decode") as handle:
        cache = model(input_ids=prompt[None], use_cache=True, logits_to_keep=1).past_key_values
        plain = DynamicCache()
        for number, layer in enumerate(cache.layers):
            plain.update(layer.keys, layer.values, number)
        ours, stock = model.config._attn_implementation, "sdpa"
        runs = {ours: _Run(model, cache, ours), stock: _Run(model, plain, stock)}
        handle.statistics(reset=True)
        for token, following in zip(ids[-tokens - 1 : -1], ids[-tokens:], strict=True):
            for name, run in runs.items():
                model.config._attn_implementation_internal = name
                run.step(token, following)
            model.config._attn_implementation_internal = ours
        read = handle.statistics().total.share_read

    def typical(seconds: list[float]) -> float:
        return statistics.median(seconds)

    fast, slow = runs[ours], runs[stock]
    return Decoding(
        _method(spec), typical(slow.attention), typical(fast.attention), typical(slow.whole), typical(fast.whole),
        statistics.fmean(slow.loss), statistics.fmean(fast.loss), read,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table to standard output, a row as soon as it is measured."""
    parser = argparse.ArgumentParser(prog="python -m sparing.measure.decode", description=__doc__)
    parser.add_argument("model", choices=("smollm2",))
    parser.add_argument("--methods", help="comma-separated specs; default: multipole and a window")
    parser.add_argument("--context", type=int, default=8192, help="tokens with the continuation")
    parser.add_argument("--tokens", type=int, default=128, help="of the continuation")
    parser.add_argument("--documents", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--text", help="a text file with one document per line; default: Python help topics, joined")
    options = parser.parse_args(arguments)
    from sparing.tasks import smollm2
    from sparing.tasks.text import python_topics

    model, tokenizer = smollm2.load()
    texts = texts_of(options.text) if options.text else ["\n".join(python_topics()[i::3]) for i in range(3)]
    ids = cut(texts, lambda text: tokenizer(text)["input_ids"], options.context, options.documents)
    head = "| method | text | seed | attention | token | perplexity | exact | change | keys read |"
    sys.stdout.write(f"{head}\n|{'---|' * (head.count('|') - 1)}\n")
    for spec in split_specs(options.methods) if options.methods else METHODS:
        for number, text in enumerate(ids):
            for seed in range(options.seeds):
                row = decode(model, text, spec, tokens=options.tokens, seed=seed)
                before, after = torch.tensor([row.exact_loss, row.loss], dtype=torch.float64).exp().tolist()
                read = "-" if row.read is None else f"{row.read * options.context:.0f}"
                sys.stdout.write(
                    f"| `{row.method}` | {number} | {seed} | {row.exact_attention / row.attention:.1f}x "
                    f"| {row.exact_token / row.token:.2f}x | {after:.3f} | {before:.3f} | {after / before - 1:+.2%} "
                    f"| {read} |\n"
                )
                sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
