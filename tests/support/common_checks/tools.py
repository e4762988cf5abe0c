"""What the common checks are made of: the registry, comparisons that name the method, gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparing import Shape
from tests.support.inputs import Inputs
from tests.support.method_table import Row

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
#: Which implementations of a row a check runs on.
IMPLEMENTATIONS: dict[str, Callable[[Row], tuple[str, ...]]] = {
    "all": lambda row: row.impls,
    "default": lambda row: ("auto",),  # what it asserts is a property of the method, whatever computes it
    "reference": lambda row: row.impls[:1],  # "fast equals reference" asserts the same of the others
    "fast": lambda row: row.impls[1:],
}


@dataclass(frozen=True)
class Check:
    """A function of (row, impl) that raises AssertionError, and the rows and implementations that it is for."""

    run: Callable[[Row, str], None]
    applies: Callable[[Row], bool]
    on: str

    def __call__(self, row: Row, impl: str) -> None:
        self.run(row, impl)

    def implementations(self, row: Row) -> tuple[str, ...]:
        """Return the implementations of a row to run the check on; none where it does not apply."""
        return IMPLEMENTATIONS[self.on](row) if self.applies(row) else ()


CHECKS: dict[str, Check] = {}


def check(name: str, applies: Callable[[Row], bool] = lambda row: True, on: str = "all") -> Callable[..., Check]:
    """Register a check by its name."""

    def add(run: Callable[[Row, str], None]) -> Check:
        CHECKS[name] = Check(run, applies, on)
        return CHECKS[name]

    return add


def close(row: Row, what: str, found: Tensor, wanted: Tensor, tolerance: float) -> None:
    found, wanted = found.detach(), wanted.detach()
    assert found.shape == wanted.shape, f"{row.spec}: {what}: shape {list(found.shape)} != {list(wanted.shape)}"
    scale = max(1.0, float(wanted.double().abs().max()) if wanted.numel() else 1.0)
    error = float((found.double() - wanted.double()).abs().max()) if wanted.numel() else 0.0
    assert error <= tolerance * scale, f"{row.spec}: {what}: error {error:.3g} > {tolerance:g} x {scale:.3g}"


def same(row: Row, what: str, found: Tensor, wanted: Tensor) -> None:
    found, wanted = found.detach(), wanted.detach()
    equal = torch.equal(found.nan_to_num(nan=7e9), wanted.nan_to_num(nan=7e9))
    worst = float((found.double() - wanted.double()).abs().max()) if found.shape == wanted.shape else float("nan")
    assert equal, f"{row.spec}: {what}: not bit-equal, largest difference {worst:.3g}"


def gradients(x: Inputs, out: Tensor, weight: Tensor) -> list[Tensor]:
    found = torch.autograd.grad((out * weight).sum(), x.leaves(), allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(x.leaves(), found, strict=True)]


def tracked(x: Inputs) -> Inputs:
    """Copies of the inputs that require a gradient."""
    q, k, payload = (t.detach().clone().requires_grad_() for t in x.leaves())
    return replace(x, q=q, k=k).with_payload(payload)


def has_full_budget(row: Row) -> bool:
    """Whether some setting of the method computes its target."""
    return row.method.full_budget(Shape(queries=9, keys=9, head_dim=8, value_dim=6, in_features=12)) is not None


def differentiable(row: Row) -> bool:
    return row.supports.gradient == "full"
