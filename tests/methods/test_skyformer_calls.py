"""Skyformer as users call it: padding, short items, huge norms, refusals, cost."""

from dataclasses import replace

import pytest
import torch

import sparing
from sparing import Shape, Unsupported
from tests.support.inputs import keys_mask, make, padding, relative, run


def test_nothing_is_drawn_when_all_rows_are_landmarks():
    x = make(sparing.method("exact"), n_q=20)
    for spec in ("skyformer(sampling=all)", "skyformer(landmarks=40)", "skyformer(sampling=all, kernel=softmax)"):
        assert torch.equal(run(spec, x, seed=1), run(spec, x, seed=2))


def test_a_short_item_of_a_padded_batch_is_exact():
    x = make(sparing.method("exact"), n_q=100, dtype=torch.float64)
    keep = torch.ones(2, 100, dtype=torch.bool)
    keep[0, ::2] = False
    keep[0, 30:] = False
    for impl in ("reference", "auto"):
        for kernel, target in (("gaussian", "kernelized"), ("softmax", "exact")):
            out = run(f"skyformer(landmarks=30, kernel={kernel})", x, attn_mask=keys_mask(keep), impl=impl)
            exact = run(target, x, attn_mask=keys_mask(keep))
            assert float((out[0] - exact[0]).abs().max()) < 1e-10
            assert relative(out[1], exact[1]) > 1e-2


def test_the_bound_is_of_the_gaussian_kernel_only():
    x = make(sparing.method("exact"), n_q=40)
    for kernel, names in (("gaussian", {"landmarks", "bound"}), ("softmax", {"landmarks"})):
        found = sparing.inspect(x.q, x.k, x.payload, method=f"skyformer(landmarks=9, kernel={kernel})", seed=0)
        assert set(found.statistics) == names


def test_padded_queries_are_harmless():
    x = make(sparing.method("exact"), n_q=40)
    keep = padding("holes", 2, 40)
    rows = keep[:, None, :].expand(2, 2, 40)
    clean = run("skyformer(landmarks=9)", x, attn_mask=keys_mask(keep), query_mask=keep)
    assert bool((clean[~rows] == 0).all())
    spoiled = replace(x, q=x.q.masked_fill(~rows.unsqueeze(-1), torch.nan))
    assert torch.equal(run("skyformer(landmarks=9)", spoiled, attn_mask=keys_mask(keep), query_mask=keep), clean)


@pytest.mark.parametrize("size", [1e3, 1e12])
@pytest.mark.parametrize("setting", ["", "gamma=0.0", "solver=newton_schulz", "kernel=softmax"])
def test_huge_norms(size, setting):
    """The kernel underflows: no NaN, and no entry beyond what the values allow."""
    x = make(sparing.method("exact"), n_q=40)
    x = replace(x, q=size * x.q, k=size * x.k)
    out = run(sparing.method(f"skyformer(landmarks=20{', ' * bool(setting)}{setting})"), x)
    assert out.isfinite().all()
    assert float(out.abs().max()) <= float(x.payload.abs().max()) + 1e-6
    assert "softmax" in setting or not out.any()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("skyformer(gamma=-0.1)", "gamma=-0.1 must be at least 0"),
        ("skyformer(landmarks=0)", "landmarks=0 must be at least 1"),
        ("skyformer(iterations=0)", "iterations=0 must be at least 1"),
        ("skyformer(solver=pinv)", "solver='pinv' is not one of 'cholesky', 'newton_schulz'"),
        ("skyformer(kernel=elu)", "kernel='elu' is not one of"),
        ("skyformer(sampling=prefix)", "sampling='prefix' is not one of"),
        ("softmaxRBF32", "unknown name 'softmaxRBF32'"),
    ],
)
def test_refuses_bad_settings(spec, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        sparing.method(spec)


def test_refuses_what_it_cannot_do():
    x = make(sparing.method("exact"), n_q=12)
    with pytest.raises(Unsupported, match=r"skyformer does not support scale=-0\.5"):
        run("skyformer", x, scale=-0.5)
    with pytest.raises(Unsupported, match="skyformer does not support is_causal"):
        run("skyformer", x, is_causal=True)
    assert run("skyformer(landmarks=8)", x, scale=0.0).isfinite().all()


def test_cost_breaks_even_with_dense_kernel_attention_at_twice_the_landmarks():
    """Kernel values: (n_q + n_k) m against n_q n_k."""
    shapes = [Shape(queries=n, keys=n, head_dim=64, value_dim=64) for n in (128, 1024, 4096)]
    ours = [sparing.method("skyformer(landmarks=128)").cost(s).flops for s in shapes]
    dense = [sparing.method("kernelized").cost(s).flops for s in shapes]
    assert ours[0] > dense[0]
    assert ours[1] < dense[1] / 3
    assert ours[2] < dense[2] / 12
    # Exact; here its product has two more coordinates, for the norms.
    assert sparing.method("skyformer(landmarks=256)").cost(shapes[0]).flops == pytest.approx(dense[0], rel=0.02)
