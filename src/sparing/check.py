"""The one validator of attention calls. Errors name the argument, its value or shape, and the way out."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sparing.contract import Method, Projection, Shape, Unsupported

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Inputs(NamedTuple):
    """A call whose arguments fit together."""

    tensors: list[tuple[str, Tensor]]
    n_q: int
    n_k: int
    value_dim: int
    projected: bool  # the value is a plain tensor
    groups: int
    scale: float
    keep: Tensor | None  # (B, n_k): key padding
    influence: Tensor | None  # (B, n_q): queries that may affect other rows
    mask: Tensor | None  # boolean or additive, 4-D
    dropout_p: float


def check_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor | Projection,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    seed: int | None,
    impl: str,
    query_mask: Tensor | None,
    streams: Sequence[int] | None,
) -> Inputs:
    """Check everything that does not depend on the method."""
    tensors: list[tuple[str, Tensor]] = [("query", query), ("key", key)]
    if isinstance(value, Projection):
        tensors += [("value.x", value.x), ("value.weight", value.weight)]
        tensors += [] if value.bias is None else [("value.bias", value.bias)]
    else:
        tensors.append(("value", value))
    for name, tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.is_nested:
            raise TypeError(f"{name} is a nested tensor; use {name}.to_padded_tensor(0.0) with a mask for the padding")
        if tensor.layout != torch.strided:
            raise TypeError(f"{name} has layout {tensor.layout}; use a dense tensor, such as {name}.to_dense()")
        if tensor.dtype not in _FLOATS:
            raise TypeError(f"{name} has dtype {tensor.dtype}; use float32, float64, bfloat16 or float16")
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype} but query has {query.dtype}; convert one of them")
        if tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device} but query is on {query.device}; move one of them")
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device, which holds no data; use a tensor on a real device")
    for name, tensor in tensors[:2] + tensors[2:3] * (not isinstance(value, Projection)):
        if tensor.ndim != 4:
            raise ValueError(
                f"{name} {_size(tensor)} cannot be brought to the 4 dimensions [batch, heads, length, width]; those "
                "before the length must broadcast"
            )
    batch, heads, n_q, d = query.shape
    kv_heads, n_k = key.shape[1], key.shape[2]
    if key.shape[0] != batch or key.shape[3] != d:
        raise ValueError(f"key {_size(key)} does not fit query {_size(query)}: batch and width must agree")
    value_dim = _check_value(value, batch, kv_heads, n_k)
    if kv_heads != heads and not enable_gqa:
        raise ValueError(f"key has {kv_heads} heads but query has {heads}; pass enable_gqa=True to share key heads")
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(f"key has {kv_heads} heads, which does not divide the {heads} heads of query")
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}={flag!r} must be True or False")
    _check_scalars(dropout_p, scale, seed, impl, streams, kv_heads)
    mask = _check_mask(attn_mask, batch, heads, n_q, n_k, query.device)
    keep, mask = _split_padding(mask, batch, n_k)
    if query_mask is not None:
        if not isinstance(query_mask, Tensor) or query_mask.dtype != torch.bool:
            raise TypeError(f"query_mask must be a boolean tensor [batch, n_q], got {_kind(query_mask)}")
        if tuple(query_mask.shape) != (batch, n_q) or query_mask.device != query.device:
            raise ValueError(f"query_mask must be {[batch, n_q]} on {query.device}, got {_kind(query_mask)}")
    influence = keep if query_mask is None and n_q == n_k else query_mask
    groups = heads // kv_heads if kv_heads else 1
    scale = float(scale) if scale is not None else 1 / math.sqrt(d)
    return Inputs(
        tensors, n_q, n_k, value_dim, isinstance(value, Tensor), groups, scale, keep, influence, mask, dropout_p
    )


def check_call(method: Method, inputs: Inputs, is_causal: bool, impl: str, state: nn.Module | None) -> None:
    """Refuse what the method does not claim to support."""
    can, keep = method.supports, inputs.keep

    # Where the setting can do less than its class, the message shows the setting.
    label = str(method) if can != type(method).supports else method.name or type(method).__name__

    def refuse(argument: str, way_out: str) -> None:
        raise Unsupported(f"{label} does not support {argument}; {way_out}")

    if inputs.projected and can.projection:
        refuse("a projected value (it samples the projection itself)", "pass value=Projection(x, weight, bias)")
    if is_causal and not can.causal:
        refuse("is_causal=True (it mixes all positions)", "use a causal method such as 'window' or 'exact'")
    if keep is not None and not can.key_padding:
        refuse("key padding in attn_mask", "call it on unpadded sequences")
    if inputs.mask is not None and not can.attn_mask:
        refuse(
            f"attn_mask of shape {_size(inputs.mask)} that differs by query or head, or holds a bias",
            "pass key padding as a boolean mask [B, 1, 1, n_k] (or additive, with -inf for hidden keys), causality as "
            "is_causal=True, or use 'exact'",
        )
    if inputs.mask is not None and can.attn_mask == "boolean" and inputs.mask.dtype != torch.bool:
        refuse("an additive attn_mask", "pass a boolean mask (True = attend), or use 'exact'")
    if inputs.n_q != inputs.n_k and not can.cross_attention:
        refuse(f"n_q={inputs.n_q} != n_k={inputs.n_k}", "use a method with cross attention such as 'exact'")
    if inputs.groups > 1 and not can.gqa:
        refuse("enable_gqa=True with fewer key heads", "repeat the key and value heads")
    if inputs.dropout_p > 0 and not can.dropout:
        refuse(f"dropout_p={inputs.dropout_p}", "set dropout_p=0.0")
    if torch.is_grad_enabled() and can.gradient != "full":
        asked = [name for name, t in inputs.tensors if t.requires_grad]
        if can.gradient == "values":
            asked = [name for name in asked if not name.startswith("value")]
        if inputs.mask is not None and inputs.mask.requires_grad:
            asked.append("attn_mask")
        if asked:
            refuse(f"a gradient for {', '.join(asked)}", "call it under torch.no_grad() or detach its inputs")
    _check_tables(method, inputs)
    if state is not None and type(method).learned is Method.learned:
        raise ValueError(f"state={type(state).__name__}: {label} learns nothing; pass state=None")
    if impl == "native" and type(method).native is Method.native:
        raise Unsupported(f"impl='native': there is no compiled kernel for {method.name}; use impl='auto'")


def _check_value(value: Tensor | Projection, batch: int, kv_heads: int, n_k: int) -> int:
    """The value's width per head."""
    if isinstance(value, Tensor):
        if tuple(value.shape[:3]) != (batch, kv_heads, n_k):
            raise ValueError(f"value {_size(value)} does not fit key: expected [{batch}, {kv_heads}, {n_k}, any]")
        return value.shape[3]
    x, weight, bias = value
    if x.ndim != 3 or tuple(x.shape[:2]) != (batch, n_k):
        raise ValueError(f"value.x must be [{batch}, {n_k}, in_features], got {_size(x)}")
    if weight.ndim != 2 or weight.shape[1] != x.shape[2] or (kv_heads and weight.shape[0] % kv_heads):
        raise ValueError(
            f"value.weight must be [{kv_heads} heads x width, {x.shape[2]}] as in nn.Linear, got {_size(weight)}"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"value.bias must be [{weight.shape[0]}], got {_size(bias)}")
    return weight.shape[0] // max(kv_heads, 1)


