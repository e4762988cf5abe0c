"""Texts for a pretrained model, and the perplexity of a language model on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def cut(texts: Iterable[str], encode: Callable[[str], Sequence[int]], length: int, documents: int) -> Tensor:
    """Return token ids [documents, length] of the first texts that are long enough."""
    rows: list[list[int]] = []
    for text in texts:
        ids = list(encode(text))
        if len(ids) >= length:
            rows.append(ids[:length])
        if len(rows) == documents:
            return torch.tensor(rows)
    raise ValueError(f"only {len(rows)} texts have {length} tokens; ask for fewer documents than {documents}")


@torch.no_grad()
def perplexity(model: Any, ids: Tensor) -> Tensor:
    """Return exp of the mean negative log-likelihood of the next token, for each text of [documents, n]."""
    return torch.stack([model(input_ids=one[None], labels=one[None], use_cache=False).loss.exp() for one in ids])
