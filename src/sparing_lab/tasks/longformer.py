"""Turn a BERT encoder into a Longformer: attention within a window, and a global first token."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from sparing.models import Subject
from sparing.transformers.positions import extend_positions

_COPIED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act",
    "type_vocab_size", "layer_norm_eps", "pad_token_id",
)  # fmt: skip


def from_bert(subject: Subject, *, window: int, length: int) -> Subject:
    """Return a Longformer with the weights of a BERT encoder; on documents within the window both give the same.

    A token sees window / 2 neighbours to either side and the first token, which sees and is seen by all. The linear
    layers of the global token are copies of the others. Positions beyond BERT's repeat its own, as in Longformer.
    """
    from transformers import BertModel, LongformerConfig

    bert = subject.model
    if not isinstance(bert, BertModel):
        raise ValueError(
            f"model: {subject.name} is a {type(bert).__name__}; only a BertModel becomes a Longformer here"
        )
    bert = extend_positions(copy.deepcopy(bert), max(length, bert.config.max_position_embeddings))
    positions, padding = bert.config.max_position_embeddings, bert.config.pad_token_id or 0
    config = LongformerConfig(
        **{name: getattr(bert.config, name) for name in _COPIED}, attention_window=window,
        max_position_embeddings=positions + padding + 1,
    )  # fmt: skip
    model = _first_global()(config, add_pooling_layer=False).eval()
    weights = {name: weight for name, weight in bert.state_dict().items() if not name.startswith("pooler.")}
    rows = weights["embeddings.position_embeddings.weight"]
    reserved = rows.new_zeros(padding + 1, rows.shape[1])  # positions count from the one after the padding's
    weights["embeddings.position_embeddings.weight"] = torch.cat([reserved, rows])
    for name in list(weights):
        part = name.rsplit(".", 2)
        if part[-2] in ("query", "key", "value"):
            weights[f"{part[0]}.{part[1]}_global.{part[2]}"] = weights[name]
    weights.pop("embeddings.position_ids", None)
    model.load_state_dict(weights)
    return Subject(f"{subject.name} with a window of {window}", model, subject.tokenizer)


def _first_global() -> Any:
    """Return the class; defined inside a function because importing transformers is slow."""
    from transformers import LongformerModel

    class FirstGlobal(LongformerModel):
        """Longformer whose first token is global by default, as in its classifiers."""

        def forward(
            self, input_ids: Tensor | None = None, global_attention_mask: Tensor | None = None, **given: Any
        ) -> Any:
            if global_attention_mask is None and input_ids is not None:
                global_attention_mask = torch.zeros_like(input_ids)
                global_attention_mask[:, 0] = 1
            return super().forward(input_ids=input_ids, global_attention_mask=global_attention_mask, **given)

    return FirstGlobal
