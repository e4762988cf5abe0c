"""The kernels of hash-bucket attention against the specification, for every instruction set of the machine."""

import pytest
import torch

import sparing
from sparing import native
from sparing.maths.hashing import rotation_buckets
from sparing.methods.lsh import native as kernels
from sparing.methods.lsh.native import lsh
from tests.support.kernel_checks import every_instruction_set, needs_kernels, no_worse, same_for_any_threads

pytestmark = needs_kernels


def inputs(n_q, d, e, n_k=None, batch=2, heads=2, dtype=torch.float32):
    gen = torch.Generator().manual_seed(n_q + d)
    sizes = ((n_q, d), (n_k or n_q, d), (n_k or n_q, e))
    return [torch.randn(batch, heads, n, w, generator=gen, dtype=dtype) * 1.5 for n, w in sizes]


def keep_of(n, share=0.7):
    return torch.rand(2, n, generator=torch.Generator().manual_seed(n)) < share


def buckets_of(n, count=6, rounds=3, heads=2, seed=0):
    gen = torch.Generator().manual_seed(n + seed)
    return torch.randint(count, (rounds, 2, heads, n), generator=gen, dtype=torch.int32)


def rotations(heads, rows, rounds, d):
    return torch.randn(heads, rows, rounds, d, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)


def buckets_equal(x, normals, used):
    found = kernels.rotation_buckets(x, normals, used)
    wanted = torch.stack([rotation_buckets(x, normals[:, :, r], used) for r in range(normals.shape[2])])
    assert found.dtype == torch.int32
    assert torch.equal(found.long(), wanted)


