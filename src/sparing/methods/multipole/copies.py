"""Copies of keys and values in few bits, and what a query makes of them.

Tokens are copied in blocks. A channel of a block has a lowest number and a step: x is about low + step * code. Keys
take 4 bits, from the smallest to the largest of the block. Values take 4 bits in the same way, or 2 bits, in steps of
one standard deviation around the mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparing.native.tensors import widened

_ENTRIES = 2**16  # of tokens that are copied at once
GROUP = 16  #: tokens whose codes lie together
KEY_BITS = 4
_WHOLE = 127  # largest number that an entry of a query, or the weight of a key, is rounded to
_CODE_VARIANCE = 21.25  # of codes from 0 to 15 that are equally likely


class Copy(NamedTuple):
    """Tokens (B, H, T * block, d) in few bits."""

    codes: Tensor  # (B, H, T, block, d) uint8
    scales: Tensor  # (2, B, H, T, d): low, step
    bits: int

    def numbers(self) -> Tensor:
        """Return what the codes stand for, (B, H, T * block, d)."""
        low, step = self.scales.unsqueeze(4).unbind(0)
        return (low + step * self.codes.to(low.dtype)).flatten(2, 3)

    def middle(self) -> Tensor:
        """Return the number in the middle of the codes, (B, H, T, d)."""
        low, step = self.scales.unbind(0)
        return low + (2**self.bits - 1) / 2 * step


def copy_keys(k: Tensor, block: int, sinks: int = 0) -> Copy:
    """Copy complete blocks of keys (B, H, n, d); the first `sinks` keys, which are read in any case, set no range."""
    made = _by_pieces(k, block, lambda x: _between(x, KEY_BITS))
    if 0 < sinks < block and made.codes.shape[2]:
        first = widened(k[:, :, :block]).clone()
        first[:, :, :sinks] = first[:, :, sinks : sinks + 1]
        again = copy_keys(first, block)
        made.codes[:, :, :1], made.scales[:, :, :, :1] = again.codes, again.scales
    return made


def copy_values(v: Tensor, block: int, bits: int) -> Copy:
    """Copy complete blocks of values (B, H, n, e)."""
    return _by_pieces(v, block, lambda x: _between(x, bits) if bits == KEY_BITS else _around_mean(x, bits))


def _around_mean(x: Tensor, bits: int) -> Copy:
    mean = x.mean(3, keepdim=True)
    off = x - mean
    size = off.abs().amax(3, keepdim=True)  # squares of tiny values would underflow
    step = size * _divided(off, size).square().mean(3, keepdim=True).sqrt()
    return _coded(x, mean - (2**bits - 1) / 2 * step, step, bits)


def _by_pieces(x: Tensor, block: int, make: Callable[[Tensor], Copy]) -> Copy:
    """Copy complete blocks of tokens (B, H, n, d), some at a time: `make` needs several times the memory of its input.

    Tokens of 16 bits are converted to float32.
    """
    count = x.shape[2] // block
    whole = x[:, :, : count * block].unflatten(2, (count, block))
    at_once = max(_ENTRIES // max(x.shape[0] * x.shape[1] * block * x.shape[3], 1), 1)
    parts = [make(widened(piece)) for piece in whole.split(at_once, 2)]
    if len(parts) == 1:
        return parts[0]
    codes, scales = torch.cat([x.codes for x in parts], dim=2), torch.cat([x.scales for x in parts], dim=3)
    return Copy(codes, scales, parts[0].bits)


def _between(x: Tensor, bits: int) -> Copy:
    low, high = x.amin(3, keepdim=True), x.amax(3, keepdim=True)
    return _coded(x, low, (high - low) / (2**bits - 1), bits)


def _coded(x: Tensor, low: Tensor, step: Tensor, bits: int) -> Copy:
    codes = _divided(x - low, step).round().clamp(0, 2**bits - 1).to(torch.uint8)
    return Copy(codes, torch.stack([low.squeeze(3), step.squeeze(3)]), bits)


def _divided(x: Tensor, by: Tensor) -> Tensor:
    return torch.where(by > 0, x / by.masked_fill(by == 0, 1.0), 0.0)


class Estimate(NamedTuple):
    """Logits of copied keys, and how uncertain they are."""

    logits: Tensor  # (B, H, n_q, T, block)
    sigma: Tensor  # (B, H, n_q, T): standard deviation of their errors


def estimate(q: Tensor, keys: Copy, scale: float) -> Estimate:
    """Return scale * q.k from the copies, for q (B, H, n_q, d), as kernels compute it.

    The products of a query with the steps of a block are rounded to 8 bits. What rounding leaves out is added for codes
    in the middle of their range.
    """
    low, step = keys.scales.unsqueeze(4).unbind(0)  # (B, H, T, 1, d)
    scaled = (q * scale).unsqueeze(2)  # (B, H, 1, n_q, d)
    products = scaled * step  # (B, H, T, n_q, d)
    top = products.abs().amax(-1, keepdim=True)
    small = top < (2.0**-900 if q.dtype == torch.float64 else 2.0**-100)  # logits of less are zero to any weight
    unit = (top / _WHOLE).masked_fill(small, 0.0)
    exact = products * (_WHOLE / top.masked_fill(small, torch.inf))
    whole = exact.round()
    base = (scaled * low).sum(-1, keepdim=True) + 7.5 * (products - unit * whole).sum(-1, keepdim=True)
    logits = base + unit * (whole @ keys.codes.to(q.dtype).mT)  # (B, H, T, n_q, block)
    sigma = unit.squeeze(-1) * ((exact.square().sum(-1) + _CODE_VARIANCE * q.shape[-1]) / 12).sqrt()
    return Estimate(logits.transpose(2, 3), sigma.transpose(2, 3))


def round_weights(mass: Tensor) -> Tensor:
    """Round weights (..., n) to 7 bits of the largest in each group of tokens, as kernels do."""
    grouped = mass.unflatten(-1, (-1, GROUP))
    unit = grouped.amax(-1, keepdim=True) / _WHOLE
    return ((_divided(grouped, unit)).round() * unit).flatten(-2)


def missed_variance(values: Copy, noise: Tensor) -> Tensor:
    """Return the expected squared error that a token of weight 1 makes, (B, H, n_q, T).

    noise: (B, H, n_q, T) variance of its logit.
    """
    scatter = values.scales[1].square().sum(-1).unsqueeze(2)  # (B, H, 1, T)
    if values.bits == 2:  # steps are standard deviations
        return scatter * (noise + 0.12)
    return scatter * 18.75 * (noise + 1 / 225)  # equally likely codes from 0 to 15


def pack_keys(codes: Tensor) -> Tensor:
    """Lay the codes of keys (B, H, T, block, d) out for kernels: (B, H, T, block / 16, d / 8, 64)."""
    d = codes.shape[-1]
    x = pad(codes, (0, -d % 8)).unflatten(-1, (-1, 2, 4)).unflatten(3, (-1, GROUP))  # (B, H, T, G, 16, C, 2, 4)
    return (x[..., 0, :] | x[..., 1, :] << 4).transpose(4, 5).flatten(-2).contiguous()


def pack_values(codes: Tensor, bits: int) -> Tensor:
    """Lay the codes of values (B, H, T, block, e) out for kernels: (B, H, T, block / 16, lanes, 256)."""
    parts = 8 // bits
    x = pad(codes, (0, -codes.shape[-1] % (16 * parts))).unflatten(-1, (-1, parts, 16)).unflatten(3, (-1, 4, 4))
    joined = x[..., 0, :]  # (B, H, T, G, 4, 4, L, 16)
    for part in range(1, parts):
        joined = joined | x[..., part, :] << bits * part
    return joined.permute(0, 1, 2, 3, 6, 4, 7, 5).flatten(-3).contiguous()


def unpack_keys(packed: Tensor, d: int) -> Tensor:
    """Return the codes (B, H, T, block, d) that `pack_keys` laid out."""
    x = packed.unflatten(-1, (GROUP, 4)).transpose(4, 5)  # (B, H, T, G, 16, C, 4)
    return torch.stack([x & 15, x >> 4], dim=-2).flatten(-3)[..., :d].flatten(3, 4)


def unpack_values(packed: Tensor, e: int, bits: int) -> Tensor:
    """Return the codes (B, H, T, block, e) that `pack_values` laid out."""
    x = packed.unflatten(-1, (4, 16, 4)).permute(0, 1, 2, 3, 5, 7, 4, 6)  # (B, H, T, G, 4, 4, L, 16)
    parts = [x >> shift & 2**bits - 1 for shift in range(0, 8, bits)]
    return torch.stack(parts, dim=-2).flatten(-3)[..., :e].flatten(3, 5)
