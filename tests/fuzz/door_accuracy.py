"""Checks of a call that hold its numbers to float64: output, log-sum-exp, gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import sparing
from sparing import Unsupported
from sparing.methods.exact import Exact
from tests.fuzz import door_truth
from tests.fuzz.door_excuses import CHOOSING, cancels, hashed_otherwise, slope_of_angles, unclear, vanishes
from tests.fuzz.door_inputs import Built
from tests.fuzz.door_rule import FLOOR, hold, largest_logit, noise_of, size_of
from tests.support.common_checks.tools import gradients, tracked
from tests.support.inputs import Inputs, shape_of


def truth(built: Built, out: Tensor, label: str, case: dict[str, Any]) -> None:
    """Exact methods give dense attention in float64; others what their specification gives in float64."""
    if door_truth.is_softmax(built.method):
        _dense(built, out, f"{label}against dense attention in float64")
        return
    choosing = built.method.name in CHOOSING
    wanted = built.run(built.wide(), impl="reference")
    fits = wanted.abs() < 0.9 * torch.finfo(out.dtype).max
    assert bool(out[fits].isfinite().all()), f"{label}not finite for finite inputs"
    if choosing and out.dtype != torch.float64:
        _most_rows(built, out, wanted, f"{label}against its specification in float64", case)
    if unclear(built, case):
        return
    x = built.wide() if choosing else built.x
    found = built.run(x) if choosing else out
    found = torch.where(cancels(built), wanted.to(found.dtype), found)
    rough = None if found.dtype == torch.float64 else built.run(built.x, impl="reference")
    same = built.with_inputs(x)
    if built.method.name in ("yoso", "lsh") and rough is not None:
        found = torch.where(hashed_otherwise(found, rough, wanted), wanted.to(found.dtype), found)
    hold(
        f"{label}against its specification in float64", found, wanted, size_of(built, wanted), rough,
        lambda: noise_of(same, wanted, lambda y: built.run(y, impl="reference")), case["n_k"],
        # Two samples of the same rounding, which the iteration amplifies where landmarks are alike.
        times=8.0 if getattr(built.method, "solver", "") == "iterative" else 2.0,
    )  # fmt: skip


def _most_rows(built: Built, out: Tensor, wanted: Tensor, what: str, case: dict[str, Any]) -> None:
    """Half of the rows of each head agree with float64, although rounding may choose other keys in some of them."""
    shared = built.method.name == "monte_carlo"  # one count that falls to the other side changes all rows
    if shared or case["d"] < 8 or not bool(built.sees.any()) or unclear(built, {**case, "dtype": "float32"}):
        return
    size = size_of(built, wanted)
    allowed = 1e-5 * size + door_truth.rounding(out.dtype, size)
    rows = (out.double() - wanted).abs().amax(-1).masked_fill(~built.sees, torch.nan)
    error = rows.nanmedian(-1).values.nan_to_num(0.0).amax()  # of the worst head
    assert bool(error <= allowed), f"{what}, half of the rows of a head: error {error:.3g} > {allowed:.3g}"


def _dense(built: Built, out: Tensor, what: str, floor: float = 16.0) -> None:
    if out.dtype == torch.float64:  # plain sums over all keys, 1e-12 at 10,000 of them
        floor += built.x.k.shape[2]
    exact = door_truth.softmax(built, floor)
    fits = exact.output.abs() < 0.9 * torch.finfo(out.dtype).max  # projected values may be beyond float16
    assert bool(out[fits].isfinite().all()), f"{what}: not finite for finite inputs"
    error, allowed = (out.double() - exact.output).abs()[fits], exact.allowed[fits]
    worst = int((error / allowed).argmax()) if error.numel() else 0
    assert bool((error <= allowed).all()), f"{what}: error {error[worst]:.3g} > {allowed[worst]:.3g}"


def full(built: Built, out: Tensor, label: str, case: dict[str, Any]) -> None:
    """At the setting that the method calls full, it computes its target."""
    setting = built.method.full_budget(shape_of(built.x, case["causal"]))
    if setting is None or (built.method.name == "kernel" and unclear(built, case)):
        return
    target = setting.exact_target() or setting
    what = f"{label}at full budget, against {target.name}"
    try:
        found = built.run(method=setting)
    except Unsupported:
        assert case["impl"] == "native", f"{what}: refused"
        return
    if door_truth.is_softmax(target):
        # The tolerance of "exact at full budget": 1e-5 in float32. Oracles solve for their weights: 1e-9 in float64.
        solved = setting.oracle and found.dtype == torch.float64
        _dense(built, found, what, floor=1e-9 / torch.finfo(torch.float64).eps if solved else 84.0)
        return
    wide = built.wide()
    value = wide.value if target.supports.projection else built.values(wide)
    wanted = built.run(replace(wide, value=value), method=target, impl="reference")

    if found.dtype != torch.float64:  # rows whose total vanishes in this type are zeros, as the specification says
        low = built.run(method=target, impl="reference")
        gone = (found == 0).all(-1, keepdim=True) & (low == 0).all(-1, keepdim=True)
        found = torch.where(gone, wanted.to(found.dtype), found)

    def moved(y: Inputs) -> Tensor:
        return built.run(replace(y, value=built.values(y)), method=target, impl="reference")

    size = (
        size_of(built, wanted) * 5 * (slope_of_angles(built) if built.method.name == "yoso" else 1.0)
    )  # 1e-5 in float32
    hold(what, found, wanted, size, None, lambda: noise_of(built, wanted, moved), case["n_k"])


def gradient(built: Built, out: Tensor, label: str, case: dict[str, Any]) -> None:
    """Gradients are finite, and those of the specification in float64, by the rule for gradients."""
    wide = built.method.name in CHOOSING
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def grads(x: Inputs, **changes: Any) -> list[Tensor]:
        y = tracked(x)
        found = built.run(y, **changes)
        return gradients(y, found, weight.to(found.dtype))

    try:
        found = grads(built.wide() if wide else built.x)
    except Unsupported:
        assert case["impl"] == "native", f"{label}refused a gradient"
        return
    softmax = door_truth.is_softmax(built.method)

    def specified(x: Inputs) -> list[Tensor]:
        if not softmax:
            return grads(x, impl="reference")
        y = tracked(x)
        return gradients(y, door_truth.dense(built.with_inputs(y)).output, weight)

    wanted = specified(built.wide())
    rough = None
    if softmax:
        y = tracked(built.x)
        rough = gradients(y, door_truth.plain(built.with_inputs(y)), weight.to(y.q.dtype))
    elif not wide and found[0].dtype == torch.float32:
        rough = grads(built.x, impl="reference")
    if unclear(built, case) or vanishes(built) or bool(cancels(built).any()):
        return
    x = built.wide()
    if built.method.name == "random_features":  # exponents hold |q|^2 and |k|^2: beyond this, rounding decides them
        longest = max(float(t.square().sum(-1).amax()) for t in (x.q, x.k))
        if torch.finfo(door_truth.compute_type(out.dtype)).eps * abs(built.scale) * longest > 1:
            return
    q, k, v = x.q.abs().amax(), x.k.abs().amax(), built.values(x).norm(dim=-1).amax()
    v = torch.maximum(v, out.detach().double().norm(dim=-1).amax())  # rows of yoso have length 1, whatever the values
    root = max(abs(built.scale) ** 0.5, float(built.method.name in ("kernel", "yoso")))  # some take no scale
    terms = root * v * torch.maximum(root * torch.maximum(q, k), torch.tensor(x.q.shape[-1] ** 0.5))
    natural = [terms, terms, 1.0]  # of terms that may cancel
    if built.method.name == "yoso" or getattr(built.method, "kind", "") == "poly":  # the length of q and k cancels
        degree = getattr(built.method, "degree", 1)
        for i, rows in enumerate((x.q, x.k)):
            length = rows.norm(dim=-1)
            natural[i] = terms + degree * v / length[length > 0].amin() if bool((length > 0).any()) else terms
    gaussian = getattr(built.method, "kind", "") == "gaussian" and getattr(built.method, "normalize", "") == "row"
    for i, name in enumerate(("query", "key", "value")):
        if not bool(wanted[i].isfinite().all()) or not wanted[i].numel():
            continue  # beyond float64
        same = built.with_inputs(built.wide()) if wide else built

        def noise(i: int = i, same: Built = same) -> Tensor:
            return noise_of(same, wanted[i], lambda y: specified(y)[i])

        what = f"{label}gradient of {name} against its specification in float64"
        size = torch.maximum(wanted[i].abs().amax(), weight.norm(dim=-1).amax() * natural[i])
        if softmax or gaussian:  # torch's fused kernel forms weights from a rounded log-sum-exp in its backward pass
            kind = door_truth.compute_type(found[i].dtype)
            size = size * (1 + 4 * torch.finfo(kind).eps * largest_logit(built) / FLOOR[kind])
        hold(what, found[i], wanted[i], size, None if rough is None else rough[i], noise, case["n_k"], times=3.0)


def inspect(built: Built, out: Tensor, label: str, case: dict[str, Any]) -> None:
    """`inspect` gives the same output, and the log-sum-exp of exact attention."""
    found = sparing.inspect(built.x.q, built.x.k, built.x.value, **built.options)
    assert (found.lse is not None) == built.method.supports.lse, f"{label}inspect() and supports.lse disagree"
    if not isinstance(built.method, Exact):
        return
    _dense(built, found.output, f"{label}inspect() against dense attention in float64")
    exact = door_truth.softmax(built)
    sees, lse = built.sees, found.lse.double()
    assert bool((lse[~sees] == -torch.inf).all()), f"{label}the log-sum-exp of nothing must be -inf"
    error = (lse - exact.lse)[sees].abs()
    assert bool((error <= exact.lse_allowed[sees]).all()), f"{label}log-sum-exp is off by {error.max():.3g}"


def packed(built: Built, out: Tensor, label: str, case: dict[str, Any]) -> None:
    """A padded item gives what its tokens alone give (float64)."""
    assert built.keep is not None
    index = built.keep[0].nonzero().squeeze(-1)
    if not len(index) or unclear(built, case):
        return
    x = built.wide().item(slice(0, 1))
    whole = built.run(built.wide())[:1]
    y = replace(x, k=x.k[:, :, index]).with_payload(x.payload[..., index, :])
    if case["n_q"] == case["n_k"]:
        y, whole = replace(y, q=y.q[:, :, index]), whole[:, :, index]
    wanted = built.run(y, attn_mask=None)
    wide = built.with_inputs(built.wide())

    def noise() -> Tensor:
        return noise_of(wide, built.run(wide.x), lambda z: built.run(z))

    hold(f"{label}padded against its tokens alone", whole, wanted, size_of(built, wanted), None, noise, case["n_k"])
