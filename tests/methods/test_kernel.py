"""Kernel attention: each kernel against its formula, its feature map, and the ways in which such code goes wrong."""

import math

import pytest
import torch
from torch.nn.functional import elu, scaled_dot_product_attention

import sparing
from sparing.methods.kernel.method import Kernel
from tests.support.inputs import Inputs, keys_mask, padding, peaked

SETTINGS = [
    "kernel", "kernel(kind=poly)", "kernel(kind=poly, degree=4)", "kernel(kind=elu)", "kernel(kind=elu, normalize=none)",
    "kernel(kind=elu, normalize=length)", "kernel(kind=gaussian)", "kernelized", "kernel(kind=gaussian, normalize=length)",
]  # fmt: skip
IMPLS = ["reference", "auto"]


def peaked_inputs(count=4.0, n=40, d=16, e=8, seed=0):
    return peaked(sparing.method("kernel"), count, n=n, d=d, e=e, seed=seed)


def run(spec, x, **kwargs):
    return sparing.attention(x.q, x.k, x.value, method=spec, **kwargs)


def weights_of(spec, q, k, **kwargs):
    """The weights themselves: attention to the values e_1, ..., e_n."""
    eye = torch.eye(k.shape[-2], dtype=k.dtype).expand(*k.shape[:2], -1, -1)
    return sparing.attention(q, k, eye, method=spec, **kwargs)


def assert_close(found, wanted, tolerance=1e-10):
    error = float((found - wanted).abs().max())
    assert error <= tolerance * max(1.0, float(wanted.abs().max())), f"error {error:.3g}"


# exp


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("causal", [False, True])
def test_exp_is_softmax_attention(impl, causal):
    for count, dtype, tolerance in ((1.5, torch.float64, 1e-10), (4, torch.float64, 1e-10), (16, torch.float32, 1e-6)):
        x = peaked_inputs(count).map(lambda t, dtype=dtype: t.to(dtype))
        for scale in (None, 0.2, -0.2):
            wanted = scaled_dot_product_attention(x.q, x.k, x.value, is_causal=causal, scale=scale)
            assert_close(run("kernel", x, impl=impl, is_causal=causal, scale=scale), wanted, tolerance)


# gaussian


def assert_gaussian_identity(weights_fn):
    """C = D_Q^(-1/2) A D_K^(-1/2), A = exp(Q K^T / sqrt d), for every width: Skyformer eq. 3."""
    for d in (4, 20, 32, 64):
        x = peaked_inputs(8, d=d)
        root = math.sqrt(d)
        a = (x.q @ x.k.mT / root).exp()
        wanted = (-x.q.square().sum(-1, keepdim=True) / (2 * root)).exp() * a
        wanted = wanted * (-x.k.square().sum(-1).unsqueeze(-2) / (2 * root)).exp()
        assert_close(weights_fn(x.q, x.k), wanted)


@pytest.mark.parametrize("impl", IMPLS)
def test_gaussian_is_the_rescaled_exponential(impl):
    assert_gaussian_identity(lambda q, k: weights_of("kernelized", q, k, impl=impl))


def test_gaussian_identity_catches_a_hard_coded_width():
    def hard_coded(q, k):
        return weights_of("kernelized", q, k, scale=32**-0.5)

    with pytest.raises(AssertionError):
        assert_gaussian_identity(hard_coded)


@pytest.mark.parametrize("impl", IMPLS)
def test_gaussian_weights_lie_in_the_unit_interval(impl):
    x = peaked_inputs(4)
    for scale in (None, 0.0, 0.05, 3.0):
        w = weights_of("kernelized", x.q, x.k, impl=impl, scale=scale)
        assert float(w.min()) >= 0
        assert float(w.max()) <= 1
    for dtype in (torch.float32, torch.float64):
        k = (100 * x.k).to(dtype)
        diagonal = weights_of("kernelized", k, k, impl=impl).diagonal(dim1=-2, dim2=-1)
        # The product form rounds |q - k|^2 in units of eps |k|^2; differences make it exactly zero.
        slack = 0 if impl == "reference" else 8 * torch.finfo(dtype).eps * float(k.square().sum(-1).max())
        assert float((1 - diagonal).abs().max()) <= slack
        assert float(diagonal.max()) <= 1


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("normalize", ["none", "row", "length"])
def test_gaussian_sees_differences_only(impl, normalize):
    x = peaked_inputs(4)
    shift = torch.randn(16, dtype=torch.float64)
    spec = f"kernel(kind=gaussian, normalize={normalize})"
    moved = sparing.attention(x.q + shift, x.k + shift, x.value, method=spec, impl=impl)
    assert_close(moved, run(spec, x, impl=impl))


