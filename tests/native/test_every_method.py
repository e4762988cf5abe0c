"""Every row of the method table by kernels, on odd shapes and on every instruction set."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

import sparing
from sparing import Projection, native
from tests.support.inputs import Inputs, keys_mask, make, padding, run
from tests.support.kernel_checks import Yardstick, needs_kernels
from tests.support.method_table import ROWS, Row

pytestmark = needs_kernels

# (tokens, width, width of the values): one token, one coordinate, ends of vectors, of tiles and of blocks.
SHAPES = [(1, 20, 3), (31, 1, 1), (33, 20, 7), (64, 80, 16), (130, 128, 33)]
ROWS_BY_KERNEL = [row for row in ROWS if "native" in row.impls]
WITHOUT = {  # settings of methods with kernels that run on PyTorch
    "nystrom(landmarks=3, solver=exact)",
    "lsh(rounds=3, chunk=6, combine=ips)",
    "monte_carlo(alpha=2.0, importance=mean)",
    "monte_carlo(alpha=2.0, importance=median, probabilities=input)",
    "yoso(expectation=True)",
    "yoso(expectation=True, bits=5, normalize=none, gradient=exact)",
    "yoso(expectation=True, normalize=sum, gradient=exact)",
    "yoso(expectation=True, bits=5, unit=lift, normalize=none, gradient=exact)",
    "yoso(expectation=True, bits=5, unit=lift, temperature=9.0, normalize=sum, gradient=exact)",
    "kernel",
    "kernel(kind=poly)",
    "kernel(kind=poly, degree=4)",
    "kernel(kind=gaussian)",
    "kernel(kind=gaussian, normalize=length)",
    "kernelized",
}
BITS = [Row(f"yoso(hashes=3, bits={bits}, hash={kind})") for bits in range(1, 17) for kind in ("hadamard", "gaussian")]


def covered(row: Row, x: Inputs, **call: object) -> bool:
    """Whether kernels can run this call at all."""
    try:
        run(row.method, x, impl="native", **call)
    except sparing.Unsupported:
        return False
    return True


def compare(row: Row, n: int, d: int, e: int, groups: int, kind: str | None, causal: bool) -> bool:
    """Hold the kernels of every instruction set to the specification on one call; False if they do not cover it."""
    method = row.method
    x = make(method, heads=6, kv_heads=6 // groups, n_q=n, d=d, e=e, seed=n)
    mask = None if kind is None else keys_mask(padding(kind, 2, n))
    call = {"attn_mask": mask, "is_causal": causal, "scale": 0.3, "enable_gqa": groups > 1}
    rest = x.value[1:] if isinstance(x.value, Projection) else ()

    def by(impl):
        def compute(q, k, payload):
            value = Projection(payload, *(t.to(q.dtype) for t in rest)) if rest else payload
            with native.switched_off() if impl == "torch" else nullcontext():
                how = "auto" if impl == "torch" else impl
                return sparing.attention(q, k, value, method=method, seed=5, impl=how, **call)

        return compute

    if not covered(row, x, **call):
        return False
    specified = Yardstick(
        by("reference"),
        x.leaves(),
        plain=by("torch") if method.name == "skyformer" else None,  # its specification computes in float64
        gradients=method.supports.gradient == "full",
    )
    for isa in native.info().available:
        with native.instruction_set(isa):
            what = f"{row.spec} on {n} x {d}, values of {e}, {groups} queries a key, padding {kind}, {isa}"
            specified.hold(by("native"), what)
    return True


@pytest.mark.parametrize("row", [*ROWS_BY_KERNEL, *BITS], ids=lambda row: str(row.spec))
def test_kernels_err_no_more_than_their_specification(row):
    causal = row.supports.causal
    calls = ((1, None, False), (2, "left", False), (3, "holes", causal))
    shapes = SHAPES[2:4] if row in BITS else SHAPES
    ran = [compare(row, *shape, *call) for shape in shapes for call in calls]
    assert any(ran) == (row.spec not in WITHOUT), f"{row.spec} ran by kernels on {sum(ran)} of {len(ran)} calls"
