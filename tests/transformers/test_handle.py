"""Swapping in and out: per layer, nested, repeated, after errors; and what is refused before anything changes."""

import copy
import gc
import pickle
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

import sparing
from sparing.transformers.runtime.projection import UnprojectedLinear
from sparing.transformers.state import state_of
from sparing.transformers.watch import record_calls
from tests.support.model_zoo import CONFIGS, build, inputs, run, state, tokens

LAYER = "encoder.layer.{}.attention.self"


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

    def fails(self, layer, state):
        if "1" in state.name:
            raise MemoryError("half-way")
        original(self, layer, state)

    original = UnprojectedLinear.__init__
    monkeypatch.setattr(UnprojectedLinear, "__init__", fails)
    with pytest.raises(MemoryError, match="half-way"):
        sparing.approximate(bert, "monte_carlo")
    assert state(bert) == before


def test_layers_run_methods_of_their_own(bert):
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
    assert state_of(bert.encoder.layer[0].attention.self) is None


def test_an_implementation_that_the_user_sets_is_respected(bert):
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
        assert "prompts and tokens that continue a cache (decoding) run as above" in repr(handle)
    with sparing.approximate(build("llama"), "window(size=4)", when="decode") as handle:
        assert "prompts run exact attention; tokens that continue a cache (decoding) run as above" in repr(handle)
    with sparing.approximate(build("llama"), "lsh") as handle:  # cannot continue a cache
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


def test_two_threads_on_one_model_get_their_own_values(bert):
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


def test_a_call_that_fails_keeps_no_input_of_the_value_layer(bert):
    with sparing.approximate(bert, "monte_carlo(alpha=1.0)"):
        run(bert, inputs("bert"))
        layer, x = bert.encoder.layer[0].attention.self, torch.randn(1, 8, 64)
        alive = weakref.ref(x)
        with torch.no_grad(), pytest.raises(sparing.Unsupported, match="the model passes s_aux"):
            layer(x, s_aux=torch.ones(1))
        values = layer.value(x)
        assert values.isnan().all()
        del x, values
        gc.collect()  # of the exception's frames
        assert alive() is None


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


def test_an_empty_mapping_is_refused_and_an_empty_recipe_is_not(bert):
    with pytest.raises(ValueError, match="what: an empty mapping names no layer"):
        sparing.approximate(bert, {})
    with sparing.approximate(bert, sparing.Recipe({})) as handle:
        assert "0 of 2 attention layers approximated" in repr(handle)
    assert "restored" in repr(handle)


def test_a_mapping_leaves_the_layers_of_none_alone_as_a_recipe_does(bert):
    with sparing.approximate(bert, {0: None, 1: "window(size=4)"}) as handle:
        assert list(handle.layers.values()) == ["exact", "window(size=4)"]
        layers = dict(handle.recipe.layers)
    assert list(layers.values()) == [None, "window(size=4)"]
    with sparing.approximate(bert, layers) as handle:
        assert dict(handle.recipe.layers) == layers


def test_a_model_is_not_kept_alive():
    model = build("bert")
    alive = weakref.ref(model)
    sparing.approximate(model, "window(size=4)")
    run(model, inputs("bert"))
    del model
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("spec", ["nystrom(landmarks=4)", "monte_carlo(alpha=1.0)"])
def test_a_model_is_restored_without_its_handles(bert, spec):
    before, given = state(bert), inputs("bert")
    out = run(bert, given)
    outer = sparing.approximate(bert, spec)
    sparing.approximate(bert, "window(size=2)", layers=0)  # its handle is lost
    gc.collect()
    twin = copy.deepcopy(bert)
    approximated = run(bert, given)
    sparing.restore(twin)
    assert torch.equal(run(twin, given), out)
    assert torch.equal(run(bert, given), approximated), "a copy is restored alone"
    sparing.restore(bert)
    assert state(bert) == before
    assert torch.equal(run(bert, given), out)
    assert not outer.active
    outer.restore()
    sparing.restore(bert)
    assert state(bert) == before
    with sparing.approximate(bert, spec) as handle:
        assert handle.active
        assert not outer.active
        assert not torch.equal(run(bert, given), out)
    assert torch.equal(run(bert, given), out)


def test_no_hook_stays_in_a_restored_decoder():
    model = build("gpt2")
    before = state(model)
    sparing.approximate(model, "multipole", when="decode")
    sparing.restore(model)
    assert state(model) == before
    assert not any(each._forward_pre_hooks or each._forward_hooks for each in model.modules())


def test_a_restored_handle_shows_nothing_of_another(bert):
    first = sparing.approximate(bert, "window(size=2)")
    with sparing.approximate(bert, "nystrom(landmarks=4)", layers=0):
        first.restore()
        assert (
            repr(first) == "<sparing on BertModel: restored (1 of 2 attention layers approximated by another handle)>"
        )
    assert repr(first) == "<sparing on BertModel: restored>"


def test_an_oracle_says_that_it_is_a_yardstick(bert):
    with pytest.warns(UserWarning, match=r"top_keys\(keys=4\) is an oracle, a yardstick: .* slower") as told:
        sparing.approximate(bert, "top_keys(keys=4)").restore()
    assert len(told) == 1
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record_calls(bert, "top_keys(keys=4)", lambda: run(bert, inputs("bert")))
