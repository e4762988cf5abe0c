"""The shapes that `scaled_dot_product_attention` takes: a user replaces one name."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import sparing

# (query, key, value, mask) without length and width; the mask's last two sizes are given.
SHAPES = {
    "two dimensions": ((), (), (), None),
    "three": ((3,), (3,), (3,), None),
    "three, mask by query": ((3,), (3,), (3,), (5, 7)),
    "three, mask by item": ((3,), (3,), (3,), (3, 5, 7)),
    "three, mask of one item": ((3,), (3,), (3,), (1, 5, 7)),
    "three, padding": ((3,), (3,), (3,), (3, 1, 7)),
    "three, one key": ((3,), (1,), (1,), None),
    "five": ((2, 3, 4), (2, 3, 4), (2, 3, 4), None),
    "five, mask": ((2, 3, 4), (2, 3, 4), (2, 3, 4), (3, 1, 5, 7)),
    "five, mask by head": ((2, 3, 4), (2, 3, 4), (2, 3, 4), (2, 1, 4, 5, 7)),
    "five, one of a kind": ((2, 1, 4), (1, 3, 4), (2, 3, 1), None),
    "one batch item of keys": ((2, 4), (1, 4), (1, 4), None),
    "one batch item of queries": ((1, 4), (2, 4), (2, 4), None),
    "one value for all": ((2, 4), (2, 4), (1, 1), None),
    "one key head": ((2, 4), (2, 1), (2, 1), None),
    "one query head": ((2, 1), (2, 4), (2, 4), (2, 4, 5, 7)),
    "fewer dimensions of keys": ((2, 4), (4,), (4,), None),
    "fewer dimensions of queries": ((4,), (2, 4), (2, 4), (5, 7)),
}


def tensors(q, k, v, mask):
    gen = torch.Generator().manual_seed(0)
    shapes = ((*q, 5, 8), (*k, 7, 8), (*v, 7, 6))
    bias = None if mask is None else torch.randn(mask, generator=gen)
    return *(torch.randn(shape, generator=gen) for shape in shapes), bias


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["additive", "boolean"])
@pytest.mark.parametrize("causal", [False, True])
def test_shapes_that_torch_takes(shape, kind, causal):
    q, k, v, mask = tensors(*SHAPES[shape])
    if mask is not None and (causal or kind == "boolean"):
        mask = mask > -0.5
        if causal:  # torch takes either; the tests of masks combine the two
            mask = None
    wanted = scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
    found = sparing.attention(q, k, v, mask, is_causal=causal)
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("q", "k", "mask"), [((4,), (2,), None), ((2, 4), (1, 2), None), ((2, 3, 4), (2, 3, 2), (1, 3, 1, 5, 7))]
)
def test_shared_heads_in_any_number_of_dimensions(q, k, mask):
    q, k, v, mask = tensors(q, k, k, mask)
    wide = (*torch.broadcast_shapes(q.shape[:-3], k.shape[:-3]), *k.shape[-3:-1])
    repeated = (x.expand(*wide, x.shape[-1]).repeat_interleave(2, -3) for x in (k, v))
    wanted = scaled_dot_product_attention(q, *repeated, mask)
    torch.testing.assert_close(sparing.attention(q, k, v, mask, enable_gqa=True), wanted)


def test_keys_and_values_may_have_other_numbers_of_shared_heads():
    q, k, v, _ = tensors((2, 6), (2, 2), (2, 3), None)
    wanted = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(sparing.attention(q, k, v, enable_gqa=True), wanted)


def test_inspect_of_two_dimensions_restores_what_is_known_by_head():
    x = torch.randn(5, 4)
    assert sparing.inspect(x, x, x, method="skyformer", seed=0).statistics["bound"].shape == ()


@pytest.mark.parametrize("method", ["nystrom(landmarks=3)", "yoso(hashes=8)", "window(size=4)"])
def test_three_dimensions_are_the_items_of_one_head(method):
    gen = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 4, 9, 8, generator=gen).unbind(0)
    keep = torch.ones(4, 1, 9, dtype=torch.bool)
    keep[1, :, 6:] = False
    found = sparing.attention(q, k, v, keep, method=method, seed=0)
    wanted = sparing.attention(*(x.unsqueeze(1) for x in (q, k, v, keep)), method=method, seed=0)
    assert torch.equal(found, wanted.squeeze(1))


def test_inspect_and_gradients_have_the_shapes_of_the_inputs():
    q, k, v, _ = tensors((3,), (1,), (1,), None)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    found = sparing.inspect(*inputs)
    assert found.lse.shape == (3, 5)
    gradients = torch.autograd.grad(found.output.sum(), inputs)
    assert [g.shape for g in gradients] == [x.shape for x in inputs]


def test_a_compiled_call_takes_three_dimensions():
    q, k, v, _ = tensors((3,), (3,), (1,), None)
    compiled = torch.compile(lambda *x: sparing.attention(*x), fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, k, v), sparing.attention(q, k, v))


@pytest.mark.parametrize(
    "options", [{}, {"scale": 0.5}, {"is_causal": True}, {"attn_mask": torch.ones(5, 7).tril() > 0}]
)
@pytest.mark.parametrize("leading", [(), (3,), (2, 4), (2, 3, 4)])
@pytest.mark.parametrize("value_dim", [6, 0])
def test_a_head_dimension_of_zero_weighs_all_keys_alike_as_torch_does(options, leading, value_dim):
    q, k, v, _ = tensors(leading, leading, leading, None)
    found = []
    for run in (scaled_dot_product_attention, sparing.attention):
        leaves = [x.clone().requires_grad_() for x in (q[..., :0], k[..., :0], v[..., :value_dim])]
        out = run(*leaves, **options)
        found.append([out, *torch.autograd.grad(out.sum(), leaves)])
    for wanted, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize("method", [*sparing.list_methods(), "kernel(kind=elu)", "kernel(kind=poly)"])
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_every_method_takes_a_head_dimension_of_zero(method, impl):
    gen = torch.Generator().manual_seed(0)
    v = torch.randn(2, 2, 33, 5, generator=gen)
    if sparing.method(method).supports.projection:
        v = sparing.Projection(torch.randn(2, 33, 7, generator=gen), torch.randn(10, 7, generator=gen))
    with torch.no_grad():
        found, wanted = (
            sparing.attention(x, x, v, method=method, impl=impl, seed=0)
            for x in (torch.ones(2, 2, 33, 0), torch.zeros(2, 2, 33, 1))
        )
    assert found.isfinite().all()
    assert torch.equal(found, wanted)


def test_a_compiled_call_takes_a_head_dimension_of_zero():
    q, k, v, _ = tensors((2, 4), (2, 4), (2, 4), None)
    compiled = torch.compile(lambda *x: sparing.attention(*x), fullgraph=True, backend="eager")
    assert torch.equal(compiled(q[..., :0], k[..., :0], v), sparing.attention(q[..., :0], k[..., :0], v))
