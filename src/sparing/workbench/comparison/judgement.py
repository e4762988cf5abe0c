"""The words of a verdict, and the requirements that it follows from; few cases may leave a requirement open."""

from __future__ import annotations

import math

from sparing.workbench.comparison.facts import FactCount
from sparing.workbench.estimate import Estimate

FASTER, SLOWER, UNSAFE, ORACLE, REFUSED = "safe and faster", "safe, but slower here", "not safe", "oracle", "refused"
UNKNOWN = "cannot tell"  #: too few cases
VERDICTS = (FASTER, SLOWER, UNKNOWN, UNSAFE, ORACLE, REFUSED)  #: in the order of use
KEPT = 0.9  #: share of the facts that must be kept, by the lower end of the interval

Holds = tuple[bool | None, str]  #: whether a requirement holds (None: too few cases to tell), and why not


def within(change: Estimate, tolerance: float, name: str) -> Holds:
    """Return whether a change is within the tolerance: its whole interval is, or none of it, or one cannot tell."""
    if not math.isfinite(change.mean):
        return False, f"{name} is not finite"
    if change.most is None or change.low is None or change.high is None:
        return None, f"{name}: {change.mean:+.2%} in {change.count} block of tokens, too few for an interval"
    if change.most <= tolerance:
        return True, ""
    if change.low > tolerance or change.high < -tolerance:
        return False, f"{name} {change.mean:+.2%}, at least {min(abs(change.low), abs(change.high)):.2%}"
    return (
        None,
        f"{name} {change.mean:+.2%}, {change.low:+.2%} to {change.high:+.2%} in {change.count} blocks of tokens",
    )


def keeps(facts: FactCount | None, wanted: float) -> Holds:
    """Return whether at least a share `wanted` of the facts that exact attention finds is kept."""
    if facts is None:
        return None, "facts: none fits into so short a context"
    kept = facts.kept
    if not kept.solved:
        return None, f"facts: exact attention finds none of {facts.asked}"
    said = f"{kept.kept} of {kept.solved} facts kept"
    if kept.low >= wanted:
        return True, ""
    if kept.high < wanted:
        return False, f"{said}, {kept.high:.0%} at most"
    return None, f"{said}: {kept.low:.0%} at least, {wanted:.0%} wanted; more cases may tell"
