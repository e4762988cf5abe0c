"""Sliding-window attention: the pattern, each key once, no leak, linear memory."""

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import sparing
from sparing.methods.window import method as module
from sparing.methods.window.method import Window
from tests.support.allocations import largest_tensor
from tests.support.inputs import by, exact_for, keys_mask, make, relative, run


def pattern(n: int, size: int, sinks: int, heads_up: int, valid: list[bool], causal: bool) -> Tensor:
    """The sets S_i written out token by token, as the docstring words them."""
    first = [i for i in range(n) if valid[i]]
    everyone, full = set(first[: max(sinks, heads_up)]), set(first[:heads_up])
    seen = torch.zeros(n, n, dtype=torch.bool)
    for i in range(n):
        for j in range(n):
            near = i - size <= j <= i if causal else abs(i - j) <= size // 2
            seen[i, j] = valid[j] and (near or j in everyone or i in full) and not (causal and j > i)
    return seen


def masked_softmax(x, seen: Tensor, extra: Tensor | None = None) -> Tensor:
    """Dense softmax attention restricted to `seen` (B, n, n); `extra` counts keys several times."""
    weights = (x.q @ x.k.mT / math.sqrt(x.q.shape[-1])).exp() * seen[:, None]
    weights = weights if extra is None else weights * extra[:, None]
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-300) @ x.value


