"""Multipole attention: what is read, what copies cost, the error bar, the gradient, and 16-bit caches."""

from __future__ import annotations

import pytest
import torch

import sparing
from sparing import native
from sparing.methods.multipole import copies as copies_module
from sparing.methods.multipole import past as past_module
from sparing.methods.multipole.copies import (
    copy_keys,
    copy_values,
    estimate,
    pack_keys,
    pack_values,
    unpack_keys,
    unpack_values,
)
from sparing.methods.multipole.method import Multipole
from tests.support.growing_sequences import grow, sequence
from tests.support.inputs import exact_for, peaked, relative
from tests.support.kernel_checks import needs_kernels

CAUSAL = pytest.mark.parametrize("causal", [False, True])


def spread_inputs(n=300, d=16, seed=0, dtype=torch.float64):
    """Peaked attention over keys of several topics, values with a mean."""
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 3, n, d, generator=gen, dtype=torch.float64) for _ in range(3))
    return [x.to(dtype) for x in (2 * q, 1.5 * k, v + 0.3)]


@CAUSAL
@pytest.mark.parametrize("place", [5, 70, 128, 200])
def test_a_key_far_above_the_others_is_read_wherever_it_stands(place, causal):
    """A look-up: one key has a logit of 12 more than its neighbours. A window loses it."""
    q, k, v = spread_inputs()
    k[:, :, place] = 12 * q[:, :, 290] / q[:, :, 290].square().sum(-1, keepdim=True) * 16**0.5
    exact = sparing.attention(q, k, v, is_causal=causal)[:, :, 290]
    found = sparing.attention(q, k, v, is_causal=causal, method="multipole(tolerance=0.1, block=32)")[:, :, 290]
    assert relative(found, exact) < 0.05
    lost = sparing.attention(q, k, v, is_causal=causal, method="window(size=64)")[:, :, 290]
    assert relative(lost, exact) > 0.3, "the control finds it, too"


@CAUSAL
def test_a_smaller_tolerance_reads_more_keys_and_errs_less(causal):
    q, k, v = spread_inputs(n=500)
    exact, before = sparing.attention(q, k, v, is_causal=causal), None
    for tolerance in (0.3, 0.03, 0.003):
        found = sparing.inspect(q, k, v, is_causal=causal, method=f"multipole(tolerance={tolerance}, block=64)")
        now = relative(found.output, exact), float(found.statistics["touched"].double().mean())
        assert before is None or (now[0] < 0.7 * before[0] and now[1] > before[1])
        before = now


@CAUSAL
@pytest.mark.parametrize("tolerance", [0.1, 0.02, 0.005])
def test_the_error_bar_is_the_size_of_the_error(tolerance, causal):
    """Not only its rank: the root of the mean squares agree within a third, over 1,500 rows."""
    q, k, v = spread_inputs(n=500, seed=int(1 / tolerance))
    exact = sparing.attention(q, k, v, is_causal=causal)
    found = sparing.inspect(q, k, v, is_causal=causal, method=f"multipole(tolerance={tolerance}, block=32)")
    error = (found.output - exact).norm(dim=-1).square().mean().sqrt()
    ratio = float(found.statistics["error"].square().mean().sqrt() / error)
    assert 0.75 < ratio < 1.33
    assert not 0.5 * ratio > 0.75, "half of it would pass, too"


def test_sinks_set_no_range():
    """A first key a hundred times as long would leave the codes of its block with one step for all the others."""
    q, k, v = spread_inputs()
    k[:, :, 0] *= 100
    exact = sparing.attention(q, k, v, is_causal=True)
    with_sink, without = (
        relative(sparing.attention(q, k, v, is_causal=True, method=f"multipole(tolerance=0.5, sinks={n})"), exact)
        for n in (1, 0)
    )
    assert with_sink < 0.5 * without


