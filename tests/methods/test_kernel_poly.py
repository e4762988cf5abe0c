"""Polynomial kernels: the formula, rows without weight, and the feature map where it pays."""

import pytest
import torch

import sparing
from sparing.methods.kernel.features import square_features
from sparing.methods.kernel.method import Kernel
from tests.support.inputs import keys_mask, padding, peaked

IMPLS = ["reference", "auto"]


def peaked_inputs(count, n=40, d=16):
    return peaked(sparing.method("kernel"), count, n=n, d=d)


def assert_close(found, wanted, tolerance=1e-10):
    error = float((found - wanted).abs().max())
    assert error <= tolerance * max(1.0, float(wanted.abs().max())), f"error {error:.3g}"


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("degree", [2, 4, 6])
def test_poly_is_its_formula_free_of_scale_and_sign(impl, degree):
    x = peaked_inputs(8)
    w = (x.q @ x.k.mT).pow(degree)
    spec = f"kernel(kind=poly, degree={degree})"
    wanted = w @ x.value / w.sum(-1, keepdim=True)
    for factor, scale in ((1.0, None), (-3.0, 0.01), (1e-4, 5.0)):
        found = sparing.attention(factor * x.q, x.k, x.value, method=spec, scale=scale, impl=impl)
        assert_close(found, wanted)


def _weights(q, k):
    """The weights at degree 64: attention to the values e_1, ..., e_n."""
    return sparing.attention(q, k, torch.eye(k.shape[-2])[None, None], method="kernel(kind=poly, degree=64)")


def test_high_degrees_pick_the_largest_magnitude_and_lose_the_sign():
    q = torch.ones(1, 1, 1, 1)
    k = torch.tensor([[1.0], [-1.2], [0.5]])[None, None]
    assert float(_weights(q, k)[0, 0, 0, 1]) > 0.99
    k = torch.tensor([[1.2], [-1.2], [0.5]])[None, None]  # distinct values of equal magnitude stay tied
    assert_close(_weights(q, k)[0, 0, 0, :2], torch.tensor([0.5, 0.5]), 1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_poly_without_any_weight_averages_what_it_sees(impl):
    k = torch.zeros(1, 1, 40, 4).index_fill(-1, torch.tensor([0, 1]), 1.0)
    q = torch.tensor([0.0, 0.0, 1.0, 2.0]).expand(1, 1, 40, 4)  # orthogonal to every key
    v = torch.randn(1, 1, 40, 3)
    spec = "kernel(kind=poly)"
    assert_close(
        sparing.attention(q, k, v, method=spec, impl=impl), v.mean(-2, keepdim=True).expand(-1, -1, 40, -1), 1e-6
    )
    prefix = v.cumsum(-2) / torch.arange(1, 41)[:, None]
    assert_close(sparing.attention(q, k, v, method=spec, impl=impl, is_causal=True), prefix, 1e-6)
    keep = padding("holes", 1, 40)
    wanted = v[:, :, keep[0]].mean(-2, keepdim=True).expand(-1, -1, 40, -1)
    assert_close(sparing.attention(q, k, v, keys_mask(keep), method=spec, impl=impl), wanted, 1e-6)


def assert_accurate_when_nearly_orthogonal(attend):
    """Keys near a plane, queries almost orthogonal to it: sum (q.k)^2 is 1e-6 of its bound |q|^2 sum |k|^2."""
    gen = torch.Generator().manual_seed(0)
    k = torch.randn(1, 2, 600, 8, generator=gen, dtype=torch.float64)
    k[..., 2:] *= 1e-3
    q = torch.randn(1, 2, 300, 8, generator=gen, dtype=torch.float64)
    q[..., ::2, :2] *= 1e-4  # every other query
    v = torch.randn(1, 2, 600, 5, generator=gen, dtype=torch.float64)
    turn = torch.linalg.qr(
        torch.randn(8, 8, generator=gen, dtype=torch.float64)
    ).Q  # off the axes, so that terms cancel
    q, k = ((x @ turn).float().double() for x in (q, k))
    w = (q @ k.mT).square()
    wanted = w @ v / w.sum(-1, keepdim=True)
    assert_close(attend(q.float(), k.float(), v.float()).double(), wanted, 3e-5)


def test_poly_by_features_is_taken_and_accurate(monkeypatch):
    taken = []
    real = Kernel._squares
    monkeypatch.setattr(Kernel, "_squares", lambda *args: taken.append(1) or real(*args))
    assert_accurate_when_nearly_orthogonal(lambda q, k, v: sparing.attention(q, k, v, method="kernel(kind=poly)"))
    assert taken


def test_features_alone_cancel():
    def unguarded(q, k, v):
        both = square_features(q) @ (square_features(k).mT @ torch.cat([v, torch.ones_like(v[..., :1])], -1))
        return both[..., :-1] / both[..., -1:]

    with pytest.raises(AssertionError):
        assert_accurate_when_nearly_orthogonal(unguarded)


def test_square_features():
    for d in (1, 2, 7):
        x, y = torch.randn(2, 5, d, dtype=torch.float64)
        assert square_features(x).shape == (5, d * (d + 1) // 2)
        assert_close((square_features(x) * square_features(y)).sum(-1), (x * y).sum(-1).square(), 1e-12)


def test_poly_takes_its_features_only_where_they_pay():
    x = peaked_inputs(8, n=64, d=4)  # 10 features, 64 keys
    method = sparing.method("kernel(kind=poly)")
    for causal in (False, True):
        options = {"method": method, "is_causal": causal}
        found, wanted = (sparing.attention(x.q, x.k, x.value, impl=impl, **options) for impl in ("auto", "reference"))
        assert_close(found, wanted)
    shape = sparing.Shape(queries=4096, keys=4096, head_dim=64, value_dim=64)
    dense = sparing.method("kernel(kind=poly, degree=4)").cost(shape)
    assert method.cost(shape).flops == dense.flops  # 2080 features are more than half of 4096
    longer = sparing.Shape(queries=8192, keys=8192, head_dim=64, value_dim=64)
    assert method.cost(longer).keys == 2080
    assert method.cost(longer).flops < sparing.method("kernel(kind=poly, degree=4)").cost(longer).flops


def test_gradients_agree_where_some_rows_go_dense():
    gen = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 120, 4, generator=gen, dtype=torch.float64)
    k[..., 3] = 0
    q[..., 5, :3] = 0  # no weight at all
    q[..., 6, :3] *= 1e-4  # hardly any
    q[..., 7, :] = 0
    weight = torch.randn(1, 2, 120, 4, generator=gen, dtype=torch.float64)
    found, wanted = ([], [])
    for impl, into in (("auto", found), ("reference", wanted)):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = sparing.attention(*leaves, method="kernel(kind=poly)", impl=impl)
        into += [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]
    for a, b in zip(found, wanted, strict=True):
        assert bool(a.isfinite().all())
        assert_close(a, b, 1e-9)


def test_a_scale_of_zero_sees_all_keys_alike():
    x = peaked_inputs(8, n=64, d=4)
    for impl in IMPLS:
        out = sparing.attention(x.q, x.k, x.value, method="kernel(kind=poly)", scale=0.0, impl=impl)
        assert_close(out, x.value.mean(-2, keepdim=True).expand_as(out))
