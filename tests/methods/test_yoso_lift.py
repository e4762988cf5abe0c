"""YOSO's remark 2: queries and keys of any length as unit vectors with the same products, up to a temperature."""

import pytest
import torch
from torch import Tensor

import sparing
from sparing import Unsupported
from sparing.call import Call
from sparing.draws import Draws
from sparing.mask import Mask
from sparing.methods.yoso.lift import lifted
from sparing.methods.yoso.method import Yoso, agreement
from tests.support.inputs import Inputs, keys_mask, make, run

LIFT = Yoso(hashes=16, bits=6, unit="lift")
SOFT = Yoso(bits=6, unit="lift", expectation=True, normalize="none", gradient="exact")


def call_of(**mask) -> Call:
    return Call(scale=1.0, mask=Mask(**mask), draws=Draws(0, torch.arange(2)), statistics={})


def tokens(*, n_q: int = 21, n_k: int = 17, batch: int = 3) -> tuple[Tensor, Tensor]:
    """Queries and keys of very different lengths."""
    random = torch.Generator().manual_seed(0)
    q, k = (torch.randn(batch, 2, n, 8, generator=random, dtype=torch.float64) for n in (n_q, n_k))
    return (x * (0.8 * torch.randn(*x.shape[:3], 1, generator=random, dtype=torch.float64)).exp() for x in (q, k))


@pytest.mark.parametrize("temperature", [None, 1e4])
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_products_are_kept_up_to_the_temperature(temperature, size):
    q, k = (x * size for x in tokens())
    call = call_of()
    given = None if temperature is None else temperature * size**2
    q_unit, k_unit = lifted(q, k, given, call)
    for x in (q_unit, k_unit):
        torch.testing.assert_close(x.norm(dim=-1), torch.ones(x.shape[:3], dtype=torch.float64))
    found = call.statistics["temperature"][:, :, None, None]
    longest = torch.maximum(*(x.square().sum(-1).amax(-1) for x in (q, k)))
    assert found.shape == (3, 2, 1, 1)
    if temperature is None:
        torch.testing.assert_close(found.squeeze(), longest, rtol=1e-5, atol=0)
    torch.testing.assert_close(q_unit @ k_unit.mT, q @ k.mT / found, rtol=1e-12, atol=1e-12)
    short = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    assert not torch.allclose(next(short) @ next(short).mT, q @ k.mT / found, atol=0.1), "the control: plain l2"


def test_longer_vectors_are_shortened_to_a_given_temperature():
    q, k = tokens()
    q_unit, k_unit = lifted(q, k, 4.0, call_of())
    near, far = (x * (2 / x.norm(dim=-1, keepdim=True)).clamp_max(1) for x in (q, k))
    torch.testing.assert_close(q_unit @ k_unit.mT, near @ far.mT / 4, rtol=0, atol=2e-6)
    torch.testing.assert_close(k_unit.norm(dim=-1), torch.ones(3, 2, 17, dtype=torch.float64))


