"""`sparing.attention` and `inspect` on any call, held to float64 and to what every method promises."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sparing import Unsupported
from tests.fuzz import door_draw, door_invalid
from tests.fuzz.cases import Refused
from tests.fuzz.door_accuracy import full, gradient, inspect, packed, truth
from tests.fuzz.door_inputs import Built, build
from tests.fuzz.door_invariance import again, future, mates, nan, padding, query_mask

NAME = "door"
CHECKS = {
    check.__name__: check
    for check in (truth, full, again, padding, future, mates, gradient, query_mask, nan, inspect, packed)
}  #: each raises AssertionError with what was observed and what is allowed

COSTS = {"truth": 3, "full": 2, "gradient": 3, "nan": 2, "inspect": 2}  #: library calls of a check; else 2


def draw(rng: random.Random) -> dict[str, Any]:
    """Draw a call, or one that must be refused."""
    return door_invalid.draw(rng) if rng.random() < 0.05 else door_draw.draw(rng)


def shrink(case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield simpler cases."""
    return iter(()) if "invalid" in case else door_draw.shrink(case)


def calls(case: dict[str, Any]) -> int:
    """Return how many calls of the library `check` makes, those to measure the noise of an input apart."""
    return 1 if "invalid" in case else sum(COSTS.get(name, 2) for name in case["checks"])


def check(case: dict[str, Any]) -> None:
    """Run the checks that the case names."""
    if "invalid" in case:
        door_invalid.check(case)
        return
    built = build(case)
    label = f"{built.method.name}: "
    reason, maybe = _refusal(built, case)
    try:
        out = built.run()
    except Unsupported as error:
        message = str(error)
        assert reason or maybe, f"{label}refused although it is supported: {message}"
        for word in (built.method.name, ";"):
            assert word in message, f"{label}the refusal lacks {word!r}: {message}"
        raise Refused(message) from None
    assert not reason, f"{label}{reason} is not supported, and was not refused"
    shape = (case["batch"], case["heads"], case["n_q"], case["e"])
    assert out.shape == shape, f"{label}shape {list(out.shape)} instead of {list(shape)}"
    assert out.dtype == built.x.q.dtype, f"{label}{out.dtype} for a call in {built.x.q.dtype}"
    if 0 in (*shape, case["n_k"]):
        assert bool((out == 0).all()), f"{label}a call without keys must give zeros"
        return
    empty = out.masked_select(~built.sees.unsqueeze(-1))
    assert bool((empty == 0).all()), f"{label}rows with nothing to see must be zeros"
    for name in case["checks"]:
        CHECKS[name](built, out, label, case)


def _refusal(built: Built, case: dict[str, Any]) -> tuple[str | None, bool]:
    """(what the method does not claim to support, whether the call may be refused for another reason)."""
    can, mask = built.method.supports, built.options["attn_mask"]
    padding, additive = _is_padding(mask), mask is not None and mask.dtype != torch.bool
    asked = {
        "is_causal": built.options["is_causal"] and not can.causal,
        "key padding": mask is not None and padding and not can.key_padding,
        "attn_mask": mask is not None
        and not padding
        and (not can.attn_mask or (additive and can.attn_mask == "boolean")),
        "n_q": case["n_q"] != case["n_k"] and not can.cross_attention,
        "enable_gqa": case["heads"] != case["kv_heads"] and not can.gqa,
    }
    kernel = getattr(built.method, "kind", "") == "gaussian" or built.method.name == "skyformer"
    maybe = (
        built.options["impl"] == "native"
        or (kernel and built.scale < 0)
        or (built.method.name == "monte_carlo" and mask is not None and not padding)
    )
    return next((name for name, refused in asked.items() if refused), None), maybe


def _is_padding(mask: Tensor | None) -> bool:
    """Whether a mask shows the same keys to all heads and queries, and holds no bias."""
    if mask is None or 0 in mask.shape:
        return True
    mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
    if mask.dtype != torch.bool:
        low = mask <= torch.finfo(mask.dtype).min
        if not bool(((mask == 0) | low).all()):
            return False
        mask = ~low
    return torch.equal(mask, mask[:, :1, :1].expand_as(mask))
