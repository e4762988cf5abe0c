"""Prompts, caches and what decodes from them."""

from __future__ import annotations

import torch
from transformers import DynamicCache, StaticCache

from tests.support.model_zoo import tokens

SMALL = "multipole(tolerance=0.1, sinks=1, block=16)"


COVERING = ["multipole(tolerance=0, block=16)", "window(size=1000)", "top_keys(keys=1000)"]


MODELS = ["llama", "gpt2"]


#: Types of caches that an index follows.
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


NEW = 20


def new_cache(model, kind, length=90):
    """An empty cache."""
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=length)
    return DynamicCache(config=model.config)


def prompt(length=40, batch=2, padded=True):
    ids = tokens(length, batch)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :7] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, given=None, **options):
    torch.manual_seed(0)
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, **options}
    return model.generate(**(given or prompt()), pad_token_id=0, **options)


@torch.no_grad()
def feed(model, ids, cache, **options):
    """The logits of tokens that continue the cache."""
    return model(ids, past_key_values=cache, use_cache=True, **options).logits


def crop(cache, length):
    """To so many tokens."""
    cache.crop(length - int(cache.get_seq_length()))  # how many to remove; older versions take a length as well
    assert cache.get_seq_length() == length


def indices(cache):
    return [getattr(layer, "index", None) for layer in cache.layers]


def started(model, length=50, **options):
    """A cache of a prompt and three tokens, decoded."""
    ids = tokens(80)
    cache = DynamicCache(config=model.config)
    feed(model, ids[:, :length], cache)
    for i in range(length, length + 3):
        feed(model, ids[:, i : i + 1], cache)
    assert all(index is not None and index.length == length + 3 for index in indices(cache))
    return cache, ids
