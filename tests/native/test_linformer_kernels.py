"""The projection by random signs, drawn in the kernel, and linformer on kernels."""

import pytest
import torch

import sparing
from sparing import native
from sparing.call import Call
from sparing.draws import Draws, checksum
from sparing.mask import Mask
from sparing.methods.linformer.method import Linformer
from sparing.methods.linformer.native import sign_projection
from tests.support.kernel_checks import every_instruction_set, needs_kernels, no_worse, same_for_any_threads

pytestmark = needs_kernels
SIGNS = checksum("linformer.signs")


def tokens(n, d, batch=2, heads=2, seed=0):
    return torch.randn(batch, heads, n, d, generator=torch.Generator().manual_seed(seed + n + d))


def keep_of(n, share=0.7):
    return torch.rand(2, n, generator=torch.Generator().manual_seed(n)) < share


def draws(heads=2, seed=5):
    return Draws(seed, torch.arange(heads) * 3 + 1)


def rows(n, rank, drawn):
    call = Call(scale=1.0, mask=Mask(), draws=drawn)
    return Linformer(rank=rank)._rows(n, call)


@every_instruction_set
@pytest.mark.parametrize("seed", [0, 2**63 + 12345, 2**64 - 1])
@pytest.mark.parametrize("rank", [1, 31, 32, 33, 130, 256, 300])
def test_signs_are_those_of_the_specification(isa, rank, seed):
    """The projection of the identity is the matrix itself, bit by bit."""
    drawn = draws(seed=seed)
    for n in (1, 40, 67):
        eye = torch.eye(n, dtype=torch.float64).expand(1, 2, n, n)
        with native.instruction_set(isa):
            found = sign_projection(eye, None, drawn, SIGNS, rank)
        assert torch.equal(found[0], rows(n, rank, drawn))


@every_instruction_set
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("n", "d", "rank"), [(1, 1, 1), (33, 20, 7), (300, 64, 256), (65, 80, 70), (530, 33, 20), (40, 128, 257)]
)
def test_sign_projection(isa, n, d, rank, masked):
    keep, drawn = keep_of(n) if masked else None, draws()

    def specification(x):
        if keep is not None:
            order = (~keep).long().argsort(dim=-1, stable=True)[:, None, :, None]
            x = x.masked_fill(~keep[:, None, :, None], 0.0).take_along_dim(order, dim=2)
        return rows(n, rank, drawn).to(x.dtype) @ x

    with native.instruction_set(isa):
        no_worse(lambda x: sign_projection(x, keep, drawn, SIGNS, rank), specification, [tokens(n, d)], what=isa)


@every_instruction_set
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("spec", ["linformer(rank=40)", "linformer(rank=40, projection=pooled)"])
@pytest.mark.parametrize(("n_q", "n_k", "d"), [(1, 1, 8), (130, 130, 64), (20, 300, 80), (200, 33, 20)])
def test_linformer(isa, n_q, n_k, d, spec, masked):
    q, k, v = tokens(n_q, d, seed=1), tokens(n_k, d, seed=2), tokens(n_k, 24, seed=3)
    options = {"method": spec, "seed": 3, "attn_mask": keep_of(n_k)[:, None, None] if masked else None}

    def by(impl):
        return lambda q, k, v: sparing.attention(q, k, v, impl=impl, **options)

    with native.instruction_set(isa):
        no_worse(by("native"), by("reference"), [q, k, v], what=isa)


def test_learned_projection_and_shared_key_heads():
    q, k, v = tokens(50, 16, heads=4), tokens(50, 16, seed=1), tokens(50, 8, seed=2)
    weight = 0.3 * torch.randn(4, 8, 60, generator=torch.Generator().manual_seed(0))
    state = Linformer(rank=8).learned(4, 16, 8, 60)
    del state.weight

    def by(impl, spec, learned):
        def compute(q, k, v, weight):
            state.weight = weight
            options = {"method": spec, "seed": 3, "enable_gqa": True, "state": state if learned else None}
            out = sparing.attention(q, k, v, keep_of(50)[:, None, None], impl=impl, **options)
            return out + 0 * weight.sum()

        return compute

    for spec, learned in (("linformer(rank=8)", True), ("linformer(rank=40)", False)):
        no_worse(by("native", spec, learned), by("reference", spec, learned), [q, k, v, weight], what=spec)


def test_thread_counts_change_nothing():
    def compute():
        x = tokens(600, 32, heads=3).requires_grad_()
        out = sign_projection(x, keep_of(600), draws(3), 7, 300)
        return out, *torch.autograd.grad(out.square().sum(), x)

    same_for_any_threads(compute)


@pytest.mark.parametrize("needs_grad", [False, True])
def test_opcheck(needs_grad):
    x = tokens(20, 8).requires_grad_(needs_grad)
    for keep in (None, keep_of(20)):
        torch.library.opcheck(torch.ops.sparing.sign_projection, (x, keep, torch.arange(2), -3, 7, 40))


def test_compiles_as_one_graph():
    def f(x):
        return sign_projection(x, None, draws(), 7, 40)

    x = tokens(20, 8).requires_grad_()
    found, wanted = torch.compile(f, fullgraph=True, backend="aot_eager")(x), f(x)
    assert torch.equal(found, wanted)
    assert torch.equal(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (found, wanted)))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"x": torch.randn(2, 20, 8)}, "x must"),
        ({"keep": torch.ones(2, 19, dtype=torch.bool)}, "keep"),
        ({"streams": torch.arange(3)}, "streams"),
        ({"streams": torch.arange(2).int()}, "streams"),
        ({"purpose": -1}, "purpose"),
        ({"purpose": 2**32}, "purpose"),
        ({"slots": 0}, "slots"),
    ],
)
def test_sizes_are_checked_in_the_kernel(change, word):
    call = {"x": tokens(20, 8), "keep": None, "streams": torch.arange(2), "seed": 0, "purpose": 1, "slots": 4}
    with pytest.raises(RuntimeError, match=word):
        torch.ops.sparing.sign_projection(**{**call, **change})
