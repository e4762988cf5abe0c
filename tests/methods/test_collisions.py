"""Sums over colliding pairs: tables, pairs and outer products against brute force; causality; memory."""

import math

import pytest
import torch
from torch import Tensor

from sparing.methods.yoso import tables
from sparing.methods.yoso.method import Yoso
from tests.support.allocations import largest_tensor
from tests.support.collision_cases import assert_close, clustered, dense_weights, tracked, unit
from tests.support.inputs import Inputs, by, make, run

both_paths = pytest.mark.parametrize("impl", ["native", "torch"])  # with kernels where there are some, and without


def brute_gradients(method: Yoso, x: Inputs, b: Tensor, g: Tensor, bits: int) -> list[Tensor]:
    """Eqs. 10 and 22 (or 11, sampled) by loops over the pairs' formula, for plain YOSO; then through q / |q|."""
    q, k, v, g = (t.double() for t in (unit(x.q.double()), unit(x.k.double()), x.payload, g))
    cosine = q @ k.mT
    slope = torch.full_like(cosine, bits / 2)
    if method.gradient == "exact":
        slope = bits / ((1 - cosine.clamp(-1, 1).arccos() / math.pi) * math.pi * (1 - cosine**2).clamp_min(1e-6).sqrt())
    pair = (g @ v.mT) * b * slope
    to_q, to_k = pair @ k, pair.mT @ q

    def through_norm(grad: Tensor, raw: Tensor, direction: Tensor) -> Tensor:
        return (grad - (grad * direction).sum(-1, keepdim=True) * direction) / raw.double().norm(dim=-1, keepdim=True)

    return [through_norm(to_q, x.q, q), through_norm(to_k, x.k, k), b.mT @ g]


CASES = [(1, 0), (2, 0), (7, 0), (33, 0), (33, 2), (100, 1), (257, 1), (257, 4)]


@pytest.mark.parametrize("gradient", ["lower_bound", "exact"])
@pytest.mark.parametrize(("n", "bits"), CASES)
@pytest.mark.parametrize("causal", [False, True])
@both_paths
def test_given_the_codes_tables_equal_the_dense_product_and_its_gradients(n, bits, causal, gradient, impl):
    method = Yoso(hashes=3, bits=bits or None, normalize="none", gradient=gradient)
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 2e-5)):
        x = tracked(clustered(n, dtype=dtype))
        b = dense_weights(method, x, causal=causal)
        out = by(impl, method, x, is_causal=causal)
        assert_close(out, b @ x.payload.double(), tolerance)
        g = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        found = torch.autograd.grad(out, x.leaves(), g)
        used = bits or max((n - 1).bit_length(), 1)
        for a, wanted in zip(found, brute_gradients(method, x, b, g, used), strict=True):
            assert_close(a, wanted, tolerance * (30 if gradient == "exact" else 1))  # slopes reach 1000/pi
        assert_close((g * out).sum(), (found[2] * x.payload).sum(), 1e-4 if dtype == torch.float32 else 1e-10)


