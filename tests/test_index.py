"""Decoding is prefill: an index that sees a sequence piece by piece gives the rows of one call over all of it."""

from __future__ import annotations

import sys
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import sparing
from sparing import native

MULTIPOLE = "multipole(clusters=8, keys=24, window=8, sinks=2, chunk=32)"
SPECS = [
    MULTIPOLE,
    "multipole(clusters=8, keys=24, window=40, sinks=0, chunk=64, order=1, select=mass)",  # the window reaches clusters
    "multipole(clusters=70, keys=12, window=10, sinks=20, chunk=64)",  # more clusters than keys; sinks beyond a block
    "multipole(clusters=0.1, keys=0, window=0, sinks=0, chunk=32, steps=0)",
    "multipole(clusters=3, keys=5, window=4, sinks=1, chunk=8, select=mass, order=1, cap=0.1)",  # blocks of two keys
    "window(size=32, sinks=2)",
    "window(size=16, global_tokens=40, sinks=3)",
    "window(size=0)",
    "top_keys(keys=8)",
]
_SUMMARY = ("keys", "values", "offset", "weight", "spread", "scatter")
ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-5}


class Sequence(NamedTuple):
    """q (B, H, n, d), k (B, H_kv, n, d), v (B, H_kv, n, e), keep (B, n) or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    keep: Tensor | None = None

    def part(self, start: int, end: int) -> tuple[Any, ...]:
        """What a call gets that brings the positions from `start` to `end`."""
        keep = None if self.keep is None else self.keep[:, :end]
        return self.q[:, :, start:end], self.k[:, :, :end], self.v[:, :, :end], keep

    def items(self, chosen: Any) -> Sequence:
        return Sequence(*(None if x is None else x[chosen] for x in self))


def sequence(n=110, batch=1, heads=2, kv_heads=None, d=8, e=6, dtype=torch.float64, keep=None, seed=0) -> Sequence:
    """Keys of a few topics that come and go, and queries that look for some of them: peaked attention."""
    gen = torch.Generator().manual_seed(seed)
    topics = 1.5 * torch.randn(9, d, generator=gen, dtype=torch.float64)
    of = torch.randint(0, 9, (batch, 1, n), generator=gen)
    q = topics[of] + torch.randn(batch, heads, n, d, generator=gen, dtype=torch.float64)
    k = topics[of] + torch.randn(batch, kv_heads or heads, n, d, generator=gen, dtype=torch.float64)
    v = torch.randn(batch, kv_heads or heads, n, e, generator=gen, dtype=torch.float64)
    return Sequence(q.to(dtype), k.to(dtype), v.to(dtype), keep)


def at_once(x: Sequence, spec: str, seed: int = 3, **options: Any) -> Any:
    mask = None if x.keep is None else x.keep[:, None, None, :]
    grouped = x.q.shape[1] != x.k.shape[1]
    return sparing.inspect(
        x.q, x.k, x.v, mask, is_causal=True, enable_gqa=grouped, method=spec, seed=seed, **options
    )  # fmt: skip


def grow(index: sparing.Index, x: Sequence, start: int, step: int, *, first: int = 0) -> tuple[Tensor, list[Any]]:
    """The outputs of the positions from `first` on: up to `start` in one call, then `step` at a time."""
    n = x.q.shape[2]
    ends = [*range(start, n, step), n] if start < n else [n]
    outs, notes = [], []
    for a, b in zip([first, *ends], ends):
        outs.append(index.attention(*x.part(a, b)))
        notes.append((a, b, index.statistics))
    return torch.cat(outs, dim=2), notes


def valid_rows(x: Sequence, out: Tensor) -> Tensor:
    rows = x.keep
    return out if rows is None else out.masked_fill(~rows.view(*rows.shape[:1], 1, -1, *[1] * (out.ndim - 3)), 0.0)


def decodes_as_prefill(index: sparing.Index, x: Sequence, start: int, step: int) -> None:
    """C17."""
    wanted, (out, notes) = at_once(x, index.method), grow(index, x, start, step)
    allowed = ALLOWED[x.q.dtype]
    torch.testing.assert_close(valid_rows(x, out), valid_rows(x, wanted.output), rtol=0, atol=allowed)
    if x.keep is not None:
        late = out[:, :, start:].masked_fill(x.keep[:, None, start:, None], 0.0)
        assert not bool(late.any()), "rows of padding are zeros"
    assert index.length == x.q.shape[2]
    for a, b, found in notes:
        rows = Sequence(*(None if y is None else y[..., a:b] if y.ndim == 2 else y[:, :, a:b] for y in x))
        for name in set(found) & set(wanted.statistics):
            one, other = (valid_rows(rows, y) for y in (found[name], wanted.statistics[name][:, :, a:b]))
            if name in ("touched", "exact"):
                assert torch.equal(one, other.to(one.dtype)), f"{name} of {a} to {b}"
            elif name == "error":  # a small difference of large numbers where nearly everything is read
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e2 * allowed)


def densely(index: sparing.Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it decode by the specification."""
    module = sys.modules["sparing.methods.multipole_past"]
    monkeypatch.setattr(module, "native", SimpleNamespace(ready=lambda q: False))


