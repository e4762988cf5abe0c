"""Monte-Carlo attention: masks, padding, groups, exact rows, baselines, cost, refusals."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import sparing
from sparing import Projection, Shape, Unsupported, native
from sparing.methods.monte_carlo import estimator
from sparing.methods.monte_carlo import method as monte_carlo
from sparing.methods.monte_carlo.sampling import sample_counts
from tests.methods.test_monte_carlo import CHOICES, SETTINGS, exact, problem, spec
from tests.support.inputs import keys_mask, make, padding
from tests.support.kernel_checks import needs_kernels


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("alpha", [0.0, 1e-3, 1e-300])
@pytest.mark.parametrize("impl", ["reference", pytest.param("auto", marks=needs_kernels)])
def test_no_error_allowed_is_bitwise_exact(setting, alpha, impl):
    """What exact attention gives where it runs in the same way: by its specification, or as fast as it can."""
    q, k, value = problem(heads=4, kv_heads=2, n_q=9, batch=2)
    call = {"enable_gqa": True, "impl": impl}
    found = sparing.attention(q, k, value, method=spec(alpha, setting), seed=0, **call)
    assert torch.equal(found, sparing.attention(q, k, value, method="exact", **call))
    lse = sparing.inspect(q, k, value, method=spec(1.0, setting), seed=0, **call).lse
    wanted = sparing.inspect(q, k, value, method="exact", **call).lse
    torch.testing.assert_close(lse, wanted, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("setting", [*SETTINGS, *CHOICES])
def test_all_samples_by_plain_pytorch_are_bitwise_exact(setting):
    q, k, value = problem(heads=4, kv_heads=2, n_q=9, batch=2)
    with native.switched_off():
        found = sparing.attention(q, k, value, enable_gqa=True, method=spec(1e-3, setting), seed=0)
    assert torch.equal(found, exact(q, k, value, enable_gqa=True))


def test_tokens_with_all_samples_are_projected_exactly():
    q, k, value = problem(heads=2)
    mask = torch.zeros(16, 16, dtype=torch.bool)
    mask[:, 0] = True  # nearly everyone reads token 0 alone, so M_0 = 1
    mask[8:, 1:] = True
    wanted = exact(q, k, value, attn_mask=mask)
    for impl, tolerance in (("reference", 0), ("auto", 1e-12)):  # fewer rows: another blocking of the matrix product
        found = sparing.inspect(q, k, value, mask, method=spec(2.0), seed=0, impl=impl)
        counts = found.statistics["counts"]
        assert bool((counts[..., 0] == 48).all())
        assert bool((counts < 48).any())
        torch.testing.assert_close(found.output[:, :, :8], wanted[:, :, :8], rtol=0, atol=tolerance)
        assert float((found.output - wanted)[:, :, 8:].abs().max()) > 0.1


@pytest.mark.parametrize("setting", [*SETTINGS, *CHOICES])
def test_bias_is_exact_and_zero_weight_gives_the_bias(setting):
    q, k, value = problem(heads=2, sharpness=0.3)
    with_bias, without = (
        sparing.attention(q, k, v, method=spec(2.0, setting), seed=0) for v in (value, value._replace(bias=None))
    )
    bias = value.bias.view(1, 2, 1, 6).expand_as(with_bias)
    torch.testing.assert_close(with_bias - without, bias, rtol=0, atol=1e-12)
    zero = value._replace(weight=value.weight * torch.tensor([0.0, 1.0]).repeat_interleave(6)[:, None])
    out = sparing.attention(q, k, zero, method=spec(2.0, setting), seed=0)
    torch.testing.assert_close(out[:, 0], bias[:, 0], rtol=0, atol=1e-12)
    torch.testing.assert_close(out[:, 1], with_bias[:, 1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize(("alpha", "bad"), [(2.0, torch.nan), (2.0, torch.inf), (1e6, torch.nan)])
def test_a_nan_weight_spoils_its_own_head_only(impl, alpha, bad):
    q, k, value = problem(heads=2)
    clean = sparing.attention(q, k, value, method=spec(alpha), seed=0, impl=impl)
    value.weight[8, 5] = bad
    out = sparing.attention(q, k, value, method=spec(alpha), seed=0, impl=impl)
    assert torch.equal(out[:, 0], clean[:, 0])
    assert out[:, 1].isnan().any()


@pytest.mark.parametrize("setting", [*SETTINGS, *CHOICES])
@pytest.mark.parametrize("alpha", [0.5, 2.0, 1e6])
def test_both_paths_agree_with_a_zero_head_groups_and_a_mask(setting, alpha):
    q, k, value = problem(heads=6, kv_heads=3, batch=2, n_q=11)
    weight = value.weight * torch.tensor([0.0, 1.0, 1.0]).repeat_interleave(6)[:, None]
    mask = torch.rand(2, 6, 11, 16, generator=torch.Generator().manual_seed(0)) < 0.6
    mask[0, 2:4, :, 5] = mask[1, :, 3] = False  # a key that one head never sees, and a query that sees nothing
    results = []
    for impl in ("reference", "auto"):
        v = Projection(*(t.clone().requires_grad_() for t in (value.x, weight, value.bias)))
        out = sparing.attention(q, k, v, mask, enable_gqa=True, method=spec(alpha, setting), seed=0, impl=impl)
        weighting = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
        grads = torch.autograd.grad((out * weighting).sum(), v, allow_unused=True)  # "drop" may project nothing
        results.append([out.detach(), *(torch.zeros(()) if g is None else g for g in grads)])
    for found, wanted in zip(*reversed(results), strict=True):
        assert float((found - wanted).abs().max()) < 1e-10


def assert_padding_changes_no_count(side):
    q, k, value = problem(n=20, heads=2)
    keep = torch.arange(20) < 12 if side == "right" else torch.arange(20) >= 8
    q = q.masked_fill(~keep[:, None], 50.0)  # padded queries that stare at one key
    packed = sparing.inspect(q[:, :, keep], k[:, :, keep], value._replace(x=value.x[:, keep]), method=spec(2.0), seed=0)
    for mask in (keep.view(1, 1, 1, 20), keep.expand(1, 2, 20, 20).contiguous()):
        padded = sparing.inspect(q, k, value, mask, method=spec(2.0), seed=0)
        facts = padded.statistics
        assert torch.equal(facts["counts"][..., keep], packed.statistics["counts"]), "counts differ"
        assert bool((facts["counts"][..., ~keep] == 0).all())
        torch.testing.assert_close(padded.output[:, :, keep], packed.output, rtol=0, atol=1e-12)
        for name in ("rate", "bound"):
            torch.testing.assert_close(facts[name], packed.statistics[name], rtol=1e-12, atol=0)
        torch.testing.assert_close(facts["padded_rate"] / facts["rate"], torch.full((1, 2), 0.6).double())


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_count(side, monkeypatch):
    assert_padding_changes_no_count(side)
    with native.switched_off():
        assert_padding_changes_no_count(side)
    received = monte_carlo.received_weights
    broken = {
        (estimator, "sample_counts"): lambda m, tokens, *rest: sample_counts(
            m, torch.full_like(tokens, m.shape[-1]), *rest
        ),
        (monte_carlo, "received_weights"): lambda weights, heads, call, importance: received(
            weights, heads, call.with_mask(influence=None), importance
        ),
    }
    for place, function in broken.items():  # controls: published code counts padded tokens and padded queries
        with monkeypatch.context() as patch, native.switched_off():
            patch.setattr(*place, function)
            with pytest.raises(AssertionError, match="counts differ"):
                assert_padding_changes_no_count(side)


def test_counts_follow_the_largest_weight_of_the_group():
    q, k, value = problem(heads=6, kv_heads=2, n_q=5, batch=3)
    counts = sparing.inspect(q, k, value, enable_gqa=True, method=spec(2.0), seed=0).statistics["counts"]
    weights = (q @ k.repeat_interleave(3, 1).mT / math.sqrt(8)).softmax(-1)
    for b in range(3):
        for h in range(2):
            for j in range(16):
                top = float(weights[b, 3 * h : 3 * h + 3, :, j].max())
                assert counts[b, h, j] == min(48, math.ceil((16 * top / 2.0) ** 2))


def test_queries_that_count_can_be_named():
    q, k, value = problem(n=6)
    hidden = torch.ones(6, 6, dtype=torch.bool)
    hidden[:, 5] = False  # nobody sees key 5, so query 5 counts as padding; and only query 5 sees key 4
    hidden[:5, 4] = False
    method = spec(1.0)
    assert int(sparing.inspect(q, k, value, hidden, method=method, seed=0).statistics["counts"][0, 0, 4]) == 0
    everyone = torch.ones(1, 6, dtype=torch.bool)
    facts = sparing.inspect(q, k, value, hidden, method=method, seed=0, query_mask=everyone).statistics
    assert int(facts["counts"][0, 0, 4]) > 0


@pytest.mark.parametrize("estimator", ["drop", "mean"])
def test_baselines_keep_the_most_attended_tokens(estimator):
    q, k, value = problem(n=15, heads=2, batch=2)
    budget = sparing.inspect(q, k, value, method=spec(0.6), seed=0).statistics["counts"]
    found = sparing.inspect(q, k, value, method=spec(0.6, f", estimator={estimator}"), seed=0)
    facts, weights = found.statistics, (q @ k.mT / math.sqrt(8)).softmax(-1)
    center = value.x.mean(1) if estimator == "mean" else torch.zeros(2, 48, dtype=torch.float64)
    rows = value.project(2).clone()
    for b in range(2):
        for h in range(2):
            kept = int(budget[b, h].sum()) // 48
            assert 0 < kept < 15
            order = sorted(range(15), key=lambda j: -float(weights[b, h, :, j].max()))
            w = value.weight[6 * h : 6 * h + 6]
            rows[b, h, order[kept:]] = w @ center[b] + value.bias[6 * h : 6 * h + 6]
            assert facts["counts"][b, h].tolist() == [48 * (j in order[:kept]) for j in range(15)]
    torch.testing.assert_close(found.output, weights @ rows, rtol=0, atol=1e-12)
    errors = (found.output - exact(q, k, value)).norm(dim=-1)
    assert bool((errors <= facts["certificate"]).all())
    assert "bound" not in facts
    assert bool((facts["rate"] <= budget.double().mean(-1) / 48).all())
    assert torch.equal(
        found.output, sparing.attention(q, k, value, method=spec(0.6, f", estimator={estimator}"), seed=1)
    )


def test_calls_of_other_shapes_do_not_matter():
    small, large = problem(n=7, batch=2), problem(n=30, batch=3)
    before = sparing.attention(*small, method=spec(2.0), seed=0)
    sparing.attention(*large, method=spec(2.0), seed=0)
    assert torch.equal(sparing.attention(*small, method=spec(2.0), seed=0), before)


def test_no_features_leave_the_bias():
    q, k, value = problem(n=4)
    none = Projection(value.x[..., :0], value.weight[:, :0], value.bias)
    out = sparing.attention(q, k, none, method="monte_carlo", seed=0)
    torch.testing.assert_close(out, value.bias.expand_as(out))


def executed(q, k, value, method, impl, **kwargs):
    """FLOPs that a call runs: its matrix products, its bags of rows (2 e per sample), one exponential per logit."""

    def bags(table, indices, *_, **__):
        return 2 * indices[0] * table[1]

    names = torch.ops.aten._embedding_bag, torch.ops.aten._embedding_bag_forward_only
    counter = FlopCounterMode(display=False, custom_mapping=dict.fromkeys(names, bags))
    with counter, native.switched_off():  # the counter does not see into kernels
        sparing.attention(q, k, value, method=method, seed=0, impl=impl, **kwargs)
    return counter.get_total_flops() + q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]


def assert_cost_is_run(setting, alpha, impl="auto"):
    q, k, value = problem(n=40, d=64, e=16, heads=4, kv_heads=2, n_q=30, batch=2)
    keep = (torch.arange(40) < torch.tensor([[40], [25]]))[:, None, None]
    method = sparing.method(spec(alpha, setting))
    shape = Shape(batch=2, heads=4, kv_heads=2, queries=30, keys=40, head_dim=8, value_dim=16, in_features=64)
    for mask in (None, keep):
        facts = sparing.inspect(q, k, value, mask, enable_gqa=True, method=method, seed=0).statistics
        ran = executed(q, k, value, method, impl, attn_mask=mask, enable_gqa=True)
        said = method.cost(shape, facts).flops
        assert said == pytest.approx(ran, rel=0.01), f"{method}: cost() says {said:.4g}, {ran:.4g} are run"
    return facts


@pytest.mark.parametrize("setting", [*SETTINGS, *CHOICES, ", estimator=stratified, samples=shared"])
def test_cost_is_what_runs(setting):
    rates = [float(assert_cost_is_run(setting, alpha)["rate"].mean()) for alpha in (0.0, 0.5, 2.0, 5.0, 1e6)]
    assert rates[0] == 1
    assert rates == sorted(rates, reverse=True)
    assert 0.015 < rates[2] < 0.7
    with pytest.raises(AssertionError, match="are run"):  # control: the reference projects everything
        assert_cost_is_run(setting, 2.0, impl="reference")


def test_cost_follows_the_measured_rate():
    q, k, value = problem(heads=2)
    shape = Shape(heads=2, queries=16, keys=16, head_dim=8, value_dim=6, in_features=48)
    method = sparing.method(spec(2.0))
    facts = sparing.inspect(q, k, value, method=method, seed=0).statistics
    saved = method.cost(shape).flops - method.cost(shape, facts).flops
    assert saved == pytest.approx(2 * 6 * float((48 - facts["counts"]).sum()))
    assert saved > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": -0.1}, "alpha=-0.1"),
        ({"alpha": math.nan}, "alpha=nan"),
        ({"alpha": math.inf}, "alpha=inf"),
        ({"samples": "own"}, "samples='own'"),
        ({"estimator": "top"}, "estimator='top'"),
        ({"samples": "shared", "estimator": "drop"}, "samples='shared' with estimator='drop'"),
        ({"probabilities": "input", "estimator": "mean"}, "probabilities='input' with estimator='mean'"),
        ({"importance": "largest"}, "importance='largest'"),
        ({"probabilities": "uniform"}, "probabilities='uniform'"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        monte_carlo.MonteCarlo(**settings)


def test_a_causal_mask_is_refused_in_any_form():
    q, k, value = problem(n=9, heads=2)
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    additive = torch.zeros(9, 9).masked_fill(~causal, -torch.inf)
    window = causal & torch.ones(9, 9, dtype=torch.bool).triu(-2)
    left_padded = causal & (torch.arange(9) > 3)
    one_head = torch.stack([causal, torch.ones_like(causal)])[None]
    for mask in (causal, additive, window, left_padded, one_head):
        with pytest.raises(
            Unsupported, match=r"monte_carlo does not support a causal attn_mask .* pass is_causal=True"
        ):
            sparing.attention(q, k, value, mask, method="monte_carlo")
    with pytest.raises(Unsupported, match="causal attn_mask"):  # the last four queries of nine tokens
        sparing.attention(q[:, :, 5:], k, value, causal[5:], method="monte_carlo")
    for n_q in (2, 4):  # the first queries of nine tokens
        with pytest.raises(Unsupported, match="causal attn_mask"):
            sparing.attention(q[:, :, :n_q], k, value, causal[:n_q], method="monte_carlo")
    beside = sparing.attention(q, k, value, causal, is_causal=True, method="monte_carlo", seed=0)  # it says the same
    torch.testing.assert_close(beside, sparing.attention(q, k, value, is_causal=True, method="monte_carlo", seed=0))
    only_first = torch.zeros(9, 9, dtype=torch.bool)
    only_first[:, 0] = True  # padding, not causality
    for mask in (only_first, torch.ones(9, 9, dtype=torch.bool).triu(), ~torch.eye(9, dtype=torch.bool)):
        assert sparing.attention(q, k, value, mask, method="monte_carlo", seed=0).isfinite().all()
    for n_q in (1, 4):  # fewer queries than keys, masks that are not causal
        for mask in (only_first[:n_q], ~torch.eye(9, dtype=torch.bool)[:n_q], causal[:1].expand(n_q, 9)):
            assert sparing.attention(q[:, :, :n_q], k, value, mask, method="monte_carlo", seed=0).isfinite().all()


@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_a_prefix_mask_is_no_guarantee_against_looking_ahead(impl):
    """What the docstring warns of: a later query changes the sample counts, and so rows that cannot see it."""
    q, k, value = problem(n=9)
    prefix = torch.ones(9, 9, dtype=torch.bool).tril() | (torch.arange(9) < 4)
    other = q.clone()
    other[:, :, 8] = 30 * k[:, :, 2]  # the last query now stares at a token of the prefix
    method = spec(2.0)
    before, after = (sparing.inspect(x, k, value, prefix, method=method, seed=0, impl=impl) for x in (q, other))
    assert int(after.statistics["counts"][0, 0, 2]) > int(before.statistics["counts"][0, 0, 2])
    assert bool(((after.output - before.output)[:, :, :4].abs() > 1e-3).any())
    same = (sparing.attention(x, k, value, prefix, method=spec(0.0), impl=impl)[:, :, :8] for x in (q, other))
    assert torch.equal(*same)  # with all samples only the weights matter, and those respect the mask


def test_the_statistics_of_a_head_are_those_of_the_head_alone():
    """Counts, certificate and bound belong to one key-value head: its own weight, the queries of its own group."""
    x = make(sparing.method("monte_carlo"), heads=4, kv_heads=2, n_q=20, dtype=torch.float64)
    keep = keys_mask(padding("right", 2, 20))
    whole = sparing.inspect(
        x.q, x.k, x.value, keep, enable_gqa=True, method="monte_carlo(alpha=2.0)", seed=0
    ).statistics
    for g in range(2):
        weight, bias = (t.unflatten(0, (2, -1))[g] for t in x.value[1:])
        part = sparing.inspect(
            x.q[:, 2 * g : 2 * g + 2], x.k[:, g : g + 1], sparing.Projection(x.value.x, weight, bias), keep,
            enable_gqa=True, method="monte_carlo(alpha=2.0)", seed=0, streams=[g],
        ).statistics  # fmt: skip
        for name, heads in (("counts", 1), ("bound", 1), ("rate", 1), ("certificate", 2)):
            torch.testing.assert_close(whole[name][:, heads * g : heads * (g + 1)], part[name], msg=name)
    # Over heads, squares add: the bounds of the heads make up that of the concatenated row, with the whole weight.
    beta = (x.value.x.norm(dim=-1) * keep[:, 0, 0]).sum(-1) / keep[:, 0, 0].sum(-1)
    torch.testing.assert_close(whole["bound"].square().sum(-1).sqrt(), 2.0 * beta * x.value.weight.norm())
