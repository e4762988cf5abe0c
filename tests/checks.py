"""The common checks: what every method must pass. Each raises AssertionError with the method, the shapes and the error.

`CHECKS` maps a name to a function of (row, impl); `test_common.py` runs them over the table of `methods.py`, and
`test_controls.py` shows that broken methods fail them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import torch
from torch import Tensor

import sparing
from sparing import Projection, Shape, Unsupported

from inputs import Inputs, exact_for, hard_cases, keys_mask, make, padding, peaked, relative, run
from methods import Row

CHECKS: dict[str, Callable[[Row, str], None]] = {}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def check(name: str, applies: Callable[[Row], bool] = lambda row: True) -> Callable[..., Callable[[Row, str], None]]:
    def add(fn: Callable[[Row, str], None]) -> Callable[[Row, str], None]:
        fn.applies = applies  # type: ignore[attr-defined]
        CHECKS[name] = fn
        return fn

    return add


def close(row: Row, what: str, found: Tensor, wanted: Tensor, tolerance: float) -> None:
    found, wanted = found.detach(), wanted.detach()
    assert found.shape == wanted.shape, f"{row.spec}: {what}: shape {list(found.shape)} != {list(wanted.shape)}"
    scale = max(1.0, float(wanted.double().abs().max()) if wanted.numel() else 1.0)
    error = float((found.double() - wanted.double()).abs().max()) if wanted.numel() else 0.0
    assert error <= tolerance * scale, f"{row.spec}: {what}: error {error:.3g} > {tolerance:g} x {scale:.3g}"


def same(row: Row, what: str, found: Tensor, wanted: Tensor) -> None:
    found, wanted = found.detach(), wanted.detach()
    equal = torch.equal(found.nan_to_num(nan=7e9), wanted.nan_to_num(nan=7e9))
    worst = float((found.double() - wanted.double()).abs().max()) if found.shape == wanted.shape else float("nan")
    assert equal, f"{row.spec}: {what}: not bit-equal, largest difference {worst:.3g}"


def gradients(x: Inputs, out: Tensor, weight: Tensor) -> list[Tensor]:
    found = torch.autograd.grad((out * weight).sum(), x.leaves(), allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(x.leaves(), found, strict=True)]


def tracked(x: Inputs) -> Inputs:
    """Copies of the inputs that require a gradient."""
    q, k, payload = (t.detach().clone().requires_grad_() for t in x.leaves())
    return replace(x, q=q, k=k).with_payload(payload)


def differentiable(row: Row) -> bool:
    return row.supports.gradient == "full"


def _expect_refusal(row: Row, what: str, call: Callable[[], object]) -> None:
    try:
        call()
    except Unsupported as error:
        message = str(error)
    else:
        raise AssertionError(f"{row.spec}: {what} is not claimed, and was not refused")
    assert row.method.name in message, f"{row.spec}: the refusal of {what} does not name the method: {message}"


@check("capabilities")
def capabilities(row: Row, impl: str) -> None:
    """What is claimed works, what is not claimed raises before any computation."""
    can, m = row.supports, row.method
    x = make(m, n_q=12)
    grouped = make(m, n_q=12, heads=4, kv_heads=2)
    crossed = make(m, n_q=12, n_k=15)
    keep = keys_mask(padding("right", 2, 12))
    by_query = torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(0)) < 0.7
    requests: list[tuple[str, bool, Callable[[], Tensor]]] = [
        ("is_causal", can.causal, lambda: run(m, x, impl=impl, is_causal=True)),
        ("key padding", can.key_padding, lambda: run(m, x, impl=impl, attn_mask=keep)),
        ("a boolean mask", bool(can.attn_mask), lambda: run(m, x, impl=impl, attn_mask=by_query)),
        ("an additive mask", can.attn_mask == "any", lambda: run(m, x, impl=impl, attn_mask=torch.randn(12, 12))),
        ("a key bias", can.attn_mask == "any", lambda: run(m, x, impl=impl, attn_mask=torch.randn(2, 1, 1, 12))),
        ("cross attention", can.cross_attention, lambda: run(m, crossed, impl=impl)),
        ("gqa", can.gqa, lambda: run(m, grouped, impl=impl, enable_gqa=True)),
        ("dropout", can.dropout, lambda: run(m, x, impl=impl, dropout_p=0.5)),
    ]
    for what, claimed, call in requests:
        if claimed:
            out = call()
            assert out.isfinite().all(), f"{row.spec}: {what} gives non-finite numbers"
        else:
            _expect_refusal(row, what, call)
    y = tracked(x)
    asked = {"q": replace(x, q=y.q), "k": replace(x, k=y.k), "value": x.with_payload(y.payload)}
    for name, z in asked.items():
        if can.gradient == "full" or (can.gradient == "values" and name == "value"):
            assert run(m, z, impl=impl).requires_grad, f"{row.spec}: no gradient reaches {name}"
        else:
            _expect_refusal(row, f"a gradient for {name}", lambda z=z: run(m, z, impl=impl))
            with torch.no_grad():
                assert run(m, z, impl=impl).isfinite().all()
    inspected = sparing.inspect(x.q, x.k, x.value, method=m, seed=0, impl=impl)
    assert (inspected.lse is not None) == can.lse, f"{row.spec}: claims lse={can.lse}, inspect() disagrees"
    close(row, "inspect() against attention()", inspected.output, run(m, x, impl=impl), 1e-5)
    if can.projection:
        _expect_refusal(row, "a projected value", lambda: sparing.attention(x.q, x.k, x.k, method=m))
    else:
        width = 5
        value = Projection(torch.randn(2, 12, width), torch.randn(2 * 6, width), torch.randn(12))
        out = sparing.attention(x.q, x.k, value, method=m, seed=0, impl=impl)
        same(row, "Projection", out, sparing.attention(x.q, x.k, value.project(2), method=m, seed=0, impl=impl))
    _expect_refusal(row, "impl='native'", lambda: run(m, x, impl="native"))


@check("causal leak", lambda row: row.supports.causal)
def causal_leak(row: Row, impl: str) -> None:
    """Replacing later tokens by noise, NaN or huge numbers changes no earlier output and no earlier gradient."""
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
        mask = None if keep is None else keys_mask(keep.flip(0))
        turned = run(row.method, x.item(torch.tensor([2, 1, 0])), impl=impl, attn_mask=mask, is_causal=causal)  # type: ignore[arg-type]
        close(row, f"other slot, {what}", turned.flip(0), out, 1e-6)


@check("gqa equals repeat", lambda row: row.supports.gqa)
def gqa_equals_repeat(row: Row, impl: str) -> None:
    """Shared key heads give what repeated ones give, when the repeated heads carry the group's random stream."""
    x = make(row.method, heads=4, kv_heads=2)
    for causal in {False, row.supports.causal}:
        out = run(row.method, x, impl=impl, enable_gqa=True, is_causal=causal)
        if isinstance(x.value, Projection):
            # Sample counts follow the group's largest weight, so compare with one call per group instead.
            weight, bias = (t.unflatten(0, (2, -1)) for t in x.value[1:] if t is not None)
            for g in range(2):
                value = Projection(x.value.x, weight[g], bias[g])
                alone = sparing.attention(
                    x.q[:, 2 * g : 2 * g + 2], x.k[:, g : g + 1], value, enable_gqa=True, is_causal=causal,
                    method=row.method, seed=0, impl=impl, streams=[g],  # type: ignore[arg-type]
                )  # fmt: skip
                close(row, f"group {g} alone, causal={causal}", out[:, 2 * g : 2 * g + 2], alone, 1e-6)
        else:
            k, v = (t.repeat_interleave(2, 1) for t in (x.k, x.value))
            repeated = Inputs(x.q, k, v)
            wanted = run(row.method, repeated, impl=impl, streams=[0, 0, 1, 1], is_causal=causal)
            close(row, f"repeated heads, causal={causal}", out, wanted, 1e-6)


