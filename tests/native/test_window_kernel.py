"""The window kernel against the specification, for every instruction set of the machine."""

import pytest
import torch

import sparing
from sparing import native
from sparing.methods.window.native import window
from tests.support.kernel_checks import every_instruction_set, needs_kernels, no_worse, same_for_any_threads

pytestmark = needs_kernels


def inputs(n, d, e, batch=2, heads=2, dtype=torch.float32):
    gen = torch.Generator().manual_seed(n + d)
    return [torch.randn(batch, heads, n, w, generator=gen, dtype=dtype) * 1.5 for w in (d, d, e)]


def keep_of(n, share=0.7):
    return torch.rand(2, n, generator=torch.Generator().manual_seed(n)) < share


@every_instruction_set
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("spec", ["window(size=16)", "window(size=0)", "window(size=6, sinks=5)", "window(size=512)"])
@pytest.mark.parametrize(("n", "d", "e"), [(1, 1, 1), (17, 20, 3), (63, 80, 33), (130, 128, 64), (200, 64, 80)])
def test_no_worse_than_plain_float32(isa, n, d, e, spec, masked, causal):
    mask = keep_of(n)[:, None, None] if masked else None
    options = {"method": spec, "attn_mask": mask, "is_causal": causal}

    def by(impl):
        def compute(q, k, v):
            found = sparing.inspect(q, k, v, impl=impl, **options)
            return found.output

        return compute

    with native.instruction_set(isa):
        no_worse(by("native"), by("reference"), inputs(n, d, e), what=f"{isa}, {spec}")


@every_instruction_set
@pytest.mark.parametrize("causal", [False, True])
def test_output_and_log_sum_exp_with_their_gradients(isa, causal):
    """Also the gradient through the log-sum-exp, which merging parts needs."""
    keep, shared = keep_of(75), torch.tensor([[0, 3, -1], [40, -1, 74]])

    def kernel(q, k, v):
        return window(q, k, v, keep, shared, 9, 4, causal, 0.3)

    def specification(q, k, v):
        apart = torch.arange(75) - torch.arange(75)[:, None]
        special = torch.zeros(2, 76, dtype=torch.bool).scatter(1, shared % 76, True)[:, :75]
        seen = (apart >= -9) & (apart <= 4)
        seen = (seen & keep[:, None]) | (special[:, None] & ((apart <= 0) | (not causal)))
        scores = (0.3 * q @ k.mT).masked_fill(~seen[:, None], -torch.inf)
        weights = scores.softmax(-1).nan_to_num(0.0)
        return weights @ v, scores.logsumexp(-1)

    with native.instruction_set(isa):
        no_worse(kernel, specification, inputs(75, 32, 16), what=isa)


def test_reads_any_strides():
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(50, 16, 16))
    found = window(q, k, v, None, None, 3, 3, False, 0.25)
    wanted = window(*(x.contiguous() for x in (q, k, v)), None, None, 3, 3, False, 0.25)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    turned = [x.mT.contiguous().mT for x in (q, k, v)]
    assert torch.equal(window(*turned, None, None, 3, 3, False, 0.25)[0], wanted[0])


@pytest.mark.parametrize("causal", [False, True])
def test_thread_counts_change_nothing(causal):
    def compute():
        q, k, v = (x.requires_grad_() for x in inputs(300, 64, 64, heads=3))
        out, lse = window(q, k, v, keep_of(300), None, 40, 40, causal, 0.125)
        return out, lse, *torch.autograd.grad((out.square().sum() + lse.sum().clamp(-1e9)), (q, k, v))

    same_for_any_threads(compute)


@pytest.mark.parametrize("needs_grad", [False, True])
def test_opcheck(needs_grad):
    q, k, v = (x.requires_grad_(needs_grad) for x in inputs(20, 8, 5))
    torch.library.opcheck(torch.ops.sparing.window, (q, k, v, keep_of(20), None, 3, 3, False, 0.3))
    torch.library.opcheck(torch.ops.sparing.window, (q, k, v, None, torch.tensor([[0], [1]]), 3, 0, True, 0.3))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_as_one_graph(dynamic):
    compiled = torch.compile(window, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (40, 41):
        q, k, v = (x.requires_grad_() for x in inputs(n, 8, 5))
        found, wanted = (f(q, k, v, keep_of(n), None, 3, 3, False, 0.3) for f in (compiled, window))
        assert torch.equal(found[0], wanted[0])
        for a, b in zip(*(torch.autograd.grad(x[0].square().sum(), (q, k, v)) for x in (found, wanted)), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"k": torch.randn(2, 2, 19, 8)}, "k"),
        ({"v": torch.randn(2, 2, 19, 5)}, "v"),
        ({"k": torch.randn(2, 2, 20, 8).double()}, "k"),
        ({"keep": torch.ones(2, 19, dtype=torch.bool)}, "keep"),
        ({"keep": torch.ones(2, 20)}, "keep"),
        ({"shared": torch.tensor([[20], [0]])}, "shared"),
        ({"shared": torch.tensor([[-2], [0]])}, "shared"),
        ({"shared": torch.tensor([0, 1])}, "shared"),
        ({"left": -1}, "left"),
    ],
)
def test_sizes_are_checked_in_the_kernel(change, word):
    q, k, v = inputs(20, 8, 5)
    call = {"q": q, "k": k, "v": v, "keep": None, "shared": None, "left": 1, "right": 1, "causal": False, "scale": 1.0}
    with pytest.raises(RuntimeError, match=word):
        torch.ops.sparing.window(**{**call, **change})
