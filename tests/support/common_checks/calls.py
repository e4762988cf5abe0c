"""The common checks about calls: what is claimed or refused, batches, head groups, strides, seeds, threads, costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import torch
from torch import Tensor

import sparing
from sparing import Projection, Shape, Unsupported, native
from tests.support.common_checks.tools import (
    check,
    close,
    same,
    tracked,
)
from tests.support.inputs import (
    Inputs,
    keys_mask,
    make,
    padding,
    run,
)
from tests.support.method_table import Row


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


@check("seed")
def seed(row: Row, impl: str) -> None:
    """A seed fixes the result and leaves the global generator alone; without one, torch's generator governs."""
    x = make(row.method, n_q=64)
    state = torch.get_rng_state()
    first, again, other, low, high = (run(row.method, x, impl=impl, seed=s) for s in (3, 3, 4, 1, 1 + 2**40))
    assert torch.equal(state, torch.get_rng_state()), f"{row.spec}: a seeded call touched the global generator"
    same(row, "same seed twice", again, first)
    assert torch.equal(other, first) != row.supports.stochastic, f"{row.spec}: stochastic={row.supports.stochastic}"
    assert torch.equal(low, high) != row.supports.stochastic, f"{row.spec}: seeds 1 and 1 + 2**40"
    torch.manual_seed(11)
    a = run(row.method, x, impl=impl, seed=None)
    b = run(row.method, x, impl=impl, seed=None)
    torch.manual_seed(11)
    same(row, "torch.manual_seed", run(row.method, x, impl=impl, seed=None), a)
    assert torch.equal(a, b) != row.supports.stochastic, f"{row.spec}: calls without a seed repeat themselves"


@check("threads")
def threads(row: Row, impl: str) -> None:
    """One thread or several: the same samples, and the same result up to the blocking of a library's matrix product."""
    x = make(row.method, n_q=100)
    before = torch.get_num_threads()
    outs = []
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            outs.append(run(row.method, x, impl=impl))
    finally:
        torch.set_num_threads(before)
    for out in outs[1:]:
        close(row, "thread count", out, outs[0], 1e-6)


@check("spec and cost", on="default")
def spec_and_cost(row: Row, impl: str) -> None:
    """str() parses back; every field has a documented meaning; the cost grows with the shape and the budget."""
    m = row.method
    assert sparing.method(str(m)) == m, f"{m} does not parse back"
    doc = type(m).__doc__ or ""
    for f in fields(m):
        assert f"{f.name}:" in doc, f"{m.name}: field {f.name} is not documented"
    assert ">>>" in doc, f"{m.name}: no example"
    small = Shape(heads=2, queries=64, keys=64, head_dim=16, value_dim=16, in_features=24)
    large = replace(small, queries=256, keys=256)
    for part in ("flops", "bytes"):
        low, high = getattr(m.cost(small), part), getattr(m.cost(large), part)
        assert 0 <= low < high, f"{m}: cost.{part} {low} at 64 tokens, {high} at 256"
    costs = [sparing.method(spec).cost(large).flops for spec in row.budgets]
    assert costs == sorted(costs), f"{row.budgets}: FLOPs {costs} do not grow"
