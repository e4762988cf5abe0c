"""Importance sampling by hash collisions: what YOSO's Bernoulli sampling stands against (Zeng et al. 2021, section 3).

Each function returns random weights with mean `weights`, p, from the collisions of queries and keys in m hash tables:

    union of the tables    p_j / (1 - (1 - q_j)^m)  for each key that collides in any    (Spring and Shrivastava 2017)
    one key per table      (1/m) sum_t |H_t| p_j / q_j  for a random key j of H_t        (Charikar and Siminelakis 2017)
    Bernoulli              (1/m) sum_t p_j / q_j  for every key j of H_t

with H_t the keys in the query's bucket of table t, and q_j the probability of a collision in one table. For the
union, the paper prints |S|^-1 sum p / q, whose mean is not the attention; here each key has the probability of being in
S. With p = q the last one is YOSO itself. It is the mean of the one before over the keys of each bucket, so its
variance is never larger. Given the codes, neither depends on the order of the keys.

collided: boolean (..., n_q, n_k, m). weights, chance: p and q, (..., n_q, n_k). A key with q = 0 never collides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparing.maths.dense import divide_rows


def union_weights(weights: Tensor, chance: Tensor, collided: Tensor) -> Tensor:
    """Return the random weights of the keys that collide in any table, each divided by its chance to do so."""
    hit = -torch.expm1(collided.shape[-1] * torch.log1p(-chance))
    return divide_rows(weights, hit) * collided.any(-1)


def one_per_table_weights(weights: Tensor, chance: Tensor, collided: Tensor, uniform: Tensor) -> Tensor:
    """Return the random weights of one key from each bucket; uniform: (..., n_q, m), numbers in (0, 1)."""
    size = collided.sum(-2, keepdim=True, dtype=torch.int32)  # |H_t|, (..., n_q, 1, m)
    chosen = (uniform.unsqueeze(-2) * size).int() + 1
    drawn = collided & (collided.cumsum(-2, dtype=torch.int32) == chosen)
    return divide_rows(weights, chance) * (drawn * size).sum(-1) / collided.shape[-1]


def bernoulli_weights(weights: Tensor, chance: Tensor, collided: Tensor) -> Tensor:
    """Return the random weights of all keys that collide, each as often as it does."""
    return divide_rows(weights, chance) * collided.sum(-1) / collided.shape[-1]
