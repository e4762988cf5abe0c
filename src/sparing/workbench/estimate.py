"""Means and other statistics with 95 % intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sparing.workbench.binomial import upper_bound

T = TypeVar("T")


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval; the ends are None where a single number allows none."""

    mean: float
    low: float | None
    high: float | None
    count: int

    @property
    def most(self) -> float | None:
        """How far from zero the interval reaches."""
        if self.low is None or self.high is None:
            return None
        ends = (abs(self.low), abs(self.high))
        return math.nan if any(map(math.isnan, ends)) else max(ends)


def estimate(values: Sequence[float], *, level: float = 0.95) -> Estimate:
    """Return the mean of independent measurements, such as one for each document, with Student's interval.

    >>> estimate([1.0, 2.0, 3.0]).high
    4.484...
    """
    if not values:
        raise ValueError("values is empty; pass at least one number")
    mean = statistics.fmean(values)
    if len(values) == 1 or not all(map(math.isfinite, values)):
        return Estimate(mean, None, None, len(values))
    half = student((1 + level) / 2, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half, len(values))


def proportion(happened: float, count: int, *, level: float = 0.95) -> Estimate:
    """Return a rate with the interval of Clopper and Pearson, which is wide for few documents that all agree.

    >>> round(proportion(0, 4).high, 2)
    0.6
    """
    if not math.isfinite(happened):
        return Estimate(math.nan, None, None, count)
    tail = (1 + level) / 2
    low = 1 - upper_bound(count - math.floor(happened), count, tail)
    return Estimate(happened / count, low, upper_bound(math.ceil(happened), count, tail), count)


def jackknife(statistic: Callable[[Sequence[T]], float], items: Sequence[T]) -> Estimate:
    """Return a statistic of all items with its jackknife interval; for a mean that is the interval of `estimate`.

    >>> jackknife(lambda some: sum(some) / len(some), [1.0, 2.0, 3.0]).high
    4.484...
    """
    whole, count = statistic(items), len(items)
    if count < 2:
        return Estimate(whole, None, None, count)
    parts = [statistic([*items[:i], *items[i + 1 :]]) for i in range(count)]
    pseudo = estimate([count * whole - (count - 1) * part for part in parts])
    if pseudo.low is None or pseudo.high is None:
        return Estimate(whole, None, None, count)
    half = (pseudo.high - pseudo.low) / 2
    return Estimate(whole, whole - half, whole + half, count)


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the p of y ~ x^p that fits best: the slope of log y against log x.

    >>> exponent([1.0, 2.0, 4.0], [3.0, 12.0, 48.0])
    2.0
    """
    return statistics.linear_regression([math.log(each) for each in x], [math.log(each) for each in y]).slope


def student(probability: float, freedom: int) -> float:
    """Return the quantile of Student's distribution, by bisection of its distribution function."""
    low, high = 0.0, 1.0
    while _below(high, freedom) < probability:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _below(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def _below(t: float, freedom: int) -> float:
    """Return P(T <= t) for t >= 0, by the finite series in the angle, Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    term = total = cosine if freedom % 2 else 1.0
    start = 3 if freedom % 2 else 2
    for k in range(start, freedom - 1, 2):
        term *= (k - 1) / k * cosine * cosine
        total += term
    if freedom % 2 == 0:
        return 0.5 + sine * total / 2
    return 0.5 + (angle + (sine * total if freedom > 1 else 0.0)) / math.pi
