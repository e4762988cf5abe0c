"""The common checks about numbers: targets, budgets, seeds, gradients, hard inputs, precision, costs."""

from __future__ import annotations

import re
import warnings
from dataclasses import fields, replace

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointError, checkpoint

import sparing
from sparing import Projection, Shape, Unsupported
from tests.support.check_tools import TOLERANCE, check, close, differentiable, gradients, same, tracked
from tests.support.inputs import Inputs, exact_for, hard_cases, keys_mask, make, padding, peaked, relative, run
from tests.support.method_table import Row


def shape_of(x: Inputs, causal: bool = False) -> Shape:
    value_dim = x.value.shape[-1] if isinstance(x.value, Tensor) else x.value.weight.shape[0] // x.k.shape[1]
    return Shape(
        batch=x.q.shape[0], heads=x.q.shape[1], kv_heads=x.k.shape[1], queries=x.n_q, keys=x.n_k, head_dim=x.q.shape[-1],
        value_dim=value_dim, causal=causal,
        in_features=x.value.x.shape[-1] if isinstance(x.value, Projection) else None,
    )  # fmt: skip


def _full(row: Row) -> bool:
    return row.method.full_budget(Shape(queries=9, keys=9, head_dim=8, value_dim=6, in_features=12)) is not None


def _projected(x: Inputs) -> Tensor:
    return x.value.project(x.k.shape[1]) if isinstance(x.value, Projection) else x.value


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
    for count in (1.5, 4, 16, 32):
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


@check("checkpointing", differentiable)
def checkpointing(row: Row, impl: str) -> None:
    """A forward pass that is run again for the backward pass gives the same gradients."""
    cases = [False, True] if row.supports.causal else [False]
    for causal in cases:
        found = []
        for again in (False, True):
            x = tracked(make(row.method, n_q=20))

            def f(x: Inputs = x, causal: bool = causal) -> Tensor:
                return run(row.method, x, impl=impl, is_causal=causal)

            out = checkpoint(f, use_reentrant=False) if again else f()
            try:
                found.append(gradients(x, out, torch.linspace(-1, 1, out.numel()).view_as(out)))
            except CheckpointError as error:
                raise AssertionError(f"{row.spec}: its gradient does not go through a checkpoint: {error}") from error
        for plain, recomputed in zip(*found, strict=True):
            same(row, f"a gradient through a checkpoint, causal={causal}", recomputed, plain)


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


@check("second derivative", differentiable)
def second_derivative(row: Row, impl: str) -> None:
    """It is right, or refused by an error: never silently zero (float64)."""
    x = tracked(make(row.method, batch=1, heads=1, n_q=5, d=3, e=3, dtype=torch.float64, sharpness=0.7))

    def f(q: Tensor, k: Tensor, payload: Tensor) -> Tensor:
        return run(row.method, replace(x, q=q, k=k).with_payload(payload), impl=impl)

    try:
        right = torch.autograd.gradgradcheck(f, tuple(x.leaves()), atol=1e-5, raise_exception=False)
    except RuntimeError as error:
        right = bool(re.search("once_differentiable|derivative for .* is not implemented", str(error)))
    assert right, f"{row.spec}: wrong second derivative"


@check("forward mode", differentiable)
def forward_mode(row: Row, impl: str) -> None:
    """The derivative along a direction is right, or refused by an error: never silently lost (float64)."""
    x = make(row.method, batch=1, n_q=6, d=4, e=3, dtype=torch.float64, sharpness=0.7)
    along = [torch.randn(t.shape, generator=torch.Generator().manual_seed(4), dtype=t.dtype) for t in x.leaves()]

    def f(*leaves: Tensor) -> Tensor:
        q, k, payload = leaves
        return run(row.method, replace(x, q=q, k=k).with_payload(payload), impl=impl)

    with forward_ad.dual_level(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's rules for some ops come from its old compiler
        try:
            found = forward_ad.unpack_dual(f(*map(forward_ad.make_dual, x.leaves(), along))).tangent
        except (RuntimeError, NotImplementedError):  # torch's own words: not every op of it has a rule
            return
    step = 1e-6
    ahead, back = (f(*(t + sign * step * a for t, a in zip(x.leaves(), along, strict=True))) for sign in (1, -1))
    assert found is not None, f"{row.spec}: the tangent was lost"
    close(row, "forward mode", found, (ahead - back) / (2 * step), 1e-6)


@check("gradient at full budget", lambda row: differentiable(row) and _full(row) and "gradient" not in row.skip)
def gradient_at_full_budget(row: Row, impl: str) -> None:
    """Where the method reaches its target, its gradients are those of the target (float64)."""
    for causal in {False, row.supports.causal}:
        x = tracked(make(row.method, n_q=20, dtype=torch.float64))
        full = row.method.full_budget(shape_of(x, causal))
        target = row.method.exact_target() or row.method
        assert full is not None
        value = x.value if target.supports.projection else _projected(x)
        wanted = sparing.attention(x.q, x.k, value, method=target, is_causal=causal, impl="reference", seed=0)
        weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(6)).double()
        both = (gradients(x, out, weight) for out in (run(full, x, impl=impl, is_causal=causal), wanted))
        for name, a, b in zip("qkv", *both, strict=True):
            close(row, f"grad_{name} of {full}, causal={causal}", a, b, 1e-7)


