"""Compare the fast path of a method with its reference, before any speed-up is stated."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sparing.call import Impl
from sparing.contract import Method
from sparing.workbench.benchmark.workload import AttentionInputs, learned_state, method_work

_OUTPUT, _GRADIENT, _FLOOR = 2.0, 3.0, 1e-5


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The result of comparing a method's fast path with its reference."""

    method: str
    passed: bool
    length: int
    excess: (
        float | None
    )  #: largest error / error allowed: at most 1 where it passed; None if it raised or is not finite
    detail: str  #: where that was, or what went wrong


def check(method: Method, inputs: AttentionInputs, *, backward: bool) -> Gate:
    """Compare `impl="auto"` with `impl="reference"`, from the same samples.

    The error of the fast path in float32, against the reference in float64, may be twice that of the reference in
    float32 (three times for gradients), plus 1e-5 of the largest entry.
    """
    gradients = backward and method.supports.gradient == "full"
    worst, detail = 0.0, ""
    try:
        exact = _results(method, inputs, "reference", torch.float64, gradients)
        plain = _results(method, inputs, "reference", torch.float32, gradients)
        fast = _results(method, inputs, "auto", torch.float32, gradients)
        for name, wanted in exact.items():
            times = _OUTPUT if name == "output" else _GRADIENT
            excess = excess_error(fast[name], plain[name], wanted, times=times)
            if excess > worst:
                worst, detail = excess, f"the error of the {name} is {excess:.2g} times what is allowed"
    except Exception as error:  # whatever it is, no speed-up may be stated
        text = (str(error) or type(error).__name__).splitlines()[0]
        return Gate(method=str(method), passed=False, length=inputs.q.shape[-2], excess=None, detail=f"raised: {text}")
    share = worst if math.isfinite(worst) else None
    return Gate(method=str(method), passed=worst <= 1, length=inputs.q.shape[-2], excess=share, detail=detail)


def _results(
    method: Method, inputs: AttentionInputs, impl: Impl, dtype: torch.dtype, gradients: bool
) -> dict[str, Tensor]:  # fmt: skip
    """Return the output and, where asked, the gradient of every input and learned weight."""
    work = method_work(method, inputs, state=learned_state(method, inputs), impl=impl, dtype=dtype)
    if not gradients:
        with torch.no_grad():
            return {"output": work.compute(*work.leaves)}
    leaves = [x.detach().requires_grad_() for x in work.leaves]
    out = work.compute(*leaves)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = torch.autograd.grad(out, [*leaves, *work.parameters], weights.to(out.dtype))
    return {"output": out.detach(), **{f"gradient {i}": grad for i, grad in enumerate(found)}}


def excess_error(found: Tensor, rough: Tensor, wanted: Tensor, *, times: float = _OUTPUT) -> float:
    """Return the error of a fast path / that allowed.

    Allowed are `times` the error of the reference in float32, plus 1e-5 of the largest entry.
    """
    allowed = times * _distance(rough, wanted) + _FLOOR * max(1.0, float(wanted.abs().max()))
    excess = _distance(found, wanted) / allowed
    return math.inf if math.isnan(excess) else excess  # every comparison with NaN is false


def _distance(found: Tensor, wanted: Tensor) -> float:
    if found.shape != wanted.shape:
        raise ValueError(f"shape {list(found.shape)} instead of {list(wanted.shape)}")
    return float((found.double() - wanted).abs().max())
