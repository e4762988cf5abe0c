"""Decoding that stays exact says why, once, and where it is seen; what no cache can do is an error that names it."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import QuantizedLayer

import sparing
from sparing.transformers import reasons
from sparing.transformers.cache import indexed_layer
from tests.support.decoding import DTYPES, NEW, SMALL, feed, generate, indices, new_cache, prompt
from tests.support.model_zoo import build, tokens

QUANTISED = "the cache is quantised"


class Rounded(QuantizedLayer):
    """A quantised layer without a package that quantises."""

    def _quantize(self, tensor, axis):
        return tensor

    def _dequantize(self, tensor):
        return tensor


def quantised(model):
    cache = DynamicCache(config=model.config)
    cache.layers = [Rounded() for _ in cache.layers]
    return cache


def test_a_reason_is_warned_of_once_per_handle_and_shown_for_every_layer():
    model, ids = build("llama"), tokens(60)
    plain = DynamicCache(config=model.config)
    wanted = [feed(model, ids[:, :50], plain), *(feed(model, ids[:, i : i + 1], plain) for i in range(50, 53))]
    for _ in range(2):
        cache = quantised(model)
        with sparing.approximate(model, SMALL, when="decode") as handle:
            found = [feed(model, ids[:, :50], cache)]
            assert QUANTISED not in repr(handle), "a prompt alone says nothing"
            with pytest.warns(UserWarning, match=QUANTISED) as told:
                found += [feed(model, ids[:, i : i + 1], cache) for i in range(50, 53)]
            assert len(told) == 1
            assert str(told[0].message) == (
                f"model.layers.0.self_attn: tokens that continue a cache run exact attention although "
                f"{sparing.method(SMALL)} was asked for: the cache is quantised; use the default cache or "
                'cache_implementation="static"'
            )
            statistics = handle.statistics()
            assert [layer.exact_reasons for layer in (*statistics.layers, statistics.total)] == [
                {QUANTISED: 3}, {QUANTISED: 3}, {QUANTISED: 6},
            ]  # fmt: skip
            lines = str(statistics).splitlines()
            assert lines[0].endswith("exact because")
            assert [line.endswith(f"  {QUANTISED} ({n})") for n, line in zip((3, 3, 6), lines[1:], strict=True)] == [
                True
            ] * 3
            assert f"tokens that continued a cache ran exact attention: {QUANTISED}" in repr(handle)
            assert handle.statistics(reset=True).layers[0].exact_reasons
            assert handle.statistics().layers[0].exact_reasons == {}
            feed(model, ids[:, 53:54], cache)  # another token does not warn again
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", ["fp8", "quanto", "hqq"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_real_quantised_caches_generate_the_same_tokens_and_say_why(backend, dtype):
    model, given = build("llama").to(dtype), prompt(padded=False)
    options = {} if backend == "fp8" else {"q_group_size": 16, "residual_length": 16}
    if backend == "hqq":
        options |= {"axis_key": 1, "axis_value": 1}

    def run():
        return generate(model, given, past_key_values=transformers.QuantizedCache(backend, model.config, **options))

    if backend == "fp8" and not hasattr(transformers.cache_utils, "Fp8QuantizedLayer"):
        pytest.skip("this version of transformers has no such backend")
    try:
        wanted = run()
    except ImportError as error:
        pytest.skip(f"the backend is not installed: {error}")
    with sparing.approximate(model, SMALL, when="decode") as handle:
        with pytest.warns(UserWarning, match=QUANTISED) as told:
            assert torch.equal(run(), wanted)
        assert len(told) == 1
        assert [layer.exact_reasons for layer in handle.statistics().layers] == [{QUANTISED: NEW - 1}] * 2


def test_prompts_alone_and_exact_layers_say_nothing():
    model = build("llama")
    with sparing.approximate(model, SMALL, when="prefill") as handle:
        generate(model)
        assert handle.statistics().total.exact_reasons == {}
        assert handle.statistics().total.exact_calls > 0
    with sparing.approximate(model, "exact"):
        generate(model)
    with sparing.approximate(model, "value_aware(keys=4)", when="prefill"):
        generate(model)


def test_a_model_loaded_by_name_warns_once(tmp_path):
    model = build("llama")
    with sparing.approximate(model, "value_aware(keys=4)"):
        model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="sparing").eval()
    with pytest.warns(UserWarning, match="value_aware cannot continue a cache") as told:
        generate(loaded)
    assert len(told) == 1
    generate(loaded)


def test_offloaded_and_unknown_caches_have_their_reasons():
    model = build("llama")
    cache = DynamicCache(config=model.config)
    cache.offloading = True
    assert indexed_layer(cache, 0) is reasons.OFFLOADED
    assert indexed_layer(quantised(model), 1) is reasons.QUANTISED
    assert indexed_layer(DynamicCache(config=model.config), 7) is reasons.UNSEEN_CACHE
    sliding = DynamicCache(config=build("gemma3").config)
    assert indexed_layer(sliding, 0).text == "the cache has layers of DynamicSlidingWindowLayer"


def test_a_reason_goes_with_its_cache():
    model, ids = build("llama"), tokens(60)
    with sparing.approximate(model, SMALL, when="decode") as handle:
        bad, good = quantised(model), new_cache(model, "dynamic")
        for cache in (bad, good):
            feed(model, ids[:, :50], cache)
        with pytest.warns(UserWarning, match=QUANTISED):
            feed(model, ids[:, 50:51], bad)
        feed(model, ids[:, 50:51], good)
        layer = handle.statistics().layers[0]
    assert (layer.steps, layer.exact_calls, layer.exact_reasons) == (1, 3, {QUANTISED: 1})


def test_sliding_layers_of_a_mixed_model_say_nothing():
    model = build("gemma3")
    with sparing.approximate(model, SMALL) as handle, warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(model)
        generate(model, cache_implementation="static")
        assert "it attends within a window of 8 tokens already" in repr(handle)
        assert handle.statistics().total.exact_calls == 0


def test_a_paged_cache_is_refused_by_name():
    model = build("llama")
    layer, hidden = model.model.layers[0].self_attn, torch.randn(1, 8, 64)
    positions = model.model.rotary_emb(hidden, torch.arange(8)[None])
    for spec in (SMALL, "exact"):
        with (
            sparing.approximate(model, spec),
            pytest.raises(sparing.Unsupported, match=r"layers\.0.*continuous batching passes a paged cache \(cache=\)"),
        ):
            layer(hidden, position_embeddings=positions, attention_mask=None, cache=object())


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_caches_that_do_not_continue_are_refused_and_do_not_change(kind):
    model, ids = build("llama"), tokens(60)
    others = {
        "keys of a batch of 2, and the model brings a batch of 1": (model, ids[:1, 50:51]),
        "keys of 2 heads of size 16, and the model brings 4 heads of size 16: the cache belongs to another model": (
            build("llama", num_key_value_heads=4), ids[:, 50:51],
        ),
        "keys of 2 heads of size 16, and the model brings 2 heads of size 8: the cache belongs to another model": (
            build("llama", head_dim=8), ids[:, 50:51],
        ),
        "keys of torch.float32, and the model brings torch.float64": (build("llama").double(), ids[:, 50:51]),
        "keys of torch.float32, and the model brings torch.bfloat16": (build("llama").bfloat16(), ids[:, 50:51]),
    }  # fmt: skip
    with sparing.approximate(model, SMALL):
        cache, twin = new_cache(model, kind), new_cache(model, kind)
        for each in (cache, twin):
            feed(model, ids[:, :50], each)
        for message, (other, new) in others.items():
            with sparing.approximate(other, SMALL), pytest.raises(ValueError, match=f"cache: layer 0 holds {message}"):
                feed(other, new, cache)
            assert cache.get_seq_length() == 50
            assert [index.length for index in indices(cache)] == [50, 50]
        assert torch.equal(feed(model, ids[:, 50:51], cache), feed(model, ids[:, 50:51], twin))


def test_a_static_cache_that_is_full_is_refused_and_does_not_change():
    model, ids = build("llama"), tokens(60)
    cache = StaticCache(config=model.config, max_cache_len=52)
    with sparing.approximate(model, SMALL):
        feed(model, ids[:, :50], cache)
        with pytest.raises(
            ValueError, match=r"50 of the 52 positions of layer 0 are filled.*brings 3 more; make a Static"
        ):
            feed(model, ids[:, 50:53], cache)
        assert cache.get_seq_length() == 50
        feed(model, ids[:, 50:52], cache)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_tokens_beyond_the_positions_of_the_model_are_refused(kind):
    model, ids = build("llama", max_position_embeddings=52), tokens(60)
    cache = new_cache(model, kind)
    with sparing.approximate(model, SMALL):
        feed(model, ids[:, :50], cache)
        with pytest.raises(
            ValueError, match=r"layers\.0\.self_attn: 53 tokens, but the model has 52 positions; shorten"
        ):
            feed(model, ids[:, 50:53], cache)
        assert cache.get_seq_length() == 50
        feed(model, ids[:, 50:52], cache)
        with pytest.raises(ValueError, match="60 tokens, but the model has 52 positions"):
            feed(model, ids, new_cache(model, kind))


def test_prompts_without_an_index_are_not_warned_of():
    """Most callers of a model make a cache that they never continue."""
    model = build("llama").bfloat16()
    with sparing.approximate(model, SMALL), torch.no_grad():
        model(**prompt())


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_tokens_beyond_learned_positions_are_refused(kind):
    model, ids = build("gpt2", n_positions=52), tokens(60)
    with sparing.approximate(model, SMALL):
        cache = new_cache(model, kind)
        feed(model, ids[:, :50], cache)
        told = r"transformer\.wpe: position 52, but the model has 52 learned positions; shorten the text, or call sparing\.ext"
        with pytest.raises(ValueError, match=told):
            feed(model, ids[:, 50:53], cache)
        assert cache.get_seq_length() == 50
        feed(model, ids[:, 50:52], cache)
    with pytest.raises(IndexError):
        feed(model, ids, new_cache(model, kind))
