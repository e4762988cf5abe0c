"""What happens to a cache, its index follows: or the tokens after it are exact, or an error."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from transformers import DynamicCache

import sparing
from sparing.transformers.cache import IndexedDynamicLayer, find_layer
from sparing.transformers.state import state_of
from tests.support.decoding import COVERING, NEW, SMALL, crop, feed, generate, indices, prompt, started
from tests.support.model_zoo import build, tokens


def test_crop_goes_on_with_fewer_tokens():
    """As if the removed ones had never been there, within a block and across several."""
    model = build("llama").double()
    with sparing.approximate(model, SMALL) as handle:
        for length in (49, 30, 7):
            cache, ids = started(model, 48)
            crop(cache, length)
            fresh = DynamicCache(config=model.config)
            feed(model, ids[:, :length], fresh)
            handle.statistics(reset=True)
            for i in range(length, 60):
                found, wanted = (feed(model, ids[:, i : i + 1], each) for each in (cache, fresh))
                torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)
            layer = handle.statistics().layers[0]
            assert (layer.steps + layer.covered, layer.exact_calls) == (2 * (60 - length), 0)


def test_beams_are_what_each_is_alone():
    model = build("llama").double()
    with sparing.approximate(model, SMALL):
        cache, _ = started(model)
        order, more = torch.tensor([1, 1]), tokens(9)
        cache.reorder_cache(order)
        together = torch.cat([feed(model, more[:, i : i + 1], cache) for i in range(9)], 1)
        for beam in range(2):
            cache, ids = started(model)
            cache.batch_select_indices(torch.tensor([1]))
            rows = more[beam : beam + 1]
            alone = torch.cat([feed(model, rows[:, i : i + 1], cache) for i in range(9)], 1)
            torch.testing.assert_close(together[beam : beam + 1], alone, rtol=0, atol=1e-9)
        cache, ids = started(model)
        cache.batch_repeat_interleave(2)
        repeated = feed(model, ids[:, 53:54].repeat_interleave(2, 0), cache)
        assert torch.equal(repeated[0], repeated[1])
        cache, ids = started(model)
        torch.testing.assert_close(repeated[::2], feed(model, ids[:, 53:54], cache), rtol=0, atol=1e-9)


EDITS = {
    "keys": lambda layer: layer.keys[..., 3, :].zero_(),
    "values": lambda layer: layer.values.mul_(1.0),
    "keys, whole": lambda layer: setattr(layer, "keys", layer.keys.clone()),
    "values, shorter": lambda layer: setattr(layer, "values", layer.values[..., :-1, :]),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_cache_edited_without_its_index_is_an_error(edit):
    model = build("llama")
    with sparing.approximate(model, SMALL):
        for use in (
            lambda cache, ids: feed(model, ids[:, 53:54], cache),
            lambda cache, ids: crop(cache, 51),
            lambda cache, ids: cache.reorder_cache(torch.tensor([1, 0])),
            lambda cache, ids: copy.deepcopy(cache),
        ):
            cache, ids = started(model)
            EDITS[edit](cache.layers[1])
            with pytest.raises(
                RuntimeError, match=rf"the {edit.split(',')[0]} of a layer were changed without its methods"
            ):
                use(cache, ids)


@pytest.mark.parametrize("spec", [SMALL, "window(size=6)"])
def test_an_edited_cache_goes_on_without_its_index(spec):
    """The message's own words: without its index a layer goes on, with a new one."""
    model = build("llama")
    with sparing.approximate(model, spec) as handle:
        cache, ids = started(model)
        cache.layers[0].keys.mul_(1.5)
        plain = DynamicCache(config=model.config)
        for layer, held in enumerate(cache.layers):
            plain.update(held.keys.clone(), held.values.clone(), layer)
        for layer in cache.layers:
            layer.index = None
        handle.statistics(reset=True)
        found = feed(model, ids[:, 53:54], cache)
        assert handle.statistics().layers[0].exact_calls == 0
    with sparing.approximate(model, spec):
        torch.testing.assert_close(found, feed(model, ids[:, 53:54], plain), rtol=0, atol=1e-5)


