"""YOSO: its identities, edge cases and statistics, and the slips of public code. Its sums are in test_collisions.py."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import sparing
from sparing import Unsupported
from sparing.maths.linalg import unit_rows
from sparing.methods.yoso.method import Yoso, agreement, steepness
from tests.support.collision_cases import assert_close, clustered, dense_weights, tracked, unit
from tests.support.inputs import Inputs, keys_mask, make, run
from tests.support.random_estimates import assert_unbiased

YOSO = sparing.method("yoso")


def test_the_lower_bound_is_a_lower_bound():
    """bits f / 2 over f': at most .910, at x = .442; pi/4 at 0; 0 at both ends."""
    x = torch.linspace(-1, 1, 20001, dtype=torch.float64)
    ratio = 0.5 / steepness(x)
    assert abs(float(ratio.max()) - 0.90985) < 1e-5
    assert abs(float(x[ratio.argmax()]) - 0.442) < 1e-3
    assert abs(float(0.5 / steepness(x.new_zeros(()))) - math.pi / 4) < 1e-12
    assert float(ratio[0]) < 1e-5
    assert float(ratio[-1]) < 2e-3


def test_the_clip_leaves_the_derivative_alone():
    x = torch.linspace(-0.999, 0.999, 41, dtype=torch.float64, requires_grad=True)
    for bits in (1, 2, 9):
        f = agreement(x) ** bits
        (slope,) = torch.autograd.grad(f.sum(), x)
        torch.testing.assert_close(bits * f * steepness(x), slope)
    ends = torch.tensor([1.0, -1.0, 1.0 + 1e-6, 0.9999999])
    assert steepness(ends).isfinite().all()


