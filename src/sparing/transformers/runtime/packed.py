"""Handle calls on packed sequences: batches whose padding was removed, and packs that a model is given.

transformers marks the packs that a user makes in two ways: by the arguments of flash attention (`cu_seq_lens_q`), and
by position ids that start anew, which it also turns into a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sparing.contract import Unsupported
from sparing.functional import attention
from sparing.packed import cut_sequence, read_offsets
from sparing.transformers.packing import PackedBatch
from sparing.transformers.runtime import refusals
from sparing.transformers.runtime.masks import is_padding
from sparing.transformers.runtime.method import MethodArguments, run_method
from sparing.transformers.state import LayerSettings, LayerState

_FLASH = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")  # arguments of flash attention


def run_packed(
    state: LayerState, settings: LayerSettings, given: MethodArguments, offsets: Tensor,
    mask_of: Callable[[int], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Run the layer's method on packed sequences, and return [1, H, total, e].

    offsets: [sequences + 1]. mask_of: returns the mask of a sequence [1, 1 or H, n, n]; None: each is seen whole.
    """
    refusals.check_dropout(state, settings, given.dropout)
    if settings.exact and mask_of is None and settings.observer is None:
        out = attention(
            given.query, given.key, given.value, dropout_p=given.dropout, is_causal=given.is_causal, scale=given.scale,
            enable_gqa=given.query.shape[1] != given.key.shape[1], cu_seqlens=offsets,
        )  # fmt: skip
        lengths = offsets.diff().tolist()
        settings.tally.add(settings.method, given.query, given.key, given.value, lengths, given.is_causal, {})
        return out
    places = list(pairwise(read_offsets(offsets, given.query, given.key)))
    longest = max(range(len(places)), key=lambda i: places[i][1] - places[i][0])
    parts = []
    for number, (start, end) in enumerate(places):
        q, k, v = (cut_sequence(x, start, end) for x in (given.query, given.key, given.value))
        assert isinstance(q, Tensor)
        assert isinstance(k, Tensor)
        mask = None if mask_of is None else mask_of(number)
        part = MethodArguments(q, k, v, mask, given.is_causal, given.scale, given.dropout)
        parts.append(run_method(state, settings, part, is_call=number == longest))
    return torch.cat(parts, dim=2)


def run_batch(state: LayerState, settings: LayerSettings, given: MethodArguments, batch: PackedBatch) -> Tensor:
    """Run the method on a batch whose padding was removed. given.mask: as the padded model made it, or None."""
    mask = given.mask
    cut = None if mask is None or is_padding(mask) else lambda number: batch.cut_mask(mask, number)
    return run_packed(state, settings, given, batch.cu_seqlens, cut)


def given_offsets(
    state: LayerState, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, others: dict[str, Any]
) -> tuple[Tensor | None, dict[str, Any]]:
    """Return the offsets of packed sequences that the user passed to the model, or None; and the other arguments.

    mask: of the call; it must hide what the offsets hide, or be None.
    """
    offsets, keys = others.get("cu_seq_lens_q"), others.get("cu_seq_lens_k")
    rest = {name: value for name, value in others.items() if name not in _FLASH}
    positions = others.get("position_ids")
    if offsets is None and keys is None:
        if mask is None or mask.ndim != 4 or mask.dtype != torch.bool or not isinstance(positions, Tensor):
            return None, rest
        if query.shape[2] != key.shape[2] or positions.shape != (1, query.shape[2]) or query.shape[0] != 1:
            return None, rest
        starts = (positions[0] != torch.cat([positions[0, :1] - 1, positions[0, :-1]]) + 1).nonzero()[:, 0]
        ends = torch.tensor([query.shape[2]], device=starts.device)
        offsets = torch.cat([starts.new_zeros(1), starts[starts > 0], ends])
        return (offsets if len(offsets) > 2 and _is_pack(mask, offsets, is_causal) else None), rest
    if not isinstance(offsets, Tensor) or not isinstance(keys, Tensor) or not torch.equal(offsets, keys):
        raise Unsupported(
            f"{state.name}: cu_seq_lens_q and cu_seq_lens_k differ, and packed sequences attend to themselves; pass "
            "the same for both"
        )
    if mask is not None and not (mask.ndim == 4 and mask.dtype == torch.bool and _is_pack(mask, offsets, is_causal)):
        raise Unsupported(
            f"{state.name}: the model passes cu_seq_lens_q and a mask that hides other tokens; leave out attention_mask"
        )
    return offsets, rest


def _is_pack(mask: Tensor, offsets: Tensor, is_causal: bool) -> bool:
    """Return whether a mask [1, 1, n, n] hides other sequences, and later tokens if it is causal, and nothing else."""
    asked = (offsets.tolist(), is_causal)
    before, known = getattr(mask, "_sparing_pack", (None, False))
    if before != asked:
        n = mask.shape[-1]
        numbers = torch.bucketize(torch.arange(n, device=mask.device), offsets[1:].to(mask.device), right=True)
        wanted = numbers[:, None] == numbers
        known = bool(torch.equal(mask[0, 0], wanted.tril() if is_causal else wanted)) and mask.shape[:2] == (1, 1)
        mask._sparing_pack = (asked, known)  # type: ignore[attr-defined]  # every layer gets the same mask
    return known
