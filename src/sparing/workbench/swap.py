"""What a method swapped into every layer does to the end of a model: `python -m sparing.workbench.swap minilm`."""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparing.contract import Method
from sparing.contract import method as _method
from sparing.models import minilm, smollm2
from sparing.sample_text import python_topics
from sparing.spec import split_specs
from sparing.transformers import approximate

#: Three budgets of every method that is meant for pretrained weights, and the settings of its paper.
ENCODER = (
    "window(size=64)", "window(size=128)", "window(size=256)",
    "window(size=64, sinks=1)", "window(size=128, sinks=1)", "window(size=256, sinks=1)",
    "nystrom(landmarks=16)", "nystrom(landmarks=64)", "nystrom(landmarks=128)",
    "lsh(rounds=4, chunk=16)", "lsh(rounds=4, chunk=32)", "lsh(rounds=4, chunk=64)",
    "multipole(clusters=32, keys=32, window=16)", "multipole(clusters=64, keys=76, window=16)",
    "multipole(clusters=64, keys=160, window=16)",
    "random_features(features=64)", "random_features(features=256)", "random_features(features=1024)",
    "monte_carlo(alpha=0.1)", "monte_carlo(alpha=0.2)", "monte_carlo(alpha=0.4)",
    "monte_carlo(alpha=0.1, samples=shared)", "monte_carlo(alpha=0.2, samples=shared)",
    "monte_carlo(alpha=0.4, samples=shared)",
    "monte_carlo(alpha=0.1, estimator=mean)", "monte_carlo(alpha=0.2, estimator=mean)",
    "monte_carlo(alpha=0.4, estimator=mean)",
    "top_keys(keys=8)", "top_keys(keys=16)", "top_keys(keys=64)",
    "value_aware(keys=4)", "value_aware(keys=8)", "value_aware(keys=16)",
    "sampled(samples=16)", "sampled(samples=64)", "sampled(samples=256)",
)  # fmt: skip

#: A causal window of `size` shows `size` earlier keys.
DECODER = (
    "window(size=256)", "window(size=512)", "window(size=1024)",
    "window(size=256, sinks=4)", "window(size=512, sinks=4)", "window(size=1024, sinks=4)",
    "multipole(clusters=16, keys=200, window=0, sinks=4, cap=8.0, steps=6, tolerance=0.02)",
    "multipole(clusters=32, keys=300, window=0, sinks=4, cap=8.0, steps=6, tolerance=0.0036)",
    "multipole(clusters=48, keys=600, window=0, sinks=4, cap=8.0, steps=6, tolerance=0.0008)",
    "top_keys(keys=8)", "top_keys(keys=16)", "top_keys(keys=32)", "top_keys(keys=65)",
    "value_aware(keys=8)", "value_aware(keys=16)", "value_aware(keys=32)", "value_aware(keys=65)",
)  # fmt: skip


class Swap(NamedTuple):
    """One method in all layers."""

    method: Method
    mean: float  #: cosine of the embeddings, or perplexity
    worst: float  #: the worst document and seed
    read: float | None = None  #: keys and summaries that a query read on average
    each: tuple[float, ...] = ()  #: every document, then every document of the next seed


@torch.no_grad()
def embeddings(model: Any, ids: Tensor) -> Tensor:
    """The mean of the last hidden states of unpadded texts [documents, n], one text at a time."""
    return torch.cat([model(input_ids=one[None]).last_hidden_state.mean(1) for one in ids])


@torch.no_grad()
def perplexity(model: Any, ids: Tensor) -> Tensor:
    """exp of the mean negative log-likelihood of the next token, for each text of [documents, n]."""
    return torch.stack([model(input_ids=one[None], labels=one[None], use_cache=False).loss.exp() for one in ids])


