"""Longformer with monte_carlo: its own windows and global tokens, over sampled values (MCA-Longformer)."""

import copy
import pickle
import threading
from itertools import pairwise

import pytest
import torch
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

import sparing
import sparing.native
from sparing.draws import Draws
from sparing.methods.monte_carlo.method import MonteCarlo
from sparing.transformers.runtime.adapters import longformer as adapter
from sparing.transformers.state import state_of
from tests.support.model_zoo import build, run, tokens, valid

REACH = 4  # the zoo's window of 8 tokens, to either side


def given(length=36, globals_of=((0,), (0, 11))):
    """Two items with other numbers of global tokens, of which the first has seven padded tokens."""
    ids = tokens(length)
    mask, special = torch.ones_like(ids), torch.zeros_like(ids)
    mask[0, length - 7 :] = 0
    for item, places in enumerate(globals_of):
        special[item, list(places)] = 1
    return {"input_ids": ids, "attention_mask": mask, "global_attention_mask": special}


def other_padding(x):
    return {**x, "input_ids": torch.where(x["attention_mask"].bool(), x["input_ids"], 97)}


def layer_call(length=32, globals_of=((0,), (0, 11)), dtype=torch.float32):
    """The first attention layer and what a model would pass to it; peaked attention."""
    model = build("longformer").to(dtype)
    layer = model.encoder.layer[0].attention.self
    with torch.no_grad():
        hidden = model.embeddings(tokens(length))
    mask = torch.zeros(2, length, dtype=dtype)
    mask[0, length - 7 :] = torch.finfo(dtype).min
    for item, places in enumerate(globals_of):
        mask[item, list(places)] = torch.finfo(dtype).max
    special = mask > 0
    call = {
        "attention_mask": mask, "is_index_masked": mask < 0, "is_index_global_attn": special,
        "is_global_attn": bool(special.any()),
    }  # fmt: skip
    return model, layer, hidden, call


def brute_force(layer, hidden, call):
    """M of `value` and of `value_global` from the columns of A: the layer's output for values that single out one key."""
    heads, (batch, n, width) = layer.num_heads, hidden.shape
    special, masked = call["is_index_global_attn"], call["is_index_masked"]
    found = {name: torch.zeros(batch, heads, n) for name in ("value", "value_global")}
    plain = {name: getattr(layer, name) for name in found}
    for key in range(n):
        column = torch.zeros(n, batch, width)
        column[key] = 1.0
        for name, rows in (("value", ~special & ~masked), ("value_global", special)):
            for other in found:
                layer._modules[other] = (lambda t: lambda x: t)(column if other == name else 0 * column)
            out = layer(hidden, **call)[0].unflatten(-1, (heads, -1))[..., 0]  # A_i,key as (B, n, H)
            found[name][:, :, key] = out.masked_fill(~rows[..., None], 0.0).amax(1)
    layer._modules.update(plain)
    return found["value"], found["value_global"]


@pytest.mark.parametrize(
    "setting", ["", ", samples=shared", ", estimator=stratified", ", estimator=drop", ", estimator=mean"]
)
@pytest.mark.parametrize("kernels", [True, False])
def test_values_are_those_that_the_method_itself_uses(setting, kernels, monkeypatch):
    """A, from which the method finds M, times the values that it gives to others for this M."""
    if not kernels:
        monkeypatch.setattr(sparing.native, "ready", lambda *_, **__: False)
    q, k = 3 * torch.randn(2, 4, 24, 16), torch.randn(2, 4, 24, 16)
    value = sparing.Projection(torch.randn(2, 24, 48), torch.randn(64, 48), torch.randn(64))
    keep = torch.ones(2, 24, dtype=torch.bool)
    keep[0, 19:] = False
    method = sparing.method(f"monte_carlo(alpha=2.0{setting})")
    wanted = sparing.attention(q, k, value, keep[:, None, None], method=method, seed=7)
    weights = (q @ k.mT / 4).masked_fill(~keep[:, None, None], -torch.inf).softmax(-1)
    received = weights.masked_fill(~keep[:, None, :, None], 0.0).amax(2)
    inside = value._replace(x=value.x.masked_fill(~keep[..., None], 0.0))
    values, _ = method.values(inside, received, keep[:, None].expand(2, 4, 24), Draws(7, torch.arange(4)))
    torch.testing.assert_close(weights @ values, wanted, rtol=1e-5, atol=1e-4)
    assert not torch.allclose(weights @ inside.project(4), wanted, atol=0.1), "nothing was sampled"


