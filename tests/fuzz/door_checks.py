"""What is held of a call: each check raises AssertionError with what was observed and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import sparing
from sparing import Unsupported
from sparing.methods.exact import Exact
from tests.fuzz import door_truth
from tests.fuzz.door_inputs import Built
from tests.fuzz.door_rule import CHOOSING, FLOOR, hold, largest_logit, noise_of, size_of, unclear
from tests.support.check_tools import gradients, tracked
from tests.support.inputs import Inputs
from tests.support.number_checks import shape_of


def _is_softmax(method: sparing.Method) -> bool:
    return isinstance(method, Exact) or str(method) in ("kernel", "kernel(kind='exp')")


def truth(built: Built, out: Tensor, label: str, case: dict[str, Any]) -> None:
    """Exact methods give dense attention in float64; others what their specification gives in float64."""
    if _is_softmax(built.method):
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
    found = torch.where(_cancels(built), wanted.to(found.dtype), found)
    rough = None if found.dtype == torch.float64 else built.run(built.x, impl="reference")
    same = built.with_inputs(x)
    if built.method.name in ("yoso", "lsh") and rough is not None:
        found = torch.where(_hashed_otherwise(found, rough, wanted), wanted.to(found.dtype), found)
    hold(
        f"{label}against its specification in float64", found, wanted, size_of(built, wanted), rough,
        lambda: noise_of(same, wanted, lambda y: built.run(y, impl="reference")), case["n_k"],
        # Two samples of the same rounding, which the iteration amplifies where landmarks are alike.
        times=8.0 if getattr(built.method, "solver", "") == "iterative" else 2.0,
    )  # fmt: skip


def _hashed_otherwise(found: Tensor, rough: Tensor, wanted: Tensor) -> Tensor:
    """(B, H, n_q, 1): rows in which a bit of a hash fell to the other side in float32, for the specification as well.

    They are few: a projection must be zero to seven digits. Where more than one row in twenty differs, none is excused.
    """
    size = wanted.abs().amax()
    written = door_truth.rounding(found.dtype, size)
    off = (rough.double() - wanted).abs().amax(-1, keepdim=True) > 1e-3 * size + written
    as_specified = (found.double() - rough.double()).abs().amax(-1, keepdim=True)
    allowed = 1e-5 * size + written
    few = int(off.sum()) <= max(off.numel() // 20, 1)
    return off & (as_specified <= allowed) & few


def _cancels(built: Built) -> Tensor:
    """(B, H, n_q, 1): rows of yoso whose sum is zero but for rounding; it is divided by its length, so rounding decides."""
    if built.method.name != "yoso" or built.method.normalize != "l2":
        return torch.zeros((), dtype=torch.bool)
    plain, x = replace(built.method, normalize="none"), built.wide()
    sums, sizes = (built.run(y, method=plain, impl="reference") for y in (x, x.with_payload(x.payload.abs())))
    return sums.norm(dim=-1, keepdim=True) <= 1e-6 * sizes.norm(dim=-1, keepdim=True)


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
    if _is_softmax(target):
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
        size_of(built, wanted) * 5 * (_slope_of_angles(built) if built.method.name == "yoso" else 1.0)
    )  # 1e-5 in float32
    hold(what, found, wanted, size, None, lambda: noise_of(built, wanted, moved), case["n_k"])


def _slope_of_angles(built: Built) -> float:
    """Return 1 / sin of the smallest angle between a query and a key or its opposite; 40 for parallel ones.

    An angle errs by the rounding of its cosine times this slope; 40 roundings of float32 are 4e-4 of a quarter turn.
    """
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (built.wide().q, built.wide().k))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    cosine = float((q @ k.mT).abs().amax().clamp_max(1.0))
    return float(min(max(1 - cosine * cosine, 1e-12) ** -0.5, 40.0))


def _unchanged(built: Built, found: Tensor, wanted: Tensor, what: str) -> None:
    """Assert equal bits, but for the rounding of torch's products where the place of a row in them may change.

    `value_aware` solves rows together; `lsh(combine='ips')` has no kernel, and puts rows of a bucket together.
    """
    together = built.method.name == "value_aware" or getattr(built.method, "combine", "") == "ips"
    if together and wanted.numel():
        hold(what, found, wanted.double(), wanted.double().abs().amax(), None, lambda: torch.zeros(()), 1)
    else:
        _same(found, wanted, what)


def _same(found: Tensor, wanted: Tensor, what: str) -> None:
    if not torch.equal(found.nan_to_num(nan=7e9), wanted.nan_to_num(nan=7e9)):
        worst = (found.double() - wanted.double()).abs().nan_to_num(torch.inf).amax()
        raise AssertionError(f"{what}: not bit-equal, largest difference {float(worst):.3g}")


def _contiguous(built: Built, out: Tensor, case: dict[str, Any]) -> tuple[Built, Tensor]:
    """The call on contiguous copies, as other numbers will be: torch's products round by the strides."""
    if case["layout"] == "plain":
        return built, out
    built = built.with_inputs(built.x.map(lambda t: t.contiguous()))
    return built, built.run()


def again(built: Built, out: Tensor, label: str, case: dict[str, Any]) -> None:
    """The same seed gives the same bits, and leaves torch's generator and the inputs alone."""
    state, before = torch.get_rng_state(), [t.clone() for t in built.x.leaves()]
    _same(built.run(), out, f"{label}the same seed again")
    assert torch.equal(state, torch.get_rng_state()), f"{label}a seeded call touched the global generator"
    for t, kept in zip(built.x.leaves(), before, strict=True):
        _same(t, kept, f"{label}an input after the call")


def _huge(dtype: torch.dtype) -> float:
    return 1e30 if dtype != torch.float16 else 6e4


