"""Why tokens that continue a cache run exact attention although a method was asked for, and the way out of it."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Reason(NamedTuple):
    """`text` is counted in the statistics; the warning adds `way_out`."""

    text: str
    way_out: str


_OTHER_CACHE = 'use the default cache or cache_implementation="static"'

COMPILED = Reason("the model is compiled", "run it without torch.compile")
DROPOUT = Reason("the model drops attention weights", "call model.eval()")
GRADIENT = Reason("the call has a gradient", "call the model under torch.no_grad()")
MASK = Reason("the mask hides more than padding and later tokens", "pass the padding of the whole text alone")
MIXED_TYPES = Reason("queries, keys and values are of different types", "run the model in one type, without autocast")
OFFLOADED = Reason("the cache is offloaded", _OTHER_CACHE)
POSITION_BIAS = Reason("the layer adds a position bias", 'leave it exact, or pass when="prefill"')
QUANTISED = Reason("the cache is quantised", _OTHER_CACHE)
UNSEEN_CACHE = Reason("sparing does not see the cache", "pass a DynamicCache or StaticCache as past_key_values")
WINDOW = Reason("the layer attends within a window by itself", "leave it out of `layers`")


def cache_layer(kind: str) -> Reason:
    """Return the reason for a cache whose layers are of a class that sparing does not know."""
    return Reason(f"the cache has layers of {kind}", _OTHER_CACHE)


def dtype(found: torch.dtype) -> Reason:
    """Return the reason for a cache of numbers that an index does not read."""
    return Reason(
        f"the cache is {str(found).removeprefix('torch.')}",
        "use multipole or window, which read it, or load the model with dtype=torch.float32",
    )


def method(name: str) -> Reason:
    """Return the reason for a method that cannot continue a cache."""
    return Reason(f"{name} cannot continue a cache", 'use multipole or window, or pass when="prefill"')


def unseen_tokens(name: str) -> Reason:
    """Return the reason for a cache whose index is missing, or lacks tokens, and cannot be made from keys alone."""
    return Reason(
        f"the cache has tokens that {name} has not seen",
        "call approximate() before the cache is filled, and keep the mask and the method of its first tokens",
    )
