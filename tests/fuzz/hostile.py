"""Hostile values and texts, and small damage to good ones: what the parsers' fuzzer draws from."""

import copy
import json
import random

DEEP = (10, 60, 70, 900, 20_000)  #: levels of nesting, on both sides of the limits of ours and of Python

TEXTS = (
    "", " ", "x", "*", "encoder.layer.*", "exact", "window(size=8)", "always", "decode", "safe and faster", "refused", "oracle",
    "\x00", "\x1b[31m", "\x9b2J", "\r", "\u202e", "\u2028", "\ud800", "\udfff\ud800", "[red]x[/red]", "[/]", "[link=x]y",
    "</script><img src=x>", "{{7*7}}", "%s%n", "../../x", "/etc/passwd", "x.json", "a" * 3000, "é\u0301\u200d", "NaN", "1e999",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 7, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 10**400, 0.0, -0.0, 0.5, 1e-300, 1e30, 1e308, -1e308,
    float("nan"), float("inf"), -float("inf"),
)  # fmt: skip


def value(rng: random.Random, depth: int = 0):
    """Draw any JSON value."""
    kind = rng.randrange(8 if depth < 3 else 6)
    if kind == 0:
        return rng.choice((None, True, False))
    if kind in (1, 2):
        return rng.choice(NUMBERS)
    if kind in (3, 4):
        return rng.choice(TEXTS)
    if kind == 5:
        return rng.choice(([], {}, [[]], {"": {}}))
    if kind == 6:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(TEXTS): value(rng, depth + 1) for _ in range(rng.randrange(4))}


def damaged_json(rng: random.Random, good, times: int):
    """Return a copy of a JSON value in which some parts are replaced, removed, doubled or renamed."""
    held = copy.deepcopy(good)
    for _ in range(times):
        places = list(_places(held))
        if not places:
            return value(rng)
        inside, key = rng.choice(places)
        act = rng.randrange(6)
        if act == 0:
            del inside[key]
        elif act == 1 and isinstance(inside, list):
            inside.insert(key, copy.deepcopy(inside[key]))
        elif act == 2 and isinstance(inside, dict):
            inside[rng.choice(TEXTS)] = inside.pop(key)
        elif act == 3:
            other, name = rng.choice(places)
            inside[key] = copy.deepcopy(other[name])
        else:
            inside[key] = value(rng)
    return held


def _places(held):
    if isinstance(held, dict | list):
        for key in list(held) if isinstance(held, dict) else range(len(held)):
            yield held, key
            yield from _places(held[key])


def damaged_text(rng: random.Random, text: str, times: int) -> str:
    """Return a text with some characters removed, doubled, changed or put in."""
    for _ in range(times):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.choice((0, 1, 1, 2, 5, 40)))
        put = rng.choice((
            "", text[start:end] * 2, chr(rng.randrange(256)), chr(rng.randrange(0x110000)), rng.choice(TEXTS),
            rng.choice("[]{}()\",:=-'\\\n\t0"), str(rng.choice(NUMBERS)), "9" * rng.choice((20, 400, 5000)),
            rng.choice("[({-~") * rng.choice(DEEP),
        ))  # fmt: skip
        text = text[:start] + put + text[end:]
    return text


def json_text(rng: random.Random, good) -> str:
    """Draw JSON that is like a good one, or was: damaged as a value, as a text, or both."""
    held = damaged_json(rng, good, rng.choice((0, 1, 1, 1, 2, 5)))
    if rng.random() < 0.05:
        depth = rng.choice(DEEP)
        opened, closed = rng.choice((("[", "]"), ('{"a":', "}")))
        nested = opened * depth + "0" + closed * depth
        text = json.dumps(damaged_json(rng, held, 1) if isinstance(held, dict | list) else held)
        return text.replace("null", nested, 1) if "null" in text else nested
    text = json.dumps(held, ensure_ascii=rng.random() < 0.5)
    return damaged_text(rng, text, rng.choice((0, 0, 0, 1, 3)))
