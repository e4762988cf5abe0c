"""The oracles `top_keys` and `value_aware` and their mathematics, on instances that are hard for a greedy choice."""

import math

import pytest
import torch
from scipy.optimize import nnls

import sparing
from sparing.oracles import caratheodory, convex, ova_objective, rows, value_aware
from sparing.oracles.nearest import largest
from tests.support.convex_combinations import F64, KINDS, error, instance, scale, top


def assert_bound(found, weights, values, r):
    """|x_r|^2 <= Var / r."""
    allowed = (weights * ova_objective(weights, values)).sum(-1) / r + 1e-24 * scale(weights, values)
    assert bool((error(found, weights, values) <= allowed * (1 + 1e-9)).all())


def test_worked_example_of_the_paper():
    alpha, v = torch.tensor([0.25, 0.35, 0.40]), torch.diag(torch.tensor([1.0, 2.0, 3.0]))
    objective = ova_objective(alpha, v)
    assert torch.allclose(objective, torch.tensor([2.4925, 3.1925, 3.7925], dtype=F64), atol=1e-6)
    assert objective.argsort().tolist() == [0, 1, 2]  # the exact reverse of the weights' order
    assert value_aware(alpha, v, 1)[0].item() == 0
    assert largest(alpha, 1).tolist() == [False, False, True]
    assert (alpha * v.norm(dim=-1)).argmax().item() == 2  # norms alone do not repair it
    v[2, 2] = 1e6  # the error of the largest weight is unbounded, that of the nearest value is the optimum
    objective = ova_objective(alpha, v)
    assert value_aware(alpha, v, 1)[0].item() == objective.argmin().item() == 0
    assert objective[2] > 2 * objective[0]


@pytest.mark.parametrize("kind", KINDS)
def test_one_key_is_the_nearest_value(kind):
    weights, values = instance(kind, 5)
    o = weights @ values
    brute = torch.stack([(o - value).square().sum(-1) for value in values], dim=-1)
    rounding = 1e-14 * scale(weights, values).sqrt().max()  # of o
    assert torch.allclose(ova_objective(weights, values).sqrt(), brute.sqrt(), rtol=1e-12, atol=float(rounding))
    found = value_aware(weights, values, 1)
    best = brute.masked_fill(weights == 0, torch.inf).amin(-1)
    assert torch.allclose(error(found, weights, values).sqrt(), best.sqrt(), rtol=1e-9, atol=float(rounding))
    # Equation 3 of the paper, which needs no o: |v_i|^2 (1/2 - alpha_i) - sum_{j != i} alpha_j <v_i, v_j>.
    gram = values @ values.T
    formula = gram.diagonal() * (0.5 - weights) - (weights @ gram - weights * gram.diagonal())
    expanded = 2 * formula + o.square().sum(-1, keepdim=True)
    assert torch.allclose(expanded, brute, rtol=1e-9, atol=1e-13 * float(values.square().sum(-1).max()))