@pytest.mark.parametrize("order", ["all", "past", "future"])
@pytest.mark.parametrize("spread", [1, 6, 400])
def test_pairs_and_outer_products_agree(order, spread, monkeypatch):
    """Every way of summing a bucket gives the sum; numbers of buckets may pass 2^31."""
    gen = torch.Generator().manual_seed(spread)
    n, m = 230, 190
    mine, theirs = (
        tables.Tokens(
            torch.arange(size // 2).repeat(2),
            torch.randn(size, 5, generator=gen, dtype=torch.float64),
            torch.randn(size, 4, generator=gen, dtype=torch.float64),
        )
        for size in (n, m)
    )
    buckets = tuple(
        torch.randint(spread, (size,), generator=gen) + ((torch.arange(size) >= size // 2).long() << 45)
        for size in (n, m)
    )
    pairs = buckets[0][:, None] == buckets[1]
    if order != "all":
        earlier, later = (mine.place[:, None], theirs.place)[:: 1 if order == "future" else -1]
        pairs &= earlier <= later
    wanted = (mine.left @ theirs.left.mT * pairs) @ theirs.point
    for tile, cost, at_once in ((32, 8, 1 << 13), (4, 0, 7), (4, 10**6, 1), (64, 10**6, 100)):
        monkeypatch.setattr(tables, "_TILE", tile)
        monkeypatch.setattr(tables, "_PAIR_COST", cost)
        monkeypatch.setattr(tables, "_PAIRS_AT_ONCE", at_once)
        found = tables.bucket_sums(mine, theirs, buckets, order)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_gradcheck_of_the_values_on_the_sampled_path():
    for method in (Yoso(hashes=3), Yoso(hashes=3, normalize="sum"), Yoso(hashes=3, bits=1, normalize="none")):
        for causal in (False, True):
            x = make(method, batch=1, n_q=5, d=4, e=2, dtype=torch.float64)
            v = x.payload.clone().requires_grad_()
            assert torch.autograd.gradcheck(
                lambda v, m=method, x=x, c=causal: run(m, x.with_payload(v), is_causal=c), (v,), eps=1e-6, atol=1e-7
            )


@pytest.mark.parametrize("bits", [1, 3])
@both_paths
def test_nothing_leaks_from_the_future_through_large_buckets(bits, impl):
    """Bit-equal outputs and gradients, although most tokens share a bucket with later ones."""
    method = Yoso(hashes=2, bits=bits)
    n, t = 300, 170
    x = clustered(n, dtype=torch.float32)
    seen = []
    for seed in (None, 1, 2):
        y = x
        if seed is not None:
            gen = torch.Generator().manual_seed(seed)
            y = x.map(
                lambda s, gen=gen: torch.cat(
                    [s[..., : t + 1, :], torch.randn(s[..., t + 1 :, :].shape, generator=gen)], -2
                )
            )
        y = tracked(y)
        out = by(impl, method, y, is_causal=True)[:, :, : t + 1]
        grads = torch.autograd.grad(out, y.leaves(), torch.ones_like(out))
        seen.append([out, *(g[..., : t + 1, :] for g in grads)])
        assert all(bool((g[..., t + 1 :, :] == 0).all()) for g in grads)
    for other in seen[1:]:
        for a, b in zip(seen[0], other, strict=True):
            assert torch.equal(a, b)


def test_a_prefix_gives_the_first_rows_when_the_bits_are_fixed():
    x = clustered(120)
    whole = run(Yoso(bits=6), x, is_causal=True)
    for n in (1, 31, 90):
        torch.testing.assert_close(run(Yoso(bits=6), x.tokens(slice(0, n)), is_causal=True), whole[:, :, :n])
    assert not torch.allclose(run(Yoso(), x.tokens(slice(0, 31)), is_causal=True), whole[:, :, :31]), "bits follow n"


def largest(method: Yoso, n: int, impl: str, causal: bool) -> int:
    x = tracked(make(method, batch=1, n_q=n, d=16, e=16))
    return largest_tensor(lambda: by(impl, method, x, is_causal=causal).sum().backward())


@pytest.mark.parametrize("causal", [False, True])
@both_paths
def test_memory_grows_with_neither_the_square_of_the_length_nor_the_hashes(causal, impl):
    few, many = (largest(Yoso(hashes=m), 200, impl, causal) for m in (32, 96))
    assert many == few, f"largest tensor {few} entries at 32 hashes, {many} at 96"
    short, long = (largest(Yoso(hashes=2, bits=8), n, impl, causal) for n in (500, 2000))
    assert long <= 4.2 * short, f"largest tensor {short} entries at 500 tokens, {long} at 2000"
    wide, wider = (largest(Yoso(hashes=2, bits=b, hash="gaussian"), 300, impl, causal) for b in (9, 16))
    assert wider <= 1.5 * wide, "tables must not hold empty buckets"
    short, long = (largest(Yoso(hashes=2), n, "reference", causal) for n in (500, 1000))
    assert long > 3.5 * short, "the control: the dense reference is quadratic"


def visits(n: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> int:
    """Pairs of tokens, and tokens in outer products, that the backward pass of two large buckets visits."""
    method, seen = Yoso(hashes=2, bits=1), []
    pair_sums, packed = tables._pair_sums, tables._packed

    def count_pairs(mine, left, point, start, stop, slope):
        seen.append(int((stop - start).sum()))
        return pair_sums(mine, left, point, start, stop, slope)

    def count_rows(rows, slot, tiles):
        seen.append(len(rows))
        return packed(rows, slot, tiles)

    x = tracked(make(method, batch=1, n_q=n, d=16, e=16))
    out = by("torch", method, x, is_causal=causal).sum()
    with monkeypatch.context() as patch:
        patch.setattr(tables, "_pair_sums", count_pairs)
        patch.setattr(tables, "_packed", count_rows)
        out.backward()
    return sum(seen)


@pytest.mark.parametrize("choice", ["as it is", "always pairs"])
@pytest.mark.parametrize("causal", [False, True])
def test_work_in_large_buckets_grows_with_the_length(causal, choice, monkeypatch):
    if choice == "always pairs":  # the control: no bucket is worth an outer product
        monkeypatch.setattr(tables, "_prefers_tiles", lambda r, c, left, point: torch.zeros_like(c, dtype=torch.bool))
        monkeypatch.setattr(tables, "_TILE", 10**4)
    short, long = (visits(n, causal, monkeypatch) for n in (500, 2000))
    assert short > 500
    assert (long <= 4.2 * short) == (choice == "as it is"), f"{short} visits at 500 tokens, {long} at 2000"


@pytest.mark.parametrize("causal", [False, True])
@both_paths
def test_threads_do_not_change_a_bit(causal, impl):
    x = tracked(clustered(200, dtype=torch.float32))
    before = torch.get_num_threads()
    seen = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            out = by(impl, Yoso(hashes=3, bits=4), x, is_causal=causal)
            seen.append([out, *torch.autograd.grad(out[..., 0].sum(), x.leaves())])
    finally:
        torch.set_num_threads(before)
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))