def padding(built: Built, out: Tensor, label: str, case: dict[str, Any]) -> None:
    """Nothing in keys that no query sees changes a row, to the bit; padded queries influence no other row."""
    if built.method.name == "value_aware" and unclear(built, case):
        return  # rounding decides between equal values
    built, out = _contiguous(built, out, case)
    hidden = ~built.visible.any((1, 2))  # (B, n_k)
    rows = torch.ones(out.shape[:3], dtype=torch.bool)
    q = built.x.q
    for fill in (torch.nan, _huge(q.dtype), -3.0):
        payload = built.x.payload
        where = hidden[:, None, :, None] if payload.ndim == 4 else hidden[:, :, None]
        k, payload = built.x.k.masked_fill(hidden[:, None, :, None], fill), payload.masked_fill(where, fill)
        if built.keep is not None and case["n_q"] == case["n_k"]:
            q = built.x.q.masked_fill(~built.keep[:, None, :, None], fill)
            rows = built.keep[:, None, :].expand(out.shape[:3])
        found = built.run(replace(built.x, q=q, k=k).with_payload(payload))
        _unchanged(built, found[rows], out[rows], f"{label}with {fill} in hidden keys")


def future(built: Built, out: Tensor, label: str, case: dict[str, Any]) -> None:
    """Nothing later changes an earlier row, to the bit."""
    built, out = _contiguous(built, out, case)
    t = case["data"] % (case["n_q"] - 1) if case["n_q"] > 1 else 0

    for fill in (torch.nan, _huge(out.dtype), -3.0):

        def spoil(x: Tensor, fill: float = fill) -> Tensor:
            x = x.clone()
            x[..., t + 1 :, :] = fill
            return x

        y = replace(built.x, q=spoil(built.x.q), k=spoil(built.x.k)).with_payload(spoil(built.x.payload))
        found = built.run(y)
        _unchanged(built, found[:, :, : t + 1], out[:, :, : t + 1], f"{label}rows before {fill} in the future")


def mates(built: Built, out: Tensor, label: str, case: dict[str, Any]) -> None:
    """An item gives the same result with other batch-mates, wild ones too."""
    for factor in (-3.0, 1e20 if out.dtype not in (torch.float16,) else 100.0):

        def other(x: Tensor, factor: float = factor) -> Tensor:
            return torch.cat([x[:1], x[1:].flip(-1) * factor])

        y = replace(built.x, q=other(built.x.q), k=other(built.x.k)).with_payload(other(built.x.payload))
        if not all(bool(t.isfinite().all()) for t in y.leaves()):
            continue
        wanted = out[:1].double()
        size = torch.maximum(wanted.abs().amax(), built.values(built.wide())[:1].abs().amax())

        def noise(wanted: Tensor = wanted) -> Tensor:
            return noise_of(built, built.run(built.wide()), lambda z: built.run(z))

        if not unclear(built, case):
            what = f"{label}with other batch-mates"
            hold(what, built.run(y)[:1], wanted, size, None, noise, case["n_k"])


def _vanishes(built: Built) -> bool:
    """Whether the total of some row is too small for the type of the call, so that the row is zeros, as specified."""
    if built.x.q.dtype == torch.float64:
        return False
    low, high = (built.run(x, impl="reference").detach() for x in (built.x, built.wide()))
    return bool(((low == 0).all(-1) & (high != 0).any(-1)).any())


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
    softmax = _is_softmax(built.method)

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
    if unclear(built, case) or _vanishes(built) or bool(_cancels(built).any()):
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


def query_mask(built: Built, out: Tensor, label: str, case: dict[str, Any]) -> None:
    """Masked queries give zeros and do not influence the others."""
    built, out = _contiguous(built, out, case)
    gen = torch.Generator().manual_seed(case["data"])
    real = torch.rand(case["batch"], case["n_q"], generator=gen) < 0.6
    rows = real[:, None, :].expand(out.shape[:3])
    found = built.run(query_mask=real)
    assert bool((found[~rows] == 0).all()), f"{label}masked queries must give zeros"
    y = replace(built.x, q=built.x.q.masked_fill(~real[:, None, :, None], 50.0))
    _unchanged(built, built.run(y, query_mask=real)[rows], found[rows], f"{label}rows beside masked queries")


def nan(built: Built, out: Tensor, label: str, case: dict[str, Any]) -> None:
    """A NaN in a query spoils its own row only; in a key, only rows that may see it."""
    t = case["data"] % case["n_q"]
    q, rows = built.x.q.clone(), torch.ones(out.shape[:3], dtype=torch.bool)
    q[0, 0, t, 0], rows[0, 0, t] = torch.nan, False
    found = built.run(replace(built.x, q=q))
    spared = out.isfinite().all(-1)
    assert bool(found[0, 0, t].isnan().all()) or not built.sees[0, 0, t], f"{label}a NaN query gave a result"
    assert bool(found[rows & spared].isfinite().all()), f"{label}a NaN query spoils other rows"
    t = case["data"] % case["n_k"]
    k = built.x.k.clone()
    k[0, 0, t, 0] = torch.nan
    found = built.run(replace(built.x, k=k))
    rows = built.visible[..., t].clone()
    rows[1:], rows[:, case["heads"] // case["kv_heads"] :] = False, False
    assert bool(found[~rows & spared].isfinite().all()), f"{label}a NaN key spoils rows that do not see it"
    if _is_softmax(built.method):
        assert bool(found[rows].isnan().all()), f"{label}a NaN key was swallowed"


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


CHECKS: dict[str, Callable[[Built, Tensor, str, dict[str, Any]], None]] = {
    check.__name__: check
    for check in (truth, full, again, padding, future, mates, gradient, query_mask, nan, inspect, packed)
}