# One token at a time from the start, pieces that cross blocks and chunks, whole chunks, and one token after a prompt.
STEPS = pytest.mark.parametrize(("start", "step"), [(1, 1), (50, 7), (33, 65)])
EVERY = pytest.mark.parametrize("spec", SPECS)
KINDS = pytest.mark.parametrize("spec", [MULTIPOLE, "window(size=16, global_tokens=40, sinks=3)", "top_keys(keys=8)"])


@EVERY
@STEPS
def test_decoding_is_prefill(spec, start, step):
    decodes_as_prefill(sparing.Index(spec, seed=3), sequence(heads=4, kv_heads=2), start, step)


@EVERY
def test_decoding_is_prefill_in_float32(spec):
    x = sequence(heads=4, kv_heads=2, dtype=torch.float32)
    decodes_as_prefill(sparing.Index(spec, seed=3), x, 100, 1)
    decodes_as_prefill(sparing.Index(spec, seed=3), x, 30, 45)


@EVERY
@pytest.mark.parametrize(("start", "step"), [(1, 1), (40, 27)])
def test_decoding_is_prefill_with_padding(spec, start, step):
    """On the left, in the middle, and of another length in each item."""
    keep = torch.ones(4, 110, dtype=torch.bool)
    keep[0, :37] = False
    keep[1, 5:9] = keep[1, 60:83] = False
    keep[2, :55] = False
    x = sequence(batch=4, heads=2, kv_heads=1, keep=keep)
    decodes_as_prefill(sparing.Index(spec, seed=3), x, start, step)


@pytest.mark.parametrize("spec", SPECS[:5])
@pytest.mark.parametrize("step", [1, 29])
def test_the_specification_decodes_as_prefill(spec, step, monkeypatch):
    """The path without kernels, which is what the kernel is held to."""
    keep = torch.ones(2, 110, dtype=torch.bool)
    keep[0, :21] = keep[1, 60:64] = False
    index = sparing.Index(spec, seed=3)
    densely(index, monkeypatch)
    decodes_as_prefill(index, sequence(heads=4, kv_heads=2), 20, step)
    index.reset()
    decodes_as_prefill(index, sequence(batch=2, keep=keep), 80, step)


@pytest.mark.parametrize("spec", [MULTIPOLE, SPECS[4]])
def test_without_kernels(spec, monkeypatch):
    """Nothing of an index needs the kernels."""
    monkeypatch.setattr(native, "ready", lambda *_: False)
    decodes_as_prefill(sparing.Index(spec, seed=3), sequence(n=90, heads=4, kv_heads=2), 20, 1)


@pytest.mark.parametrize(("d", "e"), [(1, 1), (20, 33), (80, 3)])
def test_any_width(d, e):
    for spec in (MULTIPOLE, "window(size=32, sinks=2)", "top_keys(keys=8)"):
        decodes_as_prefill(sparing.Index(spec, seed=3), sequence(n=100, d=d, e=e), 40, 1)


def test_other_indices_do_not_pass():
    """Control: the check of C17 rejects another seed, a leak and a window that is one key short."""
    x = sequence()
    for other in (
        sparing.Index(MULTIPOLE, seed=4),
        sparing.Index(MULTIPOLE, seed=3, scale=0.3),
        sparing.Index(MULTIPOLE, seed=3, streams=[5, 6]),
    ):
        with pytest.raises(AssertionError):
            decodes_as_prefill(other, x, 50, 1)

    class Leaky(sparing.Index):
        def attention(self, query, key, value, attn_mask=None):
            out = super().attention(query, key, value, attn_mask)
            return torch.where(
                torch.arange(self.length - query.shape[2], self.length)[:, None] == 77, value[0, 0, 0], out
            )

    with pytest.raises(AssertionError):
        decodes_as_prefill(Leaky(MULTIPOLE, seed=3), x, 50, 1)


