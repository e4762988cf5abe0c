"""Find how far along a path a promise holds: choose on calibration documents, check on held-out ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sparing.workbench.planning.promise import Promise

Changes = Callable[[int], Sequence[float]]  #: step of the path -> the change of each document


@dataclass(frozen=True)
class StepFigures:
    """The changes of some documents at one step of the path."""

    step: int
    documents: int
    violations: int  #: documents beyond the tolerance
    most: float  #: upper bound of the share of such documents beyond it, at the confidence of the promise
    mean: float  #: of the changes, without their signs
    worst: float


def figures(step: int, changes: Sequence[float], promise: Promise) -> StepFigures:
    """Summarise the changes of some documents."""
    sizes = [abs(change) for change in changes]
    worst = max(sizes, key=lambda size: (size != size, size))  # NaN is worst
    return StepFigures(
        step, len(sizes), promise.violations(sizes), promise.most(sizes), sum(sizes) / len(sizes), worst
    )  # fmt: skip


def farthest(steps: int, changes: Changes, promise: Promise, held_out: int) -> int:
    """Return the farthest step, of 0 to `steps`, that is likely to keep the promise, by bisection; 0 is exact.

    changes: of the calibration documents. A later step is assumed to do no less damage.
    """
    low, high = 0, steps
    while low < high:
        middle = (low + high + 1) // 2
        if promise.likely(changes(middle), held_out):
            low = middle
        else:
            high = middle - 1
    return low


def check(step: int, changes: Changes, promise: Promise) -> tuple[int, tuple[StepFigures, ...]]:
    """Return the step that held-out documents allow (this one, the one half as far, or 0), and the figures of each.

    changes: of the held-out documents, without which both steps were chosen. The safer step is tested first, and the
    other only if the first held. Tests in a fixed order, each at full level, keep that level in all, since the first
    wrong step must pass before any later one matters.
    """
    held, found = 0, []
    for each in sorted({step // 2, step} - {0}):
        seen = changes(each)
        found.append(figures(each, seen, promise))
        if not promise.kept(seen):
            break
        held = each
    return held, tuple(found)
