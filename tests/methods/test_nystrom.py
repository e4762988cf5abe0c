"""Nystromformer: exact cases, landmark means of valid tokens, solvers, and the defects of public code."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import sparing
from sparing import Shape, Unsupported
from sparing.maths.convolution import DepthwiseConvolution
from sparing.maths.linalg import inverse_iteration
from sparing.maths.segments import segment_means
from sparing_lab.studies.skyformer_lift import call_of
from tests.support.inputs import Inputs, exact_for, keys_mask, make, padding, peaked, relative, run
from tests.support.landmark_inputs import draw

METHOD = sparing.method("nystrom")


def formula(x, m, solve):
    """F A^+ G V for lengths that m divides, as the paper writes it; one softmax per line."""
    scale = 1 / math.sqrt(x.q.shape[-1])
    q_means, k_means = (t.unflatten(-2, (m, -1)).mean(-2) for t in (x.q, x.k))
    first = (x.q @ k_means.mT * scale).softmax(-1)
    middle = (q_means @ k_means.mT * scale).softmax(-1)
    last = (q_means @ x.k.mT * scale).softmax(-1)
    return first @ solve(middle) @ last @ x.value


def published_inverse(a, norm):
    return inverse_iteration(a, a.mT / norm(a), 6)


def per_matrix(a):
    return a.abs().sum(-2).amax(-1)[..., None, None] * a.abs().sum(-1).amax(-1)[..., None, None]


def whole_batch(a):
    return a.abs().sum(-2).max() * a.abs().sum(-1).max()


def test_it_is_the_papers_formula():
    x = make(METHOD, n_q=48, dtype=torch.float64)
    wanted = formula(x, 8, lambda a: published_inverse(a, per_matrix))
    assert relative(run("nystrom(landmarks=8)", x), wanted) < 1e-12
    wanted = formula(x, 8, torch.linalg.pinv)
    assert relative(run("nystrom(landmarks=8, solver=exact)", x), wanted) < 1e-8
    many = run("nystrom(landmarks=8, iterations=40)", x)  # the iteration converges to the inverse
    assert relative(many, wanted) < 1e-6
    assert relative(run("nystrom(landmarks=8)", x), wanted) > 1e-3  # and six steps are not there


@pytest.mark.parametrize("solver", ["iterative", "exact"])
def test_as_many_landmarks_as_tokens_is_exact(solver):
    for n_q, n_k, m in ((33, 33, 33), (33, 33, 64), (5, 40, 5), (40, 5, 5), (1, 1, 1)):
        x = make(METHOD, n_q=n_q, n_k=n_k, dtype=torch.float64)
        for impl in ("reference", "auto"):
            assert relative(run(f"nystrom(landmarks={m}, solver={solver})", x, impl=impl), exact_for(x)) < 1e-12


def test_segments_of_one_token_are_exact_through_the_formula():
    """F = A = G: the pseudo-inverse identity A A^+ A = A."""
    x = peaked(METHOD, 3, n=32)
    found = sparing.method("nystrom(landmarks=32, solver=exact)").approximate(x.q, x.k, x.value, call_of(x.q))
    assert relative(found, exact_for(x)) < 1e-8


def test_constant_segments_are_exact():
    """Tokens that repeat within their segment: means lose nothing, and F, A and G have the same rows."""
    for m, length in ((6, 7), (10, 3)):
        x = peaked(METHOD, 3, n=m)
        q, k, v = (t.repeat_interleave(length, -2) for t in (x.q, x.k, x.value))
        x = Inputs(q, k, v + draw(*v.shape))
        assert relative(run(f"nystrom(landmarks={m}, solver=exact)", x), exact_for(x)) < 1e-8
        assert relative(run(f"nystrom(landmarks={m}, iterations=30)", x), exact_for(x)) < 1e-6
        assert relative(run(f"nystrom(landmarks={m - 1}, solver=exact)", x), exact_for(x)) > 1e-3


@pytest.mark.parametrize("n", [9, 31, 33, 50, 97])
def test_any_length(n):
    """Public code needs a length that the number of landmarks divides."""
    x = make(METHOD, n_q=n, dtype=torch.float64)
    means = segment_means(x.k, torch.arange(n)[None], torch.tensor([n]), None, 8)
    edges = [i * n // 8 for i in range(9)]
    wanted = torch.stack([x.k[:, :, a:b].mean(-2) for a, b in pairwise(edges)], -2)
    assert float((means - wanted).abs().max()) < 1e-12
    assert run("nystrom(landmarks=8)", x).isfinite().all()


def packed_means(means):
    """Whether landmark means of a padded sequence are those of the sequence alone."""
    x = make(METHOD, batch=1, n_q=40, dtype=torch.float64)
    for kind in ("left", "right", "both", "holes"):
        keep = padding(kind, 1, 40)
        alone = x.k[:, :, keep[0]]
        n = alone.shape[-2]
        wanted = segment_means(alone, torch.arange(n)[None], torch.tensor([n]), None, 8)
        if float((means(x.k * keep[:, None, :, None], keep) - wanted).abs().max()) > 1e-12:
            return False
    return True


def test_landmark_means_ignore_padding():
    def ours(k, keep):
        return segment_means(k, (keep.long().cumsum(-1) - 1).clamp_min(0), keep.sum(-1), keep, 8)

    def published(k, keep):  # segments of the padded length, divided by their full size
        return k.unflatten(-2, (8, -1)).mean(-2)

    assert packed_means(ours)
    assert not packed_means(published)


def independent(attend):
    x = make(METHOD, n_q=48, dtype=torch.float64)
    wild = replace(x, q=torch.cat([x.q[:1], 30 * x.q[1:]]))
    return relative(attend(wild)[:1], attend(x)[:1]) < 1e-12


def test_batch_mates_do_not_matter():
    assert independent(lambda x: run("nystrom(landmarks=8)", x))
    assert independent(lambda x: formula(x, 8, lambda a: published_inverse(a, per_matrix)))
    assert not independent(lambda x: formula(x, 8, lambda a: published_inverse(a, whole_batch)))


def test_the_exact_solver_gives_the_same_numbers_in_float32():
    """A is nearly singular on flat attention: a pseudo-inverse in float32, with its own cut-off, is another method."""
    for sharpness in (0.1, 0.3, 1.0):
        x = make(METHOD, n_q=256, d=32, sharpness=sharpness)
        wide = x.map(lambda t: t.double())
        wanted = run("nystrom(landmarks=64, solver=exact)", wide)
        assert relative(run("nystrom(landmarks=64, solver=exact)", x), wanted) < 1e-5
    single = formula(make(METHOD, n_q=256, d=32, sharpness=0.3), 64, torch.linalg.pinv)
    double = formula(make(METHOD, n_q=256, d=32, sharpness=0.3).map(lambda t: t.double()), 64, torch.linalg.pinv)
    assert relative(single, double) > 0.1  # negative control


def test_padded_queries_and_short_items():
    x = make(METHOD, batch=3, n_q=60, dtype=torch.float64)
    keep = torch.cat([padding("holes", 2, 60), torch.zeros(1, 60, dtype=torch.bool)])
    keep[1] = False
    keep[1, 20:25] = True  # fewer tokens than landmarks: exact
    rows = keep[:, None, :].expand(3, 2, 60)
    for impl in ("reference", "auto"):
        out = run("nystrom(landmarks=8)", x, attn_mask=keys_mask(keep), query_mask=keep, impl=impl)
        assert bool((out[~rows] == 0).all())
        exact = exact_for(x, attn_mask=keys_mask(keep), query_mask=keep)
        assert relative(out[1], exact[1]) < 1e-12
        assert relative(out[0], exact[0]) > 1e-2
        spoiled = replace(x, q=x.q.masked_fill(~rows.unsqueeze(-1), torch.nan))
        assert torch.equal(
            run("nystrom(landmarks=8)", spoiled, attn_mask=keys_mask(keep), query_mask=keep, impl=impl), out
        )
        some = run("nystrom(landmarks=8)", x, query_mask=keep, impl=impl)  # few queries, all keys
        assert relative(some[1][rows[1]], exact_for(x)[1][rows[1]]) < 1e-12


def test_row_sums_are_one_once_converged():
    x = make(METHOD, n_q=48, dtype=torch.float64)
    ones = x.with_payload(torch.ones_like(x.payload))
    assert float((run("nystrom(landmarks=8, solver=exact)", ones) - 1).abs().max()) < 1e-8
    eye = x.with_payload(torch.eye(48).double().expand(2, 2, 48, 48))
    assert float(run("nystrom(landmarks=8, solver=exact)", eye).min()) < 0  # weights can be negative


def test_convolution():
    x = make(METHOD, n_q=40)
    method = sparing.method("nystrom(landmarks=8, convolution=5)")
    state = method.learned(2, 8, 6, None)
    assert isinstance(state, DepthwiseConvolution)
    keep = padding("left", 2, 40)
    found = run(method, x, state=state, attn_mask=keys_mask(keep))
    v = x.payload * keep[:, None, :, None]
    wide = torch.nn.functional.pad(v, (0, 0, 2, 2))
    filters = state.weight[:, 0, :, 0]
    added = sum(filters[:, i, None, None] * wide[:, :, i : i + 40] for i in range(5))
    plain = run("nystrom(landmarks=8)", x, attn_mask=keys_mask(keep))
    assert float((found - plain - added).detach().abs().max()) < 1e-5
    assert sparing.method("nystrom").learned(2, 8, 6, None) is None
    with pytest.raises(ValueError, match="convolution=5 has learned weights"):
        run(method, x)
    with pytest.raises(Unsupported, match=r"nystrom.* does not support n_q=40 != n_k=30"):
        run(method, make(METHOD, n_q=40, n_k=30), state=state)
    with pytest.raises(ValueError, match="state has 4 heads and convolution=5, but the call has 2 heads"):
        run(method, x, state=method.learned(4, 8, 6, None))
    with pytest.raises(ValueError, match=r"state has 2 heads and convolution=5.*2 heads and convolution=7"):
        run("nystrom(landmarks=8, convolution=7)", x, state=state)
    assert method.supports.position_based
    assert (method.supports.cross_attention, sparing.method("nystrom").supports.cross_attention) == (False, True)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nystrom(landmarks=0)", "landmarks=0 must be at least 1"),
        ("nystrom(iterations=0)", "iterations=0 must be at least 1"),
        ("nystrom(solver=pinv)", "solver='pinv' is not one of 'iterative', 'exact'"),
        ("nystrom(convolution=4)", "convolution=4 must be odd"),
        ("nystrom(inv_coeff_init_option=1)", "no field 'inv_coeff_init_option'"),
    ],
)
def test_refuses_bad_settings(spec, message):
    with pytest.raises(ValueError, match=message):
        sparing.method(spec)


def test_refuses_causality():
    with pytest.raises(Unsupported, match="nystrom does not support is_causal"):
        run("nystrom", make(METHOD, n_q=12), is_causal=True)


def test_the_default_is_not_silently_exact():
    """A public default has as many landmarks as tokens in a segment, and so runs exact softmax at every length."""
    x = peaked(METHOD, 8, n=256)
    assert relative(run("nystrom", x), exact_for(x)) > 1e-2


def test_cost():
    shape = Shape(queries=1024, keys=1024, head_dim=64, value_dim=64)
    n, m, p = 1024, 64, 64
    # 4 n m p + 4 n m e, the exponentials, the small products, and six steps of four m^3 products
    wanted = 8 * n * m * p + 2 * n * m + 4 * m * m * p + 6 * 8 * m**3
    assert METHOD.cost(shape).flops == wanted
    short = Shape(queries=1024, keys=50, head_dim=64, value_dim=64)
    assert METHOD.cost(short).flops == 1024 * 50 * (4 * 64 + 1)
