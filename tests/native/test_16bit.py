"""Kernels that read bfloat16 and float16: the numbers of float32, without a copy of the inputs in float32."""

import math
from dataclasses import replace

import pytest
import torch

import sparing
from sparing import native
from sparing.native.attend import attend
from sparing.workbench.memory import can_measure, peak_extra_bytes
from tests.support.allocations import largest_tensor
from tests.support.kernel_checks import every_instruction_set, needs_kernels
from tests.support.method_table import ROWS

pytestmark = needs_kernels

SHORT = (torch.bfloat16, torch.float16)
SPECS = (
    "exact",
    "window(size=16)",
    "window(size=6, sinks=3)",
    "window(size=10, sinks=1, global_tokens=2)",
    "nystrom(landmarks=5)",
    "nystrom(landmarks=200)",
    "kernel(kind=elu)",
    "kernel(kind=elu, normalize=length)",
    "kernel(kind=elu, normalize=none)",
    "random_features(features=20)",
    "top_keys(keys=7)",
    "lsh(rounds=2, chunk=8)",
    "lsh(rounds=2, chunk=8, combine=sum)",
    "skip(threshold=0.2)",
    "yoso(hashes=8)",
    "yoso(hashes=8, hash=gaussian, normalize=sum)",
)
LONG = (
    "exact",
    "window(size=128)",
    "nystrom(landmarks=32)",
    "kernel(kind=elu)",
    "random_features(features=64)",
    "top_keys(keys=16)",
    "lsh(rounds=2)",
    "skip(threshold=0.1)",
    "yoso(hashes=8)",
)


def inputs(dtype, n=90, d=20, e=33, heads=2, kv_heads=2, batch=2):
    gen = torch.Generator().manual_seed(n + d)
    sizes = ((heads, d), (kv_heads, d), (kv_heads, e))
    return [torch.randn(batch, h, n, width, generator=gen).to(dtype) for h, width in sizes]


def found(spec, tensors, **options):
    return sparing.inspect(*tensors, method=spec, seed=3, enable_gqa=True, **options)


def padding(n):
    return (torch.rand(2, n, generator=torch.Generator().manual_seed(n)) < 0.7)[:, None, None]


def same(a, b):
    """Compare to the bit: rows are widened to the float32 numbers that the same code then computes with."""
    return torch.equal(a, b) or torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@every_instruction_set
@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_the_result_is_that_of_float32_rounded_once(isa, spec, dtype):
    causal = sparing.method(spec).supports.causal
    for options in ({}, {"attn_mask": padding(90)}, {"is_causal": causal, "attn_mask": padding(90)}, {"scale": -0.3}):
        x = inputs(dtype, kv_heads=1)
        with native.instruction_set(isa):
            short, wide = found(spec, x, **options), found(spec, [t.float() for t in x], **options)
        assert short.output.dtype == dtype
        assert same(short.output, wide.output.to(dtype)), f"{spec}, {options}"
        assert short.statistics.keys() == wide.statistics.keys()
        for name, note in wide.statistics.items():
            assert short.statistics[name].dtype == note.dtype, name
            assert same(short.statistics[name], note), f"{spec}, {options}: {name}"
        if wide.lse is not None:
            assert same(short.lse, wide.lse), f"{spec}, {options}: lse"


@every_instruction_set
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_multipole_is_that_of_float32_to_the_last_place(isa, dtype, causal):
    """Its kernel is compiled for each type: float32 numbers may differ in their last place, and so may rounded ones."""
    x = inputs(dtype, n=200, kv_heads=1)
    options = {"attn_mask": padding(200), "is_causal": causal}
    with native.instruction_set(isa):
        short = found("multipole(tolerance=0.03, block=16)", x, **options)
        wide = found("multipole(tolerance=0.03, block=16)", [t.float() for t in x], **options)
    assert short.output.dtype == dtype
    kind, wanted = torch.finfo(dtype), wide.output.to(dtype).double()
    place = kind.eps * wanted.abs().clamp_min(kind.smallest_normal)
    assert ((short.output.double() - wanted).abs() <= place).all()
    assert torch.equal(short.statistics["touched"], wide.statistics["touched"])
    torch.testing.assert_close(short.lse, wide.lse)


@pytest.mark.parametrize("causal", [False, True])
def test_multipole_makes_no_copy_in_float32(causal):
    """Its copies of few bits are made piece by piece, of which the C library may keep the memory: a peak says little."""
    x = inputs(torch.bfloat16, n=2048, d=64, e=64)

    def call(*tensors):
        return sparing.attention(*tensors, method="multipole", is_causal=causal)

    with torch.no_grad():
        assert largest_tensor(lambda: call(*x), torch.float32) < x[1].numel() / 2
        wide = [t.float() for t in x]
        assert largest_tensor(lambda: call(*wide), torch.float32) >= x[1].numel()


