"""Exact attention by kernels against the plain formula. Gradients are computed with keys or queries in the lanes."""

import itertools

import pytest
import torch

import sparing
from sparing import native
from sparing.methods import exact as exact_method
from sparing.native.attend import attend
from tests.support.kernel_checks import every_instruction_set, needs_kernels, no_worse, same_for_any_threads

pytestmark = needs_kernels


def inputs(n_q, n_k, d, e, batch=2, heads=2):
    gen = torch.Generator().manual_seed(n_q + n_k + d)
    shapes = ((n_q, d), (n_k, d), (n_k, e))
    return [torch.randn(batch, heads, *shape, generator=gen) * 1.5 for shape in shapes]


def keep_of(n, share=0.7):
    return torch.rand(2, n, generator=torch.Generator().manual_seed(n)) < share


def bias_of(n):
    """With hidden keys."""
    bias = torch.randn(2, n, generator=torch.Generator().manual_seed(n + 1))
    return bias.masked_fill(bias > 1, -torch.inf)


def specification(keep, bias, scale):
    def compute(q, k, v):
        scores = scale * q @ k.mT
        if bias is not None:
            scores = scores + bias[:, None, None].to(q)
        if keep is not None:
            scores = scores.masked_fill(~keep[:, None, None], -torch.inf)
        return scores.softmax(-1).nan_to_num(0.0) @ v, scores.logsumexp(-1)

    return compute


def kernel(keep, bias, scale):
    def compute(q, k, v):
        return attend(q, k, v, keep, None if bias is None else bias.to(q), scale)

    return compute


# Few keys, as in (700, 300), stand in the lanes of the backward pass; (20, 600) and (130, 520) put the queries there.
SIZES = [(1, 1, 1, 1), (3, 17, 20, 3), (65, 33, 80, 33), (700, 300, 16, 16), (20, 600, 128, 64), (130, 520, 64, 80)]


@every_instruction_set
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("n_q", "n_k", "d", "e"), SIZES)
def test_no_worse_than_plain_float32(isa, n_q, n_k, d, e, masked, biased):
    """Output and log-sum-exp, and the gradients through both."""
    keep, bias = keep_of(n_k) if masked else None, bias_of(n_k) if biased else None
    with native.instruction_set(isa):
        no_worse(kernel(keep, bias, 0.3), specification(keep, bias, 0.3), inputs(n_q, n_k, d, e), what=isa)


def shared(compute, causal=False, keep=None):
    """The same attention with key heads that several query heads share, upper-left causal, in both precisions."""

    def plain(q, k, v):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = 0.3 * q @ k.mT
        if causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
        if keep is not None:
            scores = scores.masked_fill(~keep[:, None, None], -torch.inf)
        return scores.softmax(-1).nan_to_num(0.0) @ v, scores.logsumexp(-1)

    def by_kernel(q, k, v):
        return attend(q, k, v, keep, None, 0.3, causal=causal)

    return plain if compute == "plain" else by_kernel


