"""Skyformer: Theorem 2 with its constants, and what a permutation of the tokens changes."""

import math

import pytest
import torch
from scipy import stats

import sparing
from sparing.maths.linalg import iterated_inverse
from sparing.methods.skyformer.method import gaussian
from sparing_lab.studies.skyformer_lift import circle, iterated, lifted, lowest, promise
from tests.support.inputs import Inputs, keys_mask, make, padding, relative, run
from tests.support.landmark_inputs import KINDS, data, draw, norm


def violations(n, seeds, eps, delta, gamma=0.0, landmarks=None, factor=4):
    """How often |C-bar - C-bar-tilde| <= max(lambda, 4 n gamma / d), Theorem 2 with its constants, fails for iid draws."""
    q, k = circle(n)
    exact = lifted("skyformer(landmarks=1)", q, k, scale=1.0)[0][0, 0]
    slack, _, need = promise(exact, n, eps, delta)
    count = need if landmarks is None else landmarks
    assert count < 2 * n, "the theorem asks for all rows: the case has no power"
    allowed = max(slack, factor * n * gamma / count)
    failed = 0
    for seed in range(seeds):
        spec = f"skyformer(landmarks={count}, gamma={gamma}, sampling=iid)"
        error = exact - lifted(spec, q, k, seed=seed, scale=1.0)[1][0, 0]
        values = torch.linalg.eigvalsh(error)
        assert float(values[0]) > -1e-9  # the lower bound is no matter of luck
        assert float(norm(error[:n, n:])) <= float(values[-1]) / 2 + 1e-9
        failed += float(values[-1]) > allowed
    return failed


# Theorem 2. Null hypothesis: the bound fails with probability at most delta = 0.1. Statistic: failures over
# independent landmark draws; rejected when their binomial tail is below 1e-6 (the false-alarm rate; seeds are fixed).
@pytest.mark.statistical
@pytest.mark.parametrize("gamma", [0.0, 0.1, 50.0])
def test_theorem_2(gamma):
    failed = violations(400, 8, eps=0.1, delta=0.1, gamma=gamma)
    assert stats.binom.sf(failed - 1, 8, 0.1) > 1e-6


@pytest.mark.statistical
@pytest.mark.parametrize("broken", [{"landmarks": 2}, {"gamma": 50.0, "factor": 0}])
def test_theorem_2_needs_its_landmarks_and_its_term_in_gamma(broken):
    failed = violations(400, 8, eps=0.1, delta=0.1, **broken)
    assert stats.binom.sf(failed - 1, 8, 0.1) < 1e-6


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize("gamma", [0.0, 0.1])
def test_theorem_2_on_many_seeds(gamma):
    failed = violations(600, 100, eps=0.1, delta=0.1, gamma=gamma)
    assert stats.binom.sf(failed - 1, 100, 0.1) > 1e-6


@pytest.mark.statistical
def test_a_permutation_changes_nothing_on_average():
    """Null hypothesis: permuting the tokens leaves the mean output over seeds unchanged. Statistic: difference of two
    means of 400 independent draws, along 5 fixed directions; |z| < 5.2, false-alarm rate 1e-6 in all."""
    x = make(sparing.method("exact"), batch=1, heads=1, n_q=14, dtype=torch.float64)
    turn = torch.randperm(14, generator=torch.Generator().manual_seed(2))
    directions = draw(5, 14 * 6)
    means, spreads = [], []
    for order, seeds in ((torch.arange(14), range(400)), (turn, range(400, 800))):
        outs = [run("skyformer(landmarks=6)", x.tokens(order), seed=s)[:, :, order.argsort()] for s in seeds]
        found = torch.stack([directions @ out.flatten() for out in outs])
        means.append(found.mean(0))
        spreads.append(found.var(0) / 400)
    assert float(((means[0] - means[1]) / (spreads[0] + spreads[1]).sqrt()).abs().max()) < 5.2
    single = [run("skyformer(landmarks=6)", y, seed=0) for y in (x, x.tokens(turn))]
    assert relative(single[1][:, :, turn.argsort()], single[0]) > 1e-3  # for one seed the order does matter


def middle(kind, gamma):
    """M + gamma I of 44 landmarks, two heads."""
    rows = torch.cat(data(kind), -2)[0] / math.sqrt(math.sqrt(data(kind)[0].shape[-1]))
    return gaussian(rows, rows) + gamma * torch.eye(44, dtype=torch.float64)


def from_transpose(w, steps, scale=1.0):
    """The same iteration from the start of the authors' code, A^T / |A|_1, times a factor."""
    return iterated(w, steps, start="transpose", factor=scale)[0]


def assert_below_the_inverse(z, w):
    """Z <= W^-1 in the Loewner order, as W^1/2 Z W^1/2 <= I, which is not blown up by the inverse."""
    values, vectors = torch.linalg.eigh(w)
    half = vectors * values.clamp_min(0).sqrt().unsqueeze(-2) @ vectors.mT
    eye = torch.eye(w.shape[-1], dtype=w.dtype)
    assert lowest(eye - half @ z @ half) >= -1e-8, "the iteration exceeds the inverse"


@pytest.mark.parametrize("gamma", [0.0, 1e-3, 0.1])
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_stays_below_the_inverse_from_both_starts(kind, gamma):
    w = middle(kind, gamma)
    for start in (iterated_inverse, from_transpose):
        for steps in (0, 1, 2, 4, 8):
            assert_below_the_inverse(start(w, steps), w)


def test_a_start_beyond_the_inverse_does_not_stay_below():
    with pytest.raises(AssertionError, match="exceeds the inverse"):
        assert_below_the_inverse(from_transpose(middle("narrow", 0.1), 1, scale=1.5), middle("narrow", 0.1))


def test_six_steps_from_the_identity_are_enough_for_128_landmarks():
    """The start of the authors' code, whose small eigenvalues are squared, is far from it after as many."""
    rows = 0.7 * draw(128, 8)
    w = gaussian(rows, rows) + 0.1 * torch.eye(128, dtype=torch.float64)
    identity, transpose = (
        float(norm(torch.eye(128, dtype=torch.float64) - w @ z)) for z in (iterated_inverse(w, 6), from_transpose(w, 6))
    )
    assert identity < 0.1
    assert transpose > 0.5


@pytest.mark.parametrize("sampling", ["without_replacement", "half", "iid"])
@pytest.mark.parametrize("kind", ["left", "right", "both", "holes"])
def test_the_bound_of_a_padded_sequence_is_that_of_the_sequence_alone(kind, sampling):
    spec = f"skyformer(landmarks=9, sampling={sampling})"
    x = make(sparing.method(spec), n_q=40, dtype=torch.float64)
    keep = padding(kind, 2, 40)

    def bound(y: Inputs, mask=None):
        return sparing.inspect(y.q, y.k, y.value, mask, method=spec, seed=0).statistics["bound"]

    padded = bound(x, keys_mask(keep))
    for b in range(2):
        alone = bound(x.item(slice(b, b + 1)).tokens(keep[b].nonzero().squeeze(-1)))
        torch.testing.assert_close(padded[b : b + 1], alone, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(padded, bound(x), rtol=1e-3), "padding counts"
