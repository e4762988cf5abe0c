"""Decoding is prefill: an index that sees a sequence piece by piece gives the rows of one call over all of it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import sparing
from sparing import native
from tests.support.growing_sequences import (
    ALLOWED,
    EVERY,
    KINDS,
    MULTIPOLE,
    SPECS,
    Sequence,
    at_once,
    grow,
    sequence,
    valid_rows,
)


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
    module = sys.modules["sparing.methods.multipole.past"]
    monkeypatch.setattr(module, "native", SimpleNamespace(ready=lambda q, half=False: False))


# One token at a time from the start, pieces that cross blocks and chunks, whole chunks, and one token after a prompt.
STEPS = pytest.mark.parametrize(("start", "step"), [(1, 1), (50, 7), (33, 65)])


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


@pytest.mark.parametrize("spec", SPECS[:4])
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


@pytest.mark.parametrize("spec", SPECS[:5])
def test_without_kernels(spec, monkeypatch):
    """Nothing of an index needs the kernels."""
    monkeypatch.setattr(native, "ready", lambda *_, **__: False)
    decodes_as_prefill(sparing.Index(spec, seed=3), sequence(n=90, heads=4, kv_heads=2), 20, 1)


@pytest.mark.parametrize(("d", "e"), [(1, 1), (20, 33), (80, 3)])
def test_any_width(d, e):
    for spec in (MULTIPOLE, "window(size=32, sinks=2)", "top_keys(keys=8)"):
        decodes_as_prefill(sparing.Index(spec, seed=3), sequence(n=100, d=d, e=e), 40, 1)


def test_other_indices_do_not_pass():
    """Control: the check of C17 rejects another tolerance, another scale, a leak and a window that is one key short."""
    x = sequence()
    for other in (
        sparing.Index("multipole(tolerance=0.06, sinks=2, block=16)"),
        sparing.Index(MULTIPOLE, scale=0.3),
        sparing.Index("window(size=14)"),
    ):
        with pytest.raises(AssertionError):
            torch.testing.assert_close(
                grow(other, x, 50, 1)[0],
                at_once(x, "window(size=16)" if other.method.name == "window" else MULTIPOLE).output,
                rtol=0,
                atol=1e-9,
            )

    class Leaky(sparing.Index):
        def attention(self, query, key, value, attn_mask=None):
            out = super().attention(query, key, value, attn_mask)
            return torch.where(
                torch.arange(self.length - query.shape[2], self.length)[:, None] == 77, value[0, 0, 0], out
            )

    with pytest.raises(AssertionError):
        decodes_as_prefill(Leaky(MULTIPOLE, seed=3), x, 50, 1)


def test_the_scale_is_that_of_the_call():
    x = sequence(heads=4, kv_heads=2)
    out, _ = grow(sparing.Index(MULTIPOLE, scale=0.3), x, 50, 1)
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
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)
    in_two = sparing.Index(spec, seed=3)
    in_two.append(*x.part(0, 41))
    in_two.append(*x.part(41, 60))
    torch.testing.assert_close(
        grow(in_two, x, 61, 1, first=60)[0], at_once(x, spec).output[:, :, 60:], rtol=0, atol=1e-9
    )


def test_copies_are_appended_and_never_made_again():
    x, index = sequence(n=200), sparing.Index(MULTIPOLE)
    index.attention(*x.part(0, 5))
    kept: list[Tensor] = []
    for n in range(5, 200):
        index.attention(*x.part(n, n + 1))
        past: Any = index._past
        blocks = (n + 1) // 16
        for old, new, axis in zip(kept, past.copies, (2, 3, 2, 3)):
            assert torch.equal(new.narrow(axis, 0, old.shape[axis]), old), f"after {n + 1} tokens"
        kept = [part.narrow(axis, 0, blocks).clone() for part, axis in zip(past.copies, (2, 3, 2, 3), strict=True)]
    assert blocks == 12


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
    before = index._past.copies  # type: ignore[union-attr]
    index.select(torch.tensor([0, 1]))
    assert index._past.copies is before  # type: ignore[union-attr]
    for bad in ([0, 2], [-1], [[0, 1]]):
        with pytest.raises(ValueError, match=r"items=.* must be a list of integers from 0 to 1"):
            index.select(torch.tensor(bad))
    assert index.batch == 2


@KINDS
@pytest.mark.parametrize("length", [7, 64, 68, 71])
def test_what_is_cropped_was_never_seen(spec, length):
    """Within a block and across several. Bit by bit, statistics too."""
    for keep in (None, torch.ones(2, 110, dtype=torch.bool)):
        x = sequence(batch=2, keep=keep)
        cropped, fresh = sparing.Index(spec, seed=3), sparing.Index(spec, seed=3)
        wrong = sequence(batch=2, seed=5)
        mixed = Sequence(
            *(torch.cat([a[:, :, :length], b[:, :, length:]], 2) for a, b in zip(x[:3], wrong[:3], strict=True)), keep
        )
        for index, y, n in ((cropped, mixed, 71), (fresh, x, length)):
            index.attention(*y.part(0, min(60, n)))
            for i in range(60, n):
                index.attention(*y.part(i, i + 1))
        cropped.crop(length)
        assert cropped.length == length
        for i in range(length, 110):
            assert torch.equal(cropped.attention(*x.part(i, i + 1)), fresh.attention(*x.part(i, i + 1)))
            for name, y in fresh.statistics.items():
                assert torch.equal(cropped.statistics[name], y)


def test_reset_starts_again():
    x, y, index = sequence(), sequence(batch=3, heads=3, d=5, seed=8), sparing.Index(MULTIPOLE, seed=3)
    decodes_as_prefill(index, x, 50, 1)
    index.reset()
    assert (index.length, index.batch, index.statistics) == (0, 0, {})
    decodes_as_prefill(index, y, 50, 1)
    index.crop(0)
    assert (index.length, index.batch) == (0, 0)


def test_from_covered_to_not():
    """The budget covers the prompt, later no more: nothing was missed meanwhile."""
    x = sequence()
    for spec in ("top_keys(keys=60)", "window(size=60)"):
        decodes_as_prefill(sparing.Index(spec, seed=3), x, 10, 1)
