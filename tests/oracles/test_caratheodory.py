"""The mean of all values from one value more than they are wide, and the elimination behind it."""

import pytest
import torch

import sparing
from sparing.oracles import caratheodory, ova_objective, value_aware
from sparing.oracles.elimination import dependency, eliminate, remove_one
from sparing.oracles.pursuit import pursue
from tests.support.convex_combinations import F64, KINDS, assert_exact, error, instance, scale, top


@pytest.mark.parametrize("kind", KINDS)
def test_caratheodory(kind):
    for e in (1, 2, 8, 20):
        weights, values = instance(kind, e)
        found = caratheodory(weights, values)
        assert found[0].shape == (24, e + 1)
        assert_exact(found, weights, values)
        assert_exact(value_aware(weights, values, e + 4), weights, values)


def test_control_exactness_needs_the_corrective_step_and_the_values():
    weights, values = instance("random", 8)
    for broken in (top(weights, 9), value_aware(weights, values, 9, corrective=False), value_aware(weights, values, 8)):
        with pytest.raises(AssertionError):
            assert_exact(broken, weights, values)


def test_the_slow_way_repairs_what_rounding_spoils():
    weights, values = instance("near duplicates", 8)
    o, size = weights @ values, scale(weights, values)
    alone = pursue(o, values, ova_objective(weights, values), 9, size, True)
    assert bool((alone.error > 1e-22 * size).any()), "this instance no longer needs the slow way: make it harder"
    assert_exact(caratheodory(weights, values), weights, values)


def test_method_is_exact_from_one_key_more_than_the_value_is_wide():
    gen = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 2, 3, 70, 16, generator=gen, dtype=F64)
    v = torch.randn(2, 3, 70, 10, generator=gen, dtype=F64) * torch.exp(torch.randn(2, 3, 70, 1, generator=gen))
    for causal in (False, True):
        exact = sparing.attention(3 * q, k, v, is_causal=causal)
        found = sparing.inspect(3 * q, k, v, is_causal=causal, method="value_aware(keys=11)")  # 11 = e + 1, not d + 1
        assert (found.output - exact).abs().max() < 1e-9
        assert int((found.statistics["weights"] > 0).sum(-1).max()) <= 11
        assert float(found.statistics["error"].max()) < 1e-9
        fewer = sparing.attention(3 * q, k, v, is_causal=causal, method="value_aware(keys=10)")
        assert (fewer - exact).abs().max() > 1e-6


@pytest.mark.parametrize("corrective", [True, False])
def test_more_keys_than_there_are(corrective):
    weights, values = instance("random", 8, n=5)
    weights[0, 1:] = 0
    weights[1] = 0
    weights = torch.nn.functional.normalize(weights, p=1, dim=-1)
    indices, held = value_aware(weights, values, 7, corrective=corrective)
    assert indices.shape == (24, 7)
    assert bool((error((indices, held), weights, values) < 1e-24).all())
    assert held[1].tolist() == [0.0] * 7  # a row that sees nothing
    assert torch.allclose(held.sum(-1)[2:], torch.ones(22, dtype=F64))


@pytest.mark.parametrize("unit", [1e-160, 1e-30, 1e150])
def test_the_unit_of_the_values_does_not_matter(unit):
    weights, values = instance("log-normal", 6)
    for keys in (1, 4, 7):
        wanted, found = value_aware(weights, values, keys), value_aware(weights, values * unit, keys)
        assert torch.allclose(found[1], wanted[1], atol=1e-6)
        assert torch.equal(found[0] * (found[1] > 0), wanted[0] * (wanted[1] > 0))


def assert_kept(before, after, points):
    """Weights moved without moving their sum or their mean, and stayed non-negative."""
    assert bool((after >= 0).all())
    assert torch.allclose(after.sum(-1), before.sum(-1), atol=1e-13)
    assert torch.allclose((after.unsqueeze(-2) @ points), before.unsqueeze(-2) @ points, atol=1e-12)


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_each_elimination_keeps_the_mean_and_removes_a_key(rank):
    gen = torch.Generator().manual_seed(0)
    weights = torch.rand(50, 8, generator=gen, dtype=F64)
    points = torch.randn(50, 8, rank, generator=gen, dtype=F64) @ torch.randn(50, rank, 6, generator=gen, dtype=F64)
    c = dependency(points)
    assert float(c.sum(-1).abs().max()) < 1e-14
    assert float((c.unsqueeze(-2) @ points).abs().max()) < 1e-13
    after = remove_one(weights, points)
    assert_kept(weights, after, points)
    assert bool(((after == 0).sum(-1) >= 1).all())
    assert torch.equal(remove_one(after, points), after), "a set with room left must stay as it is"
    with pytest.raises(AssertionError):  # control: any other direction moves the mean
        assert_kept(weights, weights - 0.01 * torch.randn(50, 8, generator=gen, dtype=F64), points)


@pytest.mark.parametrize("kind", KINDS)
def test_elimination_alone_is_exact(kind):
    for n, e in ((60, 1), (60, 7), (17, 7), (16, 7), (9, 7), (8, 7), (5, 7)):  # around the group size 2 (e + 1)
        weights, values = instance(kind, e, n=max(n, 5) // 5 * 5 if "duplicates" in kind else n)
        found = eliminate(weights, values.expand(24, -1, -1))
        assert found[0].shape[1] <= e + 1
        assert_exact(found, weights, values)
