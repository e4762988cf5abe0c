"""Swapping in and out: per layer, nested, repeated, after errors; and what is refused before anything changes."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import sparing
from sparing.transformers.slot import slot_of

from zoo import CONFIGS, build, inputs, run, tokens

LAYER = "encoder.layer.{}.attention.self"


@pytest.fixture
def bert():
    return build("bert")


def state(model):
    """Everything that approximate() may touch."""
    return (
        model.config._attn_implementation,
        model.config.to_dict(),
        {name: id(module) for name, module in model.named_modules()},
        {name: sorted(vars(module)) for name, module in model.named_modules()},
        {name: len(module._forward_hooks) for name, module in model.named_modules()},
        list(model.state_dict()),
    )


@pytest.mark.parametrize("spec", ["nystrom(landmarks=4)", "monte_carlo(alpha=1.0)", "exact"])
def test_everything_is_put_back(bert, spec):
    before, given = state(bert), inputs("bert")
    out, weights = run(bert, given), copy.deepcopy(bert.state_dict())
    handle = sparing.approximate(bert, spec)
    assert handle.active
    run(bert, given)
    assert list(bert.state_dict()) == list(weights)
    handle.restore()
    handle.restore()
    assert not handle.active
    assert state(bert) == before
    assert torch.equal(run(bert, given), out)
    assert all(torch.equal(a, b) for a, b in zip(weights.values(), bert.state_dict().values()))


def test_an_exception_in_the_block_restores(bert):
    before = state(bert)
    with pytest.raises(IndexError), sparing.approximate(bert, "monte_carlo"):
        run(bert, {"input_ids": tokens() + 100})
    assert state(bert) == before


def test_a_failure_half_way_leaves_the_model_as_it_was(bert, monkeypatch):
    before = state(bert)

    def fails(self, layer, slot):
        if "1" in slot.name:
            raise MemoryError("half-way")
        original(self, layer, slot)

    original = sparing.transformers.deferred.Deferred.__init__
    monkeypatch.setattr(sparing.transformers.deferred.Deferred, "__init__", fails)
    with pytest.raises(MemoryError, match="half-way"):
        sparing.approximate(bert, "monte_carlo")
    assert state(bert) == before


def test_layers_choose_for_themselves(bert):
    given = inputs("bert")
    exact = run(bert, given)
    whole = {}
    for layers in (0, -1, [0], LAYER.format(1), "encoder.layer.1.*", [0, 1]):
        with sparing.approximate(bert, "window(size=4)", layers=layers) as handle:
            chosen = [name for name, spec in handle.layers.items() if spec != "exact"]
            whole[str(layers)] = (chosen, run(bert, given))
    assert whole["0"][0] == whole["[0]"][0] == [LAYER.format(0)]
    assert whole["-1"][0] == whole[LAYER.format(1)][0] == whole["encoder.layer.1.*"][0] == [LAYER.format(1)]
    assert torch.equal(whole["0"][1], whole["[0]"][1])
    assert not torch.equal(whole["0"][1], whole["-1"][1])
    assert not torch.equal(whole["0"][1], exact)
    with sparing.approximate(bert, {0: "window(size=4)", "encoder.layer.1.*": "window(size=4)"}):
        assert torch.equal(run(bert, given), whole["[0, 1]"][1])


def test_calls_nest_and_may_end_in_any_order(bert):
    given = inputs("bert")
    exact = run(bert, given)
    outer = sparing.approximate(bert, "window(size=4)")
    both = run(bert, given)
    inner = sparing.approximate(bert, {1: "monte_carlo(alpha=1.0)"})
    assert list(outer.layers.values()) == ["window(size=4)", "monte_carlo(alpha=1.0)"]
    mixed = run(bert, given)
    assert not torch.equal(mixed, both)
    inner.restore()
    assert torch.equal(run(bert, given), both)

    inner = sparing.approximate(bert, {1: "monte_carlo(alpha=1.0)"})
    innermost = sparing.approximate(bert, "exact", layers=1)
    outer.restore()
    assert list(inner.layers.values()) == ["exact", "exact"]
    assert torch.equal(run(bert, given), exact)
    innermost.restore()
    assert list(inner.layers.values()) == ["exact", "monte_carlo(alpha=1.0)"]
    assert not torch.equal(run(bert, given), exact)
    inner.restore()
    assert torch.equal(run(bert, given), exact)
    assert bert.config._attn_implementation == "sdpa"
    assert slot_of(bert.encoder.layer[0].attention.self) is None


def test_the_users_own_switch_is_respected(bert):
    """set_attn_implementation to another name and back, with layers of both kinds."""
    given = inputs("bert")
    exact = run(bert, given)
    for spec in ("window(size=4)", "monte_carlo(alpha=1.0)"):
        with sparing.approximate(bert, spec):
            out = run(bert, given)
            bert.set_attn_implementation("sdpa")
            assert torch.equal(run(bert, given), exact)
            bert.set_attn_implementation("sparing")
            assert torch.equal(run(bert, given), out)
            bert.set_attn_implementation("eager")
            torch.testing.assert_close(run(bert, given), exact, rtol=0, atol=1e-5)
        assert torch.equal(run(bert, given), exact)
    bert.set_attn_implementation("sdpa")
    with sparing.approximate(bert, "window(size=4)"):
        bert.set_attn_implementation("sdpa")
        with sparing.approximate(bert, "window(size=2)", layers=0):
            assert not torch.equal(run(bert, given), exact), "a later call must not be ignored"


def test_repr_says_what_runs_and_why_the_rest_does_not():
    model = build("modernbert")
    handle = sparing.approximate(model, "nystrom(landmarks=8)")
    text = repr(handle)
    assert "1 of 2 attention layers approximated" in text
    assert "layers.0.attn: nystrom(landmarks=8)" in text
    assert "layers.1.attn: exact: it attends within a window of 5 tokens already" in text
    assert "decoding" not in text
    handle.restore()
    assert "restored" in repr(handle)
    with sparing.approximate(build("llama"), "window(size=4)") as handle:
        assert "tokens that continue a cache (decoding) run exact attention" in repr(handle)


def test_it_prints_nothing(bert, capfd):
    with sparing.approximate(bert, "window(size=4)"):
        run(bert, inputs("bert"))
    assert capfd.readouterr() == ("", "")


def test_copies_of_an_approximated_model_are_approximated(bert):
    given = inputs("bert")
    exact = run(bert, given)
    for spec in ("window(size=4)", "monte_carlo(alpha=1.0)"):
        with sparing.approximate(bert, spec):
            untried = copy.deepcopy(bert)
            out = run(bert, given)
            twin, thawed = copy.deepcopy(bert), pickle.loads(pickle.dumps(bert))
        assert torch.equal(run(bert, given), exact)
        assert torch.equal(run(twin, given), out)
        assert torch.equal(run(thawed, given), out)
        assert torch.equal(run(untried, given), out)


def test_weights_that_move_while_approximated_stay_moved(bert):
    with sparing.approximate(bert, "monte_carlo(alpha=0)"):
        bert.double()
        bert.encoder.layer[0].attention.self.value.weight.data.zero_()
    value = bert.encoder.layer[0].attention.self.value
    assert type(value) is nn.Linear
    assert value.weight.dtype == torch.float64
    assert not value.weight.any()


def test_two_threads_on_one_model(bert):
    """The value layer hands its input on; another thread's must not get in between."""
    given = [inputs("bert"), {"input_ids": tokens(40, 3)}]
    with sparing.approximate(bert, "monte_carlo(alpha=1.0)"):
        wanted = [run(bert, x) for x in given]
        found = {}

        def work(number):
            found[number] = all(torch.equal(run(bert, given[number]), wanted[number]) for _ in range(20))

        threads = [threading.Thread(target=work, args=(n,)) for n in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {0: True, 1: True}


def test_a_compiled_model_may_be_approximated_too(bert):
    given = inputs("bert")
    with sparing.approximate(torch.compile(bert, backend="eager"), "window(size=4)") as handle:
        assert list(handle.recipe.layers) == [LAYER.format(0), LAYER.format(1)]
        out = run(bert, given)
    with sparing.approximate(bert, "window(size=4)"):
        assert torch.equal(run(bert, given), out)


def test_layers_draw_from_streams_of_their_own():
    """Two equal layers with equal inputs must not make equal errors: samples reused in every layer add up."""
    model = build("bert")
    first, second = (model.encoder.layer[i].attention.self for i in (0, 1))
    second.load_state_dict(first.state_dict())
    x = torch.randn(1, 24, 64)
    with sparing.approximate(model, "random_features(features=8)"), torch.no_grad():
        a, b = first(x)[0], second(x)[0]
        assert torch.equal(first(x)[0], a), "a seed fixes the draw"
    assert not torch.allclose(a, b, atol=1e-3)
    with sparing.approximate(model, "random_features(features=8)", seed=None), torch.no_grad():
        assert not torch.equal(first(x)[0], first(x)[0])
        torch.manual_seed(3)
        a = first(x)[0]
        torch.manual_seed(3)
        assert torch.equal(first(x)[0], a)


class Ignores(nn.Module):
    """Asks for the registry and then goes its own way, as some models do under names they do not know."""

    def __init__(self, inner):
        super().__init__()
        self.config, self.inner, self.is_causal = inner.config, [inner], False
        self.query = self.key = self.value = nn.Linear(64, 64)

    def forward(self, hidden_states, **others):
        if self.config._attn_implementation == "never":
            return ALL_ATTENTION_FUNCTIONS["never"]
        return (hidden_states, None)


def test_a_layer_that_ignores_the_registry_is_found_out(bert):
    attention = bert.encoder.layer[1].attention
    attention.self = Ignores(attention.self)
    before = state(bert)
    told = pytest.raises(RuntimeError, match=r"encoder\.layer\.1\.attention\.self: Ignores did not call sparing")
    with sparing.approximate(bert, "window(size=4)"), told:
        run(bert, inputs("bert"))
    assert state(bert) == before


@pytest.mark.parametrize("name", ["bigbird", "reformer"])
def test_models_with_attention_of_their_own_are_refused(name):
    model = build(name)
    before = state(model)
    with pytest.raises(
        sparing.Unsupported, match=r"layer.*computes its own attention, for which sparing has no adapter"
    ):
        sparing.approximate(model, "nystrom")
    with pytest.raises(sparing.Unsupported, match="computes its own attention"):
        sparing.approximate(model, "exact")
    assert state(model) == before


REFUSED = [
    ("bert", {"what": "window", "layers": "decoder.*"}, ValueError, r"layers: no attention layer is named 'decoder\.\*'; there are 'encoder"),
    ("bert", {"what": "window", "layers": 7}, ValueError, r"layers: there is no layer 7; the model has 2"),
    ("bert", {"what": "window", "layers": -3}, ValueError, r"layers: there is no layer -3"),
    ("bert", {"what": "window", "layers": []}, ValueError, "layers: an empty list"),
    ("bert", {"what": "window", "layers": 1.5}, TypeError, "layers: 1.5 must be a layer's number or name"),
    ("bert", {"what": {9: "window"}}, ValueError, "what: there is no layer 9"),
    ("bert", {"what": {0: "window", "encoder.layer.0*": "exact"}}, ValueError, "what: .*named twice"),
    ("bert", {"what": {0: "window"}, "layers": [0]}, ValueError, "layers: the mapping names the layers already"),
    ("bert", {"what": "windows"}, ValueError, "method: unknown name 'windows'"),
    ("bert", {"what": "window(size=-1)"}, ValueError, "size=-1"),
    ("bert", {"what": 3}, TypeError, "method must be a Method or a spec string"),
    ("bert", {"what": "window", "seed": "zero"}, TypeError, "seed='zero'"),
    ("bert", {}, ValueError, "what: the model's config holds no recipe; pass a method"),
    ("bert", {"what": "there_is_none.json"}, FileNotFoundError, "there_is_none.json"),
    ("gpt2", {"what": "nystrom"}, sparing.Unsupported, r"transformer\.h\.0\.attn \(and 1 more layers\) cannot run nystrom.*causal"),
    ("gpt2", {"what": "monte_carlo", "layers": 1}, sparing.Unsupported, r"transformer\.h\.1\.attn cannot run monte_carlo"),
    ("bart", {"what": "nystrom"}, sparing.Unsupported, r"decoder\.layers\.0\.self_attn.*layers=\['encoder\.layers\.0\.self_attn'\]"),
    ("bart", {"what": {"decoder.*.encoder_attn": "nystrom"}}, sparing.Unsupported, "encoder_attn.*later tokens of the target"),
    ("whisper", {"what": "window"}, sparing.Unsupported, r"encoder_attn.*cross attention, which window does not support"),
    ("modernbert", {"what": "monte_carlo"}, sparing.Unsupported, "linear layer of the values"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "kind", "message"), REFUSED)
def test_bad_input_is_refused_before_anything_changes(name, arguments, kind, message):
    model = build(name)
    before = state(model)
    with pytest.raises(kind, match=message):
        sparing.approximate(model, **arguments)
    assert state(model) == before


def test_models_without_attention():
    with pytest.raises(ValueError, match="model: Sequential has no attention modules"):
        sparing.approximate(nn.Sequential(nn.Linear(3, 3)), "exact")
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        sparing.approximate("bert", "exact")


def test_a_sliding_layer_honours_its_window_where_the_method_can():
    model, given = build("modernbert"), inputs("modernbert")
    before = run(model, given)
    rows = given["attention_mask"].bool()
    with sparing.approximate(model, "value_aware(keys=40)", layers=1):
        torch.testing.assert_close(run(model, given)[rows], before[rows], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "spec"), [("modernbert", "nystrom(landmarks=3)"), ("mistral", "window(size=2)")])