def grouped(n_q, n_k, d, e, groups):
    q, k, v = inputs(n_q, n_k, d, e, heads=6)
    return [q, k[:, : 6 // groups], v[:, : 6 // groups]]


# Strips of 4 to 32 queries, blocks of 64 and 128, tiles of 128 keys, and their ends; every sort of head size.
CAUSAL = [(1, 1, 1, 1), (33, 33, 5, 3), (70, 40, 256, 17), (40, 70, 64, 64), (131, 131, 32, 32), (300, 300, 80, 200)]


@every_instruction_set
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [1, 3, 6])
@pytest.mark.parametrize(("n_q", "n_k", "d", "e"), CAUSAL)
def test_causal_and_grouped_calls(isa, n_q, n_k, d, e, groups, causal, masked):
    keep = keep_of(n_k, 0.5) if masked else None
    x = grouped(n_q, n_k, d, e, groups)
    with native.instruction_set(isa):
        no_worse(shared("kernel", causal, keep), shared("plain", causal, keep), x, what=isa, gradients=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_causal_and_grouped_calls_in_other_types(dtype):
    x = [t.to(dtype) for t in grouped(70, 70, 20, 33, 3)]
    wide = [t.double() if dtype == torch.float64 else t.float() for t in x]
    found, wanted = shared("kernel", True, keep_of(70))(*x), shared("plain", True, keep_of(70))(*wide)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    if dtype != torch.float64:
        assert all(torch.equal(a, b) for a, b in zip(found, shared("kernel", True, keep_of(70))(*wide), strict=True))


def test_the_assertion_sees_a_key_too_many():
    """Negative control: the last query of a call that is not causal sees all that a causal one does, others see more."""
    x = grouped(33, 33, 5, 3, 3)
    with pytest.raises(AssertionError, match="error"):
        no_worse(shared("kernel", False), shared("plain", True), x, gradients=False)


LENGTHS = (1, 130, 0, 37, 300, 16, 5)


@every_instruction_set
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [16, 33])
def test_a_packed_sequence_gives_the_bits_of_a_call_of_its_own(isa, d, causal):
    total = sum(LENGTHS)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    q, k, v = (x[:1] for x in grouped(total, total, d, 20, 2))
    keep = keep_of(total, 0.8)[:1]
    with native.instruction_set(isa):
        for mask in (None, keep):
            out, lse = attend(q, k, v, mask, None, 0.3, causal=causal, offsets=offsets)
            for begin, end in itertools.pairwise(offsets.tolist()):
                rows = slice(begin, end)
                own = attend(
                    *(x[:, :, rows] for x in (q, k, v)), None if mask is None else mask[:, rows], None, 0.3,
                    causal=causal,
                )  # fmt: skip
                assert torch.equal(out[:, :, rows], own[0])
                assert torch.equal(lse[:, :, rows], own[1])


@every_instruction_set
@pytest.mark.parametrize("causal", [False, True])
def test_padding_and_batch_mates_change_no_bit(isa, causal):
    n, left, right = 150, 61, 9
    q, k, v = grouped(n + left + right, n + left + right, 24, 20, 3)
    keep = torch.ones(2, q.shape[2], dtype=torch.bool)
    keep[1, :left] = keep[1, left + n :] = False
    rows = slice(left, left + n)
    with native.instruction_set(isa):
        padded = attend(q, k, v, keep, None, 0.3, causal=causal)
        alone = attend(*(x[1:, :, rows] for x in (q, k, v)), None, None, 0.3, causal=causal)
    assert all(torch.equal(a[1:, :, rows], b) for a, b in zip(padded, alone, strict=True))


@every_instruction_set
@pytest.mark.parametrize(("n_q", "n_k"), [(40, 30), (30, 600)])
def test_an_item_without_valid_keys(isa, n_q, n_k):
    keep = keep_of(n_k)
    keep[1] = False
    q, k, v = (x.requires_grad_() for x in inputs(n_q, n_k, 8, 5))
    with native.instruction_set(isa):
        out, lse = attend(q, k, v, keep, None, 0.3)
        grads = torch.autograd.grad(out.square().sum() + lse[0].sum(), (q, k, v))
    assert bool((out[1] == 0).all())
    assert bool((lse[1] == -torch.inf).all())
    assert bool((out[0] != 0).all())
    for grad in grads:
        assert bool((grad[1] == 0).all())
        assert grad.isfinite().all()
    assert all(bool((grad[0][:, ~keep[0]] == 0).all()) for grad in grads[1:])


@every_instruction_set
@pytest.mark.parametrize(("n_q", "n_k"), [(40, 30), (30, 600)])
def test_float64(isa, n_q, n_k):
    q, k, v = (x.double() for x in inputs(n_q, n_k, 24, 10))
    with native.instruction_set(isa):
        found = attend(q, k, v, keep_of(n_k), None, 0.3)
    for a, b in zip(found, specification(keep_of(n_k), None, 0.3)(q, k, v), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("n_q", "n_k"), [(50, 40), (40, 600)])
def test_reads_any_strides(n_q, n_k):
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(n_q, n_k, 16, 16))
    wanted = attend(*(x.contiguous() for x in (q, k, v)), None, None, 0.25)
    turned = [x.mT.contiguous().mT for x in (q, k, v)]
    for found in (attend(q, k, v, None, None, 0.25), attend(*turned, None, None, 0.25)):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("n_q", "n_k"), [(1100, 70), (150, 600)])