@check("gradient stays out", differentiable)
def gradient_stays_out(row: Row, impl: str) -> None:
    """Padded tokens and rows that see nothing get exactly zero gradient, and nothing is NaN."""
    if row.supports.key_padding:
        x = tracked(make(row.method, n_q=20))
        keep = padding("holes", 2, 20)
        keep[1] = False
        out = run(row.method, x, impl=impl, attn_mask=keys_mask(keep))
        rows = keep.clone()
        rows[1] = True  # its rows see nothing: zeros, whatever the loss does with them
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


@check("precision")
def precision(row: Row, impl: str) -> None:
    """16-bit inputs give the float32 result of the same numbers, rounded; float64 agrees with it and is not rounded."""
    x = make(row.method, n_q=33)
    for dtype in (torch.bfloat16, torch.float16):
        low = x.map(lambda t, dtype=dtype: t.to(dtype))
        found = run(row.method, low, impl=impl)
        assert found.dtype == dtype, f"{row.spec}: {dtype} in, {found.dtype} out"
        close(row, str(dtype), found, run(row.method, low.map(lambda t: t.float()), impl=impl), TOLERANCE[dtype])
    out = run(row.method, x.map(lambda t: t.double()), impl=impl)
    assert out.dtype == torch.float64
    wide = run(row.method, make(row.method, n_q=33, dtype=torch.float64), impl=impl)
    assert bool((wide != wide.float()).any()), f"{row.spec}: float64 numbers were rounded to float32"
    agree = (out - run(row.method, x, impl=impl).double()).norm() / out.norm()
    assert agree < 1e-4, f"{row.spec}: float32 and float64 differ by {agree:.3g}"


RANGES = {  # name -> factors of q, k and v, and the scale
    "q large, k small": (1e14, 1e-14, 1.0, None),
    "q and k large, scale small": (1e13, 1e13, 1.0, 1e-26),
    "k large": (1.0, 1e13, 1.0, None),
    "v large": (1.0, 1.0, 1e35, None),
    "q and k small": (1e-20, 1e-20, 1.0, None),
    "q and k small, scale large": (1e-15, 1e-15, 1.0, 1e30),
    "scale small": (1.0, 1.0, 1.0, 1e-30),
    "scale zero": (1.0, 1.0, 1.0, 0.0),
    "scale negative": (1.0, 1.0, 1.0, -0.4),
}


@check("range")
def range_of_numbers(row: Row, impl: str) -> None:
    """Entries and scales of any size give what float64 gives, whose range holds all products of float32 numbers."""
    x = make(row.method, n_q=33)
    for name, (by_q, by_k, by_v, scale) in RANGES.items():
        y = replace(x, q=x.q * by_q, k=x.k * by_k).with_payload(x.payload * by_v)
        weights_are_equal = by_q * by_k * (1 if scale is None else abs(scale)) < 1e-20
        for causal in {False, row.supports.causal}:
            if f"range: {name}" in row.skip or (weights_are_equal and row.supports.projection):
                continue  # a Projection's sample counts jump where weights are equal: rounding decides
            try:
                wanted = run(row.method, y.map(lambda t: t.double()), impl="reference", is_causal=causal, scale=scale)
            except Unsupported:
                continue  # negative scales of distances
            found = run(row.method, y, impl=impl, is_causal=causal, scale=scale)
            size = float(wanted.abs().max()) or 1.0
            error = float((found.double() - wanted).abs().max()) / size
            assert error <= 1e-5, f"{row.spec}: {name}, causal={causal}: relative error {error:.3g} > 1e-5"


@check("fast equals reference", lambda row: len(row.impls) > 1)
def fast_equals_reference(row: Row, impl: str) -> None:
    """Both paths give the same numbers and gradients from the same samples, for any shape, mask and scale."""
    can = row.supports
    for n_q, n_k, d in (
        (1, 1, 8),
        (7, 7, 5),
        (33, 33, 8),
        (100, 100, 20),
        (65, 130, 8),
        (130, 65, 8),
        (257, 257, 16),
        (40, 40, 48),
        (33, 33, 128),
    ):
        if n_q != n_k and not can.cross_attention:
            continue
        for causal in {False, can.causal}:
            for kind in ("none", "left", "holes") if can.key_padding else ("none",):
                x = make(row.method, n_q=n_q, n_k=n_k, d=d, e=7, dtype=torch.float64)
                x = tracked(x) if differentiable(row) else x
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
