"""Figures beside the table: how time and memory grow, and what a step inside a method costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparing.draws import Draws
from sparing.maths.sampling import draw_features, feature_law, ragged_product, sampled_product
from sparing.measure.gate import Gate, excess_error
from sparing.measure.results import Fact, Settings, Timing
from sparing.measure.timing import Interval, interval, race, speed_ratio
from sparing.measure.workload import clustered, learned_state, method_work
from sparing.method import Method, method
from sparing.methods.yoso import Yoso

LONG = 16384
_BITS = 9  # log2 of the shortest default length


def facts(settings: Settings, gates: Sequence[Gate], timings: Sequence[Timing]) -> list[Fact]:
    """Those that the chosen methods and lengths allow, for methods that agree with their reference."""
    passed = {gate.method for gate in gates if gate.passed}
    found = []
    for spec in settings.methods:
        one = method(spec)
        if not isinstance(one, Yoso) or one.expectation or spec not in passed:
            continue
        short, long = settings.lengths[0], max(n for n in settings.lengths if n <= max(LONG, settings.lengths[0]))
        taken = next((t for t in timings if (t.side, t.length, t.part) == (spec, long, "forward")), None)
        found += [_growth(one, settings, short, long, taken), _memory_share(one, settings, long, taken)]
    if any(method(spec).name == "monte_carlo" for spec in settings.methods):
        found.append(encode_fact())
    return found


def _growth(one: Yoso, settings: Settings, short: int, long: int, taken: Timing | None) -> Fact:
    fixed = replace(one, bits=one.bits or _BITS)
    name = f"{fixed}: time per token at {long} / at {short}, forward"
    if short == long or taken is None or taken.seconds is None:
        return Fact(name=name, value=None, why=f"it needs two lengths, and a time at {long}")
    return Fact(name=name, value=per_token_growth(fixed, settings, short, long), unit="x")


def per_token_growth(one: Method, settings: Settings, short: int, long: int) -> Interval:
    """Seconds per token at the longer length / at the shorter one, forward, rounds interleaved: 1 is linear."""
    calls = []
    for length in (short, long):
        inputs = clustered(settings.batch, settings.heads, length, settings.width)
        calls.append(method_work(one, inputs, state=learned_state(one, inputs)).call(backward=False))
        calls[-1]()
    repeats = max(long // short // 4, 1)  # the short side must not be lost in the noise
    few, many = race(calls, (5, 5), (repeats, 1))
    return interval([b * short / (a * long) for a, b in zip(few, many, strict=True)])


def _memory_share(one: Method, settings: Settings, length: int, taken: Timing | None) -> Fact:
    name = f"{one}: peak extra memory at {length} / bytes of q, k and v, forward"
    if taken is None or taken.memory is None:
        return Fact(name=name, value=None, why="its memory was not measured")
    share = taken.memory / (3 * 4 * settings.batch * settings.heads * length * settings.width)
    return Fact(name=name, value=Interval(share, share, share), unit="x")


Encode = Callable[[Tensor, Tensor, Tensor], Tensor]


def encode(x: Tensor, w: Tensor, counts: Tensor) -> Tensor:
    """The sampled value projection as `monte_carlo` computes it: x (B, n, d), w (H, d, e), r (B, H, n) -> (B, H, n, e).

    Every token with fewer samples than features is the sum of r rows of w.
    """
    return ragged_product(x, w, feature_law(w), counts, **_lists(counts), shared=False, stratified=False)


def encode_by_reference(x: Tensor, w: Tensor, counts: Tensor) -> Tensor:
    """The same by its specification."""
    law = feature_law(w)
    picks = draw_features(law, counts, **_lists(counts), shared=False, stratified=False)
    return sampled_product(x.unsqueeze(1), w, law, picks, counts)


def encode_fact(
    fast: Encode = encode, *, rate: float = 0.2, tokens: int = 512, features: int = 768, heads: int = 12
) -> Fact:
    """Seconds of the exact product x W / seconds of `fast`, where every token samples `rate` of the features."""
    name = f"monte_carlo: x W / its sampled estimate, time (rate {rate:g}, {tokens} tokens, {features} features)"
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, tokens, features, generator=generator)
    w = torch.randn(heads, features, features // heads, generator=generator) / features**0.5
    whole = w.transpose(0, 1).flatten(1).contiguous()  # one product for all heads, as a linear layer has it
    counts = torch.full((1, heads, tokens), round(rate * features))
    with torch.no_grad():
        wanted = encode_by_reference(x.double(), w.double(), counts)
        excess = excess_error(fast(x, w, counts), encode_by_reference(x, w, counts), wanted)
        if not excess <= 1:
            why = f"differs from its reference: the error is {excess:.2g} times what is allowed"
            return Fact(name=name, value=None, why=why)
        return Fact(name=name, value=speed_ratio(lambda: x @ whole, lambda: fast(x, w, counts)), unit="x")


def _lists(counts: Tensor) -> dict[str, Any]:
    _, heads, n = counts.shape
    return {"ranks": torch.arange(n).expand(counts.shape), "draws": Draws(0, torch.arange(heads))}