def _check_scalars(
    dropout_p: float, scale: float | None, seed: int | None, impl: str, streams: Sequence[int] | None, kv_heads: int
) -> None:
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, int | float) or not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p={dropout_p!r} must be a number from 0 to 1")
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise TypeError(f"scale={scale!r} must be a number or None")
    if scale is not None and not abs(scale) <= sys.float_info.max:
        raise ValueError(f"scale={scale if isinstance(scale, float) else 'an integer beyond 1e308'} must be finite")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"seed={seed!r} must be an integer or None")
    if impl not in ("auto", "reference", "native"):
        raise ValueError(f"impl={impl!r} is not one of 'auto', 'reference', 'native'")
    if streams is not None:
        numbers = list(streams) if isinstance(streams, Sequence) else []
        if len(numbers) != kv_heads or not all(type(n) is int and 0 <= n < 2**32 for n in numbers):
            raise ValueError(f"streams={streams!r} must hold one integer in [0, 2^32) per key head ({kv_heads})")


def _check_mask(mask: Tensor | None, batch: int, heads: int, n_q: int, n_k: int, device: torch.device) -> Tensor | None:
    """The mask as a 4-D tensor; additive entries at the lowest finite number count as -inf."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise TypeError(f"attn_mask must be a tensor, got {type(mask).__name__}")
    if mask.is_nested:
        raise TypeError("attn_mask is a nested tensor; use attn_mask.to_padded_tensor(...)")
    if mask.dtype not in (torch.bool, *_FLOATS):
        raise TypeError(
            f"attn_mask has dtype {mask.dtype}; use boolean (True = attend), or additive float32, float64, bfloat16 or "
            "float16"
        )
    if mask.layout != torch.strided:
        raise TypeError(f"attn_mask has layout {mask.layout}; use a dense tensor, such as attn_mask.to_dense()")
    if mask.device != device:
        raise ValueError(f"attn_mask is on {mask.device} but query is on {device}; move one of them")
    full = (batch, heads, n_q, n_k)
    shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    if len(shape) != 4 or any(have not in (1, want) for have, want in zip(shape, full, strict=True)):
        raise ValueError(f"attn_mask {_size(mask)} does not broadcast to [B, H, n_q, n_k] = {list(full)}")
    mask = mask.reshape(shape)
    if mask.dtype == torch.bool:
        return mask
    lowest = torch.finfo(mask.dtype).min
    return mask.masked_fill(mask <= lowest, -torch.inf).to(torch.promote_types(mask.dtype, torch.float32))


def _split_padding(mask: Tensor | None, batch: int, n_k: int) -> tuple[Tensor | None, Tensor | None]:
    """(key padding, other mask). A mask that is the same for all heads and queries, and hides or shows, is padding."""
    if mask is None:
        return None, None
    if mask.requires_grad:  # a learned bias, also where it is all zero now
        return None, mask
    if 0 in mask.shape:
        return mask.new_ones(batch, n_k, dtype=torch.bool), None
    row = mask[:, 0, 0, :]
    # However it is stored: what a mask means must not depend on whether it was written out.
    plain = all(mask.shape[axis] == 1 or mask.stride(axis) == 0 for axis in (1, 2))
    if not plain and not torch.equal(mask, row[:, None, None, :].expand_as(mask)):
        return None, mask
    if row.dtype != torch.bool:
        if not bool(((row == 0) | (row == -torch.inf)).all()):
            return None, mask  # a bias, not padding
        row = row == 0
    return row.expand(batch, n_k), None


def _size(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _kind(value: object) -> str:
    return f"{value.dtype} {_size(value)}" if isinstance(value, Tensor) else type(value).__name__


def _check_tables(method: Method, inputs: Inputs) -> None:
    """Refuse settings that this machine's memory cannot hold, before anything is allocated."""
    query = inputs.tensors[0][1]
    if method.budget is None or type(method).cost is Method.cost or query.device.type != "cpu":
        return
    batch, heads, _, width = query.shape
    needed, there = _table_bytes(method, batch, heads, width, inputs.value_dim), _memory()
    if needed > there:
        raise MemoryError(
            f"{method.name}: {method.budget}={getattr(method, method.budget)} needs tables of about "
            f"{needed / 2**30:.3g} GiB, and this machine has {there / 2**30:.3g}; lower {method.budget}"
        )


@lru_cache(maxsize=256)
def _table_bytes(method: Method, batch: int, heads: int, head_dim: int, value_dim: int) -> float:
    """Return the memory that a call on a single token takes: that of the settings alone."""
    return method.cost(
        Shape(batch=batch, heads=heads, queries=1, keys=1, head_dim=head_dim, value_dim=value_dim, in_features=1)
    ).bytes


@cache
def _memory() -> float:
    """Return the memory of this machine, or infinity if it cannot be read."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return math.inf
