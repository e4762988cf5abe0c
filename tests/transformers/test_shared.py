"""Configs that are shared, parts of models, copies, names that came with a model: nothing leaks from one to another."""

import copy
import gc
import pickle

import pytest
import torch
import transformers

import sparing
from tests.support.model_zoo import SMALL, TOKENS, build, inputs, run, state, tokens

WINDOW = "window(size=4)"


def composite():
    parts = [transformers.BertConfig(**TOKENS, **SMALL), transformers.BertConfig(**TOKENS, **SMALL, is_decoder=True)]
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    return transformers.EncoderDecoderModel(config).eval()


@pytest.mark.parametrize("before", [None, sparing.Recipe({"*": "nystrom(landmarks=2)"}).to_dict()])
def test_a_composite_config_gets_its_recipe_back(before):
    model = composite()
    if before is not None:
        model.config.sparing = before
    was = model.config.to_dict()
    with sparing.approximate(model, WINDOW, layers="encoder.*"):
        assert model.config.sparing["layers"]["encoder.encoder.layer.0.attention.self"] == WINDOW
    assert model.config.to_dict() == was


@pytest.mark.parametrize("part", ["encoder", "encoder.layer.0"])
@pytest.mark.parametrize(("whole_spec", "part_spec"), [("exact", WINDOW), (WINDOW, "exact")])
def test_whole_and_part_are_restored_in_any_order(bert, part, whole_spec, part_spec):
    given, before = inputs("bert"), state(bert)
    exact = run(bert, given)
    for first in (0, 1):
        handles = [sparing.approximate(bert, whole_spec), sparing.approximate(bert.get_submodule(part), part_spec)]
        run(bert, given)
        handles[first].restore()
        run(bert, given)
        handles[1 - first].restore()
        assert torch.equal(run(bert, given), exact)
        assert state(bert) == before


def by_name(name, spec=WINDOW):
    model = build(name)
    sparing.transformers.register()
    model.config.sparing = sparing.Recipe({"*": spec}).to_dict()
    model.set_attn_implementation("sparing")
    return model


@pytest.mark.parametrize("name", ["bert", "vit", "llama"])
@pytest.mark.parametrize("warm", [False, True])
def test_settings_on_top_of_a_name_do_not_depend_on_history(name, warm):
    given, model = inputs(name), by_name(name)
    wanted = build(name)
    with sparing.approximate(wanted, {0: "exact", 1: WINDOW}):
        mixed = run(wanted, given)
    if warm:
        run(model, given)
    handle = sparing.approximate(model, "exact", layers=[0])
    assert torch.equal(run(model, given), mixed)
    handle.restore()
    with sparing.approximate(wanted, WINDOW):
        assert torch.equal(run(model, given), run(wanted, given))


def test_a_name_that_was_taken_back_leaves_nothing(bert):
    model, given = by_name("bert"), inputs("bert")
    run(model, given)
    model.set_attn_implementation("sdpa")
    with (
        sparing.approximate(model, "window(size=8)", layers=[0]) as handle,
        sparing.approximate(bert, "window(size=8)", layers=[0]),
    ):
        assert list(handle.layers.values()) == ["window(size=8)", "exact"]
        assert torch.equal(run(model, given), run(bert, given))


def test_a_twin_stays_exact_when_the_other_is_gone(bert):
    twin, given = type(bert)(bert.config).eval(), inputs("bert")
    exact = run(twin, given)
    other = type(bert)(bert.config).eval()
    sparing.approximate(other, WINDOW)
    del other
    gc.collect()
    assert torch.equal(run(twin, given), exact)


def test_copies_of_exact_siblings_are_exact(bert):
    twin, given = type(bert)(bert.config).eval(), inputs("bert")
    exact = run(twin, given)
    with sparing.approximate(bert, WINDOW):
        assert torch.equal(run(copy.deepcopy(twin), given), exact)
        both = copy.deepcopy(torch.nn.ModuleList([bert, twin]))
        assert torch.equal(run(both[1], given), exact)
        assert torch.equal(run(both[0], given), run(bert, given))
    bart, given = build("bart"), inputs("bart")
    with sparing.approximate(bart.encoder, WINDOW):
        out = run(bart, given)
        assert torch.equal(run(copy.deepcopy(bart), given), out)
        assert torch.equal(run(pickle.loads(pickle.dumps(bart)), given), out)


def test_an_implementation_that_the_user_set_in_between_is_given_back(bert):
    outer = sparing.approximate(bert, WINDOW)
    bert.set_attn_implementation("eager")
    sparing.approximate(bert, "window(size=8)").restore()
    assert bert.config._attn_implementation == "eager"
    outer.restore()
    assert bert.config._attn_implementation == "sdpa"


def test_parts_draw_from_streams_of_their_own(bert):
    first, second = (bert.encoder.layer[i] for i in (0, 1))
    second.load_state_dict(first.state_dict())
    x = torch.randn(1, 24, 64)
    spec = "random_features(features=8)"
    with sparing.approximate(first, spec), sparing.approximate(second, spec), torch.no_grad():
        assert not torch.allclose(first.attention.self(x)[0], second.attention.self(x)[0], atol=1e-3)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_the_first_step_may_be_checkpointed(name):
    """The value layer's first pass proves the order of heads; the pass that is run again must look the same."""
    model, grads = build(name, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0), []
    given = {"input_ids": tokens(), "use_cache": False} if name == "llama" else inputs(name)
    for checkpointing in (True, False):
        if checkpointing:
            model.gradient_checkpointing_enable()
        else:
            model.gradient_checkpointing_disable()
        with sparing.approximate(model, "monte_carlo(alpha=0.5)"):
            model.train().zero_grad()
            model(**given)[0].square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(grads[0]) == len(grads[1])
    for again, plain in zip(*grads):
        torch.testing.assert_close(again, plain, rtol=1e-4, atol=1e-5)
    weight = model.get_submodule(
        "encoder.layer.0.attention.self.value" if name == "bert" else "model.layers.0.self_attn.v_proj"
    ).weight
    assert bool(weight.grad.any())
