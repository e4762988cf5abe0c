"""Skip: which values are read, what stands for the others, the bound on the error, and single queries."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparing
from sparing.methods.skip.method import GROUP, TILE, Skip
from tests.support.inputs import relative

CAUSAL = pytest.mark.parametrize("causal", [False, True])


def spread_inputs(n=300, d=16, seed=0, dtype=torch.float64, heads=3):
    """Peaked attention over keys of several topics, values with a mean."""
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, n, d, generator=gen, dtype=torch.float64) for _ in range(3))
    return [x.to(dtype) for x in (2 * q, 1.5 * k, v + 0.3)]


def by_hand(q, k, v, causal, threshold, stride):
    """One head, row by row: (n, d), (n, d), (n, e) -> (n, e), and how many values each row used."""
    n, m = len(q), len(k)
    scores = q @ k.T / math.sqrt(q.shape[1])
    if causal:
        scores = scores.masked_fill(torch.ones(n, m, dtype=torch.bool).triu(1), -torch.inf)
    wants = torch.zeros(n, m, dtype=torch.bool)
    for i in range(n):
        for j in range(m):
            end = min(j // TILE * TILE + TILE, m)
            wants[i, j] = scores[i, j] > -torch.inf and scores[i, j] >= scores[i, :end].max() + math.log(threshold)
    weights, out, used = scores.softmax(-1), torch.zeros(n, v.shape[1], dtype=v.dtype), []
    for i in range(n):
        first = i // GROUP * GROUP
        last = i if causal else min(first + GROUP, n) - 1
        mine = torch.zeros(m, dtype=v.dtype)
        for start in range(0, m, TILE):
            tile = range(start, min(start + TILE, m))
            read = [j for j in tile if wants[first : last + 1, j].any()]
            left = [j for j in tile if j not in read]
            standing = [j for j in left if (j - start) % stride == stride - 1]
            mine[read] = weights[i, read]
            if weights[i, standing].sum() > weights[i, left].sum() / 2**20:  # else the weight is lost
                mine[standing] = weights[i, standing] * weights[i, left].sum() / weights[i, standing].sum()
        out[i] = mine @ v / mine.sum()
        used.append(int((mine > 0).sum()))
    return out, torch.tensor(used)


@CAUSAL
@pytest.mark.parametrize(("threshold", "stride"), [(0.3, 4), (0.05, 3), (1.0, 100)])
def test_the_formula_by_hand(threshold, stride, causal):
    q, k, v = spread_inputs(n=150, heads=1)
    method = Skip(threshold=threshold, stride=stride)
    found = sparing.inspect(q, k, v, is_causal=causal, method=method, impl="reference")
    wanted, used = by_hand(q[0, 0], k[0, 0], v[0, 0], causal, threshold, stride)
    assert torch.allclose(found.output[0, 0], wanted, atol=1e-12)
    assert torch.equal(found.statistics["touched"][0, 0], used)
    other, _ = by_hand(q[0, 0], k[0, 0], v[0, 0], causal, threshold, stride + 1)
    assert not torch.allclose(found.output[0, 0], other, atol=1e-6), "the control: other keys stand for the rest"


@given(
    n=st.integers(1, 300), seed=st.integers(0, 99), causal=st.booleans(), threshold=st.floats(0.001, 1.0),
    stride=st.integers(1, TILE), sharpness=st.floats(0.1, 4.0),
)  # fmt: skip
def test_the_bound_holds(n, seed, causal, threshold, stride, sharpness):
    q, k, v = spread_inputs(n=n, seed=seed)
    q *= sharpness
    v[:, :, :: max(n // 3, 1)] += 5  # a few values far from the others
    exact = sparing.attention(q, k, v, is_causal=causal)
    found = sparing.inspect(q, k, v, is_causal=causal, method=Skip(threshold=threshold, stride=stride))
    error = (found.output - exact).norm(dim=-1)
    assert (error <= found.statistics["bound"] + 1e-9).all()


def test_a_bound_ten_times_as_tight_would_fail():
    q, k, v = spread_inputs()
    exact = sparing.attention(q, k, v)
    found = sparing.inspect(q, k, v, method="skip(threshold=0.5, stride=32)")
    assert ((found.output - exact).norm(dim=-1) > found.statistics["bound"] / 10).any()


@CAUSAL
def test_the_cost_counts_all_scores_and_the_values_that_are_read(causal):
    q, k, v = spread_inputs(n=200)
    shape = sparing.Shape(heads=3, queries=200, keys=200, head_dim=16, value_dim=16, causal=causal)
    method, exact = Skip(threshold=0.3), sparing.method("exact").cost(shape).flops
    notes = sparing.inspect(q, k, v, is_causal=causal, method=method).statistics
    found = method.cost(shape, notes)
    share = (found.flops - 3 * shape.pairs * 33) / (exact - 3 * shape.pairs * 33)
    assert share == pytest.approx(float(notes["touched"].sum()) / (3 * shape.pairs))
    assert 0.1 < share < 0.9
    assert found.keys == pytest.approx(float(notes["touched"].double().mean()))
    assert method.cost(shape).flops == exact, "nothing is promised without data"


def test_a_step_costs_all_scores_and_the_values_that_it_reads():
    assert Skip().step_flops(shown=100, touched=10, head_dim=4, value_dim=6) == 100 * 9 + 10 * 12
    assert sparing.method("window").step_flops(100, 10, 4, 6) == 10 * 21
    assert sparing.method("top_keys").step_flops(100, 10, 4, 6) == 100 * 21, "an oracle scores every key"


def test_packed_sequences_have_the_bounds_of_calls_of_their_own():
    q, k, v = spread_inputs()
    offsets = torch.tensor([0, 70, 71, 300])
    packed = sparing.inspect(q, k, v, cu_seqlens=offsets, method="skip(threshold=0.2)").statistics["bound"]
    for start, stop in ((0, 70), (70, 71), (71, 300)):
        alone = sparing.inspect(*(x[:, :, start:stop] for x in (q, k, v)), method="skip(threshold=0.2)")
        assert torch.equal(packed[:, :, start:stop], alone.statistics["bound"])


@CAUSAL
def test_stand_ins_err_less_than_dropping(causal):
    """The control loses what it leaves out, as kernels do that skip blocks of negligible weight."""

    @dataclass(frozen=True, kw_only=True)
    class Dropping(Skip):
        name = "_dropping"

        def _mix(self, tiles, read, v):
            weights = tiles.flatten(-2).softmax(-1).unflatten(-1, (-1, TILE)).masked_fill(~read, 0.0).flatten(-2)
            weights = weights / weights.sum(-1, keepdim=True)
            zero = weights.sum(-1)
            return weights[..., : v.shape[2]] @ v, zero, zero, zero

    q, k, v = spread_inputs(n=600)
    exact = sparing.attention(q, k, v, is_causal=causal)
    stands, drops = (
        relative(sparing.attention(q, k, v, is_causal=causal, method=m(threshold=0.1), impl="reference"), exact)
        for m in (Skip, Dropping)
    )
    assert stands < 0.75 * drops


@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_padding_on_the_left_moves_no_group(impl):
    """Groups are counted from the first valid token; a batch-mate of full length is the control."""
    q, k, v = spread_inputs(n=100)
    padded = [torch.cat([torch.full_like(x[:, :, :13], 9.0), x], dim=2) for x in (q, k, v)]
    keep = torch.arange(113)[None, None, None] >= 13
    for causal in (False, True):
        options = {"is_causal": causal, "method": "skip(threshold=0.4, stride=5)", "impl": impl}
        alone = sparing.attention(q, k, v, **options)
        found = sparing.attention(*padded, attn_mask=keep, **options)[:, :, 13:]
        assert torch.allclose(found, alone, atol=1e-6)
        shifted = sparing.attention(*padded, **options)[:, :, 13:]
        assert not torch.allclose(shifted, alone, atol=1e-3)


def test_it_finds_a_key_far_above_the_others_wherever_it_stands():
    q, k, v = spread_inputs()
    for place in (5, 127, 128, 250):
        k2 = k.clone()
        k2[:, :, place] = 12 * q[:, :, 290] / q[:, :, 290].square().sum(-1, keepdim=True) * 16**0.5
        exact = sparing.attention(q, k2, v, is_causal=True)[:, :, 290]
        found = sparing.attention(q, k2, v, is_causal=True, method="skip(threshold=0.1)")[:, :, 290]
        assert relative(found, exact) < 0.1
        lost = sparing.attention(q, k2, v, is_causal=True, method="window(size=32)")[:, :, 290]
        assert relative(lost, exact) > 0.3, "the control finds it, too"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_a_decoding_step_reads_for_each_query_alone(dtype, padded):
    """The step of the kernel, the step in plain PyTorch, and the formula by hand on a group of one."""
    q, k, v = (x.to(dtype) for x in spread_inputs(n=300))
    method, (q, k, v) = Skip(threshold=0.1, stride=4), (q[:, :, -2:], k[:, :1], v[:, :1])  # three heads share one
    keep = (torch.arange(300) >= 7)[None] if padded else None
    out, notes = method.step(q, k, v, keep, 0.25)
    first, tolerance = 7 if padded else 0, 0.02 if dtype == torch.bfloat16 else 1e-5
    for head in range(3):
        for i in range(2):
            rows = (q[0, head, i : i + 1], k[0, 0, first : 299 + i], v[0, 0, first : 299 + i])
            wanted, used = by_hand(*(x.double() for x in rows), False, 0.1, 4)
            assert torch.allclose(out[0, head, i].double(), wanted[0], atol=tolerance)
            assert notes["touched"][0, head, i] == used[0] or dtype == torch.bfloat16
    assert out.dtype == dtype


def test_a_step_on_padding_gives_zeros():
    q, k, v = (x.float() for x in spread_inputs(n=40))
    keep = (torch.arange(40) < 39)[None]
    out, notes = Skip().step(q[:, :, -2:], k, v, keep, 0.25)
    assert (out[:, :, 1] == 0).all()
    assert (notes["lse"][:, :, 1] == -torch.inf).all()
    assert (out[:, :, 0] != 0).any()


def test_an_index_generates_with_it():
    """Each new token errs little, and less at a smaller threshold."""
    q, k, v = spread_inputs(n=400, dtype=torch.float32)
    exact = sparing.attention(q, k, v, is_causal=True)[:, :, 350:]
    errors = []
    for threshold in (0.3, 0.03, 0.0):
        index = sparing.Index(f"skip(threshold={threshold})")
        index.attention(*(x[:, :, :350] for x in (q, k, v)))
        rows = [index.attention(q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1]) for i in range(350, 400)]
        errors.append(relative(torch.cat(rows, dim=2), exact))
    assert errors[1] < 0.5 * errors[0]
    assert errors[0] < 0.5
    assert errors[2] < 1e-5


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("skip(threshold=1.5)", "threshold=1.5 must be at most 1"),
        ("skip(threshold=-0.1)", "threshold=-0.1 must be at least 0"),
        ("skip(stride=0)", "stride=0 must be at least 1"),
        ("skip(stride=129)", "stride=129 must be at most 128"),
    ],
)
def test_bad_settings_are_named(spec, message):
    with pytest.raises(ValueError, match=message):
        sparing.method(spec)
