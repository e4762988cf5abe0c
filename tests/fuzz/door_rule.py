"""How far a result may be from the specification in float64, on inputs of any size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.fuzz import door_truth
from tests.fuzz.door_inputs import Built
from tests.support.inputs import Inputs

FLOOR = {torch.float32: 2e-6, torch.float64: 1e-9}  #: docs/kernels.md; the tolerance of "fast equals reference"


def hold(
    what: str, found: Tensor, wanted: Tensor, size: Tensor, rough: Tensor | None, noise: Callable[[], Tensor], n: int,
    times: float = 2.0,
) -> None:  # fmt: skip
    """The rule of docs/kernels.md, on inputs of any size.

    The error against the specification in float64 is at most `times` that of the specification in the type of the call
    (rough), plus 16 roundings of the size of the result. Where `rough` is off by more than 0.002 of that size, it counts only
    as far as the input explains it, by 64 times the change that one rounding of the inputs makes (noise): it may be
    wrong in the same way. 16 times the noise is always allowed.
    """
    kind = door_truth.compute_type(found.dtype)
    fits = wanted.abs() < 0.9 * torch.finfo(found.dtype).max
    if rough is not None:  # rows whose total vanishes in this type are zeros, as the specification says
        fits = fits & ~((found == 0).all(-1, keepdim=True) & (rough == 0).all(-1, keepdim=True))
    error = (found.double() - wanted).abs()[fits]
    assert bool(error.isfinite().all()), f"{what}: not finite, where float64 is"
    floor = FLOOR[kind] * size + torch.finfo(kind).tiny
    allowed = (floor + door_truth.rounding(found.dtype, wanted.abs()))[fits]
    if bool((error <= allowed).all()):
        return
    moved = noise()
    explained = 16 * moved + floor * (n / 1024 if rough is None else 0)
    if rough is not None:
        error_of_rough = (rough.double() - wanted).abs()[fits].nan_to_num(0.0).amax()
        explained = torch.maximum(explained, torch.minimum(times * error_of_rough, 64 * moved + 0.002 * size))
    allowed = allowed + explained
    worst = int((error / allowed).argmax())
    assert bool((error <= allowed).all()), f"{what}: error {error[worst]:.3g} > {allowed[worst]:.3g}"


def noise_of(built: Built, wanted: Tensor, compute: Callable[[Inputs], Tensor]) -> Tensor:
    """The largest change of `wanted` when every entry of the inputs moves by one rounding: of four trials."""
    gen = torch.Generator().manual_seed(1)
    eps = torch.finfo(door_truth.compute_type(built.x.q.dtype)).eps
    found = torch.zeros((), dtype=torch.float64)
    for _ in range(4):
        moved = built.wide().map(lambda t: t * (1 + eps * torch.randint(-1, 2, t.shape, generator=gen).double()))
        found = torch.maximum(found, (compute(moved) - wanted).abs().nan_to_num(0.0).amax())
    return found


def size_of(built: Built, wanted: Tensor) -> Tensor:
    """The size of the result that roundings are counted by; a quarter of one more for each unit of a logit."""
    size = torch.maximum(wanted.abs().amax(), built.values(built.wide()).abs().amax())
    return size * (1 + min(largest_logit(built), 1e5) / 64)


def largest_logit(built: Built) -> float:
    """Return a bound on the size of |scale q.k|."""
    x = built.wide()
    return float((x.q.norm(dim=-1).amax() * x.k.norm(dim=-1).amax()) * abs(built.scale)) if x.q.numel() else 0.0
