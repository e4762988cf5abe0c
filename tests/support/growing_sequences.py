"""Sequences that grow, and what one call over all of a sequence gives."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import sparing

MULTIPOLE = "multipole(tolerance=0.05, sinks=2, block=16)"


SPECS = [
    MULTIPOLE,
    "multipole(tolerance=0.3, sinks=0, block=16)",
    "multipole(tolerance=1.0, sinks=20, block=32)",  # sinks beyond a block
    "multipole(tolerance=0.02, sinks=1, block=48)",
    "window(size=32, sinks=2)",
    "window(size=16, global_tokens=40, sinks=3)",
    "window(size=0)",
    "top_keys(keys=8)",
]


ALLOWED = {torch.float64: 1e-9, torch.float32: 1e-5}


class Sequence(NamedTuple):
    """q (B, H, n, d), k (B, H_kv, n, d), v (B, H_kv, n, e), keep (B, n) or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    keep: Tensor | None = None

    def part(self, start: int, end: int) -> tuple[Any, ...]:
        """What a call gets that brings the positions from `start` to `end`."""
        keep = None if self.keep is None else self.keep[:, :end]
        return self.q[:, :, start:end], self.k[:, :, :end], self.v[:, :, :end], keep

    def items(self, chosen: Any) -> Sequence:
        return Sequence(*(None if x is None else x[chosen] for x in self))


def sequence(n=110, batch=1, heads=2, kv_heads=None, d=8, e=6, dtype=torch.float64, keep=None, seed=0) -> Sequence:
    """Keys of a few topics that come and go, and queries that look for some of them: peaked attention."""
    gen = torch.Generator().manual_seed(seed)
    topics = 1.5 * torch.randn(9, d, generator=gen, dtype=torch.float64)
    of = torch.randint(0, 9, (batch, 1, n), generator=gen)
    q = topics[of] + torch.randn(batch, heads, n, d, generator=gen, dtype=torch.float64)
    k = topics[of] + torch.randn(batch, kv_heads or heads, n, d, generator=gen, dtype=torch.float64)
    v = torch.randn(batch, kv_heads or heads, n, e, generator=gen, dtype=torch.float64)
    return Sequence(q.to(dtype), k.to(dtype), v.to(dtype), keep)


def at_once(x: Sequence, spec: str, seed: int = 3, **options: Any) -> Any:
    mask = None if x.keep is None else x.keep[:, None, None, :]
    grouped = x.q.shape[1] != x.k.shape[1]
    return sparing.inspect(
        x.q, x.k, x.v, mask, is_causal=True, enable_gqa=grouped, method=spec, seed=seed, **options
    )  # fmt: skip


def grow(index: sparing.Index, x: Sequence, start: int, step: int, *, first: int = 0) -> tuple[Tensor, list[Any]]:
    """The outputs of the positions from `first` on: up to `start` in one call, then `step` at a time."""
    n = x.q.shape[2]
    ends = [*range(start, n, step), n] if start < n else [n]
    outs, notes = [], []
    for a, b in zip([first, *ends], ends):
        outs.append(index.attention(*x.part(a, b)))
        notes.append((a, b, index.statistics))
    return torch.cat(outs, dim=2), notes


def valid_rows(x: Sequence, out: Tensor) -> Tensor:
    rows = x.keep
    return out if rows is None else out.masked_fill(~rows.view(*rows.shape[:1], 1, -1, *[1] * (out.ndim - 3)), 0.0)


EVERY = pytest.mark.parametrize("spec", SPECS)


KINDS = pytest.mark.parametrize("spec", [MULTIPOLE, "window(size=16, global_tokens=40, sinks=3)", "top_keys(keys=8)"])