def test_orthogonal_values_make_both_oracles_agree():
    gen = torch.Generator().manual_seed(3)
    basis = torch.linalg.qr(torch.randn(12, 12, generator=gen, dtype=F64)).Q
    weights = (3 * torch.randn(200, 12, generator=gen, dtype=F64)).softmax(-1)
    assert torch.equal(value_aware(weights, basis, 1)[0].squeeze(-1), weights.argmax(-1))  # equal norms
    stretched = basis * torch.rand(12, 1, generator=gen, dtype=F64).add(0.1)
    heavy = weights[weights.amax(-1) >= 0.5]
    assert len(heavy) > 50
    assert torch.equal(value_aware(heavy, stretched, 1)[0].squeeze(-1), heavy.argmax(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_error_obeys_the_bound_for_every_number_of_keys(kind):
    for e in (1, 5, 12):
        weights, values = instance(kind, e)
        before = torch.full(weights.shape[:1], torch.inf, dtype=F64)
        # Where values nearly coincide, the weights on them are ill-conditioned: errors of 3e-8 of the values are noise.
        slack = 1e-15 * scale(weights, values)
        for r in range(1, e + 2):
            found = value_aware(weights, values, r)
            assert found[0].shape == found[1].shape == (24, r)
            assert_bound(found, weights, values, r)
            assert_bound(value_aware(weights, values, r, corrective=False), weights, values, r)
            now = error(found, weights, values)
            assert bool((now <= error(top(weights, r), weights, values) + slack).all()), f"e={e}, r={r}: OVO is better"
            assert bool((now <= before * (1 + 1e-6) + slack).all()), f"e={e}, r={r}: one key more is worse"
            before = now


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_bound_on_many_instances(seed):
    for kind in KINDS:
        for e, r in ((3, 2), (8, 4), (24, 12)):
            weights, values = instance(kind, e, queries=100, n=120, seed=seed)
            for corrective in (True, False):
                assert_bound(value_aware(weights, values, r, corrective=corrective), weights, values, r)


@pytest.mark.parametrize("broken", ["value-oblivious", "by weight times norm"])
def test_control_other_selections_break_the_bound(broken):
    weights, values = instance("one huge value", 6)
    weights = torch.full_like(weights, 1 / 60)
    weights[:, 5] += 1e-6  # the largest weight has the huge value
    weights /= weights.sum(-1, keepdim=True)
    scores = None if broken == "value-oblivious" else weights * values.norm(dim=-1)
    for r in (1, 2, 4, 8):
        with pytest.raises(AssertionError):
            assert_bound(top(weights, r, scores), weights, values, r)


def test_value_aware_is_far_ahead_of_top_keys():
    weights, values = instance("log-normal", 32, n=256)
    for r, factor in ((1, 5), (4, 8), (8, 12), (16, 40)):
        ahead = (
            error(top(weights, r), weights, values).mean()
            / error(value_aware(weights, values, r), weights, values).mean()
        )
        assert ahead > factor, f"OVA-{r} is only {ahead:.1f} times closer than OVO-{r}"


def test_error_of_top_keys_can_grow_with_the_keys():
    weights, values = torch.tensor([0.4, 0.3, 0.3], dtype=F64), torch.tensor([[0.0], [1.0], [-1.0]], dtype=F64)
    assert error(top(weights, 1), weights, values) < error(top(weights, 2), weights, values)


def exact_pairs(weights, values):
    """OVA-2 by trying every segment: squared error (Q,)."""
    u = values - (weights @ values).unsqueeze(1)
    gram = u @ u.mT
    near = gram.diagonal(dim1=1, dim2=2)
    length = near.unsqueeze(2) + near.unsqueeze(1) - 2 * gram
    slope = near.unsqueeze(2) - gram
    share = (slope / length.clamp_min(1e-300)).clamp(0, 1)
    return (near.unsqueeze(2) - 2 * share * slope + share.square() * length).flatten(1).amin(-1)


def test_two_keys_against_every_segment():
    ratios = []
    for seed in range(8):
        weights, values = instance("log-normal", 6, n=40, seed=seed)
        best = exact_pairs(weights, values)
        found = error(value_aware(weights, values, 2), weights, values)
        oblivious = error(top(weights, 2), weights, values)
        assert bool((best <= found * (1 + 1e-9)).all())
        assert bool((best <= oblivious * (1 + 1e-9)).all())
        ratios.append(found / best)
    ratio = torch.cat(ratios)
    assert (ratio < 1 + 1e-6).double().mean() > 0.25, "greedy pairs are the optimum in a good part of the cases"
    assert ratio.median() < 2


@pytest.mark.parametrize("kind", ["random", "peaked", "log-normal", "sphere"])
def test_weights_are_the_best_on_their_support(kind):
    weights, values = instance(kind, 12, queries=8)
    indices, held = value_aware(weights, values, 5)
    found = error((indices, held), weights, values)
    for q in range(8):
        u = (values[indices[q]] - weights[q] @ values).T.numpy()
        rows_ = torch.cat([torch.from_numpy(u), 1e4 * torch.ones(1, 5, dtype=F64)]).numpy()
        best, _ = nnls(rows_, [0.0] * 12 + [1e4])
        best = torch.from_numpy(best / best.sum())
        assert found[q] <= (torch.from_numpy(u) @ best).square().sum() * (1 + 1e-5) + 1e-20


def test_invisible_keys_are_never_used():
    gen = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 1, 1, 20, 8, generator=gen, dtype=F64)
    keep = torch.arange(20) < 15
    mask = keep & (torch.rand(1, 1, 20, 20, generator=gen) < 0.6)
    mask[..., 4, :] = False
    clean = sparing.attention(q, k, v, mask)
    baited = v.clone()
    baited[..., 19, :] = clean[..., 7, :]  # exactly the output of query 7, behind the mask
    for keys in (1, 3, 9, 30):
        for corrective in (True, False):
            spec = f"value_aware(keys={keys}, corrective={corrective})"
            notes = sparing.inspect(q, k, baited, mask, method=spec).statistics
            used = torch.zeros(1, 1, 20, 20, dtype=F64).scatter_add(-1, notes["indices"], notes["weights"])
            assert bool((used[~mask] == 0).all())
            totals = used.sum(-1)[0, 0]
            assert totals[4] == 0  # sees nothing
            assert torch.allclose(totals[torch.arange(20) != 4], torch.ones(19, dtype=F64))
    weights = torch.zeros(20, dtype=F64).index_fill(0, torch.arange(10), 0.1)
    bait = torch.cat([v[0, 0, :19], (weights @ v[0, 0])[None]])
    assert value_aware(weights, bait, 1)[0].item() < 10
    assert value_aware(weights, bait, 1, allowed=torch.ones(20, dtype=torch.bool))[0].item() == 19


def test_a_visible_key_may_be_used_though_its_weight_underflows():
    q, k = torch.ones(1, 1, 1, 1, dtype=F64), torch.tensor([0.0, 0.0, -5000.0], dtype=F64).view(1, 1, 3, 1)
    v = torch.tensor([[-1.0], [1.0], [0.0]], dtype=F64).view(1, 1, 3, 1)
    found = sparing.inspect(q, k, v, method="value_aware(keys=1)")
    assert found.statistics["indices"].item() == 2
    assert found.output.item() == 0


def test_ties_go_to_the_lower_index():
    q, k = torch.ones(1, 1, 1, 4), torch.ones(1, 1, 6, 4)
    k[..., 4, :] = 2.0  # one winner, five equals
    for keys, wanted in ((1, [4]), (2, [0, 4]), (4, [0, 1, 2, 4])):
        out = sparing.attention(q, k, torch.eye(6)[None, None], method=f"top_keys(keys={keys})")
        assert out.flatten().nonzero().flatten().tolist() == wanted
    gen = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 5, (50, 40), generator=gen).double()
    scores[scores == 0] = -torch.inf
    for keys in (1, 3, 17, 39, 40, 99):
        order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :keys]
        assert torch.equal(largest(scores, keys), torch.zeros_like(scores).scatter(-1, order, 1.0) > 0)
    twins = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-2.0, 0.0]], dtype=F64)
    assert value_aware(torch.tensor([0.4, 0.4, 0.2], dtype=F64), twins, 1)[0].item() == 0


