"""The words of a verdict, and the requirements that it follows from; few cases may leave a requirement open."""

from __future__ import annotations

import math
from dataclasses import replace

from sparing.workbench.comparison.facts import FactCount
from sparing.workbench.estimate import Estimate
from sparing.workbench.timing import MARGIN, Interval

FASTER, SLOWER, UNSAFE, ORACLE, REFUSED = "safe and faster", "safe, but slower here", "not safe", "oracle", "refused"
UNTIMED = "safe, not timed"  #: other programs disturbed the times
UNKNOWN = "cannot tell"  #: too few cases
VERDICTS = (FASTER, SLOWER, UNTIMED, UNKNOWN, UNSAFE, ORACLE, REFUSED)  #: in the order of use
KEPT = 0.9  #: share of the facts that must be kept, by the lower end of the interval

Holds = tuple[bool | None, str]  #: whether a requirement holds (None: too few cases to tell), and why not


def is_faster(speed: Interval | None, disturbed: str) -> bool:
    """Return whether three rounds of four were faster by more than noise. disturbed: by what, if times say nothing."""
    return speed is not None and not disturbed and speed.low > MARGIN


def timed_verdict(faster: bool, disturbed: str) -> tuple[str, str]:
    """Return the verdict of what is safe, and why it was not timed. disturbed: by what, if times say nothing."""
    if disturbed:
        return UNTIMED, f"this machine is too busy to time it: {disturbed}"
    return (FASTER if faster else SLOWER), ""


def within(change: Estimate, tolerance: float, name: str, case: str = "block of tokens") -> Holds:
    """Return whether a change is within the tolerance: its whole interval is, or none of it, or one cannot tell.

    case: what the change is a mean of.
    """
    cases = f"{change.count} {case if change.count == 1 else plural(case)}"
    if not math.isfinite(change.mean):
        return False, f"{name} is not finite"
    if change.most is None or change.low is None or change.high is None:
        return None, f"{name} {change.mean:+.2%} in {cases}, too few for an interval"
    if math.isnan(change.most):
        return False, f"{name} is not finite"
    if change.most <= tolerance:
        return True, ""
    if change.low > tolerance or change.high < -tolerance:
        return False, f"{name} {change.mean:+.2%}, at least {min(abs(change.low), abs(change.high)):.2%}"
    wanted = enough(change, tolerance)
    more = "" if wanted is None else f"; about {wanted:,} would do"
    return None, f"{name} {change.mean:+.2%}, {change.low:+.2%} to {change.high:+.2%} in {cases}{more}"


def plural(case: str) -> str:
    """Return the plural of a case, of which the first word counts.

    >>> plural("block of tokens")
    'blocks of tokens'
    """
    first, *others = case.split(" ")
    return " ".join([f"{first}s", *others])


def enough(change: Estimate, tolerance: float) -> int | None:
    """Return about how many cases would tell whether such a change is within the tolerance, if not more than a million.

    An interval shrinks with the square root of their number; that of a count of which none happened, with the number.

    >>> enough(Estimate(0.005, -0.005, 0.015, 8), 0.01), enough(Estimate(0.0, 0.0, 0.37, 8), 0.01)
    (32, 300)
    """
    assert change.low is not None
    assert change.high is not None
    room, reach = abs(abs(change.mean) - tolerance), max(change.high - change.mean, change.mean - change.low)
    if room == 0:
        return None
    wanted = change.count * (reach / room) ** (1 if change.mean == change.low == 0 else 2)
    if not wanted < 1e6:
        return None
    digits = max(len(str(math.ceil(wanted))) - 2, 0)
    return math.ceil(wanted / 10**digits) * 10**digits


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
    wanted_contexts = enough(replace(facts.lost, count=facts.contexts), 1 - wanted)
    more = "more" if wanted_contexts is None else f"about {wanted_contexts:,}"
    return None, f"{said}: {kept.low:.0%} at least, {wanted:.0%} wanted; {more} contexts (--facts) may tell"