def test_a_sliding_layer_runs_any_method_on_inputs_within_its_window(name, spec):
    """Padding and causality are honoured there; longer inputs, which the layer's mask would cut, are refused."""
    model = build(name)
    window = {"modernbert": 5, "mistral": 8}[name]
    if name == "mistral":
        with pytest.raises(
            sparing.Unsupported, match="within a window of 8 tokens already; name the layers in `layers`"
        ):
            sparing.approximate(model, spec)
    short = {"input_ids": tokens(window - 1), "attention_mask": torch.ones(2, window - 1, dtype=torch.long)}
    short["attention_mask"][0, :2] = 0
    keep = short["attention_mask"].bool()
    exact = run(model, short)
    with sparing.approximate(model, "top_keys(keys=99)", layers=[0, 1]):
        torch.testing.assert_close(run(model, short)[keep], exact[keep], rtol=0, atol=1e-5)
    with sparing.approximate(model, spec, layers=1) as handle:
        assert f"on inputs within the layer's own window of {window} tokens" in repr(handle)
        out = run(model, short)
        assert not torch.allclose(out[keep], exact[keep], atol=1e-4)
        other = dict(short, input_ids=torch.where(keep, short["input_ids"], 97))
        assert torch.equal(run(model, other)[keep], out[keep])
        with pytest.raises(
            sparing.Unsupported, match=rf"layers\.1\..*does not support.*attends within {window} tokens"
        ):
            run(model, {"input_ids": tokens(24)})