def assert_survives_distance(attend):
    """Queries 60 away from every key, in float32: kappa < exp(-400) underflows, its ratios do not."""
    x = peaked_inputs(4)
    far = Inputs(x.q + 15, x.k, x.value).map(lambda t: t.float())
    wide = far.map(lambda t: t.double())
    logs = -torch.cdist(wide.q, wide.k).square() / (2 * math.sqrt(16))
    assert float(logs.max()) < -200
    found = attend(far.q, far.k, far.value)
    assert bool(found.isfinite().all()), "not finite"
    assert_close(found.double(), logs.softmax(-1) @ wide.value, 1e-3)


@pytest.mark.parametrize("impl", IMPLS)
def test_gaussian_by_row_does_not_underflow(impl):
    assert_survives_distance(lambda q, k, v: sparing.attention(q, k, v, method="kernel(kind=gaussian)", impl=impl))


def test_a_plain_quotient_underflows():
    def naive(q, k, v):
        w = (-torch.cdist(q, k).square() / (2 * math.sqrt(16))).exp()
        return w @ v / w.sum(-1, keepdim=True)

    with pytest.raises(AssertionError, match="not finite"):
        assert_survives_distance(naive)


@pytest.mark.parametrize("kind", ["gaussian", "elu"])
@pytest.mark.parametrize("impl", IMPLS)
def test_what_grows_with_the_length(kind, impl):
    x = peaked_inputs(4)
    twice = Inputs(x.q, torch.cat([x.k, x.k], -2), torch.cat([x.value, x.value], -2))
    for normalize, factor in (("none", 2), ("row", 1), ("length", 1)):
        spec = f"kernel(kind={kind}, normalize={normalize})"
        assert_close(run(spec, twice, impl=impl), factor * run(spec, x, impl=impl))


@pytest.mark.parametrize("kind", ["gaussian", "elu"])
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("causal", [False, True])
def test_length_divides_by_the_keys_in_sight(kind, impl, causal):
    x = peaked_inputs(4)
    keep = padding("holes", 1, 40)
    options = {"attn_mask": keys_mask(keep), "is_causal": causal, "impl": impl}
    whole, mean = (run(f"kernel(kind={kind}, normalize={n})", x, **options) for n in ("none", "length"))
    seen = keep.long().cumsum(-1) if causal else keep.sum(-1, keepdim=True).expand(1, 40)
    assert_close(mean * seen[:, None, :, None], whole)


# elu


@pytest.mark.parametrize("impl", IMPLS)
def test_elu_equals_its_linear_form(impl):
    for count in (1.5, 16):
        x = peaked_inputs(count, n=150)
        phi_q, phi_k = 1 + elu(x.q), 1 + elu(x.k)
        wanted = phi_q @ (phi_k.mT @ x.value) / (phi_q @ phi_k.sum(-2).unsqueeze(-1))
        assert_close(run("kernel(kind=elu)", x, impl=impl), wanted)
        states = (phi_k.unsqueeze(-1) * x.value.unsqueeze(-2)).cumsum(-3)  # (B, H, n, d, e): prefix sums
        wanted = torch.einsum("bhnd,bhnde->bhne", phi_q, states) / (phi_q * phi_k.cumsum(-2)).sum(-1, keepdim=True)
        assert_close(run("kernel(kind=elu)", x, impl=impl, is_causal=True), wanted)


@pytest.mark.parametrize("impl", IMPLS)
def test_elu_ignores_the_scale(impl):
    x = peaked_inputs()
    for normalize in ("row", "none"):
        spec = f"kernel(kind=elu, normalize={normalize})"
        assert torch.equal(run(spec, x, impl=impl, scale=7.0), run(spec, x, impl=impl))


