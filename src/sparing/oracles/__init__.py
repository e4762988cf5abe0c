"""Yardsticks, not products: the best that a number of keys can do, and what sampling them costs.

The methods `top_keys` (the largest weights), `value_aware` (the best few values) and `sampled` (random keys) compute
exact attention first and then throw most of it away. They say how far a method is from the best possible at its
budget. The functions below are their mathematics, for any weights and values.
"""

from sparing.oracles.convex import caratheodory, ova_objective, value_aware
from sparing.oracles.hash_sampling import bernoulli_weights, one_per_table_weights, union_weights
from sparing.oracles.sampling import Sampled
from sparing.oracles.selection import TopKeys, ValueAware

__all__ = [
    "Sampled",
    "TopKeys",
    "ValueAware",
    "bernoulli_weights",
    "caratheodory",
    "one_per_table_weights",
    "ova_objective",
    "union_weights",
    "value_aware",
]
