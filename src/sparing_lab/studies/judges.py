"""Judges of claims: criteria on figures, and the verdict with its words.

A claim is judged in three steps. A function takes its figures from the rows: numbers or curves by name. A criterion is
a condition on these figures that can be read. A judge holds the figures against what "reproduces" takes, then against
what "same shape" takes, and says what was found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal

from sparing_lab.studies.rows import Rows, power

Verdict = Literal["reproduces", "same shape", "does not", "not run"]
Figures = Any  #: numbers or curves by name, or whatever the criteria of the judge understand


class NotRun(Exception):
    """Raised if there is nothing to judge by: data, weights or a method are missing."""


@dataclass(frozen=True)
class Judgement:
    """The verdict on a claim, with our figures."""

    verdict: Verdict
    ours: str  #: the figures, in few words


@dataclass(frozen=True)
class Criterion:
    """A condition on figures."""

    words: str
    holds: Callable[[Figures], bool]
    test: Callable[[Any], bool] | None = None  #: the test of one figure, if all are tested alike

    def __and__(self, other: Criterion) -> Criterion:
        """Require both."""
        return Criterion(f"{self.words}, and {other.words}", lambda found: self.holds(found) and other.holds(found))

    def of(self, name: Any, where: str = "") -> Criterion:
        """Apply the criterion to one entry of the figures; where: that entry in words."""
        return Criterion(f"{self.words} {where}".strip(), lambda found: self.holds(found[name]))

    def once(self, where: str = "for one") -> Criterion:
        """Require the condition of at least one figure."""
        return self._counted(f"{self.words} {where}", lambda passed: any(passed))

    def mostly(self, where: str = "for most") -> Criterion:
        """Require the condition of more than half of the figures."""
        return self._counted(f"{self.words} {where}", lambda passed: 2 * sum(passed) > len(passed))

    def in_share(self, share: float, where: str) -> Criterion:
        """Require the condition of at least a share of the figures."""
        return self._counted(f"{self.words} {where}", lambda passed: sum(passed) >= share * len(passed))

    def on_average(self) -> Criterion:
        """Require the condition of the mean of the figures."""
        test = self._tested()
        return Criterion(f"{self.words} on average", lambda found: test(fmean(each_of(found))))

    def _counted(self, words: str, enough: Callable[[list[bool]], bool]) -> Criterion:
        test = self._tested()
        return Criterion(words, lambda found: enough([bool(test(each)) for each in each_of(found)]))

    def _tested(self) -> Callable[[Any], bool]:
        if self.test is None:
            raise TypeError(f"criterion {self.words!r} is about all figures together; it cannot be counted")
        return self.test


@dataclass(frozen=True)
class Judge:
    """A function from rows to a verdict and its words."""

    figures: Callable[[Rows], Figures]
    reproduces: Criterion
    same_shape: Criterion | None = None
    shows: str | Callable[[Figures], str] = ""  #: format of each figure, or of all; empty: `described`
    of: str = ""  #: what the criteria are about
    needs: str = ""  #: what is missing if there are no figures

    def __call__(self, rows: Rows) -> Judgement:
        """Judge the claim by these rows."""
        try:
            found = self.figures(rows)
        except NotRun as reason:
            return Judgement("not run", str(reason))
        if self.needs and not found:
            return Judgement("not run", self.needs)
        form = self.shows or described
        ours = listed(found, form) if isinstance(form, str) else form(found)
        if self.reproduces.holds(found):
            return Judgement("reproduces", ours)
        shape = self.same_shape is not None and self.same_shape.holds(found)
        return Judgement("same shape" if shape else "does not", ours)

    @property
    def criterion(self) -> str:
        """Return the criteria of "reproduces" and, if it is a possible verdict, of "same shape", in words."""
        words = self.reproduces.words
        shape = "" if self.same_shape is None else self.same_shape.words.removeprefix(f"{words} ")  # not said twice
        return (f"{self.of}: " if self.of else "") + words + (f"; same shape: {shape}" if shape else "")


def listed(figures: Mapping[Any, Any], form: str, between: str = ", ") -> str:
    """Return all figures in words; form: format of one, with `key` and `value`."""
    return between.join(form.format(key=key, value=value) for key, value in figures.items())


def described(figures: Figures, depth: int = 0) -> str:
    """Return figures in words: numbers by their names, curves by their ends."""
    if isinstance(figures, Mapping):
        if len(figures) > 2 and all(isinstance(key, int | float) for key in figures):
            (first, low), *_, (last, high) = figures.items()
            return f"{low:.3g} at {first:g}, {high:.3g} at {last:g}"
        words = (f"{key} {described(value, depth + 1)}".strip() for key, value in figures.items())
        nested = any(isinstance(value, Mapping) for value in figures.values())
        return ("; " if nested else " / " if depth else ", ").join(words)
    if isinstance(figures, Sequence) and not isinstance(figures, str):
        return " / ".join(described(value, depth + 1) for value in figures)
    return f"{figures:.3g}" if isinstance(figures, float) else str(figures)


def each_of(figures: Figures) -> list[Any]:
    """Return the figures without their names."""
    if isinstance(figures, Mapping):
        return list(figures.values())
    return list(figures) if isinstance(figures, Sequence) else [figures]


def curves_of(figures: Figures) -> list[Any]:
    """Return the curves among figures: each of them, or the figures themselves where these are numbers."""
    found = each_of(figures)
    return found if found and isinstance(found[0], Mapping | Sequence) else [figures]


def each(words: str, test: Callable[[Any], bool]) -> Criterion:
    """Require a condition of every figure."""
    return Criterion(words, lambda found: all(test(one) for one in each_of(found)), test)


def below(limit: float) -> Criterion:
    """Require every figure to be below a limit."""
    return each(f"below {limit:g}", lambda value: value < limit)


def at_most(limit: float, unit: str = "") -> Criterion:
    """Require every figure not to exceed a limit."""
    return each(f"at most {limit:g}{unit}", lambda value: value <= limit)


def above(limit: float) -> Criterion:
    """Require every figure to exceed a limit."""
    return each(f"above {limit:g}", lambda value: value > limit)


def at_least(limit: float, unit: str = "") -> Criterion:
    """Require every figure to reach a limit."""
    return each(f"at least {limit:g}{unit}", lambda value: value >= limit)


def within(low: float, high: float) -> Criterion:
    """Require every figure to lie in a range, ends included."""
    return each(f"{low:.3g} to {high:.3g}", lambda value: low <= value <= high)


def near(paper: Mapping[Any, float] | float, share: float) -> Criterion:
    """Require every figure to be within a share of the paper's (of the one with the same name in a mapping)."""

    def holds(found: Figures) -> bool:
        theirs = paper if isinstance(paper, Mapping) else dict.fromkeys(found, paper)
        return all(abs(value / theirs[key] - 1) <= share for key, value in found.items())

    return Criterion(f"within {share:.0%} of the paper's", holds)


