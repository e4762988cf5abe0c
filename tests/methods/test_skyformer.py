"""Skyformer against its mathematics: Loewner order, exactness, solvers, the softmax form."""

import math
from itertools import pairwise

import pytest
import torch

import sparing
from sparing.maths import linalg
from sparing.methods.skyformer.landmarks import draw_landmarks
from sparing_lab.studies.skyformer_lift import call_of, lifted, lowest
from tests.support.inputs import Inputs, exact_for, make, peaked, relative, run
from tests.support.landmark_inputs import EYE, GAMMAS, KINDS, data, draw, norm


def assert_below(lower, upper):
    """lower <= upper in the Loewner order, up to rounding."""
    found = lowest(upper - lower)
    assert found >= -1e-9, f"smallest eigenvalue {found:.3g}"


@pytest.mark.parametrize("kind", KINDS)
def test_the_lifted_matrix_is_a_kernel_matrix(kind):
    q, k = data(kind)
    c = lifted("skyformer(landmarks=5)", q, k)[0]
    assert torch.equal(c, c.mT) or float((c - c.mT).abs().max()) < 1e-14
    assert float((c.diagonal(dim1=-2, dim2=-1) - 1).abs().max()) < 1e-12
    assert lowest(c) >= -1e-12
    assert bool((norm(c[..., :20, 20:]) <= norm(c) / 2 + 1e-12).all())
    assert bool((norm(c) / 2 <= 22 + 1e-12).all())


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_approximation_is_a_lower_bound(kind, gamma):
    for seed, sampling in enumerate(("without_replacement", "half", "iid", "all")):
        q, k = data(kind, seed=seed)
        spec = f"landmarks={(9, 16, 30)[seed % 3]}, gamma={gamma}, sampling={sampling}"
        exact, approximate = lifted(f"skyformer({spec})", q, k, seed=seed)
        assert_below(approximate, exact)
        assert_below(torch.zeros_like(exact), approximate)
        error = exact - approximate
        assert bool((norm(error[..., :20, 20:]) <= norm(error) / 2 + 1e-9).all())  # the halved bound
        before = torch.zeros_like(exact)
        for steps in (*range(1, 13), 40):
            iterated = lifted(f"skyformer({spec}, solver=newton_schulz, iterations={steps})", q, k, seed=seed)[1]
            assert_below(iterated, approximate)  # stopping early only under-estimates
            if steps <= 8:  # later steps change nothing but the rounding of an explicit inverse
                assert_below(before, iterated)
            before = iterated
        damped = lifted(f"skyformer({spec.replace('gamma=0.0,', 'gamma=1e-6,')})", q, k, seed=seed)[1]
        assert float((before - damped).abs().max()) < 1e-6  # an explicit inverse of condition number 1e7


def test_an_over_relaxed_start_breaks_the_lower_bound():
    q, k = data("clusters")
    method, call = sparing.method("skyformer(landmarks=16)"), call_of(q)
    columns, middle, _ = method.lift(q, k, call)
    a, root = linalg.degree_scaled(middle + 0.1 * EYE[:16, :16])
    exact = lifted("skyformer(landmarks=16)", q, k)[0]

    def approximate(start, steps):
        z = linalg.inverse_iteration(a, start, steps)
        return columns @ (z * root.unsqueeze(-1) * root.unsqueeze(-2)) @ columns.mT

    for steps in range(1, 13):
        assert_below(approximate(EYE[:16, :16].expand_as(a), steps), exact)
        assert_below(approximate(a / a.abs().sum(-2).amax(-1)[..., None, None], steps), exact)  # the authors' start
    with pytest.raises(AssertionError, match="smallest eigenvalue"):
        assert_below(approximate(3.5 * EYE[:16, :16].expand_as(a), 1), exact)


def test_nystrom_without_the_lift_is_no_lower_bound():
    """Negative control: the Nystrom formula on C itself, which is neither symmetric nor positive semidefinite."""
    q, k = data("clusters", 24, 24)
    exact, approximate = lifted("skyformer(landmarks=16, gamma=0.0)", q, k)
    c = exact[..., :24, 24:]
    naive = c[..., :16] @ torch.linalg.pinv(c[..., :16, :16]) @ c[..., :16, :]
    assert float(norm(c - approximate[..., :24, 24:]).max()) < 2
    assert float(norm(c - naive).max()) > 10


def test_more_landmarks_never_increase_an_eigenvalue_of_the_error():
    for kind in KINDS:
        q, k = data(kind)
        found = {m: lifted(f"skyformer(landmarks={m}, gamma=0.0)", q, k) for m in (4, 9, 20, 43)}
        sets = [
            set(draw_landmarks("without_replacement", m, 20, 24, call_of(q), q.device).rows[0, 1].tolist())
            for m in found
        ]
        assert all(a < b for a, b in pairwise(sets)), "landmarks are not nested"
        for small, large in zip((4, 9, 20), (9, 20, 43), strict=True):
            assert_below(found[small][1], found[large][1])


