"""Turn the arguments of `attention()` into a `Call`, or raise an error that names the argument and the way out."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from sparing.call import Call, Impl
from sparing.contract import Method, Projection, Shape, Unsupported
from sparing.draws import Draws, check_seed
from sparing.mask import FLOATS, Mask, read_mask
from sparing.quarantine import LARGEST_SCALE


def check_call(
    query: Tensor,
    key: Tensor,
    value: Tensor | Projection,
    chosen: Method,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    seed: int | None = None,
    seeded: bool = True,
    impl: Impl = "auto",
    query_mask: Tensor | None = None,
    streams: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
    **fields: Any,
) -> Call:
    """Return the call that the arguments of `attention()` describe, or raise an error that names what is wrong.

    seeded: False if the seed was drawn for this call and not passed by the user. offsets: of packed sequences.
    fields: further fields of the `Call`.
    """
    tensors = _check_tensors(query, key, value)
    batch, heads, _, d = query.shape
    kv_heads, n_k = key.shape[1], key.shape[2]
    if key.shape[0] != batch or key.shape[3] != d:
        raise ValueError(f"key {_size(key)} does not fit query {_size(query)}: batch and width must agree")
    value_dim = check_value(value, batch, kv_heads, n_k)
    if kv_heads != heads and not enable_gqa:
        raise ValueError(f"key has {kv_heads} heads but query has {heads}; pass enable_gqa=True to share key heads")
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(f"key has {kv_heads} heads, which does not divide the {heads} heads of query")
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}={flag!r} must be True or False")
    _check_scalars(dropout_p, scale, seed, impl, streams, kv_heads)
    mask = read_mask(attn_mask, query_mask, is_causal=is_causal, query=query, key=key)
    if offsets is not None:
        mask = replace(mask, offsets=tuple(offsets))
    factor = float(scale) if scale is not None else 1 / math.sqrt(d)
    dtype = _working_type(query.dtype, factor, mask)
    if mask.bias is not None:
        mask = replace(mask, pattern=mask.bias.to(dtype))
    groups = heads // kv_heads if kv_heads else 1
    numbers = torch.tensor(list(streams) if streams is not None else range(kv_heads), device=query.device)
    call = Call(
        scale=factor, mask=mask, draws=Draws(0, numbers.repeat_interleave(groups)), groups=groups, dropout_p=dropout_p,
        slot_keyed_dropout=seed is None or not seeded, impl=impl, dtype=dtype, **fields,
    )  # fmt: skip
    _check_support(chosen, call, tensors)
    _check_tables(chosen, query, value_dim)
    if seed is None and (chosen.supports.stochastic or dropout_p > 0):  # otherwise torch's generator is left alone
        seed = int(torch.randint(2**63 - 1, ()))
    return replace(call, draws=replace(call.draws, seed=(seed or 0) & (2**64 - 1)))


def _working_type(dtype: torch.dtype, scale: float, mask: Mask) -> torch.dtype:
    """Return float64 for float64 inputs and where the scale or the additive mask needs its range, else float32."""
    if dtype == torch.float64 or abs(scale) > LARGEST_SCALE:
        return torch.float64
    bias = mask.bias
    wide = bias is not None and bias.dtype == torch.float64 and bool((bias.isfinite() & bias.float().isinf()).any())
    return torch.float64 if wide else torch.float32


def _check_tensors(query: Tensor, key: Tensor, value: Tensor | Projection) -> list[tuple[str, Tensor]]:
    """Return the tensors of a call with their names, after checking layout, device, type and number of dimensions."""
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
        if tensor.dtype not in FLOATS:
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
    return tensors


def _check_support(method: Method, call: Call, tensors: list[tuple[str, Tensor]]) -> None:
    """Refuse what the method does not claim to support."""
    can, mask, names = method.supports, call.mask, dict(tensors)
    n_q, n_k = names["query"].shape[2], names["key"].shape[2]

    # Where the setting can do less than its class, the message shows the setting.
    label = str(method) if can != type(method).supports else method.name or type(method).__name__

    def refuse(argument: str, way_out: str) -> None:
        raise Unsupported(f"{label} does not support {argument}; {way_out}")

    if "value" in names and can.projection:
        refuse("a projected value (it samples the projection itself)", "pass value=Projection(x, weight, bias)")
    if mask.causal and not can.causal:
        refuse("is_causal=True (it mixes all positions)", "use a causal method such as 'window' or 'exact'")
    if mask.keep is not None and not can.key_padding:
        refuse("key padding in attn_mask", "call it on unpadded sequences")
    if mask.pattern is not None and not can.attn_mask:
        refuse(
            f"attn_mask of shape {_size(mask.pattern)} that differs by query or head, or holds a bias",
            "pass key padding as a boolean mask [B, 1, 1, n_k] (or additive, with -inf for hidden keys), causality as "
            "is_causal=True, or use 'exact'",
        )
    if mask.bias is not None and can.attn_mask == "boolean":
        refuse("an additive attn_mask", "pass a boolean mask (True = attend), or use 'exact'")
    if n_q != n_k and not can.cross_attention:
        refuse(f"n_q={n_q} != n_k={n_k}", "use a method with cross attention such as 'exact'")
    if call.groups > 1 and not can.gqa:
        refuse("enable_gqa=True with fewer key heads", "repeat the key and value heads")
    if call.dropout_p > 0 and not can.dropout:
        refuse(f"dropout_p={call.dropout_p}", "set dropout_p=0.0")
    if torch.is_grad_enabled() and can.gradient != "full":
        asked = [name for name, t in tensors if t.requires_grad]
        if can.gradient == "values":
            asked = [name for name in asked if not name.startswith("value")]
        if mask.pattern is not None and mask.pattern.requires_grad:
            asked.append("attn_mask")
        if asked:
            refuse(f"a gradient for {', '.join(asked)}", "call it under torch.no_grad() or detach its inputs")
    if call.state is not None and type(method).learned is Method.learned:
        raise ValueError(f"state={type(call.state).__name__}: {label} learns nothing; pass state=None")
    if call.impl == "native" and type(method).native is Method.native:
        raise Unsupported(f"impl='native': there is no compiled kernel for {method.name}; use impl='auto'")


def check_value(value: Tensor | Projection, batch: int, kv_heads: int, n_k: int) -> int:
    """Check the shape of the value and return its width per head."""
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
    check_seed(seed)
    if impl not in ("auto", "reference", "native"):
        raise ValueError(f"impl={impl!r} is not one of 'auto', 'reference', 'native'")
    if streams is not None:
        numbers = list(streams) if isinstance(streams, Sequence) else []
        if len(numbers) != kv_heads or not all(type(n) is int and 0 <= n < 2**32 for n in numbers):
            raise ValueError(f"streams={streams!r} must hold one integer in [0, 2^32) per key head ({kv_heads})")


def _size(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _check_tables(method: Method, query: Tensor, value_dim: int) -> None:
    """Refuse settings that this machine's memory cannot hold, before anything is allocated."""
    if method.budget is None or type(method).cost is Method.cost or query.device.type != "cpu":
        return
    batch, heads, _, width = query.shape
    needed, there = _table_bytes(method, batch, heads, width, value_dim), _memory()
    if needed > there:
        raise MemoryError(
            f"{method.name}: {method.budget}={getattr(method, method.budget)} needs tables of about "
            f"{needed / 2**30:.3g} GiB, and this machine has {there / 2**30:.3g} GiB; lower {method.budget}"
        )


@lru_cache(maxsize=256)
def _table_bytes(method: Method, batch: int, heads: int, head_dim: int, value_dim: int) -> float:
    """Return the bytes that a call on a single token takes: those that the settings alone need."""
    return method.cost(
        Shape(batch=batch, heads=heads, queries=1, keys=1, head_dim=head_dim, value_dim=value_dim, in_features=1)
    ).bytes


@cache
def _memory() -> float:
    """Return the bytes of memory of this machine, or infinity if they cannot be read."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return math.inf