def shape_of(x: Inputs, causal: bool = False) -> Shape:
    value_dim = x.value.shape[-1] if isinstance(x.value, Tensor) else x.value.weight.shape[0] // x.k.shape[1]
    return Shape(
        batch=x.q.shape[0], heads=x.q.shape[1], kv_heads=x.k.shape[1], queries=x.n_q, keys=x.n_k, head_dim=x.q.shape[-1],
        value_dim=value_dim, causal=causal,
        in_features=x.value.x.shape[-1] if isinstance(x.value, Projection) else None,
    )  # fmt: skip


def _full(row: Row) -> bool:
    return row.method.full_budget(Shape(queries=9, keys=9, head_dim=8, value_dim=6, in_features=12)) is not None


@check("exact at full budget", _full)
def exact_at_full_budget(row: Row, impl: str) -> None:
    """At the setting that the method calls full, it computes its target, whatever the length."""
    for n_q, n_k in ((1, 1), (2, 2), (7, 7), (31, 31), (33, 33), (64, 64), (20, 33), (33, 20)):
        if n_q != n_k and not row.supports.cross_attention:
            continue
        for causal in {False, row.supports.causal}:
            for dtype in (torch.float64, torch.float32):
                x = make(row.method, n_q=n_q, n_k=n_k, dtype=dtype)
                full = row.method.full_budget(shape_of(x, causal))
                target = row.method.exact_target() or row.method
                assert full is not None
                wide = x.map(lambda t: t.double())
                wanted = sparing.attention(
                    wide.q, wide.k, wide.value if target.supports.projection else _projected(wide), method=target,
                    is_causal=causal, impl="reference", seed=0,
                )  # fmt: skip
                found = run(full, x, impl=impl, is_causal=causal)
                close(row, f"{full} at {n_q} x {n_k}, causal={causal}", found, wanted, max(TOLERANCE[dtype], 1e-8))


