"""The kernels of yoso: the codes of the specification to the bit, its sums and gradients to rounding."""

import pytest
import torch

import sparing
from sparing import native
from sparing.draws import checksum
from sparing.maths.linalg import unit_rows
from sparing.methods.yoso.method import Yoso
from sparing.methods.yoso.native import codes, collision_sums
from tests.support.kernel_checks import every_instruction_set, needs_kernels, no_worse, same_for_any_threads

pytestmark = needs_kernels

SIZES = [(1, 1, 1, 1), (17, 30, 20, 3), (75, 63, 80, 33), (130, 130, 128, 64), (200, 200, 64, 80)]


def inputs(n_q, n_k, d, e, *, heads=2, dtype=torch.float32, topics=6):
    """Tokens around a few directions, so that some buckets are full and others empty."""
    gen = torch.Generator().manual_seed(n_q + d)
    centres = torch.randn(2, heads, topics, d, generator=gen, dtype=dtype)
    q, k = (
        centres[:, :, torch.randint(topics, (n,), generator=gen)]
        + 0.7 * torch.randn(2, heads, n, d, generator=gen, dtype=dtype)
        for n in (n_q, n_k)
    )
    return [q, k, torch.randn(2, heads, n_k, e, generator=gen, dtype=dtype)]


def keep_of(n, share=0.7):
    return torch.rand(2, n, generator=torch.Generator().manual_seed(n)) < share


def sampling(d, *, hashes=9, bits=4, gaussian=False, heads=2, seed=7):
    """The arguments of the ops that say how codes are drawn."""
    group = 32 if gaussian else max(64, 1 << (d - 1).bit_length())
    purposes = [checksum(f"yoso.{first}") for first in range(0, hashes, group)]
    bits = torch.tensor([bits] if isinstance(bits, int) else bits)
    return torch.arange(heads), bits, seed, purposes, hashes, gaussian


@pytest.mark.parametrize("e", [1, 3, 64, 77])
def test_unit_rows_are_those_of_the_specification(e):
    q = torch.randn(2, 2, 300, 20, generator=torch.Generator().manual_seed(e))
    v = torch.randn(2, 2, 300, e, generator=torch.Generator().manual_seed(e)) * torch.logspace(-30, 30, 300)[:, None]
    v[0, 0, 5] = 0.0
    rest = (None, *sampling(20, hashes=1, bits=16), False, False)  # nearly every query meets its own key alone
    assert torch.equal(collision_sums(q, q, v, *rest, 1e-12), unit_rows(collision_sums(q, q, v, *rest), 1e-12))
    q, v = q.double(), v.double() ** 5  # squares out of range
    found, wanted = collision_sums(q, q, v, *rest, 1e-12), unit_rows(collision_sums(q, q, v, *rest), 1e-12)
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=0)


@every_instruction_set
@pytest.mark.parametrize("e", [1, 20, 64])
def test_gradients_through_unit_rows_no_worse_than_plain_float32(isa, e):
    q, k, v = inputs(40, 40, 16, e)
    v[:, :, ::3] = 0.0
    rest = (None, *sampling(16, hashes=1, bits=6), False, False)
    assert not bool(collision_sums(q, k, v, *rest).any(-1).all())  # rows without a direction

    def kernel(q, k, v):
        return collision_sums(q, k, v, *rest, 1e-12)

    def specification(q, k, v):
        return unit_rows(collision_sums(q, k, v, *rest), 1e-12)

    with native.instruction_set(isa):
        no_worse(kernel, specification, [q, k, v], what=isa)


