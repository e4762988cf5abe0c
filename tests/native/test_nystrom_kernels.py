"""The kernels of nystrom beside attention: means over segments and the iterated inverse; and the method on them."""

import pytest
import torch

import sparing
from sparing import native
from sparing.maths import linalg, segments
from sparing.methods.nystrom.native import inverse_iteration
from sparing.native.segments import segment_means
from tests.support.kernel_checks import every_instruction_set, needs_kernels, no_worse, same_for_any_threads

pytestmark = needs_kernels


def tokens(n, d, batch=2, heads=2, seed=0):
    return torch.randn(batch, heads, n, d, generator=torch.Generator().manual_seed(seed + n + d))


def keep_of(n, share=0.7):
    return torch.rand(2, n, generator=torch.Generator().manual_seed(n)) < share


def plain_means(keep, m):
    def compute(x):
        n = x.shape[2]
        if keep is None:
            return segments.segment_means(x, torch.arange(n)[None], torch.tensor([n]), None, m)
        return segments.segment_means(x, (keep.long().cumsum(-1) - 1).clamp_min(0), keep.sum(-1), keep, m)

    return compute


@every_instruction_set
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("n", "d", "m"), [(1, 1, 1), (1, 3, 4), (50, 20, 7), (64, 64, 64), (20, 16, 33), (333, 80, 64)]
)
def test_segment_means(isa, n, d, m, masked):
    keep = keep_of(n) if masked else None
    with native.instruction_set(isa):
        no_worse(lambda x: segment_means(x, keep, m), plain_means(keep, m), [tokens(n, d)], what=isa)


def test_segment_means_of_nothing_are_zero():
    keep = torch.zeros(2, 9, dtype=torch.bool)
    x = tokens(9, 4).requires_grad_()
    found = segment_means(x, keep, 3)
    assert bool((found == 0).all())
    assert bool((torch.autograd.grad(found.sum(), x)[0] == 0).all())


def middle(m, matrices=6):
    """Softmax matrices and the start of the iteration."""
    gen = torch.Generator().manual_seed(m)
    a = torch.randn(2, matrices // 2, m, m, generator=gen).softmax(-1)
    return a, sparing.list_methods()["nystrom"].start(a)


@every_instruction_set
@pytest.mark.parametrize("steps", [1, 6])
@pytest.mark.parametrize("m", [1, 3, 16, 33, 64, 70])
def test_inverse_iteration(isa, m, steps):
    with native.instruction_set(isa):
        no_worse(
            lambda a, z: inverse_iteration(a, z, steps),
            lambda a, z: linalg.inverse_iteration(a, z, steps),
            middle(m),
            what=isa,
        )
        wide = [x.double() for x in middle(m)]
        wanted = linalg.inverse_iteration(*wide, steps)
        torch.testing.assert_close(inverse_iteration(*wide, steps), wanted, rtol=1e-11, atol=1e-11)


@every_instruction_set
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("n_q", "n_k", "d", "m"),
    [(1, 1, 8, 4), (130, 130, 64, 16), (200, 90, 20, 7), (66, 300, 80, 64), (257, 257, 128, 64)],
)
def test_nystrom(isa, n_q, n_k, d, m, masked):
    """Also where an item has fewer valid keys than landmarks."""
    q, k, v = tokens(n_q, d, seed=1), tokens(n_k, d, seed=2), tokens(n_k, 24, seed=3)
    keep = None
    if masked:
        keep = keep_of(n_k)
        keep[1, m // 2 + 1 :] = False
    options = {"method": f"nystrom(landmarks={m})", "attn_mask": None if keep is None else keep[:, None, None]}

    def by(impl):
        return lambda q, k, v: sparing.attention(q, k, v, impl=impl, **options)

    with native.instruction_set(isa):
        no_worse(by("native"), by("reference"), [q, k, v], what=isa)


def test_shared_key_heads_and_masked_queries():
    q, k, v = tokens(90, 16, heads=4), tokens(90, 16, seed=1), tokens(90, 8, seed=2)
    options = {"method": "nystrom(landmarks=8)", "enable_gqa": True, "query_mask": keep_of(90)}

    def by(impl):
        return lambda q, k, v: sparing.attention(q, k, v, impl=impl, **options)

    no_worse(by("native"), by("reference"), [q, k, v])


def test_thread_counts_change_nothing():
    def compute():
        x = tokens(300, 32, heads=3).requires_grad_()
        means = segment_means(x, keep_of(300), 20)
        a, z = (y.requires_grad_() for y in middle(40))
        inverse = inverse_iteration(a, z, 6)
        total = means.square().sum() + inverse.square().sum()
        return means, inverse, *torch.autograd.grad(total, (x, a, z))

    same_for_any_threads(compute)


@pytest.mark.parametrize("needs_grad", [False, True])
def test_opcheck(needs_grad):
    x = tokens(20, 8).requires_grad_(needs_grad)
    for keep in (None, keep_of(20)):
        torch.library.opcheck(torch.ops.sparing.segment_means, (x, keep, 6))
    a, z = (y.flatten(0, 1).contiguous().requires_grad_(needs_grad) for y in middle(5))
    torch.library.opcheck(torch.ops.sparing.inverse_iteration, (a, z, 2))


def test_compiles_as_one_graph():
    def f(x, a, z):
        return segment_means(x, None, 6), inverse_iteration(a, z, 3)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    leaves = [y.detach().requires_grad_() for y in (tokens(20, 8), *middle(5))]
    found, wanted = compiled(*leaves), f(*leaves)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(
        *(torch.autograd.grad(sum(y.square().sum() for y in x), leaves) for x in (found, wanted)), strict=True
    ):
        assert torch.equal(a, b)


def test_sizes_are_checked_in_the_kernel():
    x = tokens(20, 8)
    ops = torch.ops.sparing
    for word, call in (
        ("x must", lambda: ops.segment_means(x[0], None, 3)),
        ("x must", lambda: ops.segment_means(x.long(), None, 3)),
        ("keep", lambda: ops.segment_means(x, torch.ones(2, 19, dtype=torch.bool), 3)),
        ("segments", lambda: ops.segment_means(x, None, 0)),
        ("tokens", lambda: ops.segment_means_backward(x, None, -1)),
        ("a must", lambda: ops.inverse_iteration(torch.ones(2, 2), torch.ones(2, 2), 1)),
        ("a does not", lambda: ops.inverse_iteration(torch.ones(1, 2, 3), torch.ones(1, 2, 3), 1)),
        ("start", lambda: ops.inverse_iteration(torch.ones(1, 2, 2), torch.ones(1, 3, 3), 1)),
        ("steps", lambda: ops.inverse_iteration(torch.ones(1, 2, 2), torch.ones(1, 2, 2), 0)),
    ):
        with pytest.raises(RuntimeError, match=word):
            call()