@pytest.mark.skipif(not can_measure(), reason="this system keeps no peak of a process's memory")
@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("spec", LONG)
def test_a_call_takes_less_memory_than_its_inputs_in_float32(spec, dtype):
    """The output, in float32 and then in 16 bits, is half of that; what remains is for scratch."""
    x = inputs(dtype, n=2048, d=64, e=64, heads=8, kv_heads=8)
    copies = 4 * sum(t.numel() for t in x)

    def call():
        return sparing.attention(*x, method=spec, seed=0)

    with torch.no_grad():
        call()
        assert peak_extra_bytes(call) < 0.8 * copies
        with native.switched_off():
            assert peak_extra_bytes(call) > copies, "the measurement does not see the copies of other paths"


@pytest.mark.parametrize("entry", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("spec", SPECS)
def test_non_finite_and_extreme_entries_go_the_way_of_float32(spec, entry):
    for which in range(3):
        x = inputs(torch.bfloat16)
        x[which][0, 1, 40, 3] = entry
        wide = found(spec, [t.float() for t in x]).output
        assert same(found(spec, x).output, wide.bfloat16())


@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("spec", [spec for spec in SPECS if sparing.method(spec).supports.gradient == "full"])
def test_gradients_are_those_of_float32(spec, dtype):
    """Converted before the call: the gradients of heads that share a key are summed in float32, then rounded."""
    x = inputs(dtype, kv_heads=1)
    wide = [t.float().requires_grad_() for t in x]
    leaves = [t.requires_grad_() for t in x]
    out, wide_out = (sparing.attention(*y, method=spec, seed=3, enable_gqa=True) for y in (leaves, wide))
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = torch.autograd.grad((out * weights).sum(), leaves)
    wanted = torch.autograd.grad((wide_out * weights.float()).sum(), wide)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == dtype
        assert torch.equal(a, b.to(dtype))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.spec))
def test_only_kernels_that_say_so_get_16_bits(row, monkeypatch):
    seen = {name: set() for name in ("native", "fast", "reference")}

    def spy(name, run):
        def spied(self, q, k, v, call):
            seen[name].add(q.dtype)
            return run(self, q, k, v, call)

        return spied

    cls = type(row.method)
    for name in seen:
        if name in vars(cls):
            monkeypatch.setattr(cls, name, spy(name, vars(cls)[name]))
    q, k, v = inputs(torch.bfloat16, n=33, e=20)
    if row.supports.projection:
        v = sparing.Projection(v.transpose(1, 2).flatten(2), torch.eye(40).bfloat16())
    for impl in ("auto", "reference"):
        sparing.attention(q, k, v, method=row.method, seed=1, impl=impl)
    assert seen["native"] <= {torch.bfloat16 if row.supports.native_16bit else torch.float32}
    assert seen["fast"] | seen["reference"] == {torch.float32}


def projected(dtype, n=90, features=64, heads=2, width=20, batch=2):
    """q, k, and a Projection whose x is larger than the values."""
    gen = torch.Generator().manual_seed(n + features)
    q, k = torch.randn(2, batch, heads, n, 16, generator=gen).to(dtype).unbind(0)
    x, weight, bias = (torch.randn(*s, generator=gen) for s in ((batch, n, features), (heads * width, features),
                                                              (heads * width,)))  # fmt: skip
    weight = weight * torch.logspace(0, -1, features)
    return q, k, sparing.Projection(x, weight, bias).map(lambda t: t.to(dtype))


def wide(q, k, value):
    return q.float(), k.float(), value.map(torch.Tensor.float)


PROJECTING = (
    "monte_carlo(alpha=2.0)",
    "monte_carlo(alpha=2.0, samples=shared)",
    "monte_carlo(alpha=2.0, estimator=stratified)",
    "monte_carlo(alpha=1.0, estimator=drop)",
    "monte_carlo(alpha=1.0, estimator=mean)",
    "monte_carlo(alpha=2.0, importance=mean, probabilities=input)",  # which no kernel covers
)


