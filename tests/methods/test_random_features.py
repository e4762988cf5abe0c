"""Positive random features against their definition: shifts, causality, masks, long keys, and known defects."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import sparing
from sparing.call import Call
from sparing.draws import Draws
from sparing.mask import Mask
from sparing.maths.linear import LogFeatures, linear_attention
from sparing.methods.random_features import RandomFeatures
from tests.support.inputs import exact_for, keys_mask, make, padding, relative

IID = RandomFeatures(features=16, orthogonal=False)


def call(heads=2, seed=0, is_causal=False):
    streams = torch.arange(heads)
    return Call(scale=1.0, mask=Mask(causal=is_causal), draws=Draws(seed, streams))


def explicit(x, method, seed, causal=False, keep=None, scale=None):
    """The definition without any shift: phi written out in float64, a masked product, a quotient."""
    scale = 1 / math.sqrt(x.q.shape[-1]) if scale is None else scale
    rows = method.projection(x.q.shape[-1], call(x.q.shape[1], seed))
    q, k = x.q.double() * math.copysign(math.sqrt(abs(scale)), scale), x.k.double() * math.sqrt(abs(scale))
    phi_q, phi_k = ((t @ rows.mT - t.square().sum(-1, keepdim=True) / 2).exp() for t in (q, k))
    weights = phi_q @ phi_k.mT
    weights = weights.tril() if causal else weights
    weights = weights if keep is None else weights * keep[:, None, None, :]
    return weights @ x.value.double() / weights.sum(-1, keepdim=True).clamp_min(1e-300)


@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("orthogonal", [False, True])
def test_output_is_the_masked_dense_product_of_its_features(impl, causal, orthogonal):
    method = RandomFeatures(features=24, orthogonal=orthogonal)
    for n_q, n_k, scale in ((150, 150, None), (70, 130, 0.2), (130, 70, -0.3)):
        x = make(method, n_q=n_q, n_k=n_k, dtype=torch.float64)
        for keep in (None, padding("holes", 2, n_k)):
            mask = None if keep is None else keys_mask(keep)
            found = sparing.attention(
                x.q, x.k, x.value, mask, is_causal=causal, scale=scale, method=method, seed=3, impl=impl
            )
            wanted = explicit(x, method, 3, causal, keep, scale)
            assert float((found - wanted).abs().max()) < 1e-9


@pytest.mark.parametrize("causal", [False, True])
def test_shifts_cancel(causal):
    gen = torch.Generator().manual_seed(0)
    phi_q, phi_k, v = torch.rand(3, 1, 2, 100, 8, generator=gen, dtype=torch.float64)
    log_k = 5 * torch.randn(1, 2, 100, generator=gen, dtype=torch.float64)
    c = call(is_causal=causal)
    wanted = linear_attention(LogFeatures(phi_q, phi_k, log_k), v, c)
    for shift in (-900.0, 3.0, 900.0):  # exp(900) overflows, exp(-900) underflows
        found = linear_attention(LogFeatures(phi_q, phi_k, log_k + shift), v, c)
        assert float((found - wanted).abs().max()) < 1e-12
    per_query = 10 ** (8 * torch.rand(1, 2, 100, 1, generator=gen, dtype=torch.float64) - 4)
    found = linear_attention(LogFeatures(phi_q * per_query, phi_k, log_k), v, c)
    assert float((found - wanted).abs().max()) < 1e-12


def assert_long_keys_count(attend):
    """Keys of length 40 beside each other, in float32: |k'|^2 / 2 is 280, and exp(-280) underflows if only R k' was
    taken out.
    """
    x = make(IID, batch=1, n_q=20, d=8)
    k = 40 * torch.nn.functional.normalize(x.k, dim=-1)
    k = k[:, :, :1] + 0.02 * x.k
    x = replace(x, k=k, q=0.3 * x.q)
    method = RandomFeatures(features=64)
    found = attend(x, method)
    assert bool((found != 0).any(-1).all()), "all keys underflow"
    assert relative(found, explicit(x.map(lambda t: t.double()), method, 0)) < 1e-3


def test_long_keys_do_not_underflow():
    assert_long_keys_count(lambda x, m: sparing.attention(x.q, x.k, x.value, method=m, seed=0))


def test_taking_out_the_largest_product_only_underflows():
    def shifted_by_the_product(x, method):
        rows = method.projection(8, call()).float()
        k = x.k * 8**-0.25
        products = k @ rows.mT
        phi_k = (products - products.amax((-1, -2), keepdim=True) - k.square().sum(-1, keepdim=True) / 2).exp()
        phi_q = (x.q * 8**-0.25 @ rows.mT).exp()
        return (phi_q @ (phi_k.mT @ x.value) / (phi_q @ phi_k.sum(-2).unsqueeze(-1))).nan_to_num(0.0)

    with pytest.raises(AssertionError, match="underflow"):
        assert_long_keys_count(shifted_by_the_product)


@dataclass(frozen=True, kw_only=True)
class ZeroKeys(RandomFeatures):
    """Padding as k = 0: phi(0) = F^(-1/2) enters the denominator."""

    native = sparing.Method.native  # none

    def fast(self, q, k, v, call):
        return super().fast(q, k, v, call.with_mask(keep=None))


@dataclass(frozen=True, kw_only=True)
class Floor(RandomFeatures):
    """One shift for all keys of the batch, and a floor added to the features: the shift no longer cancels."""

    native = sparing.Method.native  # none

    def fast(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        phi_q, phi_k, log_k = self.log_features(q, k, call)
        phi_k = phi_k * (log_k - log_k.max()).exp().unsqueeze(-1) + 1e-4
        return linear_attention(LogFeatures(phi_q + 1e-4, phi_k, torch.zeros_like(log_k)), v, call)


def run(method, x, **options):
    return sparing.attention(x.q, x.k, x.value, method=method, seed=0, **options)


def assert_padding_is_absent(cls):
    x = make(IID, n_q=30)
    keep = padding("right", 2, 30)
    out = run(cls(features=16), x, attn_mask=keys_mask(keep))
    for b in range(2):
        alone = run(cls(features=16), x.item(slice(b, b + 1)).tokens(keep[b]))
        assert relative(out[b : b + 1, :, keep[b]], alone) < 1e-5, "padding has weight"


def assert_no_leak(cls):
    x = make(IID, n_q=30)
    later = torch.arange(30)[:, None] > 12
    other = replace(x, k=torch.where(later, 3 * x.k, x.k))
    a, b = (run(cls(features=16), y, is_causal=True)[:, :, :13] for y in (x, other))
    assert torch.equal(a, b), "the future leaks"


def assert_batch_mates_do_not_matter(cls):
    x = make(IID, n_q=30)
    for mate, mine in ((slice(0, 1), slice(1, 2)), (slice(1, 2), slice(0, 1))):  # one of them has the largest shift
        k = x.k.clone()
        k[mate] *= 4
        found, wanted = (run(cls(features=16), y)[mine] for y in (replace(x, k=k), x))
        assert relative(found, wanted) < 1e-6, "a batch-mate matters"


def test_masked_keys_have_no_features():
    assert_padding_is_absent(RandomFeatures)
    with pytest.raises(AssertionError, match="padding has weight"):
        assert_padding_is_absent(ZeroKeys)


def test_the_key_shift_does_not_leak():
    assert_no_leak(RandomFeatures)
    with pytest.raises(AssertionError, match="the future leaks"):
        assert_no_leak(Floor)


def test_the_key_shift_is_not_shared_by_the_batch():
    assert_batch_mates_do_not_matter(RandomFeatures)
    with pytest.raises(AssertionError, match="a batch-mate matters"):
        assert_batch_mates_do_not_matter(Floor)


@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_predicted_variance(impl):
    x = make(IID, n_q=40, dtype=torch.float64)
    q, k = (t * 8**-0.25 for t in (x.q, x.k))
    square = (q.unsqueeze(-2) + k.unsqueeze(-3)).square().sum(-1)  # |q' + k'|^2
    keep = padding("left", 2, 40)
    for causal in (False, True):
        seen = keep[:, None, None, :].expand(2, 1, 40, 40)
        seen = seen.tril() if causal else seen
        wanted = (square * seen).sum(-1) / seen.sum(-1).clamp_min(1) - math.log(16)
        found = sparing.inspect(
            x.q, x.k, x.value, keys_mask(keep), is_causal=causal, method=IID, seed=0, impl=impl
        ).statistics["log_variance"]
        rows = seen.any(-1).expand(2, 2, 40)
        assert float((found - wanted)[rows].abs().max()) < 1e-10


def test_it_warns_where_it_is_worse_than_uniform_attention():
    """Standard normal q and k of width 64: |q' + k'|^2 is about 16, and 256 features are far too few."""
    x = make(IID, batch=1, heads=4, n_q=256, d=64, e=16, sharpness=1.0)
    method, wanted = RandomFeatures(features=256), exact_for(x)
    uniform = x.value.mean(-2, keepdim=True).expand_as(wanted)
    result = sparing.inspect(x.q, x.k, x.value, method=method, seed=0)
    assert relative(result.output, wanted) > relative(uniform, wanted)
    assert abs(float(result.statistics["log_variance"].mean()) - (16 - math.log(256))) < 0.5
    calm = replace(x, q=0.1 * x.q, k=0.3 * x.k).with_payload(x.value)
    assert relative(run(method, calm), exact_for(calm)) < 0.2


def test_no_budget_is_called_exact():
    assert IID.full_budget(sparing.Shape(queries=9, keys=9, head_dim=4, value_dim=4)) is None
    assert IID.exact_target() == sparing.method("exact")


def test_bad_fields():
    with pytest.raises(ValueError, match="features=0 must be at least 1"):
        RandomFeatures(features=0)
    with pytest.raises(TypeError, match="orthogonal='yes' must be of type bool"):
        RandomFeatures(orthogonal="yes")
    x = make(IID)
    with pytest.raises(sparing.Unsupported, match="random_features does not support attn_mask"):
        run(IID, x, attn_mask=torch.rand(33, 33) < 0.5)
