"""How kernels are held to their specification."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from sparing import native

needs_kernels = pytest.mark.skipif(not native.info().loaded, reason="no kernels were built on this machine")
every_instruction_set = pytest.mark.parametrize("isa", native.info().available)

Compute = Callable[..., "Tensor | tuple[Tensor, ...]"]


class Yardstick:
    """What the specification gives in float64, and how far plain PyTorch in float32 is from that.

    plain: what PyTorch computes in float32; the specification itself unless given. lean: what the weights of the
    outputs in the loss are on average; far from zero, gradients grow with the number of outputs.
    """

    def __init__(
        self,
        specification: Compute,
        inputs: Sequence[Tensor],
        *,
        plain: Compute | None = None,
        gradients: bool = True,
        lean: float = 0.0,
    ) -> None:
        self.inputs, self.gradients, self.lean = inputs, gradients, lean
        self.weights: list[Tensor] = []
        self.exact = list(self._results(specification, torch.float64))
        self.rounded = list(self._results(plain or specification, torch.float32))

    def _results(self, compute: Compute, dtype: torch.dtype) -> Iterator[tuple[str, float, Tensor]]:
        leaves = [x.detach().to(dtype).requires_grad_(self.gradients and x.is_floating_point()) for x in self.inputs]
        outs = compute(*leaves)
        outs = (outs,) if isinstance(outs, Tensor) else outs
        yield from ((f"output {i}", 2.0, out.detach()) for i, out in enumerate(outs))
        if self.gradients:
            for out in outs[len(self.weights) :]:
                drawn = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
                self.weights.append(drawn + self.lean)
            # A row that sees nothing has a log-sum-exp of -inf: a constant, which no gradient reaches.
            pairs = zip(outs, self.weights)
            total = sum((out * w.to(out)).masked_fill(out == -torch.inf, 0.0).sum() for out, w in pairs)
            found = torch.autograd.grad(total, [x for x in leaves if x.requires_grad])
            yield from ((f"gradient {i}", 3.0, g) for i, g in enumerate(found))

    def hold(self, kernel: Compute, what: str = "") -> None:
        """Assert that the error of the kernel in float32 is at most twice that of plain PyTorch, three times for gradients.

        2e-6 of the largest entry (16 roundings) is always allowed.
        """
        fast = list(self._results(kernel, torch.float32))
        for (name, times, wanted), (_, _, rough), (_, _, found) in zip(self.exact, self.rounded, fast):
            assert found.shape == wanted.shape, f"{what}: {name}"
            assert torch.equal(found == -torch.inf, wanted == -torch.inf), f"{what}: {name}: other rows see nothing"
            wanted, rough, found = (x.double().masked_fill(wanted == -torch.inf, 0.0) for x in (wanted, rough, found))
            assert found.isfinite().all(), f"{what}: {name} is not finite"
            if not wanted.numel():
                continue
            error, allowed = (found - wanted).abs().max(), times * (rough - wanted).abs().max()
            allowed += 2e-6 * wanted.abs().max().clamp_min(1.0)
            assert error <= allowed, f"{what}: {name}: error {error:.3g} > {allowed:.3g}"


def no_worse(
    kernel: Compute,
    specification: Compute,
    inputs: Sequence[Tensor],
    *,
    plain: Compute | None = None,
    what: str = "",
    gradients: bool = True,
) -> None:
    """Hold one kernel to a `Yardstick`."""
    Yardstick(specification, inputs, plain=plain, gradients=gradients).hold(kernel, what)


def same_for_any_threads(compute: Callable[[], Sequence[Tensor]]) -> None:
    """Bit-equal results with one, two and three threads."""
    before = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append([x.clone() for x in compute()])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
