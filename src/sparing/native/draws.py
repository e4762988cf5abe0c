"""Random numbers of `sparing.draws`, by a kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from sparing.native.library import schemas

schemas.define("draw_bits(Tensor streams, int seed, int purpose, int count) -> Tensor")


def draw_bits(streams: Tensor, seed: int, purpose: int, count: int) -> Tensor:
    """(H, count) numbers of 32 random bits, as int64: those of `Draws(seed, streams).bits` for that purpose.

    seed: as a signed number of 64 bits. purpose: the checksum of its name.
    """
    return torch.ops.sparing.draw_bits(streams.contiguous(), seed, purpose, count)


@torch.library.register_fake("sparing::draw_bits", lib=schemas)
def _(streams: Tensor, seed: int, purpose: int, count: int) -> Tensor:
    return streams.new_empty(streams.shape[0], count)
