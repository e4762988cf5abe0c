"""Monte-Carlo attention: error bounds, moments, gradients, real layers."""

import math

import pytest
import torch
from scipy.stats import binom

import sparing
from sparing import Projection, native
from sparing.methods.monte_carlo import estimator, projection
from sparing.methods.monte_carlo.sampling import feature_law, input_law, sample_counts
from tests.support.random_estimates import assert_second_moment, assert_unbiased

DRAWS = 4000
SETTINGS = ["", ", samples=shared", ", estimator=stratified", ", estimator=drop", ", estimator=mean"]
CHOICES = [  # of r and p, which causal calls and kernels do not have
    ", importance=mean",
    ", importance=median",
    ", probabilities=input",
    ", probabilities=input, importance=mean, estimator=stratified",
]


def problem(n=16, d=48, e=6, heads=1, kv_heads=None, n_q=None, batch=1, sharpness=1.0, seed=0):
    """q, k and a Projection whose weight has rows and heads of very unequal size."""
    gen = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    kv_heads = heads if kv_heads is None else kv_heads
    q, k = sharpness * draw(batch, heads, n_q or n, 8), draw(batch, kv_heads, n, 8)
    weight = draw(kv_heads * e, d) * torch.logspace(0, -0.5, d, dtype=torch.float64)
    weight = weight * torch.arange(1, kv_heads + 1).repeat_interleave(e)[:, None]
    return q, k, Projection(draw(batch, n, d) + 0.3 * draw(batch, 1, d), weight, draw(kv_heads * e))


def spec(alpha, setting=""):
    return f"monte_carlo(alpha={alpha}{setting})"


def exact(q, k, value, **kwargs):
    return sparing.attention(q, k, value, method="exact", impl="reference", **kwargs)


def many(q, k, value, method):
    """Independent draws (DRAWS, n_q, e) of a call with one head: each is a head with a random stream of its own."""
    weight, bias = value.weight.repeat(DRAWS, 1), value.bias.repeat(DRAWS)
    q, k = q.expand(1, DRAWS, -1, -1), k.expand(1, DRAWS, -1, -1)
    return sparing.attention(q, k, Projection(value.x, weight, bias), method=method, seed=0)[0]


def theory(q, k, value, counts):
    """One head: A (n_q, n), sampled tokens' V_j (n,) and C_jl (n, n), zero for exact tokens."""
    weights = (q[0, 0] @ k[0, 0].mT / math.sqrt(q.shape[-1])).softmax(-1)
    x, w = value.x[0], value.weight.mT
    joint = w.square().sum() * x @ x.mT - (x @ w) @ (x @ w).mT
    sampled = (counts < x.shape[-1]).double()
    joint = joint * sampled * sampled[:, None]
    return weights, joint.diagonal() / counts, joint


def assert_bound(q, k, value, alpha, **kwargs):
    """sum_j A_ij sqrt(V_j) <= certificate_i <= alpha beta |W|_F, for calls of one head."""
    facts = sparing.inspect(q, k, value, method=spec(alpha), seed=0, **kwargs).statistics
    x, size = value.x[0], value.weight.norm()
    beta = x.norm(dim=-1).mean()
    torch.testing.assert_close(facts["bound"][0, 0], alpha * beta * size, rtol=1e-12, atol=0)
    weights, variances, _ = theory(q, k, value, facts["counts"][0, 0])
    rms = weights @ variances.sqrt()
    certificate = facts["certificate"][0, 0]
    terms = x.norm(dim=-1) / facts["counts"][0, 0].double().sqrt() * (facts["counts"][0, 0] < x.shape[-1])
    torch.testing.assert_close(certificate, size * (weights @ terms), rtol=1e-12, atol=0)
    assert bool((rms <= certificate * (1 + 1e-12)).all()), "the certificate does not hold"
    assert bool((certificate <= facts["bound"][0, 0] * (1 + 1e-9)).all()), "the bound does not hold"
    return facts


@pytest.mark.parametrize("sharpness", [0.0, 0.3, 1.0, 3.0, 40.0])
@pytest.mark.parametrize("alpha", [0.2, 0.5, 1.0, 3.0])
def test_error_bound_on_flat_peaked_and_one_hot_attention(sharpness, alpha):
    facts = assert_bound(*problem(sharpness=sharpness), alpha)
    if sharpness == 1.0 and alpha > 0.2:
        assert 0 < float(facts["rate"]) < 1


def worst_case(n):
    """Equal tokens with x W = 0, flat weights: Lemma 1 is an equality."""
    w = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(4)[:, None] * torch.tensor([[1.0, 2.0, 2.0]])
    q = torch.zeros(1, 1, n, 4, dtype=torch.float64)
    return q, q.clone(), Projection(torch.ones(1, n, 8, dtype=torch.float64), w.mT.contiguous(), None)


def test_shared_samples_reach_the_bound():
    q, k, value = worst_case(8)
    ratios = {}
    for samples in ("shared", "independent"):
        found = [sparing.inspect(q, k, value, method=spec(1.0, f", samples={samples}"), seed=s) for s in range(200)]
        errors = torch.stack([f.output.norm(dim=-1)[0, 0] for f in found])  # the exact output is zero
        ratios[samples] = errors / found[0].statistics["bound"][0, 0]
        assert found[0].statistics["counts"].unique().tolist() == [1]
    torch.testing.assert_close(ratios["shared"], torch.ones_like(ratios["shared"]))
    # Independent lists are better by sqrt(N); the mean of 200 squared ratios has a standard deviation of .012.
    assert abs(float(ratios["independent"].square().mean()) - 1 / 8) < 0.06