def test_custom_and_packed_masks_reach_the_method_or_are_refused():
    model = build("llama")
    ids = tokens(12)
    packed = torch.tensor([[*range(5), *range(7)]] * 2)
    block = torch.block_diag(torch.ones(5, 5), torch.ones(7, 7)).tril().bool()[None, None].expand(2, 1, 12, 12)
    for given in (
        {"input_ids": ids, "position_ids": packed, "use_cache": False},
        {"input_ids": ids, "attention_mask": block},
    ):
        before = run(model, given)
        with sparing.approximate(model, "value_aware(keys=40)"):
            torch.testing.assert_close(run(model, given), before, rtol=0, atol=1e-5)
        with (
            sparing.approximate(model, "window(size=4)"),
            pytest.raises(sparing.Unsupported, match=r"model\.layers\.0\.self_attn: window does not support attn_mask"),
        ):
            run(model, given)


def test_a_causal_mask_that_was_written_out_is_recognised():
    model, given = build("llama"), inputs("llama")
    keep = given["attention_mask"].bool()
    square = torch.ones(24, 24).tril().bool() & keep[:, None, None, :]
    added = torch.zeros(square.shape).masked_fill(~square, torch.finfo(torch.float32).min)
    bent = square.clone()
    bent[:, :, 20, 10] = False
    with sparing.approximate(model, "window(size=6)"):
        out = run(model, given)
        for mask in (square, added):
            assert torch.equal(run(model, {**given, "attention_mask": mask})[keep], out[keep])
        with pytest.raises(sparing.Unsupported, match="attn_mask"):
            run(model, {**given, "attention_mask": bent})
        with pytest.raises(sparing.Unsupported, match="attn_mask"):
            run(model, {**given, "attention_mask": added.clamp_min(-5.0)})


