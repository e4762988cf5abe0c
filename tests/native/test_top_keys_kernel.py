"""The kernel of `top_keys` against the specification, for every instruction set of the machine."""

import pytest
import torch

import sparing
from sparing import native
from sparing.oracles.native import top_keys
from tests.support.allocations import largest_tensor
from tests.support.kernel_checks import every_instruction_set, needs_kernels, no_worse, same_for_any_threads

pytestmark = needs_kernels


def inputs(n_q, n_k, d, e, batch=2, heads=2, whole=True):
    """Queries and keys of whole numbers: scores are exact in any order of summation, and many are equal."""
    gen = torch.Generator().manual_seed(n_q + d)
    q, k = (torch.randn(batch, heads, n, d, generator=gen) for n in (n_q, n_k))
    v = torch.randn(batch, heads, n_k, e, generator=gen)
    return [q.round() if whole else q, k.round() if whole else k, v]


def keep_of(n, share=0.7):
    return torch.rand(2, n, generator=torch.Generator().manual_seed(n)) < share


def by(impl, **options):
    def compute(q, k, v):
        found = sparing.inspect(q, k, v, impl=impl, scale=0.25, **options)
        return found.output, found.lse, found.statistics["mass"]

    return compute


SHAPES = [(1, 1, 1, 1), (17, 17, 20, 3), (63, 130, 80, 33), (130, 63, 128, 64), (200, 200, 64, 80)]


@every_instruction_set
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("keys", [1, 7, 50, 1000])
@pytest.mark.parametrize(("n_q", "n_k", "d", "e"), SHAPES)
def test_no_worse_than_plain_float32(isa, n_q, n_k, d, e, keys, masked, causal):
    mask = keep_of(n_k)[:, None, None] if masked else None
    options = {"method": f"top_keys(keys={keys})", "attn_mask": mask, "is_causal": causal}
    with native.instruction_set(isa):
        what = f"{isa}, {options['method']}"
        no_worse(
            by("native", **options), by("reference", **options), inputs(n_q, n_k, d, e), what=what, gradients=False
        )


@every_instruction_set
@pytest.mark.parametrize("causal", [False, True])
def test_the_same_keys_as_the_specification(isa, causal):
    """Values that name their key: a key that is chosen, and another that is not, cannot cancel."""
    n = 150
    q, k, _ = (x.double() for x in inputs(n, n, 12, 1, whole=False))
    v = torch.eye(n).double().expand(2, 2, n, n)
    options = {"method": "top_keys(keys=11)", "is_causal": causal}
    with native.instruction_set(isa):
        found, wanted = (by(impl, **options)(q, k, v)[0] for impl in ("native", "reference"))
    assert torch.equal(found > 0, wanted > 0)
    assert torch.equal(
        (found > 0).sum(-1)[0, 0], torch.arange(1, n + 1).clamp_max(11) if causal else torch.full((n,), 11)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


@every_instruction_set
@pytest.mark.parametrize("n", [10, 400])
def test_equal_scores_go_to_the_lower_index(isa, n):
    """Few different scores, rising and falling ones: however lists are cut, the first of the equal ones stay."""
    gen = torch.Generator().manual_seed(0)
    rows = torch.stack([torch.zeros(n), torch.arange(n), -torch.arange(n), torch.arange(n) // 7])
    scores = torch.cat([rows, torch.randint(0, 3, (4, n), generator=gen)]).float()
    for keys in (1, 5, 9, 64):
        for q, k in ((torch.eye(8), scores.mT.contiguous()), (torch.eye(8).double(), scores.mT.double().contiguous())):
            v = torch.eye(n).to(q)
            with native.instruction_set(isa):
                out, _, _ = top_keys(q[None, None], k[None, None], v[None, None], None, keys, False, 1e-3, False)
            order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :keys]
            assert torch.equal(out[0, 0] > 0, torch.zeros(8, n).scatter(-1, order, 1.0) > 0), keys


def test_no_matrix_of_all_pairs_is_made():
    q, k, v = inputs(4096, 4096, 8, 8, batch=1, heads=1)

    def run(impl):
        return largest_tensor(lambda: sparing.inspect(q, k, v, method="top_keys(keys=16)", impl=impl))

    assert run("native") <= 4096 * 8
    assert run("reference") == 2**22  # the control: a block of logits of the specification is seen


def test_reads_any_strides():
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(50, 50, 16, 16))
    found = top_keys(q, k, v, None, 5, False, 0.25, True)
    wanted = top_keys(*(x.contiguous() for x in (q, k, v)), None, 5, False, 0.25, True)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    turned = [x.mT.contiguous().mT for x in (q, k, v)]
    assert torch.equal(top_keys(*turned, None, 5, False, 0.25, True)[0], wanted[0])


@pytest.mark.parametrize("causal", [False, True])
def test_thread_counts_change_nothing(causal):
    q, k, v = inputs(300, 300, 64, 64, heads=3, whole=False)
    same_for_any_threads(lambda: top_keys(q, k, v, keep_of(300), 20, causal, 0.125, True))


def test_groups_share_their_keys():
    q, k, v = inputs(40, 70, 16, 9, heads=6, whole=False)
    options = {"method": "top_keys(keys=6)", "enable_gqa": True}
    no_worse(by("native", **options), by("reference", **options), [q, k[:, ::3], v[:, ::3]], gradients=False)


@pytest.mark.parametrize("with_all", [False, True])
def test_opcheck(with_all):
    q, k, v = inputs(20, 31, 8, 5)
    torch.library.opcheck(torch.ops.sparing.top_keys, (q, k, v, keep_of(31), 4, False, 0.3, with_all))
    torch.library.opcheck(torch.ops.sparing.top_keys, (q, k, v, None, 4, True, 0.3, with_all))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_as_one_graph(dynamic):
    compiled = torch.compile(top_keys, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (40, 41):
        call = *inputs(n, n, 8, 5), keep_of(n), 3, True, 0.3, True
        assert all(torch.equal(a, b) for a, b in zip(compiled(*call), top_keys(*call), strict=True))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"k": torch.randn(2, 2, 20, 7)}, "k"),
        ({"k": torch.randn(2, 20, 8)}, "k"),
        ({"v": torch.randn(2, 2, 19, 5)}, "v"),
        ({"k": torch.randn(2, 2, 20, 8).double()}, "k"),
        ({"keep": torch.ones(2, 19, dtype=torch.bool)}, "keep"),
        ({"keep": torch.ones(2, 20)}, "keep"),
        ({"keys": 0}, "keys"),
    ],
)
def test_sizes_are_checked_in_the_kernel(change, word):
    q, k, v = inputs(20, 20, 8, 5)
    call = {"q": q, "k": k, "v": v, "keep": None, "keys": 3, "causal": False, "scale": 1.0, "with_all": False}
    with pytest.raises(RuntimeError, match=word):
        torch.ops.sparing.top_keys(**{**call, **change})
