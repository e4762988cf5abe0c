"""`torch.compile(fullgraph=True)` of the public function: one graph, and the numbers of eager mode to the bit."""

import pytest
import torch

import sparing
from sparing import Projection
from tests.support.inputs import keys_mask, make, padding
from tests.support.method_table import ROWS

SPECS = sorted({row.method.name: str(row.spec) for row in reversed(ROWS)}.values())


def compiled(fn, **options):
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, backend="aot_eager", **options)


# Static shapes are compiled once for each length; the tests below and those of the kernels have them too.
@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("spec", SPECS)
def test_every_method_is_one_graph(spec, dynamic):
    method = sparing.method(spec)
    can = method.supports

    def call(q, k, value, mask):
        return sparing.attention(q, k, value, mask, method=method, seed=-5, is_causal=can.causal)

    fast = compiled(call, dynamic=dynamic)
    for n in (17, 24):
        x = make(method, n_q=n)
        mask = keys_mask(padding("left", 2, n))
        with torch.no_grad():
            assert torch.equal(fast(x.q, x.k, x.value, mask), call(x.q, x.k, x.value, mask))
        if can.gradient == "full":
            leaves = [t.requires_grad_() for t in x.leaves()]
            both = (torch.autograd.grad(f(x.q, x.k, x.value, mask).square().sum(), leaves) for f in (fast, call))
            for a, b in zip(*both, strict=True):
                assert torch.equal(a, b)


def test_weights_of_a_projection_and_a_learned_bias_get_their_gradients():
    q, k = torch.randn(2, 2, 2, 9, 4).unbind(0)
    tensors = [torch.randn(2, 9, 6), torch.randn(8, 6), torch.randn(8), torch.randn(9, 9)]
    leaves = [t.requires_grad_() for t in tensors]

    def call(x, weight, bias, mask):
        return sparing.attention(q, k, Projection(x, weight, bias), mask, method="exact")

    both = (torch.autograd.grad(f(*leaves).square().sum(), leaves) for f in (compiled(call), call))
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b)  # the output has other strides, so products may be summed in another order


def test_without_a_seed_the_global_generator_governs():
    q = torch.randn(1, 2, 20, 16)
    fast = compiled(lambda q: sparing.attention(q, q, q, method="yoso(hashes=4)"))
    torch.manual_seed(1)
    first, other = fast(q), fast(q)
    torch.manual_seed(1)
    assert torch.equal(fast(q), first)
    assert not torch.equal(first, other)


def test_refusals_reach_the_caller():
    q = torch.randn(1, 2, 20, 16)
    with pytest.raises(sparing.Unsupported, match="nystrom does not support is_causal"):
        compiled(lambda q: sparing.attention(q, q, q, method="nystrom", is_causal=True))(q)


@pytest.mark.parametrize("needs_grad", [False, True])
def test_opcheck(needs_grad):
    q, k, v = (x.requires_grad_(needs_grad) for x in torch.randn(3, 1, 2, 9, 16).unbind(0))
    settings = (True, 0.0, False, None, False, "yoso(hashes=2)", "auto", None, needs_grad)
    torch.library.opcheck(
        torch.ops.sparing.attention.default, (q, k, v, None, None, None, None, None, torch.tensor(3), *settings)
    )
