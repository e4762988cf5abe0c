"""The common checks: what every method must pass. Each raises AssertionError with the method, the shapes and the error.

`CHECKS` maps a name to a function of (row, impl); `test_common.py` runs them over the table of `methods.py`, and
`test_controls.py` shows that broken methods fail them. Here are those about calls: capabilities, masks, batches,
strides; `checks_numbers.py` has those about numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

import sparing
from sparing import Projection, Unsupported, native
from tests.support import number_checks as checks_numbers  # noqa: F401  (registers the other half)
from tests.support.check_tools import CHECKS, check, close, differentiable, gradients, same, tracked
from tests.support.inputs import Inputs, keys_mask, make, padding, run
from tests.support.method_table import Row

__all__ = ["CHECKS"]


def _expect_refusal(row: Row, what: str, word: str, call: Callable[[], object]) -> None:
    """The call is refused; the message names the method and the argument, and after a semicolon the way out."""
    try:
        call()
    except Unsupported as error:
        message = str(error)
    else:
        raise AssertionError(f"{row.spec}: {what} is not claimed, and was not refused")
    for needed in (row.method.name, word, ";"):
        assert needed in message, f"{row.spec}: the refusal of {what} lacks {needed!r}: {message}"


@check("capabilities")
def capabilities(row: Row, impl: str) -> None:
    """What is claimed works, what is not claimed raises before any computation."""
    can, m = row.supports, row.method
    x = make(m, n_q=12)
    grouped = make(m, n_q=12, heads=4, kv_heads=2)
    crossed = make(m, n_q=12, n_k=15)
    keep = keys_mask(padding("right", 2, 12))
    by_query = torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(0)) < 0.7
    bias = torch.randn(12, 12, generator=torch.Generator().manual_seed(1))
    requests: list[tuple[str, str, bool, Callable[[], Tensor]]] = [
        ("is_causal", "is_causal", can.causal, lambda: run(m, x, impl=impl, is_causal=True)),
        ("key padding", "key padding", can.key_padding, lambda: run(m, x, impl=impl, attn_mask=keep)),
        ("a boolean mask", "attn_mask", bool(can.attn_mask), lambda: run(m, x, impl=impl, attn_mask=by_query)),
        ("an additive mask", "attn_mask", can.attn_mask == "any", lambda: run(m, x, impl=impl, attn_mask=bias)),
        ("a key bias", "attn_mask", can.attn_mask == "any", lambda: run(m, x, impl=impl, attn_mask=bias[:1])),
        ("cross attention", "n_q", can.cross_attention, lambda: run(m, crossed, impl=impl)),
        ("gqa", "enable_gqa", can.gqa, lambda: run(m, grouped, impl=impl, enable_gqa=True)),
        ("dropout", "dropout_p", can.dropout, lambda: run(m, x, impl=impl, dropout_p=0.5)),
    ]
    for what, word, claimed, call in requests:
        if claimed:
            out = call()
            assert out.isfinite().all(), f"{row.spec}: {what} gives non-finite numbers"
        else:
            _expect_refusal(row, what, word, call)
    learned = bias.clone().requires_grad_()
    if can.attn_mask == "any" and can.gradient == "full":
        (found,) = torch.autograd.grad(run(m, x, impl=impl, attn_mask=learned).square().sum(), learned)
        assert bool((found != 0).any()), f"{row.spec}: no gradient reaches a learned attn_mask"
    else:
        _expect_refusal(row, "a learned mask", "attn_mask", lambda: run(m, x, impl=impl, attn_mask=learned))
    y = tracked(x)
    asked = {"query": replace(x, q=y.q), "key": replace(x, k=y.k), "value": x.with_payload(y.payload)}
    for name, z in asked.items():
        if can.gradient == "full" or (can.gradient == "values" and name == "value"):
            assert run(m, z, impl=impl).requires_grad, f"{row.spec}: no gradient reaches {name}"
        else:
            _expect_refusal(row, f"a gradient for {name}", f"gradient for {name}", lambda z=z: run(m, z, impl=impl))
            with torch.no_grad():
                assert run(m, z, impl=impl).isfinite().all()
    inspected = sparing.inspect(x.q, x.k, x.value, method=m, seed=0, impl=impl)
    assert (inspected.lse is not None) == can.lse, f"{row.spec}: claims lse={can.lse}, inspect() disagrees"
    close(row, "inspect() against attention()", inspected.output, run(m, x, impl=impl), 1e-5)
    if can.projection:
        _expect_refusal(row, "a projected value", "value", lambda: sparing.attention(x.q, x.k, x.k, method=m))
    else:
        width = 5
        value = Projection(torch.randn(2, 12, width), torch.randn(2 * 6, width), torch.randn(12))
        out = sparing.attention(x.q, x.k, value, method=m, seed=0, impl=impl)
        same(row, "Projection", out, sparing.attention(x.q, x.k, value.project(2), method=m, seed=0, impl=impl))
    if "native" not in row.impls or not native.ready(x.q):
        _expect_refusal(row, "impl='native'", "impl", lambda: run(m, x, impl="native"))


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


@check("batch invariance")
def batch_invariance(row: Row, impl: str) -> None:
    """An item gives the same result alone, in any batch and in any slot."""
    x = make(row.method, batch=3, n_q=33)
    wild = x.map(lambda t: t)
    wild = replace(wild, q=torch.cat([wild.q[:2], wild.q[2:] * 30]), k=torch.cat([wild.k[:2], wild.k[2:] * 30]))
    masks: list[tuple[str, Tensor | None, bool]] = [("no mask", None, False)]
    if row.supports.key_padding:
        masks.append(("padding", padding("right", 3, 33), False))
    if row.supports.causal:
        masks.append(("causal", None, True))
    for what, keep, causal in masks:
        out = run(row.method, x, impl=impl, attn_mask=None if keep is None else keys_mask(keep), is_causal=causal)
        for b in range(3):
            mask = None if keep is None else keys_mask(keep[b : b + 1])
            alone = run(row.method, x.item(slice(b, b + 1)), impl=impl, attn_mask=mask, is_causal=causal)
            close(row, f"item {b} alone, {what}", out[b : b + 1], alone, 1e-6)
        mask = None if keep is None else keys_mask(keep)
        other = run(row.method, wild, impl=impl, attn_mask=mask, is_causal=causal)
        close(row, f"other batch-mate, {what}", other[:2], out[:2], 1e-6)
        # Logits in the thousands amplify float32 rounding, which may differ by batch; in float64 it stays invisible.
        wide = wild.map(lambda t: t.double())
        whole = run(row.method, wide, impl=impl, attn_mask=mask, is_causal=causal)
        mask = None if keep is None else keys_mask(keep[2:])
        alone = run(row.method, wide.item(slice(2, 3)), impl=impl, attn_mask=mask, is_causal=causal)
        close(row, f"wild item alone, {what}", whole[2:], alone, 1e-6)
        mask = None if keep is None else keys_mask(keep.flip(0))
        turned = run(row.method, x.item(torch.tensor([2, 1, 0])), impl=impl, attn_mask=mask, is_causal=causal)  # type: ignore[arg-type]
        close(row, f"other slot, {what}", turned.flip(0), out, 1e-6)


@check("gqa equals repeat", lambda row: row.supports.gqa)
def gqa_equals_repeat(row: Row, impl: str) -> None:
    """Shared key heads give what repeated ones give, when the repeated heads carry the group's random stream."""
    x = make(row.method, heads=4, kv_heads=2)
    for causal in {False, row.supports.causal}:
        out = run(row.method, x, impl=impl, enable_gqa=True, is_causal=causal)
        for g in range(2):  # a group alone, with its stream
            if isinstance(x.value, Projection):
                weight, bias = (t.unflatten(0, (2, -1))[g] for t in x.value[1:] if t is not None)
                value: Tensor | Projection = Projection(x.value.x, weight, bias)
            else:
                value = x.value[:, g : g + 1]
            one = Inputs(x.q[:, 2 * g : 2 * g + 2], x.k[:, g : g + 1], value)
            alone = run(row.method, one, impl=impl, enable_gqa=True, is_causal=causal, streams=[g])
            close(row, f"group {g} alone, causal={causal}", out[:, 2 * g : 2 * g + 2], alone, 1e-6)
        if isinstance(x.value, Tensor):  # sample counts of a Projection follow the largest weight of a group
            k, v = (t.repeat_interleave(2, 1) for t in (x.k, x.value))
            wanted = run(row.method, Inputs(x.q, k, v), impl=impl, streams=[0, 0, 1, 1], is_causal=causal)
            close(row, f"repeated heads, causal={causal}", out, wanted, 1e-6)