def test_scale_and_streams_are_those_of_the_call():
    x = sequence(heads=4, kv_heads=2)
    wanted = at_once(x, MULTIPOLE, scale=0.3, streams=[5, 6]).output
    out, _ = grow(sparing.Index(MULTIPOLE, seed=3, scale=0.3, streams=[5, 6]), x, 50, 1)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-9)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(out, at_once(x, MULTIPOLE, scale=0.3).output, rtol=0, atol=1e-9)


@KINDS
def test_batch_mates_do_not_matter(spec):
    keep = torch.ones(3, 120, dtype=torch.bool)
    keep[0, :37] = keep[2, 50:70] = False
    x = sequence(n=120, batch=3, keep=keep)
    together, _ = grow(sparing.Index(spec, seed=3), x, 60, 1)
    for item in range(3):
        alone, _ = grow(sparing.Index(spec, seed=3), x.items(slice(item, item + 1)), 60, 1)
        torch.testing.assert_close(together[item : item + 1], alone, rtol=0, atol=1e-12)


@KINDS
def test_an_exact_prompt_is_learnt(spec):
    """`append` leaves the index as `attention` does."""
    x = sequence()
    told, asked = sparing.Index(spec, seed=3), sparing.Index(spec, seed=3)
    told.append(*x.part(0, 60))
    asked.attention(*x.part(0, 60))
    for a in range(60, 110, 5):
        found, wanted = (index.attention(*x.part(a, a + 5)) for index in (told, asked))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)  # the moments of the queries are rounded apart
    in_two = sparing.Index(spec, seed=3)
    in_two.append(*x.part(0, 41))
    in_two.append(*x.part(41, 60))
    torch.testing.assert_close(
        grow(in_two, x, 61, 1, first=60)[0], at_once(x, spec).output[:, :, 60:], rtol=0, atol=1e-9
    )


def test_clusters_are_appended_and_never_made_again():
    """Their members stay; their summaries are made again once, when the next chunk is complete."""
    x, index = sequence(n=200), sparing.Index(MULTIPOLE, seed=3)
    index.attention(*x.part(0, 5))
    kept: dict[str, Tensor] = {}
    rows, last = 0, torch.zeros(0)
    for n in range(5, 200):
        index.attention(*x.part(n, n + 1))
        past: Any = index._past
        for name, old in kept.items():
            assert torch.equal(past.store.part(name)[:, :, : old.shape[2]], old), f"{name} after {n + 1} tokens"
        again = past.store.part("keys")[:, :, max(rows - 8, 0) : rows]
        assert n % 32 < 31 or n < 32 or not torch.equal(again, last), "the last chunk's are made again"
        rows = (n + 1) // 32 * 8  # of complete chunks of 32 keys
        parts, last = past.store.parts(), past.store.part("keys")[:, :, max(rows - 8, 0) : rows].clone()
        kept = {name: parts[name][:, :, :rows].clone() for name in ("begin", "size")}
        kept |= {name: parts[name][:, :, : max(rows - 8, 0)].clone() for name in _SUMMARY}
        assert parts["visible"].unique().tolist() == [rows + (n + 1) % 32 // 8 * 2]
    assert rows == 48


@KINDS
@pytest.mark.parametrize(("name", "odd"), [("k", 1e200), *product("qkv", [torch.nan, torch.inf, -torch.inf])])
def test_what_is_odd_in_a_single_step_is_treated_as_at_once(name, odd, spec):
    x = sequence()
    getattr(x, name)[0, 0, 83, 2] = odd
    out, _ = grow(sparing.Index(spec, seed=3), x, 80, 1)
    wanted = at_once(x, spec).output
    assert not torch.equal(wanted[:, :, 80:], at_once(sequence(), spec).output[:, :, 80:])
    torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-9, equal_nan=True)