def test_arguments_that_nobody_knows_are_refused(bert):
    with sparing.approximate(bert, "window(size=4)"):
        layer = bert.encoder.layer[0].attention.self
        for name in ("s_aux", "softcap", "indices", "cu_seq_lens_q", "something_new"):
            with pytest.raises(sparing.Unsupported, match=rf"encoder\.layer\.0.*the model passes {name}"):
                layer(torch.randn(1, 8, 64), **{name: torch.ones(1)})
    with sparing.approximate(bert, "exact"), pytest.raises(sparing.Unsupported, match="the model passes s_aux"):
        layer(torch.randn(1, 8, 64), s_aux=torch.ones(1))


def test_dropout_in_training_is_applied_or_refused(bert):
    given = inputs("bert")
    bert.train()
    with (
        sparing.approximate(bert, "nystrom(landmarks=4)"),
        pytest.raises(sparing.Unsupported, match=r"encoder\.layer\.0.*drops attention weights in training \(p=0\.1\)"),
    ):
        run(bert, given)
    with sparing.approximate(bert, "exact"):
        assert not torch.equal(run(bert, given), run(bert, given))


def test_gradient_checkpointing_draws_the_same_samples():
    model = build("bert", attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
    given, found = inputs("bert"), []
    with sparing.approximate(model, "random_features(features=16)", seed=None):
        for checkpointing in (False, True):
            if checkpointing:
                model.gradient_checkpointing_enable()
            model.train().zero_grad()
            torch.manual_seed(4)
            model(**given)[0].square().sum().backward()
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 20
    for plain, recomputed in zip(*found):
        torch.testing.assert_close(recomputed, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("spec", ["yoso(hashes=8)", "linformer(rank=8)", "skyformer(landmarks=8)"])
def test_methods_that_need_training_say_so_once(bert, spec):
    with pytest.warns(UserWarning, match="needs further training") as caught:
        sparing.approximate(bert, spec).restore()
    assert len(caught) == 1


def test_registering_is_explicit_and_repeatable():
    sparing.transformers.register()
    before = AttentionInterface._global_mapping["sparing"], AttentionMaskInterface._global_mapping["sparing"]
    sparing.transformers.register()
    assert before == (AttentionInterface._global_mapping["sparing"], AttentionMaskInterface._global_mapping["sparing"])


def test_the_zoo_is_complete():
    assert {"bert", "roberta", "distilbert", "vit", "gpt2", "llama", "modernbert", "whisper", "t5"} <= set(CONFIGS)


def test_models_that_share_a_config_do_not_share_their_attention():
    """A twin stays exact; handles may be restored in any order; the config is given back in the end."""
    for name in ("bert", "vit"):
        a, given = build(name), inputs(name)
        b = type(a)(a.config).eval()
        before, exact = state(a), (run(a, given), run(b, given))
        first = sparing.approximate(a, "nystrom(landmarks=4)")
        assert torch.equal(run(b, given), exact[1]), "the twin was never touched"
        assert not torch.equal(run(a, given), exact[0])
        second = sparing.approximate(b, "window(size=4)")
        out = run(b, given)
        assert not torch.equal(out, exact[1])
        first.restore()
        assert torch.equal(run(a, given), exact[0])
        assert torch.equal(run(b, given), out)
        assert set(a.config.sparing["layers"].values()) == {"window(size=4)"}
        second.restore()
        assert torch.equal(run(a, given), exact[0])
        assert torch.equal(run(b, given), exact[1])
        assert state(a) == before


@pytest.mark.parametrize(("name", "spec"), [("bart", "top_keys(keys=2)"), ("whisper", "nystrom(landmarks=4)")])
def test_a_part_of_a_model_leaves_the_rest_alone(name, spec):
    """Encoder and decoder share their config; only the given part changes, and no recipe speaks for the whole."""
    model, given = build(name), inputs(name)
    encoder = model.get_encoder()
    before = state(model)
    encoded = {"encoder_outputs": (torch.randn(2, 24, 64),), "decoder_input_ids": tokens(9)}
    exact, whole = run(model, encoded), run(model, given)
    with sparing.approximate(encoder, spec) as handle:
        assert len(handle.layers) == 2
        assert torch.equal(run(model, encoded), exact)
        assert not torch.equal(run(model, given), whole)
        assert not hasattr(model.config, "sparing")
    assert state(model) == before


def test_a_layers_number_does_not_depend_on_an_earlier_call(bert):
    given = inputs("bert")
    with sparing.approximate(bert.encoder.layer[1], "random_features(features=8)"):
        run(bert, given)
        with sparing.approximate(bert, "random_features(features=8)") as handle:
            out, recipe = run(bert, given), handle.recipe
    with sparing.approximate(bert, recipe):
        assert torch.equal(run(bert, given), out)


def test_whatever_hangs_on_a_value_layer_is_not_passed_by(bert):
    attention = bert.encoder.layer[0].attention.self
    hook = attention.value.register_forward_hook(lambda module, args, output: 3 * output)
    with pytest.raises(sparing.Unsupported, match=r"layer\.0.*has no plain one of its own"):
        sparing.approximate(bert, "monte_carlo")
    hook.remove()
    attention.value.forward = lambda x: 2 * x
    with pytest.raises(sparing.Unsupported, match=r"layer\.0.*has no plain one of its own"):
        sparing.approximate(bert, "monte_carlo")
    del attention.value.forward
    with sparing.approximate(bert, "monte_carlo"):
        attention.value = nn.Sequential(attention.value)
        with pytest.raises(sparing.Unsupported, match=r"layer\.0\.attention\.self\.value is another layer"):
            run(bert, inputs("bert"))


def test_causality_is_seen_where_the_module_does_not_tell():
    """The attention of CLIP's text model is causal by its mask alone; that of its image model is not."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}
    text = transformers.CLIPTextModel(transformers.CLIPTextConfig(vocab_size=100, **sizes))
    with pytest.raises(sparing.Unsupported, match="it is causal, and nystrom is not"):
        sparing.approximate(text, "nystrom")
    image = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(image_size=32, patch_size=8, **sizes))
    sparing.approximate(image, "nystrom").restore()


def test_nothing_to_do(bert):
    with pytest.raises(ValueError, match="what: an empty mapping names no layer"):
        sparing.approximate(bert, {})
    with sparing.approximate(bert, sparing.Recipe({})) as handle:
        assert "0 of 2 attention layers approximated" in repr(handle)
    assert "restored" in repr(handle)


def test_a_model_is_not_kept_alive():
    model = build("bert")
    alive = weakref.ref(model)
    sparing.approximate(model, "window(size=4)")
    run(model, inputs("bert"))
    del model
    gc.collect()
    assert alive() is None


def test_values_in_another_order_are_found_out(bert):
    """A module that splits its values into heads in a way of its own must not get those of another head."""
    attention = bert.encoder.layer[0].attention.self

    class Interleaved(type(attention)):
        def forward(self, hidden_states, attention_mask=None, **others):
            q, k = (part(hidden_states).unflatten(-1, (4, 16)).transpose(1, 2) for part in (self.query, self.key))
            v = self.value(hidden_states).unflatten(-1, (16, 4)).permute(0, 3, 1, 2)
            out, _ = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation](self, q, k, v, attention_mask)
            return out.flatten(2), None

    attention.__class__ = Interleaved
    with (
        sparing.approximate(bert, "monte_carlo"),
        pytest.raises(sparing.Unsupported, match=r"layer\.0.*splits its values into heads in a way of its own"),
    ):
        run(bert, inputs("bert"))
    with sparing.approximate(bert, "window(size=4)"):
        run(bert, inputs("bert"))
