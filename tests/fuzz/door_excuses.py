"""Where rounding decides, so that a result may differ from the specification in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.fuzz import door_truth
from tests.fuzz.door_inputs import Built
from tests.fuzz.door_rule import largest_logit

#: Methods that choose keys or count samples by comparing numbers: near ties may fall to either side in float32.
CHOOSING = ("key_clusters", "multipole", "skip", "top_keys", "value_aware", "sampled", "monte_carlo")
ALIKE = ("constant", "duplicates", "zeros", "one_hot", "integers")  #: contents on which such numbers are equal


def unclear(built: Built, case: dict[str, Any]) -> bool:
    """Whether the numbers that a method compares are equal, or lost in those of the others.

    For any method, rounding decides where one rounding of a logit counts, and between keys that are alike sooner.
    """
    alike, largest = [name for name in "qkv" if case[name][0] in ALIKE], largest_logit(built)
    x, by_row = built.wide(), getattr(built.method, "normalize", "") == "row"
    gaussian = getattr(built.method, "kind", "") == "gaussian" and not by_row
    if x.q.numel() and (gaussian or built.method.name == "skyformer"):
        longest = max(float(x.q.square().sum(-1).amax()), float(x.k.square().sum(-1).amax()))
        if torch.finfo(torch.float64).eps * abs(built.scale) * longest > 1e-6:
            return True  # |q|^2 and |k|^2 do not cancel, and products round away what is left of a distance
    if built.method.name not in CHOOSING:
        eps = torch.finfo(door_truth.compute_type(built.x.q.dtype)).eps
        return eps * largest > (1e-2 if "k" in alike else 1.0)
    if case["dtype"] in ("float16", "bfloat16"):  # few digits: many logits are equal
        return True
    if case["layout"] == "expanded" or alike:
        return True
    return not 1e-4 < largest < 1e4 or any(not 1e-6 < case[name][1] < 1e6 for name in "qkv")


def hashed_otherwise(found: Tensor, rough: Tensor, wanted: Tensor) -> Tensor:
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


def cancels(built: Built) -> Tensor:
    """(B, H, n_q, 1): rows of yoso whose sum is zero but for rounding; it is divided by its length, so rounding decides."""
    if built.method.name != "yoso" or built.method.normalize != "l2":
        return torch.zeros((), dtype=torch.bool)
    plain, x = replace(built.method, normalize="none"), built.wide()
    sums, sizes = (built.run(y, method=plain, impl="reference") for y in (x, x.with_payload(x.payload.abs())))
    return sums.norm(dim=-1, keepdim=True) <= 1e-6 * sizes.norm(dim=-1, keepdim=True)


def vanishes(built: Built) -> bool:
    """Whether the total of some row is too small for the type of the call, so that the row is zeros, as specified."""
    if built.x.q.dtype == torch.float64:
        return False
    low, high = (built.run(x, impl="reference").detach() for x in (built.x, built.wide()))
    return bool(((low == 0).all(-1) & (high != 0).any(-1)).any())


def slope_of_angles(built: Built) -> float:
    """Return 1 / sin of the smallest angle between a query and a key or its opposite; 40 for parallel ones.

    An angle errs by the rounding of its cosine times this slope; 40 roundings of float32 are 4e-4 of a quarter turn.
    """
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (built.wide().q, built.wide().k))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    cosine = float((q @ k.mT).abs().amax().clamp_max(1.0))
    return float(min(max(1 - cosine * cosine, 1e-12) ** -0.5, 40.0))