@KINDS
def test_one_tensor_may_hold_the_queries_of_all_steps(spec):
    x, index = sequence(), sparing.Index(spec, seed=3)
    index.attention(*x.part(0, 50))
    buffer, outs = torch.empty_like(x.q[:, :, :1]), []
    for n in range(50, 110):
        outs.append(index.attention(buffer.copy_(x.q[:, :, n : n + 1]), *x.part(n, n + 1)[1:]))
    torch.testing.assert_close(torch.cat(outs, dim=2), at_once(x, spec).output[:, :, 50:], rtol=0, atol=1e-9)


@KINDS
def test_select_goes_on_with_the_chosen_items(spec):
    """Beams: an index of the reordered sequences, also with an item that appears again."""
    keep = torch.ones(3, 120, dtype=torch.bool)
    keep[0, :37] = keep[2, 50:55] = False
    for x in (sequence(n=120, batch=3), sequence(n=120, batch=3, keep=keep)):
        index, order = sparing.Index(spec, seed=3), torch.tensor([2, 0, 0, 1])
        grow(index, Sequence(*(y if y is None else y[:, :70] if y.ndim == 2 else y[:, :, :70] for y in x)), 50, 1)
        index.select(order)
        assert index.batch == 4
        other = sequence(n=120, batch=4, seed=9)
        y = x.items(order)
        # After the step the two beams of one item go different ways.
        y = Sequence(
            *(torch.cat([a[:, :, :70], b[:, :, 70:]], dim=2) for a, b in zip(y[:3], other[:3], strict=True)), y.keep
        )
        out, _ = grow(index, y, 71, 1, first=70)
        wanted = at_once(y, spec).output[:, :, 70:]
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-9)


def test_select_of_nothing_new_does_nothing():
    x, index = sequence(batch=2), sparing.Index(MULTIPOLE, seed=3)
    index.select(torch.tensor([7]))  # knows no sequence yet
    index.attention(*x.part(0, 100))
    before = index._past.store.reals  # type: ignore[union-attr]
    index.select(torch.tensor([0, 1]))
    assert index._past.store.reals is before  # type: ignore[union-attr]
    for bad in ([0, 2], [-1], [[0, 1]]):
        with pytest.raises(ValueError, match=r"items=.* must be a list of numbers from 0 to 1"):
            index.select(torch.tensor(bad))
    assert index.batch == 2


@KINDS
@pytest.mark.parametrize("length", [65, 68, 71])
def test_a_crop_within_the_block_was_never_seen(spec, length):
    """Blocks hold 8 keys: from 64 on nothing was put into clusters. Bit by bit, statistics too."""
    for keep in (None, torch.ones(2, 110, dtype=torch.bool)):
        x = sequence(batch=2, keep=keep)
        cropped, fresh = sparing.Index(spec, seed=3), sparing.Index(spec, seed=3)
        wrong = sequence(batch=2, seed=5)
        mixed = Sequence(
            *(torch.cat([a[:, :, :length], b[:, :, length:]], 2) for a, b in zip(x[:3], wrong[:3], strict=True)), keep
        )
        for index, y, n in ((cropped, mixed, 71), (fresh, x, length)):
            index.attention(*y.part(0, 60))
            for i in range(60, n):
                index.attention(*y.part(i, i + 1))
        cropped.crop(length, x.k[:, :, :length], x.v[:, :, :length])
        assert cropped.length == length
        for i in range(length, 110):
            assert torch.equal(cropped.attention(*x.part(i, i + 1)), fresh.attention(*x.part(i, i + 1)))
            for name, y in fresh.statistics.items():
                assert torch.equal(cropped.statistics[name], y)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("length", [70, 127])
def test_a_deeper_crop_is_still_a_good_approximation(length, padded):
    """The clusters of a cropped chunk know queries that are gone, so they differ; their quality does not."""
    keep = torch.ones(2, 260, dtype=torch.bool)
    keep[0, :17] = keep[1, 80:85] = False
    x = sequence(n=260, batch=2, heads=4, kv_heads=2, keep=keep if padded else None)
    spec = "multipole(clusters=8, keys=32, window=8, sinks=1, chunk=32)"
    index = sparing.Index(spec, seed=3)
    grow(index, x, 100, 1)
    for again in (200, length):
        index.crop(again, x.k[:, :, :again], x.v[:, :, :again])
    out, notes = grow(index, x, length + 1, 1, first=length)
    if padded:
        out = valid_rows(Sequence(x.q[:, :, length:], x.k, x.v, keep[:, length:]), out)
    exact = valid_rows(x, at_once(x, "exact").output)[:, :, length:]
    # What a window of as many keys as are read misses.
    touched = max(int(found["touched"].max()) for _, _, found in notes)
    window = valid_rows(x, at_once(x, f"window(size={touched // 2 * 2}, sinks=1)").output)[:, :, length:]
    never = valid_rows(x, at_once(x, spec).output)[:, :, length:]
    mine, its, without = (float((y - exact).norm() / exact.norm()) for y in (out, window, never))
    assert mine < 0.7 * its
    assert mine < 1.3 * without + 0.01


