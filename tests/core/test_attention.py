"""The door: agreement with SDPA, masks, and refusals that name the argument, the value and the way out."""

import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention as sdpa

import sparing
from sparing import Projection, Unsupported, attention
from tests.support.allocations import largest_tensor


def qkv(batch=2, heads=4, n_q=9, n_k=9, d=8, e=6, kv_heads=None, dtype=torch.float32):
    kv_heads = heads if kv_heads is None else kv_heads
    shapes = ((batch, heads, n_q, d), (batch, kv_heads, n_k, d), (batch, kv_heads, n_k, e))
    return [torch.randn(*shape, dtype=torch.float64).to(dtype) for shape in shapes]


@settings(max_examples=60)
@given(
    batch=st.integers(1, 3), groups=st.sampled_from([1, 2, 3]), kv_heads=st.integers(1, 3), n_q=st.integers(1, 40),
    n_k=st.integers(1, 40), d=st.integers(1, 20), e=st.integers(1, 20), causal=st.booleans(),
    mask=st.sampled_from(["none", "padding", "boolean", "additive", "per head"]), scale=st.sampled_from([None, 0.3, -1.0]),
    layout=st.sampled_from(["plain", "transposed", "strided"]), impl=st.sampled_from(["auto", "reference"]),
)  # fmt: skip
def test_exact_is_sdpa(batch, groups, kv_heads, n_q, n_k, d, e, causal, mask, scale, layout, impl):
    q, k, v = qkv(batch, groups * kv_heads, n_q, n_k, d, e, kv_heads, torch.float64)
    if layout == "transposed":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    if layout == "strided":
        q, k, v = (t.repeat_interleave(2, -1)[..., ::2] for t in (q, k, v))
    shapes = {"padding": (batch, 1, 1, n_k), "boolean": (n_q, n_k), "per head": (1, groups * kv_heads, n_q, n_k)}
    given_mask = None
    if mask == "additive":
        given_mask = torch.randn(batch, 1, n_q, n_k, dtype=torch.float64)
    elif mask != "none":
        given_mask = torch.rand(shapes[mask]) < 0.7
    allowed = torch.ones(n_q, n_k, dtype=torch.bool).tril() if causal else torch.ones(n_q, n_k, dtype=torch.bool)
    bias = torch.zeros(batch, groups * kv_heads, n_q, n_k, dtype=torch.float64).masked_fill(~allowed, -torch.inf)
    if given_mask is not None:
        additive = given_mask if mask == "additive" else torch.zeros(()).masked_fill(~given_mask, -torch.inf)
        bias = bias + additive
    wanted = sdpa(q, k, v, attn_mask=bias, scale=scale, enable_gqa=True)
    wanted = wanted.masked_fill((bias == -torch.inf).all(-1, keepdim=True), 0.0)
    found = attention(q, k, v, given_mask, is_causal=causal, scale=scale, enable_gqa=True, impl=impl)
    assert found.shape == wanted.shape
    assert torch.allclose(found, wanted, atol=1e-10)


def test_the_default_is_exact_and_takes_sdpa_arguments_by_position():
    q, k, v = qkv()
    mask = torch.rand(9, 9) < 0.8
    mask[:, 0] = True
    assert torch.allclose(
        attention(q, k, v, mask, 0.0, False, 0.5), sdpa(q, k, v, mask, 0.0, False, scale=0.5), atol=1e-6
    )


def test_a_projection_is_the_linear_layer():
    q, k, _ = qkv(heads=4, kv_heads=2)
    layer = torch.nn.Linear(10, 2 * 6)
    x = torch.randn(2, 9, 10)
    value = layer(x).view(2, 9, 2, 6).transpose(1, 2)
    found = attention(q, k, Projection(x, layer.weight, layer.bias), enable_gqa=True)
    assert torch.equal(found, attention(q, k, value, enable_gqa=True))
    bare = attention(q, k, Projection(x, layer.weight), enable_gqa=True)
    assert torch.allclose(bare + layer.bias.view(1, 2, 1, 6).repeat_interleave(2, 1), found, atol=1e-5)


