"""The kernels of `skip` against the specification, for every instruction set of the machine."""

import pytest
import torch

import sparing
from sparing import native
from sparing.methods.skip.native import skip, skip_step
from tests.support.kernel_checks import every_instruction_set, needs_kernels, no_worse, same_for_any_threads

pytestmark = needs_kernels


def inputs(n_q, n_k, d, e, heads=2, kv_heads=2, batch=2):
    gen = torch.Generator().manual_seed(n_q + n_k + d)
    shapes = ((heads, n_q, d), (kv_heads, n_k, d), (kv_heads, n_k, e))
    return [torch.randn(batch, *shape, generator=gen) * 1.5 for shape in shapes]


def keep_of(n, share=0.7):
    return torch.rand(2, n, generator=torch.Generator().manual_seed(n)) < share


# Groups of 32, strips of 4 to 32, blocks of 64 and 128, tiles of 128 keys, and their ends.
@every_instruction_set
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "spec", ["skip(threshold=0.2)", "skip(threshold=1.0, stride=128)", "skip(threshold=0.01, stride=7)"]
)
@pytest.mark.parametrize(
    ("n_q", "n_k", "d", "e"), [(1, 1, 1, 1), (17, 33, 20, 3), (131, 131, 32, 33), (40, 300, 64, 16), (260, 140, 9, 8)]
)
def test_no_worse_than_plain_float32(isa, n_q, n_k, d, e, spec, masked, causal):
    mask = keep_of(n_k)[:, None, None] if masked else None

    def by(impl):
        def compute(q, k, v):
            return sparing.attention(q, k, v, impl=impl, method=spec, attn_mask=mask, is_causal=causal)

        return compute

    with native.instruction_set(isa):
        no_worse(by("native"), by("reference"), inputs(n_q, n_k, d, e), what=f"{isa}, {spec}")


@every_instruction_set
def test_statistics_and_shared_key_heads(isa):
    q, k, v = inputs(140, 140, 16, 16, heads=6)
    options = {"method": "skip(threshold=0.3)", "enable_gqa": True, "is_causal": True}
    with native.instruction_set(isa):
        found = sparing.inspect(q, k, v, impl="native", **options)
    wanted = sparing.inspect(q, k, v, impl="reference", **options)
    assert torch.allclose(found.output, wanted.output, atol=1e-5)
    assert torch.equal(found.statistics["touched"], wanted.statistics["touched"])
    for a, b in [
        (found.lse, wanted.lse),
        *((found.statistics[x], wanted.statistics[x]) for x in ("left_out", "bound")),
    ]:
        assert torch.allclose(a, b, atol=1e-5)


def test_a_sequence_has_the_same_bits_alone_packed_and_padded():
    q, k, v = inputs(300, 300, 32, 32, batch=1)
    for causal in (False, True):
        options = {"method": "skip(threshold=0.2)", "is_causal": causal}
        alone = sparing.attention(*(x[:, :, 90:230] for x in (q, k, v)), **options)
        packed = sparing.attention(q, k, v, cu_seqlens=torch.tensor([0, 90, 230, 300]), **options)[:, :, 90:230]
        keep = (torch.arange(300) >= 90) & (torch.arange(300) < 230)
        padded = sparing.attention(q, k, v, attn_mask=keep[None, None, None], **options)[:, :, 90:230]
        assert torch.equal(packed, alone)
        assert torch.equal(padded, alone)
        assert not torch.equal(sparing.attention(q, k, v, **options)[:, :, 90:230], alone), "the control"


@pytest.mark.parametrize("causal", [False, True])
def test_thread_counts_change_nothing(causal):
    q, k, v = inputs(300, 300, 64, 64, heads=3, kv_heads=3)
    same_for_any_threads(lambda: skip(q, k, v, keep_of(300), keep_of(300), None, 0.1, 4, 0.125, causal))
    same_for_any_threads(lambda: skip_step(q[:, :, -3:], k, v, keep_of(300), 0.1, 4, 0.125))


@every_instruction_set
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_steps_agree_with_plain_pytorch(isa, dtype):
    q, k, v = (x.to(dtype) for x in inputs(2, 270, 20, 33, heads=6))
    method = sparing.method("skip(threshold=0.2)")
    with native.instruction_set(isa):
        found, notes = method.step(q, k, v, keep_of(270), 0.3)
    wanted, known = method.step(*(x.float() for x in (q, k)), v.double(), keep_of(270), 0.3)  # of two types: no kernel
    assert found.dtype == dtype
    assert torch.allclose(found.double(), wanted.double(), atol=0.02 if dtype.itemsize == 2 else 1e-5)
    assert torch.equal(notes["touched"], known["touched"])


def test_opcheck():
    q, k, v = inputs(20, 20, 8, 5)
    torch.library.opcheck(torch.ops.sparing.skip, (q, k, v, keep_of(20), keep_of(20), None, 0.1, 4, 0.3, True))
    torch.library.opcheck(torch.ops.sparing.skip_step, (q, k, v, keep_of(20), 0.1, 4, 0.3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threshold": 0.0}, "threshold must be above 0"),
        ({"stride": 0}, "stride must be from 1 to 128"),
        ({"leading": torch.ones(2, 19, dtype=torch.bool)}, "leading does not have the sizes"),
        ({"offsets": torch.tensor([0, 20])}, "leading and offsets do not go together"),
        ({"k": torch.zeros(2, 2, 20, 7)}, "k does not have the sizes"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    q, k, v = inputs(20, 20, 8, 5)
    given = {"q": q, "k": k, "v": v, "keep": keep_of(20), "leading": keep_of(20), "offsets": None, "threshold": 0.1,
             "stride": 4, "scale": 0.3, "causal": False, **change}  # fmt: skip
    with pytest.raises(RuntimeError, match=message):
        skip(**given)
