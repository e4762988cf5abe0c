"""Exact bounds of a binomial rate."""

from __future__ import annotations

import functools
import math


def upper_bound(violations: int, count: int, confidence: float) -> float:
    """Return the upper bound of Clopper and Pearson for the rate of violations.

    >>> round(upper_bound(0, 29, 0.95), 4), round(upper_bound(2, 61, 0.95), 4)
    (0.0981, 0.0996)
    """
    return rate_of(violations, count, 1 - confidence)


@functools.lru_cache(maxsize=1024)
def rate_of(violations: int, count: int, probability: float) -> float:
    """Return the rate at which at most so many violations have this probability, by bisection, rounded up."""
    if violations >= count:
        return 1.0
    if violations == 0:
        return 1 - probability ** (1 / count)
    low, high = 0.0, 1.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if at_most(violations, count, middle) > probability else (low, middle)
    return high


def at_most(violations: int, count: int, rate: float) -> float:
    """Return the binomial probability of at most so many violations."""
    if not 0 < rate < 1:
        return float(rate <= 0 or violations >= count)
    whole, hit, miss = math.lgamma(count + 1), math.log(rate), math.log1p(-rate)
    return math.fsum(
        math.exp(whole - math.lgamma(k + 1) - math.lgamma(count - k + 1) + k * hit + (count - k) * miss)
        for k in range(violations + 1)
    )
