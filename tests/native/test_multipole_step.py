"""The kernel that decodes multipole, against the specification, for every instruction set of the machine."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import sparing
from sparing import native
from sparing.methods.multipole.past import MultipolePast
from sparing.methods.multipole.step_past import StepPast
from tests.support.kernel_checks import every_instruction_set, needs_kernels, no_worse, same_for_any_threads

pytestmark = needs_kernels

SPECS = [
    "multipole(clusters=6, keys=8, window=4, chunk=16)",
    "multipole(clusters=0.25, keys=25, window=30, sinks=0, order=1, select=mass, chunk=64)",
    "multipole(clusters=70, keys=60, window=16, sinks=30, chunk=64)",
    "multipole(clusters=20, keys=0, chunk=32, steps=0)",
]
SHAPES = [(1, 1, 1, 1), (17, 20, 3, 1), (130, 80, 33, 2), (131, 16, 64, 1), (151, 64, 17, 1)]


def inputs(n, d, e, batch=2, heads=4, kv_heads=2):
    """Keys of a few topics, and queries that look for some of them."""
    gen = torch.Generator().manual_seed(n + d)
    topics = 2 * torch.randn(7, d, generator=gen)
    of = torch.randint(0, 7, (n,), generator=gen)
    q, k = (topics[of] + 0.7 * torch.randn(batch, h, n, d, generator=gen) for h in (heads, kv_heads))
    return [q, k, torch.randn(batch, kv_heads, n, e, generator=gen)]


def past_of(spec, q, k, v, keep=None):
    """What an index knows of these tokens."""
    index = sparing.Index(spec, seed=1)
    index.append(q, k, v, keep)
    past = index._past
    assert isinstance(past, MultipolePast)
    return past


def last_rows(past, q, rows, keep=None):
    """Some queries, and ranks for them at the end of the block that is not complete; -1 where it has too few."""
    own = [[n - rows + i if n % past.block >= rows else -1 for i in range(rows)] for n in past.counts]
    assert max(max(row) for row in own) >= 0
    if keep is not None and rows > 1:
        own[0][0] = -1  # padding
    return q[:, :, :rows].contiguous(), torch.tensor(own)


def both(past, q, k, v, own):
    every = slice(0, q.shape[0])
    return past.attend(q, k, v, own, every), past.attend_densely(q, k, v, own, every)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("n", "d", "e", "rows"), SHAPES)
def test_the_same_numbers_in_float64(n, d, e, rows, spec, masked):
    """In float64 no rounding decides which cluster is expanded: every row must agree."""
    q, k, v = (x.double() for x in inputs(n, d, e))
    keep = None
    if masked:
        keep = torch.ones(2, n, dtype=torch.bool)
        keep[0, : n // 3] = keep[1, n // 2 : n // 2 + 2] = False
    past = past_of(spec, q, k, v, keep)
    queries, own = last_rows(past, q, rows, keep)
    names = ("output", "lse", "error", "read", "summaries")
    for isa in native.info().available:
        with native.instruction_set(isa):
            found, wanted = both(past, queries, k, v, own)
        for name, a, b in zip(names, (found[0], *found[1]), (wanted[0], *wanted[1]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=partial("{}, {}: {}".format, isa, name))


def test_a_wrong_weight_is_seen():
    """Control: the same comparison rejects a summary that is off by a part in a million."""
    q, k, v = (x.double() for x in inputs(131, 16, 64))
    past = past_of(SPECS[0], q, k, v)
    queries, own = last_rows(past, q, 1)
    wanted = past.attend_densely(queries, k, v, own, slice(0, 2))[0]
    torch.testing.assert_close(past.attend(queries, k, v, own, slice(0, 2))[0], wanted, rtol=1e-9, atol=1e-9)
    for name in ("offset", "weight", "values"):
        kept = past.store.reals.clone()
        past.store.part(name).mul_(1 + 1e-6)
        out = past.attend(queries, k, v, own, slice(0, 2))[0]
        with pytest.raises(AssertionError):
            torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-9)
        past.store.reals = kept


@every_instruction_set
@pytest.mark.parametrize("spec", SPECS)
def test_no_worse_than_plain_float32(isa, spec):
    q, k, v = inputs(203, 32, 24)
    past = past_of(spec, q, k, v)

    def by(attend):
        def compute(q, k, v):
            kept = past.store.reals
            try:
                past.store.reals = kept.to(q.dtype)
                queries, own = last_rows(past, q, 1)
                out, notes = attend(queries, k, v, own, slice(0, 2))
                return out, notes[0]
            finally:
                past.store.reals = kept

        return compute

    with native.instruction_set(isa):
        no_worse(by(past.attend), by(past.attend_densely), [q, k, v], gradients=False)


def test_thread_counts_change_nothing():
    q, k, v = inputs(700, 32, 32, heads=6, kv_heads=3)
    past = past_of("multipole(clusters=40, keys=64, chunk=128)", q, k, v)
    queries, own = last_rows(past, q, 3)
    same_for_any_threads(lambda: past.attend(queries, k, v, own, slice(0, 2)))


def whole_call(n=43) -> dict[str, Any]:
    q, k, v = inputs(n, 8, 5)
    store = past_of("multipole(clusters=6, keys=9, window=4, chunk=16)", q, k, v).store
    return {
        "q": q[:, :, -1:].contiguous(), "k": k, "v": v, "place": torch.arange(n).repeat(2, 1),
        "own": torch.full((2, 1), n - 1), "reals": store.reals, "ints": store.ints, "clusters": store.clusters,
        "ranks": store.ranks, "block": store.block, "before": 4, "sinks": 1, "keys": 9, "second": True,
        "by_mass": False, "cap": 2.0, "tolerance": 0.01, "scale": 0.25, "limit": 1e9,
    }  # fmt: skip


def test_opcheck():
    torch.library.opcheck(torch.ops.sparing.multipole_step, tuple(whole_call().values()))
    some = {**whole_call(), "place": None, "own": None}
    torch.library.opcheck(torch.ops.sparing.multipole_step, tuple(some.values()))


def test_a_query_without_a_rank_is_remembered():
    """Its row goes to its place in the block, and nothing else changes; one that is refused leaves no trace."""
    call = {**whole_call(), "place": None, "own": None}
    past = past_of("multipole(clusters=6, keys=9, window=4, chunk=16)", *inputs(43, 8, 5)).store
    torch.ops.sparing.multipole_step(**{**call, "reals": past.reals, "own": torch.full((2, 1), 42)})
    before = past.reals.clone()
    *_, within = torch.ops.sparing.multipole_step(**{**call, "reals": past.reals, "limit": 1e-3})
    assert not within
    assert torch.equal(past.reals, before)
    *_, within = torch.ops.sparing.multipole_step(**{**call, "reals": past.reals})
    assert within
    queries = past.part("queries")
    assert torch.equal(queries[:, :, 42 % past.block], call["q"][:, :, 0])
    assert int((past.reals != before).sum()) <= call["q"].numel()
    queries[:, :, 42 % past.block] = 0
    queries_before = before[:, :, -past.block * past.depth :].unflatten(2, (past.block, past.depth))
    queries_before[:, :, 42 % past.block] = 0
    assert torch.equal(past.reals, before)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("entry", [torch.nan, torch.inf, 1e7])
def test_entries_beyond_the_limit_are_reported(name, entry):
    """The op says so in its third result and computes nothing; without a limit it does not look."""
    call = {**whole_call(), "place": None, "own": None, "limit": 1e6}
    out, notes, within = torch.ops.sparing.multipole_step(**call)
    assert within
    assert within.dtype is torch.bool
    assert out.abs().sum() > 0
    spoilt = {**call, name: call[name].clone()}
    spoilt[name][1, 0, -1, 2] = entry
    before = spoilt["reals"].clone()
    out, notes, within = torch.ops.sparing.multipole_step(**spoilt)
    assert not within
    assert not out.any()
    assert not notes.any()
    assert torch.equal(spoilt["reals"], before)
    *_, within = torch.ops.sparing.multipole_step(**{**spoilt, "limit": torch.inf})
    assert within


def test_room_grows_with_what_it_holds():
    past = StepPast(torch.zeros(2, 3, 1, 4), width=5, block=2)
    past.make_room(7, 20)
    for number, x in enumerate(past.parts().values()):
        x.copy_(torch.arange(x.numel()).view(x.shape) + 1000 * number)
    before = {name: x.clone() for name, x in past.parts().items()}
    past.make_room(7, 20)
    assert (past.clusters, past.ranks) == (7, 20)
    past.make_room(8, 20)
    past.make_room(8, 90)
    assert (past.clusters, past.ranks) == (8, 90)
    for name, x in past.parts().items():
        old = before[name]
        assert torch.equal(x if x.shape == old.shape else x[:, :, : old.shape[2]], old), name
        assert x.shape == old.shape or bool((x[:, :, old.shape[2] :] == (-1 if name == "labels" else 0)).all()), name
    past.select(torch.tensor([1, 1]))
    assert torch.equal(past.part("members")[0], past.part("members")[1])
    assert torch.equal(past.part("members")[0, :, :20], before["members"][1])
    assert torch.equal(past.of(slice(1, 2)).part("keys"), past.part("keys")[1:])


def tampered(**parts: int) -> Any:
    """The integers of a past, some of which are wrong."""
    past = past_of("multipole(clusters=6, keys=9, window=4, chunk=16)", *inputs(43, 8, 5)).store
    for name, value in parts.items():
        past.part(name)[1] = value
    return past.ints


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"q": torch.randn(2, 4, 8)}, "axes"),
        ({"q": torch.randn(2, 4, 1, 8).int()}, "q"),
        ({"q": torch.randn(2, 3, 1, 8)}, "multiple"),
        ({"q": torch.randn(2, 4, 2, 8), "own": None}, "own must say"),
        ({"k": torch.randn(2, 2, 43, 7)}, "k"),
        ({"k": torch.randn(2, 2, 43, 8).double()}, "k"),
        ({"k": torch.randn(2, 2, 0, 8), "v": torch.randn(2, 2, 0, 5), "own": None, "limit": torch.inf}, "fewer keys"),
        ({"k": torch.randn(2, 2, 0, 8), "v": torch.randn(2, 2, 0, 5)}, "fewer keys"),
        ({"v": torch.randn(2, 2, 42, 5)}, "v"),
        ({"own": torch.full((2, 1), 43)}, "own"),
        ({"own": torch.full((2, 1), -2)}, "own"),
        ({"own": torch.full((2, 2), 42)}, "own"),
        ({"own": torch.full((2, 1), 42, dtype=torch.int32)}, "own"),
        ({"ints": tampered(visible=-1)}, "visible"),
        ({"ints": tampered(visible=10_000)}, "visible"),
        ({"place": torch.arange(42).repeat(2, 1)}, "place"),
        ({"place": torch.arange(43)}, "place"),
        ({"reals": torch.zeros(2, 4, 9)}, "reals"),
        ({"reals": whole_call()["reals"].double()}, "reals"),
        ({"reals": whole_call()["reals"].mT.contiguous().mT}, "reals"),
        ({"ints": whole_call()["ints"].long()}, "ints"),
        ({"ints": whole_call()["ints"][:1]}, "ints"),
        ({"clusters": 5}, "reals"),
        ({"clusters": -1}, "clusters"),
        ({"clusters": 2**40}, "clusters"),
        ({"ranks": 5}, "reals"),
        ({"ranks": -1}, "ranks"),
        ({"block": 0}, "block"),
        ({"block": 2**40}, "32 bits"),
        ({"before": -1}, "before"),
        ({"sinks": -1}, "sinks"),
        ({"keys": -1}, "keys"),
        ({"tolerance": -1.0}, "tolerance"),
    ],
)
def test_sizes_are_checked_in_the_kernel(change, word):
    with pytest.raises(RuntimeError, match=word):
        torch.ops.sparing.multipole_step(**{**whole_call(), **change})


def test_ranks_that_end_before_the_block_are_an_error():
    q, k, v = inputs(43, 8, 5)
    past = past_of("multipole(clusters=6, keys=9, window=4, chunk=16)", q, k, v).store
    short = StepPast(q, 5, past.block)
    short.make_room(past.clusters, 20)
    short.part("visible").fill_(1)
    call = {**whole_call(), "reals": short.reals, "ints": short.ints, "ranks": 20}
    with pytest.raises(RuntimeError, match="ranks does not reach up to the block"):
        torch.ops.sparing.multipole_step(**call)