def _projected(x: Inputs) -> Tensor:
    return x.value.project(x.k.shape[1]) if isinstance(x.value, Projection) else x.value


@check("budget", lambda row: bool(row.budgets))
def budget(row: Row, impl: str) -> None:
    """On peaked attention the mean error falls with the budget (20 inputs, 5 seeds; fixed, hence no false alarm)."""
    levels = [sparing.method(spec) for spec in row.budgets]
    target = levels[0].exact_target() or levels[0]
    errors = torch.zeros(len(levels))
    for count in (1.5, 4, 16, 32):
        for fixture in range(5):
            x = peaked(row.method, count, seed=10 * fixture)
            wanted = sparing.attention(x.q, x.k, _projected(x), method=target, impl="reference", seed=0)
            for i, level in enumerate(levels):
                for seed in range(5 if row.supports.stochastic else 1):
                    errors[i] += relative(run(level, x, impl=impl, seed=seed), wanted)
    falling = all(b < 0.95 * a or b < 1e-9 for a, b in zip(errors[:-1].tolist(), errors[1:].tolist(), strict=True))
    assert falling, f"{row.spec}: mean errors {errors.tolist()} at {row.budgets} do not fall"


@check("beats the mean", lambda row: row.beats_mean)
def beats_the_mean(row: Row, impl: str) -> None:
    """On peaked attention the method is closer to softmax attention than the mean of the values is."""
    method = sparing.method(row.budgets[-1] if row.budgets else row.spec)
    for count in (1.5, 4, 16):
        x = peaked(method, count, seed=3)
        wanted = exact_for(replace(x, value=_projected(x)))
        mean = _projected(x).mean(-2, keepdim=True).expand_as(wanted)
        found, control = relative(run(method, x, impl=impl), wanted), relative(mean, wanted)
        assert found < control, f"{method} at {count} keys: error {found:.3g}, mean of V {control:.3g}"


@check("permutation", lambda row: not row.supports.position_based)
def permutation(row: Row, impl: str) -> None:
    """Permuting the keys changes nothing; permuting the queries permutes the output."""
    x = make(row.method, n_q=33, dtype=torch.float64)
    gen = torch.Generator().manual_seed(1)
    for_q, for_k = torch.randperm(33, generator=gen), torch.randperm(33, generator=gen)
    y = replace(x, q=x.q[:, :, for_q], k=x.k[:, :, for_k]).with_payload(x.payload[..., for_k, :])
    close(row, "permuted tokens", run(row.method, y, impl=impl), run(row.method, x, impl=impl)[:, :, for_q], 1e-9)


