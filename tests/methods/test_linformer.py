"""Linformer: the learned projection as a parameter, its columns under padding, the random and the pooled substitutes."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import sparing
from sparing.call import Call
from sparing.draws import Draws
from sparing.mask import Mask
from sparing.methods.linformer.method import Linformer
from tests.support.inputs import Inputs, exact_for, keys_mask, make, padding, peaked, relative

LEARNED = Linformer(rank=8)


def learned(rank=8, max_length=40, heads=2, std=None):
    """A learned projection; with `std`, one that has moved away from its small start."""
    module = Linformer(rank=rank).learned(heads, 16, 16, max_length)
    assert module is not None
    if std is not None:
        torch.nn.init.normal_(module.weight, std=std)
    return module


def run(x, spec=LEARNED, **kwargs):
    return sparing.attention(x.q, x.k, x.value, method=spec, seed=0, **kwargs)


def peaked_inputs(n=40, count=4.0):
    return peaked(LEARNED, count, n=n)


# the learned projection


def test_it_is_the_formula():
    x, module = peaked_inputs(), learned(std=0.3).double()
    e = module.weight
    wanted = (x.q @ (e @ x.k).mT / 4).softmax(-1) @ (e @ x.value)
    torch.testing.assert_close(run(x, state=module), wanted, rtol=0, atol=1e-12)


def test_identity_projection_is_softmax_attention():
    for n in (40, 17):
        x, module = peaked_inputs(n), learned(rank=n).double()
        with torch.no_grad():
            module.weight.copy_(torch.eye(n, 40))
        found = run(x, Linformer(rank=n), state=module)
        torch.testing.assert_close(found, exact_for(x), rtol=0, atol=1e-10)


def assert_trainable(module):
    """E is a parameter, is in the checkpoint, gets a gradient, and moves when an optimiser steps."""
    assert len(list(module.parameters())) == 1, "E is not a parameter"
    assert list(module.state_dict()) == ["weight"], "E is not in the checkpoint"
    x = peaked_inputs().map(lambda t: t.to(module.weight.dtype))
    before = module.weight.detach().clone()
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
    run(x, state=module).square().sum().backward()
    assert bool((module.weight.grad != 0).all()), "no gradient reaches E"
    optimiser.step()
    assert not torch.equal(module.weight, before), "E did not move"


def test_it_stays_a_parameter_when_it_is_moved():
    for module in (learned(), learned().to(torch.float64), learned().to("cpu"), learned().to(torch.device("cpu"))):
        assert_trainable(module)
    wrapped = torch.nn.ModuleDict({"projection": learned()}).to(torch.float64)
    assert [name for name, _ in wrapped.named_parameters()] == ["projection.weight"]
    assert wrapped["projection"].weight.dtype == torch.float64


def test_a_moved_copy_in_place_of_the_parameter_is_caught():
    class Moved(torch.nn.Module):  # E = Parameter(...).to(...) is a plain tensor: never trained, never saved
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(2, 8, 40)).to(torch.float64)

    with pytest.raises(AssertionError, match="not a parameter"):
        assert_trainable(Moved())


def test_it_starts_small():
    """H0: entries are N(0, .02^2); z of the mean square over 2 x 64 x 512 entries, |z| < 4.89: false alarm 1e-6."""
    torch.manual_seed(0)
    weight = learned(rank=64, max_length=512).weight.detach()
    assert weight.shape == (2, 64, 512)
    z = (weight.square().mean() / 0.02**2 - 1) * (weight.numel() / 2) ** 0.5
    assert abs(float(z)) < 4.89


def test_shorter_input_uses_the_first_columns():
    x, module = peaked_inputs(), learned(std=0.3).double()
    short = x.tokens(slice(0, 13))
    cut = learned(max_length=13).double()
    with torch.no_grad():
        cut.weight.copy_(module.weight[..., :13])
    assert torch.equal(run(short, state=module), run(short, state=cut))


def test_longer_input_is_refused_and_not_cut():
    module = learned(max_length=39)
    with pytest.raises(ValueError, match="40 keys exceed max_length=39"):
        run(peaked_inputs(), state=module)
    keep = torch.ones(1, 40, dtype=torch.bool)
    keep[0, 3] = False  # 39 tokens and a padded slot: they fit
    x = peaked_inputs()
    found = run(x, state=module.double(), attn_mask=keys_mask(keep))
    index = keep[0].nonzero().squeeze(-1)
    torch.testing.assert_close(found[:, :, index], run(x.tokens(index), state=module), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["left", "right", "both", "holes"])
def test_padding_does_not_move_the_columns(kind):
    x, module = make(LEARNED, n_q=40, d=16, dtype=torch.float64), learned(std=0.3).double()
    keep = padding(kind, 2, 40)
    out = run(x, state=module, attn_mask=keys_mask(keep))
    for b in range(2):
        index = keep[b].nonzero().squeeze(-1)
        alone = run(x.item(slice(b, b + 1)).tokens(index), state=module)
        torch.testing.assert_close(out[b : b + 1, :, index], alone, rtol=0, atol=1e-12)


def assert_blind_to_masked_tokens(attend):
    x, module = make(LEARNED, n_q=40, d=16), learned(std=0.3)
    keep = padding("holes", 2, 40)
    hole = ~keep[:, None, :, None]
    noise = replace(x, k=torch.where(hole, 50.0, x.k)).with_payload(torch.where(hole, -7.0, x.payload))
    assert torch.equal(attend(x, module, keep), attend(noise, module, keep)), "a masked token has an effect"


def test_masked_tokens_have_no_effect_at_all():
    assert_blind_to_masked_tokens(lambda x, module, keep: run(x, state=module, attn_mask=keys_mask(keep)))


def test_the_formula_without_a_mask_sees_them():
    with pytest.raises(AssertionError, match="has an effect"):
        assert_blind_to_masked_tokens(lambda x, module, keep: run(x, state=module))


def test_permuting_tokens_with_their_columns():
    x, module = peaked_inputs(), learned(std=0.3).double()
    wanted = run(x, state=module)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    other = learned().double()
    with torch.no_grad():
        other.weight.copy_(module.weight[..., order])
    found = run(x.tokens(order), state=other)
    torch.testing.assert_close(found, wanted[:, :, order], rtol=0, atol=1e-12)


def test_gradients_with_a_learned_projection():
    x = make(LEARNED, batch=1, n_q=5, d=4, e=3, dtype=torch.float64)
    weight = learned(rank=3, max_length=6, std=0.5).double().weight
    keep = torch.tensor([[True, True, False, True, True]])

    def f(q, k, v, weight):
        state = learned(rank=3, max_length=6)
        del state.weight
        state.weight = weight
        return sparing.attention(q, k, v, keys_mask(keep), method="linformer(rank=3)", state=state)

    inputs = [t.detach().clone().requires_grad_() for t in (x.q, x.k, x.value, weight)]
    assert torch.autograd.gradcheck(f, inputs)


def test_a_learned_projection_wins_over_the_other_two():
    x, module = peaked_inputs(), learned(std=0.3).double()
    a, b = (run(x, Linformer(rank=8, projection=p), state=module) for p in ("random", "pooled"))
    assert torch.equal(a, b)
    assert not torch.equal(a, run(x))


def test_state_that_does_not_fit():
    x = peaked_inputs()
    with pytest.raises(ValueError, match="state has 2 heads and rank 4, but the call has 2 heads and rank 8"):
        run(x, state=learned(rank=4))
    with pytest.raises(ValueError, match="state has 3 heads"):
        run(x, state=learned(heads=3))
    with pytest.raises(TypeError, match="state must be what learned"):
        run(x, state=torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"pass max_length.*projection='pooled'"):
        LEARNED.learned(2, 16, 16, None)
    assert Linformer(projection="pooled").learned(2, 16, 16, None) is None


# the random projection


@pytest.mark.statistical
def test_the_random_projection_keeps_inner_products_on_average():
    """H0: E[E^T E] = I over 2000 heads; z of 9 x 9 entries with the draws' own spread, |z| < 5.73 (100 assertions,
    family-wise 1e-6); diagonal entries are one exactly. Catches a scale that is off by a few per cent.
    """
    call = _call(heads=2000)
    rows = Linformer(rank=8)._rows(9, call)
    gram = rows.mT @ rows  # (2000, 9, 9)
    assert float((gram.diagonal(dim1=-2, dim2=-1) - 1).abs().max()) < 1e-14
    off = gram - torch.eye(9)
    z = off.mean(0) / (off.std(0) / 2000**0.5).clamp_min(1e-9)
    assert float(z.abs().max()) < 5.73
    spread = off[:, 0, 1].square()  # Var of an entry is 1 / rank, two-sided
    assert abs(float((spread.mean() - 1 / 8) / (spread.std() / 2000**0.5))) < 5.73


def test_a_column_does_not_depend_on_the_length():
    call = _call(heads=2)
    for rank in (1, 31, 32, 33, 70):
        method = Linformer(rank=rank)
        assert method._rows(50, call).shape == (2, rank, 50)
        assert torch.equal(method._rows(50, call)[..., :20], method._rows(20, call))


def test_random_is_not_claimed_to_approximate_softmax():
    assert LEARNED.exact_target() is None
    assert LEARNED.full_budget(sparing.Shape(queries=9, keys=9, head_dim=4, value_dim=4)) is None
    assert not LEARNED.supports.training_free


def _call(heads):
    return Call(scale=1.0, mask=Mask(), draws=Draws(0, torch.arange(heads)))  # fmt: skip


# pooled


def smooth(n, seed):
    """Random walks: neighbours are alike."""
    gen = torch.Generator().manual_seed(seed)
    walk = torch.randn(3, 1, 2, n, 16, generator=gen, dtype=torch.float64).cumsum(-2)
    q, k, v = walk / walk.std((1, 2, 3, 4), keepdim=True)
    return Inputs(4 * q, k, v)


def pooled(rank):
    return Linformer(rank=rank, projection="pooled")


def test_pooled_error_falls_on_smooth_sequences():
    errors = torch.tensor(
        [[relative(run(x, pooled(r)), exact_for(x)) for r in (4, 16, 64)] for x in map(_long, range(10))]
    )
    mean = errors.mean(0)
    assert float(mean[1]) < 0.5 * float(mean[0]), mean
    assert float(mean[2]) < 0.5 * float(mean[1]), mean
    control = sum(
        relative(x.value.mean(-2, keepdim=True).expand_as(x.value), exact_for(x)) for x in map(_long, range(10))
    )
    assert float(mean[0]) < control / 10


def _long(seed):
    return smooth(256, seed)


def constant_runs(lengths):
    """Tokens that are equal within runs."""
    gen = torch.Generator().manual_seed(0)
    index = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    k, v = (torch.randn(1, 2, len(lengths), 8, generator=gen, dtype=torch.float64)[:, :, index] for _ in range(2))
    return Inputs(3 * torch.randn(1, 2, len(index), 8, generator=gen, dtype=torch.float64), k, v)


def assert_exact_on_constant_runs(attend):
    for lengths, rank in (([4, 4, 4], 3), ([2, 3, 2, 3], 4), ([1, 2, 2, 2], 4), ([1, 1, 1], 3)):
        x = constant_runs(lengths)
        assert relative(attend(x, rank), exact_for(x)) < 1e-10, f"runs of {lengths}"


def test_pooled_is_exact_on_constant_runs_of_unequal_length():
    assert_exact_on_constant_runs(lambda x, rank: run(x, pooled(rank)))


def test_without_the_logarithm_of_the_length_it_is_not():
    def unweighted(x, rank):
        n = x.n_k
        cuts = [i * n // rank for i in range(rank + 1)]
        k, v = (torch.stack([t[:, :, a:b].mean(-2) for a, b in pairwise(cuts)], -2) for t in (x.k, x.value))
        return (x.q @ k.mT / 8**0.5).softmax(-1) @ v

    with pytest.raises(AssertionError, match=r"runs of \[2, 3, 2, 3\]"):
        assert_exact_on_constant_runs(unweighted)


@pytest.mark.parametrize("rank", [40, 41, 64, 256])
def test_pooled_is_exact_at_full_rank_for_each_item(rank):
    x = make(LEARNED, n_q=40, dtype=torch.float64)
    keep = padding("holes", 2, 40)
    mask = keys_mask(keep)
    torch.testing.assert_close(run(x, pooled(rank), attn_mask=mask), exact_for(x, attn_mask=mask), rtol=0, atol=1e-10)


def test_pooled_draws_nothing_and_leaves_the_generator_alone():
    x = peaked_inputs()
    state = torch.get_rng_state()
    a, b = (sparing.attention(x.q, x.k, x.value, method=pooled(8), seed=s) for s in (1, 2))
    assert torch.equal(a, b)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"rank": 0}, ValueError, "rank=0 must be at least 1"),
        ({"rank": 2.5}, TypeError, "rank=2.5 must be of type int"),
        ({"projection": "learned"}, ValueError, "projection='learned' is not one of 'random', 'pooled'"),
    ],
)
def test_bad_fields(fields, error, message):
    with pytest.raises(error, match=message):
        Linformer(**fields)


def test_causality_is_refused():
    with pytest.raises(sparing.Unsupported, match="linformer does not support is_causal=True"):
        run(peaked_inputs(), is_causal=True)
