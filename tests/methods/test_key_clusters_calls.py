"""KeyClusters attention as users call it: growing sequences, padding, gradients, refusals."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import sparing
from sparing.call import Call
from sparing.draws import Draws
from sparing.mask import Mask
from sparing.maths.packing import place_of_rank
from sparing.methods.key_clusters import method as module
from sparing.methods.key_clusters import poles
from sparing.methods.key_clusters.clusters import Sums, sums
from sparing.methods.key_clusters.method import KeyClusters, expand
from sparing.methods.key_clusters.poles import Plan
from tests.support.inputs import Inputs, keys_mask, make, padding, run

CAUSAL = pytest.mark.parametrize("causal", [False, True])
SMALL = KeyClusters(clusters=5, keys=6, window=4, sinks=1, chunk=16)


def planned(m: KeyClusters, x: Inputs, causal: bool, keep: Tensor | None = None) -> Plan:
    """The clusters, valid keys first."""
    k = x.k if keep is None else x.k.take_along_dim(place_of_rank(keep)[:, None, :, None], dim=2)
    draws = Draws(0, torch.arange(x.q.shape[1]))
    return m.plan(x.q, k, Call(scale=0.3, mask=Mask(causal=causal, keep=keep, influence=keep), draws=draws))


def same_prefix(x: Inputs, y: Inputs, n: int) -> None:
    """Two causal calls agree in the first n rows, and in the clusters of chunks that end there or before."""
    before, after = planned(SMALL, x, True), planned(SMALL, y, True)
    for number, (a, b) in enumerate(zip(before.levels, after.levels)):
        ended = max(n // a.size - (number == 2), 0)  # the third level waits for the end of the next chunk
        assert torch.equal(a.labels[:, :, : ended * a.size], b.labels[:, :, : ended * a.size])
        for name in ("mean", "second"):
            torch.testing.assert_close(getattr(a.known, name)[:, :, :ended], getattr(b.known, name)[:, :, :ended])
    found, wanted = (run(SMALL, z, is_causal=True)[:, :, :n] for z in (x, y))
    if x.n_q == y.n_q:
        assert torch.equal(found, wanted)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def later(x: Inputs, n: int) -> Inputs:
    """Other tokens from position n on."""
    other = make(SMALL, n_q=x.n_q, dtype=torch.float64, seed=99, sharpness=9.0)
    return Inputs(*(torch.cat([a[:, :, :n], b[:, :, n:]], dim=2) for a, b in zip(x.leaves(), other.leaves())))


def test_later_tokens_change_nothing_before(monkeypatch):
    x = make(SMALL, n_q=75, dtype=torch.float64, sharpness=3.0)
    for n in (1, 15, 16, 17, 38, 64, 74):
        same_prefix(x, later(x, n), n)

    def peeking(*args: Any) -> Sums:
        return Sums(*(x[:, :, -1:].expand_as(x) for x in sums(*args)))

    monkeypatch.setattr(poles, "sums", peeking)  # control: the metric of all queries, also of those to come
    with pytest.raises(AssertionError):
        same_prefix(x, later(x, 38), 38)


def test_a_longer_sequence_keeps_its_clusters_and_rows():
    x = make(SMALL, n_q=75, dtype=torch.float64, sharpness=3.0)
    for n in (3, 4, 16, 31, 47, 64, 70):
        same_prefix(x.tokens(slice(0, n)), x, n)
    assert planned(SMALL, x.tokens(slice(0, 3)), True).levels == ()
    blocks, chunks, again = planned(SMALL, x, True).levels
    assert (blocks.chunks, blocks.size, chunks.chunks, chunks.size) == (18, 4, 4, 16)
    assert (blocks.clusters, chunks.clusters) == (2, 5)
    assert (again.chunks, again.size, again.clusters) == (3, 16, 5), "all but the last chunk are described again"
    assert torch.equal(again.labels[:, :, :48], chunks.labels[:, :, :48])
    assert bool((again.labels[:, :, 48:] == -1).all())
    assert torch.equal(again.known.mean, chunks.known.mean[:, :, 1:]), "by the queries up to the end of the next chunk"
    assert bool((blocks.labels[:, :, 72:] == -1).all())
    assert bool((blocks.labels[:, :, 0] == -1).all()), "a sink is in no cluster"


@CAUSAL
@pytest.mark.parametrize("clusters", [5, 0.3])
@pytest.mark.parametrize("kind", ["left", "right", "both", "holes"])
def test_padding_leaves_the_clusters_alone(kind, clusters, causal):
    m = replace(SMALL, clusters=clusters)
    x, keep = make(m, n_q=70, dtype=torch.float64), padding(kind, 2, 70)
    whole = planned(m, x, causal, keep)
    for b in range(2):
        index = keep[b].nonzero().flatten()
        alone = planned(m, x.item(slice(b, b + 1)).tokens(index), causal)
        assert len(alone.levels) == (3 if causal else 1)
        for padded, packed in zip(whole.levels, alone.levels):
            used = packed.chunks * packed.size
            assert torch.equal(padded.labels[b, :, :used], packed.labels[0, :, :used])
            assert bool((padded.labels[b, :, len(index) :] == -1).all())
        assert torch.equal(whole.own[b, index], alone.own[0])


@CAUSAL
def test_masked_queries_do_not_move_the_clusters(causal):
    x, real = make(SMALL, n_q=70, dtype=torch.float64), padding("holes", 2, 70)
    spoiled = replace(x, q=x.q.masked_fill(~real[:, None, :, None], 50.0))
    out, other = (run(SMALL, y, query_mask=real, is_causal=causal) for y in (x, spoiled))
    assert torch.equal(out, other)
    assert not torch.equal(*(run(SMALL, y, is_causal=causal)[:, :, 69:] for y in (x, spoiled)))  # control


@CAUSAL
def test_gradient_of_fixed_clusters(causal, monkeypatch):
    m = KeyClusters(clusters=3, keys=3, window=2, sinks=1, chunk=8, order=1)
    x = make(m, batch=1, heads=1, n_q=13, d=3, e=2, dtype=torch.float64)
    keep = None if causal else torch.arange(13)[None] != 4
    mask = None if keep is None else keys_mask(keep)
    plans, choices, plan = [], [], KeyClusters.plan

    def kept(*args) -> Plan:
        plans.append(plan(*args))
        return plans[0]

    def chosen(*args) -> Tensor:
        choices.append(expand(*args))
        return choices[0]

    monkeypatch.setattr(KeyClusters, "plan", kept)
    monkeypatch.setattr(module, "expand", chosen)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = sparing.attention(q, k, v, mask, is_causal=causal, method=m, seed=0, impl="reference")
        return out if keep is None else out[:, :, keep[0]]

    leaves = [t.clone().requires_grad_() for t in x.leaves()]
    attend(*leaves)
    assert bool(choices[0].any())
    assert not bool(choices[0].all())
    assert torch.autograd.gradcheck(attend, leaves)
    if keep is not None:
        grads = torch.autograd.grad(attend(*leaves).square().sum(), leaves)
        assert all(not bool(g[:, :, 4].any()) and bool(g[:, :, 5].any()) for g in grads)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("clusters=0", "clusters=0 must be at least 1"),
        ("clusters=-3", "clusters=-3 must be at least 1"),
        ("clusters=0.0", r"clusters=0\.0 as a ratio must be above 0 and below 1"),
        ("clusters=1.0", r"clusters=1\.0 as a ratio must be above 0 and below 1"),
        ("clusters=1.5", r"clusters=1\.5 as a ratio must be above 0 and below 1"),
        ("clusters=True", "clusters=True must be of type int or float"),
        ("clusters=many", "clusters='many' must be of type int or float"),
        ("window=5", "window=5 must be even"),
        ("window=-2", "window=-2 must be at least 0"),
        ("chunk=30", "chunk=30 must be a multiple of 4"),
        ("chunk=0", "chunk=0 must be at least 4"),
        ("keys=-1", "keys=-1 must be at least 0"),
        ("cap=0", r"cap=0 must be above 0\.0"),
        ("cap=1e999", "cap=inf must be finite"),
        ("order=3", "order=3 is not one of 1, 2"),
        ("select=values", "select='values' is not one of 'error', 'mass'"),
        ("steps=-1", "steps=-1 must be at least 0"),
    ],
)
def test_refuses_bad_settings(setting, message):
    with pytest.raises((ValueError, TypeError), match=f"key_clusters: {message}"):
        sparing.method(f"key_clusters({setting})")


def test_a_spec_keeps_a_number_of_clusters_and_a_ratio_apart():
    for clusters, of_40 in ((7, 7), (1, 1), (64, 40), (0.25, 10), (0.999, 40), (0.001, 1)):
        m = KeyClusters(clusters=clusters, keys=5, cap=1.5)
        back = sparing.method(str(m))
        assert back == m
        assert isinstance(back, KeyClusters)
        assert type(back.clusters) is type(clusters)
        assert back.clusters_of(40) == of_40
        assert back.clusters_of(0) == 1


@CAUSAL
def test_cost_follows_what_was_read(causal):
    x = make(SMALL, n_q=75)
    facts = sparing.inspect(x.q, x.k, x.value, method=SMALL, is_causal=causal, seed=0).statistics
    shape = sparing.Shape(batch=2, heads=2, queries=75, keys=75, head_dim=8, value_dim=6, causal=causal)
    guess, known = SMALL.cost(shape), SMALL.cost(shape, facts)
    assert known.keys == float(facts["touched"].double().mean())
    assert 0.5 < guess.keys / known.keys < 2
    assert 0.5 < guess.flops / known.flops < 2
    assert SMALL.cost(shape, {"touched": 2 * facts["touched"]}).flops > known.flops


def test_predicted_variances_are_constants_of_the_gradient():
    x = make(SMALL, n_q=40, dtype=torch.float64)
    q, k, v = (t.clone().requires_grad_() for t in (x.q, x.k, x.value))
    plan = planned(SMALL, replace(x, q=q, k=k), False)
    pole = poles.summarise(k, v, plan.levels[0], 0.25)
    assert pole.keys.requires_grad
    assert pole.values.requires_grad
    constants = (poles.alarm(q, plan, slice(0, 40)), pole.spread, pole.scatter, plan.levels[0].known.mean)
    assert not any(t.requires_grad for t in constants)
