"""Positive random features, statistically: the kernel's mean and variance, the projections, rates of convergence.

Random rows come from one stream per head, so a call with 4000 heads holds 4000 independent draws.
"""

import math
from dataclasses import dataclass, replace

import pytest
import torch

import sparing
from sparing.call import Call
from sparing.draws import Draws
from sparing.mask import Mask
from sparing.methods.random_features import RandomFeatures
from tests.support.inputs import exact_for, make


def call(draws=4000, scale=1.0, seed=0):
    streams = torch.arange(draws)
    return Call(scale=scale, mask=Mask(), draws=Draws(seed, streams))


def pairs(d, lengths=(0.2, 0.5, 0.8, 1.0)):
    """q' and k' with |q' + k'| of the given lengths: (pairs, d) each, float64."""
    gen = torch.Generator().manual_seed(d)
    total = torch.nn.functional.normalize(torch.randn(len(lengths), d, generator=gen, dtype=torch.float64), dim=-1)
    total = total * torch.tensor(lengths, dtype=torch.float64)[:, None]
    part = 0.4 * torch.randn(len(lengths), d, generator=gen, dtype=torch.float64) / math.sqrt(d)
    return total / 2 + part, total / 2 - part


def estimates(method, x_q, x_k, c):
    """The estimate of exp(q'.k') for each draw and pair, (draws, pairs), from the method's own features."""
    heads = len(c.draws.streams)
    q, k = ((x / math.sqrt(abs(c.scale))).expand(1, heads, *x.shape) for x in (x_q, x_k))
    phi_q, phi_k, log_k = method.log_features(q, k, c)
    rows = method.projection(x_q.shape[-1], c)
    top_q = (x_q.expand(heads, -1, -1) @ rows.mT).amax(-1)  # the factor that log_features takes out of each query
    return ((phi_q * phi_k).sum(-1) * (log_k + top_q - x_q.square().sum(-1) / 2).exp()).squeeze(0) / method.features


def z_of_mean(samples, target):
    return (samples.mean(0) - target) / (samples.std(0) / math.sqrt(len(samples)))


def assert_kernel_mean(method):
    """H0: E[estimate] = exp(q'.k'). z over 4000 draws for 4 pairs in 2 widths; callers make 2 such families, so 16
    assertions, and |z| < 5.73 keeps the family-wise false-alarm rate below 1e-6 (up to 100). Relative sd of the mean
    is about .004: a bias of 3 per cent fails with probability above .97.
    """
    for d in (4, 10):
        x_q, x_k = pairs(d)
        z = z_of_mean(estimates(method, x_q, x_k, call(scale=1 / math.sqrt(d))), (x_q * x_k).sum(-1).exp())
        assert float(z.abs().max()) < 5.73, f"biased at d={d}: z = {z.tolist()}"


def assert_iid_variance(method):
    """H0: Var = s^2 (exp(|q' + k'|^2) - 1) / F. z of the squared error over 16 000 draws, two-sided, 4 pairs;
    |z| < 5.33 (10 assertions, family-wise 1e-6). Lengths stay below .7 so that squared errors have light tails;
    the relative sd of the estimate is about .015: a variance off by 15 per cent fails.
    """
    x_q, x_k = pairs(4, lengths=(0.3, 0.4, 0.5, 0.7))
    kernel = (x_q * x_k).sum(-1).exp()
    error = (estimates(method, x_q, x_k, call(draws=16_000)) - kernel).square()
    wanted = kernel.square() * ((x_q + x_k).square().sum(-1).exp() - 1) / method.features
    z = z_of_mean(error, wanted)
    assert float(z.abs().max()) < 5.33, f"variance off: ratio {(error.mean(0) / wanted).tolist()}, z = {z.tolist()}"


@dataclass(frozen=True, kw_only=True)
class GainOne(RandomFeatures):
    """Rows of an orthogonal initialiser: orthonormal columns, so that row norms are sqrt(d / F)."""

    def projection(self, d, call):
        rows, _ = torch.linalg.qr(call.draws.normal("rows", max(self.features, d), d))
        return rows[:, : self.features]


@dataclass(frozen=True, kw_only=True)
class SqrtBlocks(RandomFeatures):
    """Orthogonal blocks with the fixed norm sqrt(d)."""

    def projection(self, d, call):
        return torch.nn.functional.normalize(super().projection(d, call), dim=-1) * math.sqrt(d)


@dataclass(frozen=True, kw_only=True)
class ScaledTwice(RandomFeatures):
    """d^(-1/4) applied once more: temperature d in place of sqrt(d)."""

    native = sparing.Method.native  # none

    def log_features(self, q, k, call):
        factor = q.shape[-1] ** -0.25
        return super().log_features(factor * q, factor * k, call)


