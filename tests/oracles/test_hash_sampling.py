"""Samplers by hash collisions: unbiased, and what each costs in variance.

The sampling unit is one draw of all hash tables. Thresholds are those of tests/support/random_estimates.py: a family-wise
false-alarm rate of 1e-6.
"""

import pytest
import torch
from torch import Tensor

import sparing
from sparing.maths.linalg import unit_rows
from sparing.methods.yoso.method import Yoso, agreement
from sparing.oracles import bernoulli_weights, one_per_table_weights, union_weights
from tests.support.random_estimates import assert_unbiased

DRAWS, HASHES, BITS = 3000, 4, 3


def instance() -> tuple[Tensor, Tensor, Tensor]:
    """Softmax weights, chances of a collision, and draws of the collisions (DRAWS, 6, 10, HASHES)."""
    random = torch.Generator().manual_seed(0)
    q, k = (unit_rows(torch.randn(1, 1, n, 16, generator=random, dtype=torch.float64), 1e-12) for n in (6, 10))
    q = unit_rows(q + k[:, :, :6], 1e-12)
    x = (q @ k.mT)[0, 0]
    method = Yoso(hashes=HASHES * DRAWS, bits=BITS, hash="gaussian")
    facts = sparing.inspect(q, k, k, method=method, seed=1).statistics
    same = facts["query_codes"][0, 0, :, None] == facts["key_codes"][0, 0, None]  # (6, 10, HASHES * DRAWS)
    return (BITS * x).softmax(-1), agreement(x) ** BITS, same.unflatten(-1, (DRAWS, HASHES)).movedim(-2, 0)


def uniform(seed: int = 2) -> Tensor:
    return torch.rand(DRAWS, 6, HASHES, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(name: str) -> tuple[Tensor, Tensor]:
    p, q, same = instance()
    if name == "one":
        return p, one_per_table_weights(p, q, same, uniform())
    return p, {"union": union_weights, "bernoulli": bernoulli_weights}[name](p, q, same)


@pytest.mark.statistical
@pytest.mark.parametrize("name", ["union", "one", "bernoulli"])
def test_the_weights_are_unbiased(name):
    p, found = drawn(name)
    assert_unbiased(found - p)


@pytest.mark.statistical
def test_controls_other_divisors_are_biased():
    """What the paper prints for the union; collisions that are not divided by; a bucket whose size does not count."""
    p, q, same = instance()
    hit = same.any(-1)
    wrong = [
        p / q * hit / hit.sum(-1, keepdim=True).clamp_min(1),
        p / q * hit,
        p * same.double().mean(-1),
        one_per_table_weights(p, q, same, uniform()) / same.sum(-2).double().mean(-1, keepdim=True).clamp_min(1),
    ]
    for found in wrong:
        with pytest.raises(AssertionError, match="biased"):
            assert_unbiased(found - p)


def test_one_key_of_each_bucket_is_drawn():
    _, q, same = instance()
    found = one_per_table_weights(q, q, same, uniform())  # each entry: a sum of bucket sizes / HASHES
    assert bool(((found > 0).sum(-1) <= HASHES).all())
    assert bool((found[~same.any(-1)] == 0).all())
    torch.testing.assert_close(found.sum(-1), same.sum(-2).double().mean(-1), rtol=1e-12, atol=1e-12)
    assert float((bernoulli_weights(q, q, same) > 0).sum(-1).double().mean()) > float(
        (found > 0).sum(-1).double().mean()
    )


def test_bernoulli_sampling_is_the_mean_of_one_key_per_table():
    """Over the choice in the buckets: so it never has more variance."""
    p, q, same = instance()
    wanted = bernoulli_weights(p, q, same[0])
    many = torch.rand(60000, 6, HASHES, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = one_per_table_weights(p, q, same[0].expand(60000, -1, -1, -1), many)
    assert_unbiased(found - wanted)
    values = torch.randn(10, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    each = {name: ((drawn(name)[1] - p) @ values).square().sum() for name in ("one", "bernoulli")}
    assert float(each["one"]) > 1.2 * float(each["bernoulli"])


def test_bernoulli_sampling_of_the_chance_is_yoso():
    q, k, v = torch.randn(3, 1, 2, 20, 16, generator=torch.Generator().manual_seed(5)).unbind(0)
    method = Yoso(hashes=8, bits=4, normalize="none")
    found = sparing.inspect(q, k, v, method=method, seed=0)
    codes = (found.statistics[f"{side}_codes"] for side in ("query", "key"))
    same = next(codes).unsqueeze(-2) == next(codes).unsqueeze(-3)
    chance = torch.full((1, 2, 20, 20), 0.5)
    torch.testing.assert_close(bernoulli_weights(chance, chance, same) @ v, found.output)


def test_chances_of_zero_and_one_stay_finite():
    chance, same = torch.tensor([[0.0, 1.0]]), torch.tensor([[[False], [True]]])
    for found in (
        union_weights(chance, chance, same),
        bernoulli_weights(chance, chance, same),
        one_per_table_weights(chance, chance, same, torch.full((1, 1), 0.5)),
    ):
        assert found.tolist() == [[0.0, 1.0]]
