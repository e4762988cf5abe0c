"""MultiheadAttention against torch's, with its masks and options, and the learned state of methods."""

import pytest
import torch

import sparing
from sparing import Unsupported
from sparing.nn import MultiheadAttention


def pair(**options):
    theirs = torch.nn.MultiheadAttention(16, 4, batch_first=True, **options)
    ours = MultiheadAttention(16, 4, batch_first=True, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs.eval(), ours.eval()


OPTIONS = [{}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 12, "vdim": 20}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("mask", ["none", "padding", "boolean", "additive", "per head", "both", "additive padding"])
def test_exact_is_torchs_module(options, mask):
    theirs, ours = pair(**options)
    x, y, z = (
        torch.randn(2, 10, 16),
        torch.randn(2, 7, options.get("kdim", 16)),
        torch.randn(2, 7, options.get("vdim", 16)),
    )
    padding = torch.arange(7).expand(2, 7) >= torch.tensor([[4], [7]])
    hidden = torch.rand(10, 7) < 0.4
    hidden[:, 0] = False
    masks = {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "boolean": {"attn_mask": hidden},
        "additive": {"attn_mask": torch.randn(10, 7)},
        "per head": {"attn_mask": torch.randn(8, 10, 7)},
        "both": {"attn_mask": hidden, "key_padding_mask": padding},
        "additive padding": {"key_padding_mask": torch.zeros(2, 7).masked_fill(padding, -torch.inf),
                             "attn_mask": torch.randn(10, 7)},
    }[mask]  # fmt: skip
    for average in (True, False):
        wanted, weights = theirs(x, y, z, need_weights=True, average_attn_weights=average, **masks)
        found, own = ours(x, y, z, need_weights=True, average_attn_weights=average, **masks)
        assert torch.allclose(found, wanted, atol=1e-6)
        assert torch.allclose(own, weights, atol=1e-6)


@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_causal_calls(options):
    theirs, ours = pair(**options)
    x = torch.randn(2, 9, 16)
    causal = torch.ones(9, 9).triu(1).bool()
    wanted, _ = theirs(x, x, x, attn_mask=causal, need_weights=False)
    assert torch.allclose(ours(x, x, x, is_causal=True)[0], wanted, atol=1e-6)
    assert torch.allclose(ours(x, x, x, attn_mask=causal, is_causal=True)[0], wanted, atol=1e-6)
    float_mask = torch.zeros(9, 9).masked_fill(causal, -torch.inf)
    assert torch.allclose(ours(x, x, x, attn_mask=float_mask, is_causal=True)[0], wanted, atol=1e-6)
    with pytest.raises(ValueError, match="attn_mask is not the causal mask"):
        ours(x, x, x, attn_mask=causal.roll(1, 0), is_causal=True)


def test_layouts_and_gradients():
    theirs, ours = torch.nn.MultiheadAttention(16, 4), MultiheadAttention(16, 4)
    ours.load_state_dict(theirs.state_dict())
    for shape in ((9, 2, 16), (9, 16)):
        x = torch.randn(*shape)
        outs = [layer(x, x, x, need_weights=False)[0] for layer in (theirs, ours)]
        assert torch.allclose(*outs, atol=1e-6)
        grads = [torch.autograd.grad(o.square().sum(), tuple(m.parameters())) for o, m in zip(outs, (theirs, ours))]
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*grads))


@pytest.mark.parametrize("spec", ["window(size=4)", "yoso(hashes=4)"])
def test_torchs_encoder_layer_does_not_bypass_the_method(spec):
    """In evaluation without gradients torch's layer would run a fused kernel on the weights alone."""
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0).eval()
    exact = layer(torch.ones(1, 20, 16))
    layer.self_attn = MultiheadAttention(16, 4, batch_first=True, method=spec, seed=0).eval()
    x = torch.randn(2, 20, 16)
    wanted = layer(x)
    with torch.no_grad():
        assert torch.allclose(layer(x), wanted, atol=1e-6)
        stack = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        assert torch.allclose(stack(x), layer(wanted), atol=1e-5)
    assert exact.shape == (1, 20, 16)


def test_dropout_acts_in_training_only_and_starts_like_torchs_module():
    torch.manual_seed(3)
    theirs = torch.nn.MultiheadAttention(16, 4, dropout=0.5, batch_first=True)
    torch.manual_seed(3)
    ours = MultiheadAttention(16, 4, dropout=0.5, batch_first=True)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
    x = torch.randn(2, 9, 16)
    assert torch.allclose(ours.eval()(x, x, x)[0], theirs.eval()(x, x, x)[0], atol=1e-6)
    assert not torch.allclose(ours.train()(x, x, x)[0], ours.eval()(x, x, x)[0], atol=1e-3)
    all_dropped = MultiheadAttention(16, 4, dropout=1.0, batch_first=True)(x, x, x)[0]
    assert torch.equal(all_dropped, torch.nn.MultiheadAttention(16, 4, dropout=1.0, batch_first=True)(x, x, x)[0])


