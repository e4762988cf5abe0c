"""What the studies of YOSO share: queries, keys and values of trained models."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from sparing.documents import default
from sparing.methods.yoso.method import Yoso
from sparing.transformers.watch import ObservedCall, observe_calls
from sparing_lab.studies._layers import loaded
from sparing_lab.studies.study import Settings

PAPER_MODEL = "uw-madison/yoso-4096"  #: the authors' pretrained model, 4096 positions
_CHARACTERS = 12  # characters of text that are enough for a token


def models(settings: Settings, *small: str) -> tuple[str, ...]:
    """Return the names of the models that are measured."""
    return (settings.model,) if settings.model else small if settings.small else (PAPER_MODEL,)


@lru_cache(maxsize=1)
def text() -> tuple[str, str]:
    """Return the text that the models read, the topics of Python's help joined, and its fingerprint."""
    found = default()
    return "\n\n".join(found.texts), found.fingerprint


@lru_cache(maxsize=1)
def layers(name: str, length: int) -> tuple[ObservedCall, ...]:
    """Return the inputs of each attention layer of the model for the first `length` tokens of the text."""
    model = loaded(name)
    if model.positions is not None and length > model.positions:
        raise ValueError(f"model: {name} has {model.positions} positions, and the study needs {length}")
    (ids,), _ = model.encode([text()[0][: _CHARACTERS * length]], length)
    if len(ids) < length:
        raise ValueError(f"the text has only {len(ids)} tokens of {name}, and the study needs {length}")
    found: list[ObservedCall] = []
    with torch.no_grad(), observe_calls(model.model, "yoso", found.append):
        model.run(ids)
    return tuple(found)


def bits_of(seen: ObservedCall) -> int:
    """Return the bits of the layer's codes: its model's, as the paper sets them once, else those of a bare call."""
    method = seen.call.get("method")
    bits = method.bits if isinstance(method, Yoso) else None
    return bits or max((seen.key.shape[-2] - 1).bit_length(), 1)


def spread(items: tuple[ObservedCall, ...], count: int) -> list[tuple[int, ObservedCall]]:
    """Return that many of the items, evenly spread from the first to the last, with their indices."""
    chosen = torch.linspace(0, len(items) - 1, min(count, len(items))).round().int().tolist()
    return [(number, items[number]) for number in chosen]


def relative(found: Tensor, wanted: Tensor, norm: float) -> Tensor:
    """Return for each head's matrix [..., n, d]: norm of the difference / norm of the target."""
    difference, whole = ((found - wanted).double().flatten(-2), wanted.double().flatten(-2))
    return torch.linalg.vector_norm(difference, norm, dim=-1) / torch.linalg.vector_norm(whole, norm, dim=-1)