@check("strides")
def strides(row: Row, impl: str) -> None:
    """Views of any stride give what contiguous copies give, and inputs are never changed."""
    x = make(row.method, n_q=33)
    wanted = run(row.method, x, impl=impl)

    def spread(t: Tensor) -> Tensor:
        wide = torch.full((*t.shape[:-1], 2 * t.shape[-1]), torch.nan)
        wide[..., ::2] = t
        return wide[..., ::2]

    views = {
        "every other column": x.map(spread),
        "transposed storage": replace(x, q=x.q.mT.contiguous().mT, k=x.k.mT.contiguous().mT),
        "heads last": replace(x, q=x.q.transpose(1, 2).contiguous().transpose(1, 2)),
    }
    for name, y in views.items():
        copies = y.map(lambda t: t.clone())
        close(row, name, run(row.method, y, impl=impl), wanted, 1e-6)
        for before, after in zip(copies.leaves(), y.leaves(), strict=True):
            same(row, f"input after the call ({name})", after, before)
    one = x.item(slice(0, 1))
    expanded = replace(one, q=one.q.expand(2, -1, -1, -1), k=one.k.expand(2, -1, -1, -1)).with_payload(
        one.payload.expand(2, *one.payload.shape[1:])
    )
    close(row, "expanded", run(row.method, expanded, impl=impl)[1:], wanted[:1], 1e-6)


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
