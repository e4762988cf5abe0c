"""Packed sequences: several, one after the other, in the tensors of one call, as flash attention takes them.

`cu_seqlens` holds the offset of each sequence and, at its end, the total. A sequence sees itself alone: the result is
that of one call per sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from sparing.contract import Projection


def four_dimensional_pack(
    query: Tensor, key: Tensor, value: Tensor | Projection
) -> tuple[Tensor, Tensor, Tensor | Projection, bool]:
    """Return query, key and value as [1, heads, total, width], and whether they were [total, heads, width].

    Raise for other shapes; what `check_call` refuses anyway is left alone.
    """
    given = {"query": query, "key": key, **({} if isinstance(value, Projection) else {"value": value})}
    if not all(isinstance(t, Tensor) and not t.is_nested for t in given.values()):
        return query, key, value, False
    flat = query.ndim == 3
    for name, t in given.items():
        if t.ndim != (3 if flat else 4) or (not flat and t.shape[0] != 1):
            raise ValueError(
                f"{name} {list(t.shape)}: with cu_seqlens all tensors must be [1, heads, total, width], or all "
                "[total, heads, width]"
            )
    if not flat:
        return query, key, value, False
    if isinstance(value, Projection):
        value = value._replace(x=value.x[None] if value.x.ndim == 2 else value.x)
    else:
        value = value.transpose(0, 1)[None]
    return query.transpose(0, 1)[None], key.transpose(0, 1)[None], value, True


def read_offsets(cu_seqlens: Tensor, query: Tensor, key: Tensor, **masks: Tensor | None) -> list[int]:
    """Return the offsets as integers, or raise an error that names the one that is wrong.

    query, key: [1, heads, total, width]. masks: further arguments, which a packed call does not take.
    """
    kinds = (torch.int32, torch.int64)
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in kinds or cu_seqlens.ndim != 1:
        got = f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}" if isinstance(cu_seqlens, Tensor) else repr(cu_seqlens)
        raise TypeError(f"cu_seqlens must be a tensor [sequences + 1] of int32 or int64 offsets, got {got}")
    total = query.shape[2]
    if key.shape[2] != total:
        raise ValueError(
            f"cu_seqlens: query has {total} positions and key {key.shape[2]}; packed sequences attend to themselves, "
            "so both must have the same"
        )
    for name, mask in masks.items():
        if mask is not None:
            raise ValueError(
                f"{name} cannot be combined with cu_seqlens: padding is left out of a pack; pass one of them"
            )
    found: list[int] = cu_seqlens.tolist()
    if len(found) < 2 or found[0] != 0 or found[-1] != total:
        raise ValueError(
            f"cu_seqlens={_shown(found)} must begin with 0 and end with the total, {total}: one more than sequences"
        )
    for number, (start, end) in enumerate(pairwise(found)):
        if end <= start:
            what = "is empty; leave it out" if end == start else "ends before it begins; offsets must rise"
            raise ValueError(f"cu_seqlens[{number}:{number + 2}]={[start, end]}: sequence {number} {what}")
    return found


def cut_sequence(value: Tensor | Projection, start: int, end: int) -> Tensor | Projection:
    """Return the part of a query, key or value [1, heads, total, width] that is one sequence."""
    if isinstance(value, Projection):
        return value._replace(x=value.x[:, start:end])
    return value[:, :, start:end]


def each_sequence(
    run: Callable[..., Tensor], offsets: Sequence[int], query: Tensor, key: Tensor, value: Tensor | Projection,
    statistics: dict[str, Tensor] | None,
) -> Tensor:  # fmt: skip
    """Call run(query, key, value, statistics) for each packed sequence; return [1, H, total, e], and fill `statistics`.

    statistics: None if nobody wants them.
    """
    outputs, notes = [], []
    for start, end in pairwise(offsets):
        noted: dict[str, Tensor] | None = None if statistics is None else {}
        outputs.append(run(*(cut_sequence(x, start, end) for x in (query, key, value)), noted))
        notes.append(noted or {})
    if statistics is not None:
        statistics.update(_join_notes(notes, [end - start for start, end in pairwise(offsets)]))
    return torch.cat(outputs, dim=2)


def _join_notes(parts: Sequence[dict[str, Tensor]], lengths: Sequence[int]) -> dict[str, Tensor]:
    """Return the statistics of all sequences that have an entry for each row, (1, heads, total, ...); no others."""
    found = {}
    for name in parts[0]:
        notes = [part[name] for part in parts if name in part]
        if len(notes) == len(lengths) and all(
            note.ndim > 2 and note.shape[2] == length for note, length in zip(notes, lengths, strict=True)
        ):
            found[name] = torch.cat(notes, dim=2)
    return found


def _shown(offsets: list[int]) -> str:
    return str(offsets) if len(offsets) <= 8 else f"[{', '.join(map(str, offsets[:4]))}, ..., {offsets[-1]}]"
