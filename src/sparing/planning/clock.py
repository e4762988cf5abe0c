"""What a recipe gains here: time or memory of attention calls, and of the whole model, against exact attention."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sparing.attention import attention
from sparing.measure.crossover import MARGIN
from sparing.measure.memory import can_measure, peak_extra_bytes
from sparing.measure.timing import Interval, interval, race
from sparing.method import Projection, Unsupported
from sparing.method import method as _method
from sparing.planning.runs import running
from sparing.tasks.subject import Subject
from sparing.transformers.recipe import Recipe
from sparing.transformers.watch import Seen, rehearse

OBJECTIVES = ("time", "memory")
_ROUNDS = 7  # of attention calls
_ROUND = 0.02  # seconds of one side, in as many calls as that takes: short calls meet too much noise alone
_NOISE = 2**20  # bytes that a peak is uncertain by

Side = Callable[[], object]


def check_objective(objective: str) -> None:
    """Raise where it is not known, or cannot be measured here."""
    if objective not in OBJECTIVES:
        raise ValueError(f"objective={objective!r} is not one of {', '.join(map(repr, OBJECTIVES))}")
    if objective == "memory" and not can_measure():
        raise ValueError("objective='memory': this system does not tell the peak of a call; use objective='time'")


def is_gain(ratio: Interval | None) -> bool:
    """Whether three rounds of four saw more than noise."""
    return ratio is not None and ratio.low > MARGIN


@torch.no_grad()
def call_gains(subject: Subject, ids: Tensor, specs: Sequence[str], objective: str) -> dict[str, Interval | None]:
    """SDPA's time or peak over each method's, in a call of the middle layer for a document [n]; None: it cannot run."""
    seen = _middle(subject, ids, specs)
    if seen is None:
        return dict.fromkeys(specs)
    rivals = {whole: _sdpa(seen, whole=whole) for whole in (False, True)}
    compared = _race if objective == "time" else _peaks
    return {
        spec: compared(rivals[_by_value(seen, spec)], side) if _runs(side := _candidate(seen, spec)) else None
        for spec in specs
    }


@torch.no_grad()
def model_gain(subject: Subject, ids: Tensor, recipe: Recipe, objective: str, rounds: int) -> Interval:
    """The exact model's time or peak over the recipe's, for a document [n], in turn: both meet the same noise."""
    cost = _seconds if objective == "time" else _peak

    def approximated() -> float:
        with running(subject.model, recipe):
            return cost(run)

    def run() -> object:
        return subject.run(ids)

    ratios = []
    for number in range(rounds + 1):
        if number % 2:
            exact, found = cost(run), approximated()
        else:
            found, exact = approximated(), cost(run)
        ratios.append(exact / found)
    return interval(ratios[1:])  # the first round warms up


def _middle(subject: Subject, ids: Tensor, specs: Sequence[str]) -> Seen | None:
    """What the middle layer is given, of those that can run a method."""
    # A method on the value layer is shown that layer's input, which serves the others, too.
    for spec in sorted(specs, key=lambda spec: not _method(spec).supports.projection):
        seen: list[Seen] = []
        try:
            with rehearse(subject.model, spec, seen.append):
                subject.run(ids)
        except Unsupported:
            continue
        if seen:
            return seen[len(seen) // 2]
    return None


def _by_value(seen: Seen, spec: str) -> bool:
    """Whether the method does the work of the values' linear layer, too, so that its rival must."""
    return _method(spec).supports.projection and isinstance(seen.value, Projection)


def _candidate(seen: Seen, spec: str) -> Side:
    value = seen.value if _by_value(seen, spec) else seen.projected
    call = {**seen.call, "method": _method(spec)}
    return lambda: attention(seen.query, seen.key, value, **call)


def _sdpa(seen: Seen, *, whole: bool) -> Side:
    mask, ready = seen.call["attn_mask"], seen.projected
    return lambda: scaled_dot_product_attention(
        seen.query, seen.key, seen.projected if whole else ready, attn_mask=mask,
        is_causal=seen.call["is_causal"] and mask is None, scale=seen.call["scale"],
        enable_gqa=seen.call["enable_gqa"],
    )  # fmt: skip


def _runs(side: Side) -> bool:
    try:
        side()
    except Unsupported:
        return False
    return True


def _race(exact: Side, candidate: Side) -> Interval:
    """Pair by pair: the load of a machine changes from one second to the next."""
    sides = (exact, candidate)
    calls = [max(round(_ROUND / max(_seconds(side), 1e-6)), 1) for side in sides]
    slow, fast = race(sides, [_ROUNDS] * 2, calls)
    return interval([a / b for a, b in zip(slow, fast, strict=True)])


def _peaks(exact: Side, candidate: Side) -> Interval:
    return interval([_peak(exact) / _peak(candidate) for _ in range(_ROUNDS)])


def _peak(call: Side) -> float:
    return float(max(peak_extra_bytes(call) or 0, _NOISE))


def _seconds(call: Side) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
