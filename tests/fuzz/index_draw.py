"""Cases of the index: a method, sizes, and what happens to a sequence and its copies, step by step."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

MODES = ("plain", "no_grad", "inference")
LAYOUTS = ("plain", "room", "heads_last", "every_second", "shared")
CONTENTS = ("topics", "topics", "topics", "steep", "normal")
ALIKE = ("equal", "integers", "zeros")  #: many logits are equal, and rounding says which of them are the largest
HIDDEN = ("left", "right", "holes", "all")
ODD = ("nan", "inf", "-inf", "1e20", "-1e200", "1e-30", "3e12")
WRONG = (
    "another batch", "another type", "no queries", "a gap", "shrank", "another mask", "wide mask", "gradient",
    "crop beyond", "crop by a float", "items beyond", "no items", "items of floats", "more heads",
)  # fmt: skip

Step = dict[str, Any]


def spec(rng: random.Random) -> str:
    """Draw a method that decodes."""
    kind = rng.random()
    if kind < 0.15:
        return f"top_keys(keys={rng.choice((1, 3, 8, 30, 400))})"
    if kind < 0.35:
        size, sinks, tokens = rng.choice((0, 2, 8, 32, 400)), rng.choice((0, 1, 3, 40)), rng.choice((0, 0, 2, 40))
        return f"window(size={size}, sinks={sinks}, global_tokens={tokens})"
    # Not a share 1 / n, which keys of equal weight have: rounding would say whether they are read.
    tolerance, sinks = rng.choice((0.0, 0.0041, 0.0497, 0.0497, 0.3, 1.0)), rng.choice((0, 1, 2, 4, 20))
    return f"multipole(tolerance={tolerance}, sinks={sinks}, block={rng.choice((16, 16, 32, 48, 128))})"


def draw(rng: random.Random) -> dict[str, Any]:
    """Draw a case; its steps name everything by seeds and shares, so that any part of them is a case, too."""
    kv_heads = rng.choice((1, 1, 2))
    odd, padded, crops = rng.random() < 0.3, rng.random() < 0.4, rng.random() < 0.5
    mode = rng.choice((*MODES, None))  # None: each step in its own
    method = spec(rng)
    case: dict[str, Any] = {
        "spec": method,
        "seed": rng.choice((0, 3, -7, 2**63 + 5)),
        "scale": rng.choice((None, None, None, None, 0.3, 1.5, 1e-3, 0.0, -0.5)),
        "streams": None if rng.random() < 0.8 else [rng.randrange(9) for _ in range(kv_heads)],
        "dtype": rng.choice(("float64", "float64", "float32", "float32", "bfloat16", "float16")),
        "batch": rng.choice((1, 1, 2, 3)),
        "heads": kv_heads * rng.choice((1, 1, 2, 3)),
        "kv_heads": kv_heads,
        "d": rng.choice((1, 2, 4, 8, 8, 16, 20)),
        "e": rng.choice((1, 3, 6, 8, 16)),
        "content": rng.choice(CONTENTS if method.startswith("top_keys") else CONTENTS + ALIKE),
        "data": rng.randrange(2**31),
        "kernels": rng.random() < 0.85,
        "steps": [],
    }

    def step(do: str, **what: Any) -> None:
        case["steps"].append({"do": do, "mode": mode or rng.choice(MODES), **what})

    def tokens(do: str, count: int) -> None:
        hide = rng.choice(HIDDEN) if padded and rng.random() < 0.4 else None
        strange = [rng.choice("qkv") + ":" + rng.choice(ODD) for _ in range(rng.choice((1, 1, 2)))]
        step(
            do, count=count, data=rng.randrange(2**31), hide=hide, odd=strange if odd and rng.random() < 0.3 else [],
            layout=rng.choice(LAYOUTS), mask=rng.choice(("none", "two", "four")),
        )  # fmt: skip

    tokens(rng.choice(("attention", "attention", "append")), rng.choice((1, 2, 3, 7, 16, 33, 60)))
    for _ in range(rng.randrange(3, 16)):
        chance = rng.random()
        if chance < 0.66:
            tokens("attention" if rng.random() < 0.85 else "append", rng.choice((1, 1, 1, 1, 2, 4, 5, 9, 17, 40)))
        elif chance < 0.76 and crops:
            step("crop", by=rng.choice((0, 1, 1, 2, 3, 5, 9, 20, 1000)))
        elif chance < 0.83:
            step("select", data=rng.randrange(2**31), count=rng.choice((1, 2, 2, 3)))
        elif chance < 0.90:
            step("copy", how=rng.choice(("deepcopy", "pickle")))
        elif chance < 0.93:
            step("back")
        elif chance < 0.95:
            step("reset")
        else:
            step("wrong", what=rng.choice(WRONG))
    return case


def shrink(case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield simpler cases: without some steps, with fewer tokens, in smaller sizes, with plainer settings."""

    def changed(**changes: Any) -> dict[str, Any]:
        return {**copy.deepcopy(case), **changes}

    steps: list[Step] = case["steps"]
    size = len(steps) // 2
    while size:
        for i in range(0, len(steps) - size + 1, size):
            yield changed(steps=steps[:i] + steps[i + size :])
        size //= 2
    plain = {"hide": None, "odd": [], "layout": "plain", "mask": "none", "mode": "plain"}
    for name, value in plain.items():
        if any(name in step and step[name] != value for step in steps):
            yield changed(steps=[{**step, name: value} if name in step else step for step in steps])
    for i, step in enumerate(steps):
        smaller: list[Step] = [{**step, name: x} for name, x in plain.items() if name in step and step[name] != x]
        smaller += [{**step, "count": n} for n in (1, step.get("count", 0) // 2, step.get("count", 0) - 1) if n > 0]
        smaller += [{**step, "by": n} for n in (1, step.get("by", 0) - 1) if n > 0]
        for other in smaller:
            size_of = [step.get(name, 0) for name in ("count", "by")]
            if other != step and all(other.get(name, 0) <= n for name, n in zip(("count", "by"), size_of, strict=True)):
                yield changed(steps=[*steps[:i], other, *steps[i + 1 :]])
    for name, value in (("batch", 1), ("d", 1), ("d", 4), ("e", 1), ("scale", None), ("streams", None), ("seed", 0),
                        ("dtype", "float64"), ("content", "topics")):  # fmt: skip
        if case[name] != value and not (name == "d" and case["d"] < value):
            yield changed(**{name: value})
    if case["heads"] > case["kv_heads"]:
        yield changed(heads=case["kv_heads"])
    elif case["kv_heads"] > 1:
        yield changed(heads=1, kv_heads=1, streams=case["streams"] and case["streams"][:1])