def test_rounding_down_breaks_the_bound(monkeypatch):
    q, k, value = worst_case(1)
    alpha = 1 / math.sqrt(1.99)
    assert assert_bound(q, k, value, alpha)["counts"].item() == 2
    monkeypatch.setattr(estimator, "sample_counts", lambda *args: sample_counts(*args) - 1)
    with pytest.raises(AssertionError, match="the bound does not hold"):
        assert_bound(q, k, value, alpha)
    found = sparing.inspect(q, k, value, method=spec(alpha), seed=0)
    assert abs(float(found.output.norm() / found.statistics["bound"]) - math.sqrt(1.99)) < 1e-9


@pytest.mark.statistical
@pytest.mark.parametrize("samples", ["independent", "shared"])
def test_unbiased_with_the_predicted_second_moment(samples):
    """H0: E e_i = 0 and E|e_i|^2 = sum_j A_ij^2 V_j (independent) or sum_jl A_ij A_il C_jl / max(r_j, r_l) (shared)."""
    q, k, value = problem()
    method = spec(0.8, f", samples={samples}")
    counts = sparing.inspect(q, k, value, method=method, seed=0).statistics["counts"][0, 0]
    assert bool((counts == 48).any())
    assert bool((counts < 48).sum() > 4)
    weights, variances, joint = theory(q, k, value, counts)
    predicted = {
        "independent": weights.square() @ variances,
        "shared": ((weights @ (joint / counts.maximum(counts[:, None]))) * weights).sum(-1),
    }
    errors = many(q, k, value, method) - exact(q, k, value)[0]
    assert_unbiased(errors)
    assert_second_moment(errors, predicted.pop(samples))
    with pytest.raises(AssertionError, match="second moment"):  # control: the other scheme's formula
        assert_second_moment(errors, predicted.popitem()[1])


def assert_tail(errors, bound, delta):
    """H0: P(|e| > bound) <= delta. Exact binomial test of the worst row at level 1e-6 / rows."""
    violations = (errors.norm(dim=-1) > bound).sum(0).double()
    p = binom.sf(violations.numpy() - 1, len(errors), delta)
    assert p.min() > 1e-6 / errors.shape[1], f"{int(violations.max())} violations at delta={delta}"


@pytest.mark.statistical
@pytest.mark.parametrize("delta", [0.01, 0.1, 0.5])
def test_tails(delta):
    q, k, value = problem(sharpness=0.5)
    bound = float(sparing.inspect(q, k, value, method=spec(2.0), seed=0).statistics["bound"])
    errors = many(q, k, value, spec(2.0, ", samples=shared")) - exact(q, k, value)[0]
    assert_tail(errors, bound / delta, delta)  # eq. 11
    assert_tail(errors, bound / math.sqrt(delta), delta)
    with pytest.raises(AssertionError, match="violations"):  # control
        assert_tail(errors, 0.02 * bound, delta)


@pytest.mark.statistical
def test_gradients_are_unbiased():
    """H0: the mean gradient over samples is the gradient of exact attention, for the query and the weight."""
    q, k, value = problem(n=8, d=16, e=3)
    direction = torch.randn(1, 1, 8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def gradient(draws, method):
        leaf = q.expand(1, draws, -1, -1).clone().requires_grad_()
        weight = value.weight.repeat(draws, 1).requires_grad_()
        v = Projection(value.x, weight, value.bias.repeat(draws))
        out = sparing.attention(leaf, k.expand(1, draws, -1, -1), v, method=method, seed=0)
        by_q, by_w = torch.autograd.grad((out * direction).sum(), (leaf, weight))
        return by_q[0], by_w.unflatten(0, (draws, -1))

    for found, wanted in zip(gradient(DRAWS, spec(1.5)), gradient(1, spec(0.0)), strict=True):
        assert float((found - wanted).abs().max()) > 1e-3
        assert_unbiased(found - wanted)


@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize("setting", [*SETTINGS, ", importance=median", ", probabilities=input"])
def test_gradcheck_with_frozen_samples(setting, impl, monkeypatch):
    """Without kernels, whose law cannot be frozen: test_projection_kernel.py compares their gradients to these."""
    q, k, value = problem(n=5, d=7, e=2, heads=2, kv_heads=1, n_q=4, sharpness=0.5)
    law = feature_law(value.weight.mT[None])  # p is a constant too, also when the weight moves
    for module in (estimator, projection):
        monkeypatch.setattr(module, "feature_law", lambda w: law)
    by_input = input_law(value.x, torch.ones(1, 1, 5, dtype=torch.bool), value.weight.mT[None])
    monkeypatch.setattr(estimator, "input_law", lambda *args: by_input)
    leaves = [t.clone().requires_grad_() for t in (q, k, *value)]

    def call(q, k, *v):
        return sparing.attention(q, k, Projection(*v), enable_gqa=True, method=spec(1.2, setting), seed=0, impl=impl)

    counts = sparing.inspect(q, k, value, enable_gqa=True, method=spec(1.2, setting), seed=0).statistics["counts"]
    assert bool((counts < 7).any())
    with native.switched_off():
        assert torch.autograd.gradcheck(call, leaves, eps=1e-6, atol=1e-7)


@torch.no_grad()
def test_real_layers(minilm_layers):
    """At one budget on MiniLM independent lists beat shared ones, and replacing tokens by their mean beats both."""
    errors = dict.fromkeys(SETTINGS, 0.0)
    for layer in minilm_layers:
        wanted = sparing.attention(layer.query, layer.key, layer.value)
        for setting in SETTINGS:
            out = sparing.attention(layer.query, layer.key, layer.value, method=spec(0.4, setting), seed=0)
            errors[setting] += float((out - wanted).norm() / wanted.norm()) / len(minilm_layers)
    own, shared, stratified, drop, mean = errors.values()
    assert mean < stratified < own < shared, errors
    assert mean < drop, errors
