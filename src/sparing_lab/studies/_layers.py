"""Models that studies measure, and the inputs of their attention layers."""

from __future__ import annotations

import copy
import functools

import torch
from torch import Tensor, nn

from sparing.models import Subject, load, minilm
from sparing.models.preset import Preset
from sparing.transformers.watch import ObservedCall, record_calls


@functools.lru_cache(maxsize=1)
def loaded(name: str) -> Subject:
    """Return a model; the one that was loaded last is kept in memory."""
    return load(name)


def untrained(found: Subject, *, seed: int = 0, layers: int | None = None) -> Subject:
    """Return the same architecture with untrained weights; layers: number of layers, if fewer are wanted."""
    config = copy.deepcopy(found.model.config)
    if layers is not None:
        config.num_hidden_layers = layers
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Subject(f"{found.name}, untrained", type(found.model)(config).eval(), found.tokenizer)


def encoder_layers(model: nn.Module, input_ids: Tensor) -> list[ObservedCall]:
    """Run the model on token ids [1, n] and return the inputs of each layer, values as a `Projection`."""
    found = record_calls(model, "monte_carlo", lambda: model(input_ids=input_ids))
    if any(seen.call["is_causal"] or seen.call["attn_mask"] is not None for seen in found):
        raise ValueError(f"model: {type(model).__name__} masks its attention; this study takes an encoder such as BERT")
    return found


@functools.lru_cache(maxsize=8)
def topic_layers(name: str, n: int) -> list[ObservedCall]:
    """Return the inputs of each layer of an encoder for the first n tokens of a help topic."""
    found = loaded(name)
    ids = minilm.token_ids(Preset(found.model, found.tokenizer), length=n, documents=1)
    return encoder_layers(found.model, ids)
