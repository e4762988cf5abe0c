"""`generate` with an index beside the cache."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaForCausalLM

import sparing
from tests.support.decoding import COVERING, MODELS, NEW, SMALL, feed, generate, new_cache, prompt, started
from tests.support.model_zoo import TOKENS, build, tokens

WAYS = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 10},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 3, "do_sample": True},
    "looked up": {"prompt_lookup_num_tokens": 3, "eos_token_id": 99, "one": True},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_a_budget_of_everything_generates_the_same_tokens(name, way):
    model, options = build(name), dict(WAYS[way])
    given = prompt(batch=1, padded=False) if options.pop("one", False) else prompt()
    wanted = generate(model, given, **options)
    for spec in COVERING if way == "greedy" else COVERING[:1]:
        for when in ("always", "decode"):
            with sparing.approximate(model, spec, when=when) as handle:
                assert torch.equal(generate(model, given, **options), wanted)
                for layer in handle.statistics().layers:
                    assert layer.steps == 0
                    assert layer.covered >= (NEW - 1 if way in ("greedy", "sampled") else 1)
    assert torch.equal(generate(model, given, **options), wanted)


def test_an_encoder_decoder_decodes_too():
    from tests.support.model_zoo import ENCODER_DECODER

    torch.manual_seed(0)
    config = transformers.BartConfig(**TOKENS, **ENCODER_DECODER, forced_eos_token_id=None)
    model = transformers.BartForConditionalGeneration(config).eval()
    wanted = generate(model)
    with sparing.approximate(model, "top_keys(keys=1000)", layers="model.decoder.layers.*.self_attn") as handle:
        assert torch.equal(generate(model), wanted)
        assert handle.statistics().layers[0].covered > 0
    with sparing.approximate(model, "window(size=2)", layers="model.decoder.layers.*.self_attn") as handle:
        generate(model)
        assert handle.statistics().layers[0].steps > 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("spec", [SMALL, "window(size=6, sinks=1)", "top_keys(keys=3)"])
def test_decoding_is_a_call_without_a_cache(name, spec):
    """C17 through a model: the logits of the tokens that continue a cache are those of the whole text, padding too."""
    model = build(name).double()
    ids = tokens(80)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with sparing.approximate(model, spec), torch.no_grad():
        wanted = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        cache, found = DynamicCache(config=model.config), []
        for a, b in [(0, 50), (50, 51), (51, 60), *((i, i + 1) for i in range(60, 80))]:
            options = {"attention_mask": mask[:, :b], "position_ids": positions[:, a:b]}
            found.append(feed(model, ids[:, a:b], cache, **options))
        torch.testing.assert_close(torch.cat(found, 1)[mask.bool()], wanted[mask.bool()], rtol=0, atol=1e-9)
    with torch.no_grad():
        exact = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert float((exact - wanted)[mask.bool()].abs().max()) > 1e-3, "the budget is small enough to be seen"


@pytest.mark.parametrize("name", MODELS)
def test_when_says_which_tokens_are_approximated(name):
    model, ids = build(name).double(), tokens(60)
    logits = {}
    for when in (None, "always", "prefill", "decode", "never"):
        cache = DynamicCache(config=model.config)
        if when == "never":
            logits[when] = [feed(model, ids[:, :50], cache), feed(model, ids[:, 50:51], cache)]
            continue
        with sparing.approximate(model, SMALL, when=when) as handle:
            logits[when] = [feed(model, ids[:, :50], cache), feed(model, ids[:, 50:51], cache)]
            layer = handle.statistics().layers[0]
        counts = {"prefill": (1, 0, 1), "decode": (0, 1, 1)}.get(when, (1, 1, 0))
        assert (layer.calls, layer.steps, layer.exact_calls) == counts
    assert all(torch.equal(a, b) for a, b in zip(logits[None], logits["always"]))
    torch.testing.assert_close(logits["decode"][0], logits["never"][0])
    assert torch.equal(logits["prefill"][0], logits["always"][0])
    for a, b, row in (("prefill", "never", 0), ("decode", "never", 1), ("prefill", "always", 1)):
        assert not torch.allclose(logits[a][row], logits[b][row], atol=1e-4), (a, b, row)
    with pytest.raises(ValueError, match=r"when='sometimes' is not one of 'always', 'prefill', 'decode'"):
        sparing.approximate(model, SMALL, when="sometimes")
    with pytest.raises(sparing.Unsupported, match=r"when='decode', but nystrom cannot continue a cache; use multi"):
        sparing.approximate(model, "nystrom", when="decode")
    with pytest.raises(sparing.Unsupported, match=r"when='decode', but the layer never continues a cache"):
        sparing.approximate(build("bert"), "window(size=4)", when="decode")


def test_recipes_and_configs_keep_when(tmp_path):
    model = build("llama")
    with sparing.approximate(model, SMALL, when="decode") as handle:
        wanted = generate(model)
        handle.recipe.save(tmp_path / "recipe.json")
        model.save_pretrained(tmp_path / "model")
    assert sparing.Recipe.load(tmp_path / "recipe.json").when == "decode"
    with sparing.approximate(model, tmp_path / "recipe.json") as handle:
        assert torch.equal(generate(model), wanted)
        assert handle.statistics().layers[0].calls == 0
    with sparing.approximate(model, tmp_path / "recipe.json", when="prefill") as handle:
        generate(model)
        assert handle.statistics().layers[0].steps == 0
    assert AutoConfig.from_pretrained(tmp_path / "model").sparing["when"] == "decode"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    with sparing.approximate(loaded):
        assert torch.equal(generate(loaded), wanted)
    with pytest.raises(ValueError, match=r"recipe: when='often' is not one of"):
        sparing.Recipe({"*": SMALL}, when="often")


@pytest.mark.parametrize("when", ["always", "decode"])
def test_by_name_the_first_generation_decodes_too(tmp_path, when):
    model = build("llama")
    with sparing.approximate(model, SMALL, when=when):
        wanted = generate(model)
        model.save_pretrained(tmp_path)
    assert not torch.equal(generate(model), wanted), "the budget is small enough to be seen"
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="sparing").eval()
    for _ in range(2):
        assert torch.equal(generate(loaded), wanted)


def test_a_generous_budget_is_close_and_a_small_one_is_not():
    model, ids = build("llama"), tokens(120, 1)
    errors = []
    for spec in (
        "exact",
        "multipole(tolerance=0.01, block=16)",
        "window(size=2)",
    ):
        cache = DynamicCache(config=model.config)
        with sparing.approximate(model, spec, when=None if spec == "exact" else "decode"):
            feed(model, ids[:, :100], cache)
            found = torch.cat([feed(model, ids[:, i : i + 1], cache) for i in range(100, 120)], 1)
        errors.append(found)
    exact, generous, small = errors
    assert float((generous - exact).norm() / exact.norm()) < 0.25 * float((small - exact).norm() / exact.norm())
    assert not torch.equal(generous, exact)


def test_layers_with_a_window_of_their_own_stay_exact():
    model = build("mistral")
    wanted = generate(model, prompt(padded=False))
    told = pytest.warns(UserWarning, match=r"layers\.0.*attends within a window by itself; leave it out of `layers`")
    with sparing.approximate(model, "top_keys(keys=1000)", layers=[0, 1]) as handle:
        with told:
            assert torch.equal(generate(model, prompt(padded=False)), wanted)
        assert handle.statistics().layers[0].steps == 0


@pytest.mark.parametrize("bits", [torch.bfloat16, torch.float16])
def test_sixteen_bits_stay_exact_where_a_method_cannot_read_them(bits):
    model = build("llama").to(bits)
    name = str(bits).removeprefix("torch.")
    with sparing.approximate(model, "top_keys(keys=4)", when="decode") as handle:
        with pytest.warns(UserWarning, match=f"the cache is {name}; use multipole or window, which read it, or load"):
            generate(model, max_new_tokens=3)
        assert (handle.statistics().layers[0].steps, handle.statistics().layers[0].exact_calls) == (0, 3)


def test_a_nested_call_starts_an_index_of_its_own():
    model = build("llama")
    with sparing.approximate(model, SMALL) as outer:
        cache, ids = started(model)
        with sparing.approximate(model, "window(size=4)", layers=0) as inner:
            feed(model, ids[:, 53:54], cache)
            assert (inner.statistics().layers[0].steps, inner.statistics().layers[0].exact_calls) == (1, 0)
            assert outer.statistics().layers[1].steps == 4
        feed(model, ids[:, 54:55], cache)
        assert outer.statistics().layers[0].exact_calls == 0, "its index is made again"
        assert outer.statistics().layers[1].steps == 5
        wanted = generate(model)
    with sparing.approximate(model, SMALL):
        assert torch.equal(generate(model), wanted)


@pytest.mark.parametrize("spec", [SMALL, "window(size=6)"])
def test_a_mask_that_changes_makes_the_index_again(spec):
    """What it holds would be hidden, or hold too little."""
    model, given = build("llama"), prompt()
    more = torch.cat([torch.ones(2, 40), torch.ones(2, 1)], dim=1).long()  # shows what was padding
    wanted, found = DynamicCache(), DynamicCache()
    with torch.no_grad():
        model(**given, past_key_values=wanted, use_cache=True)
    with sparing.approximate(model, spec, when="decode") as handle:
        with torch.no_grad():
            model(**given, past_key_values=found, use_cache=True)
        logits = feed(model, tokens(1, 2), found, attention_mask=more)
        statistics = handle.statistics().total
    assert statistics.steps == statistics.exact_calls == len(handle.layers)
    with sparing.approximate(model, spec):
        exact = feed(model, tokens(1, 2), wanted, attention_mask=more)
    torch.testing.assert_close(logits, exact, rtol=0, atol=1e-5)


def test_inference_mode_gives_the_same_bits():
    model = build("llama")
    with sparing.approximate(model, SMALL) as handle:
        wanted = generate(model)
        with torch.inference_mode():
            assert torch.equal(generate(model), wanted)
            cache, ids = started(model)
            found = feed(model, ids[:, 53:54], cache)
        outside, ids = started(model)
        assert torch.equal(feed(model, ids[:, 53:54], outside), found)
        torch.testing.assert_close(feed(model, ids[:, 54:55], cache), feed(model, ids[:, 54:55], outside))
        assert handle.statistics().layers[0].exact_calls == 0


def test_a_gradient_through_a_cache_is_exact():
    model, ids = build("llama"), tokens(30)
    cache, plain = DynamicCache(config=model.config), DynamicCache(config=model.config)

    def gradient(cache):
        model.zero_grad()
        model(ids[:, :20], past_key_values=cache, use_cache=True)
        model(ids[:, 20:], past_key_values=cache, use_cache=True).logits.square().mean().backward()
        return model.model.layers[0].self_attn.k_proj.weight.grad.clone()

    wanted = gradient(plain)
    told = pytest.warns(UserWarning, match=r"the call has a gradient; call the model under torch\.no_grad\(\)")
    with sparing.approximate(model, SMALL, when="decode") as handle, told:
        torch.testing.assert_close(gradient(cache), wanted, rtol=1e-4, atol=1e-6)
        assert handle.statistics().layers[0].steps == 0


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_compiled_models_decode_exactly_and_say_so(kind):
    """In one graph. It serves a second handle with the same method, which shows the reason but does not warn."""
    model, ids = build("llama"), tokens(40)

    def run(model):
        cache = new_cache(model, kind)
        return [feed(model, ids[:, :30], cache), *(feed(model, ids[:, i : i + 1], cache) for i in range(30, 33))]

    wanted, compiled = run(model), torch.compile(model, fullgraph=True, backend="eager")
    told = pytest.warns(UserWarning, match=r"layers\.0.*: the model is compiled; run it without torch\.compile")
    for first in (True, False):
        with sparing.approximate(model, SMALL, when="decode") as handle, told if first else nullcontext() as warned:
            for a, b in zip(run(compiled), wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
            assert not first or len(warned) == 1
            reasons = [layer.exact_reasons for layer in handle.statistics(reset=True).layers]
            assert reasons == [{"the model is compiled": 1}] * 2
            assert "ran exact attention" not in repr(handle), "the counts were reset"
            run(compiled)
            assert "tokens that continued a cache ran exact attention: the model is compiled" in repr(handle)
    torch._dynamo.reset()


def test_statistics_count_prompts_and_steps():
    model = build("llama")
    with sparing.approximate(model, SMALL) as handle:
        assert handle.statistics().layers[0].share_read is None
        generate(model, prompt(padded=False))
        for layer in (*handle.statistics().layers,):
            assert (layer.calls, layer.steps, layer.exact_calls, layer.covered) == (1, NEW - 1, 0, 0)
            assert 0.2 < layer.share_read < 0.9
        assert "share_read" not in repr(handle)
        assert "prompts and tokens that continue a cache (decoding) run as above" in repr(handle)
        assert "read" in str(handle.statistics()).splitlines()[0]
    with sparing.approximate(model, "top_keys(keys=45)") as handle:
        generate(model, prompt(padded=False))  # 40 tokens, then 41 to 59
        layer = handle.statistics().layers[0]
        assert (layer.calls, layer.steps, layer.covered) == (1, 14, 6)
        # Whether a budget holds all keys or not, what it reads counts: causal prompt of 40, 5 exact steps, 14 others.
        read = sum(range(1, 41)) + sum(range(41, 46)) + 14 * 45
        assert layer.keys_read == pytest.approx(read / 59)


def test_threads_share_a_tally():
    """More steps than are counted at once: none is lost, none is counted twice."""
    model = build("llama")
    ids = tokens(130)

    def decode(_):
        cache = DynamicCache(config=model.config)
        feed(model, ids[:, :30], cache)
        for i in range(30, 130):
            feed(model, ids[:, i : i + 1], cache)

    with sparing.approximate(model, SMALL, when="decode") as handle, ThreadPoolExecutor(4) as threads:
        list(threads.map(decode, range(8)))
        layer = handle.statistics().layers[0]
    batch, heads = ids.shape[0], 4
    assert layer.steps == 800
    assert layer.tally.queries == 800 * batch * heads
    assert layer.tally.shown == 8 * batch * heads * sum(range(31, 131))


def test_a_prompt_of_one_token_decodes_as_one_call():
    model, ids = build("llama").double(), tokens(40)
    with sparing.approximate(model, SMALL) as handle, torch.no_grad():
        cache = DynamicCache(config=model.config)
        found = torch.cat([feed(model, ids[:, i : i + 1], cache) for i in range(40)], 1)
        wanted = model(ids, use_cache=False).logits
        assert handle.statistics().layers[0].exact_calls == 0
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


def test_when_decode_needs_a_layer_that_decodes_by_the_cache():
    with pytest.raises(sparing.Unsupported, match="within a window of"):
        sparing.approximate(build("mistral"), SMALL, layers="*", when="decode")
    with pytest.raises(sparing.Unsupported, match="never continues a cache"):
        sparing.approximate(build("bert"), SMALL, when="decode")


def test_a_recipe_says_when_by_pattern():
    model = build("llama")
    recipe = sparing.Recipe({"layers.*": SMALL}, when={"layers.*": "decode"})
    with sparing.approximate(model, recipe) as handle:
        assert "prompts run exact attention" in repr(handle)


def test_statistics_of_covered_prompts_are_those_of_exact_attention():
    model = build("llama")
    with sparing.approximate(model, "top_keys(keys=1000)") as handle:
        feed(model, tokens(41, 2), DynamicCache())
        total = handle.statistics().total
    assert total.covered == len(handle.layers)
    assert total.keys_read == pytest.approx(21)
    assert total.share_read == pytest.approx(1)
    assert total.reduction == pytest.approx(1)
