"""The precision of kernels, and of plain PyTorch, where sums run over 10^4 to 10^5 tokens.

A quadratic specification is affordable where either the queries or the keys are few; where a method needs both to be
many, its linear path in float64 is the truth.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch

import sparing
from sparing import native
from sparing.methods.monte_carlo.native import received
from sparing.methods.window.native import window_step
from sparing.native.attend import attend
from tests.support.kernel_checks import Yardstick, needs_kernels

pytestmark = needs_kernels

LONG, FEW = 100_000, 12
KINDS = ("constant", "leaning", "peaked")


def inputs(kind, n_q, n_k, d=4, e=3):
    """Queries, keys and values (1, 1, n, width)."""
    gen = torch.Generator().manual_seed(n_q + n_k)
    q, k, v = (torch.randn(1, 1, n, w, generator=gen) for n, w in ((n_q, d), (n_k, d), (n_k, e)))
    if kind == "constant":  # sums round the same way at every step
        return [x[:, :, :1].expand_as(x).contiguous() for x in (q, k, v)]
    return [q, k, v + 3.7] if kind == "leaning" else [3 * q, 3 * k, v + 1.0]


def hold(yardstick, kernel, what):
    """Hold a kernel to the yardstick on every instruction set of the machine."""
    for isa in native.info().available:
        with native.instruction_set(isa):
            yardstick.hold(kernel, f"{what}, {isa}")


@dataclass(frozen=True)
class Case:
    spec: str
    queries: int
    keys: int
    gradients: bool = True
    causal: bool = False
    scale: float | None = None
    truth: str = "reference"  # what is run in float64
    plain: str = "reference"  # whose error in float32 is the measure; "rounded": the truth, rounded once
    torch: bool = True  # whether plain PyTorch is held to the same rule

    def by(self, impl):
        if impl == "rounded":
            return lambda *tensors: self.by(self.truth)(*(x.double() for x in tensors)).float()

        def compute(q, k, v):
            with native.switched_off() if impl == "torch" else nullcontext():
                how = "auto" if impl == "torch" else impl
                options = {"is_causal": self.causal, "scale": self.scale, "seed": 5, "impl": how}
                return sparing.attention(q, k, v, method=self.spec, **options)

        return compute

    def __str__(self):
        return f"{self.spec}{', causal' * self.causal} {self.queries} x {self.keys}"


BOTH_WAYS = [
    ("nystrom(landmarks=8)", {}),
    ("random_features(features=16)", {}),
    ("kernel(kind=elu)", {}),
    ("kernel(kind=elu, normalize=length)", {}),
    ("skyformer(landmarks=8)", {"plain": "torch"}),  # its specification computes in float64
    ("skyformer(landmarks=8, kernel=softmax)", {"plain": "torch"}),
    ("linformer(rank=8)", {"scale": 1e-3}),  # random signs: slots, and with them the scores, grow with the keys
    ("linformer(rank=8, projection=pooled)", {}),
    ("yoso(hashes=4, bits=2, normalize=none)", {}),
    ("yoso(hashes=2, bits=2, normalize=none, gradient=exact)", {"torch": False}),
]
CASES = [
    *(Case(spec, FEW, LONG, **how) for spec, how in BOTH_WAYS),
    *(Case(spec, LONG, FEW, **how) for spec, how in BOTH_WAYS),
    Case("linformer(rank=5000, projection=pooled)", FEW, 10_000),
    Case("lsh(rounds=1, chunk=5000)", FEW, 20_000, torch=False),
    Case("yoso(hashes=4, bits=2)", FEW, LONG),
    Case("top_keys(keys=10000)", FEW, LONG, gradients=False),
    Case("key_clusters(clusters=8, keys=0)", FEW, LONG, gradients=False),
    Case("key_clusters(clusters=8, keys=20000)", FEW, LONG, gradients=False),
    *(
        Case(spec, 20_000, 20_000, causal=True, truth="torch", plain="torch")
        for spec in ("random_features(features=16)", "kernel(kind=elu)", "yoso(hashes=4, bits=2)")
    ),
    Case("kernel(kind=elu, normalize=none)", 20_000, 20_000, causal=True, truth="torch", plain="torch"),
    Case("nystrom(landmarks=8)", LONG, LONG, truth="torch", plain="torch"),
    # Its specification is quadratic: the kernel in float64, which other tests hold to that, is the truth.
    Case("key_clusters(clusters=4, keys=0)", 20_000, 20_000, False, causal=True, truth="native", plain="rounded"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_long_rows_err_no_more_than_the_specification(case, kind):
    # Gradients of equal landmarks are small differences of parts that grow with the keys, each rounded to float32.
    cancels = case.spec == "skyformer(landmarks=8)" and kind == "constant"
    yardstick = Yardstick(
        case.by(case.truth),
        inputs(kind, case.queries, case.keys),
        plain=case.by(case.plain),
        gradients=case.gradients and not cancels,
        lean=1.0 if kind == "leaning" else 0.0,
    )
    hold(yardstick, case.by("native"), f"{case}, {kind}")
    if case.torch and case.plain == "reference":
        yardstick.hold(case.by("torch"), f"{case}, {kind}, PyTorch")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("spec", "first"), [("window(size=40000)", 5_000), (f"window(size=2, global_tokens={FEW})", 0)]
)
def test_windows_and_global_tokens_that_see_all_keys(spec, first, kind):
    """Their rows are plain attention, which a few of them are held to."""
    n, rows = 10_000, slice(first, first + FEW)

    def windowed(q, k, v):
        return sparing.attention(q, k, v, method=spec, impl="native")[:, :, rows]

    def dense(q, k, v):
        return (q[:, :, rows] @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v

    hold(Yardstick(dense, inputs(kind, n, n)), windowed, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n_q", "n_k"), [(FEW, LONG), (LONG, FEW), (10_000, 600)])
def test_attend(n_q, n_k, kind):
    def kernel(q, k, v):
        return attend(q, k, v, None, None, 0.5)

    def dense(q, k, v):
        scores = q @ k.mT * 0.5
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    hold(Yardstick(dense, inputs(kind, n_q, n_k), lean=1.0 if kind == "leaning" else 0.0), kernel, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_largest_weights_that_keys_receive(kind):
    def kernel(q, k, v):
        return received(q, k, None, None, 0.5)

    def dense(q, k, v):
        scores = q @ k.mT * 0.5
        return scores.softmax(-1).amax(-2), scores.logsumexp(-1)

    hold(Yardstick(dense, inputs(kind, FEW, LONG), gradients=False), kernel, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_over_a_wide_window(kind):
    """Each query sees its own key and all before it."""

    def kernel(q, k, v):
        return window_step(q, k, v, LONG, 0, 0.5)[0]

    def dense(q, k, v):
        hidden = torch.arange(LONG) > torch.arange(LONG - FEW, LONG)[:, None]
        return (q @ k.mT * 0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v

    hold(Yardstick(dense, inputs(kind, FEW, LONG), gradients=False), kernel, kind)
