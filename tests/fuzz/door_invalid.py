"""Calls that must be refused by an error that names the argument."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

import sparing
from tests.fuzz.cases import Refused

ERRORS = (ValueError, TypeError, MemoryError)  # Unsupported is a ValueError

Changes = dict[str, Any]


def _call(method: str = "exact") -> dict[str, Any]:
    gen = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 9, 8, generator=gen).unbind(0)
    return {"query": q, "key": k, "value": v, "method": method, "seed": 0}


#: what is wrong -> (the words of which the message has one, the arguments that replace valid ones)
INVALID: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], Changes]]] = {
    "batch of key": (("key",), lambda c: {"key": c["key"][:1].repeat(3, 1, 1, 1)}),
    "width of key": (("key",), lambda c: {"key": c["key"][..., :5]}),
    "length of value": (("value",), lambda c: {"value": c["value"][:, :, :4]}),
    "heads of key": (("key", "enable_gqa"), lambda c: {"key": c["key"][:, :3], "value": c["value"][:, :3]}),
    "heads that do not divide": (
        ("key",),
        lambda c: {"key": c["key"][:, :3], "value": c["value"][:, :3], "enable_gqa": True},
    ),
    "no width": (("key",), lambda c: {"key": c["key"][..., :0]}),
    "whole numbers": (("query",), lambda c: {"query": c["query"].long()}),
    "complex": (("key",), lambda c: {"key": c["key"].to(torch.complex64)}),
    "two types": (("key",), lambda c: {"key": c["key"].double()}),
    "float8": (
        ("query",),
        lambda c: {name: c[name].to(torch.float8_e4m3fn) for name in ("query", "key", "value")},
    ),
    "another device": (("key",), lambda c: {"key": c["key"].to("meta")}),
    "sparse": (("value",), lambda c: {"value": c["value"].to_sparse()}),
    "nested": (
        ("query",),
        lambda c: {"query": torch.nested.as_nested_tensor([torch.ones(3, 2), torch.ones(4, 2)], layout=torch.jagged)},
    ),
    "no tensor": (("value",), lambda c: {"value": [1.0]}),
    "no key": (("key",), lambda c: {"key": None}),
    "scale NaN": (("scale",), lambda c: {"scale": float("nan")}),
    "scale infinite": (("scale",), lambda c: {"scale": float("inf")}),
    "scale in words": (("scale",), lambda c: {"scale": "1"}),
    "scale of a flag": (("scale",), lambda c: {"scale": True}),
    "dropout above one": (("dropout_p",), lambda c: {"dropout_p": 1.1}),
    "dropout negative": (("dropout_p",), lambda c: {"dropout_p": -0.1}),
    "dropout NaN": (("dropout_p",), lambda c: {"dropout_p": float("nan")}),
    "is_causal of a number": (("is_causal",), lambda c: {"is_causal": 1}),
    "seed of a fraction": (("seed",), lambda c: {"seed": 1.5}),
    "impl unknown": (("impl",), lambda c: {"impl": "fastest"}),
    "streams too few": (("streams",), lambda c: {"streams": [0]}),
    "streams negative": (("streams",), lambda c: {"streams": [-1, 0, 1, 2]}),
    "mask of another shape": (("attn_mask",), lambda c: {"attn_mask": torch.ones(9, 7, dtype=torch.bool)}),
    "mask of whole numbers": (("attn_mask",), lambda c: {"attn_mask": torch.ones(9, 9, dtype=torch.long)}),
    "mask of five dimensions": (("attn_mask",), lambda c: {"attn_mask": torch.ones(1, 1, 1, 9, 9) > 0}),
    "mask that is no tensor": (("attn_mask",), lambda c: {"attn_mask": [[True]]}),
    "query_mask of another shape": (("query_mask",), lambda c: {"query_mask": torch.ones(2, 7) > 0}),
    "query_mask of numbers": (("query_mask",), lambda c: {"query_mask": torch.ones(2, 9)}),
    "method unknown": (("method",), lambda c: {"method": "nystroem"}),
    "method of a number": (("method",), lambda c: {"method": 3}),
    "method with an unknown field": (("landmark",), lambda c: {"method": "nystrom(landmark=3)"}),
    "budget of zero": (("landmarks",), lambda c: {"method": "nystrom(landmarks=0)"}),
    "budget of a fraction": (("landmarks",), lambda c: {"method": "nystrom(landmarks=1.5)"}),
    "features beyond memory": (("features",), lambda c: {"method": f"random_features(features={2**50})"}),
    "hashes beyond memory": (("hashes",), lambda c: {"method": f"yoso(hashes={2**50})"}),
    "spec that is no call": (("method", "spec"), lambda c: {"method": "nystrom(landmarks=__import__('os'))"}),
    "spec without an end": (("method", "spec"), lambda c: {"method": "nystrom(landmarks=3"}),
}

#: budgets that no integer of 64 bits holds: clamped to what there is, or refused by name
BUDGETS = ("nystrom(landmarks={})", "linformer(rank={})", "window(size={})", "key_clusters(keys={})", "top_keys(keys={})",
           "lsh(chunk={})", "lsh(rounds={})", "yoso(hashes={})", "random_features(features={})", "skyformer(landmarks={})",
           "sampled(samples={})", "value_aware(keys={})", "window(size=4, sinks={})", "key_clusters(window={})",
           "key_clusters(chunk={})", "key_clusters(steps=2, sinks={})", "window(size=4, global_tokens={})")  # fmt: skip

LABOURS = ("hashes", "rounds", "features", "samples", "rank")  #: budgets that take time, one by one


def draw(rng: random.Random) -> dict[str, Any]:
    """Draw a name of `INVALID`, or a method with a huge budget."""
    if rng.random() < 0.3:
        budget, least = rng.choice(BUDGETS), 2**31 - 1
        if any(name in budget for name in LABOURS):  # fewer would be computed, for hours
            least = 2**62
        huge = rng.choice([n for n in (2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64, 10**40) if n >= least])
        return {"invalid": "budget", "method": budget.format(huge), "causal": rng.random() < 0.3}
    if rng.random() < 0.2:
        able = [name for name, cls in sparing.list_methods().items() if cls.supports.attn_mask == "any"]
        return {"invalid": "NaN in attn_mask", "method": rng.choice(able), "impl": rng.choice(("auto", "reference"))}
    return {"invalid": rng.choice(list(INVALID))}


def check(case: dict[str, Any]) -> None:
    """The call is refused by name; a huge budget may also give a finite result."""
    if case["invalid"] == "budget":
        _check_budget(case)
        return
    if case["invalid"] == "NaN in attn_mask":
        _check_nan_mask(case)
        return
    words, change = INVALID[case["invalid"]]
    call = _call()
    try:
        sparing.attention(**{**call, **change(call)})
    except ERRORS as error:
        message = str(error)
        assert any(word in message for word in words), f"{case['invalid']}: the error names none of {words}: {message}"
        raise Refused(message) from None
    raise AssertionError(f"{case['invalid']}: was not refused")


def _check_nan_mask(case: dict[str, Any]) -> None:
    """A row of the mask that is NaN gives a row that is NaN, as in exact attention, or is refused by name."""
    call, mask = _call(case["method"]), torch.zeros(9, 9)
    mask[4] = torch.nan
    if sparing.method(case["method"]).supports.projection:
        weight = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
        call["value"] = sparing.Projection(torch.ones(2, 9, 6), weight)
    try:
        out = sparing.attention(**call, attn_mask=mask, impl=case["impl"])
    except ERRORS as error:
        message = str(error)
        assert "attn_mask" in message, f"NaN in attn_mask: {case['method']}: the error does not name it: {message}"
        raise Refused(message) from None
    wrong = out[:, :, 4].isfinite().any() or not out[:, :, :4].isfinite().all()
    assert not bool(wrong), f"NaN in attn_mask: {case['method']}: a result from it, or a NaN elsewhere"


def _check_budget(case: dict[str, Any]) -> None:
    field = case["method"].rsplit("=", 1)[0].split("(")[1].split(", ")[-1]
    try:
        out = sparing.attention(**{**_call(case["method"]), "is_causal": case["causal"]})
    except ERRORS as error:
        message = str(error)
        named = (field, "is_causal")
        assert any(word in message for word in named), f"a huge budget: the error names none of {named}: {message}"
        raise Refused(message) from None
    assert bool(out.isfinite().all()), "a huge budget: not finite"