@every_instruction_set
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spec", ["yoso(hashes=70)", "yoso(hashes=3, bits=16)", "yoso(hash=gaussian, hashes=40)"])
@pytest.mark.parametrize(("n_q", "n_k", "d", "e"), [*SIZES, (40, 40, 200, 1)])
def test_codes_are_equal(isa, n_q, n_k, d, e, spec, dtype):
    q, k, v = inputs(n_q, n_k, d, e, dtype=dtype)
    q[:, :, 0] = 0.0  # no direction
    keep = keep_of(n_k)
    with native.instruction_set(isa):
        found, wanted = (
            sparing.inspect(q, k, v, keep[:, None, None], method=spec, seed=1, impl=impl).statistics
            for impl in ("native", "reference")
        )
    assert set(found) == set(wanted) == {"query_codes", "key_codes", "bits"}
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@every_instruction_set
@pytest.mark.parametrize("gaussian", [False, True])
def test_codes_of_vectors_on_the_hyperplanes(isa, gaussian):
    """Sign vectors and vectors with few entries lie on many hyperplanes of Hadamard matrices: ties are not guessed."""
    gen = torch.Generator().manual_seed(0)
    x = torch.randint(-1, 2, (1, 2, 300, 64), generator=gen).float()
    x[:, :, 100:, 2:] = 0.0
    x[:, :, 200:, 1:] = 0.0
    q = x * torch.rand(300, 1, generator=gen)
    method = Yoso(hashes=32, bits=9, hash="gaussian" if gaussian else "hadamard")
    with native.instruction_set(isa):
        found, wanted = (
            sparing.inspect(q, x, x, method=method, seed=1, impl=impl).statistics for impl in ("native", "reference")
        )
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@every_instruction_set
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "spec",
    [
        "yoso(hashes=8, bits=2)",  # full buckets
        "yoso(hashes=40, normalize=sum)",  # two chunks of hashes
        "yoso(hashes=5, bits=16, normalize=none)",  # fewer keys than buckets
        "yoso(hashes=6, hash=gaussian, gradient=exact)",
    ],
)
@pytest.mark.parametrize(("n_q", "n_k", "d", "e"), SIZES)
def test_no_worse_than_plain_float32(isa, n_q, n_k, d, e, spec, masked, causal):
    options = {"method": spec, "is_causal": causal, "seed": 3}
    options["attn_mask"] = keep_of(n_k)[:, None, None] if masked else None
    method = sparing.method(spec)

    def by(impl):
        return lambda q, k, v: sparing.attention(q, k, v, impl=impl, **options)

    with native.instruction_set(isa):
        no_worse(by("native"), by("reference"), inputs(n_q, n_k, d, e), what=f"{isa}, {method}")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [63, 64, 65, 300])