@pytest.mark.parametrize("method", ["nystrom(landmarks=3)", "skyformer(landmarks=6)", "lsh(rounds=2, chunk=4)"])
@pytest.mark.parametrize("extra", ["add_bias_kv", "add_zero_attn"])
def test_padded_tokens_stay_without_influence_beside_extra_keys(method, extra):
    layer = MultiheadAttention(16, 4, batch_first=True, method=method, seed=0, **{extra: True}).eval()
    x = torch.randn(2, 20, 16)
    padding = torch.arange(20).expand(2, 20) >= torch.tensor([[12], [20]])
    before = layer(x, x, x, key_padding_mask=padding)[0]
    y = x.masked_fill(padding[..., None], 9.0)
    assert torch.equal(layer(y, y, y, key_padding_mask=padding)[0][~padding], before[~padding])


def test_cross_attention_of_equal_lengths_counts_every_query():
    layer = MultiheadAttention(16, 4, batch_first=True, method="nystrom(landmarks=3)").eval()
    x, y = torch.randn(2, 1, 20, 16).unbind(0)
    padding = torch.arange(20)[None] >= 12
    q, k, v = (layer._split(t) for t in torch.nn.functional.linear(y, layer.in_proj_weight).chunk(3, -1))
    q = layer._split(torch.nn.functional.linear(x, layer.in_proj_weight[:16]))
    real = torch.ones(1, 20, dtype=torch.bool)
    wanted = sparing.attention(q, k, v, ~padding[:, None, None], method=layer.method, query_mask=real)
    found = layer(x, y, y, key_padding_mask=padding)[0]
    assert torch.allclose(found, layer.out_proj(wanted.transpose(1, 2).flatten(2)), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "method", ["exact", "window(size=4)", "monte_carlo(alpha=0.0)", "random_features(features=16)", "kernel(kind=elu)"]
)
def test_autocast_rounds_and_nothing_more(method, dtype):
    extra = {"add_bias_kv": True} if not method.startswith(("monte", "window")) else {}
    layer = MultiheadAttention(16, 4, batch_first=True, method=method, seed=0, **extra).eval()
    x = torch.randn(2, 20, 16)
    with torch.autocast("cpu", dtype=dtype):
        found = layer(x, x, x)[0]
    assert torch.allclose(found.float(), layer(x, x, x)[0], atol=0.06)


def test_it_serves_in_a_transformer_encoder():
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0)
    layer.self_attn = MultiheadAttention(16, 4, batch_first=True, method="nystrom(landmarks=4)")
    x = torch.randn(2, 30, 16)
    padding = torch.arange(30).expand(2, 30) >= torch.tensor([[20], [30]])
    out = layer.train()(x, src_key_padding_mask=padding)
    out.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    changed = x.clone()
    changed[0, 20:] = 99.0
    assert torch.equal(layer(changed, src_key_padding_mask=padding)[0, :20], out[0, :20])


def test_samples_are_fresh_in_training_and_fixed_in_evaluation():
    layer = MultiheadAttention(16, 2, batch_first=True, method="random_features(features=8)")
    x = torch.randn(1, 12, 16)
    layer.train()
    assert not torch.equal(layer(x, x, x)[0], layer(x, x, x)[0])
    layer.eval()
    assert torch.equal(layer(x, x, x)[0], layer(x, x, x)[0])
    twin = MultiheadAttention(16, 2, batch_first=True, method="random_features(features=8)").eval()
    own = twin.evaluation_seed.clone()
    twin.load_state_dict(torch.nn.MultiheadAttention(16, 2).state_dict())
    assert twin.evaluation_seed == own, "a state_dict of torch's module leaves the seed alone"
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x, x, x)[0], twin(x, x, x)[0]), "a saved layer must evaluate the same when loaded"
    fixed = [MultiheadAttention(16, 2, batch_first=True, method=layer.method, seed=5) for _ in range(2)]
    fixed[1].load_state_dict(fixed[0].state_dict())
    assert torch.equal(fixed[0].train()(x, x, x)[0], fixed[1].eval()(x, x, x)[0])


def test_layers_start_alike_with_any_method_and_draw_apart():
    made = {}
    for method in ("exact", "yoso(hashes=4)", "yoso(expectation=True)"):
        torch.manual_seed(0)
        made[method] = [MultiheadAttention(16, 2, method=method) for _ in range(2)]
    for layers in zip(*made.values(), strict=True):
        assert all(torch.equal(layer.in_proj_weight, layers[0].in_proj_weight) for layer in layers)
    one, two = made["yoso(hashes=4)"]
    assert one.evaluation_seed != two.evaluation_seed


