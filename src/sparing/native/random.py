"""Wrappers of the kernels for counter-based random numbers, the same as those of `sparing.draws`."""

from __future__ import annotations

import torch
from torch import Tensor

from sparing.native.library import schemas

schemas.define("random_bits(Tensor streams, int seed, int purpose, int count) -> Tensor")
schemas.define("random_uniform(Tensor streams, int seed, int purpose, int count) -> Tensor")


def random_bits(streams: Tensor, seed: int, purpose: int, count: int) -> Tensor:
    """Return (H, count) words of 32 random bits, as int64, for the streams (H,) of the heads.

    seed: a signed 64-bit integer. purpose: the checksum of its name.
    """
    return torch.ops.sparing.random_bits(streams.contiguous(), seed, purpose, count)


def random_uniform(streams: Tensor, seed: int, purpose: int, count: int) -> Tensor:
    """Return the same words as float64 numbers in (0, 1)."""
    return torch.ops.sparing.random_uniform(streams.contiguous(), seed, purpose, count)


@torch.library.register_fake("sparing::random_bits", lib=schemas)
def _(streams: Tensor, seed: int, purpose: int, count: int) -> Tensor:
    return streams.new_empty(streams.shape[0], count)


@torch.library.register_fake("sparing::random_uniform", lib=schemas)
def _(streams: Tensor, seed: int, purpose: int, count: int) -> Tensor:
    return streams.new_empty(streams.shape[0], count, dtype=torch.float64)