def test_bits_follow_the_number_of_valid_keys():
    for n, bits in ((1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (512, 9), (513, 10), (70000, 16)):
        q, k = torch.ones(1, 1, 1, 4), torch.ones(1, 1, n, 4)
        facts = sparing.inspect(q, k, k, method=Yoso(hashes=1), seed=0).statistics
        assert facts["bits"].tolist() == [bits], f"{n} keys"
    keep = torch.arange(40) < torch.tensor([[40], [9], [1]])
    x = make(YOSO, batch=3, n_q=40)
    facts = sparing.inspect(x.q, x.k, x.value, keys_mask(keep), method=YOSO, seed=0).statistics
    assert facts["bits"].tolist() == [6, 4, 1]
    assert facts["query_codes"].shape == (3, 2, 40, 32)
    assert facts["query_codes"].amax((1, 2, 3)).tolist() == [63, 15, 1]


def test_bits_follow_the_longest_input_of_a_model():
    for longest, bits in ((1, 1), (2, 1), (64, 6), (77, 6), (512, 9), (514, 9), (4096, 12), (4098, 12), (10**9, 16)):
        assert Yoso(hashes=1).for_length(longest) == Yoso(hashes=1, bits=bits), f"{longest} tokens"
    assert Yoso(bits=3).for_length(512) == Yoso(bits=3)
    assert Yoso().for_length(None) == Yoso()
    other = sparing.method("nystrom")
    assert other.for_length(512) is other


@pytest.mark.parametrize("d", [1, 20, 48, 80, 96, 128])
@pytest.mark.parametrize("hashes", [1, 33])
def test_any_width_and_number_of_hashes(d, hashes):
    """Public code needs d = 2^k >= 32, hashes = 32 k, and writes across rows otherwise."""
    x = clustered(40, d=d, e=5)
    method = Yoso(hashes=hashes, normalize="none")
    assert_close(run(method, x), dense_weights(method, x) @ x.payload, 1e-11)
    assert_close(run(method, x, impl="reference"), run(method, x), 1e-11)


def last_tokens_count(compute: Callable[[Inputs], Tensor]) -> None:
    """Each of the last eight keys changes the output of a query that equals it."""
    x = clustered(45, d=32)
    x = Inputs(x.k.clone(), x.k, x.value)
    before = compute(x)
    for j in range(37, 45):
        payload = x.payload.clone()
        payload[:, :, j] += 1
        assert not torch.equal(compute(x.with_payload(payload))[:, :, j], before[:, :, j]), f"key {j} is dropped"


def test_no_token_is_dropped_at_the_end():
    method = Yoso(hashes=4, normalize="none")
    last_tokens_count(lambda x: run(method, x))

    def in_eights(x: Inputs) -> Tensor:  # a launch grid of n // 8 blocks
        short = x.tokens(slice(0, x.n_k // 8 * 8))
        return torch.nn.functional.pad(run(method, short), (0, 0, 0, x.n_k % 8))

    with pytest.raises(AssertionError, match="dropped"):
        last_tokens_count(in_eights)


def test_equal_queries_and_keys_stay_finite():
    """Rounding takes a unit vector's product with itself past 1; arccos is NaN there unless x is clamped."""
    x = make(YOSO, n_q=100, d=64)
    x = Inputs(x.k.clone().requires_grad_(), x.k.clone().requires_grad_(), x.value)
    cosine = unit_rows(x.q.detach(), 1e-12) @ unit_rows(x.k.detach(), 1e-12).mT
    assert cosine.arccos().isnan().any(), "the control must be NaN"
    for method in (Yoso(expectation=True, gradient="exact"), Yoso(gradient="exact")):
        out = run(method, x)
        assert out.isfinite().all()
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (x.q, x.k)))
    own = agreement(cosine.diagonal(dim1=-2, dim2=-1))
    assert bool((own > 1 - 1e-3).all())
    assert bool((dense_weights(Yoso(hashes=8), x).diagonal(dim1=-2, dim2=-1) == 1).all())


def test_only_directions_count_in_training_and_evaluation():
    """Public code skips the normalisation in evaluation: the codes stay, the gradients do not."""
    for method in (Yoso(), Yoso(gradient="exact"), Yoso(expectation=True)):
        x = tracked(clustered(40))
        wide = Inputs(*(t.detach().clone().requires_grad_() for t in (10 * x.q, 0.1 * x.k)), x.value)
        out, other = run(method, x), run(method, wide, scale=7.0)
        torch.testing.assert_close(out, other)
        for t, g, h, by in zip(
            (x.q, x.k),
            *(torch.autograd.grad(o[..., 0].sum(), (y.q, y.k)) for o, y in ((out, x), (other, wide))),
            (10, 0.1),
            strict=True,
        ):
            torch.testing.assert_close(g, h * by)
            assert float((g * t).detach().sum(-1).abs().max()) < 1e-9, "a gradient along the vector itself"


def test_rows_without_a_collision_are_zero_and_pass_no_gradient():
    q = torch.tensor([1.0, 0, 0, 0]).expand(1, 1, 3, 4).clone().requires_grad_()
    k = -q.detach().clone().requires_grad_()
    v = torch.randn(1, 1, 3, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for method in (Yoso(bits=4), Yoso(bits=4, normalize="sum"), Yoso(bits=4, gradient="exact")):
        for impl in ("auto", "reference"):
            out = sparing.attention(q, k, v, method=method, seed=0, impl=impl)
            assert bool((out == 0).all())
            assert all(bool((g == 0).all()) for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_vectors_without_a_direction():
    """Documented: code 0 when sampled, x = 0 in expectation; both finite, without a gradient of 1e12."""
    x = make(YOSO, n_q=9)
    x = tracked(Inputs(x.q.index_fill(2, torch.tensor([4]), 0.0), x.k.index_fill(2, torch.tensor([2]), 1e-13), x.value))
    facts = sparing.inspect(x.q, x.k, x.value, method=YOSO, seed=0).statistics
    assert bool((facts["query_codes"][:, :, 4] == 0).all())
    assert bool((facts["key_codes"][:, :, 2] == 0).all())
    plain = Yoso(expectation=True, bits=3, normalize="none")
    torch.testing.assert_close(run(plain, x)[:, :, 4], x.payload.sum(2) / 8)
    for method in (YOSO, plain):
        to_q, to_k = torch.autograd.grad(run(method, x).sum(), (x.q, x.k))
        assert bool((to_q[:, :, 4] == 0).all())
        assert bool((to_k[:, :, 2] == 0).all())


def test_normalisations():
    x = clustered(50)
    plain, sums, rows = (run(Yoso(normalize=how), x) for how in ("none", "sum", "l2"))
    b = dense_weights(YOSO, x)
    torch.testing.assert_close(rows, unit(plain))
    torch.testing.assert_close(sums, plain / b.sum(-1, keepdim=True))
    ones = x.with_payload(torch.ones_like(x.payload))
    torch.testing.assert_close(run(Yoso(normalize="sum"), ones), torch.ones_like(plain))
    # Squares overflow in float32; the door shrinks such queries and keys and keeps their direction.
    huge = run(YOSO, x.map(lambda t: (t * 1e25).float()))
    tiny = run(YOSO, x.map(lambda t: (t * 1e-10).float()))
    torch.testing.assert_close(tiny, rows.float(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(huge, rows.float(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("spec", ["yoso(hashes=8)", "yoso(expectation=True)"])
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_the_length_of_tiny_values_does_not_count(spec, impl):
    """A power of two changes no digit, and the l2 normalisation takes it out again."""
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 8, generator=gen) for _ in range(3))
    grad = torch.randn(1, 2, 40, 8, generator=gen)

    def out_and_gradient(size):
        leaf = (v * size).requires_grad_()
        out = sparing.attention(q, k, leaf, method=spec, seed=0, impl=impl)
        return out.detach(), torch.autograd.grad(out, leaf, grad)[0] * size

    wanted, size = out_and_gradient(1.0), 2.0**-102  # values of about 2e-31
    assert bool(wanted[0].any())
    for one, other in zip(out_and_gradient(size), wanted, strict=True):
        assert torch.equal(one, other)


def test_the_expectation_draws_nothing():
    x = clustered(40)
    for method in (Yoso(expectation=True), Yoso(expectation=True, hashes=1, hash="gaussian")):
        assert torch.equal(run(method, x, seed=0), run(Yoso(expectation=True), x, seed=1))
    assert Yoso(expectation=True).exact_target() is None
    assert Yoso(bits=3).exact_target() == Yoso(bits=3, expectation=True)


def test_convolution_is_added_after_the_normalisation():
    method = Yoso(convolution=3)
    x = tracked(clustered(20))
    state = method.learned(2, 16, 8, None)
    assert state is not None
    out = run(method, x, state=state)
    torch.testing.assert_close(out - state(x.payload), run(Yoso(), x))
    torch.testing.assert_close(out, run(method, x, state=state, impl="reference"))
    out.sum().backward()
    assert all(bool((p.grad != 0).any()) for p in state.parameters())
    assert Yoso().learned(2, 16, 8, None) is None
    with pytest.raises(ValueError, match="convolution=3 has learned weights"):
        run(method, x)


def test_a_convolution_narrows_the_claims():
    """It follows the order of the tokens, sees later ones, and needs a value for every query."""
    plain, filtered = Yoso(), Yoso(convolution=3)
    assert (plain.supports.position_based, plain.supports.causal, plain.supports.cross_attention) == (False, True, True)
    narrowed = {"position_based": True, "causal": False, "cross_attention": False, "native_16bit": False}
    assert filtered.supports == replace(plain.supports, **narrowed)
    assert not Yoso(convolution=3, expectation=True).supports.stochastic
    state, x = filtered.learned(2, 16, 8, None), clustered(20)
    with pytest.raises(Unsupported, match=r"yoso.* does not support is_causal=True"):
        run(filtered, x, state=state, is_causal=True)
    with pytest.raises(Unsupported, match=r"yoso.* does not support n_q=5 != n_k=7"):
        run(filtered, make(plain, n_q=5, n_k=7), state=state)


@pytest.mark.parametrize(("heads", "size"), [(2, 5), (4, 3), (1, 3)])
def test_a_convolution_of_other_sizes_is_refused(heads, size):
    # A shorter filter would run with the wrong width, and one head with four would be torch's error about groups.
    words = rf"yoso: state has {heads} heads and convolution={size}, but the call has 2 heads and convolution=3"
    with pytest.raises(ValueError, match=words):
        run(Yoso(convolution=3), clustered(20), state=Yoso(convolution=size).learned(heads, 16, 8, None))


def test_inspection_notes_one_number_of_bits_per_item():
    x = make(YOSO, n_q=20)
    keep = torch.arange(20) < torch.tensor([[20], [7]])
    for spec in ("yoso(hashes=3)", "yoso(expectation=True)", "yoso(hashes=3, bits=4)"):
        whole, cut = (
            sparing.inspect(x.q, x.k, x.payload, mask, method=spec, seed=0) for mask in (None, keys_mask(keep))
        )
        assert whole.statistics["bits"].tolist() == ([4, 4] if "bits" in spec else [5, 5])
        assert cut.statistics["bits"].tolist() == ([4, 4] if "bits" in spec else [5, 3])
        if "hashes" in spec:
            assert whole.statistics["query_codes"].shape == whole.statistics["key_codes"].shape == (2, 2, 20, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hashes": 0}, "hashes=0"),
        ({"bits": 0}, "bits=0 must be at least 1"),
        ({"bits": 17}, "bits=17 must be at most 16"),
        ({"normalize": "softmax"}, "normalize='softmax'"),
        ({"hash": "crosspolytope"}, "hash='crosspolytope'"),
        ({"gradient": "none"}, "gradient='none'"),
        ({"convolution": 4}, "convolution=4 must be odd"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        Yoso(**settings)


def test_second_derivatives_are_refused():
    for impl in ("auto", "reference"):
        x = tracked(clustered(10))
        (g,) = torch.autograd.grad(run(YOSO, x, impl=impl)[..., 0].sum(), x.q, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            g.sum().backward()


def drawn(x: Inputs, count: int) -> Inputs:
    """The one head of x as many times: every head draws its own hashes."""
    return x.map(lambda t: t.expand(-1, count, -1, -1).contiguous())


# 1500 draws of 4 hashes, the test and the threshold of `assert_unbiased`. A factor of hashes (1/m forgotten) and codes of the keys in place of those of the queries (a port
# of the public code) must be caught.
@pytest.mark.statistical
@pytest.mark.parametrize(("hash", "d"), [("hadamard", 20), ("gaussian", 8)])
def test_the_sample_is_unbiased(hash, d):
    x = clustered(20, d=d, e=4, heads=1)
    method = Yoso(hashes=4, hash=hash, normalize="none")
    wanted = run(Yoso(expectation=True, normalize="none"), x)[0, 0]
    samples = torch.cat([run(method, drawn(x, 300), seed=seed)[0] for seed in range(5)])
    assert_unbiased(samples - wanted)
    with pytest.raises(AssertionError, match="biased"):
        assert_unbiased(samples * method.hashes - wanted)
    swapped = drawn(Inputs(x.k, x.k, x.value), 300)
    with pytest.raises(AssertionError, match="biased"):
        assert_unbiased(run(method, swapped)[0] - wanted)


# Variance over 300 draws at 2, 8, 32 and 128 hashes; slope of its logarithm in that of the hashes is -1. The standard error
# of each log-variance of the whole output is below .1, hence of the slope below .03: .1 is more than three of them.
@pytest.mark.statistical
def test_the_variance_falls_like_one_over_the_hashes():
    x = drawn(clustered(20, d=20, e=4, heads=1), 300)
    levels = torch.tensor([2.0, 8.0, 32.0, 128.0])
    variances = torch.stack([run(Yoso(hashes=int(m), normalize="none"), x).var(1).sum() for m in levels])
    log_m, log_v = levels.log().double(), variances.log()
    slope = ((log_m - log_m.mean()) * log_v).sum() / (log_m - log_m.mean()).square().sum()
    assert abs(float(slope) + 1) < 0.1


# Eq. 22 estimates eq. 19 and the weight B bits / (p pi sqrt(1 - x^2)) estimates eq. 11, over 1200 draws. The second version
# of the public code adds f' for every pair that collides at all, which has the mean (1 - (1 - f)^hashes) f'.
@pytest.mark.statistical
@pytest.mark.parametrize("gradient", ["lower_bound", "exact"])
def test_the_sampled_gradient_is_unbiased_for_its_formula(gradient):
    x = clustered(16, d=8, e=4, heads=1)
    g = torch.randn(1, 1, 16, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def gradients(method: Yoso, y: Inputs, seed: int = 0) -> Tensor:
        y = tracked(y)
        to_q, to_k = torch.autograd.grad(run(method, y, seed=seed), (y.q, y.k), g.expand(1, y.q.shape[1], -1, -1))
        return torch.cat([to_q[0], to_k[0]], dim=-2)

    sampled = Yoso(hashes=4, bits=3, normalize="none", gradient=gradient)
    wanted = gradients(Yoso(bits=3, normalize="none", expectation=True, gradient=gradient), x)[0]
    samples = torch.cat([gradients(sampled, drawn(x, 400), seed) for seed in range(3)])
    assert_unbiased(samples - wanted)

    y = tracked(drawn(x, 400))
    cosine = unit(y.q) @ unit(y.k).mT
    slope = 3 * agreement(cosine.detach()) ** 3 * steepness(cosine.detach())
    pairs = (g @ y.payload.mT).detach() * (dense_weights(sampled, y) > 0) * slope
    control = torch.autograd.grad((pairs * cosine).sum(), (y.q, y.k))
    with pytest.raises(AssertionError, match="biased"):
        assert_unbiased(torch.cat([c[0] for c in control], dim=-2) - wanted)


def test_codes_of_queries_and_keys_are_different():
    """With the keys' codes in place of the queries', outputs lose their direction."""
    x = clustered(100, d=32)
    method = Yoso(hashes=64, normalize="none")
    facts = sparing.inspect(x.q, x.k, x.value, method=method, seed=0).statistics
    wanted = run(Yoso(expectation=True), x)

    def cosine(query_codes: Tensor) -> float:
        b = (query_codes.unsqueeze(-2) == facts["key_codes"].unsqueeze(-3)).double().mean(-1)
        return float((unit(b @ x.payload) * wanted).sum(-1).mean())

    assert cosine(facts["query_codes"]) > 0.8
    assert cosine(facts["key_codes"]) < 0.4