@pytest.mark.parametrize("globals_of", [((0,), (0, 11)), ((0,), (0,)), ((), (3,)), ((), ())])
@torch.no_grad()
def test_a_token_receives_the_largest_weight_of_its_column(globals_of):
    _, layer, hidden, call = layer_call(globals_of=globals_of)
    local, from_global = brute_force(layer, hidden, call)
    _, *weights = layer(hidden, **call, output_attentions=True)
    special = call["is_index_global_attn"] if call["is_global_attn"] else None
    torch.testing.assert_close(adapter.received_locally(weights[0], special), local, rtol=1e-5, atol=1e-7)
    if special is not None:
        found = adapter.received_from_global(weights[1], special)
        torch.testing.assert_close(found, from_global, rtol=1e-5, atol=1e-7)
        assert found[0].any() == bool(globals_of[0]), "rows that mean nothing were counted"
    assert not local[0, :, -7:].any()
    # Negative control: the columns of the window read as keys i, i + 1, ... instead of i - w, ...
    wrong = adapter.received_locally(weights[0].roll(REACH, -1), special)
    assert not torch.allclose(wrong, local, atol=1e-3)


def test_nothing_sampled_is_the_stock_model():
    model, x = build("longformer"), given()
    before = run(model, x)
    with sparing.approximate(model, "monte_carlo(alpha=0)") as handle:
        assert type(model.encoder.layer[0].attention.self) is adapter.AdaptedLongformerSelfAttention
        torch.testing.assert_close(run(model, x), before, rtol=0, atol=1e-6)
        assert set(handle.layers.values()) == {"monte_carlo(alpha=0.0)"}
    with sparing.approximate(model, "monte_carlo(alpha=4.0)"), pytest.raises(AssertionError):
        torch.testing.assert_close(run(model, x), before, rtol=0, atol=1e-6)
    assert type(model.encoder.layer[0].attention.self) is LongformerSelfAttention
    assert torch.equal(run(model, x), before)


def errors(spec, seeds):
    """(seeds, tokens, H e) of the layer's output against the stock layer's (tokens, H e), at valid tokens."""
    model, layer, hidden, call = layer_call()
    out = []
    with torch.no_grad():
        stock = layer(hidden, **call)[0]
        with sparing.approximate(model, spec):
            for seed in range(seeds):
                state_of(layer).settings.seed = seed
                out.append(layer(hidden, **call)[0] - stock)
    keep = ~call["is_index_masked"]
    return torch.stack(out)[:, keep].double(), stock[keep].double()


def largest_z(found, stock):
    """Null hypothesis: the mean error is zero. The largest |z| over 16 random directions, that of the output itself,
    and that of the output of each global token."""
    draw = torch.Generator().manual_seed(5)
    directions = torch.randn(16, stock.numel(), generator=draw, dtype=torch.float64)
    along = (found * stock).sum(-1)
    amounts = torch.cat([found.flatten(1) @ directions.T, along.sum(-1, keepdim=True), along[:, [0, 25, 36]]], dim=1)
    return float((amounts.mean(0) / (amounts.std(0) / len(amounts) ** 0.5)).abs().max())


@pytest.mark.parametrize("setting", ["", ", samples=shared", ", estimator=stratified"])
def test_the_output_is_unbiased(setting, monkeypatch):
    """200 seeds, 20 directions: |z| above 5.6 happens once in 2 million under the null hypothesis (Bonferroni)."""
    spec = f"monte_carlo(alpha=2.0{setting})"
    assert largest_z(*errors(spec, 200)) < 5.6
    if setting == ", estimator=stratified":  # negative control
        right = MonteCarlo.values
        monkeypatch.setattr(MonteCarlo, "values", lambda *args: (1.1 * right(*args)[0], right(*args)[1]))
        assert largest_z(*errors(spec, 200)) > 5.6


