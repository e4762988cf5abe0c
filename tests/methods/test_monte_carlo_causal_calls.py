"""Causal Monte-Carlo attention: nothing that comes later matters; exact rows, gradients, masks, cost, memory."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import sparing
from sparing import Projection, Shape, Unsupported, native
from sparing.methods.monte_carlo import causal as by_row
from sparing.methods.monte_carlo import levels, row_blocks
from sparing.methods.monte_carlo.levels import running_maximum
from sparing.nn import MultiheadAttention
from tests.methods.test_monte_carlo import SETTINGS, problem, spec
from tests.methods.test_monte_carlo_causal import causal
from tests.support.allocations import largest_tensor

ALL = [*SETTINGS, ", estimator=stratified, samples=shared"]


def assert_no_leak(setting, impl, n, at, **kwargs):
    """float32: what comes after row `at` changes no row up to it, to the bit, nor a gradient."""
    q, k, value = problem(n=n, heads=2, kv_heads=1, sharpness=1.5, d=40)
    q, k, value = q.float(), k.float(), value.map(torch.Tensor.float)
    results = []
    for seed in (None, 1, 2):
        leaves = [t.clone() for t in (q, k, value.x)]
        if seed is not None:
            gen = torch.Generator().manual_seed(seed)
            for t in leaves:
                t[..., at + 1 :, :] = 10**seed * torch.randn(t[..., at + 1 :, :].shape, generator=gen)
        for t in leaves:
            t.requires_grad_()
        call = {"is_causal": True, "enable_gqa": True, "seed": 0, "impl": impl, **kwargs}
        out = sparing.attention(*leaves[:2], value._replace(x=leaves[2]), method=spec(3.0, setting), **call)
        early = out[:, :, : at + 1]
        weight = torch.randn(early.shape, generator=torch.Generator().manual_seed(3))
        grads = torch.autograd.grad((early * weight).sum(), leaves, allow_unused=True)
        results.append([early.detach(), *(g[..., : at + 1, :] for g in grads if g is not None)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True)), "later tokens leak"


@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize("setting", ALL)
def test_later_tokens_change_nothing(setting, impl):
    """Inside a block of rows, across blocks, and with padding."""
    for n, at in ((40, 17), (300, 140)):
        assert_no_leak(setting, impl, n, at)
        keep = torch.rand(1, 1, 1, n, generator=torch.Generator().manual_seed(0)) < 0.7
        assert_no_leak(setting, impl, n, at, attn_mask=keep)


@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize("setting", ALL)
def test_counts_from_all_queries_are_noticed(setting, impl, monkeypatch):
    def all_queries(received, before=None):
        found = running_maximum(received, before)
        return found[..., -1:, :].expand_as(found)

    for module in (row_blocks, by_row):
        monkeypatch.setattr(module, "running_maximum", all_queries)
    with pytest.raises(AssertionError, match="leak"):
        assert_no_leak(setting, impl, 40, 17)


def test_the_mean_of_all_tokens_is_noticed(monkeypatch):
    def share(block):
        return torch.full_like(block.seen, 1 / block.seen.shape[-1], dtype=block.weights.dtype)

    monkeypatch.setattr(row_blocks.RowBlock, "share", property(share))
    with pytest.raises(AssertionError, match="leak"):
        assert_no_leak(", estimator=mean", "auto", 40, 17)


@pytest.mark.parametrize("setting", ALL)
def test_a_prefix_gives_the_first_rows_of_the_whole(setting):
    q, k, value = problem(n=150, heads=2)
    whole = causal(q, k, value, spec(3.0, setting)).output
    part = causal(q[:, :, :60], k[:, :, :60], value._replace(x=value.x[:, :60]), spec(3.0, setting)).output
    torch.testing.assert_close(part, whole[:, :, :60], rtol=0, atol=1e-11)


@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize("setting", ALL)
@pytest.mark.parametrize("alpha", [0.0, 3.0])
def test_values_that_overflow_stay_out_of_earlier_rows(setting, impl, alpha, monkeypatch):
    q, k, value = problem(n=20)  # in float64: float32 values that could overflow are computed in float64

    def early(x):
        method, moved = spec(alpha, setting), value._replace(x=x)
        return sparing.attention(q, k, moved, is_causal=True, method=method, seed=0, impl=impl)[:, :, :12]

    huge = value.x.clone()
    huge[:, 12:] = 1e308
    assert torch.equal(early(huge), early(value.x))
    if alpha or impl == "reference":
        for module in (levels, by_row):  # control
            monkeypatch.setattr(module, "weigh", torch.matmul)
        if setting != ", estimator=drop" or alpha == 0:  # which need not project these tokens
            assert not early(huge).isfinite().all()


@pytest.mark.parametrize("setting", ALL)
def test_no_error_allowed_is_exact(setting):
    q, k, value = problem(heads=4, kv_heads=2, n_q=9, batch=2)
    call = {"enable_gqa": True, "is_causal": True}
    for impl in ("reference", "auto"):
        wanted = sparing.attention(q, k, value, method="exact", impl=impl, **call)
        found = sparing.attention(q, k, value, method=spec(0.0, setting), seed=0, impl=impl, **call)
        assert torch.equal(found, wanted)
        for alpha in (1e-3, 1e-300):
            found = sparing.inspect(q, k, value, method=spec(alpha, setting), seed=0, impl=impl, **call)
            torch.testing.assert_close(found.output, wanted, rtol=0, atol=1e-12)
            assert bool((found.statistics["certificate"] == 0).all())
    rough = sparing.attention(q, k, value, method=spec(5.0, setting), seed=0, **call)
    assert float((rough - wanted).abs().max()) > 0.1


@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_gradcheck_with_frozen_samples(setting, impl, monkeypatch):
    q, k, value = problem(n=4, d=5, e=2, heads=2, kv_heads=1, sharpness=0.5)
    law = by_row.feature_law(value.weight.mT[None])  # p is a constant too, also when the weight moves
    monkeypatch.setattr(by_row, "feature_law", lambda w: law)
    monkeypatch.setattr(levels, "feature_law", lambda w: law[0])
    leaves = [t.clone().requires_grad_() for t in (q, k, *value)]

    def call(q, k, *v):
        method = spec(1.7, setting)
        return sparing.attention(
            q, k, Projection(*v), is_causal=True, enable_gqa=True, method=method, seed=0, impl=impl
        )

    assert torch.autograd.gradcheck(call, leaves, eps=1e-6, atol=1e-7)


def test_a_second_derivative_is_refused_by_the_fast_path():
    q, k, value = problem(n=5, d=7, e=2)
    leaf = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(causal(leaf, k, value, spec(1.7)).output.square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.grad(first.sum(), leaf)


@pytest.mark.parametrize("setting", ALL)
def test_a_mask_beside_causality(setting):
    """By query head, with a bias that learns: both paths agree, and no query looks ahead."""
    q, k, value = problem(n=140, heads=4, kv_heads=2)
    gen = torch.Generator().manual_seed(0)
    window = torch.ones(140, 140, dtype=torch.bool).triu(-20)
    by_head = torch.rand(1, 4, 140, 140, generator=gen) < 0.8
    bias = torch.randn(1, 1, 140, 140, generator=gen, dtype=torch.float64).masked_fill(~window, -torch.inf)
    for mask in (window, by_head, bias, bias[..., :1, :].clamp_min(-5)):
        results = []
        for impl in ("reference", "auto"):
            learned = mask.clone().requires_grad_(mask.dtype != torch.bool)
            found = causal(q, k, value, spec(3.0, setting), attn_mask=learned, impl=impl)
            results.append([found.output.detach(), *found.statistics.values()])
            if learned.requires_grad:
                results[-1].append(torch.autograd.grad(found.output.square().sum(), learned)[0])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
        other = q.clone()
        other[:, :, 100:] = 30 * k.repeat_interleave(2, 1)[:, :, 3:43]
        again = causal(other, k, value, spec(3.0, setting), attn_mask=mask).output
        assert torch.equal(
            again[:, :, :100], causal(q, k, value, spec(3.0, setting), attn_mask=mask).output[:, :, :100]
        )


def executed(q, k, value, method, mask):
    """FLOPs of a causal call: its matrix products, its bags of rows, one exponential per logit of its blocks of rows."""

    def bags(table, indices, *_, **__):
        return 2 * indices[0] * table[1]

    names = torch.ops.aten._embedding_bag, torch.ops.aten._embedding_bag_forward_only
    counter = FlopCounterMode(display=False, custom_mapping=dict.fromkeys(names, bags))
    with counter:
        sparing.attention(q, k, value, mask, is_causal=True, method=method, seed=0, enable_gqa=True)
    return counter.get_total_flops() + q.shape[0] * q.shape[1] * levels.block_pairs(q.shape[2], k.shape[2])


@pytest.mark.parametrize("setting", ALL)
def test_cost_is_what_runs(setting):
    q, k, value = problem(n=300, d=64, e=16, heads=4, kv_heads=2, n_q=280, batch=2)
    keep = (torch.arange(300) < torch.tensor([[300], [170]]))[:, None, None]
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "queries": 280, "keys": 300, "head_dim": 8, "value_dim": 16}
    shape = Shape(**sizes, in_features=64, causal=True)
    for alpha, mask in ((0.5, None), (20.0, keep)):
        method = sparing.method(spec(alpha, setting))
        facts = causal(q, k, value, method, attn_mask=mask).statistics
        ran, said = executed(q, k, value, method, mask), method.cost(shape, facts).flops
        assert said == pytest.approx(ran, rel=0.01), f"{method}: cost() says {said:.4g}, {ran:.4g} are run"
    if "estimator=drop" in setting or "mean" in setting:
        assert bool((facts["products"] == 1).all())
    else:
        few = {**facts, "products": torch.ones(2, 2)}  # control: as if the levels were free
        assert method.cost(shape, few).flops < 0.9 * ran
    with pytest.raises(ValueError, match=r"statistics: no 'products' for a causal shape; inspect\(\) a call with is_c"):
        method.cost(shape, {"counts": facts["counts"]})


def test_without_an_error_allowed_it_costs_what_exact_attention_costs():
    shape = Shape(heads=2, queries=600, keys=600, head_dim=16, value_dim=16, in_features=32, causal=True)
    assert sparing.method(spec(0.0)).cost(shape).flops == sparing.method("exact").cost(shape).flops
    q, k, value = problem(n=600, heads=4, e=8)
    assert largest_tensor(lambda: causal_output(q, k, value, spec(0.0))) < 600 * 600


def causal_output(q, k, value, method):
    return sparing.attention(q, k, value, is_causal=True, method=method, seed=0)


@pytest.mark.parametrize("setting", ALL)
def test_memory_is_that_of_one_head(setting):
    """No tensor is as large as the weights of one head; the backward pass keeps a few times these, not one per level."""
    n, heads = 600, 4
    q, k, value = problem(n=n, heads=heads, d=64)
    with native.switched_off():
        assert largest_tensor(lambda: causal_output(q, k, value, spec(4.0, setting))) <= n * n
        kept = {}

        def keep(t):
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage()
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            causal_output(q.requires_grad_(), k, value, spec(4.0, setting))
        assert len(levels.levels(64)) == 8
        assert sum(s.nbytes() for s in kept.values()) < 5 * heads * n * n * 8


def test_kernels_do_not_cover_causal_calls():
    with pytest.raises(Unsupported, match=r"impl='native'.*use impl='auto'"):
        sparing.attention(*problem(), is_causal=True, method=spec(2.0), seed=0, impl="native")


def test_a_causal_layer_samples_its_own_projection():
    theirs = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
    x, mask = torch.randn(2, 9, 16), torch.nn.Transformer.generate_square_subsequent_mask(9)
    wanted = theirs(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
    for alpha, near in ((0.0, True), (3.0, False)):
        ours = MultiheadAttention(16, 4, batch_first=True, method=spec(alpha)).eval()
        ours.load_state_dict(theirs.state_dict())
        out = ours(x, x, x, is_causal=True)[0]
        assert torch.allclose(out, wanted, atol=1e-6) == near
        moved = torch.cat([x[:, :6], x[:, 6:] + 1], 1)
        assert torch.equal(ours(moved, moved, moved, is_causal=True)[0][:, :6], out[:, :6])