@every_instruction_set
@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("spec", PROJECTING)
def test_projections_of_16_bits_are_those_of_float32_rounded_once(isa, spec, dtype):
    x = projected(dtype)
    with native.instruction_set(isa):
        for mask in (None, padding(90)):
            short, long = (found(spec, tensors, attn_mask=mask) for tensors in (x, wide(*x)))
            assert short.output.dtype == dtype
            torch.testing.assert_close(short.output, long.output.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
            assert torch.equal(short.statistics["counts"], long.statistics["counts"])
            assert 0 < float(short.statistics["rate"].mean()) < 1
            for name in short.statistics:
                assert short.statistics[name].dtype == long.statistics[name].dtype, name
                torch.testing.assert_close(short.statistics[name], long.statistics[name], rtol=1e-4, atol=1e-4)


@every_instruction_set
@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_all_samples_of_16_bits_are_exact_products(isa, dtype):
    x = projected(dtype)
    with native.instruction_set(isa):
        for alpha in (0.0, 1e-3):
            out = sparing.attention(*x, method=f"monte_carlo(alpha={alpha})", seed=0)
            wanted = sparing.attention(*wide(*x), method="exact", impl="reference").to(dtype)
            torch.testing.assert_close(out, wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("entry", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("place", ["q", "k", "x", "weight"])
def test_non_finite_entries_of_projections_go_the_way_of_float32(place, entry):
    q, k, value = projected(torch.bfloat16)
    {"q": q, "k": k, "x": value.x, "weight": value.weight}[place].view(-1)[77] = entry
    out, wanted = (sparing.attention(*t, method=PROJECTING[0], seed=0) for t in ((q, k, value), wide(q, k, value)))
    torch.testing.assert_close(out, wanted.bfloat16(), equal_nan=True, rtol=0.02, atol=1e-2)


@pytest.mark.parametrize("alpha", [0.0, 2.0])
def test_projections_make_no_copy_in_float32(alpha):
    """Neither of x nor of the weight, of which one is kept in float32; the largest tensors are q, k or the values."""
    tall, broad = projected(torch.bfloat16, n=512, features=1024), projected(torch.bfloat16, n=16, width=512)

    def call(*tensors):
        return sparing.attention(*tensors, method=f"monte_carlo(alpha={alpha})", seed=0)

    with torch.no_grad():
        for x in (tall, broad):
            copied = max(x[2].x.numel(), x[2].weight.numel())
            call(*x)
            assert largest_tensor(lambda x=x: call(*x), torch.float32) <= copied / 2
            with native.switched_off():  # control
                assert largest_tensor(lambda x=x: call(*x), torch.float32) >= copied


@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_gradients_of_projections_are_those_of_float32(dtype):
    q, k, value = projected(dtype)
    leaves = [t.requires_grad_() for t in (q, k, *value)]
    wider = [t.detach().float().requires_grad_() for t in leaves]
    grads = []
    for a, b, *c in (leaves, wider):
        out = sparing.attention(a, b, sparing.Projection(*c), method=PROJECTING[0], seed=0)
        grads.append(torch.autograd.grad(out.float().square().sum(), (a, b, *c)))
        assert out.dtype == a.dtype
    for short, long in zip(*grads, strict=True):
        assert short.dtype == dtype
        assert float((short.float() - long).norm() / long.norm()) < 20 * torch.finfo(dtype).eps


def test_ops_take_each_tensor_in_its_own_type():
    q, k, v = inputs(torch.float16)
    wanted, _ = attend(q.float(), k.float(), v.float(), None, None, 0.3)
    for mixed in ((q.float(), k, v), (q, k.float(), v.float()), (q, k, v.float())):
        out, _ = attend(*mixed, None, None, 0.3)
        assert out.dtype == torch.float32
        assert torch.equal(out, wanted)
    with pytest.raises(RuntimeError, match="k has another dtype"):
        attend(q.double(), k, v, None, None, 0.3)


def test_gradients_of_an_op_widen_what_was_saved():
    """Also where the caller did not: the gradient of 16-bit inputs is that of float32, rounded."""
    q, k, v = (t.requires_grad_() for t in inputs(torch.bfloat16))
    grads = torch.autograd.grad(attend(q, k, v, None, None, 0.3)[0].sum(), (q, k, v))
    wide = [t.detach().float().requires_grad_() for t in (q, k, v)]
    wanted = torch.autograd.grad(attend(*wide, None, None, 0.3)[0].sum(), wide)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(grads, wanted, strict=True))
    with pytest.raises(RuntimeError, match="must be float32 or float64"):
        torch.ops.sparing.segment_means_backward(q.detach(), None, 90)


@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_opcheck(dtype):
    q, k, v = inputs(dtype, n=20, d=5, e=3)
    torch.library.opcheck(torch.ops.sparing.attend, (q, k, v, None, None, 0.3))
    torch.library.opcheck(torch.ops.sparing.window, (q, k, v, None, None, 3, 3, False, 0.3))
    torch.library.opcheck(torch.ops.sparing.segment_means, (q, None, 4))
    torch.library.opcheck(torch.ops.sparing.feature_sums, (k, None, v, None, 2, 1.0))
    torch.library.opcheck(torch.ops.sparing.feature_mix, (q, None, v[:, :, :5].float(), None, 2, 1.0))
    torch.library.opcheck(torch.ops.sparing.feature_causal, (q, k, v, None, None, 2, 1.0, 1.0, True))
    torch.library.opcheck(torch.ops.sparing.top_keys, (q, k, v, None, 4, True, 0.3, True))


def test_a_method_that_stops_claiming_it_gets_float32():
    class Quiet(type(sparing.method("window"))):
        name = "_quiet"
        supports = replace(sparing.method("window").supports, native_16bit=False)

        def native(self, q, k, v, call):
            assert q.dtype == torch.float32
            return super().native(q, k, v, call)

    assert sparing.attention(*inputs(torch.float16), method=Quiet(size=8)).dtype == torch.float16