@check("seed")
def seed(row: Row, impl: str) -> None:
    """A seed fixes the result and leaves the global generator alone; without one, torch's generator governs."""
    x = make(row.method, n_q=64)
    state = torch.get_rng_state()
    first, again, other = (run(row.method, x, impl=impl, seed=s) for s in (3, 3, 4))
    assert torch.equal(state, torch.get_rng_state()), f"{row.spec}: a seeded call touched the global generator"
    same(row, "same seed twice", again, first)
    assert torch.equal(other, first) != row.supports.stochastic, f"{row.spec}: stochastic={row.supports.stochastic}"
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


@check("gradient", differentiable)
def gradient(row: Row, impl: str) -> None:
    """Numerical and analytical derivatives agree for the fixed sample (float64)."""
    cases: list[tuple[int, Tensor | None, bool]] = [(5, None, False)]
    if row.supports.key_padding:
        cases.append((6, torch.tensor([[True, True, False, True, True, False]]), False))
    if row.supports.causal:
        cases.append((5, None, True))
    for n, keep, causal in cases:
        x = tracked(make(row.method, batch=1, n_q=n, d=4, e=3, dtype=torch.float64, sharpness=0.7))

        def f(
            q: Tensor, k: Tensor, payload: Tensor, x: Inputs = x, keep: Tensor | None = keep, causal: bool = causal
        ) -> Tensor:
            y = replace(x, q=q, k=k).with_payload(payload)
            return run(row.method, y, impl=impl, attn_mask=None if keep is None else keys_mask(keep), is_causal=causal)

        right = torch.autograd.gradcheck(f, tuple(x.leaves()), eps=1e-6, atol=1e-6, raise_exception=False)
        assert right, f"{row.spec}: wrong gradient, causal={causal}, keep={keep}"