@dataclass(frozen=True, kw_only=True)
class Repeated(RandomFeatures):
    """Half of the rows drawn, each used twice: unbiased, with twice the variance."""

    def projection(self, d, call):
        half = replace(self, features=self.features // 2)
        return RandomFeatures.projection(half, d, call).repeat(1, 2, 1)


IID = RandomFeatures(features=16, orthogonal=False)


@pytest.mark.statistical
@pytest.mark.parametrize("orthogonal", [True, False])
def test_kernel_mean(orthogonal):
    assert_kernel_mean(RandomFeatures(features=32, orthogonal=orthogonal))


@pytest.mark.statistical
@pytest.mark.parametrize("broken", [GainOne, SqrtBlocks, ScaledTwice])
def test_kernel_mean_catches(broken):
    with pytest.raises(AssertionError, match="biased"):
        assert_kernel_mean(broken(features=32))


@pytest.mark.statistical
def test_variance_of_independent_rows():
    assert_iid_variance(IID)


@pytest.mark.statistical
@pytest.mark.parametrize("broken", [Repeated(features=16, orthogonal=False), RandomFeatures(features=16)])
def test_variance_catches(broken):
    assert_kernel_mean(replace(broken, features=32))  # the mean alone does not tell
    with pytest.raises(AssertionError, match="variance off"):
        assert_iid_variance(broken)


@pytest.mark.statistical
def test_orthogonal_rows_lower_the_variance():
    """H0: no lower than independent rows. z of the difference of squared errors, 32 000 draws, one-sided 4.89 (1e-6).
    The variance is lower by about 13 per cent, which gives z near 9.
    """
    x_q, x_k = pairs(8, lengths=(0.7,))
    kernel = (x_q * x_k).sum(-1).exp()
    methods = (RandomFeatures(features=8, orthogonal=o) for o in (True, False))
    low, high = ((estimates(m, x_q, x_k, call(draws=32_000)) - kernel).square() for m in methods)
    assert float(z_of_mean(high - low, 0.0)) > 4.89


def slope(budgets, errors):
    x, y = (torch.tensor(t, dtype=torch.float64).log() for t in (budgets, errors))
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


@pytest.mark.statistical
def test_kernel_error_falls_like_the_root_of_the_features():
    """RMSE over 1500 draws has a relative sd below .04, the fitted slope over a factor 64 one of .01: .05 is 5 sd."""
    x_q, x_k = pairs(6, lengths=(0.8,))
    kernel = (x_q * x_k).sum(-1).exp()
    budgets = (8, 32, 128, 512)
    errors = []
    for f in budgets:
        error = estimates(RandomFeatures(features=f, orthogonal=False), x_q, x_k, call(draws=1500)) - kernel
        errors.append(float(error.square().mean().sqrt()))
    assert abs(slope(budgets, errors) + 0.5) < 0.05


@pytest.mark.statistical
@pytest.mark.parametrize("orthogonal", [True, False])
def test_output_error_falls_like_the_root_of_the_features(orthogonal):
    """The same for the attention output: RMSE over 100 draws of 12 x 5 outputs, slope over a factor 64 with an sd below
    .015. |q' + k'|^2 stays below 2: with longer vectors thousands of features are not yet in the regime of the law.
    """

    def found(cls):
        x = make(IID, batch=1, heads=1, n_q=12, d=6, e=5, dtype=torch.float64, sharpness=0.3)
        x = replace(x, k=0.3 * x.k)
        wanted = exact_for(x)
        many = x.map(lambda t: t.expand(-1, 100, -1, -1))
        budgets = (48, 192, 768, 3072)
        methods = (cls(features=f, orthogonal=orthogonal) for f in budgets)
        outs = (sparing.attention(many.q, many.k, many.value, method=m, seed=0) for m in methods)
        return slope(budgets, [float((out - wanted).square().mean().sqrt()) for out in outs])

    assert abs(found(RandomFeatures) + 0.5) < 0.05
    assert found(ScaledTwice) > -0.2  # a bias stays


def test_blocks_are_orthogonal_and_cut():
    c = call(draws=3)
    for features, d in ((5, 8), (8, 8), (21, 8), (3, 1)):
        rows = RandomFeatures(features=features).projection(d, c)
        assert rows.shape == (3, features, d)
        for start in range(0, features, d):
            unit = torch.nn.functional.normalize(rows[:, start : start + d], dim=-1)
            assert float((unit @ unit.mT - torch.eye(unit.shape[1])).abs().max()) < 1e-12


@pytest.mark.statistical
def test_norms_follow_the_chi_law():
    """H0: squared row norms are chi-squared with d degrees: mean d, variance 2 d. z over 20 000 rows for both, and for
    the mean of the rows (isotropy); 2 + 6 assertions at |z| < 5.33. A fixed norm fails the variance.
    """
    d = 6
    rows = RandomFeatures(features=6).projection(d, call()).flatten(0, 1)
    square = rows[:20_000].square().sum(-1, keepdim=True)
    for samples, target in ((square, d), ((square - d).square(), 2 * d), (rows[::6], 0.0)):
        assert float(z_of_mean(samples, target).abs().max()) < 5.33