def test_dropout_is_unbiased_seeded_and_differs_by_slot_only_without_a_seed():
    q, k, v = qkv(batch=1, heads=1, n_q=4, n_k=30)
    q, k, v = (t.expand(400, -1, -1, -1) for t in (q, k, v))
    seeded = attention(q, k, v, dropout_p=0.5, seed=1)
    assert torch.equal(seeded[0], seeded[1])
    assert not torch.equal(seeded, attention(q, k, v, dropout_p=0.5, seed=2))
    free = attention(q, k, v, dropout_p=0.5)
    assert not torch.equal(free[0], free[1])
    few, shared, _ = qkv(batch=1, heads=4, kv_heads=2, n_q=16, n_k=16)
    weights = attention(few, shared, torch.eye(16).expand(1, 2, 16, 16), dropout_p=0.5, enable_gqa=True, seed=0)
    assert not torch.equal(weights[:, 0] > 0, weights[:, 1] > 0), "heads of a group need their own dropout"
    # Null: mean over slots = exact output. 24 z-scores from 400 independent slots; |z| < 5.4 has a false-alarm rate of 1e-6.
    error = free - attention(q, k, v)
    z = error.mean(0) / (error.std(0) / 400**0.5)
    assert float(z.abs().max()) < 5.4


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("dropout_p", [1.0, 1])
def test_dropout_of_every_weight_gives_zeros_and_zero_gradients_as_sdpa_does(dropout_p, impl):
    found = []
    for run in (sdpa, lambda *x, dropout_p: attention(*x, dropout_p=dropout_p, impl=impl)):
        leaves = [t.requires_grad_() for t in qkv()]
        out = run(*leaves, dropout_p=dropout_p)
        found.append([out, *torch.autograd.grad(out.sum(), leaves)])
    for wanted, ours in zip(*found, strict=True):
        assert torch.equal(ours, wanted)
        assert not ours.any()


