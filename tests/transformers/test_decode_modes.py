"""A cache goes on decoding in another of torch's modes than it was filled, copied or edited in."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from transformers import DynamicCache

import sparing
from tests.support.decoding import SMALL, crop, indices
from tests.support.model_zoo import build, tokens

MODES = {"plain": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}
MIXED = list(product(("plain", "inference"), ("plain", "inference"), MODES))  # of the prompt, what is done to it, steps


def selected(cache):
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_select_indices(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(1)
    return cache


def cropped(cache, length):
    crop(cache, length)
    return cache


def emptied(cache):
    cache.reset()
    return cache


EDITS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "crop": lambda cache: cropped(cache, 51),
    "deep crop": lambda cache: cropped(cache, 30),
    "reorder": selected,
    "reset": emptied,
}


def run(model, edit, prompt, middle, step):
    """The logits of tokens after an edit."""
    ids, cache = tokens(80), DynamicCache(config=model.config)

    def feed(a, b):
        return model(ids[:, a:b], past_key_values=cache, use_cache=True).logits

    with MODES[prompt]():
        feed(0, 50)
        for n in range(50, 54):
            feed(n, n + 1)
    with MODES[middle]():
        cache = EDITS[edit](cache)
    start = cache.get_seq_length()
    with MODES[step]():
        found = [feed(start, start + 10), *(feed(n, n + 1) for n in range(start + 10, start + 20))]
    assert all(index is not None and index.length == start + 20 for index in indices(cache))
    return torch.cat(found, 1)


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("spec", [SMALL, "window(size=16)"])
def test_a_cache_goes_on_in_every_mode(spec, edit):
    model = build("llama").requires_grad_(False)
    with sparing.approximate(model, spec, when="decode") as handle:
        wanted = run(model, edit, "plain", "plain", "plain")
        steps = handle.statistics(reset=True).layers[0].steps
        for modes in MIXED:
            assert torch.equal(run(model, edit, *modes), wanted), modes
            assert handle.statistics(reset=True).layers[0].steps == steps > 0, modes
