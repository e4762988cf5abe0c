"""`ModelCall`: one call of the attention function by a layer of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparing.contract import Projection
from sparing.transformers.cache import IndexedLayer
from sparing.transformers.runtime.masks import ModelMask
from sparing.transformers.state import LayerSettings, LayerState


@dataclass(eq=False)
class ModelCall:
    """The arguments of a call and the settings of its layer. All handlers take it and return [B, n_q, H, e]."""

    module: nn.Module
    state: LayerState
    settings: LayerSettings | None  #: None: exact attention
    tracing: bool  #: torch.compile traces the call
    is_first: bool  #: the layer's state was made for this call, so that `prepare_cache` has not seen its cache
    layer: IndexedLayer | None  #: of the cache, if sparing can keep an index beside it
    cached_key: Tensor  #: `key` as the model passed it
    query: Tensor  #: [B, H, n_q, d]
    key: Tensor  #: [B, H_kv, n_k, d], without the empty positions of a static cache
    value: Tensor | Projection  #: [B, H_kv, n_k, e]
    mask: ModelMask
    continues: bool  #: the queries are the newest positions of a longer sequence, which a cache holds
    may_index: bool  #: the method may read an index instead of all keys and values
    is_causal: bool | None  #: as the model passed it
    dropout: float
    scale: float | None
    position_bias: Tensor | None
    others: dict[str, Any]  #: the model's other keyword arguments


def can_index(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether an index takes these: no gradient, and no 16-bit cache, which would be converted at each step."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        return False
    alike = query.dtype == key.dtype == value.dtype and key.dtype in (torch.float32, torch.float64)
    return alike and query.shape[0] == key.shape[0] == value.shape[0]
