"""The common checks about what a row may depend on: causal leaks, padding, masked queries, mask formats, NaN."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

import sparing
from tests.support.common_checks.tools import (
    check,
    close,
    differentiable,
    gradients,
    same,
    tracked,
)
from tests.support.inputs import (
    keys_mask,
    make,
    padding,
    run,
)
from tests.support.method_table import Row


@check("causal leak", lambda row: row.supports.causal)
def causal_leak(row: Row, impl: str) -> None:
    """Noise, NaN or huge numbers later change no earlier output and gradient, and no gradient reaches later tokens."""
    for n, t in ((9, 0), (33, 20), (100, 63)):
        x = make(row.method, n_q=n)
        weight = torch.randn(2, 2, t + 1, 6, generator=torch.Generator().manual_seed(5))
        y = tracked(x) if differentiable(row) else x
        before = run(row.method, y, impl=impl, is_causal=True)[:, :, : t + 1]
        wanted = gradients(y, before, weight) if differentiable(row) else []
        for what, fill in (("noise", None), ("NaN", torch.nan), ("1e30", 1e30)):

            def spoil(tensor: Tensor, fill: float | None = fill, t: int = t) -> Tensor:
                other = tensor.clone()
                noise = torch.randn(other[..., t + 1 :, :].shape, generator=torch.Generator().manual_seed(9))
                other[..., t + 1 :, :] = noise if fill is None else fill
                return other

            z = replace(x, q=spoil(x.q), k=spoil(x.k)).with_payload(spoil(x.payload))
            z = tracked(z) if differentiable(row) else z
            after = run(row.method, z, impl=impl, is_causal=True)[:, :, : t + 1]
            same(row, f"outputs up to {t} of {n} with {what} later", after, before)
            if differentiable(row):
                for name, a, b in zip("qkv", gradients(z, after, weight), wanted, strict=True):
                    late = a[..., t + 1 :, :]
                    assert bool((late == 0).all()), f"{row.spec}: grad_{name} reaches tokens after {t} of {n} ({what})"
                    same(row, f"grad_{name} up to {t} of {n} with {what} later", a[..., : t + 1, :], b[..., : t + 1, :])


@check("padding invariance", lambda row: row.supports.key_padding)
def padding_invariance(row: Row, impl: str) -> None:
    """Nothing that stands in a padded slot changes a valid row."""
    for kind in ("left", "right", "both", "holes"):
        for causal in {False, row.supports.causal}:
            x = make(row.method, n_q=33)
            keep = padding(kind, 2, 33)
            before = run(row.method, x, impl=impl, attn_mask=keys_mask(keep), is_causal=causal)
            for fill in (torch.nan, torch.inf, 1e30, -3.0):
                hole = ~keep[:, None, :, None]
                payload = x.payload.masked_fill(hole if x.payload.ndim == 4 else hole[:, 0], fill)
                y = replace(x, q=x.q.masked_fill(hole, fill), k=x.k.masked_fill(hole, fill)).with_payload(payload)
                after = run(row.method, y, impl=impl, attn_mask=keys_mask(keep), is_causal=causal)
                rows = keep[:, None, :].expand(2, 2, 33)
                same(row, f"{kind} padding holding {fill}, causal={causal}", after[rows], before[rows])


@check("padded equals packed", lambda row: row.supports.key_padding)
def padded_equals_packed(row: Row, impl: str) -> None:
    """A padded sequence gives what the sequence alone gives."""
    kinds = ("left", "right", "both") if row.supports.position_based else ("left", "right", "both", "holes")
    for n in (7, 40, 100):
        for kind in kinds:
            for causal in {False, row.supports.causal}:
                x = make(row.method, n_q=n)
                keep = padding(kind, 2, n, seed=n)
                mask = None if bool(keep.all()) else keys_mask(keep)
                out = run(row.method, x, impl=impl, attn_mask=mask, is_causal=causal)
                for b in range(2):
                    index = keep[b].nonzero().squeeze(-1)
                    alone = run(row.method, x.item(slice(b, b + 1)).tokens(index), impl=impl, is_causal=causal)
                    close(row, f"{kind} padding to {n}, causal={causal}", out[b : b + 1, :, index], alone, 1e-5)


@check("packed sequences")
def packed_sequences(row: Row, impl: str) -> None:
    """A pack gives what a call for each sequence gives, to the bit where there is one, whatever the others hold."""
    lengths = (7, 1, 25)
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    offsets = torch.tensor([0, *ends], dtype=torch.int32)
    x = make(row.method, batch=1, n_q=ends[-1])
    for causal in (False, True) if row.supports.causal else (False,):
        found = run(row.method, x, impl=impl, is_causal=causal, cu_seqlens=offsets)
        alone = [run(row.method, x.tokens(slice(end - n, end)), impl=impl, is_causal=causal)
                 for n, end in zip(lengths, ends, strict=True)]  # fmt: skip
        wanted = torch.cat(alone, dim=2)
        if row.supports.packed:
            close(row, f"a pack against a call per sequence, causal={causal}", found, wanted, 1e-5)
        else:
            same(row, f"a pack against a call per sequence, causal={causal}", found, wanted)
        for fill in (3.0, torch.nan):
            q, k, payload = (t.clone() for t in x.leaves())
            for t in (q, k, payload):
                t[..., 7:8, :] = fill
            spoiled = run(row.method, replace(x, q=q, k=k).with_payload(payload), impl=impl, is_causal=causal,
                          cu_seqlens=offsets)  # fmt: skip
            for at in (slice(0, 7), slice(8, None)):
                same(row, f"{fill} in another sequence", spoiled[:, :, at], found[:, :, at])


@check("query mask")
def query_mask(row: Row, impl: str) -> None:
    """Masked queries give zeros and do not influence the others, also when the keys are not padded."""
    for n_q, n_k in ((33, 33), (20, 33)) if row.supports.cross_attention else ((33, 33),):
        x = make(row.method, n_q=n_q, n_k=n_k)
        real = padding("right", 2, n_q)
        out = run(row.method, x, impl=impl, query_mask=real)
        rows = real[:, None, :].expand(2, 2, n_q)
        assert bool((out[~rows] == 0).all()), f"{row.spec}: masked queries must give zeros"
        y = replace(x, q=x.q.masked_fill(~real[:, None, :, None], 50.0))
        same(row, "query_mask", run(row.method, y, impl=impl, query_mask=real)[rows], out[rows])


@check("separate rows", lambda row: not row.supports.mixes_queries)
def separate_rows(row: Row, impl: str) -> None:
    """A row depends on its own query alone: in a decoder's cross attention a later query must not change it."""
    for n_q, n_k in ((33, 33), (24, 40)) if row.supports.cross_attention else ((33, 33),):
        x = make(row.method, n_q=n_q, n_k=n_k)
        other = torch.cat([x.q[:, :, : n_q // 2], 3 * x.q[:, :, n_q // 2 :].flip(-1)], dim=2)
        rows = [run(row.method, y, impl=impl)[:, :, : n_q // 2] for y in (x, replace(x, q=other))]
        same(row, f"rows before query {n_q // 2} of {n_q} when that and later ones change", *rows)


@check("mask formats", lambda row: row.supports.key_padding)
def mask_formats(row: Row, impl: str) -> None:
    """The same mask in another format gives the same result."""
    x = make(row.method, n_q=33)
    plain = run(row.method, x, impl=impl)
    close(row, "all-true", run(row.method, x, impl=impl, attn_mask=torch.ones(2, 1, 1, 33) > 0), plain, 1e-6)
    close(row, "zero bias", run(row.method, x, impl=impl, attn_mask=torch.zeros(2, 1, 1, 33)), plain, 1e-6)
    keep = padding("right", 2, 33)
    wanted = run(row.method, x, impl=impl, attn_mask=keys_mask(keep))
    assert not torch.equal(wanted, plain), f"{row.spec}: padding changes nothing"
    for what, low in (("-inf", -torch.inf), ("lowest finite", torch.finfo(torch.float32).min)):
        additive = torch.zeros(2, 1, 1, 33).masked_fill(~keys_mask(keep), low)
        same(row, f"additive {what}", run(row.method, x, impl=impl, attn_mask=additive), wanted)
    expanded = keys_mask(keep).expand(2, 2, 33, 33)
    same(row, "expanded", run(row.method, x, impl=impl, attn_mask=expanded), wanted)
    if row.supports.attn_mask:
        full = expanded.contiguous()
        close(row, "written out", run(row.method, x, impl=impl, attn_mask=full), wanted, 1e-5)
        by_query = torch.rand(2, 1, 33, 33, generator=torch.Generator().manual_seed(1)) < 0.7
        seen = run(row.method, x, impl=impl, attn_mask=by_query)
        assert not torch.equal(seen, plain), f"{row.spec}: a mask by query changes nothing"
        if row.supports.attn_mask == "any":
            additive = torch.zeros(2, 1, 33, 33).masked_fill(~by_query, -torch.inf)
            close(row, "by query, additive", run(row.method, x, impl=impl, attn_mask=additive), seen, 1e-6)


@check("nan stays")
def nan_stays(row: Row, impl: str) -> None:
    """A NaN in a query spoils its own row only; in a key, only the rows that may see it."""
    x = make(row.method, n_q=33)
    clean = run(row.method, x, impl=impl)
    q = x.q.clone()
    q[0, 1, 4, 2] = torch.nan
    out = run(row.method, replace(x, q=q), impl=impl)
    close(row, "other batch item", out[1], clean[1], 1e-6)
    assert out[0, 1, 4].isnan().all(), f"{row.spec}: a NaN query must give a NaN row"
    rest = torch.ones(2, 2, 33, dtype=torch.bool)
    rest[0, 1, 4] = False
    assert out[rest].isfinite().all(), f"{row.spec}: a NaN query spoils other rows"
    k = x.k.clone()
    k[1, 0, 20] = torch.nan
    out = run(row.method, replace(x, k=k), impl=impl)
    assert out[0].isfinite().all()
    assert out[1, 1].isfinite().all(), f"{row.spec}: a NaN key spoils other items or heads"
    assert out[1, 0, 20].isnan().any(), f"{row.spec}: a NaN key was swallowed"
    if row.supports.causal:
        out = run(row.method, replace(x, k=k), impl=impl, is_causal=True)
        assert out[1, 0, :20].isfinite().all(), f"{row.spec}: a NaN key leaks into the past"


@check("lse merge", lambda row: row.supports.lse)
def lse_merge(row: Row, impl: str) -> None:
    """Two calls on disjoint sets of keys, merged by their log-sum-exp, give the call on all keys."""
    x = make(row.method, n_q=33, dtype=torch.float64)
    whole = sparing.inspect(x.q, x.k, x.value, method=row.method, seed=0, impl=impl)  # type: ignore[arg-type]
    half = torch.rand(2, 33, generator=torch.Generator().manual_seed(1)) < 0.5
    parts = [
        sparing.inspect(x.q, x.k, x.value, keys_mask(keep), method=row.method, seed=0, impl=impl)  # type: ignore[arg-type]
        for keep in (half, ~half)
    ]
    both = torch.stack([p.lse for p in parts])  # type: ignore[misc]
    share = (both - both.logsumexp(0)).exp().nan_to_num(0.0)
    merged = sum(w.unsqueeze(-1) * p.output for w, p in zip(share, parts, strict=True))
    assert isinstance(merged, Tensor)
    close(row, "merged by log-sum-exp", merged, whole.output, 1e-9)