def test_the_error_falls_with_alpha_and_keeps_its_bound():
    """Theorem 2 for each row of either kind: the root mean square error is at most alpha beta |W|_F."""
    _, layer, hidden, call = layer_call()
    keep = ~call["is_index_masked"]
    beta = (hidden.norm(dim=-1) * keep).sum(-1) / keep.sum(-1)
    size = max(float(part.weight.detach().norm()) for part in (layer.value, layer.value_global))
    found = []
    for alpha in (4.0, 2.0, 1.0, 0.5):
        error, _ = errors(f"monte_carlo(alpha={alpha})", 40)
        rows = error.square().sum(-1).mean(0).sqrt()  # per valid token
        limit = alpha * size * beta.repeat_interleave(keep.sum(-1))
        assert (rows <= 1.1 * limit).all()
        found.append(float(error.square().mean().sqrt()))
    assert all(b < 0.8 * a for a, b in pairwise(found)), found


def test_both_value_layers_are_sampled_by_lists_of_their_own(monkeypatch):
    model, layer, hidden, call = layer_call()
    layer.value_global.load_state_dict(layer.value.state_dict())
    kept = []
    right = MonteCarlo.values

    def watch(self, v, received, valid, draws):
        kept.append((received, draws.streams.tolist(), right(self, v, torch.full_like(received, 0.1), valid, draws)[0]))
        return right(self, v, received, valid, draws)

    monkeypatch.setattr(MonteCarlo, "values", watch)
    with sparing.approximate(model, "monte_carlo(alpha=6.0)"), torch.no_grad():
        layer(hidden, **call)
        model.encoder.layer[1].attention.self(hidden, **call)
    streams = [number for _, numbers, _ in kept for number in numbers]
    assert len(kept) == 4
    assert len(set(streams)) == 16, "value layers share random numbers"
    assert not torch.equal(kept[0][0], kept[1][0])
    assert not torch.equal(kept[0][2], kept[1][2])


@pytest.mark.parametrize(
    "setting", ["", ", samples=shared", ", estimator=stratified", ", estimator=drop", ", estimator=mean"]
)
def test_padding_does_not_matter(setting, monkeypatch):
    """Other ids: the same bits. More padding, also by a whole window: the same numbers."""
    model, x = build("longformer"), given()
    with sparing.approximate(model, f"monte_carlo(alpha=4.0{setting})", seed=3):
        out = valid("longformer", x, run(model, x))
        assert torch.equal(valid("longformer", x, run(model, other_padding(x))), out)
        longer = {key: torch.nn.functional.pad(value, (0, 12)) for key, value in x.items()}
        found = valid("longformer", longer, run(model, longer))
        torch.testing.assert_close(found, out, rtol=0, atol=1e-6 * float(out.abs().max()))
        alone = run(model, {key: value[:1, :29] for key, value in x.items()})[0]
        torch.testing.assert_close(alone, out[:29], rtol=0, atol=1e-6 * float(out.abs().max()))
        right = MonteCarlo.values  # negative control: padding counts as tokens
        monkeypatch.setattr(
            MonteCarlo, "values", lambda self, v, m, valid, d: right(self, v, m, torch.ones_like(valid), d)
        )
        assert not torch.allclose(valid("longformer", longer, run(model, longer)), out, atol=1e-3)


def test_only_monte_carlo_fits_beside_a_window():
    model = build("longformer")
    before = {name: (id(m), type(m), sorted(vars(m))) for name, m in model.named_modules()}
    for spec in ("nystrom", "window(size=4)", "top_keys(keys=4)", "yoso"):
        with pytest.raises(
            sparing.Unsupported,
            match=rf"layer\.0\.attention\.self \(and 1 more layers\) cannot run {spec[:5]}.*attends within a window by its own code",
        ):
            sparing.approximate(model, spec)
    with pytest.raises(sparing.Unsupported, match=r"the largest weight alone; take importance='max'"):
        sparing.approximate(model, "monte_carlo(importance=mean)")
    assert {name: (id(m), type(m), sorted(vars(m))) for name, m in model.named_modules()} == before
    model.encoder.layer[1].attention.self.value_global = torch.nn.Sequential(torch.nn.Linear(64, 64))
    with pytest.raises(
        sparing.Unsupported, match=r"layer\.1.*needs linear layers of the values, and value_global is not one"
    ):
        sparing.approximate(model, "monte_carlo")
    x = given()
    out = run(model, x)
    with sparing.approximate(model, "exact"):
        assert type(model.encoder.layer[0].attention.self) is LongformerSelfAttention
        assert torch.equal(run(model, x), out)