def test_dropout_of_a_padded_sequence_is_that_of_the_sequence():
    q, k, v = qkv(batch=1, n_q=12, n_k=12)
    keep = torch.arange(12)[None] >= 3
    padded = attention(q, k, v, keep[:, None, None], dropout_p=0.5, seed=4)[:, :, 3:]
    packed = attention(q[:, :, 3:], k[:, :, 3:], v[:, :, 3:], dropout_p=0.5, seed=4)
    assert torch.allclose(padded, packed, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", sorted(set(sparing.list_methods()) - {"monte_carlo"}))
def test_autocast_does_not_reach_inside(method, dtype):
    q, k, v = qkv(n_q=33, n_k=33)
    wanted = attention(q, k, v, method=method, seed=0)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(attention(q, k, v, method=method, seed=0), wanted)


def test_what_a_mask_means_does_not_depend_on_how_it_is_stored():
    q, k, v = qkv(n_q=20, n_k=20)
    keep = (torch.rand(2, 1, 1, 20) < 0.7).index_fill(-1, torch.tensor([0]), True)
    for method in ("nystrom(landmarks=4)", "sampled(samples=4)", "yoso(hashes=4)"):
        wanted = attention(q, k, v, keep, method=method, seed=0)
        for full in (
            keep.expand(2, 4, 20, 20),
            keep.expand(2, 4, 20, 20).contiguous(),
            keep.expand(2, 1, 20, 20).clone(),
        ):
            assert torch.equal(attention(q, k, v, full, method=method, seed=0), wanted)


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_a_wide_mask_serves_narrow_inputs(impl):
    q, k, v = qkv()
    bias = torch.randn(9, 9, dtype=torch.float64)
    found = attention(q, k, v, bias, impl=impl)
    assert torch.allclose(found, sdpa(q, k, v, bias.float()), atol=1e-6)


def test_a_learned_bias_gets_its_gradient_also_when_it_is_zero():
    q, k, v = qkv()
    for shape in ((9, 9), (2, 1, 1, 9)):
        bias = torch.zeros(shape, requires_grad=True)
        attention(q, k, v, bias).square().sum().backward()
        assert float(bias.grad.abs().sum()) > 0


def test_deterministic_calls_leave_the_global_generator_alone():
    state = torch.get_rng_state()
    attention(*qkv_fixed(), method="nystrom(landmarks=4)")
    assert torch.equal(state, torch.get_rng_state())
    attention(*qkv_fixed(), method="yoso")
    assert not torch.equal(state, torch.get_rng_state())


def qkv_fixed():
    return torch.linspace(-1, 1, 3 * 2 * 9 * 8).view(3, 1, 2, 9, 8).unbind(0)


def test_empty_inputs_stay_in_the_graph():
    q, k, v = qkv()
    for name, call in {
        "no item": lambda: attention(q[:0], k[:0], v[:0]),
        "no query": lambda: attention(q[:, :, :0], k, v),
        "no key": lambda: attention(q, k[:, :, :0], v[:, :, :0]),
        "no width": lambda: attention(q, k, v[..., :0]),
    }.items():
        for leaf in (q, k, v):
            leaf.requires_grad_()
            leaf.grad = None
        out = call()
        out.sum().backward()
        assert all(t.grad is not None and bool((t.grad == 0).all()) for t in (q, k, v)), name


def test_large_finite_entries_cost_no_more_and_change_nothing_else():
    q, k, v = qkv(batch=1, heads=1, n_q=3000, n_k=3000, d=4, e=4)
    k[0, 0, 1500, 2] = 1e16
    out = attention(q, k, v, method="window(size=4)", is_causal=True)
    assert out.isfinite().all()
    assert largest_tensor(lambda: attention(q, k, v, method="window(size=4)", is_causal=True)) < 3000 * 3000 / 4


def test_lse_of_rows_without_a_result():
    q, k, v = qkv(n_q=6, n_k=6)
    q[0, 0, 2] = torch.nan
    real = torch.ones(2, 6, dtype=torch.bool)
    real[1, 4] = False
    lse = sparing.inspect(q, k, v, query_mask=real).lse
    assert lse[0, 0, 2].isnan()
    assert (lse[1, :, 4] == -torch.inf).all()
    assert lse[0, 1].isfinite().all()
    assert sparing.inspect(q[:, :, :0], k, v, method="nystrom").lse is None


def test_a_method_that_returns_the_wrong_shape_is_named():
    class Wrong(sparing.Method):
        name = "_wrong"

        def reference(self, q, k, v, call):
            return v[..., :1]

    with pytest.raises(
        RuntimeError, match=r"_wrong: the method returned \[2, 4, 9, 1\] for a call that needs \[2, 4, 9, 6\]"
    ):
        attention(*qkv(), method=Wrong())


BAD_CALLS = {
    "sparse": (lambda q, k, v: attention(q.to_sparse(), k, v), TypeError, ["query", "torch.sparse_coo", "to_dense()"]),
    "state": (
        lambda q, k, v: attention(q, k, v, method="window", state=torch.nn.Linear(2, 2)),
        ValueError, ["state=Linear", "window", "state=None"]),
    "is_causal": (lambda q, k, v: attention(q, k, v, is_causal="False"), TypeError, ["is_causal='False'"]),
    "enable_gqa": (lambda q, k, v: attention(q, k, v, enable_gqa=1), TypeError, ["enable_gqa=1"]),
    "streams type": (lambda q, k, v: attention(q, k, v, streams=1), ValueError, ["streams=1"]),
    "streams of flags": (lambda q, k, v: attention(q, k, v, streams=[True] * 4), ValueError, ["streams=[True"]),
    "learned mask": (
        lambda q, k, v: attention(q, k, v, torch.zeros(9, 9, requires_grad=True), method="top_keys"),
        Unsupported, ["top_keys", "attn_mask", "no_grad"]),
    "rank": (lambda q, k, v: attention(q[0, 0, 0], k, v), ValueError, ["query", "4 dimensions", "[8]"]),
    "value rank": (lambda q, k, v: attention(q, k, v[0, 0, 0]), ValueError, ["value", "4 dimensions"]),
    "leading": (lambda q, k, v: attention(q[:, 0], k[0, :3], v[0, :3]), ValueError, ["query [2, 9, 8]", "broadcast"]),
    "batch": (
        lambda q, k, v: attention(q, k.expand(2, 2, 4, 9, 8)[0].repeat(2, 1, 1, 1)[:3], v[:1]), ValueError,
        ["key", "[3, 4, 9, 8]", "[2, 4, 9, 8]"]),
    "width": (lambda q, k, v: attention(q, k[..., :5], v), ValueError, ["key", "width"]),
    "lengths": (lambda q, k, v: attention(q, k, v[:, :, :5]), ValueError, ["value", "[2, 4, 5, 6]"]),
    "heads": (lambda q, k, v: attention(q, k[:, :2], v[:, :2]), ValueError, ["2 heads", "enable_gqa=True"]),
    "head groups": (
        lambda q, k, v: attention(q, k[:, :3], v[:, :3], enable_gqa=True), ValueError, ["3 heads", "does not divide"]),
    "no tensor": (lambda q, k, v: attention(q.numpy(), k, v), TypeError, ["query", "ndarray"]),
    "integers": (lambda q, k, v: attention(q.long(), k.long(), v.long()), TypeError, ["query", "torch.int64", "float32"]),
    "mixed types": (lambda q, k, v: attention(q, k.double(), v), TypeError, ["key", "float64", "float32"]),
    "devices": (lambda q, k, v: attention(q, k.to("meta"), v), ValueError, ["key", "meta", "cpu"]),
    "empty width": (lambda q, k, v: attention(q[..., :0], k, v), ValueError, ["key [2, 4, 9, 8]", "query [2, 4, 9, 0]"]),
    "mask shape": (lambda q, k, v: attention(q, k, v, torch.ones(9, 8) > 0), ValueError, ["attn_mask", "[9, 8]"]),
    "mask rank": (lambda q, k, v: attention(q, k, v, torch.ones(1, 1, 1, 9, 9) > 0), ValueError, ["attn_mask"]),
    "float8 mask": (
        lambda q, k, v: attention(q, k, v, torch.zeros(9, 9).to(torch.float8_e4m3fn)), TypeError,
        ["attn_mask", "float8_e4m3fn", "boolean"]),
    "sparse mask": (
        lambda q, k, v: attention(q, k, v, torch.ones(9, 9).to_sparse()), TypeError, ["attn_mask", "to_dense"]),
    "float8": (
        lambda q, k, v: attention(*(x.to(torch.float8_e4m3fn) for x in (q, k, v))), TypeError,
        ["query", "float8_e4m3fn", "float32"]),
    "meta": (
        lambda q, k, v: attention(*(x.to("meta") for x in (q, k, v))), ValueError, ["query", "meta", "real device"]),
    "nested": (
        lambda q, k, v: attention(*(torch.nested.as_nested_tensor(list(x)) for x in (q, k, v))), TypeError,
        ["query", "nested", "to_padded_tensor"]),
    "jagged": (
        lambda q, k, v: attention(*(torch.nested.as_nested_tensor(list(x), layout=torch.jagged) for x in (q, k, v))),
        TypeError, ["query", "nested", "to_padded_tensor"]),
    "mask type": (lambda q, k, v: attention(q, k, v, torch.ones(9, 9).long()), TypeError, ["attn_mask", "int64", "boolean"]),
    "mask list": (lambda q, k, v: attention(q, k, v, [1]), TypeError, ["attn_mask", "list"]),
    "mask device": (lambda q, k, v: attention(q, k, v, torch.ones(9, 9, device="meta")), ValueError, ["attn_mask", "meta"]),
    "dropout": (lambda q, k, v: attention(q, k, v, dropout_p=1.5), ValueError, ["dropout_p=1.5"]),
    "scale": (lambda q, k, v: attention(q, k, v, scale=float("nan")), ValueError, ["scale=nan", "finite"]),
    "scale type": (lambda q, k, v: attention(q, k, v, scale="1"), TypeError, ["scale='1'"]),
    "seed": (lambda q, k, v: attention(q, k, v, seed=1.5), TypeError, ["seed=1.5", "integer"]),
    "impl": (lambda q, k, v: attention(q, k, v, impl="fast"), ValueError, ["impl='fast'", "'reference'"]),
    "native": (
        lambda q, k, v: attention(q, k, v, dropout_p=0.5, impl="native"), Unsupported, ["native", "impl='auto'"]),
    "streams": (lambda q, k, v: attention(q, k, v, streams=[1]), ValueError, ["streams=[1]", "(4)"]),
    "query mask": (lambda q, k, v: attention(q, k, v, query_mask=torch.ones(2, 9)), TypeError, ["query_mask", "boolean"]),
    "query mask shape": (
        lambda q, k, v: attention(q, k, v, query_mask=torch.ones(2, 8) > 0), ValueError, ["query_mask", "[2, 9]"]),
    "projection x": (
        lambda q, k, v: attention(q, k, Projection(torch.randn(2, 8, 5), torch.randn(24, 5))), ValueError, ["value.x"]),
    "projection weight": (
        lambda q, k, v: attention(q, k, Projection(torch.randn(2, 9, 5), torch.randn(23, 5))),
        ValueError, ["value.weight", "[23, 5]"]),
    "projection bias": (
        lambda q, k, v: attention(q, k, Projection(torch.randn(2, 9, 5), torch.randn(24, 5), torch.randn(3))),
        ValueError, ["value.bias", "[3]"]),
    "method type": (lambda q, k, v: attention(q, k, v, method=3), TypeError, ["method", "3"]),
    "method name": (lambda q, k, v: attention(q, k, v, method="nystrm"), ValueError, ["'nystrm'", "nystrom", "kernelized"]),
    "field": (lambda q, k, v: attention(q, k, v, method="nystrom(marks=3)"), ValueError, ["'marks'", "landmarks"]),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_input_is_named(case):
    call, kind, words = BAD_CALLS[case]
    with pytest.raises(kind) as caught:
        call(*qkv())
    for word in words:
        assert word in str(caught.value), f"{word!r} is missing in: {caught.value}"


def test_a_refusal_names_the_way_out():
    q, k, v = qkv()
    with pytest.raises(Unsupported, match=r"nystrom does not support is_causal=True.*use a causal method"):
        attention(q, k, v, is_causal=True, method="nystrom")
    with pytest.raises(Unsupported, match=r"nystrom does not support attn_mask.*\[B, 1, 1, n_k\].*-inf"):
        attention(q, k, v, torch.rand(9, 9) < 0.5, method="nystrom")
    assert issubclass(Unsupported, NotImplementedError)
    assert issubclass(Unsupported, ValueError)


def test_cross_attention_of_equal_lengths_may_say_that_all_queries_are_real():
    """A key mask alone is read as self-attention: padded positions carry no weight in landmarks. query_mask overrides."""
    q, k, v = qkv(n_q=40, n_k=40)
    keep = (torch.arange(40) < 25).expand(2, 40)[:, None, None]
    real = torch.ones(2, 40, dtype=torch.bool)
    assumed = attention(q, k, v, keep, method="nystrom(landmarks=8)")
    crossed = attention(q, k, v, keep, method="nystrom(landmarks=8)", query_mask=real)
    assert assumed.isfinite().all()
    assert not torch.allclose(assumed, crossed)
    other = torch.cat([q[:, :, :25], 3 * q[:, :, 25:]], dim=2)
    assert torch.equal(attention(other, k, v, keep, method="nystrom(landmarks=8)")[:, :, :25], assumed[:, :, :25])


def test_importing_loads_no_optional_package_and_touches_no_generator():
    code = (
        "import sys, torch\n"
        "state = torch.get_rng_state()\n"
        "sdpa = torch.nn.functional.scaled_dot_product_attention\n"
        "import sparing\n"
        "assert torch.equal(state, torch.get_rng_state())\n"
        "assert torch.nn.functional.scaled_dot_product_attention is sdpa\n"
        "optional = {'transformers', 'rich', 'scipy', 'hypothesis', 'torch._dynamo'} & set(sys.modules)\n"
        "assert not optional, optional\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_public_names_exist():
    for name in sparing.__all__:
        assert hasattr(sparing, name)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize(
    ("spec", "knob"),
    [("random_features(features={})", "features"), ("linformer(rank={})", "rank"), ("lsh(rounds={})", "rounds")],
)
def test_tables_that_no_memory_holds_are_refused_before_they_are_made(spec, knob, impl):
    q = torch.randn(4, 16, 16, 64)
    with pytest.raises(MemoryError, match=rf"{knob}=2000000000 needs tables of about .* GiB, .* lower {knob}"):
        sparing.attention(q, q, q, method=spec.format(2 * 10**9), seed=0, impl=impl)
    for spec in ("yoso(bits=17)", "lsh(buckets=100000)"):
        with pytest.raises(ValueError, match=r"(bits=17|buckets=100000) must be at most (16|65536)"):
            sparing.method(spec)


def test_a_projection_that_memory_cannot_hold_is_refused_before_it_is_drawn(monkeypatch):
    monkeypatch.setattr("sparing.check._memory", lambda: 2.0**31)
    q = torch.randn(1, 1, 2, 64)  # sums of 0.75 GiB; the projection is drawn in 2.5 GiB
    with pytest.raises(MemoryError, match=r"random_features: features=1048576 needs tables .*; lower features"):
        attention(q, q, q, method="random_features(features=1048576)", seed=0)


@pytest.mark.parametrize("numbers", [2**50, 2**62])
@pytest.mark.parametrize("call", [sparing.attention, sparing.inspect])
def test_a_call_that_runs_out_of_memory_says_whose_and_what_to_do(call, numbers):
    @dataclass(frozen=True, kw_only=True)
    class Hungry(sparing.Method):
        name = "_hungry"
        budget = "meals"
        meals: int = 3

        def reference(self, q, k, v, call):
            return torch.empty(numbers)

    q = torch.randn(1, 2, 16, 8)
    message = (
        r"^_hungry\(meals=3\): query \[1, 2, 16, 8\] and key \[1, 2, 16, 8\] need more memory .*; lower meals, or "
    )
    with pytest.raises(MemoryError, match=message) as caught:
        call(q, q, q, method=Hungry())
    assert "\n" not in str(caught.value)


def test_other_errors_of_a_method_stay_as_they_are():
    @dataclass(frozen=True, kw_only=True)
    class Broken(sparing.Method):
        name = "_broken"

        def reference(self, q, k, v, call):
            raise RuntimeError("a mistake")

    q = torch.randn(1, 2, 16, 8)
    with pytest.raises(RuntimeError, match=r"^a mistake$"):
        sparing.attention(q, q, q, method=Broken())