def agrees(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


def random_cases(count: int):
    dice = random.Random(5)
    for _ in range(count):
        n = dice.choice([1, 2, 7, 31, 63, 64, 65, 100, 129, 131])
        size = 2 * dice.randint(0, 40)
        holes = dice.choice([0.0, 0.0, 0.3])
        keep = torch.tensor([[dice.random() >= holes for _ in range(n)] for _ in range(2)])
        yield n, size, dice.choice([0, 0, 1, 3, 40]), dice.choice([0, 0, 1, 2, 5]), keep, dice.random() < 0.5


@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_equals_the_dense_softmax_of_the_pattern_written_out(impl):
    for n, size, sinks, heads_up, keep, causal in random_cases(40):
        m = Window(size=size, sinks=sinks, global_tokens=heads_up)
        x = make(m, n_q=n, dtype=torch.float64)
        mask = None if bool(keep.all()) else keys_mask(keep)
        seen = torch.stack([pattern(n, size, sinks, heads_up, row, causal) for row in keep.tolist()])
        agrees(run(m, x, impl=impl, attn_mask=mask, is_causal=causal), masked_softmax(x, seen))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("wrong", [-2, 2])
def test_control_a_window_that_is_off_by_one_on_each_side_is_noticed(wrong, causal):
    x = make(Window(), n_q=40, dtype=torch.float64)
    valid = [True] * 40
    right, off = (pattern(40, size, 0, 0, valid, causal).expand(2, -1, -1) for size in (8, 8 + wrong))
    found = run("window(size=8)", x, is_causal=causal)
    agrees(found, masked_softmax(x, right))
    with pytest.raises(AssertionError):
        agrees(found, masked_softmax(x, off))


def test_the_number_of_keys_is_size_plus_one():
    x = make(Window(), n_q=50, dtype=torch.float64)
    x = replace(x, q=x.q * 0)  # uniform weights: the log-sum-exp counts keys
    lse = sparing.inspect(x.q, x.k, x.value, method="window(size=8)").lse
    assert lse[0, 0, 25].exp().item() == pytest.approx(9)
    assert lse[0, 0, 0].exp().item() == pytest.approx(5)
    lse = sparing.inspect(x.q, x.k, x.value, method="window(size=8)", is_causal=True).lse
    assert lse[0, 0, 25].exp().item() == pytest.approx(9)
    assert lse[0, 0, 0].exp().item() == pytest.approx(1)
    agrees(run("window(size=0)", x), x.value)


@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize("spec", ["window(size=8, sinks=3)", "window(size=8, global_tokens=3)"])
def test_a_shared_key_inside_the_window_counts_once(spec, impl):
    m = sparing.method(spec)
    x = make(m, n_q=70, dtype=torch.float64)
    seen = pattern(70, 8, m.sinks, m.global_tokens, [True] * 70, False).expand(2, -1, -1)
    twice = 1.0 + (pattern(70, 8, 0, 0, [True] * 70, False) & (torch.arange(70) < 3)).double().expand(2, -1, -1)
    found = run(m, x, impl=impl)
    agrees(found, masked_softmax(x, seen))
    with pytest.raises(AssertionError):
        agrees(found, masked_softmax(x, seen, twice))


def test_sinks_are_keys_only_and_global_tokens_are_queries_too():
    x = make(Window(), n_q=100, dtype=torch.float64)
    plain, sinks, both = (run(f"window(size=8, {s})", x) for s in ("sinks=0", "sinks=2", "global_tokens=2"))
    agrees(sinks[:, :, 2:], both[:, :, 2:])
    agrees(both[:, :, :2], run("exact", x)[:, :, :2])
    agrees(sinks[:, :, :2], plain[:, :, :2])  # both sinks lie in the windows of the first two queries
    assert relative(sinks[:, :, 50:], plain[:, :, 50:]) > 1e-3
    assert relative(both[:, :, :2], plain[:, :, :2]) > 1e-3


def test_sinks_repair_attention_that_rests_on_the_first_token():
    """The usual reason for sinks: decoders put much of their weight on the first token."""
    x = make(Window(), n_q=200, dtype=torch.float64, sharpness=1.0)
    k = torch.cat([x.k, torch.zeros_like(x.k[..., :1])], dim=-1)
    k[:, :, 0] = 0.0
    k[:, :, 0, -1] = 8.0 * 3.0  # every query gives the first key a logit of 8
    x = replace(x, q=torch.cat([x.q, torch.ones_like(x.q[..., :1])], dim=-1), k=k)
    wanted = exact_for(x, is_causal=True)
    without, repaired = (
        relative(run(s, x, is_causal=True), wanted) for s in ("window(size=32)", "window(size=32, sinks=1)")
    )
    assert repaired < 0.5 * without


@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_first_valid_tokens_are_the_sinks_and_holes_keep_their_place(impl):
    m = Window(size=6, sinks=1, global_tokens=2)
    x = make(m, batch=1, n_q=80, dtype=torch.float64)
    keep = torch.ones(1, 80, dtype=torch.bool)
    keep[:, :11] = False
    out = run(m, x, impl=impl, attn_mask=keys_mask(keep))
    agrees(out[:, :, 11:], run(m, x.tokens(slice(11, None)), impl=impl))
    keep[:, 30:60] = False  # a hole as wide as several windows: those next to it do not look across
    out = run("window(size=6)", x, impl=impl, attn_mask=keys_mask(keep))
    agrees(out[:, :, 60:], run("window(size=6)", x.tokens(slice(60, None)), impl=impl))
    assert bool((out[:, :, 40:50] == 0).all())


def first_rows_stay(method: str, **kwargs) -> None:
    """Later tokens have no effect on the first ten rows."""
    x = make(Window(), n_q=90, dtype=torch.float64)
    y = x.map(lambda t: torch.cat([t[:, :, :10], t[:, :, 10:].flip(2) + 3.0], dim=2))
    agrees(run(method, y, **kwargs)[:, :, :10], run(method, x, **kwargs)[:, :, :10])


@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_no_leak_through_sinks_and_global_tokens(impl):
    first_rows_stay("window(size=6, sinks=20, global_tokens=4)", is_causal=True, impl=impl)
    with pytest.raises(AssertionError):  # control: the same call without causality
        first_rows_stay("window(size=6, sinks=20, global_tokens=4)", impl=impl)
    with pytest.raises(AssertionError):  # control: only the rows of global tokens leak
        first_rows_stay("window(size=0, global_tokens=1)", impl=impl)


@pytest.mark.parametrize("causal", [False, True])
def test_gradient_equals_that_of_the_masked_dense_softmax(causal):
    m = Window(size=20, sinks=2, global_tokens=1)
    x = make(m, n_q=131, dtype=torch.float64).map(lambda t: t.requires_grad_())
    keep = torch.rand(2, 131, generator=torch.Generator().manual_seed(0)) < 0.8
    keep[:, 70] = True
    seen = torch.stack([pattern(131, 20, 2, 1, row, causal) for row in keep.tolist()])
    weight = torch.randn(2, 2, 131, 6, dtype=torch.float64)
    outs = (run(m, x, attn_mask=keys_mask(keep), is_causal=causal), masked_softmax(x, seen))
    found, wanted = (torch.autograd.grad((out * weight).sum(), x.leaves()) for out in outs)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def test_wide_windows_and_small_portions_give_the_same(monkeypatch):
    m = Window(size=600, sinks=2)  # blocks of 150 queries
    x = make(m, n_q=400, dtype=torch.float64)
    for causal in (False, True):
        whole = run(m, x, is_causal=causal)
        agrees(whole, run(m, x, is_causal=causal, impl="reference"))
        with monkeypatch.context() as patch:
            patch.setattr(module, "_SCORES", 1)
            agrees(run(m, x, is_causal=causal), whole)


@pytest.mark.parametrize("spec", ["window(size=16)", "window(size=16, sinks=3, global_tokens=2)"])
def test_nan_spoils_exactly_the_rows_that_see_it(spec):
    m = sparing.method(spec)
    for causal in (False, True):
        seen = pattern(60, 16, m.sinks, m.global_tokens, [True] * 60, causal)
        for bad in (0, 30):
            x = make(m, batch=1, heads=1, n_q=60)
            x.k[0, 0, bad, 3] = torch.nan
            for impl in ("reference", "auto"):
                out = run(m, x, is_causal=causal, impl=impl)[0, 0]
                assert torch.equal(out.isnan().any(-1), seen[:, bad])


@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_merges_with_the_rest_of_the_keys_by_log_sum_exp(impl):
    """Window and its complement, each with its log-sum-exp, make exact attention."""
    m = Window(size=16, sinks=2, global_tokens=1)
    x = make(m, n_q=90, dtype=torch.float64)
    near = sparing.inspect(x.q, x.k, x.value, method=m, impl=impl)
    far = sparing.inspect(x.q, x.k, x.value, ~pattern(90, 16, 2, 1, [True] * 90, False), method="exact")
    share = torch.sigmoid(near.lse - far.lse).unsqueeze(-1)
    agrees(share * near.output + (1 - share) * far.output, run("exact", x))


def small(spec: str, n: int, impl: str) -> bool:
    x = make(Window(), batch=1, heads=1, n_q=n, d=8, e=8)
    return largest_tensor(lambda: run(spec, x, impl=impl)) < n * n / 8


def test_nothing_of_quadratic_size_is_made():
    assert small("window(size=32, sinks=2, global_tokens=1)", 2048, "auto")
    assert not small("window(size=32, sinks=2, global_tokens=1)", 2048, "reference")  # control


@pytest.mark.parametrize(("size", "causal"), [(4096, False), (2048, True)])
def test_a_window_over_everything_runs_as_exact_attention(size, causal):
    x = make(Window(), batch=1, heads=1, n_q=1024, d=8, e=8)
    assert largest_tensor(lambda: run(f"window(size={size})", x, is_causal=causal)) < 1024**2 / 8
    found, wanted = run(f"window(size={size})", x, is_causal=causal), run("exact", x, is_causal=causal)
    torch.testing.assert_close(found, wanted)
    by_torch = (by("torch", spec, x, is_causal=causal) for spec in (f"window(size={size})", "exact"))
    assert torch.equal(*by_torch)
    found = sparing.inspect(x.q, x.k, x.value, method=f"window(size={size})", is_causal=causal)
    torch.testing.assert_close(found.lse, sparing.inspect(x.q, x.k, x.value, is_causal=causal).lse)
    shape = sparing.Shape(queries=1024, keys=1024, head_dim=8, value_dim=8, causal=causal)
    assert Window(size=size).cost(shape) == sparing.method("exact").cost(shape)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"size": 7}, ValueError, "size=7"),
        ({"size": -2}, ValueError, "size=-2"),
        ({"size": 8.0}, TypeError, "size=8.0"),
        ({"sinks": -1}, ValueError, "sinks=-1"),
        ({"global_tokens": -3}, ValueError, "global_tokens=-3"),
    ],
)
def test_refuses_bad_fields(settings, error, words):
    with pytest.raises(error, match=words):
        Window(**settings)


def test_refuses_what_a_window_cannot_mean():
    x = make(Window(), n_q=10)
    with pytest.raises(sparing.Unsupported, match=r"window.*n_q=4 != n_k=10"):
        run("window", replace(x, q=x.q[:, :, :4]))
    with pytest.raises(sparing.Unsupported, match=r"window.*attn_mask"):
        run("window", x, attn_mask=torch.ones(10, 10).tril() > 0)


def test_cost_is_linear_in_the_length():
    shapes = [sparing.Shape(heads=4, queries=n, keys=n, head_dim=64, value_dim=64) for n in (4096, 8192)]
    costs = [Window(size=256, sinks=4).cost(s) for s in shapes]
    assert costs[1].flops == pytest.approx(2 * costs[0].flops)
    assert costs[0].keys == 256 + 1 + 4
    assert costs[0].flops < 0.1 * sparing.method("exact").cost(shapes[0]).flops