def test_copies_and_pickles_go_on():
    model = build("llama")
    with sparing.approximate(model, SMALL) as handle:
        cache, ids = started(model)
        copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
        handle.statistics(reset=True)
        outs = [[feed(model, ids[:, i : i + 1], each) for i in range(53, 66)] for each in (cache, *copies)]
        assert handle.statistics().layers[0].steps == 39
    for other in outs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outs[0], other))


def test_two_caches_take_turns():
    model = build("llama")
    with sparing.approximate(model, SMALL):
        (one, ids), (two, _) = started(model), started(model)
        other = tokens(80).flip(0, 1)
        mixed = []
        for i in range(53, 66):
            mixed.append((feed(model, ids[:, i : i + 1], one), feed(model, other[:, i : i + 1], two)))
        for number, text in enumerate((ids, other)):
            alone, _ = started(model)
            for i, found in zip(range(53, 66), mixed):
                assert torch.equal(feed(model, text[:, i : i + 1], alone), found[number])


class Packed(transformers.cache_utils.DynamicLayer):
    """A layer of a kind that sparing does not know, such as one that keeps its tokens in few bits."""


def test_other_caches_stay_exact_and_are_counted():
    model, ids = build("llama"), tokens(60)
    cache, plain = DynamicCache(config=model.config), DynamicCache(config=model.config)
    cache.layers = [Packed() for _ in cache.layers]
    wanted = [feed(model, ids[:, :50], plain), feed(model, ids[:, 50:51], plain)]
    with sparing.approximate(model, SMALL, when="decode") as handle:
        found = [feed(model, ids[:, :50], cache)]
        with pytest.warns(UserWarning, match="the cache has layers of Packed; use the default cache"):
            found.append(feed(model, ids[:, 50:51], cache))
        layer = handle.statistics().layers[0]
    assert (layer.steps, layer.exact_calls) == (0, 2)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_a_model_restored_in_the_middle_goes_on_exactly():
    """The cache stays a cache: exact from there on, and it can be cropped, reordered and approximated again."""
    model = build("llama")
    with sparing.approximate(model, SMALL):
        cache, ids = started(model)
    plain = DynamicCache(config=model.config)
    for layer, held in enumerate(cache.layers):
        plain.update(held.keys.clone(), held.values.clone(), layer)
    for i in range(53, 60):
        torch.testing.assert_close(
            feed(model, ids[:, i : i + 1], cache), feed(model, ids[:, i : i + 1], plain), rtol=0, atol=1e-5
        )
    for each in (cache, plain):
        crop(each, 57)
        each.reorder_cache(torch.tensor([1, 0]))
    wanted = feed(model, ids[:, 57:58], copy.deepcopy(plain))
    torch.testing.assert_close(feed(model, ids[:, 57:58], cache), wanted, rtol=0, atol=1e-5)
    with sparing.approximate(model, SMALL) as handle:
        feed(model, ids[:, 58:59], cache)
        assert handle.statistics().layers[0].exact_calls == 0, "the index catches up"


def test_a_reset_cache_starts_again():
    model, ids = build("llama"), tokens(60)
    with sparing.approximate(model, SMALL):
        wanted, _ = started(model)
        cache, ids = started(model, 20)
        cache.reset()
        assert indices(cache) == [None, None]
        assert cache.get_seq_length() == 0
        feed(model, ids[:, :50], cache)
        for i in range(50, 53):
            feed(model, ids[:, i : i + 1], cache)
        assert torch.equal(feed(model, ids[:, 53:54], cache), feed(model, ids[:, 53:54], wanted))


def test_the_cache_keeps_its_kind_outside():
    """Indexed layers are dynamic layers: whatever asks for those still finds them."""
    model = build("llama")
    with sparing.approximate(model, SMALL):
        cache, _ = started(model)
    assert all(isinstance(layer, IndexedDynamicLayer) for layer in cache.layers)
    assert all(isinstance(layer, transformers.cache_utils.DynamicLayer) for layer in cache.layers)
    assert cache.get_seq_length() == 53


