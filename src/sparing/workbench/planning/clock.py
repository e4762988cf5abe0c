"""Measure the gain of methods and recipes over exact attention: time or memory of a call and of the whole model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparing.contract import Unsupported
from sparing.contract import method as _method
from sparing.models import Subject
from sparing.transformers.recipe import Recipe
from sparing.workbench.calls import Side, exact_side, method_side, middle_calls, samples_values
from sparing.workbench.memory import can_measure, peak_extra_bytes
from sparing.workbench.planning.runs import running
from sparing.workbench.timing import MARGIN, Interval, interval, race, undisturbed

OBJECTIVES = ("time", "memory")
_ROUNDS = 7  # of attention calls
_ROUND = 0.02  # seconds of one side in a round: a short call is repeated, since alone it is noisy
_NOISE = 2**20  # bytes that a peak is uncertain by


class BusyError(OSError):
    """Raised where other programs disturb a measurement of time."""


def check_objective(objective: str) -> None:
    """Raise where the objective is unknown, or cannot be measured on this system."""
    if objective not in OBJECTIVES:
        raise ValueError(f"objective={objective!r} is not one of {', '.join(map(repr, OBJECTIVES))}")
    if objective == "memory" and not can_measure():
        raise ValueError(
            "objective='memory': the peak memory of a call cannot be read on this system; use objective='time'"
        )


def refuse_busy(disturbed: str) -> None:
    """Raise if times were disturbed: a plan would follow from them."""
    if disturbed:
        raise BusyError(
            f"this machine is too busy to time a plan: {disturbed}; run it again when it is idle: other measurements "
            "are kept"
        )


def is_gain(ratio: Interval | None) -> bool:
    """Return whether three rounds of four gained more than noise."""
    return ratio is not None and ratio.low > MARGIN


@torch.no_grad()
def call_gains(subject: Subject, ids: Tensor, specs: Sequence[str], objective: str) -> dict[str, Interval | None]:
    """Return SDPA's time or peak / that of each method, in the middle layer's call for a document [n].

    A method that cannot run there has None.
    """
    calls = middle_calls(subject, [ids], specs)
    if not calls:
        return dict.fromkeys(specs)
    (seen,) = calls
    rivals = {with_values: exact_side(seen, with_values=with_values) for with_values in (False, True)}
    compared = _race if objective == "time" else _peaks
    return {
        spec: compared(rivals[samples_values(_method(spec), seen)], side)
        if _runs(side := method_side(seen, _method(spec)))
        else None
        for spec in specs
    }


@torch.no_grad()
def model_gain(subject: Subject, ids: Tensor, recipe: Recipe, objective: str, rounds: int) -> Interval:
    """Return the exact model's time or peak / that with the recipe, for a document [n], in alternating runs."""
    cost = _seconds if objective == "time" else _peak

    def approximated() -> float:
        with running(subject.model, recipe):
            return cost(run)

    def run() -> object:
        return subject.run(ids)

    def measure() -> tuple[list[float], list[float]]:
        slow, fast = [], []
        for number in range(rounds + 1):
            if number % 2:
                exact, found = cost(run), approximated()
            else:
                found, exact = approximated(), cost(run)
            slow.append(exact)
            fast.append(found)
        return slow[1:], fast[1:]  # the first round warms up

    return _gain(measure, objective)


def _runs(side: Side) -> bool:
    try:
        side()
    except Unsupported:
        return False
    return True


def _race(exact: Side, candidate: Side) -> Interval:
    """Return ratios round by round, since the load of a machine changes from one second to the next."""
    sides = (exact, candidate)
    calls = [max(round(_ROUND / max(_seconds(side), 1e-6)), 1) for side in sides]
    return _gain(lambda: race(sides, [_ROUNDS] * 2, calls), "time")


def _gain(measure: Callable[[], Sequence[Sequence[float]]], objective: str) -> Interval:
    """Return the ratios of two sides, round by round; times must be undisturbed."""
    if objective == "time":
        (slow, fast), disturbed = undisturbed(measure, lambda found: found[0])
        refuse_busy(disturbed)
    else:
        slow, fast = measure()
    return interval([a / b for a, b in zip(slow, fast, strict=True)])


def _peaks(exact: Side, candidate: Side) -> Interval:
    return interval([_peak(exact) / _peak(candidate) for _ in range(_ROUNDS)])


def _peak(call: Side) -> float:
    return float(max(peak_extra_bytes(call) or 0, _NOISE))


def _seconds(call: Side) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
