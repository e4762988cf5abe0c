"""Packed sequences at the door: shapes, head groups, gradients, statistics, graphs, and offsets that are refused.

That a pack gives what a call per sequence gives, for every method, is one of the common checks.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparing
from sparing import attention, inspect

OFFSETS = torch.tensor([0, 5, 6, 20], dtype=torch.int32)


def pack(total=20, heads=4, kv_heads=2, d=8, dtype=torch.float32):
    gen = torch.Generator().manual_seed(total)
    shapes = ((1, heads, total, d), (1, kv_heads, total, d), (1, kv_heads, total, d - 2))
    return [torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype) for shape in shapes]


@settings(max_examples=40)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6), causal=st.booleans())
def test_a_pack_is_a_call_per_sequence(lengths, causal):
    total = sum(lengths)
    q, k, v = pack(total)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    found = attention(q, k, v, is_causal=causal, enable_gqa=True, cu_seqlens=offsets)
    parts = zip(q.split(lengths, 2), k.split(lengths, 2), v.split(lengths, 2), strict=True)
    wanted = torch.cat([attention(*part, is_causal=causal, enable_gqa=True) for part in parts], 2)
    assert torch.allclose(found, wanted, atol=1e-6)


def test_the_layout_of_flash_attention():
    q, k, v = pack()
    options = {"enable_gqa": True, "cu_seqlens": OFFSETS, "method": "window(size=4)"}
    flat = [t[0].transpose(0, 1) for t in (q, k, v)]
    wanted = inspect(q, k, v, **options)
    found = inspect(*flat, **options)
    assert torch.equal(found.output, wanted.output[0].transpose(0, 1))
    assert torch.equal(found.lse, wanted.lse[0].transpose(0, 1)), "[total, heads], as the output"


@pytest.mark.parametrize("method", ["exact", "window(size=4)", "multipole"])
def test_rows_keep_their_statistics(method):
    q, k, v = pack()
    found = inspect(q, k, v, enable_gqa=True, cu_seqlens=OFFSETS, method=method)
    parts = [inspect(*(t[:, :, a:b] for t in (q, k, v)), enable_gqa=True, method=method)
             for a, b in ((0, 5), (5, 6), (6, 20))]  # fmt: skip
    assert torch.allclose(found.lse, torch.cat([part.lse for part in parts], 2), atol=1e-5)
    if method == "multipole":
        assert torch.equal(found.statistics["touched"], torch.cat([part.statistics["touched"] for part in parts], 2))


@pytest.mark.parametrize("method", ["exact", "nystrom(landmarks=4)"])
def test_gradients_stay_within_their_sequence(method):
    q, k, v = (t.requires_grad_() for t in pack(dtype=torch.float64))
    out = attention(q, k, v, enable_gqa=True, cu_seqlens=OFFSETS, method=method)
    grads = torch.autograd.grad(out[:, :, 6:].square().sum(), (q, k, v))
    assert all(bool((g[:, :, :6] == 0).all()) for g in grads)
    alone = attention(*(t[:, :, 6:] for t in (q, k, v)), enable_gqa=True, method=method)
    for found, wanted in zip(grads, torch.autograd.grad(alone.square().sum(), (q, k, v)), strict=True):
        assert torch.allclose(found, wanted, atol=1e-12)


def test_dropout_of_a_seed_is_that_of_a_call_of_its_own():
    q, k, v = pack()
    options = {"enable_gqa": True, "dropout_p": 0.5, "seed": 3}
    found = attention(q, k, v, cu_seqlens=OFFSETS, **options)
    assert torch.allclose(found[:, :, 6:], attention(*(t[:, :, 6:] for t in (q, k, v)), **options), atol=1e-6)


def test_values_before_their_linear_layer():
    q, k, _ = pack()
    value = sparing.Projection(torch.randn(1, 20, 10), torch.randn(2 * 6, 10), torch.randn(12))
    options = {"enable_gqa": True, "method": "monte_carlo(alpha=1.0)", "seed": 0}
    found = attention(q, k, value, cu_seqlens=OFFSETS, **options)
    last = attention(q[:, :, 6:], k[:, :, 6:], value._replace(x=value.x[:, 6:]), **options)
    assert torch.equal(found[:, :, 6:], last)
    flat = value._replace(x=value.x[0])
    again = attention(q[0].transpose(0, 1), k[0].transpose(0, 1), flat, cu_seqlens=OFFSETS, **options)
    assert torch.equal(again, found[0].transpose(0, 1))


def test_a_pack_is_one_graph():
    q, k, v = pack()

    def call(q, k, v, offsets):
        return attention(q, k, v, enable_gqa=True, cu_seqlens=offsets, method="window(size=4)")

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v, OFFSETS), call(q, k, v, OFFSETS))


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (torch.tensor([0, 5, 5, 20]), r"cu_seqlens\[1:3\]=\[5, 5\]: sequence 1 is empty; leave it out"),
        (torch.tensor([0, 9, 5, 20]), r"cu_seqlens\[1:3\]=\[9, 5\]: sequence 1 ends before it begins"),
        (torch.tensor([0, 5, 19]), r"cu_seqlens=\[0, 5, 19\] must begin with 0 and end with the total, 20"),
        (torch.tensor([1, 5, 20]), "must begin with 0"),
        (torch.tensor([20]), "must begin with 0"),
        (torch.tensor([0]), "must begin with 0"),
        (torch.arange(30), r"cu_seqlens=\[0, 1, 2, 3, ..., 29\] must begin with 0"),
    ],
)
def test_offsets_that_make_no_sense_are_refused(offsets, message):
    with pytest.raises(ValueError, match=message):
        attention(*pack(), enable_gqa=True, cu_seqlens=offsets)


def test_calls_that_make_no_sense_are_refused():
    q, k, v = pack()
    options = {"enable_gqa": True, "cu_seqlens": OFFSETS}
    with pytest.raises(TypeError, match=r"cu_seqlens must be a tensor .* got torch.float32 \[4\]"):
        attention(q, k, v, enable_gqa=True, cu_seqlens=OFFSETS.float())
    with pytest.raises(TypeError, match=r"cu_seqlens must be a tensor .* got \[0, 20\]"):
        attention(q, k, v, enable_gqa=True, cu_seqlens=[0, 20])
    with pytest.raises(ValueError, match="attn_mask cannot be combined with cu_seqlens"):
        attention(q, k, v, torch.ones(20, 20, dtype=torch.bool), **options)
    with pytest.raises(ValueError, match="query_mask cannot be combined with cu_seqlens"):
        attention(q, k, v, query_mask=torch.ones(1, 20, dtype=torch.bool), **options)
    with pytest.raises(ValueError, match="query has 20 positions and key 19"):
        attention(q, k[:, :, 1:], v[:, :, 1:], **options)
    with pytest.raises(ValueError, match=r"query \[2, 4, 20, 8\]: with cu_seqlens all tensors must be \[1, heads"):
        attention(q.expand(2, -1, -1, -1), k, v, **options)
    with pytest.raises(ValueError, match=r"key \[20, 8\]: with cu_seqlens all tensors must be"):
        attention(q[0].transpose(0, 1), k[0, 0], v[0].transpose(0, 1), **options)
