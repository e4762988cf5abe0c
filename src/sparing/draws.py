"""Counter-based random numbers: the same key gives the same number, whatever else runs.

Every draw is a pure function of (seed, purpose, head stream, index). Nothing depends on the batch slot, on
batch-mates, on threads or on the order of calls, and torch's global generator is never touched. The backward pass
and the kernels draw the same numbers again instead of storing them.

The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): key = seed,
counter = (index low, index high, stream, purpose).
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from sparing import native
from sparing.native.random import random_bits, random_uniform
from sparing.spec import shown

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def check_seed(seed: object, name: str = "seed") -> None:
    """Refuse a seed that is neither an integer nor None. Integers of any size and sign are used modulo 2^64."""
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"{name}={shown(seed)} must be an integer or None; integers are used modulo 2^64")


def _split(number: int) -> tuple[int, int]:
    return number & _LOW, (number >> 32) & _LOW


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return four 32-bit words, as non-negative int64, for each counter. Counter words are int64 in [0, 2^32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key[0] & _LOW, key[1] & _LOW
    for _ in range(10):
        # int64 products wrap modulo 2^64, so both halves of the unsigned 32 x 32 product are correct.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _LOW) ^ c1 ^ k0, p1 & _LOW, ((p0 >> 32) & _LOW) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def checksum(purpose: str) -> int:
    """Return the 32 bits of the counter that stand for a purpose."""
    return zlib.crc32(purpose.encode())


@dataclass(frozen=True)
class Draws:
    """The random numbers of one call: `seed`, and one stream number per head."""

    seed: int
    streams: Tensor  # (H,) int64: the stream number of each head, shared by the heads of one key-value head

    @property
    def signed_seed(self) -> int:
        """The seed in the form that kernels take: a signed integer with the same 64 bits."""
        return (self.seed + 2**63) % 2**64 - 2**63

    def _words(self, purpose: str, block: Tensor) -> Tensor:
        """Return four 32-bit words for each block number: (H or 1, ...) -> (H, ..., 4)."""
        streams = self.streams.to(block.device).view(-1, *[1] * (block.ndim - 1))
        tag = torch.full_like(block, checksum(purpose))
        counter = (block & _LOW, (block >> 32) & _LOW, streams & _LOW, tag)
        return torch.stack(torch.broadcast_tensors(*philox(counter, _split(self.seed))), dim=-1)

    def bits_at(self, purpose: str, index: Tensor) -> Tensor:
        """Return 32 random bits, as int64, for each index; the head axis comes first: (H or 1, ...) -> (H, ...)."""
        words = self._words(purpose, index >> 2)
        return words.gather(-1, (index & 3).expand(words.shape[:-1]).unsqueeze(-1)).squeeze(-1)

    def bits(self, purpose: str, *shape: int) -> Tensor:
        """Return `bits_at` of the indices 0, 1, 2, ... laid out as (H, *shape)."""
        count = math.prod(shape)
        if native.ready(torch.empty(0, device=self.streams.device)):
            found = random_bits(self.streams, self.signed_seed, checksum(purpose), count)
            return found.view(len(self.streams), *shape)
        blocks = torch.arange((count + 3) // 4, device=self.streams.device).unsqueeze(0)
        return self._words(purpose, blocks).flatten(1)[:, :count].reshape(-1, *shape)

    def uniform_at(self, purpose: str, index: Tensor) -> Tensor:
        """Return a float64 in (0, 1) for each index (H or 1, ...), such as a rank among valid tokens."""
        return (self.bits_at(purpose, index).double() + 0.5) / 2**32

    def uniform(self, purpose: str, *shape: int) -> Tensor:
        """Return float64 numbers in (0, 1), shape (H, *shape)."""
        if native.ready(torch.empty(0, device=self.streams.device)):
            found = random_uniform(self.streams, self.signed_seed, checksum(purpose), math.prod(shape))
            return found.view(len(self.streams), *shape)
        return (self.bits(purpose, *shape).double() + 0.5) / 2**32

    def normal(self, purpose: str, *shape: int) -> Tensor:
        """Return standard normal float64 numbers, shape (H, *shape), by the Box-Muller transform."""
        u, v = self.uniform(purpose, *shape, 2).unbind(-1)
        return (-2 * u.log()).sqrt() * (2 * math.pi * v).cos()

    def normal_norms(self, purpose: str, count: int, d: int) -> Tensor:
        """Return the lengths of vectors of d standard normal numbers, float64 (H, count).

        The sum of two squared normal numbers is exponentially distributed, so one exponential number is drawn for each
        pair, and a normal number only for the last entry of an odd d.
        """
        squares = -2 * self.uniform(purpose, count, (d + 1) // 2).log()
        if d % 2:
            turn = self.uniform(f"{purpose}.odd", count)
            squares[..., -1] *= (math.pi * turn).cos().square()
        return squares.sum(-1).sqrt()

    def signs(self, purpose: str, *shape: int) -> Tensor:
        """Return -1.0 or 1.0 (float64) with equal probability, shape (H, *shape)."""
        return (self.bits(purpose, *shape) & 1).double() * 2 - 1


def fold(seed: int, *counters: int) -> int:
    """Return a seed for one part of a computation (a layer, a step), independent of those of other parts."""
    for number in counters:
        low, high = _split(number)
        counter = (torch.tensor(low), torch.tensor(high), torch.tensor(0), torch.tensor(checksum("fold")))
        words = philox(counter, _split(seed))
        seed = (int(words[0]) | int(words[1]) << 32) & (2**63 - 1)
    return seed
