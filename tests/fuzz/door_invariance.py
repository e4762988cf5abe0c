"""Checks of a call that change what must not matter: hidden keys, later tokens, batch-mates, masked queries, NaN."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.fuzz import door_truth
from tests.fuzz.door_excuses import unclear
from tests.fuzz.door_inputs import Built
from tests.fuzz.door_rule import hold, noise_of


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
    if door_truth.is_softmax(built.method):
        assert bool(found[rows].isnan().all()), f"{label}a NaN key was swallowed"