def test_everything_is_put_back_and_copies_stay():
    model, x = build("longformer"), given()
    out, weights = run(model, x), copy.deepcopy(model.state_dict())
    before = {name: (id(m), type(m), sorted(vars(m)), len(m._forward_hooks)) for name, m in model.named_modules()}
    with sparing.approximate(model, "monte_carlo(alpha=4.0)") as outer:
        sampled = run(model, x)
        assert list(model.state_dict()) == list(weights)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(run(twin, x), sampled)
        with sparing.approximate(model, "exact", layers=[0, 1]):
            assert torch.equal(run(model, x), out)
        with sparing.approximate(model, "monte_carlo(alpha=4.0)", seed=None):
            assert not torch.equal(run(model, x), run(model, x))
        assert torch.equal(run(model, x), sampled)
        assert outer.active
    assert {
        name: (id(m), type(m), sorted(vars(m)), len(m._forward_hooks)) for name, m in model.named_modules()
    } == before
    assert torch.equal(run(model, x), out)


def test_a_failing_call_leaves_no_values_behind(monkeypatch):
    model, x = build("longformer"), given()
    with sparing.approximate(model, "monte_carlo(alpha=4.0)"):
        sampled = run(model, x)
        with monkeypatch.context() as broken:
            broken.setattr(LongformerSelfAttention, "_chunk", None)
            with pytest.raises(TypeError, match="not callable"):
                run(model, x)
        assert type(model.encoder.layer[0].attention.self.value) is torch.nn.Linear
        assert torch.equal(run(model, x), sampled)


def test_two_threads_on_one_model_get_their_own_values():
    model = build("longformer")
    given_to = [given(), {"input_ids": tokens(24, 3)}]
    with sparing.approximate(model, "monte_carlo(alpha=4.0)"):
        wanted, found = [run(model, x) for x in given_to], {}

        def work(number):
            found[number] = all(torch.equal(run(model, given_to[number]), wanted[number]) for _ in range(10))

        threads = [threading.Thread(target=work, args=(n,)) for n in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {0: True, 1: True}


def test_training_refuses_dropout_and_has_gradients():
    """Dropout is refused; without it, gradients at alpha = 0 are the stock model's, and sampled ones are finite."""
    model, x = build("longformer").train(), given()
    with (
        sparing.approximate(model, "monte_carlo"),
        pytest.raises(
            sparing.Unsupported, match=r"layer\.0.*drops attention weights in training \(p=0\.1\), which monte_carlo"
        ),
    ):
        run(model, x)
    model, found = build("longformer", attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0).train(), []
    for spec in (None, "monte_carlo(alpha=0)", "monte_carlo(alpha=4.0)"):
        model.zero_grad()
        handle = sparing.approximate(model, spec) if spec else None
        model(**x)[0].square().sum().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        if handle is not None:
            handle.restore()
    assert any("value_global" in name for name in found[0])
    assert found[0].keys() == found[1].keys() == found[2].keys()
    largest = max(float(g.abs().max()) for g in found[0].values())
    for name, wanted in found[0].items():
        torch.testing.assert_close(found[1][name], wanted, rtol=1e-4, atol=1e-6 * largest)
        assert found[2][name].isfinite().all()


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 0.02), (torch.bfloat16, 0.12)])
def test_16_bit_weights_give_nearly_the_same_output(dtype, limit):
    """Closer to float32 with the same seed than sampling is to exact values."""
    model, x = build("longformer"), given()
    exact = valid("longformer", x, run(model, x))
    with sparing.approximate(model, "monte_carlo(alpha=2.0)", seed=2):
        wanted = valid("longformer", x, run(model, x))
        found = valid("longformer", x, run(model.to(dtype), x))
    assert found.dtype == dtype
    assert found.isfinite().all()
    distance = float((found.float() - wanted).norm() / wanted.norm())
    assert distance < limit
    assert distance < float((wanted - exact).norm() / exact.norm())
