"""The common checks about numbers: targets, budgets, hard inputs, precision, range, agreement of the paths."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch

import sparing
from sparing import Unsupported
from tests.support.common_checks.tools import (
    TOLERANCE,
    check,
    close,
    differentiable,
    gradients,
    has_full_budget,
    tracked,
)
from tests.support.inputs import (
    exact_for,
    hard_cases,
    keys_mask,
    make,
    padding,
    peaked,
    projected,
    relative,
    run,
    shape_of,
)
from tests.support.method_table import Row


@check("exact at full budget", has_full_budget)
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
                    wide.q, wide.k, wide.value if target.supports.projection else projected(wide), method=target,
                    is_causal=causal, impl="reference", seed=0,
                )  # fmt: skip
                found = run(full, x, impl=impl, is_causal=causal)
                close(row, f"{full} at {n_q} x {n_k}, causal={causal}", found, wanted, max(TOLERANCE[dtype], 1e-8))


@check("budget", lambda row: bool(row.budgets), on="default")
def budget(row: Row, impl: str) -> None:
    """On peaked attention the mean error falls with the budget (20 inputs, 5 seeds; fixed, hence no false alarm)."""
    levels = [sparing.method(spec) for spec in row.budgets]
    target = levels[0].exact_target() or levels[0]
    errors = torch.zeros(len(levels))
    for count in (1.5, 4, 16, 32):
        for fixture in range(5):
            x = peaked(row.method, count, seed=10 * fixture)
            wanted = sparing.attention(x.q, x.k, projected(x), method=target, impl="reference", seed=0)
            for i, level in enumerate(levels):
                for seed in range(5 if row.supports.stochastic else 1):
                    errors[i] += relative(run(level, x, impl=impl, seed=seed), wanted)
    falling = all(b < 0.95 * a or b < 1e-9 for a, b in zip(errors[:-1].tolist(), errors[1:].tolist(), strict=True))
    assert falling, f"{row.spec}: mean errors {errors.tolist()} at {row.budgets} do not fall"


@check("beats the mean", lambda row: row.beats_mean, on="default")
def beats_the_mean(row: Row, impl: str) -> None:
    """On peaked attention the method is closer to softmax attention than the mean of the values is."""
    method = sparing.method(row.budgets[-1] if row.budgets else row.spec)
    for count in (1.5, 4, 16, 32):
        x = peaked(method, count, seed=3)
        wanted = exact_for(replace(x, value=projected(x)))
        mean = projected(x).mean(-2, keepdim=True).expand_as(wanted)
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


SHAPES = (  # n_q, n_k, d
    (1, 1, 8),
    (7, 7, 5),
    (33, 33, 8),
    (100, 100, 20),
    (65, 130, 8),
    (130, 65, 8),
    (257, 257, 16),
    (40, 40, 48),
    (33, 33, 128),
)
MASKS = ((False, "none"), (False, "left"), (False, "holes"), (True, "left"), (True, "holes"), (True, "none"))


@check("fast equals reference", lambda row: len(row.impls) > 1, on="fast")
def fast_equals_reference(row: Row, impl: str) -> None:
    """Both paths give the same numbers and gradients from the same samples, for any shape, mask and scale.

    Each shape runs with two of the masks, which change from shape to shape.
    """
    shapes, masks = _shapes_and_masks(row)
    for i, shape in enumerate(shapes):
        for mask in {masks[i % len(masks)], masks[(i + len(masks) // 2) % len(masks)]}:
            _compare_with_reference(row, *shape, *mask)


def fast_equals_reference_on_every_shape_and_mask(row: Row) -> None:
    """The same with all masks on every shape."""
    for shape, mask in product(*_shapes_and_masks(row)):
        _compare_with_reference(row, *shape, *mask)


def _shapes_and_masks(row: Row) -> tuple[list[tuple[int, int, int]], list[tuple[bool, str]]]:
    """What the method can run."""
    can = row.supports
    shapes = [(n_q, n_k, d) for n_q, n_k, d in SHAPES if n_q == n_k or can.cross_attention]
    masks = [(causal, kind) for causal, kind in MASKS if causal <= can.causal and (kind == "none" or can.key_padding)]
    return shapes, masks


def _compare_with_reference(row: Row, n_q: int, n_k: int, d: int, causal: bool, kind: str) -> None:
    x = make(row.method, n_q=n_q, n_k=n_k, d=d, e=7, dtype=torch.float64)
    x = tracked(x) if differentiable(row) else x
    mask = None if kind == "none" else keys_mask(padding(kind, 2, n_k))
    outs = [run(row.method, x, impl=i, is_causal=causal, attn_mask=mask, scale=0.4) for i in ("auto", "reference")]
    what = f"{n_q} x {n_k}, d={d}, causal={causal}, padding={kind}"
    close(row, what, outs[0], outs[1], 1e-9)
    if differentiable(row):
        weight = torch.randn(outs[0].shape, generator=torch.Generator().manual_seed(4)).double()
        both = (gradients(x, out, weight) for out in outs)
        for name, a, b in zip("qkv", *both, strict=True):
            close(row, f"grad_{name}, {what}", a, b, 1e-8)
