"""Models that studies measure: loaded once, and with untrained weights."""

from __future__ import annotations

import copy
import functools

import torch

from sparing.models import Subject, load


@functools.lru_cache(maxsize=1)
def loaded(name: str) -> Subject:
    """Return a model; the last one is kept."""
    return load(name)


def untrained(found: Subject, *, seed: int = 0, layers: int | None = None) -> Subject:
    """Return the same architecture with untrained weights; layers: fewer than the model has."""
    config = copy.deepcopy(found.model.config)
    if layers is not None:
        config.num_hidden_layers = layers
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Subject(f"{found.name}, untrained", type(found.model)(config).eval(), found.tokenizer)
