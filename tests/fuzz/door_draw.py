"""Cases of the door: methods with settings, shapes, contents, sizes, scales and masks."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from typing import Any

import sparing
from tests.fuzz.door_inputs import CONTENTS, LAYOUTS, MASKS

LENGTHS = (0, 1, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 33, 48, 64, 65, 100, 127, 130, 200, 257)
WIDTHS = (0, 1, 2, 3, 5, 8, 8, 16, 17, 20, 32, 64, 80, 128)
NUMBERS = (0, 1, 2, 3, 4, 5, 7, 8, 12, 16, 33, 64, 200)
REALS = (0.0, 0.05, 0.25, 0.5, 1.0, 2.0, 8.0)
SLOW = ("value_aware", "sampled")  #: oracles, which search among all keys
CLUSTERING = ("key_clusters", "lsh", "yoso", "monte_carlo")  #: whose specification takes many passes over all pairs
REPEATED = ("iterations", "rounds", "steps", "degree")  #: settings that a call takes time for, one by one
CHECKS = ("truth", "full", "again", "padding", "future", "mates", "gradient", "query_mask", "nan", "inspect",
          "packed")  # fmt: skip


def settings(rng: random.Random, cls: type[sparing.Method]) -> sparing.Method:
    """Draw a setting of a method from the ranges of its fields."""
    for _ in range(50):
        chosen: dict[str, Any] = {}
        for f in fields(cls):
            limits = f.metadata
            if rng.random() < 0.4 or f.name == "convolution":  # which needs a module's learned state
                continue
            kinds = limits.get("kinds") or (limits.get("kind") or type(f.default),)
            kind = rng.choice(kinds)
            if "choices" in limits:
                chosen[f.name] = rng.choice(limits["choices"])
            elif kind is bool:
                chosen[f.name] = rng.random() < 0.5
            elif kind in (int, float):
                most = 16 if f.name in REPEATED else math.inf
                fits = [n for n in (NUMBERS if kind is int else REALS) if n <= most and _within(n, limits)]
                chosen[f.name] = rng.choice(fits)
        try:
            return cls(**chosen)
        except (ValueError, TypeError):  # settings that do not go together
            continue
    return cls()


def _within(number: float, limits: Any) -> bool:
    low = limits.get("minimum", -math.inf) <= number
    return bool(low and limits.get("above", -math.inf) < number <= limits.get("maximum", math.inf))


def _size(rng: random.Random) -> float:
    """The size of the entries of a tensor: mostly 1, sometimes anything."""
    return rng.choice([1.0] * 6 + [10.0 ** rng.uniform(-3, 3), 10.0 ** rng.uniform(-30, 30)])


def draw(rng: random.Random) -> dict[str, Any]:
    """Draw a case: mostly one that the method supports, sometimes one that it must refuse."""
    method = settings(rng, rng.choice(list(sparing.list_methods().values())))
    can, odd = method.supports, rng.random() < 0.05
    kv_heads = rng.choice((1, 1, 2, 3))
    groups = rng.choice((1, 1, 2, 3)) if can.gqa or odd else 1
    n_q = rng.choice(LENGTHS)
    n_k = rng.choice(LENGTHS) if (can.cross_attention and rng.random() < 0.4) or odd else n_q
    case: dict[str, Any] = {
        "method": str(method), "impl": rng.choice(("auto", "auto", "auto", "native", "reference")),
        "dtype": rng.choice(("float32", "float32", "float32", "float64", "bfloat16", "float16")),
        "batch": rng.choice((0, 1, 1, 1, 2, 2, 3)) if rng.random() < 0.3 else 2, "heads": groups * kv_heads,
        "kv_heads": kv_heads, "n_q": n_q, "n_k": n_k, "d": rng.choice(WIDTHS), "e": rng.choice((*WIDTHS[:11], 33)),
        "causal": (can.causal or odd) and rng.random() < 0.4, "mask": None,
        "layout": rng.choice(("plain",) * 5 + LAYOUTS), "data": rng.randrange(2**31), "seed": rng.randrange(2**63),
    }  # fmt: skip
    if rng.random() < 0.5:
        fits = [name for name in MASKS if odd or _supported(can, name)]
        case["mask"] = rng.choice(fits or [None])
    if rng.random() < 0.5:  # the widths for which torch has a fused kernel
        case["e"] = case["d"]
    for name in "qkv":
        kind = "normal" if rng.random() < 0.6 else rng.choice(CONTENTS)
        case[name] = [kind, _size(rng)]
    case["scale"] = _scale(rng, case)
    if "sampling='all'" in str(method):  # whose cost is the cube of the length
        case.update(n_q=min(n_q, 48), n_k=min(n_k, 48))
    if method.name in SLOW:
        case.update(heads=groups, kv_heads=1, n_q=min(n_q, 33), n_k=min(n_k, 33), e=min(case["e"], 8))
    long = rng.random() < 0.02 and "sampling='all'" not in str(method)
    if long:
        _lengthen(rng, case, method)
    if case["dtype"] == "float16":  # what it can hold
        for name in "qkv":
            case[name][1] = min(max(case[name][1], 1e-3), 10.0)
    others = ("again", "padding", "future") if long else CHECKS[1:]
    case["checks"] = ["truth", *(name for name in others if rng.random() < 0.25 and _applies(name, case, can))]
    return case


def _supported(can: sparing.Supports, mask: str) -> bool:
    if mask.startswith("padding"):
        return can.key_padding
    return can.attn_mask == "any" if mask.startswith("bias") else bool(can.attn_mask)


def _scale(rng: random.Random, case: dict[str, Any]) -> float | None:
    """None, a usual or an extreme one; often one that makes up for the sizes of queries and keys."""
    if rng.random() < 0.2:  # the sizes cancel
        size = 10.0 ** rng.uniform(-30, 30)
        if rng.random() < 0.5:
            case["q"][1], case["k"][1] = size, 1 / size
            return None
        case["q"][1], case["k"][1] = size, 10.0 ** rng.uniform(-15, 15)
        wanted = rng.choice((1, 1, 1, -1)) / (case["q"][1] * case["k"][1])
        return math.copysign(min(max(abs(wanted), 1e-30), 1e30), wanted)
    extreme = rng.choice((1, 1, -1)) * 10.0 ** rng.choice((rng.uniform(-30, 30), rng.uniform(-320, -30)))
    return rng.choice([None] * 6 + [0.0, -0.0, 1.0, -0.5, 0.2, rng.uniform(0, 3), rng.uniform(-1, 0), extreme])


def _lengthen(rng: random.Random, case: dict[str, Any], method: sparing.Method) -> None:
    """Few heads, and so many keys that sums over all of them lose digits; often keys that are all alike."""
    few = method.supports.cross_attention and not case["causal"]
    case.update(batch=1, heads=1, kv_heads=1, d=rng.choice((3, 16, 64)), e=rng.choice((1, 16, 64)))
    # Specifications hold all pairs at once.
    case["n_k"] = rng.choice((4096, 8192, 10007) if few else (2000, 2000, 4096))
    case["n_q"] = rng.choice((1, 5, 33)) if few else case["n_k"]
    if method.name in SLOW:
        case["n_k"] = 2000
    if method.name in CLUSTERING:
        case["n_k"] = min(case["n_k"], 4096)
    if not few and method.name in CLUSTERING:
        case["n_q"] = case["n_k"] = 1500
    if rng.random() < 0.6:
        for name in "kv":
            case[name] = ["constant", 1.0]
        case["q"] = [rng.choice(("constant", "normal")), 1.0]


def _applies(name: str, case: dict[str, Any], can: sparing.Supports) -> bool:
    if name == "packed":
        padded = case["mask"] is not None and case["mask"].startswith("padding")
        return padded and not can.position_based and (case["n_q"] == case["n_k"] or not case["causal"])
    if name == "padding":
        return case["mask"] is not None and case["mask"].startswith("padding")
    if name == "future":
        return case["causal"] and case["n_q"] > 1
    if name == "mates":
        return case["batch"] > 1 and case["layout"] != "expanded"
    if name == "gradient":
        return can.gradient == "full" and case["dtype"] in ("float32", "float64") and case["d"] > 0
    if name == "nan":
        return bool(case["d"])
    return True


def shrink(case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the case with one thing simpler."""

    def but(**changes: Any) -> dict[str, Any]:
        return {**case, **changes}

    for name in case["checks"]:
        if len(case["checks"]) > 1:
            yield but(checks=[name])
    yield but(batch=1)
    yield but(heads=1, kv_heads=1)
    if "packed" not in case["checks"]:
        yield but(mask=None)
    if "future" not in case["checks"]:  # a check of causal calls
        yield but(causal=False)
    yield but(layout="plain")
    yield but(impl="auto")
    yield but(dtype="float32")
    yield but(scale=None)
    same = case["n_q"] == case["n_k"]
    for small in (1, 2, 3, 5, 8, 16, 33, 64):
        if small < case["n_q"] and same:
            yield but(n_q=small, n_k=small)
        if small < case["n_q"] and not same:
            yield but(n_q=small)
        if small < case["n_k"] and not same:
            yield but(n_k=small)
        if small < case["d"]:
            yield but(d=small)
        if small < case["e"]:
            yield but(e=small)
    for name in "qkv":
        kind, size = case[name]
        if size != 1.0:
            yield but(**{name: [kind, 1.0]})
            rounded = 10.0 ** round(math.log10(size))
            if rounded != size:
                yield but(**{name: [kind, rounded]})
        if kind not in ("normal", "constant"):
            yield but(**{name: ["normal", size]})
    if case["scale"] not in (None, 1.0, 0.0) and math.log10(abs(case["scale"])) % 1:
        yield but(scale=math.copysign(10.0 ** round(math.log10(abs(case["scale"]))), case["scale"]))
    for number in (0, 1):
        if case["data"] > number:
            yield but(data=number)
        if case["seed"] > number:
            yield but(seed=number)
    method = sparing.method(case["method"])
    for f in fields(method):
        if getattr(method, f.name) != f.default and f.name != method.budget:
            others = {g.name: getattr(method, g.name) for g in fields(method) if g.name != f.name}
            with suppress(ValueError, TypeError):  # settings that do not go together
                yield but(method=str(type(method)(**others)))