def close(paper: Mapping[Any, float] | float, by: float) -> Criterion:
    """Require every figure to differ from the paper's by at most that much."""

    def holds(found: Figures) -> bool:
        theirs = paper if isinstance(paper, Mapping) else dict.fromkeys(found, paper)
        return all(abs(value - theirs[key]) <= by for key, value in found.items())

    return Criterion(f"within {by:g} of the paper's", holds)


def falls(over: str = "", room: float = 0.0) -> Criterion:
    """Require every curve to fall at each step; with room for noise, not to rise by more than that."""
    return _steps("falls", over, room, lambda earlier, later: later < earlier if not room else later <= earlier + room)


def rises(over: str = "", room: float = 0.0) -> Criterion:
    """Require every curve to rise at each step; with room for noise, not to fall by more than that."""
    return _steps("rises", over, room, lambda earlier, later: later > earlier if not room else later >= earlier - room)


def _steps(verb: str, over: str, room: float, step: Callable[[float, float], bool]) -> Criterion:
    def holds(found: Figures) -> bool:
        return all(step(*pair) for one in curves_of(found) for pair in pairwise(each_of(one)))

    noise = f" (up to {room:g} of noise)" if room else ""
    return Criterion(f"{verb} at each step{f' of {over}' if over else ''}{noise}", holds)


def exponent(low: float, high: float) -> Criterion:
    """Require every curve to follow a power of x between two exponents."""

    def holds(found: Figures) -> bool:
        return all(low <= power(one) <= high for one in curves_of(found))

    return Criterion(f"as a power of {low:g} to {high:g}", holds)


def ahead(
    side: Any, of: Sequence[Any] | None = None, at: Any = None, by: float = 0.0, *, higher: bool = False
) -> Criterion:
    """Require a side's figure to be below all others', or above where higher is better.

    of: the others; None: all sides but this one. at: the x to compare at, if figures are curves. by: margin.
    """

    def holds(found: Figures) -> bool:
        values = {key: value if at is None else value[at] for key, value in found.items()}
        others = [key for key in values if key != side] if of is None else of
        sign = 1 if higher else -1
        return all(sign * (values[side] - values[other]) > by for other in others)

    rivals = "all others" if of is None else " and ".join(map(str, of))
    words = f"{side} {'above' if higher else 'below'} {rivals}" + ("" if at is None else f" at {at}")
    return Criterion(words + (f" by more than {by:g}" if by else ""), holds)