@pytest.mark.parametrize("kind", KINDS)
def test_landmark_rows_are_exact_without_damping(kind):
    q, k = data(kind)
    index = draw_landmarks("without_replacement", 10, 20, 24, call_of(q), q.device).rows
    for gamma in (0.0, 0.1):
        error = torch.sub(*lifted(f"skyformer(landmarks=10, gamma={gamma})", q, k))
        worst = float(error.take_along_dim(index.unsqueeze(-1), -2).abs().max())
        assert (worst < 1e-8) == (gamma == 0), worst


@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_landmarks_are_exact(kind, impl):
    for n_q, n_k in ((1, 1), (20, 24), (24, 3)):
        q, k = data(kind, n_q, n_k)
        x = Inputs(q, k, draw(1, 2, n_k, 5))
        wanted = run("kernelized", x, impl="reference")
        assert float((run("skyformer(sampling=all, gamma=0.0)", x, impl=impl) - wanted).abs().max()) < 1e-8
        single = run("skyformer(sampling=all, gamma=0.0)", x.map(lambda t: t.float()), impl=impl)
        assert float((single - run("kernelized", x.map(lambda t: t.float().double()))).abs().max()) < 1e-5
        for gamma in (0.0, 0.1):  # more landmarks than rows: the target, whatever gamma
            covered = f"skyformer(landmarks={n_q + n_k}, gamma={gamma}, solver=newton_schulz, iterations=1)"
            assert float((run(covered, x, impl=impl) - wanted).abs().max()) < 1e-12


def test_gradient_at_full_budget_is_that_of_the_target():
    q, k = (t.requires_grad_() for t in data("clusters"))
    v, weight = draw(1, 2, 24, 5, seed=3).requires_grad_(), draw(1, 2, 20, 5, seed=4)
    found, wanted = (
        torch.autograd.grad((run(spec, Inputs(q, k, v)) * weight).sum(), (q, k, v))
        for spec in ("skyformer(sampling=all, gamma=0.0)", "kernelized")
    )
    for a, b in zip(found, wanted, strict=True):
        assert float((a - b).abs().max()) < 1e-7


def test_the_output_is_the_off_diagonal_block_and_the_bound_holds():
    for spec in ("skyformer(landmarks=9)", "skyformer(landmarks=30, gamma=0.0)", "skyformer(landmarks=44)"):
        q, k = data("clusters")
        exact, approximate = lifted(spec, q, k)
        for impl in ("reference", "auto"):
            got = sparing.inspect(q, k, EYE[:24, :24].expand(1, 2, 24, 24), method=spec, seed=0, impl=impl)
            error = norm(got.output - exact[..., :20, 20:])
            assert bool((error <= got.statistics["bound"] + 1e-9).all())
            if "44" in spec:
                assert float(error.max()) < 1e-12
                assert not got.statistics["bound"].any()
            else:
                assert float((got.output - approximate[..., :20, 20:]).abs().max()) < 1e-9
                assert bool((got.statistics["bound"] < 22).all())


@pytest.mark.parametrize("gamma", [1e-3, 0.1, 5.0])
def test_newton_schulz_recursion(gamma):
    q, k = data("clusters")
    w = lifted("skyformer(landmarks=9)", q, k)[0] + gamma * EYE[:44, :44]
    a, _ = linalg.degree_scaled(w)
    values = torch.linalg.eigvalsh(a)
    assert float(values.min()) >= gamma / float(w.sum(-1).max()) - 1e-12
    assert float((values.max(-1).values - 1).abs().max()) < 1e-12  # one is always attained, unlike Lemma 3 says
    eye, z = EYE[:44, :44], EYE[:44, :44].expand_as(a)
    for _ in range(6):
        r = eye - a @ z
        z = linalg.inverse_iteration(a, z, 1)
        assert float((eye - a @ z - (3 * r @ r @ r + r @ r @ r @ r) / 4).abs().max()) < 1e-12
    needed = math.ceil(math.log(44 / gamma + 1) / math.log(3.25)) + 2
    assert float((linalg.iterated_inverse(w, needed) @ w - eye).abs().max()) < 0.1


def test_the_identity_is_a_better_start_than_the_authors():
    q, k = 0.58 * draw(1, 1, 256, 32), 0.58 * draw(1, 1, 256, 32, seed=1)
    w = sparing.method("skyformer(landmarks=128)").lift(q, k, call_of(q)).middle + 0.1 * torch.eye(128).double()
    a, _ = linalg.degree_scaled(w)
    eye = torch.eye(128, dtype=torch.float64).expand_as(a)
    ours = norm(eye - a @ linalg.inverse_iteration(a, eye, 6))
    theirs = norm(eye - a @ linalg.inverse_iteration(a, a.mT / a.abs().sum(-2).amax(-1)[..., None, None], 6))
    assert float(ours) < 0.1
    assert float(theirs) > 0.8


def independent(solve):
    """Whether the result for a matrix stays the same beside another one."""
    q, k = data("clusters")
    first, mate = (
        lifted("skyformer(landmarks=9)", *pair)[0] + 0.1 * EYE[:44, :44] for pair in ((q, k), (0 * q, 0 * k))
    )
    alone, together = solve(mate), solve(torch.cat([first, mate]))[1:]
    return float((alone - together).abs().max()) < 1e-12


