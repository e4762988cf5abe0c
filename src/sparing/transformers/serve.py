"""One call of a layer, through the door, with errors that name the layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparing.contract import Past, Projection, Unsupported
from sparing.functional import attention, inspect
from sparing.transformers.slot import Choice, Slot
from sparing.transformers.watch import Seen


def serve(
    slot: Slot,
    choice: Choice,
    query: Tensor,
    key: Tensor,
    value: Tensor | Projection,
    mask: Tensor | None,
    *,
    is_causal: bool,
    scale: float | None,
    dropout: float,
    past: Past | None = None,
) -> Tensor:
    """query [B, H, n_q, d], key [B, H_kv, n_k, d], value [B, H_kv, n_k, e] or a Projection -> [B, H, n_q, e]."""
    refuse_dropout(slot, choice, dropout)
    rows = None
    if slot.cross and query.shape[2] == key.shape[2]:  # the mask speaks of the keys' sequence, not of the queries'
        rows = torch.ones(query.shape[0], query.shape[2], dtype=torch.bool, device=query.device)
    call: dict[str, Any] = {
        "attn_mask": mask, "dropout_p": dropout, "is_causal": is_causal, "scale": scale, "query_mask": rows,
        "enable_gqa": query.shape[1] != key.shape[1], "streams": choice.streams(key.shape[1]), "method": choice.method,
        "seed": choice.seed,
    }  # fmt: skip
    if choice.see is not None:
        choice.see(Seen(slot.name, query, key, value, call))
        return attention(query, key, value, **{**call, "method": "exact"})
    try:
        if torch.compiler.is_compiling():  # a graph keeps no tally
            return attention(query, key, value, **call)
        found = inspect(query, key, value, brief=True, past=past, **call)
    except Unsupported as error:
        local = f" (the layer attends within {slot.window} tokens; shorter inputs need no mask)" if slot.window else ""
        raise Unsupported(f"{slot.name}: {error}{local}") from error
    choice.tally.add(choice.method, query, key, value, mask, is_causal, found.statistics)
    return found.output


def refuse_dropout(slot: Slot, choice: Choice, dropout: float) -> None:
    """Raise where the model drops weights and the method cannot."""
    if dropout > 0 and not choice.method.supports.dropout:
        raise Unsupported(
            f"{slot.name}: the model drops attention weights in training (p={dropout}), which {choice.method.name} "
            "cannot; load the model with its attention dropout at 0, or call model.eval()"
        )