@pytest.mark.parametrize("method", ["linformer(rank=5)", "yoso(hashes=4, convolution=3)", "nystrom(convolution=3)"])
def test_learned_state_is_in_the_state_dict_and_gets_a_gradient(method):
    layer = MultiheadAttention(16, 2, batch_first=True, method=method, max_length=24)
    assert "state.weight" in layer.state_dict()
    assert "state.weight" in dict(layer.named_parameters())
    x = torch.randn(2, 20, 16)
    layer(x, x, x)[0].square().sum().backward()
    assert float(layer.state.weight.grad.abs().sum()) > 0


def test_linformer_needs_its_longest_length():
    with pytest.raises(ValueError, match="max_length"):
        MultiheadAttention(16, 2, method="linformer(rank=5)")
    layer = MultiheadAttention(16, 2, batch_first=True, method="linformer(rank=5)", max_length=10)
    with pytest.raises(ValueError, match=r"20 keys exceed max_length=10"):
        layer(*[torch.randn(1, 20, 16)] * 3)


def test_learned_state_is_part_of_the_result():
    layer = MultiheadAttention(16, 2, batch_first=True, method="nystrom(landmarks=4, convolution=5)").double()
    x = torch.randn(2, 20, 16, dtype=torch.float64)
    out = layer(x, x, x)[0]
    out.sum().backward()
    assert float(layer.state.weight.grad.abs().sum()) > 0
    with torch.no_grad():
        layer.state.weight.zero_()
    plain = MultiheadAttention(16, 2, batch_first=True, method="nystrom(landmarks=4)").double()
    plain.load_state_dict({k: v for k, v in layer.state_dict().items() if not k.startswith("state")})
    assert torch.allclose(layer(x, x, x)[0], plain(x, x, x)[0])
    assert not torch.allclose(layer(x, x, x)[0], out)
    q, k, v = torch.randn(3, 1, 2, 9, 8).unbind(0)
    with pytest.raises(ValueError, match=r"convolution=5 has learned weights.*MultiheadAttention"):
        sparing.attention(q, k, v, method="nystrom(convolution=5)")


def test_monte_carlo_samples_the_layers_own_value_projection():
    theirs = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
    ours = MultiheadAttention(16, 4, batch_first=True, method="monte_carlo(alpha=0)").eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 9, 16)
    assert torch.allclose(ours(x, x, x)[0], theirs(x, x, x)[0], atol=1e-6)
    rough = MultiheadAttention(16, 4, batch_first=True, method="monte_carlo(alpha=2.0)").eval()
    rough.load_state_dict(theirs.state_dict())
    assert not torch.allclose(rough(x, x, x)[0], theirs(x, x, x)[0], atol=1e-3)


def test_refusals_come_early_and_name_the_way_out():
    with pytest.raises(ValueError, match="embed_dim=10 must be a positive multiple of num_heads=4"):
        MultiheadAttention(10, 4)
    with pytest.raises(Unsupported, match=r"nystrom has no attention dropout; set dropout=0.0 \(got 0.1\)"):
        MultiheadAttention(16, 4, dropout=0.1, method="nystrom")
    layer = MultiheadAttention(16, 4, batch_first=True, method="nystrom(landmarks=4)")
    x = torch.randn(2, 9, 16)
    with pytest.raises(Unsupported, match="nystrom has no attention weights"):
        layer(x, x, x, need_weights=True)
    with pytest.raises(Unsupported, match="nystrom does not support is_causal"):
        layer(x, x, x, is_causal=True)
    with pytest.raises(ValueError, match="3 dimensions"):
        layer(x[None], x, x)
    with pytest.raises(ValueError, match=r"key_padding_mask \[2, 8\] must be \[2, 9\]"):
        layer(x, x, x, key_padding_mask=torch.zeros(2, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"attn_mask \[9, 8\]"):
        layer(x, x, x, attn_mask=torch.zeros(9, 8))
    with pytest.raises(TypeError, match=r"key_padding_mask has dtype torch.int64; use boolean \(True = padded\)"):
        layer(x, x, x, key_padding_mask=torch.zeros(2, 9, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"dropout=2.0 must be a number"):
        MultiheadAttention(16, 4, dropout=2.0)
    with pytest.raises(TypeError, match=r"seed=1.5 must be an integer"):
        MultiheadAttention(16, 4, seed=1.5)
    for extra in ("add_bias_kv", "add_zero_attn"):
        with pytest.raises(Unsupported, match=f"monte_carlo needs all values.*{extra}=False"):
            MultiheadAttention(16, 4, method="monte_carlo", **{extra: True})