@pytest.mark.parametrize("padded", [False, True])
def test_a_budget_of_all_left_after_a_crop_is_exact(padded):
    """Nothing is lost or counted twice where a summary that stood for cropped blocks was taken apart."""
    keep = torch.ones(2, 110, dtype=torch.bool)
    keep[0, :17] = keep[1, 80:85] = False
    x = sequence(batch=2, keep=keep if padded else None)
    index = sparing.Index("multipole(clusters=5, keys=109, window=0, sinks=0, chunk=32)", seed=3)
    grow(index, x, 90, 1)
    for n in (109, 95, 81, 64, 33, 7):
        index.crop(n, x.k[:, :, :n], x.v[:, :, :n])
        out, _ = grow(index, x, n + 1, 1, first=n)
        wanted = valid_rows(x, at_once(x, "exact").output)[:, :, n:]
        rows = Sequence(x.q, x.k, x.v, None if not padded else keep[:, n:])
        torch.testing.assert_close(valid_rows(rows, out), wanted, rtol=0, atol=1e-9)


def test_reset_starts_again():
    x, y, index = sequence(), sequence(batch=3, heads=3, d=5, seed=8), sparing.Index(MULTIPOLE, seed=3)
    decodes_as_prefill(index, x, 50, 1)
    index.reset()
    assert (index.length, index.batch, index.statistics) == (0, 0, {})
    decodes_as_prefill(index, y, 50, 1)
    index.crop(0, y.k[:, :, :0], y.v[:, :, :0])
    assert (index.length, index.batch) == (0, 0)


def test_statistics():
    x = sequence(n=200)
    index = sparing.Index("multipole(clusters=8, keys=150, window=8, chunk=32)", seed=3)
    index.attention(*x.part(0, 100))
    index.attention(*x.part(100, 101))
    assert index.statistics == {}, "the budget covers all keys"
    exact = at_once(x, "exact").output
    out = index.attention(*x.part(101, 180))
    assert set(index.statistics) == {"lse", "error", "touched"}
    assert all(y.shape == (1, 2, 79) for y in index.statistics.values())
    assert index.statistics["error"].dtype == torch.float64
    found, wanted = index.statistics["error"], (out - exact[:, :, 101:180]).norm(dim=-1)
    # A prediction: of the right size on the whole, and zero where everything is read.
    assert 0.3 < float(found.square().mean().sqrt() / wanted.square().mean().sqrt()) < 3
    few = sparing.Index("multipole(clusters=2, keys=100, window=0, sinks=0, chunk=64)", seed=3)
    few.attention(*x.part(0, 101))
    few.attention(*x.part(101, 105))
    assert not bool(few.statistics["error"][few.statistics["touched"] == torch.arange(102, 106)].any())
    assert int(index.statistics["touched"].max()) <= 150 + 8 + 8 + 1 + 8 * 6


@EVERY
def test_a_budget_above_the_keys_is_exact(spec):
    x = sequence(heads=4, kv_heads=2)
    method = sparing.method(spec).full_budget(sparing.Shape(heads=4, queries=110, keys=110, head_dim=8, value_dim=6))
    wanted = at_once(x, "exact").output
    for step in (1, 13):
        out, notes = grow(sparing.Index(method), x, 20, step)
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-9)
        assert all(found == {} for _, _, found in notes[1:])


def test_from_covered_to_not():
    """The budget covers the prompt, later no more: nothing was missed meanwhile."""
    x = sequence()
    for spec in ("multipole(clusters=8, keys=60, chunk=32, window=8)", "top_keys(keys=60)", "window(size=60)"):
        decodes_as_prefill(sparing.Index(spec, seed=3), x, 10, 1)


