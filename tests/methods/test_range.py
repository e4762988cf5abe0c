"""Entries, masks and scales at the edges of their range, against dense attention in float64 and torch's own."""

import math
from fractions import Fraction

import pytest
import torch
from torch.nn.functional import elu, scaled_dot_product_attention

import sparing
from sparing import Unsupported

SOFTMAX = ("exact", "kernel(kind=exp)", "key_clusters(keys=200)", "window(size=200)", "top_keys(keys=200)")
IMPLS = ("auto", "reference")


def qkv(seed=0, n=33, dtype=torch.float32):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(3, 2, 2, n, 8, generator=gen, dtype=dtype).unbind(0)


def dense(q, k, v, scale=None, causal=False, mask=None):
    """Softmax attention in float64, by nothing of the library's."""
    q, k, v = q.double(), k.double(), v.double()
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if mask is not None:
        scores = scores + mask.double()
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    return scores.softmax(-1) @ v


def relative(found, wanted):
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("method", SOFTMAX)
@pytest.mark.parametrize("causal", [False, True])
def test_full_budgets_equal_dense_softmax_over_the_whole_range(method, impl, causal):
    q, k, v = qkv()
    for by_q, by_k, by_v, scale in (
        (1e14, 1e-14, 1, None),
        (1e-14, 1e14, 1, None),
        (1e13, 1e13, 1, 1e-26),
        (1e-15, 1e-15, 1, 1e30),
        (1e30, 1e30, 1, 1e-60),
        (1, 1, 1e37, None),
        (1, 1, 1, 0.0),
        (1, 1, 1, -0.5),
        (1, 1, 1, -1e-30),
        (1, 1, 1, 1e-46),  # zero in float32
        (1, 1, 1, -5e-324),
        (1e30, 1e30, 1, 1e-320),
    ):
        x = (q * by_q, k * by_k, v * by_v)
        found = sparing.attention(*x, method=method, is_causal=causal, scale=scale, impl=impl)
        error = relative(found, dense(*x, scale, causal))
        assert error < 1e-5, f"{by_q} {by_k} {by_v} scale={scale}: {error:.3g}"


def test_large_queries_beside_small_keys_equal_torch():
    q, k, v = qkv()
    wanted = scaled_dot_product_attention(q * 1e14, k * 1e-14, v)
    torch.testing.assert_close(sparing.attention(q * 1e14, k * 1e-14, v), wanted)


def test_elu_keys_of_any_size_count_by_their_features():
    q, k, v = qkv()
    a, b = (elu(x.double()) + 1 for x in (q, k * 1e13))
    weights = a @ b.mT
    wanted = weights / weights.sum(-1, keepdim=True) @ v.double()
    assert relative(sparing.attention(q, k * 1e13, v, method="kernel(kind=elu)"), wanted) < 1e-5


@pytest.mark.parametrize("size", [1e-20, 1e-30])
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("n", [33, 257])  # by all pairs, and by the feature map
@pytest.mark.parametrize("impl", IMPLS)
def test_polynomial_weights_do_not_underflow(size, degree, n, impl):
    q, k, v = qkv(n=n)
    q, k = q * size, k * size
    weights = (q.double() / size @ (k.double() / size).mT) ** degree
    wanted = weights / weights.sum(-1, keepdim=True) @ v.double()
    found = sparing.attention(q, k, v, method=f"kernel(kind=poly, degree={degree})", impl=impl)
    assert relative(found, wanted) < 1e-4  # float32 queries of 1e-30 keep about as many digits


def gaussian_by_fractions(q, k, v, scale):
    """Gaussian attention by row of (n, d) rows: exponents as fractions, which round nothing."""
    out = []
    for a in q.tolist():
        logs = [-Fraction(scale) / 2 * sum((Fraction(x) - Fraction(y)) ** 2 for x, y in zip(a, b)) for b in k.tolist()]
        weights = torch.tensor([math.exp(log - max(logs)) for log in logs], dtype=torch.float64)
        out.append(weights / weights.sum() @ v.double())
    return torch.stack(out)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e3, 1e14])
def test_gaussian_weights_keep_small_keys_beside_large_queries(size, dtype, impl):
    q, k, v = (x[0, 0] for x in qkv(n=7, dtype=dtype))
    q, k = q * size, k / size
    wanted = gaussian_by_fractions(q, k, v, 0.25)
    found = sparing.attention(q[None, None], k[None, None], v[None, None], method="kernel(kind=gaussian)", scale=0.25,
                              impl=impl)[0, 0]  # fmt: skip
    assert relative(found, wanted) < (1e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1e4, 1e30])
def test_one_enormous_query_does_not_decide_the_summaries_of_key_clusters(size, causal):
    q, k, v = qkv(n=300)
    q, k = q * 2, k * 2
    large = q.clone()
    large[0, 0, 20] *= size
    method, rows = "key_clusters(clusters=16, keys=32, chunk=64)", torch.arange(300) != 20

    def error(x, impl):
        found = sparing.attention(x, k, v, is_causal=causal, method=method, seed=0, impl=impl)
        return (found.double() - dense(x, k, v, causal=causal))[0, 0, rows].norm()

    for impl in IMPLS:
        assert error(large, impl) < 1.3 * error(q, impl)
    fast, plain = (sparing.attention(large, k, v, is_causal=causal, method=method, seed=0, impl=i) for i in IMPLS)
    assert relative(fast, plain.double()) < 1e-5


