"""The kernel that decodes multipole, against the specification, for every instruction set of the machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparing
from sparing import native
from sparing.methods.multipole_past import MultipolePast

from kernel_tools import every_instruction_set, needs_kernels, no_worse, same_for_any_threads

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


@every_instruction_set
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("n", "d", "e", "rows"), SHAPES)
def test_the_same_numbers_in_float64(isa, n, d, e, rows, spec, masked):
    """In float64 no rounding decides which cluster is expanded: every row must agree."""
    q, k, v = (x.double() for x in inputs(n, d, e))
    keep = None
    if masked:
        keep = torch.ones(2, n, dtype=torch.bool)
        keep[0, : n // 3] = keep[1, n // 2 : n // 2 + 2] = False
    past = past_of(spec, q, k, v, keep)
    queries, own = last_rows(past, q, rows, keep)
    with native.instruction_set(isa):
        found, wanted = both(past, queries, k, v, own)
    for name, a, b in zip(("output", "lse", "error", "read", "summaries"), found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{isa}, {name}: {text}")


def test_a_wrong_weight_is_seen():
    """Control: the same comparison rejects a summary that is off by a part in a million."""
    q, k, v = (x.double() for x in inputs(131, 16, 64))
    past = past_of(SPECS[0], q, k, v)
    queries, own = last_rows(past, q, 1)
    wanted = past.attend_densely(queries, k, v, own, slice(0, 2))[0]
    torch.testing.assert_close(past.attend(queries, k, v, own, slice(0, 2))[0], wanted, rtol=1e-9, atol=1e-9)
    for name in ("offset", "weight", "values"):
        kept = past.poles[name].clone()
        past.poles[name].mul_(1 + 1e-6)
        out = past.attend(queries, k, v, own, slice(0, 2))[0]
        with pytest.raises(AssertionError):
            torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-9)
        past.poles[name] = kept


@every_instruction_set
@pytest.mark.parametrize("spec", SPECS)
def test_no_worse_than_plain_float32(isa, spec):
    q, k, v = inputs(203, 32, 24)
    past = past_of(spec, q, k, v)

    def by(attend):
        def compute(q, k, v):
            stores = (past.poles, past.ranks)
            kept = [dict(store) for store in stores]
            moments = past.mean, past.variance
            try:
                past.mean, past.variance = (x.to(q.dtype) for x in moments)
                for store in stores:
                    store.update({name: x.to(q.dtype) if x.is_floating_point() else x for name, x in store.items()})
                queries, own = last_rows(past, q, 1)
                return attend(queries, k, v, own, slice(0, 2))[:2]
            finally:
                past.mean, past.variance = moments
                past.poles, past.ranks = kept

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
    past = past_of("multipole(clusters=6, keys=9, window=4, chunk=16)", q, k, v)
    names = ("pole_keys", "pole_values", "offset", "weight", "spread", "scatter", "begin", "size")
    return {
        "q": q[:, :, -1:].contiguous(), "k": k, "v": v, "place": torch.arange(n).repeat(2, 1),
        "own": torch.full((2, 1), n - 1), "visible": past.visible, "mean": past.mean,
        "variance": past.variance, **dict(zip(names, past.poles.values(), strict=True)), **past.ranks,
        "block": past.block, "before": 4, "sinks": 1, "keys": 9, "second": True, "by_mass": False, "cap": 2.0,
        "tolerance": 0.01, "scale": 0.25, "fresh_from": n - 1, "limit": 1e9,
    }  # fmt: skip


def test_opcheck():
    torch.library.opcheck(torch.ops.sparing.multipole_step, tuple(whole_call().values()))
    some = {**whole_call(), "place": None, "own": None}
    torch.library.opcheck(torch.ops.sparing.multipole_step, tuple(some.values()))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"q": torch.randn(2, 4, 8)}, "axes"),
        ({"q": torch.randn(2, 4, 1, 8).int()}, "q"),
        ({"q": torch.randn(2, 3, 1, 8)}, "multiple"),
        ({"k": torch.randn(2, 2, 43, 7)}, "k"),
        ({"k": torch.randn(2, 2, 43, 8).double()}, "k"),
        ({"v": torch.randn(2, 2, 42, 5)}, "v"),
        ({"own": torch.full((2, 1), 43)}, "own"),
        ({"own": torch.full((2, 1), -2)}, "own"),
        ({"own": torch.full((2, 2), 42)}, "own"),
        ({"own": torch.full((2, 1), 42, dtype=torch.int32)}, "own"),
        ({"visible": torch.tensor([12, -1])}, "visible"),
        ({"visible": torch.tensor([12, 10_000])}, "visible"),
        ({"visible": torch.tensor([12])}, "visible"),
        ({"place": torch.arange(42).repeat(2, 1)}, "place"),
        ({"place": torch.arange(43)}, "place"),
        ({"fresh_from": -1}, "fresh_from"),
        ({"fresh_from": 44}, "fresh_from"),
        ({"limit": 1e-3}, "beyond limit"),
        ({"mean": torch.randn(2, 4, 9)}, "mean"),
        ({"variance": torch.randn(2, 4).double()}, "variance"),
        ({"weight": torch.randn(2, 4, 3)}, "weight"),
        ({"size": torch.zeros(2, 4, 3, dtype=torch.int32)}, "size"),
        ({"labels": torch.zeros(2, 4, 7, dtype=torch.int32)}, r"labels|shares|members"),
        ({"labels": torch.zeros(2, 4, 43, dtype=torch.long)}, r"labels|shares|members"),
        ({"shares": torch.randn(2, 4, 1)}, "shares"),
        ({"members": torch.zeros(2, 4, 1, dtype=torch.int32)}, "members"),
        ({"block": 0}, "block"),
        ({"before": -1}, "before"),
        ({"sinks": -1}, "sinks"),
        ({"keys": -1}, "keys"),
    ],
)
def test_sizes_are_checked_in_the_kernel(change, word):
    with pytest.raises(RuntimeError, match=word):
        torch.ops.sparing.multipole_step(**{**whole_call(), **change})


def test_labels_that_end_before_the_block_are_an_error():
    call = whole_call()
    short = {name: call[name][:, :, :20].contiguous() for name in ("labels", "shares", "members")}
    with pytest.raises(RuntimeError, match="labels does not reach up to the block"):
        torch.ops.sparing.multipole_step(**{**call, **short})
