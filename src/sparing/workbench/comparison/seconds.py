"""Measure the speed and memory of a method in a model against exact SDPA: of attention calls and of whole runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from sparing.contract import Method
from sparing.contract import method as _method
from sparing.models import Subject
from sparing.transformers.handle import approximate
from sparing.transformers.watch import approximate_prompts, record_calls
from sparing.workbench.calls import exact_side, method_side, samples_values
from sparing.workbench.memory import peak_extra_bytes
from sparing.workbench.timing import Interval, interval, speed_ratio, undisturbed


@dataclass(frozen=True)
class Seconds:
    """Speed ratios (above 1 is faster), and the peak memory of a run of the model in bytes."""

    attention: Interval | None  #: time of SDPA / time of the method in the middle layer; None for oracles
    model: Interval | None  #: time of the exact model / time with the method in all layers
    exact_model: float  #: seconds of the exact model
    bytes: int | None
    exact_bytes: int | None
    batched: Interval | None = None  #: as `model`, for a batch of documents that are padded to one length
    disturbed: str = ""  #: by what, if the times say nothing


@torch.no_grad()
def seconds(
    subject: Subject,
    ids: Tensor,
    what: str | Method,
    *,
    seed: int = 0,
    rounds: int = 5,
    batch: Sequence[Tensor] = (),
) -> Seconds:
    """Time one document [n], unpadded, and a batch, if there is one; exact and approximated runs alternate."""
    method = _method(what)
    if method.oracle:
        return Seconds(None, None, _alone(lambda: subject.run(ids)), None, None)
    seen = record_calls(subject.model, method, lambda: subject.run(ids), seed=seed)

    def measure() -> tuple[Interval | None, list[float], list[float], Interval | None]:
        found = None
        if seen:
            middle = seen[len(seen) // 2]
            exact = exact_side(middle, with_values=samples_values(method, middle))
            found = speed_ratio(exact, method_side(middle, method), rounds=2 * rounds)
        slow, fast = _in_turn(subject, lambda: subject.run(ids), method, seed, rounds)
        batched = None
        if batch:
            batched = _ratios(*_in_turn(subject, lambda: subject.run_batch(batch), method, seed, min(rounds, 3)))
        return found, slow, fast, batched

    (found, slow, fast, batched), disturbed = undisturbed(measure, lambda parts: parts[1])
    exact_bytes = peak_extra_bytes(lambda: subject.run(ids))
    with approximate_prompts(subject.model, method, seed=seed):
        taken = peak_extra_bytes(lambda: subject.run(ids))
    return Seconds(found, _ratios(slow, fast), interval(slow).median, taken, exact_bytes, batched, disturbed)


@dataclass(frozen=True)
class PaddingSeconds:
    """What the padding of a batch costs: a speed ratio of the exact model."""

    speed: Interval  #: time of the padded batch / time without padding
    disturbed: str = ""  #: by what, if the times say nothing


@torch.no_grad()
def padding_seconds(subject: Subject, batch: Sequence[Tensor], *, rounds: int = 5) -> PaddingSeconds:
    """Time a batch with exact attention, padded and without padding in turn; raise where padding cannot be removed."""

    def measure() -> tuple[list[float], list[float]]:
        return _race(
            lambda: subject.run_batch(batch), lambda: approximate(subject.model, "exact", padding="remove"), rounds
        )

    (slow, fast), disturbed = undisturbed(measure, lambda parts: parts[0])
    return PaddingSeconds(_ratios(slow, fast), disturbed)


def _in_turn(
    subject: Subject, run: Callable[[], object], method: Method, seed: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Return seconds of the exact and of the approximated model, round by round, in alternating order."""
    return _race(run, lambda: approximate_prompts(subject.model, method, seed=seed), rounds)


def _race(
    run: Callable[[], object], changed: Callable[[], AbstractContextManager[object]], rounds: int
) -> tuple[list[float], list[float]]:
    """Return seconds of a run, and of it while a model is changed, round by round, in alternating order."""

    def approximated() -> float:
        with changed():
            return _alone(run)

    slow: list[float] = []
    fast: list[float] = []
    for number in range(rounds + 1):
        sides: list[Callable[[], None]] = [
            lambda: slow.append(_alone(run)),
            lambda: fast.append(approximated()),
        ]
        for side in sides if number % 2 else reversed(sides):
            side()
    return slow[1:], fast[1:]  # the first round warms up


def _ratios(slow: Sequence[float], fast: Sequence[float]) -> Interval:
    return interval([a / b for a, b in zip(slow, fast, strict=True)])


def _alone(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
