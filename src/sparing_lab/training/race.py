"""Time training steps with several methods against steps with exact attention.

A step is what `sparing train` does: forward, backward and optimizer. All methods run in turn, in one process, with the
same weights and batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from sparing.workbench.timing import Interval, interval, race
from sparing_lab.training.config import Config
from sparing_lab.training.loop import Training


class StepTimes(NamedTuple):
    """Times of a step at one length."""

    exact: Interval  #: seconds
    ratios: list[Interval]  #: seconds with exact attention / seconds with a method: above 1 the method is faster


def time_steps(config: Config, methods: Sequence[str], *, rounds: int = 5) -> StepTimes:
    """Time steps of a run with each method in place of its own, interleaved with exact attention."""
    if rounds < 1:
        raise ValueError(f"rounds={rounds} must be at least 1")
    runs = [Training(replace(config, method=spec)) for spec in ("exact", *methods)]
    found = race([run.take_step for run in runs], [rounds + 1] * len(runs))
    exact, *others = (times[1:] for times in found)  # the first round warms up
    return StepTimes(
        interval(exact), [interval([a / b for a, b in zip(exact, times, strict=True)]) for times in others]
    )
