"""Decode the masks of a call once: causality, key padding, and patterns that differ by query."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Mask:
    """Which keys each query may look at, and what is added to its logits."""

    causal: bool = False  #: query i sees keys 0..i, upper-left aligned like SDPA
    keep: Tensor | None = None  #: (B, n_k) boolean, False for padded keys
    pattern: Tensor | None = None  #: boolean (True = attend) or additive, broadcastable to (B, H, n_q, n_k)
    queries: Tensor | None = None  #: (B, n_q) boolean, False for queries whose rows are zeros
    influence: Tensor | None = None  #: (B, n_q) boolean, False for queries that must not affect other rows
    offsets: tuple[int, ...] | None = None  #: of packed sequences, and their end; each sees itself alone

    @property
    def bias(self) -> Tensor | None:
        """The pattern, if it is additive."""
        return None if self.pattern is None or self.pattern.dtype == torch.bool else self.pattern

    def visible(self, n_q: int, n_k: int, device: torch.device) -> Tensor | None:
        """Return which keys a query may attend to: boolean, broadcastable to (B, H, n_q, n_k); None for all."""
        allowed: Tensor | None = None
        if self.causal:
            allowed = torch.ones(n_q, n_k, dtype=torch.bool, device=device).tril()[None, None]
        if self.keep is not None:
            keep = self.keep[:, None, None, :]
            allowed = keep if allowed is None else allowed & keep
        if self.pattern is not None:
            shown = self.pattern if self.bias is None else self.pattern != -torch.inf
            allowed = shown if allowed is None else allowed & shown
        if self.offsets is not None:
            numbers = _sequence_numbers(self.offsets, device)
            together = numbers[None, None, :, None] == numbers
            allowed = together if allowed is None else allowed & together
        return allowed

    def key_ranks(self, n_k: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the rank (B or 1, n_k) of each key among the valid ones, and their number (B or 1,).

        A padded key has the rank of the last valid key before it, so draws keyed by the rank are the same with and
        without padding.
        """
        return _ranks(self.keep, n_k, device)

    def query_ranks(self, n_q: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return `key_ranks` for the queries that may influence other rows."""
        return _ranks(self.influence, n_q, device)


def hides(mask: Tensor) -> Tensor:
    """Return where a mask hides a key: where it is False, -inf, or the lowest number of its type."""
    return ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min


def read_mask(
    attn_mask: Tensor | None, query_mask: Tensor | None, *, is_causal: bool, query: Tensor, key: Tensor
) -> Mask:
    """Return what the arguments of a call mean, or raise an error that names the one that does not fit.

    query: (B, H, n_q, d). key: (B, H_kv, n_k, d).
    """
    batch, _, n_q, _ = query.shape
    n_k = key.shape[2]
    keep, pattern = _split_padding(_check_pattern(attn_mask, query, n_k), batch, n_k)
    if query_mask is not None:
        if not isinstance(query_mask, Tensor) or query_mask.dtype != torch.bool:
            raise TypeError(f"query_mask must be a boolean tensor [batch, n_q], got {_kind(query_mask)}")
        if tuple(query_mask.shape) != (batch, n_q) or query_mask.device != query.device:
            raise ValueError(f"query_mask must be {[batch, n_q]} on {query.device}, got {_kind(query_mask)}")
    influence = keep if query_mask is None and n_q == n_k else query_mask
    return Mask(causal=is_causal, keep=keep, pattern=pattern, queries=query_mask, influence=influence)


def _check_pattern(mask: Tensor | None, query: Tensor, n_k: int) -> Tensor | None:
    """Return the mask as a 4-D tensor; additive entries at the lowest finite number count as -inf."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise TypeError(f"attn_mask must be a tensor, got {type(mask).__name__}")
    if mask.is_nested:
        raise TypeError("attn_mask is a nested tensor; use attn_mask.to_padded_tensor(...)")
    if mask.dtype not in (torch.bool, *FLOATS):
        raise TypeError(
            f"attn_mask has dtype {mask.dtype}; use boolean (True = attend), or additive float32, float64, bfloat16 or "
            "float16"
        )
    if mask.layout != torch.strided:
        raise TypeError(f"attn_mask has layout {mask.layout}; use a dense tensor, such as attn_mask.to_dense()")
    if mask.device != query.device:
        raise ValueError(f"attn_mask is on {mask.device} but query is on {query.device}; move one of them")
    full = (*query.shape[:3], n_k)
    shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    if len(shape) != 4 or any(have not in (1, want) for have, want in zip(shape, full, strict=True)):
        raise ValueError(f"attn_mask {list(mask.shape)} does not broadcast to [B, H, n_q, n_k] = {list(full)}")
    mask = mask.reshape(shape)
    if mask.dtype == torch.bool:
        return mask
    return mask.masked_fill(hides(mask), -torch.inf).to(torch.promote_types(mask.dtype, torch.float32))


def _split_padding(mask: Tensor | None, batch: int, n_k: int) -> tuple[Tensor | None, Tensor | None]:
    """Return (key padding, other mask). A mask that hides the same keys from all queries and heads is padding."""
    if mask is None:
        return None, None
    if mask.requires_grad:  # a learned bias, even if it is all zero now
        return None, mask
    if 0 in mask.shape:
        return mask.new_ones(batch, n_k, dtype=torch.bool), None
    row = mask[:, 0, 0, :]
    # The meaning of a mask must not depend on its storage: an expanded mask and a copy of it are the same mask.
    plain = all(mask.shape[axis] == 1 or mask.stride(axis) == 0 for axis in (1, 2))
    if not plain and not torch.equal(mask, row[:, None, None, :].expand_as(mask)):
        return None, mask
    if row.dtype != torch.bool:
        if not bool(((row == 0) | (row == -torch.inf)).all()):
            return None, mask  # a bias, not padding
        row = row == 0
    return row.expand(batch, n_k), None


def _sequence_numbers(offsets: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the number of the packed sequence that each position belongs to, (n,)."""
    ends = torch.tensor(offsets[1:], device=device)
    return torch.bucketize(torch.arange(offsets[-1], device=device), ends, right=True)


def _ranks(valid: Tensor | None, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    if valid is None:
        return torch.arange(n, device=device)[None], torch.tensor([n], device=device)
    return (valid.long().cumsum(-1) - 1).clamp_min(0), valid.sum(-1)


def _kind(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
