"""Every kind of cache that people generate with: the same tokens at full budget, the same bits whatever holds them."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM, StaticCache

import sparing
from sparing.transformers.cache import IndexedStaticLayer
from tests.support.allocations import all_elements
from tests.support.decoding import (
    COVERING,
    DTYPES,
    NEW,
    SMALL,
    crop,
    feed,
    generate,
    indices,
    new_cache,
    prompt,
)
from tests.support.kernel_checks import needs_kernels
from tests.support.model_zoo import build, tokens

KINDS = ["dynamic", "static"]
MODELS = {"llama": 2, "gpt2": 2, "gemma3": 1}  # and how many layers an index follows
SMALL_BUDGETS = [SMALL, "window(size=6, sinks=1)"]
QUESTIONS = tokens(27).unflatten(1, (3, 9)).unbind(1)


def counts(handle):
    return {(layer.steps, layer.covered, layer.exact_calls) for layer in handle.statistics(reset=True).layers}


def follow(model, given, kind):
    """The logits of a prompt, a chunk of several tokens and single tokens; a static cache is longer than they need."""
    ids, mask = given["input_ids"], given["attention_mask"]
    cache, logits = new_cache(model, kind), []
    for a, b in [(0, 50), (50, 58), *((i, i + 1) for i in range(58, 80))]:
        options = {} if mask.all() else {"attention_mask": mask[:, :b]}
        logits.append(feed(model, ids[:, a:b], cache, **options))
    return torch.cat(logits, 1)[mask.bool()], cache


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_a_budget_of_everything_gives_the_bits_of_the_exact_model(name, kind, padded, dtype):
    """In 16 bits too: a layer whose budget covers all keys runs the model's own attention on what the model passed."""
    model, given = build(name).to(dtype), prompt(80, padded=padded)
    wanted, _ = follow(model, given, kind)
    for spec in COVERING[:2]:
        with sparing.approximate(model, spec, when="decode") as handle:
            assert torch.equal(follow(model, given, kind)[0], wanted)
            assert counts(handle) == {(0, 23, 1)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_a_budget_of_everything_generates_the_same_tokens(name, kind, padded, dtype):
    """Also of prompts in chunks. In 16 bits they may be other tokens than of the whole prompt, with or without sparing."""
    model, given = build(name).to(dtype), prompt(padded=padded)
    for chunks, calls in (({}, {(0, NEW - 1, 1)}), ({"prefill_chunk_size": 9}, {(0, NEW + 3, 1)})):
        options = {"cache_implementation": None if kind == "dynamic" else kind, **chunks}
        wanted = generate(model, given, **options)
        with sparing.approximate(model, COVERING[0], when="decode") as handle:
            assert torch.equal(generate(model, given, **options), wanted)
            assert len(handle.statistics().layers) == MODELS[name]
            assert counts(handle) == calls
        assert torch.equal(generate(model, given, **options), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("when", ["always", "decode"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("spec", SMALL_BUDGETS)
@pytest.mark.parametrize("name", MODELS)
def test_static_and_dynamic_caches_give_the_same_logits(name, spec, padded, when, dtype):
    model, given = build(name).to(dtype), prompt(80, padded=padded)
    found = {}
    for kind in KINDS:
        with sparing.approximate(model, spec, when=when) as handle:
            found[kind], cache = follow(model, given, kind)
            assert counts(handle) == {(23, 0, 0) if when == "always" else (22, 0, 2)}
            assert sum(index is not None and index.length == 80 for index in indices(cache)) == MODELS[name]
    torch.testing.assert_close(found["static"], found["dynamic"], rtol=0, atol=1e-5)


def test_a_static_cache_is_read_where_it_is():
    """The index gets views of the cache's own memory, cut to the filled positions."""
    model, ids = build("llama"), tokens(60)
    cache = new_cache(model, "static")
    with sparing.approximate(model, SMALL, when="decode"):
        feed(model, ids[:, :50], cache)
        held = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]
        seen, advance = [], sparing.Index.advance

        def watched(self, query, key, value, keep):
            seen.append((key.data_ptr(), value.data_ptr(), key.shape[2], keep))
            return advance(self, query, key, value, keep)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sparing.Index, "advance", watched)
            feed(model, ids[:, 50:51], cache)
    assert seen == [(*pointers, 51, None) for pointers in held]
    assert all(type(layer) is IndexedStaticLayer for layer in cache.layers)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_copies_no_16_bit_cache(kind, dtype):
    """All tensors that a token makes, in the whole model, are smaller together than a quarter of one layer's keys."""
    model, ids = build("llama").to(dtype), tokens(2002, 1)

    def made():
        cache = new_cache(model, kind, 2040)
        feed(model, ids[:, :2000], cache)
        feed(model, ids[:, 2000:2001], cache)
        return all_elements(lambda: feed(model, ids[:, 2001:], cache)) / (2000 * 2 * 16)

    assert made() > 4, "the control: transformers copies keys and values of both layers"
    for spec in ("multipole", "window(size=256, sinks=4)"):
        with sparing.approximate(model, spec, when="decode") as handle:
            assert made() < 0.25
            assert counts(handle) == {(2, 0, 1)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", [*SMALL_BUDGETS, COVERING[0]])
def test_a_cache_that_was_reset_serves_a_second_prompt(spec, kind):
    model = build("llama")
    first, second = tokens(60), tokens(60).flip(1)

    def run(cache, ids):
        logits = [feed(model, ids[:, :40], cache), *(feed(model, ids[:, i : i + 1], cache) for i in range(40, 60))]
        return torch.cat(logits, 1)

    with sparing.approximate(model, spec) as handle:
        cache = new_cache(model, kind)
        run(cache, first)
        cache.reset()
        assert indices(cache) == [None, None]
        found = run(cache, second)
        assert all(index.length == 60 for index in indices(cache))
        assert torch.equal(found, run(new_cache(model, kind), second))
        assert handle.statistics().total.exact_calls == 0


def test_a_static_cache_whose_length_was_set_back_serves_a_second_prompt():
    """Without reset(): the length alone says that the cache is empty."""
    model = build("llama")
    with sparing.approximate(model, SMALL):
        cache = new_cache(model, "static")
        feed(model, tokens(50), cache)
        for layer in cache.layers:
            layer.cumulative_length.zero_()
        other = tokens(31).flip(1)
        found = [feed(model, other[:, :30], cache), feed(model, other[:, 30:], cache)]
        fresh = new_cache(model, "static")
        wanted = [feed(model, other[:, :30], fresh), feed(model, other[:, 30:], fresh)]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("length", [53, 51, 30])
def test_a_static_cache_can_be_cropped(length):
    model, ids = build("llama").double(), tokens(80)
    found = {}
    for kind in KINDS:
        with sparing.approximate(model, SMALL) as handle:
            cache = new_cache(model, kind)
            feed(model, ids[:, :50], cache)
            for i in range(50, 54):
                feed(model, ids[:, i : i + 1], cache)
            crop(cache, length)
            found[kind] = torch.cat([feed(model, ids[:, i : i + 1], cache) for i in range(length, 60)], 1)
            assert handle.statistics().total.exact_calls == 0
    torch.testing.assert_close(found["static"], found["dynamic"], rtol=0, atol=1e-9)
    with pytest.raises(ValueError, match=r"tokens_to_remove=-61 must be from -60 to 0"):
        cache.layers[0].crop(-61)


def test_beams_reorder_a_static_cache():
    model, given = build("llama"), prompt()
    options = {"num_beams": 3, "cache_implementation": "static"}
    wanted = generate(model, given, **options)
    with sparing.approximate(model, COVERING[0], when="decode") as handle:
        assert torch.equal(generate(model, given, **options), wanted)
        assert counts(handle) == {(0, NEW - 1, 1)}
    with sparing.approximate(model, SMALL, when="decode") as handle:
        grown = generate(model, given, num_beams=3)
        assert torch.equal(generate(model, given, **options), grown)
        assert handle.statistics().total.steps == 2 * 2 * (NEW - 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_a_conversation_continues_the_cache_that_generate_returned(name, kind, dtype):
    model, given, more = build(name).to(dtype), prompt(padded=False), tokens(12).flip(1)

    def talk():
        cache, text = new_cache(model, kind, 150), given["input_ids"]
        for _ in range(3):
            said = generate(model, {"input_ids": text}, past_key_values=cache, return_dict_in_generate=True)
            cache, text = said.past_key_values, torch.cat([said.sequences, more], 1)
        return text

    wanted = talk()
    with sparing.approximate(model, COVERING[0], when="decode") as handle:
        assert torch.equal(talk(), wanted)
        assert {layer.exact_calls for layer in handle.statistics().layers} == {1}, "the first prompt"
    with sparing.approximate(model, SMALL) as handle:
        talk()
        assert {layer.exact_calls for layer in handle.statistics().layers} == {0}
        assert {layer.steps for layer in handle.statistics().layers} == {3 * (NEW - 1) + 2}


def answer(model, cache, question):
    """The logits of a question in one chunk and single tokens."""
    parts = [(0, 6), (6, 7), (7, 8), (8, 9)]
    return torch.cat([feed(model, question[:, a:b], cache) for a, b in parts], 1)


def answers(model, kind):
    """The logits of several questions, each to a copy of the prompt's cache."""
    shared = new_cache(model, kind)
    feed(model, tokens(50), shared)
    found = [answer(model, copy.deepcopy(shared), question) for question in QUESTIONS]
    assert shared.get_seq_length() == 50
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("spec", SMALL_BUDGETS)
def test_copies_of_a_prompt_answer_several_questions(spec, inference, kind):
    model = build("llama")
    with torch.inference_mode(inference), sparing.approximate(model, spec) as handle:
        found = answers(model, kind)
        for question, logits in zip(QUESTIONS, found, strict=True):
            own = new_cache(model, kind)
            feed(model, tokens(50), own)
            assert torch.equal(answer(model, own, question), logits)
        assert handle.statistics().total.exact_calls == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inference", [False, True])
def test_copies_of_a_prompt_give_the_bits_of_the_exact_model_at_full_budget(inference, kind, dtype):
    model = build("gemma3").to(dtype)
    with torch.inference_mode(inference):
        wanted = answers(model, kind)
        with sparing.approximate(model, COVERING[0], when="decode") as handle:
            found = answers(model, kind)
            assert counts(handle) == {(0, 3 * 4, 1)}
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_layers_that_are_not_approximated_share_a_static_cache():
    model, ids = build("llama"), tokens(60)
    plain, mixed = (StaticCache(config=model.config, max_cache_len=70) for _ in range(2))
    wanted = [feed(model, ids[:, a:b], plain) for a, b in ((0, 50), (50, 55), (55, 56))]
    with sparing.approximate(model, "window(size=1000)", layers=[1]):
        found = [feed(model, ids[:, a:b], mixed) for a, b in ((0, 50), (50, 55), (55, 56))]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    torch.testing.assert_close(feed(model, ids[:, 56:57], mixed), feed(model, ids[:, 56:57], plain), rtol=0, atol=1e-5)


def test_a_cache_of_an_approximated_model_serves_the_restored_one():
    model, ids = build("gemma3"), tokens(60)
    for kind in KINDS:
        cache, plain = new_cache(model, kind), DynamicCache(config=model.config)
        with sparing.approximate(model, SMALL, when="decode"):
            feed(model, ids[:, :50], cache)
        feed(model, ids[:, :50], plain)
        wanted = feed(model, ids[:, 50:51], plain)
        torch.testing.assert_close(feed(model, ids[:, 50:51], cache), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", [*SMALL_BUDGETS, "top_keys(keys=3)"])
def test_a_cache_that_was_filled_before_gets_an_index_from_its_keys(spec, kind, padded):
    """As if the method had seen the exact prompt."""
    model, given = build("llama"), prompt(60, padded=padded)
    ids, mask = given["input_ids"], given["attention_mask"]

    def run(cache, a, b):
        options = {"attention_mask": mask[:, :b]} if padded else {}
        return feed(model, ids[:, a:b], cache, **options)

    late, early = new_cache(model, kind), new_cache(model, kind)
    run(late, 0, 40)
    with sparing.approximate(model, spec, when="decode"):
        run(early, 0, 40)
        wanted = torch.cat([run(early, 40, 45), *(run(early, i, i + 1) for i in range(45, 60))], 1)
    with sparing.approximate(model, spec, when="decode") as handle:
        found = torch.cat([run(late, 40, 45), *(run(late, i, i + 1) for i in range(45, 60))], 1)
        assert counts(handle) == {(15, 0, 1)}
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_a_cache_that_was_filled_before_gives_the_bits_of_the_exact_model_at_full_budget(name, kind, dtype):
    model = build(name).to(dtype)
    plain = new_cache(model, kind)
    feed(model, tokens(50), plain)
    cache = copy.deepcopy(plain)
    wanted = answer(model, plain, QUESTIONS[0])
    with sparing.approximate(model, COVERING[0], when="decode") as handle:
        assert torch.equal(answer(model, cache, QUESTIONS[0]), wanted)
        assert counts(handle) == {(0, 4, 0)}
        assert sum(index is not None and index.length == 59 for index in indices(cache)) == MODELS[name]


def test_an_index_catches_up_with_tokens_of_the_restored_model():
    model, ids, spec = build("llama"), tokens(60), "window(size=6, sinks=1)"
    cache = new_cache(model, "dynamic")
    with sparing.approximate(model, spec, when="decode"):
        feed(model, ids[:, :40], cache)
    feed(model, ids[:, 40:50], cache)
    with sparing.approximate(model, spec, when="decode") as handle:
        feed(model, ids[:, 50:51], cache)
        assert counts(handle) == {(1, 0, 0)}
        assert [index.length for index in indices(cache)] == [51, 51]


@pytest.mark.parametrize("spec", SMALL_BUDGETS)
def test_a_model_loaded_by_name_decodes_from_a_static_cache(tmp_path, spec):
    """Its first prompt ran before sparing knew the cache."""
    model = build("llama")
    with sparing.approximate(model, spec, when="decode"):
        wanted = generate(model, cache_implementation="static")
        model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="sparing").eval()
    for _ in range(2):
        assert torch.equal(generate(loaded, cache_implementation="static"), wanted)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_cache_of_a_model_with_other_layers_is_refused_and_unchanged(layers):
    model, ids = build("llama"), tokens(30)
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers
    cache = new_cache(SimpleNamespace(config=config), "dynamic")
    for number in range(layers):
        cache.update(torch.randn(1, 2, 20, 16), torch.randn(1, 2, 20, 16), number)
    message = rf"past_key_values: the cache has {layers} layers, and the model 2: it belongs to another model"
    with sparing.approximate(model, SMALL), pytest.raises(ValueError, match=message):
        feed(model, ids[:, :1], cache)
    assert cache.get_seq_length() == 20
