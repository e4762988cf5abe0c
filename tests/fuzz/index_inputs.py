"""Tensors of an index case: contents, padding and strides, the same for the same case."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def drawn(case: dict[str, Any], batch: int, n: int, gen: torch.Generator) -> list[Tensor]:
    """Queries, keys and values of n new positions, in float64."""
    c, options = case, {"generator": gen, "dtype": torch.float64}
    topics = 1.5 * torch.randn(7, c["d"], generator=torch.Generator().manual_seed(c["data"]), dtype=torch.float64)
    sizes = [(batch, c["heads"], n, c["d"]), (batch, c["kv_heads"], n, c["d"]), (batch, c["kv_heads"], n, c["e"])]
    q, k, v = (torch.randn(size, **options) for size in sizes)
    topic = topics[torch.randint(0, 7, (batch, 1, n), generator=gen)]
    match c["content"]:
        case "topics" | "steep":
            q, k = q + topic, k + topic
            if c["content"] == "steep":
                q, k = 2 * q, 2 * k
        case "equal":
            k = topics[0].expand_as(k).clone()
        case "integers":
            q, k, v = (x.round().clamp(-1, 1) for x in (q, k, v))
        case "zeros":
            q, k = torch.zeros_like(q), torch.zeros_like(k)
    return [q, k, v]


def shown(batch: int, n: int, hide: str | None, gen: torch.Generator) -> Tensor:
    """Which of n new positions are no padding."""
    keep = torch.ones(batch, n, dtype=torch.bool)
    for item in range(batch):
        some = int(torch.randint(0, n + 1, (), generator=gen))
        match hide:
            case "left":
                keep[item, :some] = False
            case "right":
                keep[item, n - some :] = False
            case "holes":
                keep[item] = torch.rand(n, generator=gen) < 0.7
            case "all":
                keep[item] = bool(torch.rand((), generator=gen) < 0.5)
    return keep


def laid(layout: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same numbers in other places of memory."""
    if layout == "shared":  # keys and values in one tensor
        both = torch.cat([k, v], -1)
        return q.clone(), both[..., : k.shape[-1]], both[..., k.shape[-1] :]
    found = []
    for x in (q, k, v):
        batch, heads, n, d = x.shape
        if layout == "room":
            y = x.new_full((batch, heads, n + 50, d), torch.nan)[:, :, 3 : 3 + n]
        elif layout == "heads_last":
            y = x.new_empty(batch, n, heads, d).transpose(1, 2)
        else:
            y = x.new_full((batch, heads, n, 2 * d), torch.nan)[..., ::2]
        found.append(y.copy_(x))
    return found[0], found[1], found[2]