def test_thread_counts_change_nothing(n_q, n_k):
    def compute():
        q, k, v = (x.requires_grad_() for x in inputs(n_q, n_k, 32, 32, heads=3))
        out, lse = attend(q, k, v, keep_of(n_k), None, 0.125)
        return out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))

    same_for_any_threads(compute)


def test_thread_counts_change_nothing_in_causal_and_packed_calls():
    q, k, v = (x[:1] for x in grouped(700, 700, 32, 32, 2))
    offsets = torch.tensor([0, 0, 90, 100, 550, 700])
    same_for_any_threads(lambda: attend(q, k, v, None, None, 0.125, causal=True, offsets=offsets))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_opcheck(needs_grad):
    q, k, v = (x.requires_grad_(needs_grad) for x in inputs(20, 10, 8, 5))
    torch.library.opcheck(torch.ops.sparing.attend, (q, k, v, keep_of(10), None, 0.3))
    torch.library.opcheck(torch.ops.sparing.attend, (q, k, v, None, bias_of(10), 0.3))


def test_opcheck_of_causal_packed_and_grouped_calls():
    x = [x[:1] for x in grouped(20, 20, 8, 5, 2)]
    torch.library.opcheck(torch.ops.sparing.attend, (*x, None, None, 0.3, True, torch.tensor([0, 7, 20])))


@pytest.mark.parametrize("how", ["causal", "offsets", "groups"])
def test_what_has_no_gradient_says_so(how):
    q, k, v = (x[:1].requires_grad_() for x in grouped(20, 20, 8, 5, 2 if how == "groups" else 1))
    out, _ = attend(
        q, k, v, None, None, 0.3, causal=how == "causal", offsets=torch.tensor([0, 20]) if how == "offsets" else None
    )
    with pytest.raises(NotImplementedError, match="attend has no gradient for causal calls"):
        out.sum().backward()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_as_one_graph(dynamic):
    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (40, 41):
        q, k, v = (x.requires_grad_() for x in inputs(n, 20, 8, 5))
        found, wanted = (f(q, k, v, keep_of(20), None, 0.3) for f in (compiled, attend))
        assert torch.equal(found[0], wanted[0])
        for a, b in zip(*(torch.autograd.grad(x[0].square().sum(), (q, k, v)) for x in (found, wanted)), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"q": torch.randn(2, 20, 8)}, "q"),
        ({"k": torch.randn(2, 2, 19, 7)}, "k"),
        ({"k": torch.randn(2, 2, 19, 8).double()}, "k"),
        ({"v": torch.randn(2, 2, 18, 5)}, "v"),
        ({"keep": torch.ones(2, 20, dtype=torch.bool)}, "keep"),
        ({"keep": torch.ones(2, 19)}, "keep"),
        ({"bias": torch.ones(2, 20)}, "bias"),
        ({"bias": torch.ones(2, 19).double()}, "bias"),
        ({"k": torch.randn(2, 3, 19, 8), "v": torch.randn(2, 3, 19, 5)}, "does not divide"),
        ({"k": torch.randn(2, 0, 19, 8), "v": torch.randn(2, 0, 19, 5)}, "does not divide"),
        ({"v": torch.randn(2, 1, 19, 5)}, "v"),
        ({"offsets": torch.tensor([0, 19])}, "batch of 1"),
    ],
)
def test_sizes_are_checked_in_the_kernel(change, word):
    q, k, v = inputs(20, 19, 8, 5)
    call = {"q": q, "k": k, "v": v, "keep": None, "bias": None, "scale": 1.0}
    with pytest.raises(RuntimeError, match=word):
        torch.ops.sparing.attend(**{**call, **change})


@pytest.mark.parametrize(
    ("offsets", "word"),
    [
        (torch.tensor([0, 5, 18]), "from 0 to"),
        (torch.tensor([1, 5, 19]), "from 0 to"),
        (torch.tensor([0, 9, 5, 19]), "must not fall"),
        (torch.tensor([0, 25, 19]), "must not fall"),
        (torch.tensor([0, 19], dtype=torch.int32), "dtype"),
        (torch.tensor([[0, 19]]), "one axis"),
        (torch.tensor([], dtype=torch.int64), "one axis"),
    ],
)
def test_offsets_are_checked_in_the_kernel(offsets, word):
    q, k, v = (x[:1] for x in inputs(19, 19, 8, 5))
    with pytest.raises(RuntimeError, match=word):
        attend(q, k, v, None, None, 1.0, offsets=offsets)
    with pytest.raises(RuntimeError, match="as many queries"):
        attend(q[:, :, 1:], k, v, None, None, 1.0, offsets=torch.tensor([0, 19]))