def swap(model: Any, ids: Tensor, specs: Iterable[str | Method], *, decoder: bool, seeds: int = 1) -> Iterator[Swap]:
    """Each method in turn, with so many seeds; `exact` comes first."""
    before = None if decoder else embeddings(model, ids)
    for spec in ("exact", *specs):
        chosen = _method(spec)
        runs = range(seeds if chosen.supports.stochastic else 1)
        parts = [_swapped(model, ids, chosen, seed, before) for seed in runs]
        found, read = torch.cat([part for part, _ in parts]), parts[0][1]
        each = tuple(found.tolist())
        if decoder:
            yield Swap(chosen, float(found.log().mean().exp()), float(found.max()), read, each)
        else:
            yield Swap(chosen, float(found.mean()), float(found.min()), read, each)


def _swapped(model: Any, ids: Tensor, method: Method, seed: int, before: Tensor | None) -> tuple[Tensor, float | None]:
    """Perplexities, or cosines with the embeddings `before`, of the documents, and the keys that were read."""

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*needs further training")
        handle = approximate(model, method, seed=seed)
    with handle:
        if before is None:
            found = perplexity(model, ids)
        else:
            found = torch.nn.functional.cosine_similarity(embeddings(model, ids), before)
        return found, handle.statistics().total.keys_read


def texts_of(paths: Sequence[str]) -> list[str]:
    """The documents of one text file, one per line, or of several files, one each."""
    found = [Path(path).read_text(encoding="utf-8") for path in paths]
    if len(found) > 1:
        return found
    return [line.strip() for line in found[0].splitlines() if line.strip()]


def cut(texts: Iterable[str], encode: Callable[[str], Sequence[int]], length: int, documents: int) -> Tensor:
    """[documents, length] token ids of the first texts that are long enough."""
    rows: list[list[int]] = []
    for text in texts:
        ids = list(encode(text))
        if len(ids) >= length:
            rows.append(ids[:length])
        if len(rows) == documents:
            return torch.tensor(rows)
    raise ValueError(f"only {len(rows)} texts have {length} tokens; ask for fewer documents than {documents}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table to standard output, a row as soon as it is measured."""
    parser = argparse.ArgumentParser(prog="python -m sparing.workbench.swap", description=__doc__)
    parser.add_argument("model", choices=("minilm", "smollm2"))
    parser.add_argument(
        "--methods", help="comma-separated specs; default: every training-free method, or windows and oracles"
    )
    parser.add_argument("--length", type=int, help="tokens per document; default: 512 for minilm, 2048 for smollm2")
    parser.add_argument("--documents", type=int, help="default: 8 for minilm, 1 for smollm2")
    parser.add_argument("--seeds", type=int, default=1, help="of methods that draw random numbers")
    parser.add_argument(
        "--text",
        nargs="+",
        help="a text file with one document per line, or several files; default: Python help topics",
    )
    options = parser.parse_args(arguments)

    decoder = options.model == "smollm2"
    model, tokenizer = smollm2.load() if decoder else minilm.load()
    length = options.length or (2048 if decoder else 512)
    texts = texts_of(options.text) if options.text else python_topics()
    limit = {} if decoder else {"truncation": True, "max_length": length}
    ids = cut(
        texts, lambda text: tokenizer(text, **limit)["input_ids"], length, options.documents or (1 if decoder else 8)
    )
    specs = split_specs(options.methods) if options.methods else DECODER if decoder else ENCODER
    unit = "perplexity" if decoder else "cosine"
    change = (" change | by document |", "---|---|") if decoder else ("", "")
    sys.stdout.write(f"| method | keys read | {unit} | worst |{change[0]}\n|---|---|---|---|{change[1]}\n")
    exact: tuple[float, ...] = ()
    for row in swap(model, ids, specs, decoder=decoder, seeds=options.seeds):
        exact = exact or row.each
        digits = 2 if decoder or math.isnan(row.mean) else 4
        read = "-" if row.read is None else f"{row.read:.0f}"
        sys.stdout.write(f"| `{row.method}` | {read} | {row.mean:.{digits}f} | {row.worst:.{digits}f} |")
        if decoder:  # against the exact model, document by document
            changes = [100 * (x / y - 1) for x, y in zip(row.each, exact * (len(row.each) // len(exact)), strict=True)]
            mean = sum(changes) / len(changes)
            sys.stdout.write(f" {mean:+.2f} % | {' '.join(f'{x:+.2f}' for x in changes)} |")
        sys.stdout.write("\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
