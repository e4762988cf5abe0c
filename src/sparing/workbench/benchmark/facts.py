"""Figures beside the table: growth of time and memory, and the cost of a step inside a method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from sparing import native
from sparing.contract import Method, method
from sparing.draws import Draws
from sparing.methods.monte_carlo.native import sampled_projection
from sparing.methods.monte_carlo.sampling import Lists, draw_features, feature_law, ragged_product, sampled_product
from sparing.methods.yoso.method import Yoso
from sparing.workbench.benchmark.gate import Gate, excess_error
from sparing.workbench.benchmark.results import BenchSettings, Fact, Pass, Timing
from sparing.workbench.benchmark.workload import clustered, learned_state, method_work
from sparing.workbench.timing import Interval, interval, race, speed_ratio

LONG = 16384
GROWTH_TARGET, MEMORY_TARGET, ENCODE_TARGET = 1.5, 2.0, 1.5
_BITS = 9  # log2 of the shortest default length


def facts(settings: BenchSettings, gates: Sequence[Gate], timings: Sequence[Timing]) -> list[Fact]:
    """Return the facts that the chosen methods and lengths allow, for methods that agree with their reference."""
    passed = {gate.method for gate in gates if gate.passed}
    found = []
    for spec in settings.methods:
        one = method(spec)
        if not isinstance(one, Yoso) or one.expectation or spec not in passed:
            continue
        short, long = settings.lengths[0], max(n for n in settings.lengths if n <= max(LONG, settings.lengths[0]))
        taken = {t.part: t for t in timings if (t.side, t.length) == (spec, long)}
        found.append(_growth(one, settings, short, long, taken.get("forward")))
        found += [_memory_share(one, settings, long, part, taken.get(part)) for part in settings.passes]
    if any(method(spec).name == "monte_carlo" for spec in settings.methods):
        found += [encode_fact(shared) for shared in (True, False)]
    return found


def _growth(one: Yoso, settings: BenchSettings, short: int, long: int, taken: Timing | None) -> Fact:
    fixed = replace(one, bits=one.bits or _BITS)
    name = f"{fixed}: time per token at {long} / at {short}, forward"
    if short == long or taken is None or taken.seconds is None:
        return Fact(name=name, value=None, why=f"it needs two lengths, and a time at {long}")
    target = GROWTH_TARGET if long == LONG else None
    return Fact(name=name, value=per_token_growth(fixed, settings, short, long), at_most=target)


def per_token_growth(one: Method, settings: BenchSettings, short: int, long: int) -> Interval:
    """Return seconds per token at the longer length / at the shorter one, forward, interleaved: 1 is linear."""
    calls = []
    for length in (short, long):
        inputs = clustered(settings.batch, settings.heads, length, settings.width)
        calls.append(method_work(one, inputs, state=learned_state(one, inputs)).call(backward=False))
        calls[-1]()
    repeats = max(long // short // 4, 1)  # the short side must not be lost in the noise
    few, many = race(calls, (5, 5), (repeats, 1))
    return interval([b * short / (a * long) for a, b in zip(few, many, strict=True)])


def _memory_share(one: Method, settings: BenchSettings, length: int, part: Pass, taken: Timing | None) -> Fact:
    name = f"{one}: peak extra memory at {length} / bytes of q, k and v, {part}"
    if taken is None or taken.memory is None:
        return Fact(name=name, value=None, why="its memory was not measured")
    share = taken.memory / (3 * 4 * settings.batch * settings.heads * length * settings.width)
    return Fact(name=name, value=Interval(share, share, share), at_most=MEMORY_TARGET if length == LONG else None)


Encode = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def encode(x: Tensor, weight: Tensor, counts: Tensor, shared: bool) -> Tensor:
    """Return the sampled value projection as `monte_carlo` computes it: x (B, n, d), weight (H e, d) -> (B, H, n, e).

    Every token with fewer samples than features is the sum of r (B, H, n) rows of W.
    """
    lists = _lists(counts, shared)
    if native.ready(x):
        return sampled_projection(x, weight, None, counts, lists)
    w = _by_head(weight, counts)
    return ragged_product(x, w, feature_law(w), counts, lists)


def encode_by_reference(x: Tensor, weight: Tensor, counts: Tensor, shared: bool) -> Tensor:
    """Return the sampled value projection by its specification."""
    w = _by_head(weight, counts)
    law = feature_law(w)
    return sampled_product(x.unsqueeze(1), w, law, draw_features(law, counts, _lists(counts, shared)), counts)


def encode_fact(
    shared: bool, fast: Encode = encode, *, rate: float = 0.2, tokens: int = 512, features: int = 768, heads: int = 12
) -> Fact:
    """Measure seconds of the exact product x W / seconds of `fast`; every token samples `rate` of the features."""
    which = "one list of samples for all tokens" if shared else "a list of samples for each token"
    name = f"monte_carlo, {which}: time of x W / of its estimate (rate {rate:g}, {tokens} tokens, {features} features)"
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, tokens, features, generator=generator)
    weight = torch.randn(features, features, generator=generator) / features**0.5
    counts = torch.full((1, heads, tokens), round(rate * features))
    with torch.no_grad():
        wanted = encode_by_reference(x.double(), weight.double(), counts, shared)
        plain = encode_by_reference(x, weight, counts, shared)
        excess = excess_error(fast(x, weight, counts, shared), plain, wanted)
        if not excess <= 1:
            why = f"differs from its reference: the error is {excess:.2g} times what is allowed"
            return Fact(name=name, value=None, why=why, at_least=ENCODE_TARGET)
        ratio = speed_ratio(lambda: linear(x, weight), lambda: fast(x, weight, counts, shared))
        return Fact(name=name, value=ratio, at_least=ENCODE_TARGET)


def _by_head(weight: Tensor, counts: Tensor) -> Tensor:
    return weight.unflatten(0, (counts.shape[1], -1)).mT  # W (H, d, e)


def _lists(counts: Tensor, shared: bool) -> Lists:
    _, heads, n = counts.shape
    ranks, draws = torch.arange(n).expand(counts.shape), Draws(0, torch.arange(heads))
    return Lists(ranks=ranks, draws=draws, shared=shared, stratified=False)