def test_the_expectation_is_that_of_the_products():
    q, k = tokens()
    v = torch.randn(3, 2, 17, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    longest = torch.maximum(*(x.square().sum(-1).amax(-1) for x in (q, k)))[..., None, None]
    wanted = agreement(q @ k.mT / longest) ** 6 @ v
    torch.testing.assert_close(sparing.attention(q, k, v, method=SOFT), wanted, rtol=1e-4, atol=1e-5)
    plain = sparing.attention(q, k, v, method=Yoso(bits=6, expectation=True, normalize="none"))
    assert not torch.allclose(plain, wanted, rtol=0.1, atol=0.1), "the control: lengths count"


def test_hashes_come_to_the_expectation():
    x = make(LIFT, batch=1, dtype=torch.float64)
    few, many = (
        float(
            (run(Yoso(hashes=m, bits=6, unit="lift", normalize="none"), x) - run(SOFT, x)).norm() / run(SOFT, x).norm()
        )
        for m in (64, 4096)
    )
    assert many < 0.15
    assert 5 < few / many < 13, "64 times the hashes: an eighth of the error"


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_the_longest_is_that_of_a_sequence_without_its_padding(impl):
    """An item beside longer ones, and beside huge padding, is what it is alone, to the bit."""
    x = make(LIFT, batch=3, n_q=24)
    keep = torch.arange(24) < torch.tensor([[24], [15], [9]])
    scaled = torch.tensor([50.0, 1.0, 3.0]).view(3, 1, 1, 1)
    x = Inputs(x.q * scaled, x.k * scaled, x.value)
    padded = Inputs(*(t.masked_fill(~keep[:, None, :, None], 1e4) for t in (x.q, x.k, x.payload)))
    found = run(LIFT, padded, attn_mask=keys_mask(keep), impl=impl)
    facts = sparing.inspect(padded.q, padded.k, padded.value, keys_mask(keep), method=LIFT, seed=0).statistics
    for item, n in enumerate((24, 15, 9)):
        alone = x.item(slice(item, item + 1)).tokens(slice(0, n))
        torch.testing.assert_close(found[item : item + 1, :, :n], run(LIFT, alone, impl=impl), rtol=0, atol=1e-6)
        longest = torch.maximum(*(t.square().sum(-1).amax(-1) for t in (alone.q, alone.k)))
        torch.testing.assert_close(facts["temperature"][item], longest[0].double(), rtol=1e-5, atol=0)
    whole = Yoso(hashes=16, bits=6, unit="lift", temperature=float(x.q.square().sum(-1).max()))
    other = run(whole, padded, attn_mask=keys_mask(keep), impl=impl)
    assert not torch.allclose(other[1], found[1], atol=1e-2), "the control: one maximum for the batch"


def test_later_tokens_do_not_leak_into_causal_calls():
    x = make(LIFT, batch=1)
    with pytest.raises(Unsupported, match=r"yoso\(hashes=16, bits=6, unit='lift'\) does not support is_causal=True"):
        run(LIFT, x, is_causal=True)
    fixed = Yoso(hashes=16, bits=6, unit="lift", temperature=30.0)
    found = run(fixed, x, is_causal=True)
    later = Inputs(*(torch.cat([t[:, :, :20], 1e3 * t[:, :, 20:]], 2) for t in (x.q, x.k, x.payload)))
    assert torch.equal(run(fixed, later, is_causal=True)[:, :, :20], found[:, :, :20])
    assert fixed.supports.causal
    assert not fixed.supports.mixes_queries
    assert LIFT.supports.mixes_queries


@pytest.mark.parametrize("temperature", [None, 40.0, 3.0])
def test_the_gradient_is_that_of_the_formula(temperature):
    """Through the temperature, too, which belongs to the longest vector; 3 shortens most of them."""
    method = Yoso(
        bits=4, unit="lift", temperature=temperature, expectation=True, normalize="none", gradient="exact"
    )  # fmt: skip
    q, k = tokens(n_q=4, n_k=5, batch=1)
    v = torch.randn(1, 2, 5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    assert torch.autograd.gradcheck(lambda *x: sparing.attention(*x, method=method), (q, k, v), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("impl", ["native", "reference"])
def test_kernels_and_specification_have_the_gradient_of_the_plain_path(impl):
    x = make(LIFT, batch=1)
    leaves = [t.clone().requires_grad_() for t in (x.q, x.k, x.payload)]
    with sparing.native.switched_off():
        wanted = torch.autograd.grad(run(LIFT, Inputs(*leaves)).square().sum(), leaves)
    found = torch.autograd.grad(run(LIFT, Inputs(*leaves), impl=impl).square().sum(), leaves)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_vectors_without_a_length_count_as_right_angles():
    zero = torch.zeros(1, 1, 3, 4, dtype=torch.float64, requires_grad=True)
    v = torch.ones(1, 1, 3, 2, dtype=torch.float64)
    out = sparing.attention(zero, zero, v, method=Yoso(bits=2, unit="lift", expectation=True, normalize="none"))
    torch.testing.assert_close(out, torch.full_like(out, 3 / 4))
    (grad,) = torch.autograd.grad(out.sum(), zero)
    assert grad.isfinite().all()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"unit": "l1"}, "'l1' is not one of 'l2', 'lift'"),
        ({"temperature": 2.0}, "belongs to unit='lift'"),
        ({"unit": "lift", "temperature": 0.0}, "must be above 0"),
    ],
)
def test_bad_settings_are_named(settings, said):
    with pytest.raises(ValueError, match=said):
        Yoso(**settings)