def test_seeds():
    x = sequence()
    state = torch.get_rng_state()
    one, two = (grow(sparing.Index(MULTIPOLE), x, 50, 1)[0] for _ in range(2))
    assert torch.equal(one, two)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    drawn = sparing.Index(MULTIPOLE, seed=None)
    torch.manual_seed(5)
    assert sparing.Index(MULTIPOLE, seed=None).seed == drawn.seed
    assert sparing.Index(MULTIPOLE, seed=None).seed != drawn.seed
    decodes = sparing.Index(MULTIPOLE, seed=-3)
    torch.testing.assert_close(grow(decodes, x, 50, 1)[0], at_once(x, MULTIPOLE, seed=-3).output, rtol=0, atol=1e-9)


@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(spec, dtype):
    """Computed in float32: a step errs by the rounding of its output."""
    x = sequence(heads=4, kv_heads=2)
    x = Sequence(*(y.to(dtype) for y in x[:3]))
    wide = Sequence(*(y.float() for y in x[:3]))
    out, _ = grow(sparing.Index(spec, seed=3), x, 50, 7)
    assert out.dtype == dtype
    wanted, _ = grow(sparing.Index(spec, seed=3), wide, 50, 7)
    torch.testing.assert_close(out.float(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@KINDS
def test_strides_do_not_matter(spec):
    """Caches are views of something larger, and heads may come second to last."""
    x = sequence(heads=4, kv_heads=2)
    wanted, _ = grow(sparing.Index(spec, seed=3), x, 50, 1)
    room = Sequence(*(torch.full((1, y.shape[1], 200, y.shape[3]), torch.nan, dtype=y.dtype) for y in x[:3]))
    for a, b in zip(room[:3], x[:3]):
        a[:, :, :110] = b
    assert torch.equal(
        grow(sparing.Index(spec, seed=3), Sequence(*(y[:, :, :110] for y in room[:3])), 50, 1)[0], wanted
    )
    turned = Sequence(*(y.transpose(1, 2).contiguous().transpose(1, 2) for y in x[:3]))
    torch.testing.assert_close(grow(sparing.Index(spec, seed=3), turned, 50, 1)[0], wanted, rtol=0, atol=1e-12)


def test_inputs_are_not_written_to():
    keep = torch.ones(1, 110, dtype=torch.bool)
    keep[0, :5] = False
    x = sequence(keep=keep)
    before = Sequence(*(y.clone() for y in x))
    grow(sparing.Index(MULTIPOLE, seed=3), x, 50, 1)
    assert all(torch.equal(a, b) for a, b in zip(x, before))


def test_masks_may_come_with_four_axes():
    keep = torch.ones(2, 110, dtype=torch.bool)
    keep[0, :31] = False
    x = sequence(batch=2, keep=keep)
    wanted, _ = grow(sparing.Index(MULTIPOLE, seed=3), x, 50, 50)
    index, outs = sparing.Index(MULTIPOLE, seed=3), []
    for a, b in ((0, 50), (50, 100), (100, 110)):
        outs.append(index.attention(*x.part(a, b)[:3], keep[:, None, None, :b]))
    assert torch.equal(torch.cat(outs, dim=2), wanted)
    # No mask is a mask of ones.
    index, y = sparing.Index(MULTIPOLE, seed=3), sequence()
    index.attention(*y.part(0, 50))
    index.attention(*y.part(50, 51)[:3], torch.ones(1, 51, dtype=torch.bool))
    index.attention(*y.part(51, 52))


# What is refused.


def started(spec: str = MULTIPOLE) -> tuple[sparing.Index, Sequence]:
    x, index = sequence(n=60, batch=2, heads=4, kv_heads=2), sparing.Index(spec, seed=3)
    index.attention(*x.part(0, 50))
    return index, x


def refused(index: sparing.Index, message: str, *call: Any) -> None:
    """Nothing has changed after the error."""
    before = (index.length, index.batch)
    for use in (index.attention, index.append):
        with pytest.raises(ValueError, match=message):
            use(*call)
    assert (index.length, index.batch) == before


def test_methods_that_cannot_decode_are_named():
    with pytest.raises(sparing.Unsupported, match=r"method: nystrom cannot .*; methods that can: .*multipole.*window"):
        sparing.Index("nystrom")
    for bad in (True, 1.5, "3"):
        with pytest.raises(TypeError, match=r"seed=.* must be an integer or None"):
            sparing.Index(MULTIPOLE, seed=bad)  # type: ignore[arg-type]


def test_shapes_that_do_not_fit_are_refused():
    index, x = started()
    q, k, v, _ = x.part(50, 51)
    refused(index, r"query has shape \[4, 1, 8\]; it must be \[batch, heads, positions, size\]", q[0], k, v)
    refused(index, r"key has shape", q, k[0], v)
    refused(index, r"value has shape", q, k, v[0])
    refused(
        index, r"query \[2, 4, 1, 8\], key \[2, 2, 51, 8\] and value \[2, 2, 50, 6\] do not fit", q, k, v[:, :, :-1]
    )
    refused(index, "do not fit together", q[..., :7], k, v)
    refused(index, "do not fit together", q[:1], k, v)
    refused(index, "query has 3 heads, not a multiple of the 2 of key", q[:, :3], k, v)
    refused(index, r"a batch of 1, but the index follows 2; call select\(\) or reset\(\)", q[:1], k[:1], v[:1])


@pytest.mark.parametrize("spec", [MULTIPOLE, "window(size=16)", "top_keys(keys=8)"])
def test_other_heads_widths_and_types_than_before_are_refused(spec):
    index, x = started(spec)
    q, k, v, _ = x.part(50, 51)
    refused(index, "the index follows", q[:, :2], k, v)
    refused(index, "the index follows", q, k[:, :1], v[:, :1])
    refused(index, "the index follows", q[..., :4], k[..., :4], v)
    refused(index, "the index follows", q, k, v[..., :4])
    refused(index, "the index follows", q.float(), k.float(), v.float())
    refused(index, "of one type", q, k.float(), v)


def test_sequences_that_shrink_or_jump_are_refused():
    index, x = started()
    refused(index, r"key has 40 positions, .* knows 50 and query brings 1: the sequence shrank; call crop\(\) first",
            *x.part(39, 40))  # fmt: skip
    refused(index, r"key has 55 positions, .* holds keys whose queries it never saw", *x.part(54, 55))
    refused(index, "query brings 0", *x.part(50, 50))
    fresh = sparing.Index(MULTIPOLE)
    refused(fresh, "holds keys whose queries it never saw", *x.part(40, 50))
    refused(fresh, "query brings 0", *x.part(0, 0))
    for bad in (51, -1):
        with pytest.raises(ValueError, match=rf"length={bad} must be from 0 to 50, the positions that the index knows"):
            index.crop(bad, x.k[:, :, :50], x.v[:, :, :50])
    with pytest.raises(ValueError, match="as they are afterwards"):
        index.crop(20, x.k[:, :, :50], x.v[:, :, :50])
    assert index.length == 50


def test_masks_that_do_not_fit_are_refused():
    index, x = started()
    q, k, v, _ = x.part(50, 51)
    shown = torch.ones(2, 51, dtype=torch.bool)
    refused(index, r"attn_mask: torch.float32 \[2, 51\] must be boolean, \[2, 51\]", q, k, v, shown.float())
    refused(index, r"attn_mask: torch.bool \[2, 50\] must be boolean, \[2, 51\]", q, k, v, shown[:, :50])
    refused(index, r"attn_mask", q, k, v, shown[:, None, None].expand(2, 4, 1, 51))
    hidden = shown.clone()
    hidden[1, 7] = False
    refused(index, r"attn_mask hides other keys than at the call before; call reset\(\)", q, k, v, hidden)
    index.reset()
    index.attention(*x.part(0, 50)[:3], hidden[:, :50])
    refused(index, "attn_mask hides other keys", q, k, v)
    index.attention(q, k, v, hidden)


@pytest.mark.parametrize("spec", [MULTIPOLE, "multipole(keys=100)", "window(size=16)", "top_keys(keys=8)"])
def test_there_is_no_gradient(spec):
    index, x = started(spec)
    q, k, v, _ = x.part(50, 51)
    q = q.clone().requires_grad_()
    with pytest.raises(sparing.Unsupported, match=r"decoding has no gradient; call it under torch\.no_grad\(\)"):
        index.attention(q, k, v)
    assert index.length == 50
    with torch.no_grad():
        assert not index.attention(q, k, v).requires_grad
    assert index.length == 51


@KINDS
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_what_is_not_finite_spoils_what_it_spoils_in_one_call(spec, which, bad):
    """In the prompt, in a step, and in a padded slot, where it spoils nothing."""
    for place, hidden in ((12, False), (70, False), (77, True)):
        keep = torch.ones(2, 110, dtype=torch.bool)
        keep[0, place] = not hidden
        x = sequence(batch=2, heads=2, kv_heads=1, keep=keep)
        getattr(x, which)[0, 0, place, 2] = bad
        wanted = valid_rows(x, at_once(x, spec).output)
        assert hidden != bool(wanted.isnan().any())
        for method in (
            spec,
            sparing.method(spec).full_budget(sparing.Shape(heads=4, queries=110, keys=110, head_dim=8, value_dim=6)),
        ):
            wanted = valid_rows(x, at_once(x, method).output)
            out = valid_rows(x, grow(sparing.Index(method, seed=3), x, 60, 1 if hidden else 20)[0])
            torch.testing.assert_close(out, wanted, rtol=0, atol=1e-9, equal_nan=True)


def test_a_crop_takes_what_is_not_finite_away():
    x = sequence()
    for place in (80, 100):
        y = Sequence(*(t.clone() for t in x[:3]))
        y.v[0, 0, place, 2] = torch.inf
        index = sparing.Index("multipole(clusters=8, keys=109, window=8, chunk=32)", seed=3)
        assert bool(grow(index, y, 50, 1)[0].isnan().any())
        index.crop(place, x.k[:, :, :place], x.v[:, :, :place])
        wanted = at_once(x, "exact").output[:, :, place:]
        torch.testing.assert_close(grow(index, x, place + 1, 1, first=place)[0], wanted, rtol=0, atol=1e-9)


def test_autocast_changes_nothing():
    for spec in (MULTIPOLE, "window(size=16)", "top_keys(keys=8)", "top_keys(keys=500)"):
        x = sequence(dtype=torch.float32)
        wanted, _ = grow(sparing.Index(spec, seed=3), x, 50, 7)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(grow(sparing.Index(spec, seed=3), x, 50, 7)[0], wanted)


@pytest.mark.parametrize("padded", [False, True])
def test_a_crop_leaves_every_key_in_one_place(padded):
    """Of equal keys a summary is exact, so that a key that is lost, or counted twice, shows at any budget."""
    keep = torch.ones(2, 110, dtype=torch.bool)
    keep[0, :17] = keep[1, 80:85] = False
    x = sequence(batch=2, keep=keep if padded else None)
    x = x._replace(k=x.k[:, :, :1].expand_as(x.k).contiguous())
    wanted = valid_rows(x, at_once(x, "exact").output)
    for n in (109, 95, 81, 64, 59, 33, 7):
        index = sparing.Index("multipole(clusters=5, keys=3, window=20, sinks=1, chunk=32)", seed=3)
        grow(index, x, 90, 20)
        index.crop(n, x.k[:, :, :n], x.v[:, :, :n])
        out, _ = grow(index, x, n + 1, 1, first=n)
        rows = x._replace(keep=keep[:, n:] if padded else None)
        torch.testing.assert_close(valid_rows(rows, out), wanted[:, :, n:], rtol=0, atol=1e-9)


def test_a_prompt_that_fails_leaves_nothing_behind(monkeypatch):
    """Not even what the prompt would have left to the index, which may be of other sizes."""
    x, index = sequence(), sparing.Index(MULTIPOLE, seed=3)
    other = (torch.randn(3, 6, 9, 4), torch.randn(3, 3, 9, 4), torch.randn(3, 3, 9, 7))
    with monkeypatch.context() as patch:
        patch.setattr("sparing.index.inspect", raise_memory_error)
        with pytest.raises(MemoryError):
            index.attention(*other)
    assert index.length == 0
    index.append(*x.part(0, 60))
    torch.testing.assert_close(
        grow(index, x, 61, 1, first=60)[0], at_once(x, MULTIPOLE).output[:, :, 60:], rtol=0, atol=1e-9
    )


def raise_memory_error(*args, **kwargs):
    raise MemoryError


def test_streams_are_one_for_each_key_head():
    with pytest.raises(ValueError, match="streams: 3 numbers for 2 key-value heads"):
        sparing.Index(MULTIPOLE, streams=[1, 2, 3]).append(*sequence().part(0, 60))