def test_one_bucket_for_all(n, causal):
    """Equal tokens: r x c pairs would be n^2; through outer products, and at the edges of blocks, the same sums."""
    q, k, v = inputs(n, n, 16, 24, dtype=torch.float64)
    q, k = (x[:, :, :1] + 1e-9 * x for x in (q, k))
    q = k + 1e-9 * q
    leaves = [x.requires_grad_() for x in (q.detach(), k.detach(), v)]
    method = Yoso(hashes=3, bits=1, normalize="none")
    found, wanted = (
        sparing.attention(*leaves, method=method, seed=0, is_causal=causal, impl=impl)
        for impl in ("native", "reference")
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for a, b in zip(*(torch.autograd.grad(x, leaves, weight) for x in (found, wanted)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("bits", [1, 3, 6])
def test_later_tokens_change_nothing_before_them(bits):
    """Outputs and gradients of the first 130 tokens, bit for bit, whatever comes after them and into which buckets."""

    def first(scale):
        q, k, v = inputs(200, 200, 20, 10)
        gen = torch.Generator().manual_seed(5)
        for x in (q, k, v):
            x[:, :, 130:] = scale * torch.randn(x[:, :, 130:].shape, generator=gen) + (scale - 1)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = collision_sums(*leaves, None, *sampling(20, bits=bits), True, False)[:, :, :130]
        return [out, *(g[:, :, :130] for g in torch.autograd.grad(out.square().sum(), leaves))]

    assert all(torch.equal(a, b) for a, b in zip(first(1.0), first(2.5), strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bits", [2, 8])
def test_thread_counts_change_nothing(bits, causal):
    def compute():
        leaves = [x.requires_grad_() for x in inputs(150, 150, 64, 64, heads=3)]
        out = collision_sums(*leaves, keep_of(150), *sampling(64, bits=bits, heads=3), causal, False, 1e-30)
        return out, *torch.autograd.grad(out[..., 0].square().sum(), leaves)

    same_for_any_threads(compute)


def test_items_have_their_own_number_of_bits():
    q, k, v = inputs(60, 60, 32, 8)
    both = codes(q, *sampling(32, bits=[3, 7]))
    for item, bits in enumerate((3, 7)):
        assert torch.equal(both[item], codes(q, *sampling(32, bits=bits))[item])
    assert int(both[0].max()) <= 7 < int(both[1].max())
    out = collision_sums(q, k, v, None, *sampling(32, bits=[3, 7]), False, False)
    for item, bits in enumerate((3, 7)):
        assert torch.equal(out[item], collision_sums(q, k, v, None, *sampling(32, bits=bits), False, False)[item])


def test_values_in_bfloat16_are_summed_in_float32():
    q, k, v = inputs(90, 70, 32, 24)
    short = v.bfloat16().requires_grad_()
    rounded = short.detach().float().requires_grad_()
    rest = (keep_of(70), *sampling(32), False, False)
    found, wanted = collision_sums(q, k, short, *rest), collision_sums(q, k, rounded, *rest)
    assert found.dtype == torch.float32
    assert torch.equal(found, wanted)
    (grad,), (full,) = (torch.autograd.grad(x.square().sum(), y) for x, y in ((found, short), (wanted, rounded)))
    assert grad.dtype == torch.bfloat16
    assert torch.equal(grad, full.bfloat16())


def test_reads_any_strides():
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(50, 50, 16, 16))
    rest = (None, *sampling(16), False, False)
    wanted = collision_sums(*(x.contiguous() for x in (q, k, v)), *rest)
    assert torch.equal(collision_sums(q, k, v, *rest), wanted)
    assert torch.equal(collision_sums(*(x.mT.contiguous().mT for x in (q, k, v)), *rest), wanted)
    assert torch.equal(
        collision_sums(q, k, v.bfloat16().mT.contiguous().mT, *rest), collision_sums(q, k, v.bfloat16(), *rest)
    )


@pytest.mark.parametrize("needs_grad", [False, True])
def test_opcheck(needs_grad):
    q, k, v = (x.requires_grad_(needs_grad) for x in inputs(20, 17, 16, 5))
    torch.library.opcheck(torch.ops.sparing.yoso, (q, k, v, keep_of(17), *sampling(16), False, False, 1e-12))
    torch.library.opcheck(torch.ops.sparing.yoso, (q, k, v, None, *sampling(16, gaussian=True), True, True, None))
    torch.library.opcheck(torch.ops.sparing.yoso_codes, (q.detach(), *sampling(16)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_as_one_graph(dynamic):
    def compute(q, k, v, keep, *rest):
        return collision_sums(q, k, v, keep, *rest, False, False, 1e-30)

    compiled = torch.compile(compute, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (40, 41):
        leaves = [x.requires_grad_() for x in inputs(n, n, 16, 5)]
        found, wanted = (f(*leaves, keep_of(n), *sampling(16)) for f in (compiled, compute))
        assert torch.equal(found, wanted)
        for a, b in zip(*(torch.autograd.grad(x[..., 0].sum(), leaves) for x in (found, wanted)), strict=True):
            assert torch.equal(a, b)


def test_gradients_of_gradients_are_refused():
    q, k, v = (x.requires_grad_() for x in inputs(20, 20, 16, 5))
    for unit in (None, 1e-12):
        out = collision_sums(q, k, v, None, *sampling(16), False, False, unit)
        (grad,) = torch.autograd.grad(out[..., 0].square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"k": torch.randn(2, 2, 17, 15)}, "k"),
        ({"v": torch.randn(2, 2, 16, 5)}, "v"),
        ({"v": torch.randn(2, 2, 16, 5).bfloat16()}, "v"),
        ({"v": torch.randn(2, 2, 17, 5).double()}, "v"),
        ({"k": torch.randn(2, 17, 16)}, "k"),
        ({"keep": torch.ones(2, 16, dtype=torch.bool)}, "keep"),
        ({"streams": torch.arange(3)}, "streams"),
        ({"bits": torch.tensor([4, 4, 4])}, "bits"),
        ({"bits": torch.tensor([17])}, "bits"),
        ({"bits": torch.tensor([0])}, "bits"),
        ({"hashes": 0}, "hashes"),
        ({"hashes": 65}, "purposes"),
        ({"purposes": []}, "purposes"),
    ],
)
def test_sizes_are_checked_in_the_kernel(change, word):
    q, k, v = inputs(20, 17, 16, 5)
    names = ("streams", "bits", "seed", "purposes", "hashes", "gaussian")
    call = {"q": q, "k": k, "v": v, "keep": None, **dict(zip(names, sampling(16), strict=True))}
    call |= {"causal": False, "exact": False, "unit": 1e-12}
    with pytest.raises(RuntimeError, match=word):
        torch.ops.sparing.yoso(**{**call, **change})
    if "k" not in change and "v" not in change:
        with pytest.raises(RuntimeError, match=word):
            _backward(**{**call, **change})


def _backward(**call):
    call = {"grad": torch.randn(2, 2, 20, 5), "out": torch.randn(2, 2, 20, 5), "inverse": torch.randn(2, 2, 20), **call}
    return torch.ops.sparing.yoso_backward(**call, to_q=True, to_k=True, to_v=True)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"grad": torch.randn(2, 2, 21, 5)}, "grad"),
        ({"out": torch.randn(2, 2, 20, 4)}, "out"),
        ({"out": None}, "out and inverse"),
        ({"inverse": torch.randn(2, 2, 19)}, "inverse"),
    ],
)
def test_sizes_of_what_the_forward_pass_kept(change, word):
    q, k, v = inputs(20, 17, 16, 5)
    names = ("streams", "bits", "seed", "purposes", "hashes", "gaussian")
    call = {"q": q, "k": k, "v": v, "keep": None, **dict(zip(names, sampling(16), strict=True))}
    call |= {"causal": False, "exact": False, "unit": 1e-12}
    assert [x.shape for x in _backward(**call)] == [q.shape, k.shape, v.shape]
    with pytest.raises(RuntimeError, match=word):
        _backward(**{**call, **change})
