"""Exact attention by kernels, with the keys or the queries in the lanes, against the plain formula."""

import pytest
import torch

from sparing import native
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


# (700, 300) has two tasks for a head where the keys stand in the lanes; (20, 600) and (130, 520) put the queries there.
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


@pytest.mark.parametrize("needs_grad", [False, True])
def test_opcheck(needs_grad):
    q, k, v = (x.requires_grad_(needs_grad) for x in inputs(20, 10, 8, 5))
    torch.library.opcheck(torch.ops.sparing.attend, (q, k, v, keep_of(10), None, 0.3))
    torch.library.opcheck(torch.ops.sparing.attend, (q, k, v, None, bias_of(10), 0.3))


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
    ],
)
def test_sizes_are_checked_in_the_kernel(change, word):
    q, k, v = inputs(20, 19, 8, 5)
    call = {"q": q, "k": k, "v": v, "keep": None, "bias": None, "scale": 1.0}
    with pytest.raises(RuntimeError, match=word):
        torch.ops.sparing.attend(**{**call, **change})


@every_instruction_set
def test_a_single_key_gives_queries_no_gradient(isa):
    """Its weight is one whatever the query: the two terms of its slope must cancel to the bit."""
    q, k, v = (x.requires_grad_() for x in inputs(40, 1, 64, 64))
    with native.instruction_set(isa):
        out, _ = attend(q, k, v, None, None, 0.3)
        grads = torch.autograd.grad(out.square().sum(), (q, k))
    assert all(bool((grad == 0).all()) for grad in grads)
