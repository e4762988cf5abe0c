"""`ModelCall`: one call of the attention function by a layer of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparing.contract import Projection
from sparing.transformers import reasons
from sparing.transformers.cache import IndexedLayer
from sparing.transformers.reasons import Reason
from sparing.transformers.runtime.masks import ModelMask
from sparing.transformers.state import LayerSettings, LayerState

#: Types of caches that an index follows. Others would be converted at each step.
INDEXED = (torch.float32, torch.float64)
INDEXED_16BIT = (*INDEXED, torch.bfloat16, torch.float16)


class Given(NamedTuple):
    """Arguments as the model passed them, with the empty positions of a static cache."""

    key: Tensor
    value: Tensor
    mask: Tensor | None
    position_bias: Tensor | None


@dataclass(eq=False)
class ModelCall:
    """The arguments of a call and the settings of its layer. All handlers take it and return [B, n_q, H, e]."""

    module: nn.Module
    state: LayerState
    settings: LayerSettings | None  #: None: exact attention
    tracing: bool  #: torch.compile traces the call
    layer: IndexedLayer | None  #: of the cache, if sparing can keep an index beside it
    given: Given
    query: Tensor  #: [B, H, n_q, d]
    key: Tensor  #: [B, H_kv, n_k, d], without the empty positions of a static cache
    value: Tensor | Projection  #: [B, H_kv, n_k, e]
    mask: ModelMask
    continues: bool  #: the queries are the newest positions of a longer sequence, which a cache holds
    looks_back: bool  #: queries see no later keys
    is_causal: bool | None  #: as the model passed it
    dropout: float
    scale: float | None
    position_bias: Tensor | None
    others: dict[str, Any]  #: the model's other keyword arguments


def obstacle(call: ModelCall) -> Reason | None:
    """Return why no index can serve a call of a causal layer whose settings have a method; None if one can."""
    q, k, v, settings = call.query, call.key, call.value, call.settings
    assert settings is not None
    assert isinstance(v, Tensor)
    if not settings.method.supports.decode:
        return reasons.method(settings.method.name)
    if call.tracing:
        return reasons.COMPILED
    if call.position_bias is not None:
        return reasons.POSITION_BIAS
    if call.state.window is not None:
        return reasons.WINDOW
    if call.layer is None:
        return call.state.cache_reason or reasons.UNSEEN_CACHE
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return reasons.GRADIENT
    if not q.dtype == k.dtype == v.dtype:
        return reasons.MIXED_TYPES
    if k.dtype not in (INDEXED_16BIT if settings.method.supports.decode_16bit else INDEXED):
        return reasons.dtype(k.dtype)
    return reasons.DROPOUT if call.dropout else None
