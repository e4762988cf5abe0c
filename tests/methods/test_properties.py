"""Any method on any small call: shapes, masks, strides, head groups and precisions drawn at random."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparing
from tests.support.inputs import by, keys_mask, make
from tests.support.method_table import ROWS


@settings(max_examples=250)
@given(
    row=st.sampled_from(ROWS),
    batch=st.integers(1, 3),
    groups=st.sampled_from([1, 2]),
    kv_heads=st.integers(1, 2),
    n_q=st.integers(0, 40),
    n_k=st.integers(0, 40),
    d=st.integers(1, 20),
    e=st.integers(1, 9),
    causal=st.booleans(),
    share=st.sampled_from([None, 0.0, 0.3, 0.9]),
    layout=st.sampled_from(["plain", "strided", "transposed"]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    scale=st.sampled_from([None, 0.2]),
    seed=st.integers(0, 2**40),
)
def test_any_call(row, batch, groups, kv_heads, n_q, n_k, d, e, causal, share, layout, dtype, scale, seed):
    can = row.supports
    n_k = n_k if can.cross_attention else n_q
    groups = groups if can.gqa else 1
    x = make(
        row.method, batch=batch, heads=groups * kv_heads, kv_heads=kv_heads, n_q=n_q, n_k=n_k, d=d, e=e, dtype=dtype
    )
    if layout == "strided":
        x = x.map(lambda t: t.repeat_interleave(2, -1)[..., ::2])
    elif layout == "transposed":
        x = x.map(lambda t: t.mT.contiguous().mT if t.ndim > 1 else t)
    keep = None
    if share is not None and can.key_padding:
        keep = torch.rand(batch, n_k, generator=torch.Generator().manual_seed(seed % 1000)) < share
    causal = causal and can.causal
    call = {
        "attn_mask": None if keep is None else keys_mask(keep),
        "is_causal": causal,
        "scale": scale,
        "enable_gqa": True,
        "seed": seed,
    }
    outs = [by(impl, row.method, x, **call) for impl in row.impls]
    for out in outs:
        assert out.shape == (batch, groups * kv_heads, n_q, e)
        assert out.dtype == dtype
        assert out.isfinite().all()
    for out in outs[1:] if dtype == torch.float64 else ():
        assert torch.allclose(out, outs[0], rtol=1e-8, atol=1e-8)
    sees = torch.ones(batch, n_q, n_k, dtype=torch.bool) if keep is None else keep[:, None].expand(batch, n_q, n_k)
    sees = (sees.tril() if causal else sees).any(-1)
    for out in outs:
        assert bool((out.masked_select(~sees[:, None, :, None]) == 0).all()), "rows that see nothing must be zero"


@pytest.mark.parametrize("size", [1.0, 4.0, 15.0])
@pytest.mark.parametrize("spec", ["kernelized", "kernel(kind=gaussian, normalize=length)", "skyformer(landmarks=32)"])
def test_near_pairs_of_long_vectors_keep_their_digits(spec, size):
    """|q|^2 + |k|^2 - 2 q.k cancels: formed in float32, weights of near pairs were off by 1e-3 at entries of 15."""
    k = size * torch.randn(1, 1, 64, 64)
    q, v = k + 0.1 * torch.randn_like(k), torch.randn(1, 1, 64, 64)
    wanted = sparing.attention(q.double(), k.double(), v.double(), method=spec, seed=0, impl="reference")
    error = (sparing.attention(q, k, v, method=spec, seed=0) - wanted).abs().max()
    assert float(error) < 1e-5, f"{spec} at entries of {size}: {float(error):.2g}"