def test_batch_mates_do_not_matter():
    def published(w):
        a, _ = linalg.degree_scaled(w)
        return linalg.inverse_iteration(a, a.mT / a.abs().sum(-2).max(), 6)  # one norm for the whole batch

    assert independent(lambda w: linalg.iterated_inverse(w, 6))
    assert independent(lambda w: linalg.damped_cholesky(w, 0.1))
    assert not independent(published)


def test_a_matrix_that_rounding_made_indefinite_is_damped_alone():
    bad = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 1.0]], dtype=torch.float64)
    good = EYE[:3, :3] + 0.5
    with pytest.warns(UserWarning, match="indefinite"):
        factors = linalg.damped_cholesky(torch.stack([bad, good]), 1e-10)
    assert factors.isfinite().all()
    assert torch.equal(factors[1], torch.linalg.cholesky(good + 1e-10 * EYE[:3, :3]))


def test_repeated_landmarks_do_no_harm():
    q, k = (t.requires_grad_() for t in data("repeated"))  # 3 + 3 different rows
    x = Inputs(q, k, draw(1, 2, 24, 5))
    for solver in ("cholesky", "newton_schulz, iterations=30"):
        out = run(f"skyformer(landmarks=40, gamma=0.0, sampling=iid, solver={solver})", x)
        assert relative(out.detach(), run("kernelized", x).detach()) < 1e-6
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k)))


def test_float32_suffices_on_numerically_singular_data():
    for seed in range(3):
        q, k = data("narrow", 60, 60, seed=seed)
        x = Inputs(q, k, draw(1, 2, 60, 5)).map(lambda t: t.float())
        for gamma in (0.0, 0.01, 0.1):
            single = run(f"skyformer(landmarks=40, gamma={gamma})", x)
            assert relative(single, run(f"skyformer(landmarks=40, gamma={gamma})", x.map(lambda t: t.double()))) < 1e-5


@pytest.mark.parametrize("width", [1, 8, 32, 64])
def test_the_scale_follows_the_head_dimension(width):
    q, k = draw(1, 2, 20, width) / width**0.25, draw(1, 2, 24, width, seed=1) / width**0.25
    x = Inputs(q, k, draw(1, 2, 24, 5))
    wanted = (-(torch.cdist(q, k) ** 2) / (2 * math.sqrt(width))).exp() @ x.value
    assert relative(run("skyformer(landmarks=44)", x), wanted) < 1e-10
    hard_coded = (-(torch.cdist(q, k) ** 2) / (2 * math.sqrt(32))).exp() @ x.value
    assert (relative(hard_coded, wanted) < 1e-10) == (width == 32)


def test_softmax_kernel():
    assert str(sparing.method("skyformer(kernel=softmax)").exact_target()) == "exact"
    assert sparing.method("skyformer").exact_target() == sparing.method("kernelized")
    for count in (8, 32):
        x = peaked(sparing.method("exact"), count)
        for impl in ("reference", "auto"):
            assert (
                relative(run("skyformer(kernel=softmax, sampling=all, gamma=0.0)", x, impl=impl), exact_for(x)) < 1e-8
            )
    x = make(sparing.method("exact"), n_q=20, dtype=torch.float64, sharpness=1.0)
    call = call_of(x.q)
    rows = torch.cat([x.q, x.k], -2)
    index = draw_landmarks("without_replacement", 16, 20, 20, call, x.q.device).rows
    kernel = (call.scale * rows @ rows.mT).exp()  # the paper's Figure 1: Nystrom on exp(q.k / sqrt p), then normalised
    columns = kernel.take_along_dim(index.unsqueeze(-2), -1)
    a = columns @ torch.linalg.pinv(columns.take_along_dim(index.unsqueeze(-1), -2)) @ columns.mT
    a = a[..., :20, 20:]
    trusted = a.sum(-1, keepdim=True) > kernel[..., :20, 20:].sum(-1, keepdim=True) / 2
    assert bool(trusted.any())
    found = run("skyformer(kernel=softmax, landmarks=16, gamma=0.0)", x)
    assert float(((found - a @ x.value / a.sum(-1, keepdim=True)) * trusted).abs().max()) < 1e-6


def test_softmax_rows_with_impossible_sums_do_not_explode():
    x = make(sparing.method("exact"), n_q=64, d=2, dtype=torch.float64, sharpness=4.0)
    spec, call = "skyformer(kernel=softmax, landmarks=8, gamma=0.0)", call_of(x.q)
    columns, middle, _ = sparing.method(spec).lift(x.q, x.k, call)
    weights = columns[..., :64, :] @ torch.linalg.solve(middle, columns[..., 64:, :].mT)
    weights = weights * (call.scale / 2 * x.k.square().sum(-1, keepdim=True)).exp().mT
    assert bool((weights.sum(-1) < 0).any()), "the case has no power"
    for impl in ("reference", "auto"):
        assert float(run(spec, x, impl=impl).abs().max()) < 20
    clamped = weights @ x.value / weights.sum(-1, keepdim=True).clamp_min(1e-6)
    assert float(clamped.abs().max()) > 1e3  # negative control: clamping alone does not help