def test_top_keys_renormalises_and_reports_its_mass():
    gen = torch.Generator().manual_seed(2)
    q, k, v = torch.randn(3, 1, 2, 30, 8, generator=gen, dtype=F64)
    logits = q @ k.mT / math.sqrt(8)
    best = logits.topk(5)
    chosen = (best.values.softmax(-1).unsqueeze(-2) @ v.unsqueeze(2).expand(-1, -1, 30, -1, -1).gather(
        3, best.indices.unsqueeze(-1).expand(-1, -1, -1, -1, 8))).squeeze(-2)  # fmt: skip
    found = sparing.inspect(q, k, v, method="top_keys(keys=5)")
    assert torch.allclose(found.output, chosen, atol=1e-12)
    assert torch.allclose(found.lse, best.values.logsumexp(-1), atol=1e-12)
    assert torch.allclose(found.statistics["mass"], logits.softmax(-1).gather(-1, best.indices).sum(-1), atol=1e-12)


def test_shared_and_separate_values_agree_and_axes_broadcast():
    weights, values = instance("log-normal", 6)
    stacked = weights.view(2, 3, 4, 60)
    shared = value_aware(stacked, values.expand(2, 3, 1, 60, 6), 4)
    for other in (values, values.expand(24, 60, 6).reshape(2, 3, 4, 60, 6)):
        for a, b in zip(shared, value_aware(stacked, other, 4), strict=True):
            assert a.shape == (2, 3, 4, 4)
            assert torch.allclose(a.double(), b.double(), atol=1e-9)
    assert ova_objective(stacked, values).shape == (2, 3, 4, 60)
    assert value_aware(weights[0], values, 4)[0].shape == (4,)
    assert value_aware(weights[:0], values, 4)[0].shape == (0, 4)
    assert ova_objective(weights[:0], values).shape == (0, 60)


def test_blocks_do_not_change_the_result(monkeypatch):
    gen = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 25, 6, generator=gen, dtype=F64)
    mask = torch.randn(2, 1, 25, 25, generator=gen, dtype=F64).masked_fill(
        torch.rand(25, 25, generator=gen) < 0.2, -torch.inf
    )
    specs = ("top_keys(keys=4)", "value_aware(keys=4)", "sampled(samples=8, proposal=value_norm)")
    masks = ({}, {"is_causal": True}, {"attn_mask": mask}, {"attn_mask": torch.arange(25).expand(2, 1, 1, 25) < 20})
    wanted = [sparing.attention(q, k, v, method=spec, seed=1, **kwargs) for spec in specs for kwargs in masks]
    monkeypatch.setattr(rows, "_PAIRS", 700)
    monkeypatch.setattr(convex, "_BLOCK", 200)
    found = [sparing.attention(q, k, v, method=spec, seed=1, **kwargs) for spec in specs for kwargs in masks]
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a, b, atol=1e-9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": 0}, "keys=0"),
        ({"weights": torch.tensor([0.5, 0.7, -0.2])}, "non-negative"),
        ({"weights": torch.tensor([0.5, 0.7, 0.9])}, "sum to one"),
        ({"weights": torch.tensor([0.5, 0.5, torch.nan])}, "non-negative"),
        ({"weights": torch.tensor([0.5, 0.5])}, r"weights \[2\] and values \[3, 2\]"),
        ({"weights": torch.full((2, 3), 1 / 3), "values": torch.zeros(4, 3, 2)}, "do not broadcast"),
        ({"values": torch.full((3, 2), torch.inf)}, "values must be finite"),
        ({"allowed": torch.tensor([True, False, True])}, "allowed is False"),
    ],
)
def test_functions_refuse_bad_input(change, message):
    call = {"weights": torch.tensor([0.2, 0.3, 0.5]), "values": torch.randn(3, 2), "keys": 2, **change}
    with pytest.raises(ValueError, match=message):
        value_aware(**call)


