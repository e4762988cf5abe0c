"""What an index takes, what it refuses, and what it does with inputs that are odd."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch

import sparing
from sparing.quarantine import limit_of
from sparing.workbench import memory
from tests.support.growing_sequences import EVERY, KINDS, MULTIPOLE, Sequence, at_once, grow, sequence, valid_rows
from tests.support.kernel_checks import needs_kernels


@KINDS
@pytest.mark.parametrize(("name", "odd"), [*product("qkv", [torch.nan, torch.inf, -torch.inf])])
def test_what_is_odd_in_a_single_step_is_treated_as_at_once(name, odd, spec):
    x = sequence()
    getattr(x, name)[0, 0, 83, 2] = odd
    out, _ = grow(sparing.Index(spec, seed=3), x, 80, 1)
    wanted = at_once(x, spec).output
    assert not torch.equal(wanted[:, :, 80:], at_once(sequence(), spec).output[:, :, 80:])
    torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-9, equal_nan=True)


@EVERY
@pytest.mark.parametrize(("dtype", "large"), [(torch.float32, 1e20), (torch.float64, 1e200)])
def test_entries_whose_products_could_overflow_are_refused_and_nothing_changes(spec, dtype, large):
    x = sequence(dtype=dtype)
    for name in "qk":
        y = Sequence(*(t.clone() for t in x[:3]))
        getattr(y, name)[0, 0, 83, 2] = large
        index = sparing.Index(spec, seed=3)
        for start, stop in ((0, 90), (80, 84)):  # in a prompt, and after one
            if start:
                index.attention(*x.part(0, start))
            with pytest.raises(ValueError, match=r"(query|key) .*entries of up to .*"):
                index.attention(*y.part(start, stop))
            assert index.length == start
        wanted, _ = grow(sparing.Index(spec, seed=3), x, 80, 4)
        assert torch.equal(grow(index, x, 84, 4, first=80)[0], wanted[:, :, 80:])


def test_statistics():
    x = sequence(n=200)
    index, all_of_it = sparing.Index("multipole(tolerance=0.1, block=16)"), sparing.Index("multipole(tolerance=0)")
    for one in (index, all_of_it):
        one.attention(*x.part(0, 101))
    exact, out = at_once(x, "exact").output, index.attention(*x.part(101, 180))
    assert set(index.statistics) == {"lse", "error", "touched"}
    assert all(y.shape == (1, 2, 79) for y in index.statistics.values())
    assert index.statistics["error"].dtype == torch.float64
    found, wanted = index.statistics["error"], (out - exact[:, :, 101:180]).norm(dim=-1)
    # A prediction: of the right size on the whole.
    assert 0.3 < float(found.square().mean().sqrt() / wanted.square().mean().sqrt()) < 3
    all_of_it.attention(*x.part(101, 180))
    assert all_of_it.statistics == {}, "the budget covers all keys"


@EVERY
def test_a_budget_above_the_keys_is_exact(spec):
    x = sequence(heads=4, kv_heads=2)
    method = sparing.method(spec).full_budget(sparing.Shape(heads=4, queries=110, keys=110, head_dim=8, value_dim=6))
    wanted = at_once(x, "exact").output
    for step in (1, 13):
        out, notes = grow(sparing.Index(method), x, 20, step)
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-9)
        assert all(found == {} for _, _, found in notes[1:])


def test_repr():
    index, x = sparing.Index("multipole(tolerance=0.2, block=32)", seed=3), sequence(batch=2)
    index.attention(*x.part(0, 60))
    assert repr(index) == "Index('multipole(tolerance=0.2, block=32)', seed=3): 60 positions, batch of 2"


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
    """Computed in float32: steps, and the same rows at once, err by the rounding of their output."""
    x = sequence(heads=4, kv_heads=2)
    x = Sequence(*(y.to(dtype) for y in x[:3]))
    wide = Sequence(*(y.float() for y in x[:3]))
    out, _ = grow(sparing.Index(spec, seed=3), x, 50, 7)
    assert out.dtype == dtype
    wanted, _ = grow(sparing.Index(spec, seed=3), wide, 50, 7)
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(out.float(), wanted, rtol=2 * rounding, atol=1e-6)
    torch.testing.assert_close(out, at_once(x, spec).output, rtol=2 * rounding, atol=1e-6)


PEAKS = """
import torch, sparing
from sparing.workbench import memory

n = 32768
for dtype in (torch.bfloat16, torch.float16):
    for spec in ("multipole", "window(size=256, sinks=4)", "top_keys(keys=8)"):
        k, v = (torch.randn(1, 2, n + 2, 64).to(dtype) for _ in range(2))
        q, index = torch.randn(1, 6, 2, 64).to(dtype), sparing.Index(spec)
        index.adopt(k[:, :, :n], v[:, :, :n], heads=6)
        index.attention(q[:, :, :1], k[:, :, :-1], v[:, :, :-1])
        peak = memory.peak_extra_bytes(lambda: index.attention(q[:, :, 1:], k, v))
        print(peak / (k.numel() * k.element_size()))
