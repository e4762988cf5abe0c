"""Causal Monte-Carlo attention: the counts of every row, and the error that they allow."""

import math

import pytest
import torch

import sparing
from sparing import Projection
from sparing.methods.monte_carlo import causal as by_row
from sparing.methods.monte_carlo import row_blocks
from sparing.methods.monte_carlo.levels import level_of
from tests.methods.test_monte_carlo import DRAWS, exact, problem, spec, worst_case
from tests.support.random_estimates import assert_second_moment, assert_unbiased


def causal(q, k, value, method, **kwargs):
    return sparing.inspect(q, k, value, is_causal=True, method=method, seed=0, enable_gqa=True, **kwargs)


def rounded(r, d):
    return next(min(level, d) for level in (0, *(2**i for i in range(30))) if level >= r)


def by_hand(q, k, keep, alpha, d, groups):
    """One batch item: A (H, n_q, n_k), M and r (H_kv, n_q, n_k) before rounding, by loops that look at no later row."""
    heads, n_q, n_k = q.shape[0], q.shape[1], k.shape[1]
    weights = torch.zeros(heads, n_q, n_k, dtype=torch.float64)
    largest = torch.zeros(heads // groups, n_q, n_k, dtype=torch.float64)
    counts = torch.zeros(heads // groups, n_q, n_k, dtype=torch.long)
    for i in range(n_q):
        sees = [j for j in range(min(i + 1, n_k)) if keep[j]]
        for h in range(heads):
            if sees:
                scores = k[h // groups, sees] @ q[h, i] / math.sqrt(q.shape[-1])
                weights[h, i, sees] = scores.softmax(-1)
        valid = [a for a in range(i + 1) if n_q != n_k or keep[a]]
        for h in range(heads // groups):
            for j in sees:
                largest[h, i, j] = weights[h * groups : (h + 1) * groups, valid, j].max() if valid else 0.0
                counts[h, i, j] = min(d, math.ceil((len(sees) * float(largest[h, i, j]) / alpha) ** 2))
    return weights, largest, counts


@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize(("n_q", "n_k"), [(14, 14), (9, 14), (14, 9)])
@pytest.mark.parametrize("padded", [[], [0, 1], [12, 13], [3, 7]])
def test_counts_certificates_and_bounds_are_those_of_the_rule(impl, n_q, n_k, padded):
    q, k, value = problem(n=n_k, n_q=n_q, heads=4, kv_heads=2)
    keep = torch.tensor([j not in padded for j in range(n_k)])
    facts = causal(q, k, value, spec(1.5), attn_mask=keep.view(1, 1, 1, -1), impl=impl).statistics
    weights, _, counts = by_hand(q[0], k[0], keep.tolist(), 1.5, 48, 2)
    counts.apply_(lambda r: rounded(r, 48))
    assert torch.equal(facts["counts"][0], counts.amax(1))
    rows = [i for i in range(n_q) if n_q != n_k or keep[i]]
    norms = value.x[0].norm(dim=-1)
    for h in range(4):
        size = value.weight.unflatten(0, (2, -1))[h // 2].norm()
        r = counts[h // 2].double()
        wanted = size * (weights[h] * norms * (r < 48) / r.clamp_min(1).sqrt()).sum(-1)
        torch.testing.assert_close(facts["certificate"][0, h, rows], wanted[rows], rtol=1e-10, atol=1e-12)
        seen = torch.ones(n_q, n_k).tril() * keep
        beta = (seen * norms).sum(-1) / seen.sum(-1).clamp_min(1)
        torch.testing.assert_close(facts["bound"][0, h // 2], 1.5 * beta * size, rtol=1e-10, atol=0)
        assert bool((wanted[rows] <= facts["bound"][0, h // 2, rows] * (1 + 1e-12)).all())
    seen = (torch.arange(n_k) < n_q) & keep
    rate = (facts["counts"][0] * seen).sum(-1).double() / (48 * seen.sum())
    torch.testing.assert_close(facts["rate"][0], rate)
    torch.testing.assert_close(facts["padded_rate"][0], facts["counts"][0].double().mean(-1) / 48)


@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize("estimator", ["drop", "mean"])
@pytest.mark.parametrize("padded", [[], [0, 1], [5, 6, 11]])
def test_baselines_choose_their_tokens_row_by_row(estimator, impl, padded):
    q, k, value = problem(n=15, heads=2, kv_heads=1)
    keep = torch.tensor([j not in padded for j in range(15)])
    found = causal(q, k, value, spec(2.0, f", estimator={estimator}"), attn_mask=keep.view(1, 1, 1, -1), impl=impl)
    weights, largest, counts = by_hand(q[0], k[0], keep.tolist(), 2.0, 48, 2)
    x, projected = value.x[0], value.project(1)[0, 0]
    chosen = set()
    for i in range(15):
        if not keep[i]:
            continue
        sees = [j for j in range(i + 1) if keep[j]]
        kept = int(counts[0, i].sum()) // 48
        best = sorted(sees, key=lambda j, i=i: (-float(largest[0, i, j]), j))[:kept]
        chosen |= set(best)
        center = x[sees].mean(0) if estimator == "mean" else torch.zeros(48, dtype=torch.float64)
        rows = (value.weight @ center + value.bias).repeat(15, 1)
        rows[best] = projected[best]
        torch.testing.assert_close(found.output[0, :, i], weights[:, i] @ rows, rtol=0, atol=1e-12)
        off = (x - center).norm(dim=-1) * torch.tensor([j not in best for j in range(15)]) * value.weight.norm()
        torch.testing.assert_close(found.statistics["certificate"][0, :, i], weights[:, i] @ off, rtol=1e-9, atol=1e-12)
    assert found.statistics["counts"][0, 0].tolist() == [48 * (j in chosen) for j in range(15)]
    assert 0 < len(chosen) < int(keep.sum())
    assert "bound" not in found.statistics


def assert_bound(q, k, value, alpha):
    """One head: the root mean square error of each row, by the exact law of its samples, is within its bound."""
    facts = causal(q, k, value, spec(alpha)).statistics
    weights, variances, _, _ = row_theory(q, k, value, alpha)
    largest = (weights * variances.sqrt()).sum(-1)  # whatever the joint law of the tokens
    assert bool((largest <= facts["certificate"][0, 0] * (1 + 1e-9)).all()), "the certificate does not hold"
    assert bool((facts["certificate"] <= facts["bound"] * (1 + 1e-9)).all()), "the bound does not hold"


def row_theory(q, k, value, alpha, counts=None):
    """One head: A (n, n), V_j(r_ij) (n, n) and the covariance C (n, n) of one sample; exact pairs have V = 0."""
    n, d = k.shape[2], value.x.shape[-1]
    weights, _, by_row = by_hand(q[0], k[0], [True] * n, alpha, d, 1)
    counts = by_row[0].apply_(lambda r: rounded(r, d)) if counts is None else counts
    x, w = value.x[0], value.weight.mT
    joint = w.square().sum() * x @ x.mT - (x @ w) @ (x @ w).mT
    variances = joint.diagonal().clamp_min(0) / counts.clamp_min(1) * (counts < d)
    return weights[0], variances, joint, counts


@pytest.mark.parametrize("sharpness", [0.0, 0.3, 1.0, 3.0, 40.0])
@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_error_bound_of_every_row(sharpness, alpha):
    assert_bound(*problem(sharpness=sharpness), alpha)


def test_rounding_down_to_a_level_breaks_the_bound(monkeypatch):
    """One token with x W = 0 and 2.9 samples wanted: the next level has 4, the one below 2."""
    q, k, value = worst_case(1)
    alpha = 1 / math.sqrt(2.9)
    assert_bound(q, k, value, alpha)

    def down(counts, d):
        code = level_of(counts, d)
        return torch.where(code > 1, code - 1, code)

    for module in (row_blocks, by_row):
        monkeypatch.setattr(module, "level_of", down)
    with pytest.raises(AssertionError, match="the bound does not hold"):
        assert_bound(q, k, value, alpha)


@pytest.mark.statistical
@pytest.mark.parametrize("samples", ["independent", "shared"])
def test_rows_are_unbiased_with_the_predicted_second_moment(samples):
    """H0: E e_i = 0 and E|e_i|^2 = sum_j A_ij^2 V_j(r_ij), or sum_jl A_ij A_il C_jl / max(r_ij, r_il) when shared.

    The lists of the levels are prefixes of one list: the joint law of two tokens in one row is that of their lists.
    """
    q, k, value = problem()
    weights, variances, joint, counts = row_theory(q, k, value, 1.5)
    assert len(counts[counts > 0].unique()) >= 5
    part = weights * (counts < 48)
    together = counts.unsqueeze(-1).maximum(counts.unsqueeze(-2)).clamp_min(1)
    paper = counts[-1:].expand_as(counts)  # those of the last row, which have seen all queries
    predicted = {
        "independent": (part.square() * variances).sum(-1),
        "shared": torch.einsum("ij,ijl,il->i", part, joint / together, part),
        "all queries": (weights.square() * row_theory(q, k, value, 1.5, paper)[1]).sum(-1),
    }
    many = Projection(value.x, value.weight.repeat(DRAWS, 1), value.bias.repeat(DRAWS))
    q, k = q.expand(1, DRAWS, -1, -1), k.expand(1, DRAWS, -1, -1)
    method = spec(1.5, f", samples={samples}")
    out = sparing.attention(q, k, many, is_causal=True, method=method, seed=0, impl="reference")[0]
    errors = out - exact(q[:, :1], k[:, :1], value, is_causal=True)[0]
    assert_unbiased(errors)
    assert_second_moment(errors, predicted.pop(samples))
    for other in predicted.values():  # controls: the other scheme, and counts that look at all queries
        with pytest.raises(AssertionError, match="second moment"):
            assert_second_moment(errors, other)