def test_autocast_joins_types_as_transformers_does():
    """Keys of float32 and values of 16 bits, or a cache that goes on in another type: what the stock cache makes of it."""
    model = build("llama")
    given = prompt(padded=False)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = generate(model, given)
        with sparing.approximate(model, COVERING[0]):
            assert torch.equal(generate(model, given), wanted)
    layer, stock = IndexedDynamicLayer(), DynamicCache()
    wide, narrow = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 1, 4).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        for k, v in ((wide, wide.bfloat16()), (narrow, narrow)):
            layer.update(k, v)
            stock.update(k, v, 0)
    for name in ("keys", "values"):
        found, expected = getattr(layer, name), getattr(stock.layers[0], name)
        assert found.dtype == expected.dtype == torch.float32
        assert torch.equal(found, expected)


def test_another_batch_is_refused_and_changes_nothing():
    model, cache = build("llama"), DynamicCache()
    with sparing.approximate(model, SMALL):
        feed(model, tokens(30, 1), cache)
        before = [layer.keys.clone() for layer in cache.layers]
        with pytest.raises(ValueError, match=r"layer 0 holds keys of a batch of 1, and the model brings a batch of 2"):
            feed(model, tokens(1, 2), cache)
        assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))
        feed(model, tokens(1, 1), cache)


def test_items_are_selected_without_an_index():
    model = build("llama").bfloat16()
    cache = DynamicCache()
    with sparing.approximate(model, "top_keys(keys=4)"):  # which keeps none for a 16-bit cache
        feed(model, tokens(30, 2), cache)
        cache.batch_select_indices(torch.tensor([1]))
        assert indices(cache) == [None] * len(cache.layers)
        assert all(len(layer.keys) == 1 for layer in cache.layers)


def test_threads_do_not_mix_up_their_caches():
    model = build("llama")
    given = [prompt(length, padded=False) for length in (40, 55, 60)]
    with sparing.approximate(model, SMALL) as handle:
        wanted = [generate(model, one) for one in given]
        handle.statistics(reset=True)
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(lambda one: model.generate(
                **one, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0), given))  # fmt: skip
        assert handle.statistics().total.exact_calls == 0
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_cache_is_freed_with_its_last_reference():
    """Keys carry their layer, and the layer holds keys: without a cycle, which only the garbage collector would end."""
    model = build("llama")
    with sparing.approximate(model, SMALL):
        cache, _ = started(model)
        keys, index = weakref.ref(cache.layers[0].keys), weakref.ref(cache.layers[0].index)
        gc.disable()
        try:
            del cache
            assert keys() is index() is None
        finally:
            gc.enable()


def test_keys_lead_to_their_layer_for_their_own_module_alone():
    """Models may pass the keys of one layer to another, whose queries the index has never seen."""
    model = build("llama")
    first, second = (layer.self_attn for layer in model.model.layers)
    with sparing.approximate(model, SMALL):
        cache, _ = started(model)
        layer = cache.layers[0]
        new = torch.randn(2, 2, 1, 16)
        keys, values = layer.update(new, new)
        assert find_layer(first, state_of(first), keys, values) is layer
        assert find_layer(second, state_of(second), keys, values) is None
        assert find_layer(first, state_of(first), keys.clone(), values) is None
        assert find_layer(first, state_of(first), keys, values.clone()) is None
        layer.update(new, new)
        assert find_layer(first, state_of(first), keys, values) is None, "the cache went on"


def test_the_first_cache_of_a_model_loaded_by_name_may_be_copied_before_it_goes_on(tmp_path):
    """Its prompt ran before sparing knew the cache: the index is made from its keys."""
    model, ids = build("llama"), tokens(60)
    with sparing.approximate(model, SMALL):
        model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="sparing").eval()
    cache = DynamicCache()
    feed(loaded, ids[:, :50], cache)
    twins = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache]
    outs = [feed(loaded, ids[:, 50:51], each) for each in twins]
    assert all(index is not None and index.length == 51 for each in twins for index in indices(each))
    assert all(torch.equal(out, outs[0]) for out in outs)