@every_instruction_set
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("n", "d", "rows"), [(1, 1, 1), (17, 1, 9), (70, 5, 7), (33, 20, 130), (400, 64, 40), (40, 127, 33), (20, 300, 6)]
)
def test_buckets_are_those_of_float64(isa, n, d, rows, dtype):
    x = inputs(n, d, 1, heads=3, dtype=dtype)[0]
    x[0, 0, 0] = 0.0  # bucket 0
    if n > 8:
        x[0, 1, 1], x[0, 1, 2] = x[0, 1, 1] * 1e-30, x[0, 1, 2] * 1e18  # not to be rounded
        x[0, 1, 3, 1:] = 0.0
        x[0, 1, 4, 0] = 1e4  # the others vanish when rounded
    with native.instruction_set(isa):
        buckets_equal(x, rotations(3, rows, 2, d), torch.tensor([2 * rows]))
        buckets_equal(x, rotations(3, rows, 2, d), torch.tensor([max(rows // 2 * 2, 1), 1]))


@every_instruction_set
def test_buckets_of_rows_that_rounding_cannot_tell_apart(isa):
    """Rotations in near-equal pairs: only float64 knows which is the larger; and in equal ones: the first."""
    x = inputs(200, 16, 1)[0]
    normals = rotations(2, 12, 1, 16)
    normals[:, 1::2] = normals[:, ::2] * (1 + 1e-6 * rotations(2, 6, 1, 1))
    normals[:, 3] = -normals[:, 2]
    normals[:, 5] = normals[:, 4]
    with native.instruction_set(isa):
        buckets_equal(x, normals, torch.tensor([24]))


@every_instruction_set
@pytest.mark.parametrize("d", [64, 100])
def test_buckets_where_the_sums_of_rounded_numbers_are_as_large_as_they_can_be(isa, d):
    """Tokens along their rows, all entries of one size: sums in 16 bits would overflow, were tokens not scaled down."""
    signs = rotations(2, 30, 1, d).sign()
    x = (3.0 * signs[:, :, 0]).float().expand(2, 2, 30, d)
    with native.instruction_set(isa):
        buckets_equal(x, signs, torch.tensor([60]))
        buckets_equal(-x, signs, torch.tensor([60]))


def test_buckets_read_any_strides_and_many_tokens():
    x = torch.randn(2, 3, 16, 700).mT
    buckets_equal(x, rotations(3, 20, 2, 16), torch.tensor([40]))
    buckets_equal(x.transpose(1, 2).contiguous().transpose(1, 2), rotations(3, 20, 2, 16), torch.tensor([40]))


SPECS = [
    "lsh(rounds=3, chunk=8)",
    "lsh(rounds=2, chunk=5, combine=sum)",
    "lsh(rounds=5, chunk=3, buckets=4)",
    "lsh(rounds=2, chunk=8, align=rank)",
    "lsh(rounds=2, chunk=400)",
]


SIZES = [(1, 1, 1, 1), (17, 17, 20, 3), (130, 130, 80, 33), (65, 150, 128, 16), (150, 9, 8, 80)]
CASES = [
    (*size, spec, causal)
    for size in SIZES
    for spec in SPECS
    for causal in (False, True)
    if "rank" not in spec or (size[0] == size[1] and not causal)
]


@every_instruction_set
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("n_q", "n_k", "d", "e", "spec", "causal"), CASES)
def test_no_worse_than_plain_float32(isa, n_q, n_k, d, e, spec, masked, causal):
    mask = keep_of(n_k)[:, None, None] if masked else None
    options = {"method": spec, "attn_mask": mask, "is_causal": causal, "seed": 1}

    def by(impl):
        return lambda q, k, v: sparing.attention(q, k, v, impl=impl, **options)

    with native.instruction_set(isa):
        no_worse(by("native"), by("reference"), inputs(n_q, d, e, n_k), what=f"{isa}, {spec}")


@every_instruction_set
@pytest.mark.parametrize("causal", [False, True])
def test_log_sum_exp_and_hits_and_grouped_heads(isa, causal):
    q, k, v = inputs(90, 16, 12, heads=4)
    options = {"method": "lsh(rounds=3, chunk=4)", "is_causal": causal, "seed": 2, "enable_gqa": True}
    with native.instruction_set(isa):
        found, wanted = (
            sparing.inspect(q, k[:, ::2], v[:, ::2], impl=impl, **options) for impl in ("native", "reference")
        )
    torch.testing.assert_close(found.output, wanted.output, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.lse, wanted.lse, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.statistics["hits"], wanted.statistics["hits"])


@every_instruction_set
@pytest.mark.parametrize("rule", ["bucket", "causal"])
def test_gradient_through_the_log_sum_exp(isa, rule):
    """Which merging parts needs. One key per query at most: the log-sum-exp is its score."""
    n = 40
    in_q = buckets_of(n, 2 * n, rounds=1)
    in_k = torch.arange(n, dtype=torch.int32).expand(1, 2, 2, n).contiguous()

    def kernel(q, k, v):
        return lsh(q, k, v, in_q, in_k, None, None, n if rule == "bucket" else 1, rule, True, 0.3)[:2]

    def specification(q, k, v):
        if rule == "bucket":  # the chunk holds every key
            scores = 0.3 * q @ k.mT
            return scores.softmax(-1) @ v, scores.logsumexp(-1)
        position = torch.arange(n)
        seen = (in_q[0].long() < n) & (in_q[0] <= position)  # else a query is alone with its own key
        key = torch.where(seen, in_q[0].long(), position)
        of = [x.gather(2, key[..., None].expand(-1, -1, -1, x.shape[-1])) for x in (k, v)]
        return of[1], (0.3 * q * of[0]).sum(-1)

    with native.instruction_set(isa):
        no_worse(kernel, specification, inputs(n, 24, 7), what=isa)


def test_reads_any_strides():
    in_q, in_k = buckets_of(50), buckets_of(50, seed=1)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(50, 16, 16))
    limits = (in_q, in_k, None, None, 4, "bucket", True, 0.25)
    wanted = lsh(*(x.contiguous() for x in (q, k, v)), *limits)
    for given in ((q, k, v), [x.mT.contiguous().mT for x in (q, k, v)]):
        assert all(torch.equal(a, b) for a, b in zip(lsh(*given, *limits), wanted, strict=True))


@pytest.mark.parametrize("rule", ["bucket", "causal", "rank"])
@pytest.mark.parametrize("n", [7, 700])
def test_thread_counts_change_nothing(rule, n):
    def compute():  # four heads: one after the other for three threads, else side by side
        q, k, v = (x.requires_grad_() for x in inputs(n, 32, 20))
        in_q, in_k = (kernels.rotation_buckets(x, rotations(2, 9, 2, 32), torch.tensor([18])) for x in (q, k))
        out, lse, hits = lsh(q, k, v, in_q, in_k, keep_of(n), None, 16, rule, True, 0.125)
        return in_q, out, lse, hits, *torch.autograd.grad(out.square().sum() + lse.clamp_min(-9).sum(), (q, k, v))

    same_for_any_threads(compute)


def test_neighbours_change_nothing():
    """What a query computes does not depend on the other queries of its strip, to the bit."""
    q, k, v = inputs(120, 16, 16)
    in_q, in_k = buckets_of(120), buckets_of(120, seed=1)
    limits = (None, None, 8, "bucket", True, 0.3)
    wanted = lsh(q, k, v, in_q, in_k, *limits)[0]
    few = torch.arange(0, 120, 7)
    other = torch.where(torch.isin(torch.arange(120), few)[:, None], q, 30.0 * q.flip(2))
    turned = torch.where(torch.isin(torch.arange(120), few), in_q, in_q.flip(-1))
    assert torch.equal(lsh(other, k, v, turned, in_k, *limits)[0][:, :, few], wanted[:, :, few])


@pytest.mark.parametrize("needs_grad", [False, True])
def test_opcheck(needs_grad):
    q, k, v = (x.requires_grad_(needs_grad) for x in inputs(20, 8, 5))
    in_q, in_k = buckets_of(20), buckets_of(20, seed=1)
    torch.library.opcheck(torch.ops.sparing.lsh, (q, k, v, in_q, in_k, keep_of(20), None, 3, 1, True, 0.3))
    used = torch.tensor([4, 3])
    torch.library.opcheck(torch.ops.sparing.rotation_buckets, (q.detach(), rotations(2, 4, 3, 8), used))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_as_one_graph(dynamic):
    def attend(q, k, v, normals, keep):
        in_q, in_k = (kernels.rotation_buckets(x, normals, torch.tensor([8])) for x in (q, k))
        return lsh(q, k, v, in_q, in_k, keep, None, 4, "bucket", True, 0.3)

    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (40, 41):
        q, k, v = (x.requires_grad_() for x in inputs(n, 8, 5))
        found, wanted = (f(q, k, v, rotations(2, 4, 3, 8), keep_of(n)) for f in (compiled, attend))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        for a, b in zip(*(torch.autograd.grad(x[0].square().sum(), (q, k, v)) for x in (found, wanted)), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"k": torch.randn(2, 2, 19, 7)}, "k"),
        ({"k": torch.randn(2, 19, 8)}, "k"),
        ({"v": torch.randn(2, 2, 19, 5)}, "v"),
        ({"k": torch.randn(2, 2, 20, 8).double()}, "k"),
        ({"keep": torch.ones(2, 19, dtype=torch.bool)}, "keep"),
        ({"influence": torch.ones(2, 20)}, "influence"),
        ({"in_q": buckets_of(19)}, "in_q"),
        ({"in_q": buckets_of(20).long()}, "in_q"),
        ({"in_k": buckets_of(20)[:2]}, "in_k"),
        ({"in_k": buckets_of(20) - 1}, "in_k holds a negative bucket"),
        ({"in_q": buckets_of(20) + 2**30}, "in_q holds a bucket beyond"),
        ({"in_q": buckets_of(20)[:0], "in_k": buckets_of(20)[:0]}, "at least one round"),
        ({"chunk": 0}, "chunk"),
        ({"rule": 3}, "rule"),
        ({"rule": 2, "q": torch.randn(2, 2, 9, 8), "in_q": buckets_of(9)}, "as many queries as keys"),
    ],
)
def test_sizes_are_checked_in_the_kernel(change, word):
    q, k, v = inputs(20, 8, 5)
    call = {"q": q, "k": k, "v": v, "in_q": buckets_of(20), "in_k": buckets_of(20), "keep": None, "influence": None}
    call |= {"chunk": 4, "rule": 0, "once": True, "scale": 1.0}
    with pytest.raises(RuntimeError, match=word):
        torch.ops.sparing.lsh(**{**call, **change})


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"x": torch.randn(2, 20, 8)}, "x"),
        ({"rotations": rotations(2, 4, 3, 7)}, "rotations"),
        ({"rotations": rotations(1, 4, 3, 8)}, "rotations"),
        ({"rotations": rotations(2, 4, 3, 8).float()}, "rotations"),
        ({"used": torch.tensor([4, 5])}, "used"),
        ({"used": torch.tensor([-1, 4])}, "used"),
        ({"used": torch.tensor([4])}, "used"),
    ],
)
def test_sizes_are_checked_in_the_hash(change, word):
    call = {"x": inputs(20, 8, 5)[0], "rotations": rotations(2, 4, 3, 8), "used": torch.tensor([4, 4])}
    with pytest.raises(RuntimeError, match=word):
        torch.ops.sparing.rotation_buckets(**{**call, **change})


@pytest.mark.parametrize("chunk", [16, 300])  # sums in turn, and sums of many terms
def test_later_tokens_change_no_bit_of_earlier_results_and_gradients(chunk):
    """They move keys to other places of the sorted order, where tiles of a sum would end elsewhere."""
    gen = torch.Generator().manual_seed(0)
    n, t = 1300, 800
    x = torch.randn(3, 1, 1, n, 8, generator=gen)
    weight = torch.randn(1, 1, t, 8, generator=gen)
    found = []
    for later in (x[..., t:, :], 3 * x[..., t:, :].flip(-1)):
        q, k, v = (torch.cat([a, b], dim=-2).requires_grad_() for a, b in zip(x[..., :t, :], later, strict=True))
        out = sparing.attention(q, k, v, is_causal=True, method=f"lsh(rounds=2, chunk={chunk})", seed=0, impl="native")
        early = out[..., :t, :]
        grads = torch.autograd.grad((early * weight).sum(), (q, k, v))
        found.append([early, *(g[..., :t, :] for g in grads)])
    for name, before, after in zip(("output", "q", "k", "v"), *found, strict=True):
        assert torch.equal(before, after), name