@every_instruction_set
def test_a_single_key_gives_queries_no_gradient(isa):
    """Its weight is one whatever the query: the two terms of its slope must cancel to the bit."""
    q, k, v = (x.requires_grad_() for x in inputs(40, 1, 64, 64))
    with native.instruction_set(isa):
        out, _ = attend(q, k, v, None, None, 0.3)
        grads = torch.autograd.grad(out.square().sum(), (q, k))
    assert all(bool((grad == 0).all()) for grad in grads)


def through_the_door(monkeypatch):
    """Count the calls of the kernel that `exact` makes."""
    calls = []

    def counted(*args, **kwargs):
        calls.append(kwargs)
        return attend(*args, **kwargs)

    monkeypatch.setattr(exact_method, "attend", counted)
    return calls


WIDE_SETS = [isa for isa in native.info().available if isa != "portable"]
CALLS = {  # arguments of a call of the door -> whether the kernel is faster
    "plain": ({}, True),
    "causal": ({"is_causal": True}, True),
    "few queries": ({"n_q": 2}, False),
    "few causal queries": ({"n_q": 12, "is_causal": True}, False),
    "padding": ({"attn_mask": keep_of(40)[:, None, None]}, True),
    "causal with padding": ({"is_causal": True, "attn_mask": keep_of(40)[:, None, None]}, True),
    "a mask by query": ({"attn_mask": torch.ones(40, 40, dtype=torch.bool).tril()}, False),
    "shared key heads": ({"kv_heads": 2}, True),
    "16 bits": ({"dtype": torch.bfloat16}, True),
    "dropout": ({"dropout_p": 0.3}, False),
}


@pytest.mark.parametrize("isa", WIDE_SETS)
@pytest.mark.parametrize("name", CALLS)
def test_exact_takes_the_kernel_where_it_is_faster(isa, name, monkeypatch):
    arguments, faster = CALLS[name]
    options = dict(arguments)
    n_q, kv_heads = options.pop("n_q", 40), options.pop("kv_heads", 6)
    dtype = options.pop("dtype", torch.float32)
    q, k, v = (x.to(dtype) for x in inputs(n_q, 40, 8, 5, heads=6))
    k, v = k[:, :kv_heads], v[:, :kv_heads]
    calls = through_the_door(monkeypatch)
    with native.instruction_set(isa):
        out = sparing.attention(q, k, v, enable_gqa=True, seed=1, **options)
    assert bool(calls) == faster
    wanted = sparing.attention(q, k, v, enable_gqa=True, seed=1, impl="reference", **options)
    torch.testing.assert_close(out, wanted)


def test_exact_takes_the_kernel_for_packs_and_the_log_sum_exp_of_any_size(monkeypatch):
    q, k, v = (x[:1] for x in inputs(3, 3, 8, 5))
    calls = through_the_door(monkeypatch)
    sparing.attention(q, k, v, cu_seqlens=torch.tensor([0, 1, 3]))
    lse = sparing.inspect(q, k, v).lse
    assert len(calls) == 2
    torch.testing.assert_close(lse, sparing.inspect(q, k, v, impl="reference").lse)


def test_exact_leaves_gradients_to_torch_unless_asked(monkeypatch):
    x = [t.requires_grad_() for t in grouped(40, 40, 8, 5, 3)]
    calls = through_the_door(monkeypatch)
    grads = {}
    for impl in ("auto", "native", "reference"):
        out = sparing.attention(*x, is_causal=True, enable_gqa=True, impl=impl)
        grads[impl] = torch.autograd.grad(out.square().sum(), x)
        assert len(calls) == (0 if impl == "auto" else 1)
    for impl in ("auto", "native"):
        for a, b in zip(grads[impl], grads["reference"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