@check("gradient stays out", differentiable)
def gradient_stays_out(row: Row, impl: str) -> None:
    """Padded tokens and rows that see nothing get exactly zero gradient, and nothing is NaN."""
    if row.supports.key_padding:
        x = tracked(make(row.method, n_q=20))
        keep = padding("holes", 2, 20)
        keep[1] = False
        out = run(row.method, x, impl=impl, attn_mask=keys_mask(keep))
        rows = keep.clone()
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)) * rows[:, None, :, None]
        for name, t, g in zip("qkv", x.leaves(), gradients(x, out, weight), strict=True):
            assert g.isfinite().all(), f"{row.spec}: grad_{name} is not finite"
            hole = ~keep[:, None, :, None] if t.ndim == 4 else ~keep[:, :, None]
            assert bool((g.masked_select(hole) == 0).all()), f"{row.spec}: grad_{name} reaches padded tokens"
    for name, case in hard_cases(row.method).items():
        x = tracked(case)
        for g in gradients(x, run(row.method, x, impl=impl), torch.ones(())):
            assert g.isfinite().all(), f"{row.spec}: gradient is not finite for: {name}"
    x = tracked(make(row.method))
    first, again = (gradients(x, run(row.method, x, impl=impl), torch.ones(())) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        same(row, "gradient of the same seed", a, b)


@check("finite")
def finite(row: Row, impl: str) -> None:
    """Hard inputs give finite numbers; queries with nothing to see give zeros; empty sequences give empty outputs."""
    for name, x in hard_cases(row.method).items():
        out = run(row.method, x, impl=impl)
        assert out.isfinite().all(), f"{row.spec}: not finite for: {name}"
        if row.supports.causal:
            assert run(row.method, x, impl=impl, is_causal=True).isfinite().all(), f"{row.spec}: causal, {name}"
    x = make(row.method, n_q=20)
    if row.supports.key_padding:
        keep = torch.ones(2, 20, dtype=torch.bool)
        keep[1] = False
        out = run(row.method, x, impl=impl, attn_mask=keys_mask(keep))
        assert bool((out[1] == 0).all()), f"{row.spec}: an item without valid keys must give zeros"
        assert bool((out[0] != 0).any())
        if row.supports.causal:
            keep[0, :5] = False  # left padding: the first rows see nothing
            out = run(row.method, x, impl=impl, attn_mask=keys_mask(keep), is_causal=True)
            assert out.isfinite().all()
            assert bool((out[0, :, :5] == 0).all()), f"{row.spec}: rows that see only padding must give zeros"
    if row.supports.attn_mask:
        mask = torch.ones(20, 20, dtype=torch.bool)
        mask[7] = False
        out = run(row.method, x, impl=impl, attn_mask=mask)
        assert out.isfinite().all()
        assert bool((out[:, :, 7] == 0).all()), f"{row.spec}: a row that may see nothing must give zeros"
    assert run(row.method, x.tokens(slice(0, 0)), impl=impl).shape == (2, 2, 0, 6)
    assert run(row.method, x.item(slice(0, 0)), impl=impl).shape == (0, 2, 20, 6)
    if row.supports.cross_attention:
        none = replace(x, k=x.k[:, :, :0]).with_payload(x.payload[..., :0, :])
        assert bool((run(row.method, none, impl=impl) == 0).all()), f"{row.spec}: no keys must give zeros"


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
    for what, low in (("-inf", -torch.inf), ("lowest finite", torch.finfo(torch.float32).min)):
        additive = torch.zeros(2, 1, 1, 33).masked_fill(~keys_mask(keep), low)
        same(row, f"additive {what}", run(row.method, x, impl=impl, attn_mask=additive), wanted)
    expanded = keys_mask(keep).expand(2, 2, 33, 33)
    same(row, "expanded", run(row.method, x, impl=impl, attn_mask=expanded), wanted)
    if row.supports.attn_mask:
        full = expanded.contiguous()
        close(row, "written out", run(row.method, x, impl=impl, attn_mask=full), wanted, 1e-5)


@check("precision")
def precision(row: Row, impl: str) -> None:
    """16-bit inputs give the float32 result of the same numbers, rounded; float64 agrees with float32."""
    x = make(row.method, n_q=33)
    for dtype in (torch.bfloat16, torch.float16):
        low = x.map(lambda t, dtype=dtype: t.to(dtype))
        found = run(row.method, low, impl=impl)
        assert found.dtype == dtype, f"{row.spec}: {dtype} in, {found.dtype} out"
        close(row, str(dtype), found, run(row.method, low.map(lambda t: t.float()), impl=impl), TOLERANCE[dtype])
    out = run(row.method, x.map(lambda t: t.double()), impl=impl)
    assert out.dtype == torch.float64
    agree = (out - run(row.method, x, impl=impl).double()).norm() / out.norm()
    assert agree < 1e-2, f"{row.spec}: float32 and float64 differ by {agree:.3g}"


@check("fast equals reference", lambda row: len(row.impls) > 1)
def fast_equals_reference(row: Row, impl: str) -> None:
    """Both paths give the same numbers and gradients from the same samples, for any shape, mask and scale."""
    can = row.supports
    for n_q, n_k, d in ((1, 1, 8), (7, 7, 5), (33, 33, 8), (100, 100, 20), (65, 130, 8), (130, 65, 8), (257, 257, 16)):
        if n_q != n_k and not can.cross_attention:
            continue
        for causal in {False, can.causal}:
            for kind in ("none", "left", "holes") if can.key_padding else ("none",):
                x = tracked(make(row.method, n_q=n_q, n_k=n_k, d=d, e=7, dtype=torch.float64))
                mask = None if kind == "none" else keys_mask(padding(kind, 2, n_k))
                outs = [
                    run(row.method, x, impl=i, is_causal=causal, attn_mask=mask, scale=0.4)
                    for i in ("auto", "reference")
                ]
                what = f"{n_q} x {n_k}, d={d}, causal={causal}, padding={kind}"
                close(row, what, outs[0], outs[1], 1e-9)
                if differentiable(row):
                    weight = torch.randn(outs[0].shape, generator=torch.Generator().manual_seed(4)).double()
                    both = (gradients(x, out, weight) for out in outs)
                    for name, a, b in zip("qkv", *both, strict=True):
                        close(row, f"grad_{name}, {what}", a, b, 1e-8)


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


@check("spec and cost")
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
