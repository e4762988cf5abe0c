"""How far along a path a promise holds: chosen on calibration documents, checked on others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sparing.workbench.planning.promise import Promise

Changes = Callable[[int], Sequence[float]]  #: of a step of the path, what happens to each document


@dataclass(frozen=True)
class StepFigures:
    """What documents say about one step."""

    step: int
    documents: int
    violations: int  #: documents beyond the tolerance
    most: float  #: the share of such documents beyond it at most, with the confidence of the promise
    mean: float  #: of the changes, without their signs
    worst: float


def figures(step: int, changes: Sequence[float], promise: Promise) -> StepFigures:
    """The changes of some documents, summed up."""
    sizes = [abs(change) for change in changes]
    worst = max(sizes, key=lambda size: (size != size, size))  # what is no number is worst
    return StepFigures(
        step, len(sizes), promise.violations(sizes), promise.most(sizes), sum(sizes) / len(sizes), worst
    )  # fmt: skip


def farthest(steps: int, changes: Changes, promise: Promise, held_out: int) -> int:
    """The farthest step, of 0 to `steps`, that is likely to keep the promise, by bisection; 0: none but exact.

    changes: of the calibration documents. A later step is taken to do no less damage.
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
    """The step that held-out documents allow: this one, the one half as far, or 0; and what they said of each.

    changes: of the held-out documents. Both steps were chosen without them. The safer one is tested first, and the
    other only if that one held: tests in an order that is fixed beforehand, each at full level, promise too much with
    no more than that probability in all (the first that is wrong must slip through before any later one matters).
    """
    held, found = 0, []
    for each in sorted({step // 2, step} - {0}):
        seen = changes(each)
        found.append(figures(each, seen, promise))
        if not promise.kept(seen):
            break
        held = each
    return held, tuple(found)