@pytest.mark.parametrize("order", [1, 2])
def test_key_clusters_on_tiny_keys_gives_the_mean_that_equal_weights_give(order):
    q, k, v = qkv()
    for size in (1e-19, 1e-20, 1e-22):  # variances of the queries are no normal floats
        method = f"key_clusters(clusters=6, keys=8, window=4, chunk=16, order={order})"
        found = sparing.attention(q * size, k * size, v, method=method, seed=0)
        assert relative(found, v.double().mean(-2, keepdim=True).expand_as(v)) < 1e-5


@pytest.mark.parametrize(
    ("method", "by_q", "by_k"), [("exact", 1e14, 1e-14), ("kernel(kind=elu)", 1, 1e13), ("window(size=8)", 1e14, 1e-14)]
)
def test_gradients_of_rows_with_extreme_entries_are_those_of_float64(method, by_q, by_k):
    q, k, v = qkv()
    q, k = q * by_q, k * by_k
    found, wanted = [], []
    for dtype, grads in ((torch.float32, found), (torch.float64, wanted)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = sparing.attention(*leaves, method=method, is_causal=True, impl="auto")
        grads += torch.autograd.grad(out.square().sum(), leaves)
    for a, b in zip(found, wanted, strict=True):
        assert relative(a, b) < 1e-5


def test_rows_that_see_no_extreme_entry_stay_the_same_to_the_bit():
    q, k, v = qkv()
    large = k.clone()
    large[0, 1, 20] = 1e20
    for method in ("exact", "window(size=4)", "kernel(kind=elu)"):
        before, after = (sparing.attention(q, x, v, method=method, is_causal=True) for x in (k, large))
        touched = (before != after).any(-1)
        assert touched[0, 1, 20:].any()
        touched[0, 1, 20:] = False
        assert not touched.any(), method


def test_inspect_reports_rows_with_extreme_entries_as_float64_does():
    q, k, v = qkv()
    q = q.clone()
    q[1, 0, 5] *= 1e14
    found, wanted = (
        sparing.inspect(x, k.to(x.dtype), v.to(x.dtype), method="top_keys(keys=4)") for x in (q, q.double())
    )
    torch.testing.assert_close(found.lse.double(), wanted.lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.statistics["mass"].double(), wanted.statistics["mass"], rtol=1e-4, atol=1e-5)


def test_a_learned_projection_takes_extreme_entries():
    layer = sparing.nn.MultiheadAttention(16, 2, batch_first=True, method="linformer(rank=4)", max_length=12)
    x = torch.randn(1, 12, 16)
    with torch.no_grad():
        layer.in_proj_weight[:16] *= 1e13
        found, _ = layer(x, x, x)
    assert found.isfinite().all()


def test_float64_entries_whose_products_overflow_are_refused_by_name():
    q, k, v = qkv(dtype=torch.float64)
    message = r"query holds entries of up to .*e\+100 and key entries of up to .*e\+200.* scale query or key down"
    with pytest.raises(ValueError, match=message):
        sparing.attention(q * 1e100, k * 1e200, v)
    with pytest.raises(ValueError, match=r"query holds entries .* scale=1e\+302"):
        sparing.attention(q, k, v, scale=1e302)
    for method in ("kernel(kind=gaussian)", "skyformer", "yoso"):  # which see more than products
        with pytest.raises(ValueError, match=r"key holds entries of up to .*e\+200.* scale key down"):
            sparing.attention(q * 1e-200, k * 1e200, v, method=method)
    assert sparing.attention(q * 1e-100, k * 1e-100, v, scale=1e200).isfinite().all()
    keep = torch.ones(2, 1, 1, 33, dtype=torch.bool)
    keep[..., 30:] = False
    before = sparing.attention(q, k, v, keep)
    q[:, :, 30:] *= 1e200
    k[:, :, 30:] *= 1e200
    assert torch.equal(sparing.attention(q, k, v, keep)[:, :, :30], before[:, :, :30])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("method", SOFTMAX)
@pytest.mark.parametrize("causal", [False, True])
def test_float64_products_in_range_are_computed_whatever_the_sizes(method, impl, causal):
    q, k, v = qkv(dtype=torch.float64)
    for by_q, by_k, scale in (
        (1e160, 1e-160, None),
        (1e-160, 1e160, None),
        (1e300, 1e-300, None),
        (1e200, 1e-200, -0.5),
        (1e100, 1e-250, 1e150),
        (1, 1e200, 1e-200),
        (1, 1e200, None),  # one key for each query
        (1e300, 0, None),
    ):
        x = (q * by_q, k * by_k, v)
        found = sparing.attention(*x, method=method, is_causal=causal, scale=scale, impl=impl)
        error = relative(found, dense(*x, scale, causal))
        assert error < 1e-9, f"{by_q} {by_k} scale={scale}: {error:.3g}"


def test_float64_queries_and_keys_of_opposite_sizes_change_no_bit():
    q, k, v = qkv(dtype=torch.float64)
    powers = torch.tensor([2.0**600, 2.0**-600], dtype=torch.float64)[None, :, None, None]  # one for each head
    for options in ({}, {"is_causal": True}, {"impl": "reference"}):
        assert torch.equal(
            sparing.attention(q * powers, k / powers, v, **options), sparing.attention(q, k, v, **options)
        )
    shared = sparing.attention(q * 2.0**600, k[:, :1] * 2.0**-600, v[:, :1], enable_gqa=True)
    assert torch.equal(shared, sparing.attention(q, k[:, :1], v[:, :1], enable_gqa=True))
    keep = torch.ones(2, 1, 1, 33, dtype=torch.bool)
    keep[0, ..., 30:] = False
    assert torch.equal(sparing.attention(q * powers, k / powers, v, keep), sparing.attention(q, k, v, keep))


def test_gradients_of_float64_queries_and_keys_of_opposite_sizes_are_scaled_alike():
    q, k, v = qkv(dtype=torch.float64)
    found = []
    for size in (1.0, 2.0**600):
        leaves = [x.requires_grad_() for x in (q * size, k / size, v.clone())]
        grads = torch.autograd.grad(sparing.attention(*leaves).square().sum(), leaves)
        found.append([grads[0] * size, grads[1] / size, grads[2]])
    for wanted, ours in zip(*found, strict=True):
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize(
    "method", [name for name, cls in sparing.list_methods().items() if cls().supports.training_free]
)
@pytest.mark.parametrize("impl", IMPLS)
def test_methods_for_softmax_weights_take_float64_of_opposite_sizes(method, impl):
    q, k, v = qkv(dtype=torch.float64)
    if sparing.method(method).supports.projection:
        v = sparing.Projection(torch.randn(2, 33, 7, dtype=torch.float64), torch.randn(16, 7, dtype=torch.float64))
    assert sparing.attention(q * 1e160, k * 1e-160, v, method=method, impl=impl, seed=0).isfinite().all()


@pytest.mark.parametrize("method", ["exact", "top_keys(keys=8)", "value_aware(keys=4)", "sampled(samples=4)"])
@pytest.mark.parametrize("impl", IMPLS)
def test_nan_in_a_mask_spoils_the_rows_that_see_it(method, impl):
    q, k, v = qkv()
    for bad in (math.nan, math.inf):
        mask = torch.zeros(33, 33)
        mask[3, 2] = bad  # seen
        mask[5, 9] = bad  # in the future of row 5
        out = sparing.attention(q, k, v, mask, method=method, impl=impl, is_causal=True, seed=0)
        rows = out.isnan().all(-1)
        assert rows[:, :, 3].all()
        assert not out.isnan().any(-1)[:, :, torch.arange(33) != 3].any()
        clean = sparing.attention(q, k, v, mask.nan_to_num(0, 0), method=method, impl=impl, is_causal=True, seed=0)
        torch.testing.assert_close(out[:, :, 4:], clean[:, :, 4:])


@pytest.mark.parametrize(
    ("scale", "shown"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf"), (10**400, "an integer beyond")]
)
def test_a_scale_that_is_not_finite_is_refused(scale, shown):
    with pytest.raises(ValueError, match=f"scale={shown}.* must be finite"):
        sparing.attention(*qkv(), scale=scale)


def test_gradients_at_large_logits_are_finite_and_right():
    """torch's fused backward pass gives inf here: it takes weights from a rounded log-sum-exp."""
    q, k, v = qkv(n=16)
    found, wanted = [], []
    for dtype, grads in ((torch.float32, found), (torch.float64, wanted)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k * 1e9, v)]
        grads += torch.autograd.grad(sparing.attention(*leaves).square().sum(), leaves)
    assert all(bool(g.isfinite().all()) for g in found)
    assert relative(found[2], wanted[2]) < 1e-5


def test_float64_masks_beyond_float32_hide_and_spoil_nothing():
    q, k, v = qkv()
    mask = torch.zeros(33, 33, dtype=torch.float64)
    mask[0], mask[1], mask[2, 5] = -1e300, 1e39, -1e300
    assert relative(sparing.attention(q, k, v, mask), dense(q, k, v, mask=mask)) < 1e-5


def test_key_clusters_takes_scales_whose_square_overflows():
    q, k, v = (x * 1e-150 for x in qkv(dtype=torch.float64))
    for impl in IMPLS:
        out = sparing.attention(
            q, k, v, method="key_clusters(keys=4, clusters=4, window=2)", scale=1e300, impl=impl, seed=0
        )
        assert out.isfinite().all()


def test_distances_refuse_a_negative_scale():
    with pytest.raises(Unsupported, match="scale"):
        sparing.attention(*qkv(), scale=-1.0, method="kernel(kind=gaussian)")
