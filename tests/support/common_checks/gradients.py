"""The common checks about derivatives."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointError, checkpoint

import sparing
from tests.support.common_checks.tools import (
    check,
    close,
    differentiable,
    gradients,
    has_full_budget,
    same,
    tracked,
)
from tests.support.inputs import (
    Inputs,
    hard_cases,
    keys_mask,
    make,
    padding,
    projected,
    run,
    shape_of,
)
from tests.support.method_table import Row


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


@check("gradient", differentiable, on="reference")
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


@check(
    "gradient at full budget", lambda row: differentiable(row) and has_full_budget(row) and "gradient" not in row.skip
)
def gradient_at_full_budget(row: Row, impl: str) -> None:
    """Where the method reaches its target, its gradients are those of the target (float64)."""
    for causal in {False, row.supports.causal}:
        x = tracked(make(row.method, n_q=20, dtype=torch.float64))
        full = row.method.full_budget(shape_of(x, causal))
        target = row.method.exact_target() or row.method
        assert full is not None
        value = x.value if target.supports.projection else projected(x)
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