@pytest.mark.parametrize("function", [ova_objective, caratheodory, lambda w, v: value_aware(w, v, 2)])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weights": [0.2, 0.8]}, TypeError, "weights must be a torch.Tensor, got list"),
        ({"values": [[0.0], [1.0]]}, TypeError, "values must be a torch.Tensor, got list"),
        ({"weights": None}, TypeError, "weights must be a torch.Tensor, got NoneType"),
        ({"weights": torch.tensor([0, 0, 1])}, TypeError, "weights has dtype torch.int64"),
        ({"values": torch.zeros(3, 2, dtype=torch.complex64)}, TypeError, "values has dtype torch.complex64"),
        ({"weights": torch.tensor(1.0)}, ValueError, r"weights \[\] and values \[3, 2\]"),
        ({"values": torch.tensor(1.0)}, ValueError, r"weights \[3\] and values \[\]"),
        ({"values": torch.zeros(3)}, ValueError, r"weights \[3\] and values \[3\]"),
        ({"weights": torch.zeros(0), "values": torch.zeros(0, 2)}, ValueError, r"n, e >= 1, got weights \[0\]"),
        ({"values": torch.zeros(3, 0)}, ValueError, r"n, e >= 1, got .* values \[3, 0\]"),
    ],
)
def test_every_function_refuses_what_are_no_weights_and_values(function, change, error, message):
    call = {"weights": torch.tensor([0.2, 0.3, 0.5]), "values": torch.randn(3, 2), **change}
    with pytest.raises(error, match=message):
        function(call["weights"], call["values"])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"keys": True}, TypeError, "keys=True must be of type int"),
        ({"keys": 2.0}, TypeError, r"keys=2\.0 must be of type int"),
        ({"keys": "2"}, TypeError, "keys='2' must be of type int"),
        ({"keys": -1}, ValueError, "keys=-1 must be at least 1"),
        ({"corrective": 1}, TypeError, "corrective=1 must be of type bool"),
        ({"allowed": [True] * 3}, TypeError, "allowed must be a boolean tensor .* got list"),
        ({"allowed": torch.ones(3)}, TypeError, "allowed must be a boolean tensor .* got torch.float32"),
        ({"allowed": torch.ones(2, dtype=torch.bool)}, ValueError, r"allowed \[2\] does not broadcast to \[3\]"),
        ({"allowed": torch.ones(4, 3, dtype=torch.bool)}, ValueError, r"allowed \[4, 3\] does not broadcast to \[3\]"),
    ],
)
def test_value_aware_refuses_bad_settings(change, error, message):
    call = {"weights": torch.tensor([0.2, 0.3, 0.5]), "values": torch.randn(3, 2), "keys": 2, **change}
    with pytest.raises(error, match=message):
        value_aware(**call)


def ahead_of_top_keys(corrective):
    q, k, v = torch.randn(3, 2, 2, 60, 16, dtype=F64, generator=torch.Generator().manual_seed(0)).unbind(0)
    exact = sparing.attention(3 * q, k, v)
    specs = f"value_aware(keys=8, corrective={corrective})", "top_keys(keys=8)"
    ours, theirs = ((sparing.attention(3 * q, k, v, method=spec) - exact).norm(dim=-1) for spec in specs)
    return bool((ours <= theirs + 1e-9).all())


def test_only_corrective_steps_are_never_behind_top_keys():
    assert ahead_of_top_keys(corrective=True)
    assert not ahead_of_top_keys(corrective=False)


@pytest.mark.parametrize("spec", ["top_keys(keys=0)", "value_aware(keys=-1)", "sampled(samples=0)"])
def test_budgets_start_at_one(spec):
    with pytest.raises(ValueError, match=spec.split("(")[1].rstrip(")") + " must be at least 1"):
        sparing.method(spec)


def test_oracles_are_marked():
    assert all(sparing.method(name).oracle for name in ("top_keys", "value_aware", "sampled"))
    assert not sparing.method("exact").oracle