def assert_survives_negative_entries(attend):
    """All entries near -60, in float32: 1 + ELU rounds to zero, exp(x) does not; the kernel is positive."""
    x = peaked_inputs(4)
    low = Inputs(-60 + x.q.clamp(-5, 5), -60 + x.k.clamp(-5, 5), x.value).map(lambda t: t.float())
    phi_q, phi_k = (t.double().exp() for t in (low.q, low.k))
    w = phi_q @ phi_k.mT
    wanted = w @ low.value.double() / w.sum(-1, keepdim=True)
    assert_close(attend(low.q, low.k, low.value).double(), wanted, 1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_elu_keeps_its_digits_far_below_zero(impl):
    assert_survives_negative_entries(lambda q, k, v: sparing.attention(q, k, v, method="kernel(kind=elu)", impl=impl))


def test_one_plus_elu_as_written_loses_them():
    def naive(q, k, v):
        w = (1 + elu(q)) @ (1 + elu(k)).mT
        return (w @ v / w.sum(-1, keepdim=True)).nan_to_num(0.0)

    with pytest.raises(AssertionError):
        assert_survives_negative_entries(naive)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_row_of_underflowing_elu_weights_averages_what_it_sees(impl, causal):
    q = torch.tensor([[2.0, -900.0]]).expand(1, 1, 5, 2)
    k = torch.tensor([[-900.0, 2.0]]).expand(1, 1, 5, 2)
    v = torch.randn(1, 1, 5, 3)
    wanted = v.cumsum(-2) / torch.arange(1, 6)[:, None] if causal else v.mean(-2, keepdim=True).expand(1, 1, 5, 3)
    assert_close(sparing.attention(q, k, v, method="kernel(kind=elu)", impl=impl, is_causal=causal), wanted, 1e-6)


# all kernels


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("spec", SETTINGS)
def test_a_masked_key_has_no_effect_at_all(spec, impl):
    x = peaked_inputs(4).map(lambda t: t.float())
    mask = torch.rand(1, 2, 40, 40, generator=torch.Generator().manual_seed(0)) < 0.7
    mask[..., 11] = False
    mask[..., 5, :] = False
    before = run(spec, x, attn_mask=mask, impl=impl)
    k, v = x.k.clone(), x.value.clone()
    k[..., 11, :], v[..., 11, :] = 1e3, 1e6
    assert torch.equal(sparing.attention(x.q, k, v, mask, method=spec, impl=impl), before)
    assert bool((before[..., 5, :] == 0).all()), "a row that sees nothing must give zeros"
    assert bool((before[..., 6, :] != 0).any())


@pytest.mark.parametrize("spec", SETTINGS)
def test_both_paths_agree_under_any_mask(spec):
    x = peaked_inputs(4, n=300)  # more than one block of rows
    gen = torch.Generator().manual_seed(0)
    for shape in ((1, 2, 300, 300), (300, 300), (1, 1, 300, 1)):
        mask = torch.rand(shape, generator=gen) < 0.5
        for causal in (False, True):
            found, wanted = (run(spec, x, attn_mask=mask, is_causal=causal, impl=i) for i in ("auto", "reference"))
            assert_close(found, wanted, 1e-9)


def test_targets():
    assert sparing.method("kernel").exact_target() == sparing.method("exact")
    assert sparing.method("kernel(kind=elu)").exact_target() is None
    assert sparing.method("kernelized") == Kernel(kind="gaussian", normalize="none")
    assert str(sparing.method("kernelized")) == "kernel(kind='gaussian', normalize='none')"


def test_elu_costs_linear_time():
    def flops(spec, n):
        return sparing.method(spec).cost(sparing.Shape(queries=n, keys=n, head_dim=32, value_dim=32)).flops

    assert flops("kernel(kind=elu)", 8192) == 8 * flops("kernel(kind=elu)", 1024)
    assert flops("kernelized", 8192) == 64 * flops("kernelized", 1024)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "poly", "degree": 3}, "degree=3 must be even"),
        ({"kind": "poly", "degree": 0}, "degree=0 must be at least 2"),
        ({"kind": "elu", "degree": 4}, "degree=4 has no meaning for kind='elu'"),
        ({"kind": "exp", "normalize": "none"}, "normalize='none' with kind='exp' overflows"),
        ({"kind": "poly", "normalize": "length"}, "normalize='length' with kind='poly' overflows"),
        ({"kind": "rbf"}, "kind='rbf' is not one of 'exp', 'poly', 'elu', 'gaussian'"),
        ({"normalize": "n"}, "normalize='n' is not one of"),
    ],
)
def test_bad_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        Kernel(**fields)


def test_refusals():
    x = peaked_inputs()
    with pytest.raises(sparing.Unsupported, match=r"kernel\(kind='gaussian'\) does not support scale=-1"):
        run("kernel(kind=gaussian)", x, scale=-1.0)
    with pytest.raises(sparing.Unsupported, match="kernel does not support an additive attn_mask"):
        run("kernel", x, attn_mask=torch.randn(40, 40))


@pytest.mark.parametrize("normalize", ["row", "none"])
def test_gaussian_weights_keep_their_digits_far_from_the_origin(normalize):
    q, k, v = (0.5 * torch.randn(3, 1, 2, 50, 16, generator=torch.Generator().manual_seed(1))).unbind(0)
    q, k = q + 100, k + 100
    spec = f"kernel(kind=gaussian, normalize={normalize})"
    wanted = sparing.attention(q.double(), k.double(), v.double(), method=spec, impl="reference")
    found = sparing.attention(q, k, v, method=spec)
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