"""


@needs_kernels
@pytest.mark.skipif(not memory.can_measure(), reason="this system does not tell a peak of memory")
def test_a_step_takes_a_small_part_of_the_memory_of_a_16_bit_cache():
    """A quarter of the 8 MiB of its keys, scratch of the kernels included; top_keys, the control, converts all of them."""
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shares = [float(line) for line in done.stdout.split()]
    for multipole, window, control in (shares[:3], shares[3:]):
        assert max(multipole, window) < 0.25
        assert control > 1


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
    with pytest.raises(
        sparing.Unsupported, match=r"method: nystrom cannot .*; methods that can: multipole, skip, top_keys, window"
    ):
        sparing.Index("nystrom")
    for bad in (True, 1.5, "3"):
        with pytest.raises(TypeError, match=r"seed=.* must be an integer or None"):
            sparing.Index(MULTIPOLE, seed=bad)  # type: ignore[arg-type]


def test_no_heads_are_refused():
    for q, k in ((0, 0), (0, 2), (4, 0)):
        given = [torch.randn(1, heads, 5, 8) for heads in (q, k, k)]
        with pytest.raises(ValueError, match=f"query has {q} heads and key {k}; each must have at least one"):
            sparing.Index(MULTIPOLE).attention(*given)


def test_a_head_dimension_of_zero_is_refused():
    x, v = torch.randn(1, 2, 5, 0), torch.randn(1, 2, 5, 4)
    with pytest.raises(ValueError, match=r"query has head dimension 0, shape \[1, 2, 5, 0\]; use sparing.attention"):
        sparing.Index("multipole").attention(x, x, v)


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
    refused(index, "must have the same floating-point dtype", q, k.float(), v)


def test_sequences_that_shrink_or_jump_are_refused():
    index, x = started()
    refused(index, r"key has 40 positions, .* knows 50 and query has 1: the sequence shrank; call crop\(\) first",
            *x.part(39, 40))  # fmt: skip
    refused(index, r"key has 55 positions, .* holds keys whose queries were never seen", *x.part(54, 55))
    q, k, v, mask = x.part(49, 50)
    refused(index, "nothing new arrived; key and value must hold the positions of query, too", q, k, v, mask)
    with pytest.raises(TypeError, match="query is str; it must be a tensor"):
        index.attention("q", k, v)
    refused(index, "query has 0", *x.part(50, 50))
    fresh = sparing.Index(MULTIPOLE)
    refused(fresh, "holds keys whose queries were never seen", *x.part(40, 50))
    refused(fresh, "query has 0", *x.part(0, 0))
    for bad in (51, -1):
        with pytest.raises(ValueError, match=rf"length={bad} must be from 0 to 50, the positions that the index knows"):
            index.crop(bad)
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
    refused(index, r"attn_mask hides other keys than in the previous call; call reset\(\)", q, k, v, hidden)
    index.reset()
    index.attention(*x.part(0, 50)[:3], hidden[:, :50])
    refused(index, "attn_mask hides other keys", q, k, v)
    index.attention(q, k, v, hidden)


@pytest.mark.parametrize("spec", [MULTIPOLE, "multipole(tolerance=0)", "window(size=16)", "top_keys(keys=8)"])
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", ["multipole(tolerance=0)", "window(size=400)", "top_keys(keys=400)", MULTIPOLE])
def test_what_is_not_finite_in_sixteen_bits(spec, dtype):
    """It is taken out in float32, also where the budget covers all keys."""
    x = sequence(heads=4, kv_heads=2)
    x = Sequence(*(y.to(dtype) for y in x[:3]))
    x.v[0, 0, 83, 2] = torch.inf
    out, _ = grow(sparing.Index(spec, seed=3), x, 80, 1)
    wanted = at_once(x, spec).output
    assert bool(wanted.isnan().any())
    assert out.dtype == dtype
    torch.testing.assert_close(out, wanted, rtol=0, atol=4 * torch.finfo(dtype).eps, equal_nan=True)


@KINDS
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_huge_in_padding_is_not_refused(spec, name):
    keep = torch.ones(2, 110, dtype=torch.bool)
    keep[0, 5] = keep[0, 83] = False
    x = sequence(batch=2, dtype=torch.float32, keep=keep)
    wanted = valid_rows(x, at_once(x, spec).output)
    getattr(x, name)[0, :, [5, 83]] = 1e20
    out, _ = grow(sparing.Index(spec, seed=3), x, 80, 1)
    torch.testing.assert_close(valid_rows(x, out), wanted, rtol=0, atol=1e-5)


def test_a_crop_takes_what_is_not_finite_away():
    x = sequence()
    for place in (80, 100):
        y = Sequence(*(t.clone() for t in x[:3]))
        y.v[0, 0, place, 2] = torch.inf
        index = sparing.Index("multipole(tolerance=0, block=32)")
        assert bool(grow(index, y, 50, 1)[0].isnan().any())
        index.crop(place)
        wanted = at_once(x, "exact").output[:, :, place:]
        torch.testing.assert_close(grow(index, x, place + 1, 1, first=place)[0], wanted, rtol=0, atol=1e-9)


@KINDS
def test_what_is_large_together_but_not_alone(spec):
    """Each of k and v is below the limit up to which a step looks no closer, and both together are not."""
    x = sequence()
    x.k[0, 0, 83, 2] = x.v[0, 0, 83, 2] = 0.8 * limit_of(x.k.dtype)
    out, _ = grow(sparing.Index(spec, seed=3), x, 80, 1)
    torch.testing.assert_close(out, at_once(x, spec).output, rtol=1e-9, atol=1e-9)


def test_autocast_changes_nothing():
    for spec in (MULTIPOLE, "window(size=16)", "top_keys(keys=8)", "top_keys(keys=500)"):
        x = sequence(dtype=torch.float32)
        wanted, _ = grow(sparing.Index(spec, seed=3), x, 50, 7)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(grow(sparing.Index(spec, seed=3), x, 50, 7)[0], wanted)


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


class HungryPast:
    """Takes more memory than there is in the calls that `hungry` names."""

    hungry: tuple[str, ...] = ()

    def __getattr__(self, name):
        def call(*args, **kwargs):
            return torch.empty(2**50) if name in self.hungry else None

        return call


@dataclass(frozen=True, kw_only=True)
class HungryMethod(sparing.Method):
    name = "_hungry_past"
    budget = "meals"
    supports = sparing.Supports(causal=True, decode=True)
    meals: int = 3

    def reference(self, q, k, v, call):
        return torch.zeros_like(v)

    def past(self, *args):
        return HungryPast()


@pytest.mark.parametrize(
    ("hungry", "use", "sizes"),
    [
        ("learn", lambda index, x: index.append(*x.part(40, 41)), r"query \[1, 2, 1, 8\] and key \[1, 2, 41, 8\]"),
        ("step", lambda index, x: index.attention(*x.part(40, 41)), r"query \[1, 2, 1, 8\] and key \[1, 2, 41, 8\]"),
        ("select", lambda index, x: index.select(torch.tensor([0, 0])), r"items \[2\]"),
    ],
    ids=["append", "attention", "select"],
)
def test_running_out_of_memory_names_the_method_the_sizes_and_the_way_out(hungry, use, sizes, monkeypatch):
    x, index = sequence(), sparing.Index(HungryMethod())
    index.attention(*x.part(0, 40))
    monkeypatch.setattr(HungryPast, "hungry", (hungry,))
    with pytest.raises(MemoryError, match=rf"^_hungry_past\(meals=3\): {sizes} need more memory .*; lower meals, or "):
        use(index, x)
    assert (index.length, index.batch) == (40, 1)


def test_streams_are_one_for_each_key_head():
    with pytest.raises(ValueError, match="streams: 3 numbers for 2 key-value heads"):
        sparing.Index(MULTIPOLE, streams=[1, 2, 3]).append(*sequence().part(0, 60))


@pytest.mark.parametrize("spec", ["window(size=6, sinks=1)", "top_keys(keys=3)"])
@pytest.mark.parametrize("padded", [False, True])
def test_keys_without_queries_are_adopted(spec, padded):
    """Later rows are those of an index that saw the queries too; in pieces as well."""
    q, k, v = torch.randn(2, 4, 30, 8), torch.randn(2, 2, 30, 8), torch.randn(2, 2, 30, 8)
    keep = torch.ones(2, 30, dtype=torch.bool)
    keep[0, :5] = False

    def part(n):
        return keep[:, :n] if padded else None

    seen, adopted = sparing.Index(spec), sparing.Index(spec)
    seen.append(q[:, :, :20], k[:, :, :20], v[:, :, :20], part(20))
    for n in (12, 20):
        adopted.adopt(k[:, :, :n], v[:, :, :n], part(n), heads=4)
    assert adopted.length == 20
    for n in (24, 25, 30):
        given = (q[:, :, adopted.length : n], k[:, :, :n], v[:, :, :n], part(n))
        assert torch.equal(adopted.attention(*given), seen.attention(*given))


def test_what_cannot_be_adopted_is_refused_and_changes_nothing():
    index, k = sparing.Index("window(size=6)"), torch.randn(2, 2, 10, 8)
    with pytest.raises(ValueError, match="query has 3 heads, not a multiple of the 2 of key"):
        index.adopt(k, k, heads=3)
    with pytest.raises(ValueError, match=r"key has shape \[2, 10, 8\]"):
        index.adopt(k[:, 0], k[:, 0], heads=2)
    assert index.length == 0
    index.adopt(k, k, heads=4)
    with pytest.raises(ValueError, match="key has 10 positions, and the index knows 10; there is nothing new"):
        index.adopt(k, k, heads=4)
    with pytest.raises(sparing.Unsupported, match=r"_hungry_past learns .*: .*multipole, .*top_keys, .*window"):
        sparing.Index(HungryMethod()).adopt(k, k, heads=4)
