"""KeyClusters attention: one formula, and the cases in which it is exact."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import sparing
from sparing.call import Call
from sparing.draws import Draws
from sparing.mask import Mask
from sparing.methods.key_clusters.method import KeyClusters
from sparing.methods.key_clusters.poles import BLOCKS, Plan
from tests.support.inputs import Inputs, exact_for, keys_mask, make, padding, relative

IMPLS = pytest.mark.parametrize("impl", ["reference", "auto"])
CAUSAL = pytest.mark.parametrize("causal", [False, True])


def inside(m: KeyClusters, x: Inputs, **kwargs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output, log-sum-exp, error bar, keys touched, and whether it claims to be exact."""
    found = sparing.inspect(x.q, x.k, x.value, method=m, seed=0, **kwargs)
    return found.output, found.lse, *(found.statistics[name] for name in ("error", "touched", "exact"))


def agrees(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


def planned(m: KeyClusters, x: Inputs, causal: bool = False) -> Plan:
    draws = Draws(0, torch.arange(x.q.shape[1]))
    scale = 1 / math.sqrt(x.q.shape[-1])
    return m.plan(x.q, x.k, Call(scale=scale, mask=Mask(causal=causal), draws=draws))


def leaning(n: int, n_k: int | None = None, sharpness: float = 1.5, seed: int = 0) -> Inputs:
    """Queries whose mean is far from zero, as in trained layers."""
    x = make(KeyClusters(), batch=1, n_q=n, n_k=n_k, dtype=torch.float64, sharpness=sharpness, seed=seed)
    return replace(x, q=x.q + torch.linspace(-1, 2, 8, dtype=torch.float64))


CALLS = {
    "encoder": {},
    "causal": {"is_causal": True},
    "shared heads": {"enable_gqa": True},
    "left": {"attn_mask": keys_mask(padding("left", 2, 40))},
    "right, causal": {"attn_mask": keys_mask(padding("right", 2, 40)), "is_causal": True},
    "holes": {"attn_mask": keys_mask(padding("holes", 2, 40))},
    "left, causal": {"attn_mask": keys_mask(padding("left", 2, 40)), "is_causal": True},
    "few queries": {},
    "many queries, causal": {"is_causal": True},
}


def exactly(m: KeyClusters, name: str, impl: str) -> None:
    """The call gives softmax attention, and its statistics say so."""
    n_q = {"few": 23, "many": 61}.get(name.split()[0], 40)
    heads, kv_heads = (4, 2) if name == "shared heads" else (2, 2)
    x = make(m, n_q=n_q, n_k=40, heads=heads, kv_heads=kv_heads, dtype=torch.float64, sharpness=3.0)
    out, lse, error, touched, exact = inside(m, x, impl=impl, **CALLS[name])
    wanted = sparing.inspect(x.q, x.k, x.value, method="exact", impl="reference", **CALLS[name])
    agrees(out, wanted.output)
    agrees(lse, wanted.lse)
    visible = torch.ones(2, heads, n_q, 40, dtype=torch.bool) & CALLS[name].get("attn_mask", torch.tensor(True))
    visible = visible.tril() if "is_causal" in CALLS[name] else visible
    assert torch.equal(touched, visible.sum(-1))
    assert bool(exact.all()) or not m.keys, "read through summaries, each of one key"
    assert float(error.max()) < (1e-300 if m.keys else 1e-12)


@IMPLS
@pytest.mark.parametrize(("keys", "window"), [(0, 8), (0, 6), (1, 4)])
def test_no_row_claims_more_than_it_is(keys, window, impl):
    """A cluster of which one member is left counts as one key and as a summary."""
    x = make(sparing.method("exact"), n_q=6, dtype=torch.float64, sharpness=3.0)
    m = KeyClusters(clusters=2, keys=keys, window=window, sinks=0)
    out, *_, exact = inside(m, x, impl=impl)
    wrong = (out - exact_for(x)).abs().amax(-1) > 1e-6
    assert bool(wrong.any()), "else nothing is tested"
    assert not bool((exact & wrong).any())


@IMPLS
@pytest.mark.parametrize("name", CALLS)
def test_all_clusters_expanded_are_exact(name, impl):
    for m in (KeyClusters(keys=40, chunk=8), KeyClusters(clusters=3, keys=500, window=0, sinks=0, chunk=16, order=1)):
        exactly(m, name, impl)
    with pytest.raises(AssertionError):  # control: not all of them fit
        exactly(KeyClusters(clusters=3, keys=9, window=0, sinks=0, chunk=16), name, impl)


@IMPLS
@pytest.mark.parametrize("name", CALLS)
def test_a_cluster_for_every_key_is_exact(name, impl):
    for clusters in (40, 1000):  # more clusters than keys are no error
        for order in (1, 2):
            exactly(KeyClusters(clusters=clusters, keys=0, window=0, sinks=0, chunk=16, order=order), name, impl)


@CAUSAL
def test_equal_keys_need_no_expansion(causal):
    m = KeyClusters(clusters=8, keys=0, window=0, sinks=0, chunk=32)
    n, size = (75, 4) if causal else (64, 8)  # a start of k-means falls into every run of equal keys
    x = make(m, n_q=n, dtype=torch.float64, sharpness=3.0)
    equal = replace(x, k=x.k[:, :, torch.arange(n) // size * size])
    out, lse, error, touched, _ = inside(m, equal, is_causal=causal)
    agrees(out, exact_for(equal, is_causal=causal))
    agrees(lse, sparing.inspect(equal.q, equal.k, equal.value, is_causal=causal).lse)
    assert float(error.max()) < 1e-10
    assert int(touched.max()) <= 8 * (3 if causal else 1) + 8
    almost = replace(equal, k=equal.k + 0.3 * x.k)  # control
    with pytest.raises(AssertionError):
        agrees(inside(m, almost, is_causal=causal)[0], exact_for(almost, is_causal=causal))


@CAUSAL
def test_what_is_not_worth_a_key_is_read_when_all_keys_fit(causal):
    x = leaning(40)
    x = replace(x, q=torch.zeros_like(x.q))  # tells no keys apart: summaries are right, and predicted to be
    seen = torch.arange(1, 41) if causal else torch.full((40,), 40)
    few, all_keys = (
        inside(KeyClusters(clusters=3, keys=keys, window=0, chunk=16), x, is_causal=causal) for keys in (9, 40)
    )
    for out, _, error, _, _ in (few, all_keys):
        agrees(out, exact_for(x, is_causal=causal))
        assert not error.any()
    assert bool((all_keys[3] == seen).all())
    assert bool(all_keys[4].all())
    assert int(few[3].max()) < 20
    assert not bool(few[4][..., -1].any()), "right, but not every key was read"


class AroundZero(KeyClusters):
    """Broken: summaries expanded around q = 0, with plain means."""

    def plan(self, *args) -> Plan:
        plan = super().plan(*args)
        nowhere = [level.known._replace(mean=torch.zeros_like(level.known.mean)) for level in plan.levels]
        levels = (level._replace(known=known) for level, known in zip(plan.levels, nowhere))
        return replace(plan, levels=tuple(levels))


@CAUSAL
@pytest.mark.parametrize("order", [1, 2])
def test_summaries_are_exact_for_the_mean_query(order, causal):
    knobs = {"clusters": 4, "keys": 0, "window": 0, "sinks": 0, "chunk": 16, "order": order}
    x = leaning(60)
    x = replace(x, q=0.4 * x.q[:, :, :1].expand_as(x.q))
    out, _, error, touched, _ = inside(KeyClusters(**knobs), x, is_causal=causal)
    wanted = exact_for(x, is_causal=causal)
    agrees(out, wanted)
    assert float(error.max()) < 1e-6
    assert int(touched.max()) < 30
    assert relative(inside(AroundZero(**knobs), x, is_causal=causal)[0], wanted) > 0.05
    # Beyond a factor of e^8 to the heaviest member of its cluster, a member weighs too much rather than nothing.
    far = replace(x, q=10 * x.q)
    more = (
        inside(KeyClusters(**knobs), far, is_causal=causal)[1]
        - sparing.inspect(far.q, far.k, far.value, is_causal=causal).lse
    )
    assert -1e-10 < float(more.min()) < 1e-6 < float(more.max()) < math.log1p(60 * math.exp(-8.0))


def formula(
    m: KeyClusters,
    x: Inputs,
    causal: bool,
    twice: bool = False,
    tolerance: float | None = None,
    all_count: bool = False,
):
    """Output, log-sum-exp, error bar and keys touched as the docstring says, by loops over queries and clusters.

    twice: broken, a member that is exact counts in its cluster's summary too. tolerance: instead of that of m.
    all_count: broken, light summaries count.
    """
    tolerance = m.tolerance if tolerance is None else tolerance
    levels, block, scale = planned(m, x, causal).levels, m.chunk // BLOCKS, 1 / math.sqrt(x.q.shape[-1])
    n_q, n_k = x.n_q, x.n_k

    def told(q: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Mean and covariance of the queries before `end`; causal: each block counts less than the next."""
        w = 2.0 ** (-(end // block - 1 - torch.arange(end) // block).double() / BLOCKS * causal)
        away = q[:end] - (mean := w @ q[:end] / w.sum())
        return mean, away.mT * w @ away / w.sum()

    rows = []
    for h in range(x.q.shape[1]):
        q, k, v = x.q[0, h], x.k[0, h], x.value[0, h]
        for i in range(n_q):
            half = m.window if causal else m.window // 2 if n_q == n_k else -1
            exact = {j for j in range(n_k) if j < m.sinks or i - half <= j <= (i if causal else i + half)}
            exact |= set(range(i // block * block, i + 1) if causal else range(n_k - m.sinks, n_k))
            clusters: dict[tuple[int, int], list[int]] = {}
            for j in range(i // block * block if causal else n_k):
                level = min(i // m.chunk - j // m.chunk, 2) if causal else 0
                if (label := int(levels[level].labels[0, h, j])) >= 0:
                    clusters.setdefault((level, label), []).append(j)
            mean, covariance = told(q, max(i // block, 1) * block if causal else n_q)
            alarm = (q[i] - mean).square().sum() / covariance.trace()
            found = []  # of each cluster: members, worth, squared error, logits
            near = [j for j in exact if j <= i or not causal]
            total, scatter = (scale * k[near] @ q[i]).exp().sum(), q.new_zeros(())
            for (level, _), members in clusters.items():
                # The last complete chunk knows the queries up to its end, those before it up to the end of the next.
                end = (members[0] // levels[level].size + max(level, 1)) * levels[level].size if causal else n_q
                (q0, covariance), keys, values = told(q, end), k[members], v[members]
                w = (scale * keys @ q0).softmax(0)
                away = keys - w @ keys
                variance = scale**2 * w @ (away @ covariance * away).sum(-1)
                believed = min(float(variance * alarm), m.cap)
                logits = scale * (q[i] @ (w @ keys) + away @ q0) + (believed / 2 if m.order == 2 else 0.0)
                left = [r for r, j in enumerate(members) if j not in exact]
                mass = logits[left].exp().sum() ** 2
                error = mass * math.expm1(believed) * (w @ (values - w @ values).square().sum(-1))
                worth = (error if m.select == "error" else mass) / max(len(left), 1)
                found.append(([members[r] for r in left], worth, error, logits, members))
                total += logits[left].exp().sum()
                scatter += w @ (values - w @ values).square().sum(-1) * len(members)
            usual = scatter / max(sum(map(len, clusters.values())), 1) if m.select == "error" else 1.0
            least = (tolerance * total) ** 2 * usual
            budget, expanded = m.keys, set()
            while fits := [c for c, (left, worth, *_) in enumerate(found)
                           if c not in expanded and 0 < len(left) <= budget and worth > least]:  # fmt: skip
                best = max(fits, key=lambda c: found[c][1])
                expanded.add(best)
                budget -= len(found[best][0])
            # Light summaries are left out.
            share = 0.0 if all_count else min(tolerance, 1 / max(len(found), 1)) / 16
            light = {c for c, (left, *_, logits, members) in enumerate(found) if c not in expanded
                     and logits[[members.index(j) for j in left]].exp().sum() < share * total}  # fmt: skip
            exact = {j for j in exact if j <= i or not causal} | {j for c in expanded for j in found[c][0]}
            spared = [(j, logit) for c, (*_, logits, members) in enumerate(found) if c not in expanded | light
                      for j, logit in zip(members, logits) if twice or j not in exact]  # fmt: skip
            looked = sorted(exact)
            every = torch.cat(
                [scale * k[looked] @ q[i], torch.stack([x for _, x in spared]) if spared else q.new_empty(0)]
            )
            lse = every.logsumexp(0)
            rest = sum(found[c][2] for c in range(len(found)) if c not in expanded and found[c][0])
            summaries = sum(bool(found[c][0]) for c in range(len(found)) if c not in expanded)
            out = (every - lse).exp() @ v[looked + [j for j, _ in spared]]
            rows.append((out, lse, torch.as_tensor(rest).sqrt() / lse.exp(), torch.tensor(len(looked) + summaries)))
    return tuple(torch.stack(part).unflatten(0, (1, -1, n_q)) for part in zip(*rows))


@CAUSAL
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("select", ["error", "mass"])
def test_one_formula(select, order, causal):
    m = KeyClusters(clusters=6, keys=7, window=4, sinks=1, chunk=24, order=order, select=select, cap=0.5)
    x = leaning(54)
    found = inside(m, x, is_causal=causal)
    for ours, wanted in zip(found, formula(m, x, causal)):
        agrees(ours, wanted.to(ours.dtype))
    with pytest.raises(AssertionError):  # control
        agrees(found[0], formula(m, x, causal, twice=True)[0])


@CAUSAL
@IMPLS
@pytest.mark.parametrize("select", ["error", "mass"])
def test_a_tolerance_leaves_to_summaries_what_they_serve_well(select, impl, causal):
    m = KeyClusters(clusters=6, keys=30, window=4, sinks=1, chunk=24, select=select, tolerance=0.03)
    x = leaning(54)
    found = inside(m, x, is_causal=causal, impl=impl)
    for ours, wanted in zip(found, formula(m, x, causal)):
        agrees(ours, wanted.to(ours.dtype))
    assert int(found[3].amin(-1).min()) < int(found[3].amax(-1).max()) - 10, "queries read as much as they need"
    if impl == "auto":  # control
        for other in (0.0, 0.033):
            with pytest.raises(AssertionError):
                agrees(found[0], formula(m, x, causal, tolerance=other)[0])
        with pytest.raises(AssertionError):
            agrees(found[0], formula(m, x, causal, all_count=True)[0])


@CAUSAL
def test_a_smaller_tolerance_reads_more_and_errs_less(causal):
    x = leaning(200, sharpness=3.0)
    wanted = exact_for(x, is_causal=causal)
    rows = [
        inside(KeyClusters(clusters=16, keys=200, cap=8.0, chunk=64, tolerance=t), x, is_causal=causal)
        for t in (1.0, 0.1, 0.01, 1e-6)
    ]
    touched = [float(found[3].double().mean()) for found in rows]
    errors = [relative(found[0], wanted) for found in rows]
    assert touched == sorted(set(touched))
    assert errors == sorted(set(errors), reverse=True)
    assert errors[-1] < 1e-4 < 0.02 < errors[0]


@CAUSAL
@IMPLS
def test_all_keys_are_read_by_the_full_budget_only(causal, impl):
    """`keys` is a maximum beside a tolerance."""
    m = KeyClusters(clusters=6, keys=100, chunk=24, tolerance=0.5)
    x = leaning(54)
    assert not bool(inside(m, x, is_causal=causal, impl=impl)[4].all())
    assert relative(sparing.attention(x.q, x.k, x.value, method=m, seed=0, is_causal=causal, impl=impl),
                    exact_for(x, is_causal=causal)) > 1e-3  # fmt: skip