@CAUSAL
def test_the_gradient_of_values_holds_the_weights_fixed(causal):
    """grad v = P^T grad with the weights P of keys that are read and of copies; P by its definition."""
    m, (q, k, v) = Multipole(tolerance=0.03, sinks=1, block=32), spread_inputs(n=100)
    n, held = 100, 96
    guess = estimate(q, copy_keys(k, 32, 1), 0.25)
    logits, key, row = q @ k.mT * 0.25, torch.arange(n), torch.arange(n)[:, None]
    near = ((key < 1) | (key >= (row // 32 * 32 if causal else held))).expand(n, n)
    visible = (key <= row) if causal else torch.ones(n, n, dtype=torch.bool)
    sigma = guess.sigma.repeat_interleave(32, -1)
    guessed = torch.full_like(logits, -torch.inf)
    guessed[..., :held] = guess.logits.flatten(-2)
    guessed = guessed.masked_fill(near | ~visible, -torch.inf)
    faded = guessed.clone()
    faded[..., :held] -= sigma.square().clamp_max(4) / 2
    total = torch.cat([logits.masked_fill(~(near & visible), -torch.inf), faded], -1).logsumexp(-1, keepdim=True)
    read = near & visible | (guessed > -torch.inf)
    read = read.expand_as(logits).clone()
    least = torch.tensor(0.03 if causal else 0.06)  # share of a key that is read
    read[..., :held] &= near[..., :held] | (guessed[..., :held] + sigma >= total + least.log())
    weights = torch.where(read & visible, logits, faded).softmax(-1)
    v.requires_grad_()
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=q.dtype)
    for impl in ("reference", "auto"):
        out = sparing.attention(q, k, v, is_causal=causal, method=m, impl=impl)
        (found,) = torch.autograd.grad(out, v, grad)
        assert torch.allclose(found, weights.mT @ grad, atol=1e-5), "but for groups that weigh nothing"
    exact = torch.autograd.grad(sparing.attention(q, k, v, is_causal=causal), v, grad)[0]
    assert relative(found, exact) > 1e-3, "the control: exact weights would pass, too"


def test_the_gradient_is_near_that_of_exact_attention():
    m = Multipole(tolerance=0.02, block=16)
    x = peaked(m, 3, n=120)
    leaves = [t.clone().requires_grad_() for t in (x.q, x.k, x.value)]
    grad = torch.randn(exact_for(x).shape, generator=torch.Generator().manual_seed(0), dtype=x.q.dtype)
    found, exact = (
        torch.autograd.grad(sparing.attention(*leaves, is_causal=True, method=each), leaves, grad)
        for each in (m, "exact")
    )
    for a, b in zip(found, exact, strict=True):
        assert relative(a, b) < 0.1


@pytest.mark.parametrize("d", [5, 8, 33])
def test_packed_codes_are_unpacked(d):
    """Bytes hold two codes of keys, and two or four of values."""
    x = torch.randn(2, 3, 64, d, generator=torch.Generator().manual_seed(d))
    keys = copy_keys(x, 32)
    assert torch.equal(unpack_keys(pack_keys(keys.codes), d), keys.codes)
    for bits in (2, 4):
        values = copy_values(x, 32, bits)
        packed = pack_values(values.codes, bits)
        assert packed.numel() == 2 * 3 * 64 * (-(-d // (128 // bits)) * 16)
        assert torch.equal(unpack_values(packed, d, bits), values.codes)


def test_copies_that_are_made_in_pieces_are_the_same(monkeypatch):
    x = torch.randn(2, 3, 170, 8, generator=torch.Generator().manual_seed(0))
    whole = copy_keys(x, 32, 4), copy_values(x, 32, 2), copy_values(x, 32, 4)
    monkeypatch.setattr(copies_module, "_ENTRIES", 2 * 3 * 2 * 32 * 8)  # of 5 blocks, 2 at a time
    pieces = copy_keys(x, 32, 4), copy_values(x, 32, 2), copy_values(x, 32, 4)
    for a, b in zip(whole, pieces, strict=True):
        assert torch.equal(a.codes, b.codes)
        assert torch.equal(a.scales, b.scales)


def test_a_step_without_kernels_copies_no_block_again(monkeypatch):
    monkeypatch.setattr(native, "ready", lambda *_, **__: False)
    x, copied = sequence(n=120), []
    index = sparing.Index("multipole(tolerance=0.05, block=16)")
    index.attention(*x.part(0, 70))
    plain = past_module.copy_keys
    monkeypatch.setattr(past_module, "copy_keys", lambda k, *rest: copied.append(k.shape[2]) or plain(k, *rest))
    grow(index, x, 71, 1, first=70)
    assert copied == [16, 16, 16], "each block once, when it is complete"


@needs_kernels
@CAUSAL
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_machine_without_vnni_computes_the_same_bits(causal, dtype):
    """Sums of integers have no rounding, in whatever order."""
    q, k, v = spread_inputs(n=300, d=70, dtype=dtype)
    wanted = sparing.inspect(q, k, v, is_causal=causal, method="multipole(tolerance=0.01, block=32)")
    try:
        with native.instruction_set("avx512_without_vnni"):
            found = sparing.inspect(q, k, v, is_causal=causal, method="multipole(tolerance=0.01, block=32)")
    except ValueError:
        pytest.skip("this machine has no AVX-512 VNNI")
    assert torch.equal(found.output, wanted.output)
    assert torch.equal(found.statistics["touched"], wanted.statistics["touched"])


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("isa", native.info().available)
def test_kernels_read_16_bits_as_the_numbers_that_they_are(dtype, isa):
    """A step on a 16-bit cache gives the bits of a step on the same numbers in float32, rounded once."""
    q, k, v = spread_inputs(n=300, dtype=dtype)
    m = Multipole(tolerance=0.02, block=32)
    with native.instruction_set(isa):
        found = []
        for kind in (dtype, torch.float32):
            x = [t.to(kind) for t in (q[:, :, 299:], k, v)]
            state = m.past(*(t.float() for t in x), None, 0.25)  # type: ignore[arg-type]
            state.learn(q[:, :, :299].float(), x[1][:, :, :299], x[2][:, :, :299], None, 0)
            out, notes = state.step(*x, None, 299)
            found.append((out.to(dtype), notes["lse"], notes["touched"]))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_index_follows_a_16_bit_cache_without_converting_it(dtype, monkeypatch):
    x = sequence(n=200, batch=2, kv_heads=1, dtype=dtype)
    index = sparing.Index("multipole(tolerance=0.05, block=16)")
    index.attention(*x.part(0, 150))
    widened = []
    monkeypatch.setattr(sparing.index, "_wide", lambda t: widened.append(t.shape) or t.float())
    converted = []
    plain = past_module.MultipolePast._append

    def watched(self, items, first, last, k, v):
        converted.append(k.shape[2])
        plain(self, items, first, last, k, v)

    monkeypatch.setattr(past_module.MultipolePast, "_append", watched)
    out, _ = grow(index, x, 151, 1, first=150)
    assert out.dtype == dtype
    assert not widened, "nothing is converted"
    assert converted == [16, 16, 16], "but each block, once, when it is complete"
    wanted = sparing.attention(
        x.q, x.k, x.v, is_causal=True, enable_gqa=True, method="multipole(tolerance=0.05, block=16)"
    )
    eps = torch.finfo(dtype).eps  # rounding to 16 bits may fall to either side
    assert torch.allclose(out.float(), wanted[:, :, 150:].float(), rtol=eps, atol=eps / 64)


@CAUSAL
def test_cost_follows_what_was_read(causal):
    q, k, v = spread_inputs(n=500)
    m = Multipole(tolerance=0.02)
    facts = sparing.inspect(q, k, v, is_causal=causal, method=m).statistics
    shape = sparing.Shape(heads=3, queries=500, keys=500, head_dim=16, value_dim=16, causal=causal)
    known = m.cost(shape, facts)
    assert known.keys == pytest.approx(float(facts["touched"].double().mean()))
    assert m.cost(shape, {"touched": 2 * facts["touched"]}).flops > known.flops
    all_pairs = 3 * shape.pairs * 2 * (16 + 16)
    assert known.flops > all_pairs, "estimates look at every pair"


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="multipole: block=40 must be a multiple of 16"):
        Multipole(block=40)
    with pytest.raises(ValueError, match=r"multipole: tolerance=-0\.1 must be at least 0"):
        Multipole(tolerance=-0.1)


def test_settings_of_clusters_name_the_method_that_has_them():
    with pytest.raises(ValueError, match=r"multipole has no field 'keys'.*; attention to clusters .* key_clusters"):
        sparing.method("multipole(keys=64)")
